#include <llmmem/paging/prefix_index.hpp>

#include <doctest/doctest.h>

#include <map>
#include <string>
#include <vector>

#include "support/counting_metadata.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

TEST_CASE("the index behaves as a map for any collisions of keys") {
  for (const auto seed : seeds(100)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const auto blocks = 1 + static_cast<std::uint32_t>(seed % 50);
    prefix_index index(blocks);
    std::map<std::uint64_t, block_id> model;  // by number of the key
    std::map<block_id, std::uint64_t> names;
    // Few tags, so that probes run into each other and around the end of the table; equal halves, so that a
    // lookup that compared only one of them would be caught.
    const auto key_of = [&](std::uint64_t number) {
      return block_key{.low = number / 3, .high = ((number % 3) << 60) | (seed % 2 == 0 ? 0 : number << 32)};
    };
    for (int i = 0; i < 500; ++i) {
      const std::uint64_t number = random.below(std::uint64_t{2} * blocks);
      const block_id block{1 + random.below(blocks)};
      if (!model.contains(number) && !names.contains(block)) {
        index.stage(key_of(number), block);
        index.insert(block, 1 + random.below(16U));
        model[number] = block;
        names[block] = number;
      } else if (names.contains(block)) {
        index.erase(block);
        model.erase(names[block]);
        names.erase(block);
      }
      REQUIRE(index.size() == model.size());
      for (std::uint64_t n = 0; n < std::uint64_t{2} * blocks; ++n) {
        const auto expected = model.find(n);
        REQUIRE(index.find(key_of(n)) ==
                (expected == model.end() ? std::nullopt : std::optional(expected->second)));
      }
      REQUIRE(index.audit() == std::vector<std::string>{});
    }
  }
}

TEST_CASE("a staged key is known but not found") {
  prefix_index index(4);
  index.stage({5, 6}, block_id{3});
  CHECK(index.key(block_id{3}) == block_key{5, 6});
  CHECK_FALSE(index.contains(block_id{3}));
  CHECK_FALSE(index.find({5, 6}));
  index.insert(block_id{3}, 7);
  CHECK(index.find({5, 6}) == block_id{3});
  CHECK(index.tokens(block_id{3}) == 7);
}

TEST_CASE("the index holds all its blocks within the memory that it reports") {
  prefix_index index(1000);
  for (std::uint32_t i = 1; i <= 1000; ++i) {
    index.stage(key_from_id(i), block_id{i});
    index.insert(block_id{i}, 16);
  }
  for (std::uint32_t i = 1; i <= 1000; ++i)
    REQUIRE(index.find(key_from_id(i)) == block_id{i});
  CHECK_FALSE(index.find(key_from_id(1001)));
  CHECK(index.metadata_bytes() <= 35 * 1000);
}

TEST_CASE("sizes that cannot be are refused, and missing metadata is reported") {
  CHECK_THROWS_WITH_AS(prefix_index(0), "prefix_index: 0 blocks; use 1 to 2147483646", length_error);
  CHECK_THROWS_WITH_AS(prefix_index(max_blocks + 1), "prefix_index: 2147483647 blocks; use 1 to 2147483646",
                       length_error);
  CHECK(fail_each_allocation([](const metadata_source& source) { prefix_index(10, source); }) == 2);
}

TEST_CASE("a search ends where it began if blocks of every line overflowed") {
  constexpr std::uint32_t blocks = 17;  // three lines
  constexpr std::uint64_t lines = 3;
  prefix_index index(blocks);
  std::uint64_t number = 0;
  const auto key_of_line = [&](std::uint64_t line) {
    ++number;
    return block_key{.low = number, .high = (((line << 32) / lines + (1U << 20)) << 32) | number};
  };
  // Each line is filled until one block goes on to the next, then emptied of all that began there.
  for (std::uint64_t line = 0; line < lines; ++line) {
    std::vector<block_id> here;
    const std::uint64_t went_on = index.size();
    for (std::uint32_t i = 1; index.size() < went_on + 13 - (line == 0 ? 0 : 1); ++i) {
      if (index.contains(block_id{i})) continue;
      index.stage(key_of_line(line), block_id{i});
      index.insert(block_id{i}, 1);
      here.push_back(block_id{i});
    }
    here.pop_back();
    index.erase(here);
    REQUIRE(index.size() == line + 1);
  }
  REQUIRE(index.audit() == std::vector<std::string>{});
  for (std::uint64_t line = 0; line < lines; ++line)
    CHECK(index.find(key_of_line(line)) == std::nullopt);
}
