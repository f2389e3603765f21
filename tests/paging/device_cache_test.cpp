#include <llmmem/device/device.hpp>
#include <llmmem/device/device_fence.hpp>
#include <llmmem/device/device_queue.hpp>
#include <llmmem/device/pinned.hpp>
#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/block_storage.hpp>
#include <llmmem/paging/upload_ring.hpp>
#include <llmmem/space/host.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <random>
#include <span>
#include <vector>

#include "support/comm_job.hpp"
#include "support/fake_device.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using llmmem_tests::bytes_of_seed;
using llmmem_tests::fake_device;
using llmmem_tests::fake_runtime;

using fake_space = basic_device_space<device_pool_source<fake_runtime>>;
using fake_pinned = basic_host_space<pinned_source<fake_runtime>>;
using fake_queue = basic_device_queue<fake_space, fake_runtime>;
using fake_fence = device_fence<fake_runtime>;

/// Blocks are given back behind points of a device's streams.
struct device_traits : paged_traits {
  using fence = fake_fence;
};

constexpr std::uint64_t block_bytes = 64;

/// An engine whose kernels are copies: new tokens are written on one stream, attention reads on another,
/// which nothing orders but fences.
struct device_engine {
  explicit device_engine(std::uint64_t seed) : random(seed), device(seed) {}

  struct request {
    sequence_id sequence{};
    std::vector<std::vector<std::byte>> blocks{};  // as they were written
    fake_fence written{};
  };

  void begin() {
    const auto sequence = cache.create().value();
    const std::uint64_t blocks = 1 + random() % 4;
    if (!cache.extend(sequence, blocks * 4)) return cache.release(sequence).value();
    request made{sequence, {}, {}};
    for (const block_id block : cache.blocks(sequence)) {
      sources.push_back(bytes_of_seed(block_bytes, random()));
      made.blocks.push_back(sources.back());
      made.written = writing.copy_in_async(storage[block], sources.back(), {}).value();
    }
    running.push_back(std::move(made));
  }
  /// Uploads a request's table, and reads the blocks that it names.
  void attend(const request& of) {
    const auto table = cache.blocks(of.sequence);
    const auto slot = ring.acquire_wait().value();
    std::memcpy(slot.staging.data, table.data(), table.size_bytes());
    const std::array after{ring.upload(writing, slot, table.size_bytes()).value(), of.written};
    tables.emplace_back(std::vector<std::byte>(table.size_bytes()),
                        std::vector<std::byte>(slot.staging.data, slot.staging.data + table.size_bytes()));
    auto there = slot.target;
    there.bytes = table.size_bytes();
    reading.copy_out_async(tables.back().first, there, after).value();
    for (std::size_t i = 0; i < table.size(); ++i) {
      seen.emplace_back(std::vector<std::byte>(block_bytes), of.blocks[i]);
      reading.copy_out_async(seen.back().first, storage[table[i]], {}).value();
    }
    ring.release_after(slot, reading.mark().value()).value();
  }
  void end(std::size_t which) {
    cache.release_after(running[which].sequence, reading.mark().value()).value();
    running.erase(running.begin() + static_cast<std::ptrdiff_t>(which));
  }

  std::mt19937_64 random;
  fake_device device;
  fake_space space{device_pool_source<fake_runtime>(device_id{0}, device), {.budget = 1 << 16}};
  fake_pinned pinned{pinned_source<fake_runtime>({}, device), {.budget = 1 << 20}};
  paged_allocator<device_traits> cache{{.blocks = 12, .block_tokens = 4, .max_sequences = 64}};
  block_storage<fake_space> storage{space, cache.physical_blocks(), block_bytes};
  upload_ring<fake_pinned, fake_space, fake_fence> ring{pinned, space, {.slot_bytes = 64}};
  std::vector<request> running{};
  // What is on its way reads and writes these.
  std::deque<std::vector<std::byte>> sources{};
  std::deque<std::pair<std::vector<std::byte>, std::vector<std::byte>>> tables{};
  std::deque<std::pair<std::vector<std::byte>, std::vector<std::byte>>> seen{};
  fake_queue writing{space, device_id{0}, {.depth = 8}, device};
  fake_queue reading{space, device_id{0}, {.depth = 8}, device};
};

}  // namespace

TEST_SUITE("device_cache") {
  TEST_CASE("no kernel sees another sequence's tokens or table, even if streams are late") {
    std::uint64_t waited = 0;
    for (const auto seed : llmmem_tests::seeds(60)) {
      CAPTURE(seed);
      device_engine engine(seed);
      for (int step = 0; step < 150; ++step) {
        const std::uint64_t what = engine.random() % 4;
        if (what <= 1 || engine.running.empty()) {
          engine.begin();
        } else if (what == 2) {
          engine.attend(engine.running[engine.random() % engine.running.size()]);
        } else {
          engine.end(engine.random() % engine.running.size());
        }
        waited += engine.cache.stats().deferred;
      }
      engine.reading.mark().value().wait();
      engine.writing.mark().value().wait();
      for (const auto& [was, expected] : engine.tables)
        if (was != expected) CHECK(was == expected);
      for (const auto& [was, expected] : engine.seen)
        if (was != expected) CHECK(was == expected);
      CHECK(engine.cache.audit().empty());
      CHECK(engine.device.wrong.empty());
    }
    CHECK(waited > 0);
  }
}
