#include <llmmem/version/delta.hpp>
#include <llmmem/version/versioned.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "support/heap_counter.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

using bytes = std::vector<std::uint8_t>;

/// What a difference takes: 16 bytes a run, runs with fewer than 16 equal bytes between them being one.
[[nodiscard]] std::uint64_t naive_size(const bytes& a, const bytes& b) {
  std::uint64_t size = 0;
  std::size_t end = 0;  // of the last run
  bool any = false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i]) continue;
    if (any && i - end < 16) {
      size += i + 1 - end;
    } else {
      size += 17;
    }
    any = true;
    end = i + 1;
  }
  return size;
}

void change(bytes& value, random_numbers& random) {
  const std::uint64_t runs = random.below(5U);
  for (std::uint64_t run = 0; run < runs; ++run) {
    const std::size_t at = random.below(value.size());
    const std::size_t length = 1 + random.below(30U);
    for (std::size_t i = at; i < value.size() && i < at + length; ++i)
      value[i] = static_cast<std::uint8_t>(random.below(4U));
  }
  if (random.once_in(20)) {
    for (auto& each : value)
      each = static_cast<std::uint8_t>(random.next());
  }
}

}  // namespace

TEST_CASE("every kept version is restored exactly, and the newest versions that fit are kept") {
  for (const auto seed : seeds(150)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::size_t length = 1 + random.below(300U);
    const delta retain{
        .versions = 1 + random.below(9U), .bytes = random.below(600U), .views = random.below(4U)};
    versioned<bytes, delta> state(retain, bytes(length));
    std::vector<bytes> all;            // every version
    std::vector<std::uint64_t> sizes;  // of the differences that are kept, oldest first
    using pinned = decltype(state)::pinned;
    std::vector<pinned> held;
    bytes value(length);
    for (int step = 0; step < 120; ++step) {
      CAPTURE(step);
      if (random.once_in(2)) {
        change(value, random);
        const auto given = state.publish(value);
        if (!given) {
          CHECK(given.code() == errc::version_pinned);
          CHECK(held.size() > retain.views);
          if (!all.empty()) value = all.back();
          continue;
        }
        if (!all.empty()) {
          const std::uint64_t size = naive_size(all.back(), value);
          const auto sum = [&] {
            std::uint64_t total = 0;
            for (const std::uint64_t each : sizes)
              total += each;
            return total;
          };
          sizes.push_back(size);
          while (!sizes.empty() && (sizes.size() >= retain.versions || sum() > retain.bytes))
            sizes.erase(sizes.begin());
          REQUIRE(state.delta_bytes() == sum());
        }
        all.push_back(value);
      } else if (random.once_in(3) && !held.empty()) {
        held.erase(held.begin() + static_cast<std::ptrdiff_t>(random.below(held.size())));
      } else {
        const std::uint64_t wanted = random.below(all.size() + 2);
        auto pin = state.pin(version_id{wanted});
        const std::uint64_t first = all.size() - sizes.size();
        bool is_held = false;
        for (const pinned& each : held)
          is_held = is_held || to_number(each.version()) == wanted;
        if (pin) {
          REQUIRE((is_held || (wanted >= first && wanted <= all.size())));
          CHECK(to_number(pin->version()) == wanted);
          held.push_back(*std::move(pin));
        } else if (wanted == 0 || wanted > all.size()) {
          CHECK(pin.code() == errc::no_such_version);
        } else if (wanted < first) {
          CHECK(pin.code() == errc::version_expired);
          CHECK(pin.error().found == to_number(state.oldest()));
        } else {
          CHECK(pin.code() == errc::table_full);
          CHECK(held.size() >= retain.views);
        }
      }
      for (const pinned& each : held)
        REQUIRE(*each == all[to_number(each.version()) - 1]);
      if (!all.empty()) {
        const std::uint64_t first = all.size() - sizes.size();
        std::uint64_t live = sizes.size() + 1;
        std::uint64_t oldest = first;
        std::vector<std::uint64_t> counted;
        for (const pinned& each : held) {
          const std::uint64_t number = to_number(each.version());
          if (number >= first || std::find(counted.begin(), counted.end(), number) != counted.end()) continue;
          counted.push_back(number);
          ++live;
          oldest = std::min(oldest, number);
        }
        REQUIRE(state.live() == live);
        REQUIRE(to_number(state.oldest()) == oldest);
        REQUIRE(to_number(state.newest()) == all.size());
      }
      REQUIRE(state.audit() == std::vector<std::string>{});
    }
  }
}

TEST_CASE("a version of a million floats with ten changes takes a few hundred bytes") {
  std::vector<float> value(1 << 20, 1.0F);
  versioned<std::vector<float>, delta> state({.versions = 4, .bytes = 4096, .views = 1}, value);
  CHECK(state.publish(value).has_value());
  const std::uint64_t allocated = heap_allocations();
  for (int version = 2; version <= 4; ++version) {
    CHECK(state
              .publish_in_place([&](std::vector<float>& into, const std::vector<float>* newest) noexcept {
                std::memcpy(into.data(), newest->data(), into.size() * sizeof(float));
                for (std::size_t i = 0; i < 10; ++i)
                  into[i * 100'000] = static_cast<float>(version);
              })
              .has_value());
  }
  CHECK(heap_allocations() == allocated);
  CHECK(state.live() == 4);
  CHECK(state.delta_bytes() < 3 * 10 * (16 + 4) + 1);
  CHECK((*state.pin(version_id{2}).value())[300'000] == 2.0F);
  CHECK((*state.pin(version_id{1}).value())[300'000] == 1.0F);
  CHECK(heap_allocations() == allocated);
}

TEST_CASE("plain structs and arrays have versions as vectors do") {
  struct counters {
    std::uint64_t tokens;
    std::uint64_t steps;
  };
  versioned<counters, delta> state({}, {});
  CHECK(state.publish({1, 2}).has_value());
  CHECK(state.publish({1, 3}).has_value());
  CHECK(state.pin(version_id{1}).value()->steps == 2);
  versioned<std::array<int, 4>, delta> array;
  CHECK(array.publish({1, 2, 3, 4}).has_value());
  CHECK(array.publish({1, 2, 3, 5}).has_value());
  CHECK(*array.pin(version_id{1}).value() == std::array{1, 2, 3, 4});
}

TEST_CASE("a difference larger than the budget drops all older versions except pinned ones") {
  versioned<bytes, delta> state({.versions = 8, .bytes = 64, .views = 1}, bytes(100));
  CHECK(state.publish(bytes(100, 1)).has_value());
  CHECK(state.live() == 1);
  bytes next(100, 1);
  next[5] = 2;
  CHECK(state.publish(next).has_value());
  CHECK(state.live() == 2);
  const auto first = state.pin(version_id{1}).value();
  CHECK(state.publish(bytes(100, 9)).has_value());
  CHECK(state.live() == 2);
  CHECK(state.delta_bytes() == 0);
  CHECK(state.pin(version_id{2}).code() == errc::version_expired);
  CHECK(*state.pin(version_id{1}).value() == bytes(100, 1));
  CHECK(*first == bytes(100, 1));
}

TEST_CASE("a value of another length is refused, and leaves no view") {
  versioned<bytes, delta> state({.versions = 4, .bytes = 1000, .views = 0}, bytes(10), "table");
  CHECK(state.publish(bytes(10, 1)).has_value());
  CHECK(state.publish(bytes(11)).error().message() == "table: two lengths must be equal, but are 11 and 10");
  CHECK(state.publish_in_place([](bytes& into, const bytes*) { into.resize(3); }).error().message() ==
        "table: two lengths must be equal, but are 3 and 10");
  CHECK(state.newest() == version_id{1});
  CHECK(state.publish(bytes(10, 2)).has_value());
  const auto none = state.pin(version_id{1});
  CHECK(none.error().message() ==
        "table: a table of fixed size is full: 1 entries needed, 0 free; raise its max_ option");
  CHECK(*state.snapshot().value() == bytes(10, 2));
}

TEST_CASE("a delta without versions is refused") {
  CHECK_THROWS_WITH_AS((versioned<int, delta>({.versions = 0}, 0, "table")),
                       "table: versions is 0; keep at least the newest", argument_error);
}
