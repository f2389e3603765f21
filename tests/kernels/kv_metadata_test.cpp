#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/kv_append.hpp>
#include <llmmem/kernels/kv_gather.hpp>
#include <llmmem/kernels/kv_metadata.hpp>
#include <llmmem/testing/grid_executor.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "support/cache_world.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::grid_executor;

/// Arrays that end in something that nobody writes.
template <class N>
struct fenced_array {
  static constexpr N untouched = static_cast<N>(-77);
  std::vector<N> all;
  explicit fenced_array(std::size_t size) : all(size + 4, untouched) {}
  [[nodiscard]] std::span<N> span() { return std::span(all).first(all.size() - 4); }
  [[nodiscard]] std::vector<N> written() {
    CHECK(std::count(all.end() - 4, all.end(), untouched) == 4);
    return {all.begin(), all.end() - 4};
  }
};

/// A batch: how many tokens each sequence adds, how many it has then, and where these lie in blocks.
struct batch_world {
  std::int32_t sequences = 0;
  std::int32_t block_tokens = 1;
  std::int32_t blocks = 1;
  std::size_t padded = 0;  ///< tokens with those that fill the batch up
  std::vector<std::int32_t> indptr{0}, seq_lens{};
  std::vector<std::vector<std::int32_t>> tables{};
  // The same tables as kernels read them.
  std::vector<std::int32_t> csr_indptr{0}, indices{}, block_table{};
  std::int32_t max_blocks = 1;
  // By the definition.
  std::vector<std::int32_t> batch_indices{}, positions{};
  std::vector<std::int64_t> slots{};
  bool is_negative = false;  ///< some sequence has fewer tokens than it adds
  bool is_stray = false;     ///< some token has no slot, and is no padding

  explicit batch_world(std::mt19937_64& random, bool is_clean = false)
      : sequences(static_cast<std::int32_t>(random() % 7)),
        block_tokens(static_cast<std::int32_t>(1 + random() % 20)),
        blocks(static_cast<std::int32_t>(1 + random() % 40)) {
    std::vector<std::int32_t> free;
    for (std::int32_t i = 0; i < blocks; ++i)
      free.push_back(i);
    std::shuffle(free.begin(), free.end(), random);
    for (std::int32_t s = 0; s < sequences; ++s) {
      std::vector<std::int32_t> table;
      const std::uint64_t length = random() % 5;
      while (table.size() < length && !free.empty()) {
        table.push_back(free.back());
        free.pop_back();
        if (!is_clean && random() % 12 == 0) table.back() = random() % 2 == 0 ? blocks : -1;
      }
      const auto most = static_cast<std::int32_t>(table.size()) * block_tokens;
      auto tokens = static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(most + 1));
      auto added = static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(tokens + 1));
      if (!is_clean && random() % 12 == 0) tokens = random() % 2 == 0 ? added - 1 : most + 3;
      if (!is_clean && random() % 12 == 0) added += 2;
      indptr.push_back(indptr.back() + added);
      seq_lens.push_back(tokens);
      indices.insert(indices.end(), table.begin(), table.end());
      csr_indptr.push_back(static_cast<std::int32_t>(indices.size()));
      max_blocks = std::max(max_blocks, static_cast<std::int32_t>(table.size()));
      tables.push_back(table);
    }
    for (const auto& table : tables) {
      block_table.insert(block_table.end(), table.begin(), table.end());
      block_table.resize(block_table.size() + static_cast<std::size_t>(max_blocks) - table.size(), -1);
    }
    padded = static_cast<std::size_t>(indptr.back()) + random() % 9;
    define();
  }

  void define() {
    for (std::int32_t s = 0; s < sequences; ++s) {
      const std::int32_t added = indptr[at(s) + 1] - indptr[at(s)];
      for (std::int32_t i = 0; i < added; ++i) {
        batch_indices.push_back(s);
        const std::int32_t position = seq_lens[at(s)] - added + i;
        const bool is_there = seq_lens[at(s)] >= added;
        is_negative = is_negative || !is_there;
        positions.push_back(is_there ? position : -1);
        slots.push_back(is_there ? slot_of(s, position) : -1);
        is_stray = is_stray || slots.back() < 0;
      }
    }
    batch_indices.resize(padded, -1);
    positions.resize(padded, -1);
    slots.resize(padded, -1);
  }
  [[nodiscard]] std::int64_t slot_of(std::int32_t sequence, std::int32_t position) const {
    const auto& table = tables[at(sequence)];
    const auto in_table = at(position / block_tokens);
    if (in_table >= table.size()) return -1;
    const std::int32_t block = table[in_table];
    if (block < 0 || block >= blocks) return -1;
    return std::int64_t{block} * block_tokens + position % block_tokens;
  }
  [[nodiscard]] static std::size_t at(std::int32_t i) { return static_cast<std::size_t>(i); }

  [[nodiscard]] batch_tokens tokens() const { return {indptr.data(), seq_lens.data(), sequences}; }
  [[nodiscard]] csr_table_view csr() const {
    return {.indptr = csr_indptr.data(),
            .indices = indices.data(),
            .num_sequences = sequences,
            .block_tokens = block_tokens};
  }
  [[nodiscard]] padded_table_view padded_tables() const {
    return {.block_table = block_table.data(),
            .num_sequences = sequences,
            .max_blocks = max_blocks,
            .block_tokens = block_tokens};
  }
};

launch_limits any_limits(std::mt19937_64& random) {
  return {.blocks = static_cast<std::uint32_t>(random() % 3)};
}

}  // namespace

TEST_SUITE("kv_metadata") {
  TEST_CASE("sequences, positions and slots follow the definition, with tables of both kinds") {
    std::uint64_t strays = 0;
    for (const auto seed : llmmem_tests::seeds(600)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const batch_world world(random);
      const auto check = [&](const auto& run) {
        fenced_array<std::int32_t> alone(world.padded);
        token_sequences(run, world.tokens(), alone.span()).value();
        CHECK(alone.written() == world.batch_indices);
        fenced_array<std::int32_t> batch_indices(world.padded);
        fenced_array<std::int32_t> positions(world.padded);
        std::uint32_t flag = 0;
        token_positions(run, world.tokens(), batch_indices.span(), positions.span(), &flag).value();
        CHECK(batch_indices.written() == world.batch_indices);
        CHECK(positions.written() == world.positions);
        CHECK(flag == (world.is_negative ? 1 : 0));
        const auto check_slots = [&](const auto& tables) {
          const position_front front(tables, batch_indices.span(), positions.span(),
                                     static_cast<std::uint64_t>(world.blocks));
          const std::size_t more = random() % 5;
          fenced_array<std::int64_t> slots(world.padded + more);
          flag = 0;
          slot_mapping(run, front, slots.span(), &flag).value();
          std::vector<std::int64_t> expected = world.slots;
          expected.resize(expected.size() + more, -1);
          CHECK(slots.written() == expected);
          CHECK(flag == (world.is_stray ? 1 : 0));
          slot_mapping(run, front, slots.span()).value();  // nobody asks for the flag
          CHECK(slots.written() == expected);
        };
        check_slots(world.csr());
        check_slots(world.padded_tables());
      };
      check(host_executor{});
      check(grid_executor(any_limits(random)));
      strays += world.is_stray ? 1U : 0U;
    }
    CHECK(strays > 100);
  }

  TEST_CASE("without lengths positions count from each sequence's first token in the batch") {
    const std::vector<std::int32_t> indptr{0, 3, 3, 5};
    fenced_array<std::int32_t> batch_indices(7);
    fenced_array<std::int32_t> positions(7);
    token_positions(grid_executor(), {indptr.data(), nullptr, 3}, batch_indices.span(), positions.span())
        .value();
    CHECK(batch_indices.written() == std::vector<std::int32_t>{0, 0, 0, 2, 2, -1, -1});
    CHECK(positions.written() == std::vector<std::int32_t>{0, 1, 2, 0, 1, -1, -1});
  }

  TEST_CASE("tokens of no sequence are padding, for any indptr") {
    // The first sequence begins late; then they go backwards.
    const std::vector<std::int32_t> indptr{2, 4, 3, 5};
    fenced_array<std::int32_t> batch_indices(8);
    token_sequences(grid_executor(), {indptr.data(), nullptr, 3}, batch_indices.span()).value();
    const std::vector<std::int32_t> all = batch_indices.written();
    CHECK(all[0] == -1);
    CHECK(all[1] == -1);
    CHECK(all[2] == 0);
    CHECK(all[4] == 2);
    CHECK(all[5] == -1);
    // No sequences at all.
    token_sequences(grid_executor(), {}, batch_indices.span()).value();
    CHECK(batch_indices.written() == std::vector<std::int32_t>(8, -1));
    // Numbers as large as they may be.
    constexpr std::int32_t most = std::numeric_limits<std::int32_t>::max();
    const std::vector<std::int32_t> large{0, 2, most};
    const std::vector<std::int32_t> lengths{most, most};
    fenced_array<std::int32_t> indices(3);
    fenced_array<std::int32_t> positions(3);
    token_positions(grid_executor(), {large.data(), lengths.data(), 2}, indices.span(), positions.span())
        .value();
    CHECK(positions.written() == std::vector<std::int32_t>{most - 2, most - 1, 2});
  }

  TEST_CASE("the tables made here are those that append and gather read") {
    for (const auto seed : llmmem_tests::seeds(150)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const batch_world world(random, true);
      const auto blocks = static_cast<std::uint64_t>(world.blocks);
      const kv_layout layout{.layers = 2,
                             .heads = 2,
                             .head_dim = 24,
                             .block_tokens = static_cast<std::uint32_t>(world.block_tokens)};
      const grid_executor run(any_limits(random));
      // In: where the new tokens go.
      std::vector<std::int32_t> batch_indices(world.padded);
      std::vector<std::int32_t> positions(world.padded);
      std::vector<std::int64_t> slots(world.padded);
      std::uint32_t flag = 0;
      token_positions(run, world.tokens(), batch_indices, positions, &flag).value();
      const position_front by_position(world.padded_tables(), batch_indices, positions, blocks);
      slot_mapping(run, by_position, slots, &flag).value();
      constexpr std::uint64_t token_bytes = 2 * 24 * 2;
      std::vector<std::byte> keys(world.padded * token_bytes);
      fill_with(keys, dtype::bf16, random);
      std::vector<std::byte> values = keys;
      std::ranges::reverse(values);
      std::vector<std::byte> cache(layout.total_bytes(blocks), poison);
      std::vector<std::byte> expected = cache;
      const slot_front by_slot(slots, layout.block_tokens, blocks);
      append_kv(run, by_slot, {keys.data(), token_bytes, 48}, {values.data(), token_bytes, 48},
                {cache.data(), blocks, layout}, 1, {.out_of_range = &flag})
          .value();
      append_kv(run, by_position, {keys.data(), token_bytes, 48}, {values.data(), token_bytes, 48},
                {expected.data(), blocks, layout}, 1, {.out_of_range = &flag})
          .value();
      CHECK(cache == expected);
      // Out: of each sequence its new tokens, by rows whose sequences are found here too.
      std::vector<std::int32_t> starts;
      for (std::int32_t s = 0; s < world.sequences; ++s)
        starts.push_back(world.seq_lens[world.at(s)] -
                         (world.indptr[world.at(s) + 1] - world.indptr[world.at(s)]));
      const table_front rows(world.csr(),
                             {.cu_seq_lens = world.indptr.data(),
                              .token_to_seq = batch_indices.data(),
                              .seq_starts = starts.data(),
                              .rows = world.padded},
                             blocks);
      std::vector<std::int64_t> again(world.padded);
      slot_mapping(run, rows, again, &flag).value();
      CHECK(again == slots);
      std::vector<std::byte> out_keys(keys.size(), poison);
      std::vector<std::byte> out_values(keys.size(), poison);
      gather_kv(run, rows, {out_keys.data(), token_bytes, 48}, {out_values.data(), token_bytes, 48},
                {cache.data(), blocks, layout}, 1, {.out_of_range = &flag})
          .value();
      CHECK(flag == 0);
      const auto there = static_cast<std::size_t>(world.indptr.back()) * token_bytes;
      CHECK(
          std::equal(out_keys.begin(), out_keys.begin() + static_cast<std::ptrdiff_t>(there), keys.begin()));
      CHECK(std::equal(out_values.begin(), out_values.begin() + static_cast<std::ptrdiff_t>(there),
                       values.begin()));
      CHECK(std::count(out_keys.begin() + static_cast<std::ptrdiff_t>(there), out_keys.end(), poison) ==
            static_cast<std::ptrdiff_t>(out_keys.size() - there));
    }
  }

  TEST_CASE("slots have 64 bits") {
    const std::vector<std::int32_t> block_table{0x7FFF'FFFE};
    const padded_table_view tables{
        .block_table = block_table.data(), .num_sequences = 1, .max_blocks = 1, .block_tokens = 1 << 20};
    const std::vector<std::int32_t> sequences{0};
    const std::vector<std::int32_t> positions{(1 << 20) - 1};
    std::vector<std::int64_t> slots(1);
    slot_mapping(grid_executor(), position_front(tables, sequences, positions, 0x7FFF'FFFF), slots).value();
    CHECK(slots[0] == std::int64_t{0x7FFF'FFFF} * (1 << 20) - 1);
  }

  TEST_CASE("pages follow the definition; invalid blocks stay, and out-of-range ones are reported") {
    for (const auto seed : llmmem_tests::seeds(400)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const auto below = [&](std::uint64_t n) { return static_cast<std::uint32_t>(random() % n); };
      page_expansion of{.rows = below(8),
                        .columns = below(9),
                        .blocks = 1 + below(50),
                        .pages_per_block = 1 + below(70),
                        .plane_offset = below(40),
                        .planes = 1 + below(2)};
      of.row_stride = of.columns + below(4);
      if (random() % 4 == 0) of.blocks = std::uint64_t{1} << 31;
      std::vector<std::int32_t> table(of.rows * of.row_stride + 1);
      for (std::int32_t& block : table) {
        block = static_cast<std::int32_t>(random() % std::min<std::uint64_t>(of.blocks, 0x7FFF'FFFF));
        if (random() % 9 == 0) block = -1 - static_cast<std::int32_t>(below(3));
        if (random() % 20 == 0)
          block = static_cast<std::int32_t>(std::min<std::uint64_t>(of.blocks, 0x7FFF'FFFF));
      }
      of.block_table = table.data();
      std::vector<std::int32_t> expected;
      bool is_stray = false;
      for (std::uint64_t row = 0; row < of.rows; ++row) {
        for (std::uint32_t plane = 0; plane < of.planes; ++plane) {
          for (std::uint32_t column = 0; column < of.columns; ++column) {
            const std::int64_t block = table[row * of.row_stride + column];
            std::int64_t page = block * of.pages_per_block + std::int64_t{plane} * of.plane_offset;
            if (block < 0) {
              page = block;
            } else if (block >= static_cast<std::int64_t>(of.blocks) || page > 0x7FFF'FFFF) {
              page = -1;
              is_stray = true;
            }
            expected.push_back(static_cast<std::int32_t>(page));
          }
        }
      }
      const auto check = [&](const auto& run) {
        fenced_array<std::int32_t> pages(expected.size());
        std::uint32_t flag = 0;
        expand_pages(run, of, pages.span(), &flag).value();
        CHECK(pages.written() == expected);
        CHECK(flag == (is_stray ? 1 : 0));
        expand_pages(run, of, pages.span()).value();
        CHECK(pages.written() == expected);
      };
      check(host_executor{});
      check(grid_executor(any_limits(random)));
    }
  }

  TEST_CASE("the last page number of 32 bits is valid, and the next is not") {
    const std::vector<std::int32_t> table{0x3FFF'FFFF, 0x4000'0000};
    page_expansion of{.block_table = table.data(),
                      .rows = 1,
                      .columns = 2,
                      .blocks = 0x4000'0001,
                      .pages_per_block = 2,
                      .plane_offset = 1};
    std::vector<std::int32_t> pages(4);
    std::uint32_t flag = 0;
    expand_pages(grid_executor(), of, pages, &flag).value();
    CHECK(pages == std::vector<std::int32_t>{0x7FFF'FFFE, -1, 0x7FFF'FFFF, -1});
    CHECK(flag == 1);
    of.columns = 1;
    of.plane_offset = 2;
    flag = 0;
    expand_pages(grid_executor(), of, pages, &flag).value();
    CHECK(pages[0] == 0x7FFF'FFFE);
    CHECK(pages[1] == -1);
    CHECK(flag == 1);
    // What would come back into range in 32 or 64 bits.
    of.pages_per_block = 0xFFFF'FFFF;
    of.plane_offset = 0xFFFF'FFFF;
    expand_pages(grid_executor(), of, pages).value();
    CHECK(pages[0] == -1);
    CHECK(pages[1] == -1);
  }

  TEST_CASE("an indptr that rises and falls again names no block after the last") {
    const std::vector<std::int32_t> indices{5, 6};
    const std::vector<std::int32_t> lengths{8, 8};
    const std::vector<std::int32_t> rows{0, 0, 0, 1};
    const std::vector<std::int32_t> positions{0, 8, 16, 0};
    for (const std::vector<std::int32_t>& indptr :
         {std::vector<std::int32_t>{0, 100, 2}, std::vector<std::int32_t>{0, 0x7FFF'FFFF, 2}}) {
      const csr_table_view tables{indptr.data(), indices.data(), lengths.data(), 2, 8};
      std::vector<std::int64_t> slots(4);
      std::uint32_t flag = 0;
      slot_mapping(grid_executor(), position_front(tables, rows, positions, 10), slots, &flag).value();
      CHECK(slots == std::vector<std::int64_t>{40, 48, -1, -1});
      CHECK(flag == 1);
    }
  }

  TEST_CASE("tables of zero or negative width are not read") {
    const std::vector<std::int32_t> table{0, 5, 6, 7};
    const std::vector<std::int32_t> lengths{32, 32};
    const std::vector<std::int32_t> rows{1};
    const std::vector<std::int32_t> positions{24};
    std::vector<std::int64_t> slots(1);
    for (const std::int32_t columns : {0, -1, -3, -0x7FFF'FFFF}) {
      std::uint32_t flag = 0;
      const padded_table_view tables{table.data(), lengths.data(), 2, columns, 8};
      slot_mapping(grid_executor(), position_front(tables, rows, positions, 10), slots, &flag).value();
      CHECK(slots[0] == -1);
      CHECK(flag == 1);
    }
    for (const std::int32_t block_tokens : {0, -16}) {
      const padded_table_view tables{table.data(), lengths.data(), 2, 2, block_tokens};
      CHECK(slot_mapping(host_executor{}, position_front(tables, rows, positions, 10), slots).error() ==
            failure{errc::block_tokens_differ, 0, 0, 1});
    }
    const std::int32_t* const none = nullptr;
    const auto missing = [&](const padded_table_view& tables, std::span<const std::int32_t> of,
                             std::span<const std::int32_t> at) {
      return slot_mapping(host_executor{}, position_front(tables, of, at, 10), slots).error().message();
    };
    const padded_table_view tables{table.data(), lengths.data(), 2, 2, 8};
    const std::string needed = ": 1 entries needed, but 0 given; make it longer";
    CHECK(missing(tables, std::span(none, 1), positions) == "batch_indices" + needed);
    CHECK(missing(tables, rows, std::span(none, 1)) == "positions" + needed);
    CHECK(missing({nullptr, nullptr, 2, 2, 8}, rows, positions) == "tables.block_table" + needed);
  }

  TEST_CASE("what does not fit is refused, with what it is") {
    std::vector<std::int32_t> four(4);
    std::vector<std::int64_t> slots(3);
    const host_executor run;
    CHECK(token_sequences(run, {nullptr, nullptr, 2}, four).error() == failure{errc::too_short, 0, 3, 0});
    CHECK(token_positions(run, {nullptr, nullptr, 2}, four, four).error() ==
          failure{errc::too_short, 0, 3, 0});
    CHECK(token_positions(run, {four.data(), nullptr, 3}, four, std::span(four).first(3)).error() ==
          failure{errc::size_mismatch, 0, 4, 3});
    const std::vector<std::int64_t> long_slots(4);
    CHECK(slot_mapping(run, slot_front(long_slots, 16, 4), slots).error() ==
          failure{errc::too_short, 0, 4, 3});
    page_expansion of{.block_table = four.data(), .rows = 2, .columns = 1, .row_stride = 1, .blocks = 1};
    CHECK(expand_pages(run, of, std::span(four).first(3)).error() == failure{errc::too_short, 0, 4, 3});
    // More rows than 64 bits can multiply are more than there is room for.
    page_expansion many = of;
    many.rows = std::uint64_t{1} << 63;
    many.columns = 2;
    many.row_stride = 2;
    CHECK(expand_pages(run, many, four).error().code == errc::too_short);
    of.row_stride = 0;
    CHECK(expand_pages(run, of, four).error() == failure{errc::too_short, 0, 1, 0});
    of = {.rows = 2, .columns = 1, .row_stride = 1, .blocks = 1};
    CHECK(expand_pages(run, of, four).error() == failure{errc::too_short, 0, 2, 0});
    CHECK(expand_pages(run, {}, four).has_value());
    CHECK(four == std::vector<std::int32_t>(4));
  }
}
