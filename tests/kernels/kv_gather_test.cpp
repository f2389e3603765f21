#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/kv_append.hpp>
#include <llmmem/kernels/kv_gather.hpp>
#include <llmmem/testing/grid_executor.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "support/cache_world.hpp"
#include "support/scattered_planes.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::grid_executor;

/// A cache, tables over it, and what is to come out.
struct gather_world : cache_and_batch {
  std::vector<std::byte> cache{};
  std::int32_t sequences = 0;
  std::vector<std::vector<std::int32_t>> tables{};
  std::vector<std::int32_t> starts{};
  std::vector<std::int32_t> cu{0};
  std::vector<std::int32_t> token_to_seq{};
  std::uint64_t rows = 0;  // more than come
  bool has_starts = false;
  bool is_stray = false;

  explicit gather_world(std::mt19937_64& random) : cache_and_batch(random) {
    cache.resize(layout.total_bytes(blocks));
    fill_with(cache, layout.element, random);
    sequences = static_cast<std::int32_t>(random() % 5);
    has_starts = random() % 2 == 0;
    for (std::int32_t i = 0; i < sequences; ++i)
      draw_sequence(random);
    rows = static_cast<std::uint64_t>(cu.back()) + random() % 4;
    token_to_seq.resize(rows, -7);  // rows that do not come have none
    draw_planes(rows, random);
  }

  /// By the definition: an element at a time.
  [[nodiscard]] std::vector<std::byte> gathered(std::uint32_t p, std::uint32_t layer) {
    std::vector<std::byte> bytes = planes[p].bytes;
    for (std::int32_t i = 0; i < sequences; ++i) {
      const auto s = static_cast<std::size_t>(i);
      for (std::int32_t row = cu[s]; row < cu[s + 1]; ++row) {
        const std::int64_t slot = slot_of(s, row - cu[s] + (has_starts ? starts[s] : 0));
        is_stray = is_stray || slot < 0;
        if (slot < 0) continue;
        for_each_element(layout, layout.strides(p, blocks), p, planes[p], element,
                         static_cast<std::uint64_t>(row), layer, static_cast<std::uint64_t>(slot), is_by_head,
                         [&](std::uint64_t to, std::uint64_t from, float scale) {
                           const std::byte* const in = cache.data() + from;
                           if (element == layout.element) {
                             std::memcpy(bytes.data() + to, in, element_bytes(element));
                             return;
                           }
                           const float factor = has_scales ? scale : 1;
                           store_element(element, bytes.data() + to,
                                         load_element(layout.element, in) * factor);
                         });
      }
    }
    return bytes;
  }

 private:
  /// A table of some blocks, and tokens of it that come, perhaps more than it has.
  void draw_sequence(std::mt19937_64& random) {
    std::vector<std::int32_t> table;
    const std::uint64_t length = random() % 4;
    for (std::uint64_t i = 0; i < length; ++i)
      table.push_back(static_cast<std::int32_t>(random() % blocks));
    const std::int32_t none[] = {-1, static_cast<std::int32_t>(blocks), 1 << 20};
    if (length > 0 && random() % 12 == 0) table.back() = none[random() % 3];
    const auto tokens = static_cast<std::int32_t>(length * layout.block_tokens);
    const std::int32_t start =
        has_starts && tokens > 0 ? static_cast<std::int32_t>(random()) % (tokens + 1) : 0;
    const std::int32_t count = (random() % 10 == 0 ? 3 : 0) + std::max(0, tokens - std::max(start, 0));
    starts.push_back(start);  // some before the first token
    token_to_seq.insert(token_to_seq.end(), static_cast<std::size_t>(count),
                        static_cast<std::int32_t>(tables.size()));
    cu.push_back(cu.back() + count);
    tables.push_back(std::move(table));
  }

  /// -1 for a position that is none.
  [[nodiscard]] std::int64_t slot_of(std::size_t sequence, std::int64_t position) const {
    const auto each = static_cast<std::int64_t>(layout.block_tokens);
    if (position < 0 || position / each >= static_cast<std::int64_t>(tables[sequence].size())) return -1;
    const std::int64_t block = tables[sequence][static_cast<std::size_t>(position / each)];
    return block < 0 || block >= static_cast<std::int64_t>(blocks) ? -1 : block * each + position % each;
  }
};

/// The world's tables, one behind the other.
struct csr_arrays {
  std::vector<std::int32_t> indptr{0};
  std::vector<std::int32_t> indices{};
  explicit csr_arrays(const gather_world& world) {
    for (const auto& table : world.tables) {
      indices.insert(indices.end(), table.begin(), table.end());
      indptr.push_back(static_cast<std::int32_t>(indices.size()));
    }
  }
};

/// The same, each as wide as the longest.
struct padded_arrays {
  std::vector<std::int32_t> table{};
  std::int32_t columns = 0;
  explicit padded_arrays(const gather_world& world) {
    for (const auto& each : world.tables)
      columns = std::max(columns, static_cast<std::int32_t>(each.size()));
    for (const auto& each : world.tables) {
      table.insert(table.end(), each.begin(), each.end());
      table.insert(table.end(), static_cast<std::size_t>(columns) - each.size(), -1);
    }
  }
};

}  // namespace

TEST_SUITE("kv_gather") {
  TEST_CASE("every gathered row follows the tables, and nothing else is written") {
    std::uint64_t strays = 0;
    std::uint64_t moved = 0;
    for (const auto seed : llmmem_tests::seeds(600)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      gather_world world(random);
      const auto layer = static_cast<std::uint32_t>(random() % world.layout.layers);
      std::vector<std::byte> expected[2];
      for (std::uint32_t p = 0; p < world.layout.planes(); ++p)
        expected[p] = world.gathered(p, layer);
      const csr_arrays csr(world);
      const auto block_tokens = static_cast<std::int32_t>(world.layout.block_tokens);
      const csr_table_view tables{.indptr = csr.indptr.data(),
                                  .indices = csr.indices.data(),
                                  .num_sequences = world.sequences,
                                  .block_tokens = block_tokens};
      const padded_arrays padded(world);
      const padded_table_view padded_tables{.block_table = padded.table.data(),
                                            .num_sequences = world.sequences,
                                            .max_blocks = padded.columns,
                                            .block_tokens = block_tokens};
      const gather_rows which{.cu_seq_lens = world.cu.data(),
                              .token_to_seq = random() % 2 == 0 ? world.token_to_seq.data() : nullptr,
                              .seq_starts = world.has_starts ? world.starts.data() : nullptr,
                              .rows = world.rows};
      const scattered_planes planes(world.layout, world.blocks, world.cache,
                                    seed % 17 * element_bytes(world.layout.element));
      const auto check = [&](const auto& run, const auto& by, const kv_memory& memory) {
        std::vector<std::byte> room[2] = {world.planes[0].bytes, world.planes[1].bytes};
        const auto of = [&](std::uint32_t p) {
          return batch_output{room[p].data(), world.planes[p].token_stride, world.planes[p].head_stride};
        };
        std::uint32_t flag = 0;
        gather_kv(run, table_front(by, which, world.blocks), of(0), of(1), memory, layer,
                  world.options(&flag))
            .value();
        for (std::uint32_t p = 0; p < world.layout.planes(); ++p)
          CHECK(room[p] == expected[p]);
        CHECK(flag == (world.is_stray ? 1 : 0));
      };
      const grid_executor grid({.multiprocessors = static_cast<std::uint32_t>(1 + random() % 3),
                                .blocks = static_cast<std::uint32_t>(random() % 4)});
      for (const kv_memory& memory :
           {kv_memory{world.cache.data(), world.blocks, world.layout}, planes.memory()}) {
        check(host_executor{}, tables, memory);
        check(grid, tables, memory);
        check(grid, padded_tables, memory);
      }
      strays += world.is_stray ? 1U : 0U;
      moved += static_cast<std::uint64_t>(world.cu.back());
    }
    CHECK(strays > 50);
    CHECK(moved > 5000);
  }

  TEST_CASE("appended tokens come back unchanged, or within the bound of their form") {
    const kv_layout layout{.layers = 1,
                           .heads = 2,
                           .head_dim = 64,
                           .element = dtype::fp8_e4m3,
                           .heads_in_block = llmmem::paging::head_order::hnd};
    std::vector<std::byte> cache(layout.total_bytes(4), poison);
    const kv_memory memory{cache.data(), 4, layout};
    const float scale = 0.75F;
    const kv_scales scales{&scale, &scale};
    std::mt19937_64 random(7);
    plane_of_batch batch(layout, 0, dtype::f32, 50, random);
    fill_with(batch.bytes, dtype::f32, random);
    std::vector<std::int64_t> slots;
    for (std::int64_t i = 0; i < 50; ++i)
      slots.push_back((i * 37 + 5) % 64);
    const slot_front front(slots, 16, 4);
    const batch_vectors in{batch.bytes.data(), batch.token_stride, batch.head_stride};
    append_kv(grid_executor(), front, in, in, memory, 0, {.element = dtype::f32, .scales = scales}).value();
    std::vector<std::byte> back(batch.bytes.size());
    const batch_output out{back.data(), batch.token_stride, batch.head_stride};
    gather_kv(grid_executor(), front, out, out, memory, 0, {.element = dtype::f32, .scales = scales}).value();
    std::uint64_t seen = 0;
    for (std::size_t row = 0; row < slots.size(); ++row) {
      for_each_element(layout, layout.strides(0, 4), 0, batch, dtype::f32, row, 0,
                       static_cast<std::uint64_t>(slots[row]), false,
                       [&](std::uint64_t at, std::uint64_t, float) {
                         const float was = load_element(dtype::f32, batch.bytes.data() + at);
                         const float is = load_element(dtype::f32, back.data() + at);
                         // Half a unit in the last of four binary digits, and what the factors round.
                         CHECK(std::abs(is - was) <= std::abs(was) / 15.9F);
                         ++seen;
                       });
    }
    CHECK(seen == 50 * 2 * 64);
  }

  TEST_CASE("missing tables, and tables of a negative number of sequences, are not read") {
    const kv_layout layout{.layers = 1, .heads = 1, .head_dim = 8, .block_tokens = 8, .element = dtype::f32};
    std::vector<std::byte> cache(layout.total_bytes(1));
    std::vector<std::byte> rows(64, poison);
    const batch_output room{rows.data(), 32, 32};
    const std::vector<std::int32_t> cu{0, 1};
    const std::vector<std::int32_t> indices{0};
    const auto gather = [&](const csr_table_view& tables, const std::int32_t* lens) {
      const table_front front(tables, gather_rows{.cu_seq_lens = lens, .rows = 1}, 1);
      const auto done = gather_kv(host_executor{}, front, room, room, {cache.data(), 1, layout}, 0,
                                  {.element = dtype::f32});
      return done ? failure{} : done.error();
    };
    const csr_table_view tables{cu.data(), indices.data(), indices.data(), 1, 8};
    csr_table_view fewer = tables;
    fewer.num_sequences = -1;
    CHECK(gather(fewer, cu.data()) == failure{});
    CHECK(std::ranges::count(rows, poison) == 64);
    CHECK(gather(tables, nullptr).message() ==
          "table_front: cu_seq_lens: 1 entries needed, but 0 given; make it longer");
    csr_table_view none = tables;
    none.indptr = nullptr;
    CHECK(gather(none, cu.data()).message() ==
          "tables.indptr: 1 entries needed, but 0 given; make it longer");
    none.num_sequences = 0;
    CHECK(gather(none, nullptr) == failure{});
    CHECK(gather(tables, cu.data()) == failure{});
  }

  TEST_CASE("latent vectors and rotary keys are separated again") {
    const kv_layout layout{.layers = 1, .heads = 1, .head_dim = 40, .block_tokens = 4, .has_values = false};
    std::vector<std::byte> cache(layout.total_bytes(2));
    std::mt19937_64 random(1);
    fill_with(cache, dtype::bf16, random);
    const std::vector<std::int64_t> slots{7, 0, 3};
    std::vector<std::byte> latent(3 * 64);
    std::vector<std::byte> rotary(3 * 16);
    const scattered_planes planes(layout, 2, cache, 6);
    for (const kv_memory& memory : {kv_memory{cache.data(), 2, layout}, planes.memory()}) {
      std::ranges::fill(latent, poison);
      std::ranges::fill(rotary, poison);
      gather_mla(grid_executor(), slot_front(slots, 4, 2), {latent.data(), 64, 64}, {rotary.data(), 16, 16},
                 32, memory, 0)
          .value();
      for (std::size_t i = 0; i < slots.size(); ++i) {
        const std::byte* const there = cache.data() + static_cast<std::size_t>(slots[i]) * 80;
        CHECK(std::memcmp(there, latent.data() + i * 64, 64) == 0);
        CHECK(std::memcmp(there + 64, rotary.data() + i * 16, 16) == 0);
      }
    }
  }
}
