/// @file
/// The time from the beginning of a snapshot until it is durable, compared with programs that write and sync
/// the same bytes.
///
///   durable/llmmem             a ring as large as the state; posix_io, the default: one write at a time
///   durable/llmmem_small_ring  the default ring
///   durable/llmmem_uring, llmmem_uring_small_ring   uring_io, where it was built in
///   durable/llmmem_cached      through the page cache
///   durable/raw_direct, raw_cached   pwrite of the state, 4 MiB each; fdatasync, fsync of the folder
///   durable/fio_*              the same amount, block, fallocate; end_fsync; its own clock
///
/// share_of_X: the share of X's rate in the same round. The goal is 0.9 of fio_uring's or more.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/disk.hpp"
#include "checkpoint/saves.hpp"

namespace {

using namespace llmmem_benchmarks;

struct durable_fixture {
  saved_state state{};
  bench_folder folder{};
};

const int added = [] {
  constexpr std::uint64_t usual = llmmem::checkpointer_options{}.ring_bytes;
  const std::vector<std::string> whom{"raw_direct",        "raw_cached",
                                      "fio_uring",         "fio_psync",
                                      "fio_cached",        "llmmem",
                                      "llmmem_small_ring",
#ifdef LLMMEM_BENCH_URING
                                      "llmmem_uring",      "llmmem_uring_small_ring",
#endif
                                      "llmmem_cached"};
  const auto make = [] {
    const auto fixture = std::make_shared<durable_fixture>();
    const auto raw = [=](page_cache how) -> take_turn {
      return [=] {
        fixture->folder.settle();
        return write_raw(fixture->folder.path, fixture->state.bytes(), how);
      };
    };
    const auto fio = [=](const char* settings) -> take_turn {
      return [=] {
        fixture->folder.settle();
        return write_by_fio(fixture->folder.path, state_bytes(), settings);
      };
    };
    const auto ours = [=]<class Engine>(std::uint64_t bytes, llmmem::direct_io direct, Engine*) -> take_turn {
      return [=] {
        llmmem::posix_storage_options options;
        options.direct = direct;
        return save_once<Engine>(fixture->folder, fixture->state, bytes, until::durable, options);
      };
    };
    constexpr llmmem::posix_io* posix = nullptr;
    return std::vector<take_turn>{
        raw(page_cache::past_it),
        raw(page_cache::through_it),
        fio("--direct=1 --ioengine=io_uring --iodepth=8"),
        fio("--direct=1 --ioengine=psync"),
        fio("--direct=0 --ioengine=psync"),
        ours(whole_ring(), llmmem::direct_io::preferred, posix),
        ours(usual, llmmem::direct_io::preferred, posix),
#ifdef LLMMEM_BENCH_URING
        ours(whole_ring(), llmmem::direct_io::preferred, static_cast<llmmem::uring_io*>(nullptr)),
        ours(usual, llmmem::direct_io::preferred, static_cast<llmmem::uring_io*>(nullptr)),
#endif
        ours(whole_ring(), llmmem::direct_io::never, posix)};
  };
  return add_experiment("durable", "", whom, make,
                        [](benchmark::State& state, const outcome& all, const std::string& who) {
                          for (const char* limit : {"raw_direct", "fio_uring", "fio_psync", "fio_cached"})
                            count_share(state, all, who, limit);
                          if (all.has(who)) {
                            state.SetBytesProcessed(static_cast<std::int64_t>(state_bytes()));
                          }
                        });
}();

}  // namespace
