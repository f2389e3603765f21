/// Beginnings of blocks, equal blocks, retention and admission.
#include <llmmem/eviction/admission.hpp>
#include <llmmem/paged_allocator.hpp>

#include <doctest/doctest.h>

#include <map>
#include <span>
#include <string>
#include <vector>

#include "support/tokens.hpp"

using namespace llmmem;
using llmmem_tests::tokens;

namespace {

struct copying_traits : paged_traits {
  using partial = copy_partial_blocks;
};
struct stealing_traits : paged_traits {
  using partial = steal_partial_blocks;
};
struct twice_traits : paged_traits {
  using admission = second_touch<>;
};
struct full_traits : paged_traits {
  using admission = admit_full_blocks;
};

template <class Cache>
sequence_id write(Cache& cache, std::span<const token_id> prompt) {
  const sequence_id sequence = cache.create().value();
  const match_result hit = cache.match(sequence, prompt).value();
  cache.append(sequence, prompt.subspan(hit.tokens)).value();
  cache.commit(sequence).value();
  return sequence;
}

/// Writes down what it is told.
struct recording_policy : lru_eviction {
  explicit recording_policy(slot_count capacity, const metadata_source& source = {})
      : lru_eviction(capacity, source) {}
  void insert(slot_id slot, const access_hint& hint = {}) noexcept {
    told[to_index(slot)] = hint;
    lru_eviction::insert(slot, hint);
  }
  void touch(slot_id slot, const access_hint& hint = {}) noexcept {
    told[to_index(slot)] = hint;
    lru_eviction::touch(slot, hint);
  }
  void expect(slot_id slot, std::uint64_t next_use) noexcept { told[to_index(slot)].next_use = next_use; }
  void retain(slot_id slot, retention keep) noexcept { told[to_index(slot)].keep = keep; }
  void advance(std::uint64_t time) noexcept { now = time; }

  std::map<std::uint32_t, access_hint> told;
  std::uint64_t now = 0;
};
static_assert(eviction_policy<recording_policy> && retains<recording_policy> &&
              expects_uses<recording_policy> && keeps_time<recording_policy>);

struct recording_traits : paged_traits {
  using eviction = recording_policy;
};

}  // namespace

TEST_CASE("the longest beginning of a cached block is copied") {
  paged_allocator<copying_traits> cache({.blocks = 16, .block_tokens = 4});
  auto one = tokens(8);
  auto two = tokens(8);
  two[5] = 99;  // 1 2 3 4 | 5 99 7 8
  static_cast<void>(write(cache, one));
  const sequence_id second = write(cache, two);
  auto three = tokens(8);
  three[7] = 98;  // 1 2 3 4 | 5 6 7 98: three tokens of the first, one of the second
  const sequence_id third = cache.create().value();
  const match_result hit = cache.match(third, three).value();
  CHECK(hit.tokens == 7);
  CHECK(hit.blocks == 2);
  CHECK(hit.copy.tokens == 3);
  CHECK(hit.copy.destination == cache.blocks(third)[1]);
  CHECK(hit.copy.source != cache.blocks(second)[1]);
  REQUIRE(cache.append(third, std::span(three).subspan(7)));
  CHECK(cache.commit(third).value() == 1);
  CHECK(cache.cached_tokens(three) == 8);
  CHECK(cache.cached_tokens(one) == 8);
  CHECK(cache.stats().partial_hits == 2);  // the second prompt too began like the first
  CHECK(cache.audit() == std::vector<std::string>{});
}

TEST_CASE("an unused block is taken over; one in use, or with followers, is copied") {
  paged_allocator<stealing_traits> cache({.blocks = 16, .block_tokens = 4});
  const auto one = tokens(8);
  const sequence_id first = write(cache, one);
  const block_id tail = cache.blocks(first)[1];
  const block_id head = cache.blocks(first)[0];
  auto two = tokens(8);
  two[6] = 99;
  const sequence_id busy = cache.create().value();
  CHECK(cache.match(busy, two).value().copy.source == tail);
  REQUIRE(cache.release(busy));
  REQUIRE(cache.release(first));

  auto other = tokens(4);
  other[3] = 99;
  const sequence_id behind = cache.create().value();
  CHECK(cache.match(behind, other).value().copy.source == head);
  REQUIRE(cache.release(behind));

  const sequence_id thief = cache.create().value();
  const match_result hit = cache.match(thief, two).value();
  CHECK(hit.tokens == 6);
  CHECK_FALSE(hit.copy);
  CHECK(cache.blocks(thief)[1] == tail);
  CHECK(cache.cached_tokens(one) == 4);
  CHECK(cache.stats().stolen_blocks == 1);
  CHECK(cache.audit() == std::vector<std::string>{});
}

TEST_CASE("without a block for the copy no beginning is reused, and the source stays cached") {
  paged_allocator<copying_traits> cache({.blocks = 2, .block_tokens = 4});
  const sequence_id first = write(cache, tokens(8));
  auto two = tokens(8);
  two[7] = 99;
  const sequence_id second = cache.create().value();
  const match_result hit = cache.match(second, two).value();
  CHECK(hit.tokens == 4);
  CHECK_FALSE(hit.copy);
  CHECK(cache.cached_tokens(tokens(8)) == 8);
  REQUIRE(cache.release(first));
  CHECK(cache.audit() == std::vector<std::string>{});
}

TEST_CASE("the beginning of a block is not shared across tenants") {
  paged_allocator<copying_traits> cache({.blocks = 8, .block_tokens = 4});
  static_cast<void>(write(cache, tokens(4)));
  const sequence_id other = cache.create({.salt = {7, 7}}).value();
  CHECK(cache.match(other, std::span<const token_id>(tokens(3))).value().tokens == 0);
  const sequence_id same = cache.create().value();
  CHECK(cache.match(same, std::span<const token_id>(tokens(3))).value().tokens == 3);
}

TEST_CASE("no beginning is reused of a block that is cached for fewer tokens than it holds") {
  paged_allocator<copying_traits> cache({.blocks = 8, .block_tokens = 4});
  const std::vector<block_key> keys{key_from_id(77)};
  const sequence_id one = cache.create().value();
  REQUIRE(cache.append(one, tokens(4)));
  const sequence_id fork = cache.fork(one).value();
  REQUIRE(cache.commit(fork, {.keys = keys, .tokens = 2}));
  REQUIRE(cache.commit(one));
  REQUIRE(cache.release(one));
  REQUIRE(cache.truncate(fork, 2));
  CHECK_FALSE(cache.append(fork, tokens(2, 90)).value().copy);  // written over in place
  const sequence_id other = cache.create().value();
  CHECK(cache.match(other, tokens(4)).value().tokens == 0);
}

TEST_CASE("if beginnings are shared, at most the requested blocks are hit") {
  paged_allocator<copying_traits> cache({.blocks = 8, .block_tokens = 4});
  REQUIRE(cache.release(write(cache, tokens(4))));
  const sequence_id other = cache.create().value();
  CHECK(cache.match(other, tokens(3)).value().tokens == 3);
  CHECK(cache.stats().hit_blocks == 1);
  CHECK(cache.stats().requested_blocks == 2);  // by the writer, which found none, and by this one
}

TEST_CASE("equal cached blocks replace own ones, at once or behind a fence") {
  paged_allocator<> cache({.blocks = 16, .block_tokens = 4});
  host_timeline stream;
  const auto prompt = tokens(10);
  const sequence_id one = cache.create().value();
  const sequence_id two = cache.create().value();
  for (const sequence_id each : {one, two})
    REQUIRE(cache.append(each, prompt));
  for (const sequence_id each : {one, two})
    REQUIRE(cache.commit(each));
  CHECK(cache.stats().duplicates == 2);
  CHECK(cache.stats().active_blocks == 6);
  SUBCASE("at once") {
    CHECK(cache.deduplicate(two).value() == 2);
    CHECK(cache.stats().active_blocks == 4);
  }
  SUBCASE("behind a fence") {
    const host_fence after = stream.issue();
    CHECK(cache.deduplicate_after(two, after).value() == 2);
    CHECK(cache.stats().active_blocks == 6);
    REQUIRE(stream.pass(after));
    CHECK(cache.collect() == 2);
    CHECK(cache.stats().active_blocks == 4);
  }
  CHECK(cache.blocks(one)[1] == cache.blocks(two)[1]);
  CHECK(cache.blocks(one)[2] != cache.blocks(two)[2]);  // not full
  CHECK(cache.deduplicate(one).value() == 0);
  CHECK(cache.stats().deduplicated == 2);
  CHECK(cache.audit() == std::vector<std::string>{});
}

TEST_CASE("duplicates without space among the deferred frees stay in place") {
  paged_allocator<> cache({.blocks = 16, .block_tokens = 4, .max_deferred = 1, .name = "kv"});
  const auto prompt = tokens(8);
  const sequence_id one = cache.create().value();
  const sequence_id two = cache.create().value();
  for (const sequence_id each : {one, two})
    REQUIRE(cache.append(each, prompt));
  for (const sequence_id each : {one, two})
    REQUIRE(cache.commit(each));
  const std::vector<block_id> before(cache.blocks(two).begin(), cache.blocks(two).end());
  CHECK(cache.deduplicate_after(two, host_fence{}).code() == errc::deferred_full);
  CHECK(before == std::vector<block_id>(cache.blocks(two).begin(), cache.blocks(two).end()));
  CHECK(cache.audit() == std::vector<std::string>{});
}

TEST_CASE("a refused release leaves at most the allowed number of idle blocks") {
  paged_allocator<> cache({.blocks = 16, .block_tokens = 1, .max_idle_blocks = 1, .max_deferred = 1});
  host_timeline stream;
  const sequence_id one = write(cache, tokens(2));
  const sequence_id two = cache.create().value();
  REQUIRE(cache.append(two, tokens(2)));
  REQUIRE(cache.commit(two));
  const sequence_id holder = cache.create().value();
  REQUIRE(cache.match(holder, tokens(1)));
  REQUIRE(cache.release(one));
  const sequence_id gone = write(cache, tokens(1, 50));
  const auto passed = stream.issue();
  REQUIRE(cache.release_after(gone, passed));
  REQUIRE(stream.pass(passed));
  CHECK(cache.deduplicate_after(two, stream.issue()).code() == errc::deferred_full);
  CHECK(cache.audit() == std::vector<std::string>{});
}

TEST_CASE("a kept fork pins its blocks") {
  paged_allocator<> cache({.blocks = 4, .block_tokens = 4});
  const sequence_id system_prompt = write(cache, tokens(8));
  const sequence_id request = cache.fork(system_prompt).value();
  REQUIRE(cache.release(request));
  for (token_id i = 100; i < 200; i += 10) {
    const sequence_id other = write(cache, tokens(8, i));
    REQUIRE(cache.release(other));
  }
  CHECK(cache.cached_tokens(tokens(8)) == 8);
}

TEST_CASE("policies receive contents, places, sessions, costs and worth") {
  paged_allocator<recording_traits> cache({.blocks = 8, .block_tokens = 4});
  const auto prompt = tokens(10);
  const request_hints hints{.session = 77, .cost = 3, .keep = {.priority = 60}};
  const sequence_id one = cache.create({}, hints).value();
  REQUIRE(cache.retain(one, {4, 5}, {.priority = 90, .until = 12}));
  REQUIRE(cache.append(one, prompt));
  REQUIRE(cache.commit(one));
  const auto& told = cache.pool().eviction().told;
  const std::uint32_t head = to_index(cache.blocks(one)[0]);
  const std::uint32_t next = to_index(cache.blocks(one)[1]);
  CHECK(told.at(head).session == 77);
  CHECK(told.at(head).cost == 3);
  CHECK(told.at(head).keep == retention{.priority = 60});
  CHECK(told.at(head).parent == no_slot);
  CHECK(told.at(head).position == 0);
  CHECK(told.at(head).chain == 3);
  CHECK(told.at(head).content == cache.index().key(cache.blocks(one)[0]).low);
  CHECK(told.at(next).parent == slot_id{head});
  CHECK(told.at(next).position == 1);
  CHECK(told.at(next).keep == retention{.priority = 90, .until = 12});

  REQUIRE(cache.retain(one, {0, 4}, {.priority = 10}));
  CHECK(told.at(head).keep == retention{.priority = 10});
  CHECK(told.at(next).keep.priority == 90);
  REQUIRE(cache.retain(one, {}, {.priority = 20}));
  CHECK(told.at(next).keep.priority == 20);
  CHECK(cache.expect(prompt, {}, 5) == 8);
  CHECK(told.at(next).next_use == 5);
  cache.advance(9);
  CHECK(cache.pool().eviction().now == 9);

  const sequence_id two = cache.create({}, {.session = 78}).value();
  REQUIRE(cache.match(two, std::span<const token_id>(prompt)));
  CHECK(told.at(next).session == 78);
  CHECK(told.at(next).parent == slot_id{head});
  CHECK(told.at(next).keep == retention{});
}

TEST_CASE("a sequence remembers the last four retained ranges, of which a later one wins") {
  paged_allocator<recording_traits> cache({.blocks = 8, .block_tokens = 4});
  const sequence_id one = cache.create().value();
  for (std::uint8_t i = 0; i < 5; ++i)
    REQUIRE(cache.retain(one, {i * std::uint64_t{4}, 20}, {.priority = i}));
  REQUIRE(cache.append(one, tokens(20)));
  REQUIRE(cache.commit(one));
  const auto priority = [&](std::size_t i) {
    return int{cache.pool().eviction().told.at(to_index(cache.blocks(one)[i])).keep.priority};
  };
  CHECK(priority(0) == 35);  // the first range is forgotten
  CHECK(priority(1) == 1);
  CHECK(priority(4) == 4);
}

TEST_CASE("hints about contents that are already cached in another block apply to that block") {
  paged_allocator<recording_traits> cache({.blocks = 8, .block_tokens = 4});
  const sequence_id one = cache.create().value();
  const sequence_id two = cache.create().value();
  REQUIRE(cache.append(one, tokens(8)));
  REQUIRE(cache.append(two, tokens(8)));
  REQUIRE(cache.retain(two, {0, 4}, {.priority = 80}));
  REQUIRE(cache.commit(one));
  REQUIRE(cache.commit(two).value() == 0);
  const auto priority = [&](std::size_t i) {
    return int{cache.pool().eviction().told.at(to_index(cache.blocks(one)[i])).keep.priority};
  };
  CHECK(priority(0) == 80);
  CHECK(priority(1) == 35);
  REQUIRE(cache.retain(two, {4, 8}, {.priority = 70}));
  CHECK(priority(1) == 70);
}

TEST_CASE("a retention of a partly committed block applies to it at once") {
  paged_allocator<recording_traits> cache({.blocks = 8, .block_tokens = 4});
  const std::vector<block_key> keys{key_from_id(1), key_from_id(2)};
  const sequence_id one = cache.create().value();
  REQUIRE(cache.extend(one, 8));
  REQUIRE(cache.commit(one, {.keys = keys, .tokens = 6}).value() == 2);
  REQUIRE(cache.retain(one, {4, 6}, {.priority = 60}));
  CHECK(cache.pool().eviction().told.at(to_index(cache.blocks(one)[1])).keep.priority == 60);
}

TEST_CASE("a priority above 100 and a range without tokens are refused") {
  paged_allocator<> cache({.blocks = 8, .name = "kv"});
  const sequence_id one = cache.create().value();
  CHECK(cache.retain(one, {}, {.priority = 101}).error().message() ==
        "kv: priority 101 is out of range; use 0 to 100");
  CHECK(cache.retain(one, {5, 5}, {}).error().message() ==
        "kv: the range of tokens 5 to 5 is empty; its end must be larger than its first");
  CHECK(cache.create({}, {.keep = {.priority = 200}}).code() == errc::bad_priority);
  CHECK(cache.retain({}, {}, {}).code() == errc::null_handle);
}

TEST_CASE("contents written for the second time are cached, complete prompts at once") {
  paged_allocator<twice_traits> cache({.blocks = 32, .block_tokens = 4});
  const auto prompt = tokens(12);
  REQUIRE(cache.release(write(cache, prompt)));
  CHECK(cache.cached_tokens(prompt) == 0);
  CHECK(cache.stats().refused == 3);
  REQUIRE(cache.release(write(cache, prompt)));
  CHECK(cache.cached_tokens(prompt) == 12);

  // A sequence that was refused is seen on, but each block once.
  const auto other = tokens(12, 100);
  const sequence_id growing = write(cache, std::span(other).first(4));
  for (int i = 0; i < 3; ++i)
    CHECK(cache.commit(growing).value() == 0);
  REQUIRE(cache.append(growing, std::span(other).subspan(4)));
  CHECK(cache.commit(growing).value() == 0);
  CHECK(cache.stats().refused == 6);
  REQUIRE(cache.release(write(cache, other)));
  CHECK(cache.cached_tokens(other) == 12);
}

TEST_CASE("contents written in place of refused tokens are judged again") {
  paged_allocator<twice_traits> cache({.blocks = 32, .block_tokens = 4});
  const auto known = tokens(12);
  REQUIRE(cache.release(write(cache, known)));  // seen once
  auto other = known;
  for (std::size_t i = 4; i < other.size(); ++i)
    other[i] += 1'000;
  // Seen once to its end; its first block for the second time.
  const sequence_id one = write(cache, other);
  CHECK(cache.cached_tokens(known) == 4);
  REQUIRE(cache.truncate(one, 4));
  REQUIRE(cache.append(one, std::span(known).subspan(4)));
  CHECK(cache.commit(one).value() == 2);
  CHECK(cache.cached_tokens(known) == 12);
  CHECK(cache.audit() == std::vector<std::string>{});
}

TEST_CASE("a truncation after refused contents does not count as a second write") {
  paged_allocator<twice_traits> cache({.blocks = 64, .block_tokens = 4});
  const sequence_id one = cache.create().value();
  REQUIRE(cache.append(one, tokens(40)));
  CHECK(cache.commit(one).value() == 0);
  REQUIRE(cache.truncate(one, 36));
  CHECK(cache.commit(one).value() == 0);
  REQUIRE(cache.append(one, tokens(4, 500)));
  CHECK(cache.commit(one).value() == 0);
  CHECK(cache.stats().refused == 11);
  REQUIRE(cache.resize(60));
  CHECK(cache.commit(one).value() == 0);
  CHECK(cache.stats().cached_blocks == 0);
}

TEST_CASE("blocks cached here not full are not cached where the policy says so") {
  paged_allocator<full_traits> cache({.blocks = 8, .block_tokens = 4});
  const std::vector<block_key> keys{key_from_id(1), key_from_id(2)};
  const sequence_id one = cache.create().value();
  REQUIRE(cache.extend(one, 6));
  CHECK(cache.commit(one, {.keys = keys, .tokens = 6}).value() == 1);
  CHECK(cache.index().size() == 1);
  CHECK(cache.stats().refused == 1);
}

TEST_CASE("the second touch is remembered for as many contents as there are slots, and forgotten later") {
  second_touch<> admission(slot_count{1'000});
  const auto admits = [&](std::uint64_t id) {
    const access_hint hint{.content = key_from_id(id).low};
    return admission.admit({.hint = hint});
  };
  std::uint64_t wrongly = 0;
  for (std::uint64_t id = 1; id <= 1'000; ++id)
    wrongly += admits(id) ? 1U : 0U;
  for (std::uint64_t id = 1; id <= 1'000; ++id)
    REQUIRE(admits(id));
  for (std::uint64_t id = 10'001; id <= 14'000; ++id)
    wrongly += admits(id) ? 1U : 0U;
  CHECK(wrongly < 100);  // of 5,000
  std::uint64_t remembered = 0;
  for (std::uint64_t id = 1; id <= 1'000; ++id)
    remembered += admits(id) ? 1U : 0U;
  CHECK(remembered < 30);
  const access_hint unknown_tokens{};
  CHECK(admission.admit({.hint = unknown_tokens}));
}
