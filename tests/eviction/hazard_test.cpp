#include <llmmem/eviction/hazard.hpp>
#include <llmmem/eviction/lru.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <numbers>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "support/counting_metadata.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

/// Spread as a digest is.
std::uint64_t digest(std::uint64_t content) {
  return random_numbers(content).next() | 1;
}

/// The definition, written down without a thought for cost: every idle period there ever was, and sums over
/// all of them whenever the model is fitted. Good for fewer operations than the history remembers.
class hazard_oracle {
 public:
  void insert(slot_id slot, const access_hint& hint) {
    entry e{.content = hint.content,
            .length = length_class(hint.chain),
            .is_end = hint.chain != 0 && hint.position + 1 == hint.chain};
    if (hint.content != 0) {
      for (period& p : periods_) {
        if (p.content == hint.content && !p.ended) {
          e.uses = p.uses + 1;
          reuse(p);
        }
      }
    }
    entries_[slot] = e;
  }
  void touch(slot_id slot, const access_hint& hint) {
    entry& e = entries_.at(slot);
    ++e.uses;
    if (hint.content != 0) e.content = hint.content;
    if (hint.chain != 0 && hint.position + 1 != hint.chain) e.is_end = false;
    if (!e.period) return;
    pin(slot);
    unpin(slot);
  }
  void pin(slot_id slot) {
    entry& e = entries_.at(slot);
    reuse(periods_[*e.period]);
    e.period.reset();
  }
  void unpin(slot_id slot) {
    entry& e = entries_.at(slot);
    ++now_;
    e.period = periods_.size();
    periods_.push_back({.content = e.content, .uses = e.uses, .in_class = class_of(e), .begun = now_});
    if (now_ % 256 == 0) fit();
  }
  void erase(slot_id slot) {
    entry& e = entries_.at(slot);
    if (e.period) periods_[*e.period].ended = now_;
    entries_.erase(slot);
  }
  void evict(slot_id slot) { entries_.erase(slot); }

  [[nodiscard]] std::optional<slot_id> victim() const {
    std::optional<slot_id> least;
    std::pair<double, std::uint64_t> least_rank;
    for (const auto& [slot, e] : entries_) {
      if (!e.period) continue;
      const period& p = periods_[*e.period];
      const std::pair rank{rate(p.in_class, now_ - p.begun), p.begun};
      if (least && least_rank < rank) continue;
      least = slot;
      least_rank = rank;
    }
    return least;
  }
  [[nodiscard]] bool known(slot_id slot) const { return entries_.contains(slot); }
  [[nodiscard]] bool pinned(slot_id slot) const { return !entries_.at(slot).period; }

  hazard_oracle() { fit(); }

 private:
  struct entry {
    std::uint64_t content = 0;
    std::uint32_t uses = 1;
    std::uint32_t length = 0;
    bool is_end = false;
    std::optional<std::size_t> period{};  // of a candidate
  };
  struct period {
    std::uint64_t content = 0;
    std::uint32_t uses = 1;
    std::uint32_t in_class = 0;
    std::uint64_t begun = 0;
    std::optional<std::uint64_t> ended{};
    bool reused = false;
  };

  static std::uint32_t length_class(std::uint32_t chain) {
    std::uint32_t doublings = 0;
    while (chain >= 2 && doublings < 7) {
      chain /= 2;
      ++doublings;
    }
    return doublings;
  }
  static std::uint32_t class_of(const entry& e) {
    const std::uint32_t most[] = {1, 2, 3, 5, 8, 16};
    std::uint32_t used = 0;
    while (used < 6 && e.uses > most[used])
      ++used;
    if (e.is_end) return used;
    return used == 0 ? 7 + e.length : 14 + used;
  }
  void reuse(period& p) {
    p.ended = now_;
    p.reused = true;
  }

  void fit() {
    std::vector<std::vector<double>> reached(21, std::vector<double>(40));
    std::vector<double> reused(21);
    std::vector<double> reused_at(40);
    for (const period& p : periods_) {
      const std::uint64_t age = p.ended.value_or(now_) - p.begun;
      for (std::uint32_t s = 0; s < 15; ++s) {
        if (s == 0 || age >= std::uint64_t{1} << s) ++reached[p.in_class][s];
      }
      if (!p.reused) continue;
      ++reused[p.in_class];
      std::uint32_t span = 0;
      while (age >= std::uint64_t{2} << span)
        ++span;
      ++reused_at[span];
    }
    std::vector<double> chance(40);
    double before = 0.01;
    for (std::uint32_t s = 0; s < 40; ++s) {
      double all = 0;
      for (const auto& of_class : reached)
        all += of_class[s];
      chance[s] = before = std::min(0.9, (reused_at[s] + 50 * before) / (all + 50));
      curve_[s] = chance[s] / static_cast<double>(std::uint64_t{1} << s);
    }
    for (std::uint32_t s = 39; s-- > 0;)
      curve_[s] = std::max(curve_[s], curve_[s + 1]);
    for (std::uint32_t c = 0; c < 21; ++c) {
      double expected = 0;
      for (std::uint32_t s = 0; s < 15; ++s)
        expected += reached[c][s] * chance[s];
      double root = c < 7 ? 0.31622776601683794 : 1;
      for (std::uint32_t used = c < 7 ? c : c < 15 ? 0 : c - 14; used > 0; --used)
        root *= std::numbers::sqrt2;
      factor_[c] = (reused[c] + 500 * root) / (expected + 500 / root);
    }
    // No more uses, no smaller a factor; and no end of a chain with a larger one than what is like it.
    double most = factor_[0];
    for (std::uint32_t c = 7; c < 15; ++c) {
      factor_[c] = std::max(factor_[c], factor_[0]);
      most = std::max(most, factor_[c]);
    }
    for (std::uint32_t c = 15; c < 21; ++c)
      factor_[c] = most = std::max({most, factor_[c], factor_[c - 14]});
  }

  [[nodiscard]] double rate(std::uint32_t in, std::uint64_t age) const {
    std::uint32_t s = 0;
    while (age >= std::uint64_t{2} << s)
      ++s;
    const auto width = static_cast<double>(std::uint64_t{1} << s);
    const double into = age == 0 ? 0 : (static_cast<double>(age) - width) / width;
    return factor_[in] * (curve_[s] + into * (curve_[s + 1] - curve_[s]));
  }

  std::map<slot_id, entry> entries_;
  std::vector<period> periods_;
  std::uint64_t now_ = 0;
  double curve_[40]{};
  double factor_[21]{};
};

/// A cache of chains run by a policy, as a paged cache runs one: a request uses what it finds of its chain,
/// brings in the rest, and lets go of all of it tail first; then the surplus leaves.
template <class Policy>
class chain_cache {
 public:
  explicit chain_cache(std::uint32_t capacity)
      : policy_(slot_count{capacity + longest}), contents_(capacity + longest), capacity_(capacity) {
    for (std::uint32_t i = capacity + longest; i > 0; --i)
      free_.push_back(slot_id{i - 1});
  }

  /// Returns how many entries were found.
  std::uint64_t request(const std::vector<std::uint64_t>& chain) {
    std::vector<slot_id> held;
    access_hint hint{.chain = static_cast<std::uint32_t>(chain.size())};
    for (const std::uint64_t content : chain) {
      hint.content = digest(content);
      hint.parent = held.empty() ? no_slot : held.back();
      hint.position = static_cast<std::uint32_t>(held.size());
      const auto found = cached_.find(content);
      if (found != cached_.end()) {
        held.push_back(found->second);
        policy_.pin(held.back());
        policy_.touch(held.back(), hint);
      } else {
        held.push_back(free_.back());
        free_.pop_back();
        cached_[content] = held.back();
        contents_[to_index(held.back())] = content;
        if (held.size() > 1) children_[chain[held.size() - 2]].insert(content);
        policy_.insert(held.back(), hint);
        ++missed_;
      }
    }
    const std::uint64_t hits = chain.size() - std::exchange(missed_, 0);
    for (std::size_t i = held.size(); i > 0; --i)
      policy_.unpin(held[i - 1]);
    while (cached_.size() > capacity_)
      drop();
    return hits;
  }

  [[nodiscard]] bool holds(std::uint64_t content) const { return cached_.contains(content); }
  [[nodiscard]] std::uint64_t orphans() const { return orphans_; }
  [[nodiscard]] const std::vector<std::uint64_t>& dropped() const { return dropped_; }

 private:
  static constexpr std::uint32_t longest = 64;

  void drop() {
    const slot_id slot = policy_.victim().value();
    const std::uint64_t content = contents_[to_index(slot)];
    for (const std::uint64_t child : children_[content])
      orphans_ += cached_.contains(child) ? 1U : 0U;
    detail::evict(policy_, slot);
    cached_.erase(content);
    free_.push_back(slot);
    dropped_.push_back(content);
  }

  Policy policy_;
  std::vector<slot_id> free_;
  std::vector<std::uint64_t> contents_;
  std::map<std::uint64_t, slot_id> cached_;
  std::map<std::uint64_t, std::set<std::uint64_t>> children_;
  std::vector<std::uint64_t> dropped_;
  std::uint64_t capacity_;
  std::uint64_t missed_ = 0;
  std::uint64_t orphans_ = 0;
};

/// Conversations that grow, some behind a shared first entry, some forking; and prompts seen once.
std::vector<std::vector<std::uint64_t>> chat(std::uint64_t seed, int requests) {
  random_numbers random(seed);
  std::vector<std::vector<std::uint64_t>> conversations;
  std::vector<std::vector<std::uint64_t>> asked;
  std::uint64_t fresh = 10;
  for (int i = 0; i < requests; ++i) {
    if (conversations.size() < 4 || random.once_in(3)) {
      conversations.push_back({random.below(std::uint64_t{3})});
    }
    auto& chosen = conversations[random.below(conversations.size())];
    if (random.once_in(10)) chosen.resize(1 + random.below(chosen.size()));
    for (std::uint64_t more = 1 + random.below(std::uint64_t{6}); more > 0 && chosen.size() < 60; --more)
      chosen.push_back(fresh++);
    asked.push_back(chosen);
    asked.back().push_back(fresh++);  // the short last block, which the next turn replaces
  }
  return asked;
}

std::vector<std::uint64_t> chain_of(std::uint64_t first, std::uint64_t length) {
  std::vector<std::uint64_t> chain;
  chain.reserve(length);
  for (std::uint64_t i = 0; i < length; ++i)
    chain.push_back(first + i);
  return chain;
}

}  // namespace

TEST_CASE("hazard evicts what its definition ranks lowest") {
  for (const auto seed : seeds(20)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::uint32_t slots = 2 + static_cast<std::uint32_t>(seed % 40);
    hazard_eviction policy(slot_count{slots});
    hazard_oracle model;
    for (int i = 0; i < 4000; ++i) {
      const slot_id slot{random.below(slots)};
      const std::uint32_t chain = random.below(std::uint32_t{200});
      const access_hint hint{
          .content = random.once_in(8) ? 0 : digest(to_index(slot) + 100 * random.below(4U)),
          .position = chain == 0 || random.once_in(3) ? chain - 1 : random.below(chain),
          .chain = random.once_in(5) ? 0 : chain};
      if (!model.known(slot)) {
        policy.insert(slot, hint);
        model.insert(slot, hint);
      } else if (random.once_in(6)) {
        access_hint same = hint;
        same.content = 0;
        policy.touch(slot, same);
        model.touch(slot, same);
      } else if (random.once_in(20)) {
        policy.erase(slot);
        model.erase(slot);
      } else if (model.pinned(slot)) {
        policy.unpin(slot);
        model.unpin(slot);
      } else if (random.once_in(3)) {
        policy.pin(slot);
        model.pin(slot);
      } else if (const auto victim = policy.victim()) {
        policy.evict(*victim);
        model.evict(*victim);
      }
      REQUIRE(policy.victim() == model.victim());
      for (std::uint32_t s = 0; s < slots; ++s) {
        REQUIRE(policy.is_candidate(slot_id{s}) == (model.known(slot_id{s}) && !model.pinned(slot_id{s})));
      }
    }
  }
}

TEST_CASE("every entry of a chain leaves after the entries that continue it") {
  for (const auto seed : seeds(20)) {
    CAPTURE(seed);
    chain_cache<hazard_eviction> cache(static_cast<std::uint32_t>(40 + seed * 13 % 300));
    for (const auto& chain : chat(seed, 2000))
      cache.request(chain);
    REQUIRE(!cache.dropped().empty());
    REQUIRE(cache.orphans() == 0);
  }
}

TEST_CASE("the same requests evict the same entries in the same order") {
  for (const auto seed : seeds(5)) {
    CAPTURE(seed);
    chain_cache<hazard_eviction> first(200);
    chain_cache<hazard_eviction> second(200);
    for (const auto& chain : chat(seed, 1000))
      first.request(chain);
    for (const auto& chain : chat(seed, 1000))
      second.request(chain);
    CHECK(first.dropped() == second.dropped());
  }
}

TEST_CASE("a scan of prompts seen once does not flush prefixes in use") {
  chain_cache<hazard_eviction> learned(400);
  chain_cache<lru_eviction> recent(400);
  std::uint64_t fresh = 1'000'000;
  std::uint64_t hits = 0;
  std::uint64_t hits_by_recency = 0;
  const auto round = [&] {
    for (std::uint64_t hot = 0; hot < 10; ++hot) {
      hits += learned.request(chain_of(hot * 100, 20));
      hits_by_recency += recent.request(chain_of(hot * 100, 20));
    }
    for (int i = 0; i < 40; ++i, fresh += 20) {  // twice what fits
      learned.request(chain_of(fresh, 20));
      recent.request(chain_of(fresh, 20));
    }
  };
  for (int i = 0; i < 50; ++i)
    round();
  hits = hits_by_recency = 0;
  for (int i = 0; i < 10; ++i)
    round();
  CHECK(hits >= 10 * 190);  // all but the ends of the hot chains
  CHECK(hits_by_recency == 0);
}

TEST_CASE("hazard forgets what it learned when the traffic changes") {
  // Prompts of one length return once, after more entries than fit, the others never; then the lengths change
  // places. Recency alone finds nothing.
  chain_cache<hazard_eviction> cache(300);
  std::uint64_t fresh = 1'000;
  const auto hits_of = [&](std::uint64_t returning, std::uint64_t single, int rounds) {
    std::vector<std::uint64_t> waiting;
    std::uint64_t hits = 0;
    for (int i = 0; i < rounds; ++i, fresh += 200) {
      waiting.push_back(fresh);
      cache.request(chain_of(fresh, returning));
      for (std::uint64_t j = 0; j < 5; ++j)
        cache.request(chain_of(fresh + 40 * (j + 1), single));
      if (waiting.size() > 12) {
        hits += cache.request(chain_of(waiting.front(), returning));
        waiting.erase(waiting.begin());
      }
    }
    return hits;
  };
  hits_of(12, 6, 2000);
  CHECK(hits_of(12, 6, 200) > 200 * 6);
  CHECK(hits_of(6, 12, 200) == 0);  // it still keeps what used to return
  hits_of(6, 12, 4000);
  CHECK(hits_of(6, 12, 200) > 200 * 5);
}

TEST_CASE("an evicted entry is recognised by its contents when it returns") {
  hazard_eviction policy(slot_count{3});
  const auto use = [&](std::uint32_t slot, std::uint64_t content) {
    policy.insert(slot_id{slot}, {.content = content, .position = 0, .chain = 2});
    policy.unpin(slot_id{slot});
  };
  for (int i = 0; i < 3; ++i) {
    use(0, digest(1));
    policy.evict(slot_id{0});
  }
  use(0, digest(1));
  use(1, digest(2));
  use(2, digest(3));
  CHECK(policy.victim() == slot_id{1});  // slot 0 is older, but used four times

  SUBCASE("an erased entry is not recognised") {
    policy.erase(slot_id{0});
    use(0, digest(1));
    policy.erase(slot_id{1});
    use(1, digest(2));
    CHECK(policy.victim() == slot_id{2});  // all used once: the oldest
  }
}

TEST_CASE("before any history, the oldest of equally often used entries leaves first") {
  hazard_eviction policy(slot_count{4});
  for (std::uint32_t i = 0; i < 4; ++i) {
    policy.insert(slot_id{i});
    policy.unpin(slot_id{i});
  }
  CHECK(policy.victim() == slot_id{0});
  policy.touch(slot_id{0});
  CHECK(policy.victim() == slot_id{1});
  policy.pin(slot_id{1});
  CHECK(policy.victim() == slot_id{2});
  policy.unpin(slot_id{1});
  CHECK(policy.victim() == slot_id{2});
}

TEST_CASE("the end of a chain leaves before the rest until an entry continues it") {
  hazard_eviction policy(slot_count{3});
  const auto use = [&](std::uint32_t slot, std::uint32_t position, std::uint32_t chain) {
    policy.insert(slot_id{slot}, {.content = digest(slot), .position = position, .chain = chain});
    policy.unpin(slot_id{slot});
  };
  use(0, 0, 2);
  use(1, 1, 2);
  CHECK(policy.victim() == slot_id{1});
  policy.touch(slot_id{1}, {.content = digest(1), .parent = slot_id{0}, .position = 1, .chain = 3});
  CHECK(policy.victim() == slot_id{0});
}

TEST_CASE(
    "more uses never lower the rank of an entry, nor does the end of a chain raise it, after any history") {
  detail::idle_history history(32768, {}, "history");
  detail::reuse_model model(history.length());
  const std::uint8_t once = detail::reuse_model::class_of(1, 3, false);
  const std::uint8_t twice = detail::reuse_model::class_of(2, 3, false);
  const std::uint8_t end = detail::reuse_model::class_of(1, 3, true);
  const std::uint8_t end_twice = detail::reuse_model::class_of(2, 3, true);
  for (int i = 0; i < 10'000; ++i) {
    for (const std::uint8_t in : {once, end, twice, end_twice}) {
      const std::uint64_t period = history.begin(0, in, 1);
      model.count_idle(history);
      if (in == twice || (in == once && i % 4 != 0)) continue;
      history.end(period);
      model.count_reuse(in, 0);
    }
  }
  model.fit();
  for (const std::uint64_t age : {0ULL, 1ULL, 7ULL, 100ULL, 10'000ULL, 100'000'000ULL}) {
    CAPTURE(age);
    CHECK(model.rate(end, age) == model.rate(once, age));
    CHECK(model.rate(twice, age) >= model.rate(once, age));
    CHECK(model.rate(twice, age) == model.rate(end_twice, age));
    CHECK(model.rate(twice, age) >= model.rate(twice, age + 1));
  }
}

TEST_CASE("hazard refuses what it cannot index and leaks nothing") {
  CHECK_THROWS_WITH_AS(hazard_eviction{slot_count{0}},
                       "hazard_eviction: capacity is 0; it must be at least 1", length_error);
  CHECK_THROWS_WITH_AS(hazard_eviction{slot_count{max_slots + 1}},
                       "hazard_eviction: capacity 4294967296 exceeds max_slots 4294967295", length_error);
  CHECK(fail_each_allocation([](const metadata_source& source) { hazard_eviction(slot_count{8}, source); }) ==
        6);
  hazard_eviction policy(slot_count{100});
  CHECK(policy.capacity() == slot_count{100});
  CHECK(policy.history() == 32768);
  CHECK(policy.metadata_bytes() == 100 * 8 + 100 * 32 + 32768 * 14);
  CHECK(hazard_eviction(slot_count{10'000}).history() == 65536);
}
