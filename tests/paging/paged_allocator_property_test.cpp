/// The allocator against what it is for: the memory behind the blocks. Each slot is given the one value that
/// its token's KV could have, a function of the context and all tokens so far, and whatever the allocator
/// does, every living sequence must read its own values back.
#include <llmmem/eviction/any.hpp>
#include <llmmem/paged_allocator.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

/// Every block gets one of two keys: collisions all the time.
struct weak_hash {
  explicit weak_hash(hash_seed) noexcept {}
  [[nodiscard]] block_key root(const prefix_context&) const noexcept { return {}; }
  [[nodiscard]] block_key chain(const block_key&, std::span<const token_id> tokens) const noexcept {
    return {.low = static_cast<std::uint64_t>(tokens[0] & 1), .high = 0};
  }
};

struct named_policy : paged_traits {
  using eviction = any_eviction;
};
struct weak_traits : named_policy {
  using hash = weak_hash;
};
struct trusting_traits : named_policy {
  using verification = trust_hash;
};

struct held_sequence {
  sequence_id id;
  prefix_context context;
  std::vector<token_id> tokens;
  std::vector<std::uint64_t> expected;  // KV of each token
  bool by_length = false;               // extended without telling tokens
};

template <class Traits>
class world {
 public:
  using cache_type = paged_allocator<Traits>;

  explicit world(std::uint64_t seed)
      : random_(seed),
        cache_({.blocks = blocks(seed),
                .block_tokens = block_tokens(seed),
                .max_sequences = 6,
                .max_sequence_tokens = 40,
                .max_idle_blocks = seed % 3 == 0 ? blocks(seed) / 2 : unlimited,
                .max_deferred = blocks(seed),
                .name = "kv"},
               make_eviction(eviction_names[seed % eviction_names.size()], slot_count{blocks(seed) + 1})),
        memory_(cache_.physical_blocks() * cache_.block_tokens()) {}

  void run(int steps) {
    for (int i = 0; i < steps; ++i) {
      step();
      REQUIRE(cache_.audit() == std::vector<std::string>{});
      for (const held_sequence& each : living_)
        check_contents(each);
    }
    // Everything can be given back, and then nothing is in use.
    while (!living_.empty())
      end(living_.size() - 1);
    REQUIRE(stream_.pass(stream_.issue()));
    cache_.collect();
    CHECK(cache_.stats().active_blocks == 0);
    CHECK(cache_.stats().tokens == 0);
    cache_.drop_idle();
    CHECK(cache_.stats().free_blocks == cache_.stats().blocks);
    CHECK(cache_.index().size() == 0);
    CHECK(cache_.audit() == std::vector<std::string>{});
  }

  [[nodiscard]] const cache_type& cache() const { return cache_; }

 private:
  static std::uint64_t blocks(std::uint64_t seed) { return 3 + seed % 30; }
  static std::uint32_t block_tokens(std::uint64_t seed) { return 1 + static_cast<std::uint32_t>(seed % 5); }

  /// KV of a token that follows a token whose KV is `before`.
  static std::uint64_t kv(std::uint64_t before, token_id token) {
    return random_numbers(before * 31 + static_cast<std::uint64_t>(token) + 1).next();
  }
  static std::uint64_t kv_of_context(const prefix_context& context) {
    return random_numbers(context.salt[0] * 7 + context.extra_keys[1]).next();
  }
  static std::uint64_t last_kv(const held_sequence& sequence) {
    return sequence.expected.empty() ? kv_of_context(sequence.context) : sequence.expected.back();
  }

  /// Prompts from a small tree, so that prefixes are shared often.
  std::vector<token_id> prompt() {
    std::vector<token_id> tokens;
    const std::uint64_t length = random_.below(std::uint64_t{18});
    for (std::uint64_t i = 0; i < length; ++i)
      tokens.push_back(static_cast<token_id>(random_.once_in(12) ? 2 : 1));
    return tokens;
  }

  std::uint64_t& slot(sequence_id id, std::uint64_t position) {
    const std::uint64_t block = to_index(cache_.blocks(id)[position / cache_.block_tokens()]);
    return memory_[block * cache_.block_tokens() + position % cache_.block_tokens()];
  }

  void check_contents(const held_sequence& sequence) {
    REQUIRE(cache_.tokens(sequence.id) == sequence.expected.size());
    for (std::uint64_t i = 0; i < sequence.expected.size(); ++i) {
      REQUIRE(slot(sequence.id, i) == sequence.expected[i]);
    }
  }

  void begin() {
    held_sequence fresh;
    if (random_.once_in(3)) fresh.context.salt[0] = 1;
    if (random_.once_in(8)) fresh.context.extra_keys[1] = 9;
    const auto id = cache_.create(fresh.context);
    REQUIRE(id.has_value() == (living_.size() < 6));
    if (!id) {
      CHECK(id.code() == errc::out_of_sequences);
      return;
    }
    fresh.id = *id;
    const std::vector<token_id> tokens = prompt();
    const std::uint64_t foretold = cache_.cached_tokens(tokens, fresh.context);
    const match_result hit = cache_.match(fresh.id, tokens).value();
    CHECK(hit.tokens <= foretold);  // less only where the longest sequence allowed cuts it
    for (std::uint64_t i = 0; i < hit.tokens; ++i) {
      fresh.tokens.push_back(tokens[i]);
      fresh.expected.push_back(kv(last_kv(fresh), tokens[i]));
    }
    hits_ += hit.blocks;
    living_.push_back(fresh);
    check_contents(living_.back());
    append(living_.back(), std::span(tokens).subspan(hit.tokens));
  }

  void append(held_sequence& sequence, std::span<const token_id> tokens) {
    const paged_stats before = cache_.stats();
    const auto done =
        sequence.by_length ? cache_.extend(sequence.id, tokens.size()) : cache_.append(sequence.id, tokens);
    if (!done) {
      CHECK((done.code() == errc::out_of_blocks || done.code() == errc::sequence_full));
      CHECK(cache_.tokens(sequence.id) == sequence.expected.size());
      CHECK(cache_.stats().tokens == before.tokens);
      return;
    }
    CHECK(done->first == sequence.expected.size());
    if (const block_copy copy = done->copy) {
      for (std::uint32_t i = 0; i < copy.tokens; ++i) {
        memory_[to_index(copy.destination) * cache_.block_tokens() + i] =
            memory_[to_index(copy.source) * cache_.block_tokens() + i];
      }
    }
    for (const token_id token : tokens) {
      sequence.tokens.push_back(token);
      sequence.expected.push_back(kv(last_kv(sequence), token));
      slot(sequence.id, sequence.expected.size() - 1) = sequence.expected.back();
    }
  }

  void end(std::size_t i) {
    if (random_.once_in(3)) {
      const host_fence after = random_.once_in(2) ? stream_.issue() : host_fence{};
      if (const auto done = cache_.release_after(living_[i].id, after); !done) {
        REQUIRE(done.code() == errc::deferred_full);
        check_contents(living_[i]);  // it lives on
        REQUIRE(cache_.release(living_[i].id));
      }
    } else {
      REQUIRE(cache_.release(living_[i].id));
    }
    CHECK(cache_.release(living_[i].id).code() == errc::stale_handle);
    living_.erase(living_.begin() + static_cast<std::ptrdiff_t>(i));
  }

  void step() {
    if (living_.size() == 6 && random_.once_in(2)) end(random_.below(living_.size()));
    if (living_.empty() || random_.once_in(4)) return begin();
    const std::size_t i = random_.below(living_.size());
    held_sequence& sequence = living_[i];
    switch (random_.below(9U)) {
      case 0:
      case 1:
        return append(sequence, prompt());
      case 2: {
        const std::vector<token_id> one{static_cast<token_id>(1 + random_.below(2U))};
        return append(sequence, one);
      }
      case 3:
      case 4:
        REQUIRE(cache_.commit(sequence.id));
        return;
      case 5: {
        const auto twin = cache_.fork(sequence.id);
        REQUIRE(twin.has_value() == (living_.size() < 6));
        if (twin) {
          held_sequence copy = sequence;
          copy.id = *twin;
          living_.push_back(copy);
        }
        return;
      }
      case 6: {
        const std::uint64_t keep = random_.below(sequence.expected.size() + 1);
        REQUIRE(cache_.truncate(sequence.id, keep));
        sequence.expected.resize(keep);
        sequence.tokens.resize(keep);
        return;
      }
      case 7:
        if (random_.once_in(6)) {
          sequence.by_length = true;
        } else {
          REQUIRE(stream_.pass(stream_.issue()));
        }
        return;
      default:
        return end(i);
    }
  }

  random_numbers random_;
  cache_type cache_;
  std::vector<std::uint64_t> memory_;
  std::vector<held_sequence> living_;
  host_timeline stream_;

 public:
  std::uint64_t hits_ = 0;
};

template <class Traits>
std::uint64_t worlds_hold(std::uint64_t count) {
  std::uint64_t hits = 0;
  for (const auto seed : seeds(count)) {
    CAPTURE(seed);
    world<Traits> all(seed);
    all.run(400);
    hits += all.hits_;
  }
  return hits;
}

}  // namespace

TEST_CASE("every sequence reads back its own values, whatever is shared, copied, evicted and deferred") {
  CHECK(worlds_hold<named_policy>(250) > 5'000);
}

TEST_CASE("with a hash that collides all the time nobody gets another's values, and sharing still happens") {
  CHECK(worlds_hold<weak_traits>(250) > 500);
}

TEST_CASE("with a trusted hash every sequence reads back its own values too") {
  CHECK(worlds_hold<trusting_traits>(250) > 5'000);
}
