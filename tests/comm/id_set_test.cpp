#include <llmmem/comm/id_set.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <random>
#include <set>
#include <type_traits>
#include <vector>

#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

rank_set of(const std::set<std::uint32_t>& ranks) {
  rank_set set;
  for (const std::uint32_t rank : ranks)
    set.insert(rank_id{rank});
  return set;
}

std::vector<std::uint32_t> walked(const rank_set& set) {
  std::vector<std::uint32_t> ranks;
  for (const rank_id rank : set)
    ranks.push_back(to_index(rank));
  return ranks;
}

static_assert(std::is_trivially_copyable_v<rank_set>);
static_assert(rank_set{rank_id{1}, rank_id{1023}}.size() == 2);

}  // namespace

TEST_CASE("a rank_set behaves as a set of numbers") {
  for (const auto seed : seeds(100)) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    std::set<std::uint32_t> a;
    std::set<std::uint32_t> b;
    rank_set ours;
    for (int step = 0; step < 60; ++step) {
      const auto rank = static_cast<std::uint32_t>(random() % (seed % 2 == 0 ? 1024 : 70));
      if (random() % 3 == 0) {
        a.erase(rank);
        ours.erase(rank_id{rank});
      } else {
        a.insert(rank);
        ours.insert(rank_id{rank});
      }
      if (random() % 2 == 0) b.insert(static_cast<std::uint32_t>(random() % 1024));
      REQUIRE(ours.size() == a.size());
      REQUIRE(ours.contains(rank_id{rank}) == a.contains(rank));
    }
    REQUIRE(walked(ours) == std::vector<std::uint32_t>(a.begin(), a.end()));
    REQUIRE(ours == of(a));
    std::set<std::uint32_t> both = a;
    both.insert(b.begin(), b.end());
    std::set<std::uint32_t> common;
    std::set<std::uint32_t> only_a;
    for (const std::uint32_t rank : a)
      (b.contains(rank) ? common : only_a).insert(rank);
    REQUIRE((ours | of(b)) == of(both));
    REQUIRE((ours & of(b)) == of(common));
    REQUIRE((ours - of(b)) == of(only_a));
    REQUIRE(ours.is_subset_of(of(both)));
    REQUIRE(ours.is_subset_of(of(b)) == only_a.empty());
    REQUIRE(rank_set::from_words(ours.words()) == ours);
  }
}

TEST_CASE("the first ranks are as many as asked for, up to all") {
  for (const std::uint32_t count : {0U, 1U, 63U, 64U, 65U, 1023U, 1024U}) {
    const rank_set set = rank_set::first(rank_count{count});
    CHECK(set.size() == count);
    CHECK(set.empty() == (count == 0));
    CHECK(set.contains(rank_id{0}) == (count != 0));
    CHECK_FALSE(set.contains(rank_id{count}));
  }
}

TEST_CASE("ranks past the capacity are never in a set") {
  rank_set set = rank_set::first(rank_count{1024});
  CHECK_FALSE(set.contains(rank_id{1024}));
  CHECK_FALSE(set.contains(rank_id{0xFFFF'FFFF}));
  set.erase(rank_id{1024});
  set.erase(rank_id{0xFFFF'FFFF});
  CHECK(set.size() == 1024);
  CHECK_THROWS_WITH_AS(set.insert(rank_id{1024}), "rank_set: rank 1024; a set holds ranks 0 to 1023",
                       argument_error);
  CHECK_THROWS_WITH_AS(rank_set::first(rank_count{1025}),
                       "rank_set: the first 1025 ranks; a set holds ranks 0 to 1023", argument_error);
  CHECK_THROWS_WITH_AS((rank_set{rank_id{1}, rank_id{4000}}),
                       "rank_set: rank 4000; a set holds ranks 0 to 1023", argument_error);
}

TEST_CASE("a set has a text in words") {
  CHECK(to_text(rank_set{}) == "no rank");
  CHECK(to_text(rank_set{rank_id{3}}) == "rank 3");
  CHECK(to_text(rank_set{rank_id{5}, rank_id{1}}) == "ranks 1 and 5");
  CHECK(to_text(rank_set{rank_id{5}, rank_id{1}, rank_id{2}}) == "ranks 1, 2 and 5");
  CHECK(to_text(rank_set{rank_id{0}, rank_id{63}, rank_id{64}, rank_id{1023}}) == "ranks 0, 63, 64 and 1023");
}
