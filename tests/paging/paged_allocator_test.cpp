#include <llmmem/eviction/any.hpp>
#include <llmmem/hash/sha256.hpp>
#include <llmmem/paged_allocator.hpp>

#include <doctest/doctest.h>

#include <array>
#include <numeric>
#include <string>
#include <vector>

#include "support/counting_metadata.hpp"
#include "support/testing_access.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

constexpr block_id operator""_b(unsigned long long i) {
  return block_id{static_cast<std::uint32_t>(i)};
}

std::vector<token_id> counting(token_id first, std::size_t count) {
  std::vector<token_id> tokens(count);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

std::vector<block_id> table(const paged_allocator<>& cache, sequence_id sequence) {
  return {cache.blocks(sequence).begin(), cache.blocks(sequence).end()};
}

/// A sequence with `tokens`, their KV written.
template <class Cache>
sequence_id written(Cache& cache, const std::vector<token_id>& tokens, const prefix_context& context = {}) {
  const sequence_id sequence = cache.create(context).value();
  const auto hit = cache.match(sequence, tokens).value();
  REQUIRE(cache.append(sequence, std::span(tokens).subspan(hit.tokens)));
  REQUIRE(cache.commit(sequence));
  return sequence;
}

const std::vector<std::string> sound{};

}  // namespace

TEST_CASE("a sequence takes blocks as it grows and returns them") {
  paged_allocator<> cache({.blocks = 8, .block_tokens = 4});
  const sequence_id sequence = cache.create().value();
  CHECK(cache.blocks(sequence).empty());
  CHECK(cache.append(sequence, counting(0, 3)).value().new_blocks == 1);
  CHECK(cache.append(sequence, counting(3, 1)).value().new_blocks == 0);
  const append_result more = cache.append(sequence, counting(4, 6)).value();
  CHECK(more.first == 4);
  CHECK(more.new_blocks == 2);
  CHECK_FALSE(more.copy);
  CHECK(table(cache, sequence) == std::vector{1_b, 2_b, 3_b});
  CHECK(cache.tokens(sequence) == 10);
  CHECK(cache.stats().token_occupancy(4) == doctest::Approx(10.0 / 12.0));
  REQUIRE(cache.release(sequence));
  CHECK(cache.stats().free_blocks == 8);
  CHECK(cache.audit() == sound);
}

TEST_CASE("an empty append changes nothing") {
  paged_allocator<> cache({.blocks = 1, .block_tokens = 4});
  const sequence_id sequence = cache.create().value();
  CHECK(cache.append(sequence, {}).value().new_blocks == 0);
  CHECK(cache.extend(sequence, 0).value().new_blocks == 0);
  CHECK(cache.append(sequence, counting(0, 4)));
  CHECK(cache.commit(sequence).value() == 1);  // extend(0) did not make the tokens unknown
}

TEST_CASE("uncommitted contents are not found") {
  paged_allocator<> cache({.blocks = 8, .block_tokens = 4});
  const sequence_id writer = cache.create().value();
  REQUIRE(cache.append(writer, counting(0, 9)));
  const sequence_id reader = cache.create().value();
  CHECK(cache.match(reader, counting(0, 9)).value().tokens == 0);
  CHECK(cache.commit(writer).value() == 2);  // two full blocks; the partial third never
  CHECK(cache.match(reader, counting(0, 9)).value().tokens == 8);
  CHECK(table(cache, reader) == std::vector{1_b, 2_b});
  CHECK(cache.commit(writer).value() == 0);
}

TEST_CASE("an engine that is a step ahead commits only what has been written") {
  paged_allocator<> cache({.blocks = 8, .block_tokens = 4, .name = "kv"});
  const sequence_id sequence = cache.create().value();
  REQUIRE(cache.append(sequence, counting(0, 4)));
  REQUIRE(cache.append(sequence, counting(4, 8)));  // the next step's, before the first has ended
  CHECK(cache.commit(sequence, 3).value() == 0);
  CHECK(cache.commit(sequence, 4).value() == 1);
  CHECK(cache.cached_tokens(counting(0, 12)) == 4);
  CHECK(cache.commit(sequence, 2).value() == 0);  // what is committed stays so
  CHECK(cache.cached_tokens(counting(0, 12)) == 4);
  CHECK(cache.commit(sequence, 13).error() == failure{errc::past_the_end, sequence.slot, 13, 12});
  CHECK(cache.commit(sequence, 11).value() == 1);
  CHECK(cache.commit(sequence).value() == 1);
  CHECK(cache.cached_tokens(counting(0, 12)) == 12);
  CHECK(cache.audit() == sound);
}

TEST_CASE("released prefixes outlive their sequence, and are evicted tail first") {
  paged_allocator<> cache({.blocks = 4, .block_tokens = 4});
  REQUIRE(cache.release(written(cache, counting(0, 12))));
  CHECK(cache.stats().idle_blocks == 3);
  CHECK(cache.cached_tokens(counting(0, 12)) == 12);
  const sequence_id other = cache.create().value();
  REQUIRE(cache.extend(other, 8));  // one free block, one evicted
  CHECK(cache.cached_tokens(counting(0, 12)) == 8);
  REQUIRE(cache.extend(other, 4));
  CHECK(cache.cached_tokens(counting(0, 12)) == 4);
  CHECK(cache.stats().evictions == 2);
  CHECK(cache.audit() == sound);
}

TEST_CASE("a fork shares every block until one side writes, and the writer learns what it must copy") {
  paged_allocator<> cache({.blocks = 8, .block_tokens = 4});
  const sequence_id parent = cache.create().value();
  REQUIRE(cache.append(parent, counting(0, 6)));
  const sequence_id child = cache.fork(parent).value();
  CHECK(table(cache, child) == table(cache, parent));
  CHECK(cache.stats().active_blocks == 2);

  const append_result first = cache.append(child, counting(90, 1)).value();
  CHECK(first.copy == block_copy{2_b, 3_b, 2});
  CHECK(first.new_blocks == 1);
  CHECK(table(cache, child) == std::vector{1_b, 3_b});
  CHECK(table(cache, parent) == std::vector{1_b, 2_b});
  // The parent is alone with its block now: no copy.
  CHECK_FALSE(cache.append(parent, counting(6, 1)).value().copy);
  CHECK_FALSE(cache.append(child, counting(91, 1)).value().copy);
  CHECK(cache.stats().copies == 1);
  CHECK(cache.audit() == sound);
}

TEST_CASE("an append gets a copy and new blocks together, or none") {
  paged_allocator<> cache({.blocks = 4, .block_tokens = 4, .name = "kv"});
  const sequence_id parent = cache.create().value();
  REQUIRE(cache.append(parent, counting(0, 6)));
  const sequence_id child = cache.fork(parent).value();
  const auto refused = cache.append(child, counting(6, 7));  // two new blocks and a copy
  CHECK(refused.error().message() ==
        "kv: 3 blocks needed, 2 free or evictable; release sequences, or build the cache with more blocks");
  CHECK(table(cache, child) == table(cache, parent));
  CHECK(cache.tokens(child) == 6);
  CHECK(cache.audit() == sound);
  const append_result fits = cache.append(child, counting(6, 6)).value();
  CHECK(fits.copy == block_copy{2_b, 4_b, 2});
  CHECK(table(cache, child) == std::vector{1_b, 4_b, 3_b});
}

TEST_CASE("a fork at a block's end copies nothing") {
  paged_allocator<> cache({.blocks = 8, .block_tokens = 4});
  const sequence_id parent = cache.create().value();
  REQUIRE(cache.append(parent, counting(0, 4)));
  const sequence_id child = cache.fork(parent).value();
  CHECK_FALSE(cache.append(child, counting(4, 1)).value().copy);
  CHECK(cache.blocks(child)[0] == cache.blocks(parent)[0]);
}

TEST_CASE("both twins can commit, and their contents are cached once") {
  paged_allocator<> cache({.blocks = 8, .block_tokens = 4});
  const sequence_id parent = cache.create().value();
  REQUIRE(cache.append(parent, counting(0, 6)));
  const sequence_id child = cache.fork(parent).value();
  REQUIRE(cache.append(child, counting(6, 2)));
  REQUIRE(cache.append(parent, counting(6, 2)));
  CHECK(cache.commit(child).value() == 2);
  CHECK(cache.commit(parent).value() == 0);
  CHECK(cache.stats().duplicates == 1);  // the second block; the first is one and the same
  REQUIRE(cache.release(parent));
  CHECK(cache.stats().free_blocks == 6);  // the parent's own second block was worth nothing
  CHECK(cache.audit() == sound);
}

TEST_CASE("a truncation rolls back speculation, and the chain continues from there") {
  paged_allocator<> cache({.blocks = 8, .block_tokens = 4});
  const sequence_id sequence = written(cache, counting(0, 6));
  REQUIRE(cache.append(sequence, counting(50, 5)));
  REQUIRE(cache.truncate(sequence, 6));
  CHECK(cache.blocks(sequence).size() == 2);
  REQUIRE(cache.append(sequence, counting(6, 2)));
  CHECK(cache.commit(sequence).value() == 1);
  CHECK(cache.cached_tokens(counting(0, 8)) == 8);
  CHECK(cache.audit() == sound);
}

TEST_CASE("a sequence of unknown tokens caches again after a truncation to known ones") {
  paged_allocator<> cache({.blocks = 8, .block_tokens = 4});
  const sequence_id sequence = cache.create().value();
  REQUIRE(cache.append(sequence, counting(0, 4)));
  REQUIRE(cache.extend(sequence, 7));
  REQUIRE(cache.truncate(sequence, 4));
  REQUIRE(cache.append(sequence, counting(4, 4)));
  CHECK(cache.commit(sequence).value() == 2);
  REQUIRE(cache.extend(sequence, 1));
  REQUIRE(cache.truncate(sequence, 0));
  CHECK(cache.match(sequence, counting(0, 8)).value().tokens == 8);  // its own, from the cache
  REQUIRE(cache.append(sequence, counting(8, 4)));
  CHECK(cache.commit(sequence).value() == 1);
  CHECK(cache.audit() == sound);
}

TEST_CASE("a write to cached contents of a single sequence first removes them from the cache") {
  for (const std::uint64_t keep : {5U, 6U, 7U}) {
    CAPTURE(keep);
    paged_allocator<> cache({.blocks = 8, .block_tokens = 4});
    const sequence_id sequence = written(cache, counting(0, 8));
    REQUIRE(cache.truncate(sequence, keep));
    CHECK(cache.cached_tokens(counting(0, 8)) == 8);  // still whole
    const append_result again = cache.append(sequence, counting(60, 1)).value();
    CHECK_FALSE(again.copy);
    CHECK(cache.cached_tokens(counting(0, 8)) == 4);
    CHECK(cache.audit() == sound);

    const sequence_id unknown_tokens = written(cache, counting(20, 8));
    REQUIRE(cache.truncate(unknown_tokens, keep));
    REQUIRE(cache.extend(unknown_tokens, 1));
    CHECK(cache.cached_tokens(counting(20, 8)) == 4);
    CHECK(cache.audit() == sound);
  }
}

TEST_CASE("a write to cached contents that another sequence shares copies them") {
  paged_allocator<> cache({.blocks = 8, .block_tokens = 4});
  const sequence_id sequence = written(cache, counting(0, 8));
  const sequence_id other = written(cache, counting(0, 8));
  REQUIRE(cache.truncate(sequence, 6));
  CHECK(cache.append(sequence, counting(60, 1)).value().copy == block_copy{2_b, 3_b, 2});
  CHECK(cache.cached_tokens(counting(0, 8)) == 8);
  CHECK(cache.tokens(other) == 8);
  CHECK(cache.audit() == sound);
}

TEST_CASE("different salts, adapters or engine keys never share") {
  paged_allocator<> cache({.blocks = 16, .block_tokens = 4});
  written(cache, counting(0, 4));
  const std::vector<prefix_context> others{
      {.salt = {1, 0}}, {.salt = {0, 1}}, {.extra_keys = {1, 0}}, {.extra_keys = {0, 1}}};
  for (const auto& context : others) {
    CHECK(cache.cached_tokens(counting(0, 4), context) == 0);
    written(cache, counting(0, 4), context);
    CHECK(cache.cached_tokens(counting(0, 4), context) == 4);
  }
  CHECK(cache.stats().registrations == 5);
}

TEST_CASE("different contexts never share, also by keys") {
  paged_allocator<> cache({.blocks = 16, .block_tokens = 4});
  const std::array keys{key_from_id(1)};
  const keyed_blocks prompt{.keys = keys, .tokens = 3};
  const auto hit = [&](const prefix_context& context) {
    const sequence_id sequence = cache.create(context).value();
    const std::uint64_t tokens = cache.match(sequence, prompt).value().tokens;
    REQUIRE(cache.extend(sequence, 3 - tokens));
    REQUIRE(cache.commit(sequence, prompt));
    REQUIRE(cache.release(sequence));
    CHECK(cache.audit() == sound);
    return tokens == 3;
  };
  const prefix_context mine{.salt = {1, 0}};
  const prefix_context yours{.salt = {2, 0}};
  CHECK_FALSE(hit(mine));
  CHECK(hit(mine));
  CHECK_FALSE(hit(yours));  // and takes the key over
  CHECK(hit(yours));
  CHECK_FALSE(hit(mine));
  CHECK(cache.stats().replaced == 2);
  CHECK(cache.stats().idle_blocks == 1);
}

namespace {

/// One key for everything: each lookup is a collision.
struct constant_hash {
  explicit constant_hash(hash_seed) noexcept {}
  [[nodiscard]] block_key root(const prefix_context&) const noexcept { return {}; }
  [[nodiscard]] block_key chain(const block_key&, std::span<const token_id>) const noexcept { return {}; }
};
struct constant_traits : paged_traits {
  using hash = constant_hash;
};
struct constant_trusting_traits : constant_traits {
  using verification = trust_hash;
};

}  // namespace

TEST_CASE("a collision is a miss: the newest contents keep the key, and no sequence gets another's") {
  paged_allocator<constant_traits> cache({.blocks = 8, .block_tokens = 4});
  const sequence_id mine = written(cache, counting(0, 4));
  CHECK(cache.cached_tokens(counting(0, 4)) == 4);
  CHECK(cache.cached_tokens(counting(1, 4)) == 0);
  CHECK(cache.cached_tokens(counting(0, 4), {.salt = {1, 0}}) == 0);
  const sequence_id other = written(cache, counting(1, 4));
  CHECK(cache.stats().replaced == 1);
  CHECK(cache.cached_tokens(counting(0, 4)) == 0);
  CHECK(cache.cached_tokens(counting(1, 4)) == 4);
  CHECK(cache.audit() == sound);
  REQUIRE(cache.release(mine));
  REQUIRE(cache.release(other));
  CHECK(cache.stats().idle_blocks == 1);
  CHECK(cache.audit() == sound);
}

TEST_CASE("without verification the same collision would hand out another's blocks") {
  // What verify_tokens is for, seen from the other side.
  paged_allocator<constant_trusting_traits> cache({.blocks = 8, .block_tokens = 4});
  written(cache, counting(0, 4));
  CHECK(cache.cached_tokens(counting(1, 4)) == 4);
}

TEST_CASE("equal tokens after a different prefix are a miss, even if the keys collide") {
  paged_allocator<constant_traits> cache({.blocks = 8, .block_tokens = 2});
  written(cache, {1, 1});
  CHECK(cache.cached_tokens(std::vector<token_id>{1, 1, 1, 1}) ==
        2);  // the second block is no child of itself
  CHECK(cache.audit() == sound);
}

TEST_CASE("a child whose parent was evicted and computed again is cached again") {
  struct lfu_traits : paged_traits {
    using eviction = any_eviction;
  };
  // LFU may evict a head before its tail: use the tail more often.
  paged_allocator<lfu_traits> cache({.blocks = 3, .block_tokens = 2}, make_eviction("lfu", slot_count{4}));
  REQUIRE(cache.release(written(cache, {1, 2, 3, 4})));
  CHECK(cache.cached_tokens(std::vector<token_id>{1, 2, 3, 4}) == 4);
  REQUIRE(cache.drop_idle() == 2);
  const sequence_id again = written(cache, {1, 2, 3, 4});
  CHECK(cache.cached_tokens(std::vector<token_id>{1, 2, 3, 4}) == 4);
  CHECK(cache.audit() == sound);
  REQUIRE(cache.release(again));
}

TEST_CASE("a sequence whose cached twin was evicted caches its own blocks in its place") {
  paged_allocator<> cache({.blocks = 5, .block_tokens = 2});
  const sequence_id late = cache.create().value();
  REQUIRE(cache.append(late, counting(0, 4)));  // computed beside the other, before that was committed
  const sequence_id early = written(cache, counting(0, 4));
  CHECK(cache.commit(late).value() == 0);  // duplicates
  REQUIRE(cache.release(early));
  cache.drop_idle();
  CHECK(cache.cached_tokens(counting(0, 4)) == 0);
  REQUIRE(cache.append(late, counting(4, 2)));
  CHECK(cache.commit(late).value() == 3);
  CHECK(cache.cached_tokens(counting(0, 6)) == 6);
  CHECK(cache.audit() == sound);
}

namespace {

struct trusting_traits : paged_traits {
  using verification = trust_hash;
};

}  // namespace

TEST_CASE_TEMPLATE("a held prefix is found even if its cached twin was evicted", Traits, paged_traits,
                   trusting_traits) {
  paged_allocator<Traits> cache({.blocks = 5, .block_tokens = 2});
  const sequence_id late = cache.create().value();
  REQUIRE(cache.append(late, counting(0, 2)));  // computed beside the other, before that was committed
  const sequence_id early = written(cache, counting(0, 2));
  REQUIRE(cache.append(late, counting(2, 4)));
  CHECK(cache.commit(late).value() == 2);  // behind the other's block, which is the one that is cached
  REQUIRE(cache.release(early));
  const sequence_id other = cache.create().value();
  REQUIRE(cache.extend(other, 4));  // evicts it
  CHECK(cache.cached_tokens(counting(0, 6)) == 0);
  REQUIRE(cache.release(other));
  REQUIRE(cache.append(late, counting(6, 2)));
  // With the evicted block went those that only it made findable; where hashes are trusted those stay.
  CHECK(cache.commit(late).value() == (Traits::verification::keeps_tokens ? 4 : 2));
  CHECK(cache.cached_tokens(counting(0, 8)) == 8);
  CHECK(cache.audit() == sound);
}

TEST_CASE("a fork's commit caches blocks again whose predecessors were evicted") {
  paged_allocator<> cache({.blocks = 5, .block_tokens = 2});
  const sequence_id late = cache.create().value();
  REQUIRE(cache.append(late, counting(0, 4)));
  const sequence_id twin = cache.fork(late).value();
  const sequence_id early = written(cache, counting(0, 2));
  CHECK(cache.commit(late).value() == 1);
  REQUIRE(cache.release(early));
  cache.drop_idle();
  CHECK(cache.stats().orphans == 1);
  CHECK(cache.commit(twin).value() == 2);
  CHECK(cache.cached_tokens(counting(0, 4)) == 4);
  CHECK(cache.audit() == sound);
}

TEST_CASE("blocks behind a fence return when it has passed, or an allocation needs them") {
  paged_allocator<> cache({.blocks = 2, .block_tokens = 4});
  host_timeline stream;
  const sequence_id first = cache.create().value();
  REQUIRE(cache.extend(first, 8));
  const host_fence done = stream.issue();
  REQUIRE(cache.release_after(first, done));
  CHECK(cache.check(first).code() == errc::stale_handle);
  CHECK(cache.stats().deferred == 2);
  CHECK(cache.collect() == 0);
  const sequence_id second = cache.create().value();
  CHECK(cache.extend(second, 1).code() == errc::out_of_blocks);
  REQUIRE(stream.pass(done));
  CHECK(cache.extend(second, 1));  // collected on demand
  CHECK(cache.stats().deferred == 0);
  CHECK(cache.audit() == sound);
}

TEST_CASE("a twin that ended behind a passed fence causes no copy for lack of a block") {
  paged_allocator<> cache({.blocks = 1, .block_tokens = 4});
  const sequence_id sequence = cache.create().value();
  REQUIRE(cache.append(sequence, counting(0, 2)));
  REQUIRE(cache.release_after(cache.fork(sequence).value(), {}));
  const append_result grown = cache.append(sequence, counting(2, 2)).value();
  CHECK(grown.new_blocks == 0);
  CHECK_FALSE(grown.copy);
  CHECK(table(cache, sequence) == std::vector{1_b});
  CHECK(cache.audit() == sound);
}

TEST_CASE("a truncation behind a fence keeps the blocks until the fence has passed") {
  paged_allocator<> cache({.blocks = 4, .block_tokens = 4, .max_deferred = 2, .name = "kv"});
  host_timeline stream;
  const sequence_id sequence = cache.create().value();
  REQUIRE(cache.append(sequence, counting(0, 16)));
  CHECK(cache.truncate_after(sequence, 17, {}).code() == errc::past_the_end);
  CHECK(cache.truncate_after(sequence, 4, stream.issue()).error() == failure{errc::deferred_full, 0, 3, 2});
  CHECK(cache.tokens(sequence) == 16);
  const host_fence done = stream.issue();
  REQUIRE(cache.truncate_after(sequence, 9, done));  // one block goes, the third stays in part
  REQUIRE(cache.truncate_after(sequence, 6, done));
  CHECK(table(cache, sequence) == std::vector{1_b, 2_b});
  CHECK(cache.stats().free_blocks == 0);
  CHECK(cache.stats().deferred == 2);
  CHECK(cache.audit() == sound);
  CHECK(cache.append(sequence, counting(6, 3)).code() == errc::out_of_blocks);
  REQUIRE(stream.pass(done));
  REQUIRE(cache.append(sequence, counting(6, 3)));  // collected on demand
  CHECK(cache.commit(sequence).value() == 2);
  CHECK(cache.cached_tokens(counting(0, 8)) == 8);  // the chain went on from the cut
  CHECK(cache.audit() == sound);
}

TEST_CASE("a full queue of deferred frees leaves the sequence alive") {
  paged_allocator<> cache({.blocks = 4, .block_tokens = 4, .max_deferred = 1, .name = "kv"});
  host_timeline stream;
  const sequence_id sequence = cache.create().value();
  REQUIRE(cache.extend(sequence, 8));
  const auto refused = cache.release_after(sequence, stream.issue());
  CHECK(refused.error().message() ==
        "kv: 2 deferred frees to queue, but space for only 1; call collect() once fences have passed, or "
        "raise max_deferred, or max_sequences (4 releases each)");
  CHECK(cache.tokens(sequence) == 8);
  CHECK(cache.release(sequence));
}

TEST_CASE("a sequence without blocks ends behind a fence without waiting for it") {
  paged_allocator<> cache({.blocks = 4, .max_sequences = 1, .max_deferred = 0});
  host_timeline stream;
  const host_fence after = stream.issue();
  for (int i = 0; i < 10; ++i)
    REQUIRE(cache.release_after(cache.create().value(), after));
  CHECK(cache.stats().sequences == 0);
  CHECK(cache.audit() == sound);
}

TEST_CASE("at most as many idle blocks keep their contents as the options allow") {
  paged_allocator<> cache({.blocks = 8, .block_tokens = 4, .max_idle_blocks = 2});
  REQUIRE(cache.release(written(cache, counting(0, 16))));
  CHECK(cache.stats().idle_blocks == 2);
  CHECK(cache.cached_tokens(counting(0, 16)) == 8);  // the head stays
  CHECK(cache.stats().evictions == 2);
  CHECK(cache.audit() == sound);
}

TEST_CASE("external keys name blocks, also a partial last one") {
  paged_allocator<> cache({.blocks = 8, .block_tokens = 4});
  const std::array keys{key_from_id(10), key_from_id(11), key_from_id(12)};
  const keyed_blocks prompt{.keys = keys, .tokens = 10};
  const sequence_id first = cache.create().value();
  CHECK(cache.match(first, prompt).value().tokens == 0);
  REQUIRE(cache.extend(first, 10));
  CHECK(cache.commit(first, prompt).value() == 3);
  CHECK_FALSE(cache.append(first, counting(0, 3)).value().copy);  // behind what the key stands for
  REQUIRE(cache.release(first));
  CHECK(cache.stats().idle_blocks == 3);
  CHECK(cache.stats().free_blocks == 5);

  const sequence_id second = cache.create().value();
  CHECK(cache.match(second, prompt).value() == match_result{10, 3});
  // The same key for a block of another length is not the same block.
  const sequence_id third = cache.create().value();
  CHECK(cache.match(third, {.keys = keys, .tokens = 11}).value() == match_result{8, 2});
  // A key from outside says nothing about tokens.
  CHECK(cache.cached_tokens(counting(0, 8)) == 0);
  CHECK(cache.audit() == sound);
}

TEST_CASE("the hints of keyed blocks reach the policy") {
  struct min_traits : paged_traits {
    using eviction = min_eviction;
  };
  paged_allocator<min_traits> cache({.blocks = 3, .block_tokens = 4});
  const auto run = [&](std::uint64_t id, std::uint64_t next_use) {
    const std::array keys{key_from_id(id)};
    const std::array hints{access_hint{next_use}};
    const keyed_blocks prompt{.keys = keys, .tokens = 4, .hints = hints};
    const sequence_id sequence = cache.create().value();
    const std::uint64_t hit = cache.match(sequence, prompt).value().tokens;
    REQUIRE(cache.extend(sequence, 4 - hit));
    REQUIRE(cache.commit(sequence, prompt));
    REQUIRE(cache.release(sequence));
    return hit == 4;
  };
  CHECK_FALSE(run(1, 10));
  CHECK_FALSE(run(2, 20));
  CHECK_FALSE(run(3, 30));
  CHECK(run(3, 5));         // a hit renews the hint
  CHECK_FALSE(run(4, 40));  // evicts 2, not 3
  CHECK(run(1, 50));
  CHECK(run(3, 50));
}

TEST_CASE("a partial block that was committed by key may grow, by known and by unknown tokens") {
  for (const bool told : {true, false}) {
    CAPTURE(told);
    paged_allocator<> cache({.blocks = 8, .block_tokens = 4});
    const std::array keys{key_from_id(1)};
    const std::array keys_then{key_from_id(2)};
    const keyed_blocks before{.keys = keys, .tokens = 3};
    const keyed_blocks then{.keys = keys_then, .tokens = 4};
    const auto grow = [&](sequence_id sequence, token_id first, std::size_t count) {
      return told ? cache.append(sequence, counting(first, count)) : cache.extend(sequence, count);
    };
    const auto found = [&](const keyed_blocks& prompt) {
      const sequence_id probe = cache.create().value();
      const std::uint64_t tokens = cache.match(probe, prompt).value().tokens;
      REQUIRE(cache.release(probe));
      return tokens;
    };
    const sequence_id sequence = cache.create().value();
    REQUIRE(grow(sequence, 0, 3));
    CHECK(cache.commit(sequence, before).value() == 1);
    REQUIRE(grow(sequence, 3, 1));
    CHECK(cache.audit() == sound);
    CHECK(found(before) == 3);
    CHECK(cache.commit(sequence).value() == 0);  // known by keys alone
    CHECK(cache.commit(sequence, then).value() == 1);
    CHECK(found(then) == 4);
    CHECK(found(before) == 0);
    CHECK(cache.commit(sequence, then).value() == 0);
    CHECK(cache.stats().duplicates == 0);
    REQUIRE(grow(sequence, 4, 9));
    REQUIRE(cache.release(sequence));
    CHECK(cache.stats().idle_blocks == 1);
    CHECK(cache.audit() == sound);
  }
}

TEST_CASE("tokens whose values are given later are cached as if they had been appended with them") {
  // All lengths around the ends of blocks; the values come in two parts, with a cut or growth in between.
  const std::vector<token_id> text = counting(100, 16);
  for (std::uint64_t known = 0; known <= 4; ++known) {
    for (std::uint64_t unknown = 1; unknown <= 5; ++unknown) {
      for (std::uint64_t part = 0; part <= unknown; ++part) {
        for (std::uint64_t keep = 0; keep <= known + unknown + 1; ++keep) {
          CAPTURE(known);
          CAPTURE(unknown);
          CAPTURE(part);
          CAPTURE(keep);
          paged_allocator<> cache({.blocks = 16, .block_tokens = 3});
          const auto from = [&](std::uint64_t first, std::uint64_t count) {
            return std::span(text).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count));
          };
          const sequence_id sequence = cache.create().value();
          std::uint64_t length = known + unknown;
          if (keep % 2 == 0) {
            REQUIRE(cache.append(sequence, from(0, known)));
            REQUIRE(cache.extend(sequence, unknown));
          } else {
            const std::array<paging::growth, 1> step{
                {{.sequence = sequence, .tokens = from(0, known), .unknown_tokens = unknown}}};
            std::array<append_result, 1> grown{};
            REQUIRE(cache.append_batch(step, grown));
          }
          const std::vector<block_id> places = table(cache, sequence);
          CHECK(cache.commit(sequence).value() == known / 3);  // nothing without values is cached
          REQUIRE(cache.name_tokens(sequence, from(known, part)));
          std::uint64_t named = known + part;
          if (keep <= length) {
            REQUIRE(cache.truncate(sequence, keep));
            length = keep;
            if (named > length) named = length;
          } else {
            REQUIRE(cache.append(sequence, from(length++, 1)));
            if (part == unknown) named = length;
          }
          CHECK(cache.name_tokens(sequence, from(named, length - named + 1)).code() == errc::past_the_end);
          REQUIRE(cache.name_tokens(sequence, from(named, length - named)));
          REQUIRE(cache.append(sequence, from(length, 4)));
          length += 4;
          for (std::size_t i = 0; i < places.size() && i < (keep < known + unknown ? keep : length) / 3; ++i)
            CHECK(cache.blocks(sequence)[i] == places[i]);
          REQUIRE(cache.commit(sequence));
          CHECK(cache.cached_tokens(text) == length / 3 * 3);
          CHECK(cache.audit() == sound);
        }
      }
    }
  }
}

TEST_CASE("a sequence known by keys, or cut in the middle, lacks no values") {
  paged_allocator<> cache({.blocks = 16, .block_tokens = 4});
  const sequence_id keyed = cache.create().value();
  REQUIRE(cache.extend(keyed, 4));
  const std::array keys{key_from_id(1)};
  REQUIRE(cache.commit(keyed, keyed_blocks{.keys = keys, .tokens = 4}));
  CHECK(cache.name_tokens(keyed, counting(0, 4)).code() == errc::past_the_end);
  const sequence_id cut = cache.create().value();
  REQUIRE(cache.extend(cut, 12));
  REQUIRE(cache.remove(cut, {4, 8}));
  CHECK(cache.name_tokens(cut, counting(0, 1)).error().message() ==
        "paged_allocator: 9 tokens named, but sequence 1 holds 8; name fewer, or append them first");
  CHECK(cache.name_tokens({}, {}).code() == errc::null_handle);
}

TEST_CASE("a block that was partly committed by key is completely committed by the next key") {
  paged_allocator<> cache({.blocks = 8, .block_tokens = 4});
  const std::array part{key_from_id(1), key_from_id(2)};
  const std::array whole{key_from_id(1), key_from_id(3)};
  const sequence_id sequence = cache.create().value();
  REQUIRE(cache.extend(sequence, 8));
  CHECK(cache.commit(sequence, {.keys = part, .tokens = 6}).value() == 2);
  CHECK(cache.commit(sequence, {.keys = part, .tokens = 6}).value() == 0);
  CHECK(cache.commit(sequence, {.keys = whole, .tokens = 8}).value() == 1);
  const sequence_id other = cache.create().value();
  CHECK(cache.match(other, keyed_blocks{.keys = whole, .tokens = 8}).value().tokens == 8);
  CHECK(cache.commit(sequence, {.keys = whole, .tokens = 8}).value() == 0);
  CHECK(cache.stats().duplicates == 0);
  CHECK(cache.audit() == sound);
}

TEST_CASE("the copy of a partial block committed by key can be committed as it grows") {
  paged_allocator<> cache({.blocks = 8, .block_tokens = 4});
  const std::array keys{key_from_id(1)};
  const std::array keys_then{key_from_id(2)};
  const sequence_id first = cache.create().value();
  REQUIRE(cache.extend(first, 3));
  REQUIRE(cache.commit(first, {.keys = keys, .tokens = 3}));
  const sequence_id second = cache.create().value();
  REQUIRE(cache.match(second, keyed_blocks{.keys = keys, .tokens = 3}).value().tokens == 3);
  CHECK(cache.extend(second, 1).value().copy == block_copy{1_b, 2_b, 3});
  CHECK(cache.commit(second, {.keys = keys_then, .tokens = 4}).value() == 1);
  const sequence_id third = cache.create().value();
  CHECK(cache.match(third, keyed_blocks{.keys = keys_then, .tokens = 4}).value().tokens == 4);
  CHECK(table(cache, third) == std::vector{2_b});
  CHECK(cache.audit() == sound);
}

TEST_CASE("one of two forks may be committed by keys and the other by tokens") {
  paged_allocator<> cache({.blocks = 8, .block_tokens = 4});
  const std::array keys{key_from_id(1), key_from_id(2)};
  const sequence_id by_key = cache.create().value();
  REQUIRE(cache.append(by_key, counting(0, 6)));
  const sequence_id by_token = cache.fork(by_key).value();
  CHECK(cache.commit(by_key, {.keys = keys, .tokens = 6}).value() == 2);
  REQUIRE(cache.release(by_key));
  // Alone with a block that is cached by the key of its first two tokens.
  CHECK_FALSE(cache.append(by_token, counting(6, 2)).value().copy);
  CHECK(cache.audit() == sound);
  CHECK(cache.commit(by_token));
  REQUIRE(cache.append(by_token, counting(8, 4)));
  CHECK(cache.commit(by_token));
  CHECK(cache.audit() == sound);
  REQUIRE(cache.release(by_token));
  cache.drop_idle();
  CHECK(cache.stats().free_blocks == 8);
  CHECK(cache.audit() == sound);
}

TEST_CASE("keys that name blocks out of place make no sequence longer than allowed") {
  paged_allocator<> cache({.blocks = 64, .block_tokens = 4, .max_sequences = 4, .max_sequence_tokens = 6});
  const std::array keys{key_from_id(1), key_from_id(2)};
  for (const block_key& key : keys) {  // both as the first block of a sequence
    const sequence_id sequence = cache.create().value();
    REQUIRE(cache.extend(sequence, 4));
    REQUIRE(cache.commit(sequence, {.keys = std::span(&key, 1), .tokens = 4}));
  }
  const sequence_id both = cache.create().value();
  CHECK(cache.match(both, {.keys = keys, .tokens = 8}).value() == match_result{4, 1});
  CHECK(cache.extend(both, 200).code() == errc::sequence_full);
  CHECK(cache.extend(both, 2));
  CHECK(cache.audit() == sound);
}

TEST_CASE("a cached block with the maximum of references is a miss") {
  paged_allocator<> cache({.blocks = 8, .block_tokens = 4});
  const std::array keys{key_from_id(1)};
  const keyed_blocks prompt{.keys = keys, .tokens = 4};
  const sequence_id told = written(cache, counting(0, 4));
  const sequence_id named = cache.create().value();
  REQUIRE(cache.extend(named, 4));
  REQUIRE(cache.commit(named, prompt));
  for (const sequence_id each : {told, named}) {
    for (std::uint32_t i = 1; i < block_record::max_references; ++i)
      testing_access::add_reference(cache, cache.blocks(each)[0]);
  }
  const sequence_id late = cache.create().value();
  CHECK(cache.match(late, counting(0, 4)).value() == match_result{});
  CHECK(cache.match(late, prompt).value() == match_result{});
  CHECK(cache.blocks(late).empty());
  CHECK(cache.fork(told).code() == errc::too_many_shares);
}

TEST_CASE("contradictory keys and counts are refused") {
  paged_allocator<> cache({.blocks = 8, .block_tokens = 4, .name = "kv"});
  const sequence_id sequence = cache.create().value();
  const std::array keys{key_from_id(1), key_from_id(2)};
  const std::array<access_hint, 1> hints{};
  CHECK(cache.match(sequence, {.keys = keys, .tokens = 9}).error().message() ==
        "kv: two lengths must be equal, but are 2 and 3");
  CHECK(cache.match(sequence, {.keys = keys, .tokens = 4}).code() == errc::size_mismatch);
  CHECK(cache.match(sequence, {.keys = keys, .tokens = 8, .hints = hints}).code() == errc::size_mismatch);
  REQUIRE(cache.extend(sequence, 5));
  CHECK(cache.commit(sequence, {.keys = keys, .tokens = 6}).code() == errc::past_the_end);
  CHECK(cache.match(sequence, counting(0, 4)).error().message() ==
        "kv: match needs a sequence without tokens, but sequence 0 holds 5; call match first, then append "
        "the rest");
}

TEST_CASE("every call refuses a null, stale or foreign handle") {
  paged_allocator<> cache({.blocks = 4, .block_tokens = 4, .name = "kv"});
  paged_allocator<> other({.blocks = 4, .block_tokens = 4});
  const sequence_id foreign = other.create().value();
  const sequence_id stale = cache.create().value();
  REQUIRE(cache.release(stale));
  const sequence_id reborn = cache.create().value();
  REQUIRE(reborn.slot == stale.slot);
  const auto refused_by_all = [&](sequence_id bad, error_code why) {
    CHECK(cache.check(bad).code() == why);
    CHECK(cache.fork(bad).code() == why);
    CHECK(cache.release(bad).code() == why);
    CHECK(cache.release_after(bad, {}).code() == why);
    CHECK(cache.match(bad, counting(0, 4)).code() == why);
    CHECK(cache.match(bad, keyed_blocks{}).code() == why);
    CHECK(cache.append(bad, counting(0, 4)).code() == why);
    CHECK(cache.extend(bad, 4).code() == why);
    CHECK(cache.truncate(bad, 0).code() == why);
    CHECK(cache.truncate_after(bad, 0, {}).code() == why);
    CHECK(cache.commit(bad).code() == why);
    CHECK(cache.commit(bad, 0).code() == why);
    CHECK(cache.commit(bad, keyed_blocks{}).code() == why);
    CHECK(cache.tokens(bad) == 0);
    CHECK(cache.blocks(bad).empty());
  };
  refused_by_all({}, errc::null_handle);
  refused_by_all(stale, errc::stale_handle);
  refused_by_all(foreign, errc::foreign_handle);
  refused_by_all({1000, 1, reborn.owner}, errc::foreign_handle);
  refused_by_all({3, 0, reborn.owner}, errc::stale_handle);  // of a slot that nobody lived in yet
  CHECK(cache.fork(stale).error().message() ==
        "kv: stale handle to slot 0 (generation 1, now 3): it was already released; keep one owner for each "
        "handle");
  CHECK_THROWS_WITH_AS(cache.release(sequence_id{}).value(),
                       "kv: null handle; it was never assigned, or was moved from", handle_error);
  CHECK(cache.stats().sequences == 1);
  CHECK(cache.audit() == sound);
}

TEST_CASE("limits are reported with their numbers") {
  paged_allocator<> cache(
      {.blocks = 8, .block_tokens = 4, .max_sequences = 1, .max_sequence_tokens = 6, .name = "kv"});
  const sequence_id sequence = cache.create().value();
  CHECK(cache.create().error().message() ==
        "kv: all 1 sequences are in use; release one, or raise max_sequences");
  CHECK(cache.fork(sequence).code() == errc::out_of_sequences);
  REQUIRE(cache.extend(sequence, 5));
  CHECK(cache.extend(sequence, 2).error().message() ==
        "kv: sequence 0 would hold 7 tokens, more than the 6 allowed; raise max_sequence_tokens, or blocks");
  CHECK(cache.extend(sequence, ~std::uint64_t{0}).code() == errc::sequence_full);
  CHECK(cache.truncate(sequence, 6).error().message() ==
        "kv: 6 tokens named, but sequence 0 holds 5; name fewer, or append them first");
  CHECK(cache.tokens(sequence) == 5);
  CHECK(cache.extend(sequence, 1));
}

TEST_CASE("options that cannot be are refused, with the reason") {
  const auto why = [](const paged_options& options) -> std::string {
    try {
      paged_allocator<> cache(options);
    } catch (const length_error& error) {
      return error.what();
    }
    return "accepted";
  };
  CHECK(why({.blocks = 0, .name = "kv"}) == "kv: 0 blocks; a pool needs at least one");
  CHECK(
      why({.blocks = std::uint64_t{1} << 63, .name = "kv"}) ==
      "kv: 9223372036854775808 blocks, more than the limit of 2147483646 (block ids are non-negative int32)");
  CHECK(why({.blocks = 1, .block_tokens = 0, .name = "kv"}) == "kv: blocks of 0 tokens; use 1 to 65536");
  CHECK(why({.blocks = 1, .block_tokens = 65'537, .name = "kv"}) ==
        "kv: blocks of 65537 tokens; use 1 to 65536");
  CHECK(why({.blocks = 1, .max_sequences = 0, .name = "kv"}) ==
        "kv: max_sequences is 0; at least 1 is needed");
  CHECK(why({.blocks = 1, .max_sequence_tokens = 0, .name = "kv"}) ==
        "kv: max_sequence_tokens is 0; at least 1 is needed");
  CHECK(why({.blocks = 1, .block_tokens = 65'536, .max_sequence_tokens = unlimited}) == "accepted");
  // Products that would pass 2^63 bytes.
  CHECK(why({.blocks = 1, .max_deferred = std::uint64_t{1} << 62}) ==
        "deferred_frees: references: 4611686018427387904 x 4 exceeds the limit of 2^63 - 1 bytes; lower one "
        "of the two");
  // Refused before anything is allocated: this one would ask for 100 GB first.
  CHECK(
      why({.blocks = max_blocks,
           .max_sequences = 0xFFFF'FFFF,
           .max_sequence_tokens = unlimited,
           .name = "kv"}) ==
      "kv: block tables: 8589934588 x 4294967295 exceeds the limit of 2^63 - 1 bytes; lower one of the two");
}

TEST_CASE(
    "an allocator whose metadata cannot be allocated says so and leaks nothing, whichever part is refused") {
  const std::int64_t parts = fail_each_allocation(
      [](const metadata_source& source) { paged_allocator<> cache({.blocks = 10, .metadata = source}); });
  CHECK(parts == 15);
}

TEST_CASE("metadata fits its budget: 86 bytes a block, verified tokens apart") {
  constexpr std::uint64_t blocks = 50'000;
  counting_metadata counted;
  paged_allocator<> cache(
      {.blocks = blocks, .max_sequences = 1, .max_sequence_tokens = 16, .metadata = counted.source()});
  const paged_stats stats = cache.stats();
  CHECK(stats.metadata_bytes + stats.verification_bytes == counted.live_bytes());
  CHECK(stats.metadata_bytes <= 86 * blocks);
  CHECK(stats.verification_bytes <= (16 * 4 + 48) * (blocks + 1));
}

namespace {

struct recorder {
  std::vector<std::string>* events;
  std::vector<block_key>* keys;
  void on_cached(const stored_block& stored) noexcept {
    const auto* const parent = keys->empty() || stored.parent == block_key{} ? nullptr : &keys->back();
    events->push_back("cached " + std::to_string(to_index(stored.block)) + ", " +
                      std::to_string(stored.tokens) + " tokens from " +
                      std::to_string(stored.token_ids.front()) + ", salt " +
                      std::to_string(stored.context->salt[0]) +
                      (parent != nullptr && *parent == stored.parent ? ", behind the last" : ""));
    keys->push_back(stored.key);
  }
  void on_shared(block_id block, const block_key&) noexcept {
    events->push_back("shared " + std::to_string(to_index(block)));
  }
  void on_dropped(block_id block, const block_key&) noexcept {
    events->push_back("dropped " + std::to_string(to_index(block)));
  }
};

}  // namespace

TEST_CASE("the observer learns of cached and evicted contents, in order") {
  std::vector<std::string> events;
  std::vector<block_key> keys;
  using both = llmmem::paging::observers<ignore_cache_events, recorder>;
  struct both_traits : paged_traits {
    using observer = both;
  };
  paged_allocator<both_traits> cache({.blocks = 2, .block_tokens = 4}, both({}, recorder{&events, &keys}));
  REQUIRE(cache.release(written(cache, counting(0, 8))));
  REQUIRE(cache.match(cache.create().value(), std::span<const token_id>(counting(0, 4))));
  written(cache, counting(50, 4), {.salt = {9, 0}});
  CHECK(events == std::vector<std::string>{"cached 1, 4 tokens from 0, salt 0",
                                           "cached 2, 4 tokens from 4, salt 0, behind the last", "shared 1",
                                           "dropped 2", "cached 2, 4 tokens from 50, salt 9"});
}

TEST_CASE("one line of traits selects another hash") {
  struct sha_traits : paged_traits {
    using hash = sha256_128;
  };
  paged_allocator<sha_traits> cache({.blocks = 4, .block_tokens = 4});
  written(cache, counting(0, 8));
  CHECK(cache.cached_tokens(counting(0, 9)) == 8);
}

TEST_CASE("audit names the block, its owners and its last transition") {
  paged_allocator<> cache({.blocks = 4, .block_tokens = 4, .name = "kv"});
  const sequence_id first = written(cache, counting(0, 8));
  const sequence_id second = cache.fork(first).value();
  REQUIRE(cache.audit() == sound);
  SUBCASE("a reference too many") {
    testing_access::add_reference(cache, 2_b);
    CHECK(cache.audit() ==
          std::vector<std::string>{"kv: block 2 counts 3 references, 2 exist; held by sequence "
                                   "0[1], sequence 1[1] (last: shared)"});
  }
  SUBCASE("a block table that points elsewhere") {
    testing_access::table_entry(cache, second, 0) = 3_b;
    const auto found = cache.audit();
    REQUIRE(found.size() == 2);
    CHECK(found[0] == "kv: block 1 counts 2 references, 1 exist; held by sequence 0[0] (last: shared)");
    CHECK(found[1] == "kv: block 3 counts 0 references, 1 exist; held by sequence 1[0] (last: never used)");
  }
  SUBCASE("a block table that points nowhere") {
    testing_access::table_entry(cache, second, 0) = 77_b;
    CHECK(cache.audit()[0] == "kv: sequence 1 names block 77, which does not exist");
  }
  SUBCASE("cached, but not found") {
    testing_access::forget_key(cache, 1_b);
    CHECK(cache.audit() ==
          std::vector<std::string>{
              "kv: followers: block 1 is listed behind a block other than its parent, or is not cached",
              "kv: followers: block 1 has followers and is not cached",
              "kv: followers: 2 blocks are linked, 1 are cached",
              "kv: block 1 is marked cached but not in the index; held by sequence 0[0], sequence 1[0] "
              "(last: shared)"});
  }
  SUBCASE("a table longer than tables are") {
    testing_access::miscount_blocks(cache, second);
    CHECK(cache.audit() ==
          std::vector<std::string>{"kv: sequence 1 holds 5 blocks, more than the longest table: 4"});
  }
  SUBCASE("more committed than held") {
    testing_access::miscount_committed(cache, second);
    CHECK(cache.audit() ==
          std::vector<std::string>{"kv: sequence 1 counts 3 blocks committed and 2 keyed, of 2"});
  }
  SUBCASE("a living sequence among the free slots") {
    testing_access::list_slot_as_free(cache, second);
    CHECK(cache.audit() ==
          std::vector<std::string>{
              "kv: the free slots name sequence 1, which is alive, named twice or does not exist"});
  }
  SUBCASE("more idle blocks than allowed") {
    REQUIRE(cache.release(first));
    REQUIRE(cache.release(second));
    testing_access::allow_no_idle_blocks(cache);
    CHECK(cache.audit() == std::vector<std::string>{"kv: 2 blocks are idle, at most 0 are allowed"});
  }
  SUBCASE("a deferred free of no block") {
    testing_access::defer(cache, 77_b);
    CHECK(cache.audit() ==
          std::vector<std::string>{"kv: a deferred free names block 77, which does not exist"});
  }
  SUBCASE("a length that its blocks do not have") {
    testing_access::miscount_tokens(cache, first);
    const auto found = cache.audit();
    REQUIRE(found.size() == 2);
    CHECK(found[0] == "kv: sequence 0 holds 9 tokens in 2 blocks");
    CHECK(found[1] == "kv: counts 2 sequences, 16 tokens, 4 table entries; there are 2, 17, 4");
  }
}

namespace {

/// A new sequence of the first `count` tokens of `prompt`, all of them its own.
template <class Cache>
sequence_id own(Cache& cache, std::span<const token_id> prompt, std::size_t count) {
  const sequence_id sequence = cache.create().value();
  cache.append(sequence, prompt.first(count)).value();
  return sequence;
}

}  // namespace

TEST_CASE(
    "contents committed after evicted blocks are found, for any owners of those and any cause of the "
    "eviction") {
  const auto prompt = counting(1, 32);
  paged_allocator<> cache({.blocks = 64, .block_tokens = 4});
  SUBCASE("the head of a sequence's equal cached blocks was evicted, the tail was not") {
    const sequence_id a = own(cache, prompt, 4);
    const sequence_id x = own(cache, prompt, 8);
    const sequence_id z = own(cache, prompt, 8);
    for (const sequence_id each : {a, x, z})
      REQUIRE(cache.commit(each));
    REQUIRE(cache.release(a));
    cache.drop_idle();
    for (std::size_t i = 8; i < prompt.size(); i += 4) {
      REQUIRE(cache.append(z, std::span(prompt).subspan(i, 4)));
      REQUIRE(cache.commit(z));
    }
  }
  SUBCASE("the equal blocks were truncated and overwritten") {
    const sequence_id a = own(cache, prompt, 12);
    const sequence_id b = own(cache, prompt, 12);
    for (const sequence_id each : {a, b})
      REQUIRE(cache.commit(each));
    REQUIRE(cache.truncate(a, 6));
    REQUIRE(cache.append(a, counting(90, 1)));
    for (std::size_t i = 12; i < prompt.size(); i += 4) {
      REQUIRE(cache.append(b, std::span(prompt).subspan(i, 4)));
      REQUIRE(cache.commit(b));
    }
  }
  CHECK(cache.cached_tokens(prompt) == 32);
  CHECK(cache.audit() == sound);
}

TEST_CASE("idle blocks that a smaller pool loses are cached again by sequences with equal blocks") {
  paged_allocator<> cache({.blocks = 12, .block_tokens = 1});
  const auto prompt = counting(1, 6);
  const sequence_id first = own(cache, counting(100, 6), 6);
  const sequence_id a = own(cache, prompt, 1);  // high up
  REQUIRE(cache.release(first));
  REQUIRE(cache.append(a, std::span(prompt).subspan(1, 1)));
  const sequence_id b = own(cache, prompt, 3);
  for (const sequence_id each : {a, b})
    REQUIRE(cache.commit(each));
  REQUIRE(cache.release(a));
  REQUIRE(cache.resize(6).value() == 0);
  CHECK(cache.cached_tokens(prompt) == 0);
  REQUIRE(cache.append(b, std::span(prompt).subspan(3, 1)));
  REQUIRE(cache.commit(b));
  CHECK(cache.cached_tokens(prompt) == 4);
  CHECK(cache.audit() == sound);
}

TEST_CASE("blocks replace equal evicted ones, also by keys") {
  paged_allocator<> cache({.blocks = 32, .block_tokens = 4});
  std::vector<block_key> keys;
  for (std::uint64_t id = 1; id <= 8; ++id)
    keys.push_back(key_from_id(id));
  const auto first = [&](std::size_t count) {
    return keyed_blocks{.keys = std::span(keys).first(count), .tokens = count * 4};
  };
  const sequence_id a = cache.create().value();
  const sequence_id b = cache.create().value();
  for (const sequence_id each : {a, b}) {
    REQUIRE(cache.extend(each, 12));
    REQUIRE(cache.commit(each, first(3)));
  }
  REQUIRE(cache.release(a));
  cache.drop_idle();
  for (std::size_t count = 4; count <= keys.size(); ++count) {
    REQUIRE(cache.extend(b, 4));
    REQUIRE(cache.commit(b, first(count)));
  }
  const sequence_id other = cache.create().value();
  CHECK(cache.match(other, first(8)).value().tokens == 32);
  CHECK(cache.audit() == sound);
}
