// What a profiler sees of a tiered buffer, a checkpoint and a collective. A program of its own: LLMMEM_NVTX
// holds for whole programs.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <llmmem/async_checkpointer.hpp>
#include <llmmem/checkpoint/load.hpp>
#include <llmmem/comm/collectives.hpp>
#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/thread_network.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/tiered_buffer.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "nvtx/recorder.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

/// The names of all ranges since the last call; each has ended, in the domain of the library.
std::vector<std::string> names() {
  std::vector<std::string> all;
  for (const recorded_range& each : take_ranges()) {
    CHECK(each.domain == "llmmem");
    CHECK(each.has_ended);
    all.push_back(each.name);
  }
  return all;
}
bool has(const std::vector<std::string>& all, const std::string& name) {
  return std::ranges::find(all, name) != all.end();
}

}  // namespace

TEST_CASE("a tiered buffer's waits and flushes are ranges, and reads that hit are not") {
  host_space fast({.budget = 8192});
  host_space slow({.budget = 65536});
  tiered_buffer<host_space, host_space> buffer({}, {fast, 8192}, {slow, 65536});
  std::array<chunk_handle, 4> chunks{};
  for (chunk_handle& each : chunks) {
    each = buffer.create(4096).value();
    std::ranges::fill(buffer.write(each).value().span(), std::byte{1});
  }
  static_cast<void>(names());
  CHECK(buffer.read(chunks[3]).value().span().front() == std::byte{1});
  CHECK(names() == std::vector<std::string>{});
  CHECK(buffer.read(chunks[0]).value().span().front() == std::byte{1});
  CHECK(has(names(), "tiered_buffer wait"));
  std::ranges::fill(buffer.write(chunks[0]).value().span(), std::byte{2});
  buffer.flush().value();
  CHECK(names().front() == "tiered_buffer flush");
}

TEST_CASE("a save is a range of the caller and one of its thread, and a load is one") {
  const temporary_folder folder;
  posix_storage<> storage(folder.path().string());
  std::vector<float> weights(1024, 1.0F);
  {
    const std::array spans{std::as_bytes(std::span(std::as_const(weights)))};
    solo_coordinator coordinator(storage);
    async_checkpointer<> saves(
        coordinator,
        {{.name = "w", .type = safetensors_type::f32, .shape = {1024}, .group = "model", .part = {}}});
    static_cast<void>(saves.begin_snapshot(1, host_state_view(spans)));
    saves.flush();
  }
  const auto saved = names();
  CHECK(saved.front() == "checkpoint snapshot");
  CHECK(has(saved, "checkpoint persist"));
  const checkpoint_search search = find_checkpoint(storage);
  const wanted_tensor wanted[] = {
      {.name = "w", .part = {}, .type = safetensors_type::f32, .shape = std::vector<std::uint64_t>{1024}}};
  std::uint64_t bytes = 0;
  load_checkpoint(storage, *search.found, wanted,
                  [&](auto, std::uint64_t, std::span<const std::byte> part) { bytes += part.size(); });
  CHECK(bytes == 4096);
  CHECK(has(names(), "checkpoint load"));
}

TEST_CASE("a collective's range shows its bytes") {
  thread_network net(1);
  thread_endpoint end(net, seat_id{0});
  communicator ranks(end);
  ranks.join(ranks.after(10'000'000'000)).value();
  std::vector<float> values(10);
  collective_call call{.by = ranks.after(1'000'000'000), .tag = 1};
  static_cast<void>(take_ranges());
  all_reduce(ranks, std::as_writable_bytes(std::span(values)), sum_f32, call).value();
  const auto ranges = take_ranges();
  REQUIRE(ranges.size() == 1);
  CHECK(ranges[0].name == "all_reduce");
  CHECK(ranges[0].bytes == 40);
}
