#include <llmmem/paging/group_tables.hpp>

#include <doctest/doctest.h>

#include <llmmem/paging/hybrid_allocator.hpp>

#include <array>
#include <cstdint>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/three_kinds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

static_assert(block_table_source<paging::group_tables<hybrid_allocator<>>>);

TEST_CASE("the tables and slots of every group name the bytes of its tokens") {
  const std::array groups{full_attention({"full", 1, 48, 4}), sliding_window({"window", 1, 16, 8}, 12)};
  for (const auto seed : seeds(40)) {
    CAPTURE(seed);
    random_numbers random(seed);
    hybrid_allocator<> cache({.groups = groups,
                              .budget_bytes = 1 << 16,
                              .page_bytes = 768,
                              .max_sequences = 8,
                              .max_sequence_tokens = 60});
    std::vector<sequence_id> sequences;
    for (std::uint64_t i = random.below(std::uint64_t{6}); i > 0; --i) {
      sequences.push_back(cache.create().value());
      for (std::uint64_t k = random.below(std::uint64_t{4}); k > 0; --k) {
        cache.append(sequences.back(), count_up(0, 1 + random.below(std::uint64_t{15}))).value();
        if (random.once_in(2)) cache.commit(sequences.back()).value();
      }
    }
    for (std::size_t g = 0; g < groups.size(); ++g) {
      const paging::group_tables of(cache, g);
      CHECK(of.block_tokens() == groups[g].block_tokens);
      const table_extent extent = measure_tables(of, sequences).value();
      std::vector<std::int32_t> indptr(extent.num_sequences + 1);
      std::vector<std::int32_t> indices(extent.indices);
      std::vector<std::int32_t> last(extent.num_sequences);
      std::vector<std::int32_t> table(extent.num_sequences * (extent.max_blocks + 1));
      std::vector<std::int32_t> lens(extent.num_sequences);
      const auto csr = write_csr(of, sequences, {indptr, indices, last}).value();
      const auto padded =
          write_padded(of, sequences, {table, lens, static_cast<std::uint32_t>(extent.max_blocks + 1)})
              .value();
      for (std::size_t i = 0; i < sequences.size(); ++i) {
        const auto n = static_cast<std::int32_t>(i);
        const std::uint64_t tokens = cache.tokens(sequences[i]);
        CHECK(csr.tokens(n) == static_cast<std::int64_t>(tokens));
        CHECK(padded.tokens(n) == static_cast<std::int64_t>(tokens));
        std::vector<std::int64_t> slots(tokens);
        REQUIRE(write_slot_mapping(of, sequences[i], 0, slots));
        for (std::uint64_t t = 0; t < tokens; ++t) {
          const block_id block = cache.table(sequences[i], g)[t / groups[g].block_tokens];
          const auto entry = static_cast<std::size_t>(indptr[i]) + t / groups[g].block_tokens;
          CHECK(static_cast<std::uint64_t>(indices[entry]) * cache.layout().unit ==
                cache.pool().offset(block));
          if (block == null_block) {
            CHECK(slots[t] == padding_slot);
            continue;
          }
          const std::uint64_t byte =
              cache.pool().offset(block) + t % groups[g].block_tokens * of.token_bytes();
          CHECK(static_cast<std::uint64_t>(slots[t]) * of.token_bytes() == byte);
          CHECK(csr.slot(n, static_cast<std::int64_t>(t)) == slots[t]);
          CHECK(padded.slot(n, static_cast<std::int64_t>(t)) == slots[t]);
        }
      }
    }
  }
}

TEST_CASE("slots are refused if they cannot count a group's tokens, and tables are not") {
  const std::array groups{full_attention({"full", 1, 48, 4}), state_snapshots("states", 1, 100, 8)};
  hybrid_allocator<> cache({.groups = groups,
                            .budget_bytes = 1 << 16,
                            .page_bytes = 1000,
                            .max_sequences = 8,
                            .max_sequence_tokens = 60,
                            .name = "kv"});
  const std::array sequences{cache.create().value()};
  cache.append(sequences[0], count_up(0, 9)).value();
  std::vector<std::int64_t> slots(9);
  CHECK(write_slot_mapping(paging::group_tables(cache, 0), sequences[0], 0, slots).error().message() ==
        "kv: tokens of group 0 take 48 bytes (0: its blocks are not rows of tokens), and the page size of "
        "1000 bytes is not a multiple, so slots cannot count them; choose a page_bytes that is one, or use "
        "write_table()");
  CHECK(write_slot_mapping(paging::group_tables(cache, 1), sequences[0], 0, slots).error() ==
        failure{errc::no_slots, 1, 0, 1000, "kv"});
  std::vector<std::int32_t> table(3);
  std::vector<std::int32_t> lens(1);
  const auto padded = write_padded(paging::group_tables(cache, 1), sequences, {table, lens, 3}).value();
  CHECK(padded.entry_bytes == static_cast<std::int64_t>(cache.layout().unit));
  CHECK(table[2] == 0);
  CHECK_THROWS_WITH_AS((paging::group_tables(cache, 2)),
                       "kv: tables of group 2 asked for, but the allocator has 2 groups, numbered from 0",
                       argument_error);
}
