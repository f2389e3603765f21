/// @file
/// Random operations that the rules of `eviction_policy` allow, on a policy and on its definition.
#pragma once

#include <llmmem/eviction/concepts.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"

namespace llmmem_tests {

/// What every oracle knows of its slots. An oracle derives from it and has the operations of a policy, which
/// it tells by these names first, and `victim`.
class slot_states {
 public:
  [[nodiscard]] bool known(llmmem::slot_id slot) const { return pinned_.contains(slot); }
  [[nodiscard]] bool pinned(llmmem::slot_id slot) const { return known(slot) && pinned_.at(slot); }
  [[nodiscard]] bool candidate(llmmem::slot_id slot) const { return known(slot) && !pinned_.at(slot); }
  [[nodiscard]] std::size_t known() const { return pinned_.size(); }

 protected:
  void came(llmmem::slot_id slot) { pinned_[slot] = true; }
  void set_pinned(llmmem::slot_id slot, bool pinned) { pinned_.at(slot) = pinned; }
  void left(llmmem::slot_id slot) { pinned_.erase(slot); }

 private:
  std::map<llmmem::slot_id, bool> pinned_;
};

/// Takes `value` out of `from`; false when it is not there.
template <class T>
bool take_out(std::vector<T>& from, const T& value) {
  const auto at = std::find(from.begin(), from.end(), value);
  if (at == from.end()) return false;
  from.erase(at);
  return true;
}

/// Anything that a policy may rank by.
inline llmmem::access_hint random_hint(random_numbers& random, std::uint32_t slots) {
  llmmem::access_hint hint;
  if (!random.once_in(4)) hint.next_use = random.below(std::uint64_t{50});
  hint.content = random.below(std::uint64_t{slots} * 2 + 2);  // 0: not told
  hint.parent = random.once_in(3) ? llmmem::no_slot : llmmem::slot_id{random.below(slots)};
  hint.position = random.below(std::uint32_t{6});
  hint.cost = static_cast<float>(random.below(std::uint32_t{4}));
  if (random.once_in(2)) hint.keep.priority = static_cast<std::uint8_t>(30 + random.below(std::uint32_t{10}));
  if (random.once_in(3)) hint.keep.until = random.below(std::uint64_t{300});
  return hint;
}

/// One operation on both. `now` is told to policies that keep time.
template <class Policy, class Oracle>
void step(Policy& policy, Oracle& oracle, random_numbers& random, std::uint32_t slots, std::uint64_t now) {
  const llmmem::slot_id slot{random.below(slots)};
  const llmmem::access_hint hint = random_hint(random, slots);
  const auto both = [&](auto&& operation) {
    operation(policy);
    operation(oracle);
  };
  if (random.once_in(12)) {
    if constexpr (requires { oracle.advance(now); }) both([&](auto& p) { p.advance(now); });
  }
  if (!oracle.known(slot)) return both([&](auto& p) { p.insert(slot, hint); });
  if (random.once_in(8)) {
    if constexpr (requires { oracle.retain(slot, hint.keep); })
      return both([&](auto& p) { p.retain(slot, hint.keep); });
    if constexpr (requires { oracle.expect(slot, hint.next_use); })
      return both([&](auto& p) { p.expect(slot, hint.next_use); });
  }
  if (random.once_in(30)) return both([&](auto& p) { p.erase(slot); });
  if (random.once_in(4)) return both([&](auto& p) { p.touch(slot, hint); });
  if (oracle.pinned(slot)) return both([&](auto& p) { p.unpin(slot); });
  if (random.once_in(3)) return both([&](auto& p) { p.pin(slot); });
  // Now and then something else than the victim leaves for lack of room.
  const llmmem::slot_id leaving = random.once_in(10) ? slot : policy.victim().value_or(slot);
  llmmem::detail::evict(policy, leaving);
  if constexpr (requires { oracle.evict(leaving); }) {
    oracle.evict(leaving);
  } else {
    oracle.erase(leaving);
  }
}

/// Random runs in which `check(policy, oracle)` holds after every step; `seed % 60 + 1` slots.
template <class MakePolicy, class MakeOracle, class Check>
void run_beside(MakePolicy&& make_policy, MakeOracle&& make_oracle, Check&& check, std::uint64_t runs = 200,
                std::uint64_t steps = 800) {
  for (const auto seed : seeds(runs)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::uint32_t slots = 1 + static_cast<std::uint32_t>(seed % 60);
    auto policy = make_policy(llmmem::slot_count{slots});
    auto oracle = make_oracle(llmmem::slot_count{slots});
    for (std::uint64_t i = 0; i < steps; ++i) {
      step(policy, oracle, random, slots, i / 3);
      bool candidates_agree = true;
      for (std::uint32_t s = 0; s < slots; ++s) {
        if (policy.is_candidate(llmmem::slot_id{s}) != oracle.candidate(llmmem::slot_id{s}))
          candidates_agree = false;
      }
      REQUIRE(candidates_agree);
      check(policy, oracle);
    }
  }
}

/// The policy names the oracle's victim after every step of every run.
template <class Policy, class Oracle>
void behaves_as_defined() {
  run_beside([](llmmem::slot_count slots) { return Policy(slots); },
             [](llmmem::slot_count slots) { return Oracle(slots); },
             [](const Policy& policy, const Oracle& oracle) {
               const auto named = policy.victim();
               REQUIRE(named == oracle.victim());
             });
}

}  // namespace llmmem_tests
