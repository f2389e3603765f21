#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/block_table.hpp>

#include <doctest/doctest.h>

#include <array>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

struct batch {
  paged_allocator<> cache{{.blocks = 64, .block_tokens = 4, .name = "kv"}};
  std::vector<sequence_id> sequences;

  sequence_id add(std::uint64_t tokens) {
    sequences.push_back(cache.create().value());
    REQUIRE(cache.extend(sequences.back(), tokens));
    return sequences.back();
  }
};

}  // namespace

TEST_CASE("both layouts and the slot mapping name the same slot for every token") {
  for (const auto seed : seeds(50)) {
    CAPTURE(seed);
    random_numbers random(seed);
    batch all;
    const std::uint64_t count = random.below(std::uint64_t{6});
    for (std::uint64_t i = 0; i < count; ++i)
      all.add(random.below(std::uint64_t{30}));
    const table_extent extent = measure_tables(all.cache, all.sequences).value();
    std::vector<std::int32_t> indptr(extent.num_sequences + 1);
    std::vector<std::int32_t> indices(extent.indices);
    std::vector<std::int32_t> last(extent.num_sequences);
    std::vector<std::int32_t> table(extent.num_sequences * (extent.max_blocks + 2));
    std::vector<std::int32_t> lens(extent.num_sequences);
    const auto csr = write_csr(all.cache, all.sequences, {indptr, indices, last}).value();
    const auto padded = write_padded(all.cache, all.sequences,
                                     {table, lens, static_cast<std::uint32_t>(extent.max_blocks + 2)})
                            .value();
    for (std::int32_t i = 0; i < csr.num_sequences; ++i) {
      const sequence_id sequence = all.sequences[static_cast<std::size_t>(i)];
      const std::uint64_t tokens = all.cache.tokens(sequence);
      REQUIRE(csr.tokens(i) == static_cast<std::int64_t>(tokens));
      REQUIRE(padded.tokens(i) == static_cast<std::int64_t>(tokens));
      std::vector<std::int64_t> slots(tokens);
      REQUIRE(write_slot_mapping(all.cache, sequence, 0, slots));
      for (std::uint64_t t = 0; t < tokens; ++t) {
        const auto position = static_cast<std::int64_t>(t);
        const std::uint64_t block = to_index(all.cache.blocks(sequence)[t / 4]);
        REQUIRE(slots[t] == static_cast<std::int64_t>(block * 4 + t % 4));
        REQUIRE(csr.slot(i, position) == slots[t]);
        REQUIRE(padded.slot(i, position) == slots[t]);
      }
      for (std::int64_t b = static_cast<std::int64_t>((tokens + 3) / 4); b < padded.max_blocks; ++b) {
        REQUIRE(padded.block_table[i * padded.max_blocks + b] == 0);  // the null block
      }
    }
  }
}

TEST_CASE("a sequence without tokens has an empty row and a last page of 0") {
  batch all;
  all.add(0);
  all.add(4);
  std::array<std::int32_t, 3> indptr{};
  std::array<std::int32_t, 1> indices{};
  std::array<std::int32_t, 2> last{};
  REQUIRE(write_csr(all.cache, all.sequences, {indptr, indices, last}));
  CHECK(indptr == std::array{0, 0, 1});
  CHECK(last == std::array{0, 4});
}

TEST_CASE("a short buffer is refused with its name and both lengths, and stays unwritten") {
  batch all;
  all.add(9);
  all.add(5);
  std::vector<std::int32_t> two(2, -7);
  std::vector<std::int32_t> three(3, -7);
  std::vector<std::int32_t> four(4, -7);
  std::vector<std::int32_t> five(5, -7);
  CHECK(write_csr(all.cache, all.sequences, {two, five, two}).error().message() ==
        "write_csr: indptr: 3 entries needed, but 2 given; make it longer");
  CHECK(write_csr(all.cache, all.sequences, {three, four, two}).error() == failure{errc::too_short, 0, 5, 4});
  CHECK(write_csr(all.cache, all.sequences, {three, five, std::span(two).first(1)}).error() ==
        failure{errc::too_short, 0, 2, 1});
  CHECK(write_padded(all.cache, all.sequences, {five, two, 2}).error().message() ==
        "write_padded: max_blocks: 3 entries needed, but 2 given; make it longer");
  CHECK(write_padded(all.cache, all.sequences, {five, two, 3}).error() == failure{errc::too_short, 0, 6, 5});
  std::vector<std::int32_t> six(6, -7);
  CHECK(write_padded(all.cache, all.sequences, {six, std::span(two).first(1), 3}).error() ==
        failure{errc::too_short, 0, 2, 1});
  for (const auto* buffer : {&two, &three, &four, &five, &six}) {
    for (const std::int32_t entry : *buffer)
      CHECK(entry == -7);
  }
}

TEST_CASE("a slot mapping past the sequence's end is refused") {
  batch all;
  const sequence_id sequence = all.add(5);
  std::array<std::int64_t, 3> slots{};
  CHECK(write_slot_mapping(all.cache, sequence, 3, slots).error().message() ==
        "write_slot_mapping: 6 tokens named, but sequence 0 holds 5; name fewer, or append them first");
  CHECK(write_slot_mapping(all.cache, sequence, 6, std::span(slots).first(0)).code() == errc::past_the_end);
  CHECK(write_slot_mapping(all.cache, sequence, 2, slots));
}

TEST_CASE("a stale sequence in a batch is refused by its name") {
  batch all;
  all.add(3);
  const sequence_id gone = all.add(3);
  REQUIRE(all.cache.release(gone));
  std::array<std::int32_t, 8> buffer{};
  CHECK(write_csr(all.cache, all.sequences, {buffer, buffer, buffer}).error().message() ==
        "kv: stale handle to slot 1 (generation 1, now 2): it was already released; keep one owner for each "
        "handle");
  CHECK(write_padded(all.cache, all.sequences, {buffer, buffer, 2}).code() == errc::stale_handle);
  std::array<std::int64_t, 1> slots{};
  CHECK(write_slot_mapping(all.cache, gone, 0, slots).code() == errc::stale_handle);
}

// The views are what kernels take by value: usable in constant expressions, so without any host machinery.
static_assert([] {
  constexpr std::array<std::int32_t, 3> indptr{0, 2, 3};
  constexpr std::array<std::int32_t, 3> indices{7, 5, 9};
  constexpr std::array<std::int32_t, 2> last{1, 4};
  const csr_table_view view{indptr.data(), indices.data(), last.data(), 2, 4};
  return view.tokens(0) == 5 && view.tokens(1) == 4 && view.slot(0, 4) == 20 && view.slot(1, 3) == 39;
}());

TEST_CASE("a length past 32 bits is refused, not truncated") {
  struct untold_traits : paged_traits {
    using verification = trust_hash;
  };
  paged_allocator<untold_traits> cache({.blocks = 32'768,
                                        .block_tokens = max_block_tokens,
                                        .max_sequences = 1,
                                        .max_sequence_tokens = unlimited});
  const sequence_id sequence = cache.create().value();
  std::vector<std::int32_t> table(32'768, 7);
  std::array<std::int32_t, 1> length{7};
  REQUIRE(cache.extend(sequence, (std::uint64_t{1} << 31) - 1));
  const auto longest = write_padded(cache, std::span(&sequence, 1), {table, length, 32'768});
  REQUIRE(longest);
  CHECK(longest->tokens(0) == 0x7FFF'FFFF);
  REQUIRE(cache.extend(sequence, 1));
  length[0] = 7;
  CHECK(write_padded(cache, std::span(&sequence, 1), {table, length, 32'768}).code() == errc::out_of_range);
  CHECK(length[0] == 7);
}
