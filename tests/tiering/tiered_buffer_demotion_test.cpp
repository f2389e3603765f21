/// What is clean goes to the next tier before it leaves, where that has lost it: demotion.
#include <llmmem/space/host.hpp>
#include <llmmem/tiered_buffer.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

constexpr std::uint64_t page = 256;

class admit_none {
 public:
  explicit admit_none(slot_count, const metadata_source& = {}) noexcept {}
  [[nodiscard]] bool admit(const admission_request&) noexcept { return false; }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return 0; }
};

/// Pages of host memory in three tiers.
template <class Write = demoting<>, class Admission = admit_all>
struct three_tiers {
  host_space space{{.budget = 1 << 20}};
  tiered_buffer<tier<host_space, lru_eviction, Write>,
                tier<host_space, lru_eviction, write_back, identity_codec, Admission>, host_space>
      buffer;
  std::vector<chunk_handle> chunks;

  three_tiers(std::uint64_t top, std::uint64_t middle)
      : buffer({}, {space, top * page, 64}, {space, middle * page, 64}, {space, 256 * page, 64}) {}
  ~three_tiers() {
    for (const std::string& broken : buffer.audit())
      FAIL_CHECK(broken);
  }
  three_tiers(const three_tiers&) = delete;
  three_tiers& operator=(const three_tiers&) = delete;

  void write(std::size_t i) {
    std::ranges::fill(buffer.write(chunks[i]).value().span(), static_cast<std::byte>(i));
  }
  /// So many, in the last tier only: a plan's drop drops.
  void store(std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      chunks.push_back(buffer.create(page).value());
      write(i);
      REQUIRE(buffer.flush(chunks[i]));
      REQUIRE(buffer.execute(chunks[i], plan_operation::drop, 0) == llmmem::tiering::step_outcome::done);
      static_cast<void>(buffer.execute(chunks[i], plan_operation::drop, 1));
      REQUIRE(buffer.tier_of(chunks[i]).value() == 2);
    }
    REQUIRE(buffer.stats().tiers[0].demotions == 0);
  }
  void read(std::size_t i) {
    const auto lease = buffer.read(chunks[i]).value();
    REQUIRE(lease.span()[page - 1] == static_cast<std::byte>(i));
  }
  void drop(std::size_t i, std::size_t tier) {
    REQUIRE(buffer.execute(chunks[i], plan_operation::drop, tier) == llmmem::tiering::step_outcome::done);
  }
  [[nodiscard]] tier_stats at(std::size_t tier) const { return buffer.stats().tiers[tier]; }
  [[nodiscard]] std::array<std::uint64_t, 3> hits() const { return {at(0).hits, at(1).hits, at(2).hits}; }
};

}  // namespace

TEST_CASE("a chunk that the middle tier lost is stored there before it leaves tier 0, and is found there") {
  three_tiers world(1, 2);
  world.store(2);
  world.read(0);
  world.drop(0, 1);
  world.read(1);  // takes the room of 0, which goes down whole
  CHECK(world.at(0).demotions == 1);
  CHECK(world.at(0).drops == 2);  // the plan's
  CHECK(world.at(0).write_backs == 0);
  CHECK(world.buffer.tier_of(world.chunks[0]).value() == 1);
  CHECK(world.buffer.stats().moved.links[0].offload.bytes == 3 * page);
  world.read(0);
  CHECK(world.at(1).hits == 1);
  CHECK(world.at(0).demotions == 1);  // the middle tier has 1
}

TEST_CASE("an eviction demotes, and a plan's drop drops") {
  three_tiers world(2, 2);
  world.store(1);
  world.read(0);
  world.drop(0, 1);
  world.drop(0, 0);
  CHECK(world.buffer.tier_of(world.chunks[0]).value() == 2);
  world.read(0);
  world.drop(0, 1);
  REQUIRE(world.buffer.evict(world.chunks[0]));
  world.buffer.progress();
  CHECK(world.buffer.tier_of(world.chunks[0]).value() == 1);
  CHECK(world.at(0).demotions == 1);
}

TEST_CASE("without demotion clean copies are dropped") {
  three_tiers<write_back> world(1, 2);
  world.store(2);
  world.read(0);
  world.drop(0, 1);
  world.read(1);
  CHECK(world.buffer.tier_of(world.chunks[0]).value() == 2);
  CHECK(world.at(0).demotions == 0);
}

TEST_CASE("a demotion displaces clean copies only") {
  three_tiers world(2, 1);
  world.store(3);
  world.read(0);
  world.read(1);  // alone in the middle tier
  REQUIRE(world.buffer.evict(world.chunks[0]));
  world.buffer.progress();
  CHECK(world.buffer.tier_of(world.chunks[0]).value() == 1);
  CHECK(world.at(0).demotions == 1);
  world.write(2);
  REQUIRE(world.buffer.evict(world.chunks[2]));
  world.buffer.progress();
  REQUIRE(world.buffer.tier_of(world.chunks[2]).value() == 1);  // dirty there
  REQUIRE(world.buffer.evict(world.chunks[1]));
  CHECK(world.buffer.tier_of(world.chunks[1]).value() == 2);
  CHECK(world.at(0).demotions == 1);
  CHECK(world.at(1).write_backs == 0);
}

TEST_CASE("a chunk that the next tier refuses is not demoted, and is asked about once") {
  three_tiers<demoting<>, admit_none> world(1, 2);
  world.store(2);
  const std::uint64_t before = world.at(1).refusals;
  world.read(0);
  world.read(1);
  CHECK(world.at(0).demotions == 0);
  CHECK(world.at(1).chunks == 0);
  CHECK(world.at(1).refusals - before == 2);
}

TEST_CASE("reads hit as in two lists by hand, with demotion as a victim cache") {
  std::uint64_t demotions = 0;
  for (const auto seed : seeds(20)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::size_t top_room = 1 + random.below(5U);
    const std::size_t middle_room = 2 + random.below(4U);
    three_tiers world(top_room, middle_room);
    world.store(16);
    std::vector<std::size_t> top;
    std::vector<std::size_t> middle;
    std::array<std::uint64_t, 3> hits = world.hits();
    std::uint64_t demoted = 0;
    const auto take = [](std::vector<std::size_t>& list, std::size_t i) { return std::erase(list, i) != 0; };
    const auto put = [](std::vector<std::size_t>& list, std::size_t room, std::size_t i) {
      if (list.size() == room) list.erase(list.begin());
      list.push_back(i);
    };
    for (int step = 0; step < 300; ++step) {
      const std::size_t i = random.once_in(2) ? random.below(16U) : random.below(6U);
      if (take(top, i)) {
        ++hits[0];
      } else {
        const bool is_between = take(middle, i);
        ++hits[is_between ? 1 : 2];
        if (is_between) middle.push_back(i);
        if (top.size() == top_room) {
          const std::size_t victim = top.front();
          top.erase(top.begin());
          if (!std::ranges::count(middle, victim)) {
            ++demoted;
            put(middle, middle_room, victim);
          }
        }
        take(middle, i);
        put(middle, middle_room, i);
      }
      top.push_back(i);
      world.read(i);
      REQUIRE(world.hits() == hits);
      REQUIRE(world.at(0).demotions == demoted);
      REQUIRE(world.at(1).chunks == middle.size());
    }
    demotions += demoted;
  }
  CHECK(demotions > 100);
}

TEST_CASE("demotion reads less from the last tier if tier 0 is the larger one") {
  const auto reads_of_last = []<class Write>(std::type_identity<Write>) {
    three_tiers<Write> world(6, 4);
    world.store(12);
    random_numbers random(1);
    for (int step = 0; step < 2'000; ++step)
      world.read(std::min(random.below(12U), random.below(12U)));
    return world.at(2).hits;
  };
  const std::uint64_t with = reads_of_last(std::type_identity<demoting<>>{});
  const std::uint64_t without = reads_of_last(std::type_identity<write_back>{});
  CAPTURE(with);
  CAPTURE(without);
  CHECK(with < without);
}
