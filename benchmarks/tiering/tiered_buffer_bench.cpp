/// The cost of a tiered buffer in addition to its copies. Each row has its floor: `memcpy` between the same
/// amounts of memory, or a `file_queue` that reads the same file. Also the cost of opening one with chunks in
/// it.
///
/// LLMMEM_BENCH_IO_DIR   folder of the file (the system's for temporary files)

#include <llmmem/arena/range_arena.hpp>
#include <llmmem/codec/identity.hpp>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/tiered_buffer.hpp>
#include <llmmem/tiering/persistent_file_space.hpp>
#include <llmmem/transfer/file_space.hpp>

#include <benchmark/benchmark.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace llmmem;

constexpr std::uint64_t chunk_bytes = std::uint64_t{1} << 20;
constexpr std::uint64_t top_chunks = 16;
constexpr std::uint64_t all_chunks = 64;

template <class Buffer>
[[nodiscard]] std::vector<chunk_handle> filled(Buffer& buffer, std::uint64_t count, std::uint64_t bytes) {
  std::vector<chunk_handle> chunks;
  for (std::uint64_t i = 0; i < count; ++i) {
    chunks.push_back(buffer.create(bytes).value());
    const auto lease = buffer.write(chunks.back()).value();
    std::memset(lease.span().data(), static_cast<int>(i), bytes);
  }
  buffer.flush().value();
  return chunks;
}

/// Small chunks, all of them in tier 0.
struct resident {
  host_space above{{.budget = 16 << 20}};
  host_space beneath{{.budget = 16 << 20}};
  tiered_buffer<host_space, host_space> buffer{{}, {above, 8 << 20}, {beneath, 8 << 20}};
  std::vector<chunk_handle> chunks;

  explicit resident(std::int64_t count) : chunks(filled(buffer, static_cast<std::uint64_t>(count), 4096)) {}
};

void lease_to_read(benchmark::State& state) {
  resident world(state.range(0));
  std::size_t at = 0;
  for (auto _ : state) {
    const auto lease = world.buffer.read(world.chunks[at]);
    benchmark::DoNotOptimize(lease->span().data());
    if (++at == world.chunks.size()) at = 0;
  }
}

void lease_to_update(benchmark::State& state) {
  resident world(state.range(0));
  std::size_t at = 0;
  for (auto _ : state) {
    const auto lease = world.buffer.update(world.chunks[at], 64, 64);
    benchmark::DoNotOptimize(lease->span().data());
    if (++at == world.chunks.size()) at = 0;
  }
}

void prefetch_of_what_is_there(benchmark::State& state) {
  resident world(state.range(0));
  std::size_t at = 0;
  for (auto _ : state) {
    benchmark::DoNotOptimize(world.buffer.prefetch(world.chunks[at]));
    if (++at == world.chunks.size()) at = 0;
  }
}

/// All chunks in turn, of which a quarter fits: each lease brings one in and drops a clean one.
void host_to_host(benchmark::State& state) {
  host_space above({.budget = top_chunks * chunk_bytes});
  host_space beneath({.budget = all_chunks * chunk_bytes});
  tiered_buffer<host_space, host_space> buffer({}, {above, top_chunks * chunk_bytes},
                                               {beneath, all_chunks * chunk_bytes});
  const auto chunks = filled(buffer, all_chunks, chunk_bytes);
  std::size_t at = 0;
  for (auto _ : state) {
    benchmark::DoNotOptimize(buffer.read(chunks[at]).value().span().data());
    if (++at == chunks.size()) at = 0;
  }
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(chunk_bytes));
}

void host_to_host_memcpy(benchmark::State& state) {
  host_space space({.budget = (top_chunks + all_chunks) * chunk_bytes});
  const auto above = space.try_allocate(top_chunks * chunk_bytes, 4096).value();
  const auto beneath = space.try_allocate(all_chunks * chunk_bytes, 4096).value();
  std::memset(above.data, 1, above.bytes);
  std::memset(beneath.data, 1, beneath.bytes);
  std::uint64_t at = 0;
  for (auto _ : state) {
    std::memcpy(above.data + at % top_chunks * chunk_bytes, beneath.data + at % all_chunks * chunk_bytes,
                chunk_bytes);
    benchmark::ClobberMemory();
    ++at;
  }
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(chunk_bytes));
}

[[nodiscard]] std::string path_of_file() {
  const char* const folder = std::getenv("LLMMEM_BENCH_IO_DIR");
  const std::filesystem::path where =
      folder != nullptr ? std::filesystem::path(folder) : std::filesystem::temp_directory_path();
  return (where / fmt::format("llmmem-bench-tiers-{}", ::getpid())).string();
}

struct removed_file {
  std::string path = path_of_file();
  removed_file() = default;
  removed_file(const removed_file&) = delete;
  removed_file& operator=(const removed_file&) = delete;
  ~removed_file() { std::filesystem::remove(path); }
};

void file_to_host(benchmark::State& state) {
  const removed_file file;
  host_space above({.budget = top_chunks * chunk_bytes});
  file_space<> disk(file.path, {.budget = all_chunks * chunk_bytes,
                                .queue = {.driver = llmmem::transfer::driven_by::waiters}});
  tiered_buffer<host_space, file_space<>> buffer({}, {above, top_chunks * chunk_bytes},
                                                 {disk, all_chunks * chunk_bytes});
  const auto chunks = filled(buffer, all_chunks, chunk_bytes);
  std::size_t at = 0;
  for (auto _ : state) {
    benchmark::DoNotOptimize(buffer.read(chunks[at]).value().span().data());
    if (++at == chunks.size()) at = 0;
  }
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(chunk_bytes));
}

/// @param verifies  whether arrived bytes are verified, as in a tier.
void file_to_host_queue(benchmark::State& state, bool verifies) {
  const removed_file removed;
  host_space space({.budget = top_chunks * chunk_bytes});
  const auto above = space.try_allocate(top_chunks * chunk_bytes, 4096).value();
  const io_file file(removed.path, {.mode = open_mode::create});
  file_queue<> queue({.driver = llmmem::transfer::driven_by::waiters});
  std::memset(above.data, 1, above.bytes);
  for (std::uint64_t i = 0; i < all_chunks; ++i)
    queue.start(write_to(file, i * chunk_bytes, above.span().first(chunk_bytes))).value().wait();
  std::uint64_t at = 0;
  for (auto _ : state) {
    const auto into = above.span().subspan(at % top_chunks * chunk_bytes, chunk_bytes);
    queue.start(read_from(file, at % all_chunks * chunk_bytes, into)).value().wait();
    if (verifies) benchmark::DoNotOptimize(crc32c(0, into));
    ++at;
  }
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(chunk_bytes));
}

/// Places of 512 bytes with equal gaps, in an order as in a cache after some time.
[[nodiscard]] std::vector<std::uint64_t> scattered_places(std::uint64_t count) {
  std::vector<std::uint64_t> places;
  for (std::uint64_t i = 0; i < count; ++i)
    places.push_back(i * 1024);
  std::uint64_t random = 1;
  for (std::uint64_t i = count; i-- > 1;) {
    random = random * 6364136223846793005ULL + 1442695040888963407ULL;
    std::swap(places[i], places[(random >> 33) % (i + 1)]);
  }
  return places;
}

/// Opens a persistent tier with that many chunks, and a buffer over it.
void reopen(benchmark::State& state) {
  const auto count = static_cast<std::uint64_t>(state.range(0));
  removed_file file;
  const persistent_file_options options{
      .space = {.budget = count * 1024, .queue = {.driver = llmmem::transfer::driven_by::waiters}},
      .max_chunks = static_cast<std::uint32_t>(count)};
  const auto open_space = [&] { return std::make_unique<persistent_file_space<>>(file.path, options); };
  {
    const auto space = open_space();
    const auto range = space->try_allocate(count * 1024, 1).value();
    std::uint64_t id = 0;
    for (const std::uint64_t at : scattered_places(count)) {
      space->index()
          .keep({.key = key_from_id(++id),
                 .offset = persistent_file_space<>::offset_of(range.data) + at,
                 .bytes = 512,
                 .stored = 512,
                 .format = identity_codec::format_id,
                 .checksum = 0})
          .value();
    }
  }
  host_space host({.budget = 1 << 20});
  for (auto _ : state) {
    const auto space = open_space();
    tier_place place(*space, count * 1024, 512);
    place.max_pieces = static_cast<std::uint32_t>(2 * count + 2);
    tiered_buffer<host_space, persistent_file_space<>> buffer(
        {.max_chunks = static_cast<std::uint32_t>(count)}, {host, 1 << 20}, place);
    if (space->recovery().kept != count) state.SkipWithError(space->recovery().message().c_str());
  }
  std::filesystem::remove(file.path + ".index");
  state.counters["ns_per_chunk"] =
      benchmark::Counter(static_cast<double>(state.iterations()) * static_cast<double>(count) * 1e-9,
                         benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}

/// The part of the cost for finding the places.
void place_at(benchmark::State& state, piece_lookup lookup) {
  const auto count = static_cast<std::uint64_t>(state.range(0));
  std::byte* const base = reinterpret_cast<std::byte*>(std::uintptr_t{1} << 40);
  const auto places = scattered_places(count);
  for (auto _ : state) {
    range_arena arena(base, count * 1024, 512, {.max_blocks = static_cast<std::uint32_t>(2 * count + 2)},
                      lookup);
    for (const std::uint64_t at : places)
      arena.allocate_at(base + at, 512).value();
  }
  state.counters["ns_per_chunk"] =
      benchmark::Counter(static_cast<double>(state.iterations()) * static_cast<double>(count) * 1e-9,
                         benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}

BENCHMARK(reopen)->Name("reopen/llmmem")->Arg(1000)->Arg(10'000)->Arg(100'000)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(place_at, index, piece_lookup::by_address_too)
    ->Name("place_at/by_address_too")
    ->Arg(1000)
    ->Arg(10'000)
    ->Arg(100'000)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(place_at, walk, piece_lookup::by_size)
    ->Name("place_at/by_size")
    ->Arg(1000)
    ->Arg(10'000)
    ->Unit(benchmark::kMillisecond);
BENCHMARK(lease_to_read)->Name("lease_read/llmmem")->Arg(64)->Arg(1024);
BENCHMARK(lease_to_update)->Name("lease_update/llmmem")->Arg(64)->Arg(1024);
BENCHMARK(prefetch_of_what_is_there)->Name("prefetch_resident/llmmem")->Arg(64)->Arg(1024);
BENCHMARK(host_to_host)->Name("host_to_host/llmmem");
BENCHMARK(host_to_host_memcpy)->Name("host_to_host/floor");
BENCHMARK(file_to_host)->Name("file_to_host/llmmem");
BENCHMARK_CAPTURE(file_to_host_queue, floor, false)->Name("file_to_host/floor");
BENCHMARK_CAPTURE(file_to_host_queue, verified, true)->Name("file_to_host/file_queue_and_crc32c");

}  // namespace
