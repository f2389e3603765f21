#include <llmmem/version/double_buffer.hpp>
#include <llmmem/version/latest.hpp>
#include <llmmem/version/stash.hpp>
#include <llmmem/version/versioned.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "support/heap_counter.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

/// Any numbers of slots and kept versions, to hold what all policies stand on to its definition.
struct any_window {
  static constexpr const char* default_name = "any_window";
  std::uint32_t slots_ = 0;
  std::uint32_t kept_ = 0;
  [[nodiscard]] std::uint32_t slots() const noexcept { return slots_; }
  [[nodiscard]] std::uint32_t kept() const noexcept { return kept_; }
  template <class T>
  using state = detail::version_slots<T, any_window>;
};
static_assert(retain_policy<any_window, int>);

/// The definition: all versions ever, with their pins, and which of them are there.
struct naive_versions {
  std::uint64_t slots;
  std::uint64_t kept;
  std::map<std::uint64_t, std::uint64_t> pins{};  // of live versions
  std::uint64_t last = 0;

  /// The version in the way, or 0 when one more can be published.
  [[nodiscard]] std::uint64_t in_the_way() const {
    if (pins.size() < slots) return 0;
    if (slots == kept && pins.begin()->second == 0) return 0;
    return pins.begin()->first;
  }
  void sweep() {
    std::erase_if(pins, [&](const auto& each) { return each.second == 0 && each.first + kept <= last; });
  }
  void publish() {
    pins[++last] = 0;
    sweep();
  }
};

}  // namespace

TEST_CASE("the live versions are those of a map of all pins and a window") {
  for (const auto seed : seeds(200)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::uint32_t slots = 1 + random.below(6U);
    const std::uint32_t kept = 1 + random.below(slots);
    versioned<std::uint64_t, any_window> state({slots, kept});
    naive_versions oracle{slots, kept};
    using pinned = decltype(state)::pinned;
    std::vector<pinned> held;
    for (int step = 0; step < 300; ++step) {
      CAPTURE(step);
      switch (random.below(5U)) {
        case 0:
        case 1: {
          const std::uint64_t in_the_way = oracle.in_the_way();
          const auto given = state.publish((oracle.last + 1) * 1000);
          REQUIRE(given.has_value() == (in_the_way == 0));
          if (given) {
            oracle.publish();
            CHECK(to_number(*given) == oracle.last);
          } else {
            CHECK(given.error() == failure{errc::version_pinned,
                                           static_cast<std::uint32_t>(oracle.pins.at(in_the_way)), in_the_way,
                                           slots});
          }
          break;
        }
        case 2:
        case 3: {
          const std::uint64_t wanted = random.below(oracle.last + 3);
          auto pin = random.once_in(3) ? state.snapshot() : state.pin(version_id{wanted});
          const std::uint64_t seen = pin ? to_number(pin->version()) : wanted;
          if (pin) {
            REQUIRE(oracle.pins.contains(seen));
            ++oracle.pins[seen];
            held.push_back(*std::move(pin));
          } else {
            const bool was = pin.error().wanted != 0 && pin.error().wanted <= oracle.last;
            CHECK(pin.code() == (was ? errc::version_expired : errc::no_such_version));
            CHECK_FALSE(oracle.pins.contains(pin.error().wanted));
            CHECK(pin.error().found ==
                  (was ? (oracle.pins.empty() ? 0 : oracle.pins.begin()->first) : oracle.last));
          }
          break;
        }
        default:
          if (held.empty()) break;
          const std::size_t which = random.below(held.size());
          --oracle.pins[to_number(held[which].version())];
          held[which] = std::move(held.back());
          held.pop_back();
          oracle.sweep();
      }
      REQUIRE(state.live() == oracle.pins.size());
      CHECK(to_number(state.oldest()) == (oracle.pins.empty() ? 0 : oracle.pins.begin()->first));
      CHECK(to_number(state.newest()) == oracle.last);
      for (const pinned& each : held)
        REQUIRE(*each == to_number(each.version()) * 1000);
      const version_stats now = state.stats();
      CHECK(now.published - now.dropped == now.live);
      CHECK(now.pinned == held.size());
      CHECK(now.max_live <= slots);
      REQUIRE(state.audit() == std::vector<std::string>{});
    }
  }
}

TEST_CASE("latest keeps the newest and the pinned versions only") {
  versioned<std::string> names({.versions = 3}, "unset", "names");
  CHECK(names.newest() == no_version);
  CHECK(names.snapshot().error().message() ==
        "names: version 0 was never published, the newest is 0 (0: none); publish first");
  CHECK(names.publish("first").value() == version_id{1});
  auto first = names.snapshot().value();
  CHECK(names.publish("second").value() == version_id{2});
  CHECK(names.publish("third").value() == version_id{3});
  CHECK(*first == "first");
  CHECK(first->size() == 5);
  CHECK(*names.snapshot().value() == "third");
  CHECK(names.live() == 2);
  CHECK(names.pin(version_id{2}).error().message() ==
        "names: version 2 was dropped, the oldest that is kept is 1 (0: none); pin it earlier, or keep more "
        "versions");
  CHECK(names.pin(version_id{4}).error().message() ==
        "names: version 4 was never published, the newest is 3 (0: none); publish first");
  first.release();
  first.release();
  CHECK_FALSE(first);
  CHECK(first.version() == no_version);
  CHECK(names.pin(version_id{1}).code() == errc::version_expired);
  CHECK(names.oldest() == version_id{3});
}

TEST_CASE("a double buffer publishes during a read, and names the version that blocks a second publication") {
  versioned<std::vector<int>, double_buffer> state({}, std::vector<int>(100), "weights");
  const auto fill = [](int value) {
    return [value](std::vector<int>& into, const std::vector<int>*) noexcept {
      for (int& each : into)
        each = value;
    };
  };
  CHECK(state.publish_in_place(fill(1)).has_value());
  auto reader = state.snapshot().value();
  const std::uint64_t allocated = heap_allocations();
  CHECK(state.publish_in_place(fill(2)).has_value());
  const auto refused = state.publish_in_place(fill(3));
  CHECK(heap_allocations() == allocated);
  CHECK(refused.error().message() ==
        "weights: version 1 is pinned 1 times, and none of the 2 slots is free; release it first, or give it "
        "more slots");
  CHECK((*reader)[99] == 1);
  CHECK((*state.snapshot().value())[0] == 2);
  reader.release();
  CHECK(state.publish_in_place(fill(3)).value() == version_id{3});
  CHECK((*state.snapshot().value())[99] == 3);
  CHECK(state.stats() == version_stats{.published = 3,
                                       .refused_publishes = 1,
                                       .pins = 3,
                                       .pinned = 0,
                                       .dropped = 2,
                                       .live = 1,
                                       .max_live = 2});
}

TEST_CASE("a writer sees the newest version, and an exception publishes nothing") {
  versioned<int> state({.versions = 2});
  CHECK(state
            .publish_in_place([](int& into, const int* newest) {
              CHECK(newest == nullptr);
              into = 7;
            })
            .has_value());
  CHECK_THROWS_AS(static_cast<void>(state.publish_in_place([](int& into, const int* newest) {
                    CHECK(*newest == 7);
                    into = 9;
                    throw std::runtime_error("no");
                  })),
                  std::runtime_error);
  CHECK(*state.snapshot().value() == 7);
  CHECK(state.publish(8).value() == version_id{2});
  CHECK(state
            .publish_in_place([&](int& into, const int*) {
              into = 1;
              CHECK(state.publish(5).code() == errc::reentered);
            })
            .value() == version_id{3});
  CHECK(*state.snapshot().value() == 1);
}

TEST_CASE("values that cannot be copied are made one per slot, and moved in") {
  versioned<std::unique_ptr<int>, double_buffer> state(
      double_buffer{}, [](std::size_t i) { return std::make_unique<int>(static_cast<int>(i)); });
  CHECK(state.publish(std::make_unique<int>(5)).has_value());
  CHECK(**state.snapshot().value() == 5);
  static_assert(!std::is_copy_constructible_v<decltype(state)::pinned>);
  static_assert(std::is_nothrow_move_constructible_v<decltype(state)::pinned>);
}

TEST_CASE("a policy without space for a version is refused with both numbers") {
  CHECK_THROWS_WITH_AS(versioned<int>({.versions = 0}, 0, "w"),
                       "w: 0 slots for 1 versions to keep; give it at least one each", argument_error);
  CHECK_THROWS_WITH_AS((versioned<int, any_window>({2, 3})),
                       "any_window: 2 slots for 3 versions to keep; give it at least one each",
                       argument_error);
}
