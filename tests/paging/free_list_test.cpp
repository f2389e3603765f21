#include <llmmem/paging/block_pool.hpp>
#include <llmmem/paging/free_list.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "support/counting_metadata.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

[[nodiscard]] block_id id(std::uint64_t i) {
  return block_id{static_cast<std::uint32_t>(i)};
}

template <class List>
[[nodiscard]] std::vector<block_id> listed(const List& list) {
  std::vector<block_id> out;
  list.for_each([&](block_id block) { out.push_back(block); });
  return out;
}

using ascending_pool = block_pool<lru_eviction, ascending_free_list>;

}  // namespace

TEST_CASE("the ascending free list returns the next block, otherwise the lowest, as a sorted set would") {
  for (const auto seed : seeds(200)) {
    CAPTURE(seed);
    random_numbers random(seed);
    // Sizes around the edges of one, two and three levels of words.
    constexpr std::array<std::uint64_t, 8> sizes{1, 5, 63, 64, 65, 4'094, 4'096, 5'000};
    const std::uint64_t blocks = sizes[random.below(std::uint64_t{sizes.size()})];
    ascending_free_list list(blocks, {});
    std::set<block_id> oracle;
    for (int i = 0; i < 400; ++i) {
      const block_id block = id(1 + random.below(blocks));
      if (oracle.insert(block).second) {
        list.push(block);
        if (random.once_in(8)) {
          list.undo_push(block);
          oracle.erase(block);
        }
      } else {
        const block_id beside = id(random.below(blocks + 1));
        const block_id next = id(std::uint64_t{to_index(beside)} + 1);
        const block_id expected = oracle.contains(next) ? next : *oracle.begin();
        REQUIRE(list.take(beside) == expected);
        oracle.erase(expected);
      }
      if (random.once_in(50)) {
        const block_id last = id(1 + random.below(blocks));
        list.keep_if([&](block_id each) noexcept { return each <= last; });
        oracle.erase(oracle.upper_bound(last), oracle.end());
      }
      REQUIRE(list.size() == oracle.size());
      REQUIRE(listed(list) == std::vector(oracle.begin(), oracle.end()));
    }
  }
}

TEST_CASE("the stack returns the last freed block, and removes high ids in place") {
  lifo_free_list list(8, {});
  for (const std::uint64_t each : {3U, 7U, 1U, 8U, 2U})
    list.push(id(each));
  list.undo_push(id(2));
  list.keep_if([](block_id each) noexcept { return each <= id(6); });
  CHECK(listed(list) == std::vector{id(3), id(1)});
  CHECK(list.take(id(3)) == id(1));
  CHECK(list.take(null_block) == id(3));
  CHECK(list.size() == 0);
}

TEST_CASE("a free list reports a lack of memory") {
  CHECK(fail_each_allocation([](const metadata_source& source) { ascending_free_list list(100, source); }) ==
        1);
}

TEST_CASE("sequences that grow block by block stay contiguous with an ascending free list") {
  ascending_pool pool({.blocks = 64});
  std::vector<block_id> odd(32);
  std::vector<block_id> even(32);
  REQUIRE(pool.allocate(std::span(odd)));
  REQUIRE(pool.allocate(std::span(even)));
  CHECK(std::is_sorted(odd.begin(), odd.end()));
  REQUIRE(pool.release(std::span<const block_id>(odd)));
  block_id last = odd[9];
  for (int i = 0; i < 5; ++i) {
    block_id next{};
    REQUIRE(pool.allocate(std::span(&next, 1), ignore_eviction{}, last));
    CHECK(to_index(next) == to_index(last) + 1);
    last = next;
  }
}

TEST_CASE_TEMPLATE("a pool in use is resized, and its blocks appear and disappear by their ids", Pool,
                   block_pool<>, ascending_pool) {
  for (const auto seed : seeds(300)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::uint64_t most = 1 + random.below(std::uint64_t{40});
    const std::uint64_t begin = 1 + random.below(most);
    Pool pool({.blocks = begin, .block_capacity = most, .name = "kv"});
    std::vector<block_id> held;
    std::set<block_id> cached;
    const auto forget = [&](std::span<const block_id> blocks) noexcept {
      for (const block_id each : blocks) {
        if (cached.erase(each) != 1) std::abort();
      }
    };
    std::uint64_t usable = begin;
    const auto above = [&] {
      return static_cast<std::uint64_t>(
          std::count_if(held.begin(), held.end(), [&](block_id each) { return to_index(each) > usable; }));
    };
    for (int i = 0; i < 120; ++i) {
      switch (random.below(std::uint32_t{4})) {
        case 0: {
          std::vector<block_id> out(1 + random.below(std::uint64_t{6}));
          const std::uint64_t could = pool.available();
          const auto done = pool.allocate(std::span(out), forget);
          REQUIRE(done.has_value() == (out.size() <= could));
          if (!done) break;
          for (const block_id each : out) {
            REQUIRE(to_index(each) <= usable);
            REQUIRE(std::find(held.begin(), held.end(), each) == held.end());
            held.push_back(each);
          }
          break;
        }
        case 1: {
          if (held.empty()) break;
          const auto which =
              held.begin() + static_cast<std::ptrdiff_t>(random.below(std::uint64_t{held.size()}));
          if (!cached.contains(*which) && random.once_in(2) && to_index(*which) <= usable) {
            pool.mark_cached(*which);
            cached.insert(*which);
          }
          REQUIRE(pool.release(*which));
          held.erase(which);
          break;
        }
        case 2: {  // an idle block is used again
          for (const block_id each : cached) {
            if (std::find(held.begin(), held.end(), each) != held.end()) continue;
            REQUIRE(pool.share(each));
            held.push_back(each);
            break;
          }
          break;
        }
        default: {
          usable = 1 + random.below(most);
          const auto retiring = pool.resize(usable, forget);
          REQUIRE(retiring);
          CHECK(*retiring == above());
          break;
        }
      }
      REQUIRE(pool.audit() == std::vector<std::string>{});
      REQUIRE(pool.blocks() == usable);
      REQUIRE(pool.retiring() == above());
      const block_pool_stats now = pool.stats();
      REQUIRE(now.active == held.size() - above());
      REQUIRE(now.active + now.idle + now.free == usable);
      REQUIRE(cached.size() >= now.idle);
      for (const block_id each : cached)
        REQUIRE(to_index(each) <= usable);
    }
  }
}

TEST_CASE("a size beyond the pool's capacity is refused") {
  block_pool<> pool({.blocks = 4, .block_capacity = 8, .name = "kv"});
  CHECK(pool.block_capacity() == 8);
  CHECK(pool.resize(0).error().message() ==
        "kv: 0 blocks asked for, but the pool allows 1 to 8; build it with a larger block_capacity to grow "
        "further");
  CHECK(pool.resize(9).code() == errc::bad_block_count);
  CHECK(pool.resize(8).value() == 0);
  CHECK(pool.available() == 8);
  CHECK_THROWS_WITH_AS(
      block_pool<>({.blocks = 4, .block_capacity = 3, .name = "kv"}),
      "kv: block_capacity is 3; use 4 (what it starts with) to 2147483646, or 0 for a pool that never grows",
      length_error);
}

TEST_CASE("a refused release of several blocks leaves a shrunken pool unchanged") {
  block_pool<> pool({.blocks = 4});
  std::vector<block_id> out(4);
  REQUIRE(pool.allocate(std::span(out)));
  REQUIRE(pool.release(out[0]));
  REQUIRE(pool.resize(2).value() == 2);
  const std::vector<block_id> wrong{out[0], out[1], out[2], out[3]};
  CHECK(pool.release(std::span<const block_id>(wrong)).code() == errc::double_free);
  CHECK(pool.retiring() == 2);
  CHECK(pool.audit() == std::vector<std::string>{});
}
