#include <llmmem/eviction/admission.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <map>
#include <type_traits>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

/// Evenly distributed, as contents are.
[[nodiscard]] std::uint64_t content_of(std::uint64_t id) {
  return random_numbers(id).next();
}

template <class Policy>
[[nodiscard]] bool admits(Policy& policy, std::uint64_t content) {
  const access_hint hint{.content = content};
  return policy.admit({.hint = hint});
}

}  // namespace

TEST_CASE_TEMPLATE("touches of contents that the filters can hold match a count by hand", Policy,
                   second_touch<>, second_touch<3>, second_touch<4>, second_touch<16>) {
  constexpr std::uint32_t n = [] {
    if constexpr (std::is_same_v<Policy, second_touch<>>) return 2U;
    if constexpr (std::is_same_v<Policy, second_touch<3>>) return 3U;
    if constexpr (std::is_same_v<Policy, second_touch<4>>) return 4U;
    return 16U;
  }();
  std::uint64_t wrongly = 0;
  std::uint64_t refused = 0;
  for (const auto seed : seeds(8)) {
    CAPTURE(seed);
    random_numbers random(seed);
    Policy policy(slot_count{500});
    std::map<std::uint64_t, std::uint32_t> touches;
    for (int step = 0; step < 6'000; ++step) {
      const std::uint64_t id = seed * 1'000 + random.below(500U);
      const bool known = ++touches[id] >= n;
      const bool admitted = admits(policy, content_of(id));
      if (known) {
        REQUIRE(admitted);
      } else {
        ++refused;
        wrongly += admitted ? 1 : 0;
      }
    }
  }
  CAPTURE(wrongly);
  CAPTURE(refused);
  CHECK(wrongly * 100 < refused);
}

TEST_CASE("touches are remembered for as many contents as there are slots, and forgotten later") {
  second_touch<3> policy(slot_count{1'000});
  std::uint64_t wrongly = 0;
  for (int touch = 0; touch < 2; ++touch) {
    for (std::uint64_t id = 1; id <= 1'000; ++id)
      wrongly += admits(policy, content_of(id)) ? 1U : 0U;
  }
  for (std::uint64_t id = 1; id <= 1'000; ++id)
    REQUIRE(admits(policy, content_of(id)));
  for (std::uint64_t id = 10'001; id <= 14'000; ++id)
    wrongly += admits(policy, content_of(id)) ? 1U : 0U;
  CHECK(wrongly < 60);  // of 6,000
  std::uint64_t remembered = 0;
  for (std::uint64_t id = 1; id <= 1'000; ++id)
    remembered += admits(policy, content_of(id)) ? 1U : 0U;
  CHECK(remembered < 30);
}

TEST_CASE("touches in two generations count as two") {
  second_touch<3> policy(slot_count{10});
  const std::uint64_t content = content_of(1);
  CHECK_FALSE(admits(policy, content));
  for (std::uint64_t id = 100; id < 110; ++id)
    static_cast<void>(admits(policy, content_of(id)));
  CHECK_FALSE(admits(policy, content));
  CHECK(admits(policy, content));
}

TEST_CASE("unnamed contents are admitted at once") {
  second_touch<5> policy(slot_count{10});
  CHECK(admits(policy, 0));
}
