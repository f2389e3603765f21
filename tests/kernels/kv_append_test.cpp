#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/kv_append.hpp>
#include <llmmem/testing/grid_executor.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "support/cache_world.hpp"
#include "support/scattered_planes.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::grid_executor;

/// A cache and a batch for it.
struct append_world : cache_and_batch {
  std::vector<std::int64_t> slots{};

  explicit append_world(std::mt19937_64& random) : cache_and_batch(random) {
    const std::uint64_t tokens = random() % 50;
    draw_slots(tokens, random);
    draw_planes(tokens + 2, random);  // graphs pad keys, not slots
    for (plane_of_batch& each : planes)
      fill_with(each.bytes, element, random);
  }

  [[nodiscard]] std::int64_t capacity() const {
    return static_cast<std::int64_t>(blocks * layout.block_tokens);
  }
  [[nodiscard]] batch_vectors vectors(std::uint32_t p) const {
    return {planes[p].bytes.data(), planes[p].token_stride, planes[p].head_stride};
  }
  template <class Run, class Front>
  [[nodiscard]] result<void> append(const Run& run, const Front& front, const kv_memory& cache,
                                    std::uint32_t layer, std::uint32_t& flag) const {
    return append_kv(run, front, vectors(0), vectors(1), cache, layer, options(&flag));
  }
  [[nodiscard]] kv_memory memory(std::vector<std::byte>& bytes) const {
    return {bytes.data(), blocks, layout};
  }

  /// By the definition: an element at a time.
  [[nodiscard]] std::vector<std::byte> appended(std::uint32_t layer) const {
    std::vector<std::byte> bytes(layout.total_bytes(blocks), poison);
    for (std::size_t token = 0; token < slots.size(); ++token) {
      if (slots[token] < 0 || slots[token] >= capacity()) continue;
      for (std::uint32_t p = 0; p < layout.planes(); ++p) {
        for_each_element(layout, layout.strides(p, blocks), p, planes[p], element, token, layer,
                         static_cast<std::uint64_t>(slots[token]), is_by_head,
                         [&](std::uint64_t from, std::uint64_t to, float scale) {
                           const std::byte* const in = planes[p].bytes.data() + from;
                           if (element == layout.element) {
                             std::memcpy(bytes.data() + to, in, element_bytes(element));
                             return;
                           }
                           const float factor = has_scales ? 1 / scale : 1;
                           store_element(layout.element, bytes.data() + to,
                                         load_element(element, in) * factor);
                         });
      }
    }
    return bytes;
  }

 private:
  /// Different places, some of them none.
  void draw_slots(std::uint64_t tokens, std::mt19937_64& random) {
    std::vector<std::int64_t> places;
    for (std::int64_t i = 0; i < capacity(); ++i)
      places.push_back(i);
    std::shuffle(places.begin(), places.end(), random);
    for (std::uint64_t i = 0; i < tokens; ++i) {
      const std::uint64_t what = random() % 8;
      if (what == 0 || places.empty()) {
        slots.push_back(what % 2 == 0 ? -1 : std::numeric_limits<std::int64_t>::min());
      } else if (what == 1) {
        slots.push_back(random() % 2 == 0 ? capacity() : std::int64_t{1} << (33 + random() % 30));
      } else {
        slots.push_back(places.back());
        places.pop_back();
      }
    }
  }
};

}  // namespace

TEST_SUITE("kv_append") {
  TEST_CASE(
      "every element of every token is where the layout says, with its value, and nothing else is written") {
    std::uint64_t converted = 0;
    for (const auto seed : llmmem_tests::seeds(600)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const append_world world(random);
      const auto layer = static_cast<std::uint32_t>(random() % world.layout.layers);
      const std::vector<std::byte> expected = world.appended(layer);
      const bool is_stray =
          std::ranges::any_of(world.slots, [&](std::int64_t slot) { return slot >= world.capacity(); });
      const auto check = [&](const auto& run) {
        std::vector<std::byte> bytes(expected.size(), poison);
        std::uint32_t flag = 0;
        const slot_front front(world.slots, world.layout.block_tokens, world.blocks);
        world.append(run, front, world.memory(bytes), layer, flag).value();
        CHECK(bytes == expected);
        CHECK(flag == (is_stray ? 1 : 0));
        // The same in several allocations.
        const scattered_planes planes(world.layout, world.blocks,
                                      std::vector<std::byte>(expected.size(), poison),
                                      seed % 17 * element_bytes(world.layout.element));
        flag = 0;
        world.append(run, front, planes.memory(), layer, flag).value();
        CHECK(planes.image() == expected);
        CHECK(flag == (is_stray ? 1 : 0));
      };
      check(host_executor{});
      check(grid_executor({.multiprocessors = static_cast<std::uint32_t>(1 + random() % 3),
                           .blocks = static_cast<std::uint32_t>(random() % 4)}));
      converted += world.element == world.layout.element ? 0U : 1U;
    }
    CHECK(converted > 200);
  }

  TEST_CASE("sequences and positions name the same places as slots, in both kinds of tables") {
    for (const auto seed : llmmem_tests::seeds(200)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      append_world world(random);
      // Two sequences of one table each, over the blocks in any order; some positions and blocks are none.
      const auto blocks = static_cast<std::int32_t>(world.blocks);
      const auto each = static_cast<std::int32_t>(world.layout.block_tokens);
      std::vector<std::int32_t> indices;
      for (std::int32_t i = 0; i < blocks; ++i)
        indices.push_back(i);
      std::shuffle(indices.begin(), indices.end(), random);
      if (random() % 3 == 0) indices[0] = random() % 2 == 0 ? -1 : blocks;
      const std::int32_t split = static_cast<std::int32_t>(random() % (world.blocks + 1));
      const std::vector<std::int32_t> indptr{0, split, blocks};
      const std::int32_t wide = std::max(split, blocks - split) + 1;
      std::vector<std::int32_t> padded(2 * static_cast<std::size_t>(wide), -1);
      for (std::int32_t i = 0; i < blocks; ++i) {
        const std::int32_t at = i < split ? i : wide + i - split;
        padded[static_cast<std::size_t>(at)] = indices[static_cast<std::size_t>(i)];
      }
      std::vector<std::int32_t> sequences;
      std::vector<std::int32_t> positions;
      for (std::int64_t& slot : world.slots) {
        sequences.push_back(static_cast<std::int32_t>(random() % 4) - 1);
        positions.push_back(static_cast<std::int32_t>(random() % (world.blocks * world.layout.block_tokens)));
        if (random() % 9 == 0) positions.back() = random() % 2 == 0 ? -1 : 0x7FFF'FFFF;
        slot = world.capacity();
        const std::int32_t sequence = sequences.back();
        if (sequence < 0) slot = -1;
        if (sequence < 0 || sequence > 1 || positions.back() < 0) continue;
        const std::int32_t in_table = positions.back() / each;
        if (in_table >= (sequence == 0 ? split : blocks - split)) continue;
        const std::int32_t block = indices[static_cast<std::size_t>(in_table + (sequence == 0 ? 0 : split))];
        if (block < 0 || block >= blocks) continue;
        slot = std::int64_t{block} * each + positions.back() % each;
        // Of two tokens in one place anyone stays: let it be padding.
        if (std::count(world.slots.begin(), world.slots.begin() + (&slot - world.slots.data()), slot) != 0) {
          slot = -1;
          sequences.back() = -1;
        }
      }
      const bool is_stray = std::ranges::count(world.slots, world.capacity()) != 0;
      const std::vector<std::byte> expected = world.appended(0);
      const auto check = [&](const auto& tables) {
        std::vector<std::byte> bytes(expected.size(), poison);
        std::uint32_t flag = 0;
        const position_front front(tables, sequences, positions, world.blocks);
        world.append(grid_executor(), front, world.memory(bytes), 0, flag).value();
        CHECK(bytes == expected);
        CHECK(flag == (is_stray ? 1 : 0));
      };
      check(csr_table_view{
          .indptr = indptr.data(), .indices = indices.data(), .num_sequences = 2, .block_tokens = each});
      check(padded_table_view{
          .block_table = padded.data(), .num_sequences = 2, .max_blocks = wide, .block_tokens = each});
    }
  }

  TEST_CASE("latent vectors and rotary keys are stored side by side") {
    const kv_layout layout{.layers = 2, .heads = 1, .head_dim = 576, .block_tokens = 64, .has_values = false};
    std::vector<std::byte> cache(layout.total_bytes(3), poison);
    std::vector<std::byte> latent(5 * 512 * 2);
    std::vector<std::byte> rotary(5 * 64 * 2);
    std::mt19937_64 random(1);
    fill_with(latent, dtype::bf16, random);
    fill_with(rotary, dtype::bf16, random);
    const std::vector<std::int64_t> slots{0, 63, 64, -1, 191};
    append_mla(grid_executor(), slot_front(slots, 64, 3), {latent.data(), 1024, 1024},
               {rotary.data(), 128, 128}, 512, {cache.data(), 3, layout}, 1)
        .value();
    const plane_strides strides = layout.strides(0, 3);
    for (std::size_t i = 0; i < slots.size(); ++i) {
      if (slots[i] < 0) continue;
      const auto slot = static_cast<std::uint64_t>(slots[i]);
      const std::byte* const there = cache.data() + strides.offset(1, slot / 64, slot % 64, 0);
      CHECK(std::memcmp(there, latent.data() + i * 1024, 1024) == 0);
      CHECK(std::memcmp(there + 1024, rotary.data() + i * 128, 128) == 0);
    }
    CHECK(std::ranges::count_if(cache, [](std::byte b) { return b != poison; }) <= 4 * 1152);
    const scattered_planes planes(layout, 3, std::vector<std::byte>(cache.size(), poison), 2);
    append_mla(grid_executor(), slot_front(slots, 64, 3), {latent.data(), 1024, 1024},
               {rotary.data(), 128, 128}, 512, planes.memory(), 1)
        .value();
    CHECK(planes.image() == cache);
  }

  TEST_CASE("a table of planes with less than its promised alignment is refused before anything moves") {
    const kv_layout layout{.layers = 2, .heads = 2, .head_dim = 8};
    const std::vector<std::byte> untouched(layout.total_bytes(2), poison);
    const scattered_planes planes(layout, 2, untouched, 4);
    kv_memory cache = planes.memory();
    CHECK(cache.plane_alignment == 4);
    cache.plane_alignment = 8;
    alignas(16) const std::byte batch[64]{};
    const std::vector<std::int64_t> slots{3};
    const batch_vectors vectors{batch, 32, 16};
    const auto refused =
        append_kv(grid_executor(), slot_front(slots, 16, 2), vectors, vectors, cache, 1).error();
    CHECK(refused == failure{errc::misaligned, 0, 8, 0});
    CHECK(planes.image() == untouched);
  }

  TEST_CASE("the kernel looks up a table's entry when it runs") {
    const kv_layout layout{.layers = 1, .heads = 1, .head_dim = 8, .has_values = false};
    std::vector<std::byte> first(layout.total_bytes(2), poison);
    std::vector<std::byte> second = first;
    std::byte* table[1]{first.data()};
    const token_segment segment{.batch_token = 16,
                                .cache_block = 256,
                                .cache_token = 16,
                                .cache_head = 16,
                                .elements = 16,
                                .cache_entry = table};
    const std::vector<std::int64_t> slots{17};
    const kv_token_map<slot_front, kv_direction::append> map(slot_front(slots, 16, 2), std::span(&segment, 1),
                                                             1, false, nullptr);
    CHECK(map.at(0, 0).to == first.data() + 272);
    table[0] = second.data();
    CHECK(map.at(0, 0).to == second.data() + 272);
  }

  TEST_CASE("places far beyond 2^31 bytes are computed correctly") {
    // Nothing is read or written: only where it would be.
    const kv_layout layout{.layers = 1, .heads = 64, .head_dim = 256, .block_tokens = 256};
    const std::uint64_t blocks = std::uint64_t{1} << 31;
    const std::vector<std::int64_t> slots{(std::int64_t{1} << 39) - 1};
    const plane_strides strides = layout.strides(1, blocks);
    std::byte base{};
    const token_segment segment{.from = &base,
                                .to = &base,
                                .batch_token = std::uint64_t{1} << 40,
                                .cache_block = strides.block,
                                .cache_token = strides.token,
                                .cache_head = strides.head,
                                .elements = 256 * 2};
    const kv_token_map<slot_front, kv_direction::append> map(slot_front(slots, 256, blocks),
                                                             std::span(&segment, 1), 64, true, nullptr);
    const row_move row = map.at(0, 63);
    CHECK(row.elements == 512);
    const auto to = reinterpret_cast<std::uintptr_t>(row.to) - reinterpret_cast<std::uintptr_t>(&base);
    CHECK(to == (blocks - 1) * strides.block + 255 * strides.token + 63 * strides.head);
    CHECK(to > std::uint64_t{1} << 53);
    // In a table of planes as well.
    std::byte* table[1]{&base};
    token_segment by_table = segment;
    by_table.to = nullptr;
    by_table.cache_entry = table;
    by_table.cache_first = std::uint64_t{1} << 40;
    const kv_token_map<slot_front, kv_direction::append> other(slot_front(slots, 256, blocks),
                                                               std::span(&by_table, 1), 64, true, nullptr);
    CHECK(other.at(0, 63).to == row.to + (std::uint64_t{1} << 40));
  }

  TEST_CASE("what does not fit is refused, and nothing has begun") {
    const kv_layout layout{.layers = 2, .heads = 2, .head_dim = 8, .element = dtype::fp8_e5m2};
    std::vector<std::byte> cache(layout.total_bytes(3), poison);
    const std::vector<std::byte> batch(64);
    const std::vector<std::int64_t> slots{0};
    const kv_memory memory{cache.data(), 3, layout};
    const batch_vectors vectors{batch.data(), 32, 16};
    const auto append = [&](const slot_front& front, std::uint32_t layer, dtype element) {
      return append_kv(host_executor{}, front, vectors, vectors, memory, layer, {.element = element}).error();
    };
    const slot_front front(slots, 16, 3);
    CHECK(append(front, 2, dtype::fp8_e5m2).message() ==
          "append_kv: layer: 2 requested, but the highest allowed is 1");
    CHECK(append(slot_front(slots, 16, 4), 0, dtype::fp8_e5m2).message() ==
          "append_kv: block 3 asked for, but the memory has 3, numbered from 0; build the memory with the "
          "cache's max_physical_blocks()");
    CHECK(append(slot_front(slots, 8, 3), 0, dtype::fp8_e5m2).message() ==
          "append_kv: blocks hold 8 tokens there and 16 here; build both with the same block_tokens");
    CHECK(append(slot_front(slots, 0, 3), 0, dtype::fp8_e5m2).message() ==
          "append_kv: blocks hold 0 tokens there and 16 here; build both with the same block_tokens");
    CHECK(append(front, 0, dtype::bf16).message() ==
          "append_kv: no kernel converts bf16 to fp8_e5m2; convert it before the call, or store it as bf16");
    const std::int64_t* const none = nullptr;
    CHECK(append(slot_front(std::span(none, 1), 16, 3), 0, dtype::fp8_e5m2) ==
          failure{errc::too_short, 0, 1, 0});
    CHECK(append_mla(host_executor{}, front, vectors, vectors, 4, memory, 0).error().message() ==
          "append_mla: two lengths must be equal, but are 4 and 8");
    CHECK(std::ranges::count(cache, poison) == static_cast<std::ptrdiff_t>(cache.size()));
    // A token of 2 GiB is more than a row counts.
    kv_layout huge{.layers = 1, .heads = 1U << 20, .head_dim = 1024, .block_tokens = 16};
    const auto append_huge = [&] {
      const batch_vectors far_apart{batch.data(), std::uint64_t{1} << 40, 2048};
      return append_kv(host_executor{}, front, far_apart, far_apart, {cache.data(), 3, huge}, 0);
    };
    CHECK(append_huge().error() == failure{errc::past_the_bytes, 0, std::uint64_t{1} << 31, 0x7FFF'FFFF});
    huge.head_dim = 0xFFFF'FFFF;
    CHECK(append_huge().error().code == errc::past_the_bytes);
  }

  TEST_CASE("elements of four bits are not cut inside a byte") {
    const kv_layout layout{.layers = 1,
                           .heads = 1,
                           .head_dim = 8,
                           .block_tokens = 4,
                           .has_values = false,
                           .element = dtype::int4};
    std::vector<std::byte> cache(layout.total_bytes(1), poison);
    const std::vector<std::byte> batch(16, std::byte{0x21});
    const std::vector<std::int64_t> slots{0};
    const auto append = [&](std::uint32_t latent) {
      const batch_vectors vectors{batch.data(), 4, 4};
      return append_mla(host_executor{}, slot_front(slots, 4, 1), vectors, vectors, latent,
                        {cache.data(), 1, layout}, 0, {.element = dtype::int4});
    };
    CHECK(append(3).error() == failure{errc::size_mismatch, 0, 12, 8});
    CHECK(std::ranges::count(cache, poison) == static_cast<std::ptrdiff_t>(cache.size()));
    CHECK(append(4));
    CHECK(std::ranges::count(cache, std::byte{0x21}) == 4);
  }

  TEST_CASE("converted elements must be aligned for a device, plain bytes need not be") {
    const kv_layout layout{.layers = 1, .heads = 2, .head_dim = 8, .block_tokens = 4, .element = dtype::bf16};
    alignas(16) std::byte cache[1024]{};
    alignas(16) const std::byte batch[512]{};
    const std::vector<std::int64_t> two{0, 1};
    const auto told = [&](const batch_vectors& keys, std::size_t cache_offset, dtype element) {
      const kv_memory memory{cache + cache_offset, 1, layout};
      const batch_vectors values{batch, 64, 32};
      const auto on_host =
          append_kv(host_executor{}, slot_front(two, 4, 1), keys, values, memory, 0, {.element = element});
      const auto on_grid =
          append_kv(grid_executor(), slot_front(two, 4, 1), keys, values, memory, 0, {.element = element});
      CHECK(on_host.code() == on_grid.code());
      return on_host ? failure{} : on_host.error();
    };
    CHECK(told({batch, 64, 32}, 0, dtype::f32) == failure{});
    CHECK(told({batch + 4, 68, 36}, 2, dtype::f32) == failure{});
    CHECK(told({batch + 2, 64, 32}, 0, dtype::f32).code == errc::bad_granularity);
    CHECK(told({batch, 66, 32}, 0, dtype::f32) == failure{errc::bad_granularity, 0, 66, 4});
    CHECK(told({batch, 128, 34}, 0, dtype::f32) == failure{errc::bad_granularity, 0, 34, 4});
    CHECK(told({batch, 64, 32}, 1, dtype::f32).code == errc::bad_granularity);
    CHECK(told({batch + 1, 65, 33}, 3, dtype::bf16) == failure{});
    // Where there is one token and one head nothing lies apart.
    kv_layout one = layout;
    one.heads = 1;
    const std::vector<std::int64_t> slots{0};
    const batch_vectors keys{batch, 7, 5};
    CHECK(append_kv(grid_executor(), slot_front(slots, 4, 1), keys, keys, {cache, 1, one}, 0,
                    {.element = dtype::f32}));
    std::byte* planes[] = {cache, cache + 256};
    kv_memory by_table{.blocks = 1, .layout = one, .plane_table = planes, .plane_alignment = 1};
    CHECK(
        append_kv(host_executor{}, slot_front(slots, 4, 1), keys, keys, by_table, 0, {.element = dtype::f32})
            .error() == failure{errc::bad_granularity, 0, 1, 2});
    by_table.plane_alignment = 2;
    CHECK(append_kv(grid_executor(), slot_front(slots, 4, 1), keys, keys, by_table, 0,
                    {.element = dtype::f32}));
  }
}
