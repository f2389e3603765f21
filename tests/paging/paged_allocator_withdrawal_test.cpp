/// Contents that are withdrawn: by other weights, by an error, with the contents before them; and tokens that
/// leave the middle of a sequence.
#include <doctest/doctest.h>

#include <llmmem/eviction/any.hpp>
#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/event_log.hpp>

#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

std::vector<token_id> counting(token_id first, std::size_t count) {
  std::vector<token_id> tokens(count);
  for (std::size_t i = 0; i < count; ++i)
    tokens[i] = first + static_cast<token_id>(i);
  return tokens;
}

template <class Cache>
sequence_id written(Cache& cache, std::span<const token_id> tokens) {
  const sequence_id id = cache.create().value();
  REQUIRE(cache.append(id, tokens));
  REQUIRE(cache.commit(id));
  return id;
}

const std::vector<std::string> sound{};

std::vector<block_key> keys_of(std::initializer_list<std::uint64_t> ids) {
  std::vector<block_key> keys;
  for (const std::uint64_t id : ids)
    keys.push_back(key_from_id(id));
  return keys;
}

struct logged_traits : paged_traits {
  using eviction = any_eviction;
  using observer = event_log;
};

using key_pair = std::pair<std::uint64_t, std::uint64_t>;

/// A router: it knows what the events tell, and nothing else.
class router {
 public:
  void follow(const event_log& log) {
    std::vector<cache_event> batch(4096);
    const event_read got = log.read(next_, batch).value();
    REQUIRE(got.lost == 0);
    next_ = got.next;
    for (std::size_t i = 0; i < got.count; ++i) {
      const key_pair key(batch[i].key.low, batch[i].key.high);
      switch (batch[i].kind) {
        case cache_event_kind::cleared:
          known_.clear();
          epoch_ = batch[i].epoch;
          break;
        case cache_event_kind::stored:
          ++known_[key];
          break;
        case cache_event_kind::removed:
          REQUIRE(known_.contains(key));
          if (--known_[key] == 0) known_.erase(key);
          break;
        default:
          break;
      }
    }
  }

  /// The tokens of `prompt` that the cache should find.
  [[nodiscard]] std::uint64_t predict(std::span<const token_id> prompt, std::uint32_t block_tokens) const {
    const paged_traits::hash hash{hash_seed{}};
    block_key key = paging::root_key(hash, {}, epoch_);
    std::uint64_t found = 0;
    for (; found + block_tokens <= prompt.size(); found += block_tokens) {
      key = hash.chain(key, prompt.subspan(static_cast<std::size_t>(found), block_tokens));
      if (!known_.contains({key.low, key.high})) break;
    }
    return found;
  }

 private:
  std::map<key_pair, int> known_;
  std::uint64_t next_ = 0;
  std::uint64_t epoch_ = 0;
};

}  // namespace

TEST_CASE("a key is found only after the predecessor with which it was cached") {
  paged_allocator<> cache({.blocks = 16, .block_tokens = 4});
  const sequence_id id = cache.create().value();
  REQUIRE(cache.extend(id, 8));
  const auto pair = keys_of({1, 2});
  CHECK(cache.commit(id, {.keys = pair, .tokens = 8}).value() == 2);
  const auto found = [&](std::initializer_list<std::uint64_t> ids) {
    const auto keys = keys_of(ids);
    const sequence_id asked = cache.create().value();
    const std::uint64_t tokens = cache.match(asked, {.keys = keys, .tokens = keys.size() * 4})->tokens;
    CHECK(cache.expect({.keys = keys, .tokens = keys.size() * 4}, {}, 1) == tokens);
    REQUIRE(cache.release(asked));
    return tokens;
  };
  CHECK(found({1, 2}) == 8);
  CHECK(found({1, 2, 1}) == 8);
  CHECK(found({2, 1}) == 0);
  CHECK(found({1, 1}) == 4);
  CHECK(found({3, 2}) == 0);
  CHECK(cache.audit() == sound);
}

TEST_CASE("a commit by keys ends at a key that is cached after another predecessor, and counts it") {
  paged_allocator<> cache({.blocks = 16, .block_tokens = 4});
  const sequence_id id = cache.create().value();
  REQUIRE(cache.extend(id, 16));
  const auto repeats = keys_of({1, 2, 1, 3});
  CHECK(cache.commit(id, {.keys = repeats, .tokens = 16}).value() == 2);
  CHECK(cache.stats().unchained == 1);
  CHECK(cache.index().size() == 2);
  CHECK(cache.audit() == sound);
}

namespace {

template <class Verification>
struct alone_traits : paged_traits {
  using verification = Verification;
  using keys = paging::block_keys;
};

}  // namespace

TEST_CASE_TEMPLATE("the allocator chains keys that name single blocks", Verification, verify_tokens,
                   trust_hash) {
  paged_allocator<alone_traits<Verification>> cache({.blocks = 16, .block_tokens = 4});
  const sequence_id id = cache.create().value();
  REQUIRE(cache.extend(id, 12));
  const auto repeats = keys_of({1, 2, 1});
  CHECK(cache.commit(id, {.keys = repeats, .tokens = 12}).value() == 3);
  const auto found = [&](std::initializer_list<std::uint64_t> ids) {
    const auto keys = keys_of(ids);
    const sequence_id asked = cache.create().value();
    return cache.match(asked, {.keys = keys, .tokens = keys.size() * 4})->tokens;
  };
  CHECK(found({1, 2, 1}) == 12);
  CHECK(found({1, 2, 2}) == 8);
  CHECK(found({2, 1}) == 0);
  const paged_traits::hash hash{hash_seed{}};
  const block_key first = paging::chain_key(hash, hash.root({}), repeats[0]);
  CHECK(cache.index().find(first).has_value());  // a router computes the same
  // More keys than any sequence may have: those behind are not asked for.
  const std::vector<block_key> many(100, key_from_id(1));
  CHECK(cache.match(cache.create().value(), {.keys = many, .tokens = 400})->tokens == 4);
  CHECK(cache.audit() == sound);
}

TEST_CASE("after a reset no earlier contents are found, nor later commits of a running sequence") {
  paged_allocator<> cache({.blocks = 64, .block_tokens = 16});
  const auto prompt = counting(1, 80);
  const sequence_id running = written(cache, std::span(prompt).first(48));
  const sequence_id waiting = cache.create().value();
  CHECK(cache.reset() == 3);
  CHECK(cache.epoch() == 1);
  CHECK(cache.cached_tokens(prompt) == 0);
  REQUIRE(cache.append(running, std::span(prompt).subspan(48)));
  CHECK(cache.commit(running).value() == 0);
  CHECK(cache.cached_tokens(prompt) == 0);
  CHECK(cache.epoch(running) == 0);
  // One that had no tokens is of the new weights.
  CHECK(cache.epoch(waiting) == 1);
  REQUIRE(cache.append(waiting, prompt));
  CHECK(cache.commit(waiting).value() == 5);
  CHECK(cache.cached_tokens(prompt) == 80);
  // So is one that is computed again from its start.
  REQUIRE(cache.truncate(running, 0));
  CHECK(cache.epoch(running) == 1);
  CHECK(cache.match(running, prompt)->tokens == 80);
  CHECK(cache.audit() == sound);
}

TEST_CASE("epochs only grow, and a cache may begin with a later one") {
  paged_allocator<> cache({.blocks = 4, .block_tokens = 4, .epoch = 7, .name = "kv"});
  CHECK(cache.reset(7).error().message() ==
        "kv: epoch 7 asked for, but the current epoch is 7; name a later one");
  CHECK(cache.reset(12).value() == 0);
  const sequence_id id = written(cache, counting(0, 4));
  CHECK(cache.index().key(cache.blocks(id)[0]) != paged_traits::hash{hash_seed{}}.chain({}, counting(0, 4)));
  CHECK(cache.epoch(id) == 12);
}

TEST_CASE("a reset is one event for a log, and one removal per block for older observers") {
  paged_allocator<logged_traits> cache({.blocks = 8, .block_tokens = 4}, make_eviction("lru", slot_count{9}),
                                       event_log({.events = 64}));
  REQUIRE(cache.release(written(cache, counting(0, 8))));
  router follows;
  follows.follow(cache.observer());
  CHECK(follows.predict(counting(0, 8), 4) == 8);
  const std::uint64_t before = cache.observer().end();
  cache.reset(5).value();
  CHECK(cache.observer().end() == before + 1);
  follows.follow(cache.observer());
  CHECK(follows.predict(counting(0, 8), 4) == 0);
  written(cache, counting(0, 8));
  follows.follow(cache.observer());
  CHECK(follows.predict(counting(0, 8), 4) == 8);  // with the keys of the new epoch

  struct counter {
    int* dropped;
    void on_cached(const stored_block&) noexcept {}
    void on_dropped(block_id, const block_key&) noexcept { ++*dropped; }
  };
  struct counted_traits : paged_traits {
    using observer = paging::observers<counter, ignore_cache_events>;
  };
  int dropped = 0;
  paged_allocator<counted_traits> counted({.blocks = 8, .block_tokens = 4},
                                          counted_traits::observer(counter{&dropped}, {}));
  written(counted, counting(0, 8));
  counted.reset();
  CHECK(dropped == 2);
}

TEST_CASE("the cache gives up an invalid block and its followers only, even if sequences hold them") {
  paged_allocator<> cache({.blocks = 64, .block_tokens = 16, .max_sequences = 8});
  const auto prompt = counting(1, 64);
  const auto other = counting(500, 64);
  REQUIRE(cache.release(written(cache, other)));
  const sequence_id first = written(cache, prompt);
  const sequence_id second = cache.create().value();
  REQUIRE(cache.match(second, prompt)->tokens == 64);
  // Another continuation of the same bad block, which nobody holds.
  auto branch = counting(1, 48);
  for (std::size_t i = 32; i < 48; ++i)
    branch[i] += 1000;
  REQUIRE(cache.release(written(cache, branch)));
  const block_id bad = cache.blocks(first)[1];

  CHECK(cache.invalidate(bad).value() == 4);
  CHECK(cache.stats().invalidated == 4);
  CHECK(cache.cached_tokens(prompt) == 16);
  CHECK(cache.cached_tokens(branch) == 16);
  CHECK(cache.cached_tokens(other) == 64);
  for (const sequence_id holder : {first, second})
    CHECK(cache.prefix_tokens(holder) == 16);
  CHECK(cache.audit() == sound);

  // While they go on as they are nothing of theirs is cached.
  REQUIRE(cache.append(second, counting(700, 32)));
  CHECK(cache.commit(second).value() == 0);
  CHECK(cache.cached_tokens(prompt) == 16);

  // Computed again by one, it is found at once, in another block.
  REQUIRE(cache.truncate(first, cache.prefix_tokens(first)));
  REQUIRE(cache.append(first, std::span(prompt).subspan(16)));
  CHECK(cache.prefix_tokens(first) == 64);
  CHECK(cache.commit(first).value() == 3);
  const sequence_id third = cache.create().value();
  CHECK(cache.match(third, prompt)->tokens == 64);
  CHECK(cache.blocks(third)[1] != bad);
  CHECK(cache.blocks(second)[1] == bad);
  CHECK(cache.audit() == sound);
}

TEST_CASE("contents that a fork or shared block continues from an invalid block are also invalid") {
  paged_allocator<> cache({.blocks = 16, .block_tokens = 4, .max_sequences = 8});
  const auto prompt = counting(1, 8);
  const sequence_id one = cache.create().value();
  REQUIRE(cache.append(one, prompt));
  const sequence_id twin = written(cache, prompt);  // caches its own, equal blocks first
  REQUIRE(cache.append(one, counting(9, 4)));
  CHECK(cache.commit(one).value() == 1);  // behind those of the twin
  const sequence_id reader = cache.create().value();
  REQUIRE(cache.match(reader, counting(1, 12))->tokens == 12);
  // Its own first block, which is cached nowhere, was wrong, and so is the third, which the reader shares.
  CHECK(cache.invalidate(cache.blocks(one)[0]).value() == 1);
  CHECK(cache.prefix_tokens(one) == 0);
  CHECK(cache.prefix_tokens(reader) == 8);
  CHECK(cache.prefix_tokens(twin) == 8);
  CHECK(cache.cached_tokens(counting(1, 12)) == 8);
  const sequence_id fork = cache.fork(reader).value();
  CHECK(cache.prefix_tokens(fork) == 8);
  CHECK(cache.audit() == sound);
}

TEST_CASE("invalidations of nothing, of an invalid block and of missing tokens change nothing") {
  paged_allocator<> cache({.blocks = 4, .block_tokens = 4, .name = "kv"});
  const sequence_id id = written(cache, counting(0, 6));
  CHECK(cache.invalidate(block_id{4}).value() == 0);  // free
  CHECK(cache.invalidate(id, 6).value() == 0);
  CHECK(cache.prefix_tokens(id) == 6);
  CHECK(cache.invalidate(id, 5).value() == 0);  // the last block is not cached yet
  CHECK(cache.prefix_tokens(id) == 4);
  CHECK(cache.invalidate(id, 7).error().message() ==
        "kv: 7 tokens named, but sequence 0 holds 6; name fewer, or append them first");
  CHECK(cache.invalidate(block_id{5}).code() == errc::no_such_block);
  CHECK(cache.invalidate(null_block).code() == errc::no_such_block);
  CHECK(cache.invalidate(sequence_id{}, 0).code() == errc::null_handle);
}

TEST_CASE("a router that follows the events predicts the hits under every policy") {
  for (const std::string_view policy : eviction_names) {
    CAPTURE(policy);
    for (const auto seed : seeds(3)) {
      CAPTURE(seed);
      constexpr std::uint32_t block_tokens = 4;
      paged_allocator<logged_traits> cache({.blocks = 40, .block_tokens = block_tokens, .max_sequences = 8},
                                           make_eviction(policy, slot_count{41}),
                                           event_log({.events = 4096}));
      router follows;
      random_numbers random(seed);
      for (int round = 0; round < 300; ++round) {
        const std::uint64_t family = random.below(std::uint64_t{12});
        std::vector<token_id> prompt(4 + random.below(std::uint64_t{40}));
        for (std::size_t i = 0; i < prompt.size(); ++i)
          prompt[i] = static_cast<token_id>(i < 16 ? family % 3 : family * 1000 + i);
        follows.follow(cache.observer());
        REQUIRE(follows.predict(prompt, block_tokens) == cache.cached_tokens(prompt));
        const sequence_id id = cache.create().value();
        const auto hit = cache.match(id, prompt).value();
        if (cache.append(id, std::span(prompt).subspan(hit.tokens))) REQUIRE(cache.commit(id));
        if (random.below(std::uint64_t{8}) == 0) {  // cut into a block, and on with something else
          REQUIRE(cache.truncate(id, random.below(cache.tokens(id) + 1)));
          if (cache.append(id, counting(90'000, 5))) REQUIRE(cache.commit(id));
        }
        if (random.below(std::uint64_t{40}) == 0) cache.reset();
        REQUIRE(cache.release(id));
      }
      CHECK(cache.audit() == sound);
    }
  }
}

TEST_CASE("blocks after withdrawn contents leave with them") {
  paged_allocator<logged_traits> cache({.blocks = 32, .block_tokens = 4},
                                       make_eviction("lru", slot_count{33}), event_log({.events = 256}));
  const auto text = counting(0, 16);
  const sequence_id cut = written(cache, text);
  REQUIRE(cache.truncate(cut, 2));
  REQUIRE(cache.append(cut, counting(90, 3)));  // overwrites the cached first block
  CHECK(cache.stats().orphans == 3);
  CHECK(cache.index().size() == 0);
  written(cache, std::span(text).first(5));
  router follows;
  follows.follow(cache.observer());
  CHECK(follows.predict(text, 4) == 4);
  CHECK(cache.cached_tokens(text) == 4);
}

TEST_CASE("blocks equal to evicted ones are cached when their sequence ends") {
  paged_allocator<> cache({.blocks = 16, .block_tokens = 4});
  const auto prompt = counting(0, 16);
  const sequence_id late = cache.create().value();
  REQUIRE(cache.append(late, prompt));
  REQUIRE(cache.release(written(cache, prompt)));
  CHECK(cache.commit(late).value() == 0);
  CHECK(cache.drop_idle() == 4);
  CHECK(cache.cached_tokens(prompt) == 0);
  REQUIRE(cache.release(late));
  CHECK(cache.cached_tokens(prompt) == 16);
  CHECK(cache.audit() == sound);
}

TEST_CASE(
    "tokens leave the middle of a full sequence, which continues to grow and caches nothing after the gap") {
  paged_allocator<> cache({.blocks = 8, .block_tokens = 4, .max_sequences = 2, .max_sequence_tokens = 16});
  const sequence_id id = written(cache, counting(0, 16));
  CHECK(cache.append(id, counting(16, 1)).code() == errc::sequence_full);
  const std::vector<block_id> before(cache.blocks(id).begin(), cache.blocks(id).end());
  CHECK(cache.remove(id, {4, 12}).value() == 2);
  CHECK(std::vector<block_id>(cache.blocks(id).begin(), cache.blocks(id).end()) ==
        std::vector<block_id>{before[0], before[3]});
  CHECK(cache.tokens(id) == 8);
  CHECK(cache.prefix_tokens(id) == 4);
  CHECK(cache.cached_tokens(counting(0, 16)) ==
        12);  // what was released stays; what was kept may be rewritten
  REQUIRE(cache.append(id, counting(16, 8)));
  CHECK(cache.commit(id).value() == 0);
  const auto keys = keys_of({1, 2, 3, 4});
  CHECK(cache.commit(id, {.keys = keys, .tokens = 16}).value() <= 1);  // the block before the gap has its key
  REQUIRE(cache.truncate(id, 4));
  CHECK(cache.prefix_tokens(id) == 4);
  CHECK(cache.audit() == sound);
}

TEST_CASE("a removed range is refused with the number that is wrong, or is a cut at the end") {
  paged_allocator<> cache({.blocks = 8, .block_tokens = 4, .name = "kv"});
  const sequence_id id = written(cache, counting(0, 14));
  CHECK(cache.remove(id, {3, 8}).error().message() ==
        "kv: a range of sequence 0 begins or ends at token 3; use a multiple of 4, or the sequence's end");
  CHECK(cache.remove(id, {4, 7}).error().message() ==
        "kv: a range of sequence 0 begins or ends at token 7; use a multiple of 4, or the sequence's end");
  CHECK(cache.remove(id, {4, 4}).code() == errc::empty_range);
  CHECK(cache.remove(id, {16, 20}).code() == errc::past_the_end);
  CHECK(cache.tokens(id) == 14);
  CHECK(cache.remove(id, {8, 14}).value() == 2);
  CHECK(cache.prefix_tokens(id) == 8);  // nothing was taken from the middle
  CHECK(cache.remove(id, {}).value() == 2);
  CHECK(cache.tokens(id) == 0);
}

TEST_CASE("removed blocks return after their fence") {
  paged_allocator<> cache({.blocks = 4, .block_tokens = 4, .max_deferred = 2});
  host_timeline stream;
  const sequence_id id = written(cache, counting(0, 16));
  const host_fence done = stream.issue();
  CHECK(cache.remove_after(id, {0, 12}, done).code() == errc::deferred_full);
  CHECK(cache.tokens(id) == 16);
  CHECK(cache.remove_after(id, {4, 12}, done).value() == 2);
  CHECK(cache.stats().deferred == 2);
  CHECK(cache.append(id, counting(0, 8)).code() == errc::out_of_blocks);
  REQUIRE(stream.pass(done));
  CHECK(cache.append(id, counting(0, 8)));
  CHECK(cache.audit() == sound);
}
