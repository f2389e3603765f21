/// @file
/// Loads of a whole checkpoint into memory, compared with programs that read the same file. Before each turn
/// the file leaves this system's page cache, except for rows with warm; it may stay in a host's.
///
///   load/llmmem                each chunk held to its checksum, past the page cache (the default), 4 readers
///   load/llmmem_sizes          the same, believed
///   load/llmmem_cached         checksums, through an empty page cache
///   load/llmmem_warm, llmmem_sizes_warm   out of the page cache
///   load/find_and_load         the search that reads everything first, then the same as `llmmem`
///   load/raw_direct, raw_warm  4 readers of 4 MiB each, no copy to where it belongs
///   load/fio_*                 the same file and block; 4 under way, fio_warm out of the page cache
///
/// share_of_X: the share of X's rate in the same round. The goal is 0.9 of fio_uring's or more.

#include <memory>
#include <string>
#include <vector>

#include "checkpoint/disk.hpp"
#include "checkpoint/loads.hpp"

namespace {

using namespace llmmem_benchmarks;

const int added = [] {
  const std::vector<std::string> whom{
      "llmmem",     "llmmem_sizes", "llmmem_cached", "llmmem_warm", "llmmem_sizes_warm", "find_and_load",
      "raw_direct", "raw_warm",     "fio_uring",     "fio_cached",  "fio_warm"};
  const auto make = [] {
    using llmmem::direct_io;
    using llmmem::verification;
    const auto fixture = std::make_shared<load_fixture>();
    const auto ours = [=](verification how, direct_io direct, warmth begin,
                          bool is_searched = false) -> take_turn {
      return [=] { return fixture->load(how, direct, begin, is_searched); };
    };
    const auto raw = [=](page_cache how, warmth begin) -> take_turn {
      return [=] {
        fixture->make(begin);
        return read_raw(fixture->file(), 4, how);
      };
    };
    const auto fio = [=](const char* settings, warmth begin) -> take_turn {
      return [=] {
        fixture->make(begin);
        return read_by_fio(fixture->file(), fixture->file_bytes(), settings);
      };
    };
    return std::vector<take_turn>{
        ours(verification::checksums, direct_io::preferred, warmth::cold),
        ours(verification::sizes, direct_io::preferred, warmth::cold),
        ours(verification::checksums, direct_io::never, warmth::cold),
        ours(verification::checksums, direct_io::never, warmth::warm),
        ours(verification::sizes, direct_io::never, warmth::warm),
        ours(verification::checksums, direct_io::preferred, warmth::cold, true),
        raw(page_cache::past_it, warmth::cold),
        raw(page_cache::through_it, warmth::warm),
        fio("--direct=1 --ioengine=io_uring --iodepth=4 --invalidate=1", warmth::cold),
        fio("--direct=0 --ioengine=psync --invalidate=1", warmth::cold),
        fio("--direct=0 --ioengine=psync --invalidate=0", warmth::warm),
    };
  };
  return add_experiment(
      "load", "", whom, make, [](benchmark::State& state, const outcome& all, const std::string& who) {
        for (const char* limit : {"raw_direct", "raw_warm", "fio_uring", "fio_cached", "fio_warm"})
          count_share(state, all, who, limit);
        state.SetBytesProcessed(static_cast<std::int64_t>(state_bytes()));
      });
}();

}  // namespace
