/// What a middle tier lets stay of what passes through it.
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

/// Nothing stays.
class admit_none {
 public:
  explicit admit_none(slot_count, const metadata_source& = {}) noexcept {}
  [[nodiscard]] bool admit(const admission_request&) noexcept { return false; }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return 0; }
};
static_assert(admission_policy<admit_none>);

template <class Admission>
using passed = tier<host_space, lru_eviction, write_back, identity_codec, Admission>;

/// Pages of host memory in three tiers: what was begun is over by the next `progress`.
template <class Admission>
struct three_tiers {
  host_space space{{.budget = 1 << 20}};
  tiered_buffer<host_space, passed<Admission>, host_space> buffer;

  three_tiers(std::uint64_t top, std::uint64_t middle)
      : buffer({}, {space, top * page, 64}, {space, middle * page, 64}, {space, 256 * page, 64}) {}
  ~three_tiers() { audited(); }
  three_tiers(const three_tiers&) = delete;
  three_tiers& operator=(const three_tiers&) = delete;

  void audited() const {
    for (const std::string& broken : buffer.audit())
      FAIL_CHECK(broken);
  }
  /// A page of `value`, in tier 0 only.
  [[nodiscard]] chunk_handle written(int value) {
    const chunk_handle made = buffer.create(page).value();
    std::ranges::fill(buffer.write(made).value().span(), static_cast<std::byte>(value));
    return made;
  }
  void leave(chunk_handle chunk) {
    REQUIRE(buffer.evict(chunk));
    buffer.progress();  // the copy beneath is there
    buffer.progress();  // and what was to go on has
  }
  [[nodiscard]] bool holds(chunk_handle chunk, int value) {
    const auto lease = buffer.read(chunk).value();
    return lease.span()[page - 1] == static_cast<std::byte>(value);
  }
  [[nodiscard]] std::uint64_t in_middle() const { return buffer.stats().tiers[1].chunks; }
  [[nodiscard]] std::uint64_t refusals() const { return buffer.stats().tiers[1].refusals; }
  [[nodiscard]] std::uint64_t hits(std::size_t tier) const { return buffer.stats().tiers[tier].hits; }
};

}  // namespace

TEST_CASE("a refused chunk leaves the middle tier as soon as the next tier has it, up and down") {
  three_tiers<admit_none> world(2, 2);
  auto& buffer = world.buffer;
  const chunk_handle chunk = world.written(1);
  REQUIRE(buffer.evict(chunk));
  buffer.progress();
  CHECK(world.in_middle() == 1);  // on its way
  buffer.progress();
  CHECK(world.in_middle() == 0);
  CHECK(buffer.tier_of(chunk).value() == 2);
  CHECK(world.refusals() == 1);
  CHECK(world.holds(chunk, 1));
  CHECK(world.in_middle() == 0);
  CHECK(world.refusals() == 2);
  CHECK(buffer.stats().tiers[1].drops == 0);  // nobody needed the room
  CHECK(buffer.stats().tiers[1].peak == page);
}

TEST_CASE("a passage up and down again asks once, and a clean copy that comes back is another passage") {
  three_tiers<admit_none> world(2, 2);
  auto& buffer = world.buffer;
  const chunk_handle chunk = world.written(1);
  world.leave(chunk);
  CHECK(world.refusals() == 1);
  for (std::uint64_t time = 1; time <= 3; ++time) {
    buffer.update(chunk, 0, 1).value().span()[0] = std::byte{2};
    world.leave(chunk);
    CHECK(world.refusals() == 1 + time);
    CHECK(world.in_middle() == 0);
  }
  CHECK(world.holds(chunk, 1));
  world.leave(chunk);
  CHECK(world.holds(chunk, 1));
  CHECK(world.refusals() == 6);
  REQUIRE(buffer.discard(chunk));  // what it is now never came up
  std::ranges::fill(buffer.write(chunk).value().span(), std::byte{3});
  world.leave(chunk);
  CHECK(world.refusals() == 7);
}

TEST_CASE("a flush moves refused chunks all the way down, and leaves none between") {
  three_tiers<admit_none> world(2, 2);
  const chunk_handle chunk = world.written(1);
  REQUIRE(world.buffer.flush(chunk));
  CHECK(world.in_middle() == 0);
  CHECK(world.buffer.tier_of(chunk).value() == 0);
  CHECK(world.buffer.stats().moved.links[1].offload.bytes == page);
  REQUIRE(world.buffer.evict(chunk));
  CHECK(world.buffer.tier_of(chunk).value() == 2);
  CHECK(world.holds(chunk, 1));
}

TEST_CASE("prefetches and plans pass refused chunks through") {
  three_tiers<admit_none> world(2, 2);
  auto& buffer = world.buffer;
  const chunk_handle chunk = world.written(1);
  world.leave(chunk);
  REQUIRE(buffer.prefetch(chunk));
  for (int i = 0; i < 4; ++i)
    buffer.progress();
  CHECK(buffer.tier_of(chunk).value() == 0);
  CHECK(world.in_middle() == 0);
  REQUIRE(buffer.evict(chunk));
  REQUIRE(buffer.execute(chunk, plan_operation::fetch, 1) == llmmem::tiering::step_outcome::done);
  buffer.progress();
  CHECK(world.in_middle() == 1);  // until the plan brings it on
  REQUIRE(buffer.execute(chunk, plan_operation::fetch, 0) == llmmem::tiering::step_outcome::done);
  buffer.progress();
  CHECK(world.in_middle() == 0);
  CHECK(world.refusals() == 3);
}

TEST_CASE("chunks stay in the middle tier from their n-th use on, as a count by hand") {
  const auto run = [](auto admission, std::uint32_t n, std::uint64_t seed) {
    using policy = typename decltype(admission)::type;
    random_numbers random(seed);
    three_tiers<policy> world(2, 200);  // the middle one never needs room
    struct known {
      chunk_handle chunk;
      int value = 0;
      std::uint32_t uses = 0;  // passages asked about
      bool above = true;
      bool between = false;
      bool came_up = false;  // since it last went down
      bool dirty = true;     // above
    };
    std::vector<known> all;
    std::array<std::uint64_t, 3> hits{};
    const auto leave = [&](known& k) {
      world.leave(k.chunk);
      if (k.above && k.dirty && !k.between) {
        if (!k.came_up) ++k.uses;
        k.between = k.uses >= n;
      }
      k.above = k.dirty = k.came_up = false;
    };
    for (int step = 0; step < 200; ++step) {
      if (all.size() < 40 && random.once_in(4)) {
        const int value = static_cast<int>(random.below(200U));
        all.push_back({.chunk = world.written(value), .value = value});
        leave(all.back());
        continue;
      }
      if (all.empty()) continue;
      known& k = all[random.below(all.size())];
      ++hits[k.between ? 1 : 2];
      if (random.once_in(3)) {  // made anew: nothing comes up, and what is between is worth nothing
        std::ranges::fill(world.buffer.write(k.chunk).value().span(), static_cast<std::byte>(k.value));
        k.between = false;
        k.above = k.dirty = true;
        leave(k);
        continue;
      }
      if (!k.between) {
        k.between = ++k.uses >= n;
        k.came_up = true;
      }
      k.above = true;
      if (random.once_in(2)) {
        REQUIRE(world.holds(k.chunk, k.value));
      } else {
        world.buffer.update(k.chunk, 0, 1).value().span()[0] = std::byte{1};
        k.dirty = true;
      }
      leave(k);
      REQUIRE(world.hits(1) == hits[1]);
      REQUIRE(world.hits(2) == hits[2]);
      REQUIRE(world.in_middle() ==
              static_cast<std::uint64_t>(std::ranges::count(all, true, &known::between)));
    }
  };
  for (const auto seed : seeds(6)) {
    CAPTURE(seed);
    run(std::type_identity<admit_all>{}, 1, seed);
    run(std::type_identity<second_touch<>>{}, 2, seed);
    run(std::type_identity<second_touch<4>>{}, 4, seed);
  }
}

TEST_CASE("a scan of chunks used once keeps the hot ones in the middle tier, unless the tier admits all") {
  const auto misses_of_hot = []<class Admission>(std::type_identity<Admission>) {
    three_tiers<Admission> world(2, 6);
    std::vector<chunk_handle> hot;
    std::vector<chunk_handle> cold;
    for (int i = 0; i < 4; ++i)
      hot.push_back(world.written(i));
    for (int i = 0; i < 100; ++i)
      cold.push_back(world.written(i));
    world.buffer.flush().value();
    const auto use_hot = [&] {
      const std::uint64_t before = world.hits(2);
      for (int i = 0; i < 4; ++i)
        REQUIRE(world.holds(hot[static_cast<std::size_t>(i)], i));
      return world.hits(2) - before;
    };
    for (int i = 0; i < 3; ++i)
      use_hot();
    std::uint64_t misses = 0;
    for (std::size_t i = 0; i < cold.size(); ++i) {
      REQUIRE(world.holds(cold[i], static_cast<int>(i)));
      if (i % 10 == 9) misses += use_hot();
    }
    return misses;
  };
  CHECK(misses_of_hot(std::type_identity<second_touch<3>>{}) == 0);
  CHECK(misses_of_hot(std::type_identity<admit_all>{}) == 40);
}
