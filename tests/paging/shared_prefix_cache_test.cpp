#include <llmmem/paging/shared_prefix_cache.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "support/counting_metadata.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/shared_world.hpp"

using namespace llmmem;
using llmmem_tests::cached_path;
using llmmem_tests::random_numbers;
using llmmem_tests::seeds;
using llmmem_tests::shared_model;

namespace {

/// Every block gets one of two keys: collisions all the time.
struct two_keys {
  explicit two_keys(hash_seed) noexcept {}
  [[nodiscard]] block_key root(const prefix_context&) const noexcept { return {}; }
  [[nodiscard]] block_key chain(const block_key&, std::span<const token_id> tokens) const noexcept {
    return {.low = static_cast<std::uint64_t>(tokens[0] & 1), .high = 0};
  }
};

struct colliding_traits : shared_traits {
  using hash = two_keys;
};

/// Sequences that come, grow, commit and go, on a cache and on its definition.
template <class Traits>
class shared_world {
 public:
  static constexpr std::uint32_t block_tokens = 2;

  explicit shared_world(std::uint64_t seed)
      : random_(seed),
        blocks_(1 + random_.below(std::uint64_t{24})),
        cache_(
            {.blocks = blocks_, .block_tokens = block_tokens, .shards = 1 + random_.below(std::uint32_t{4})}),
        memory_(blocks_ + 1) {}

  void step() {
    switch (random_.below(std::uint32_t{12})) {
      case 0:
      case 1:
      case 2:
        return begin();
      case 3:
      case 4:
        return grow();
      case 5:
      case 6:
        return commit();
      case 7:
      case 8:
      case 9:
        return end();
      case 10:
        return evict();
      default:
        return random_.once_in(8) ? drop_idle() : share();
    }
  }

  void check() {
    CHECK(cache_.audit() == std::vector<std::string>{});
    const shared_stats now = cache_.stats();
    REQUIRE(now.cached == model_.cached());
    REQUIRE(now.idle == model_.idle());
    REQUIRE(now.free == blocks_ - model_.cached() - model_.private_blocks());
    REQUIRE(now.active + now.idle + now.free == blocks_);
  }

 private:
  struct sequence {
    prefix_context context{};
    std::vector<token_id> tokens;
    std::vector<block_id> table;
    chain_end end{};
    std::size_t committed = 0;     // blocks
    std::uint64_t end_serial = 0;  // of the block that `end` names
  };

  [[nodiscard]] cached_path path(const sequence& of, std::size_t count) const {
    cached_path out{static_cast<std::int64_t>(of.context.salt[0])};
    out.insert(out.end(), of.tokens.begin(),
               of.tokens.begin() + static_cast<std::ptrdiff_t>(count * block_tokens));
    return out;
  }

  auto on_evict() {
    return [this](std::span<const block_id> victims) noexcept {
      for (const block_id victim : victims) {
        if (!model_.is_idle_leaf(victim)) {
          ++wrong_victims_;
          continue;
        }
        model_.evict(victim);
        ++evicted_;
      }
    };
  }

  void grow_tokens(sequence& of, std::size_t count) {
    for (std::size_t i = 0; i < count * block_tokens; ++i)
      of.tokens.push_back(static_cast<token_id>(random_.below(std::uint32_t{2})));
  }

  void begin() {
    if (alive_.size() > 6) return;
    sequence now;
    now.context.salt[0] = random_.below(std::uint64_t{2});
    grow_tokens(now, random_.below(std::uint64_t{5}));
    const std::size_t room = random_.once_in(4) ? random_.below(std::uint64_t{5}) : 5;
    now.table.resize(room);
    const std::size_t most = std::min(room, now.tokens.size() / block_tokens);
    std::size_t expected = 0;
    while (expected < most && model_.find(path(now, expected + 1)))
      ++expected;

    const shared_match hit = cache_.match(now.tokens, now.context, now.table);
    REQUIRE(hit.blocks == expected);
    REQUIRE(hit.tokens == expected * block_tokens);
    now.table.resize(expected);
    now.committed = expected;
    now.end = hit.end;
    for (std::size_t i = 0; i < expected; ++i) {
      const auto found = model_.find(path(now, i + 1));
      REQUIRE(now.table[i] == found->block);
      REQUIRE(memory_[to_index(now.table[i])] == path(now, i + 1));
      model_.hold(now.table[i]);
      now.end_serial = found->serial;
    }
    alive_.push_back(now);
    // What was not found is allocated together.
    allocate(alive_.back(), now.tokens.size() / block_tokens - expected);
  }

  void allocate(sequence& to, std::size_t count) {
    const std::uint64_t could = blocks_ - model_.private_blocks() - (model_.cached() - model_.evictable());
    std::vector<block_id> fresh(count);
    const bool only_free = random_.once_in(4);
    const std::uint64_t free = blocks_ - model_.private_blocks() - model_.cached();
    const shard_id shard{random_.below(std::uint32_t{5})};
    wrong_victims_ = evicted_ = 0;
    const auto got =
        only_free ? cache_.try_allocate(fresh, shard) : cache_.allocate(fresh, shard, on_evict());
    REQUIRE(wrong_victims_ == 0);
    REQUIRE(got.has_value() == (count <= (only_free ? free : could)));
    if (!got) {
      CHECK(got.error().wanted == count);
      to.tokens.resize(to.table.size() * block_tokens);
      return;
    }
    REQUIRE(evicted_ == (count > free ? count - free : 0));
    for (const block_id block : fresh) {
      REQUIRE(model_.held(block) == 0);
      REQUIRE_FALSE(model_.is_cached(block));
      model_.hold(block);
      to.table.push_back(block);
      memory_[to_index(block)] = path(to, to.table.size());
    }
  }

  void grow() {
    if (alive_.empty()) return;
    sequence& which = alive_[random_.below(alive_.size())];
    const std::size_t count = 1 + random_.below(std::uint64_t{2});
    grow_tokens(which, count);
    allocate(which, count);
  }

  void commit() {
    if (alive_.empty()) return;
    sequence& which = alive_[random_.below(alive_.size())];
    const std::size_t upto = which.committed + random_.below(which.table.size() - which.committed + 1);
    if (which.committed == 0) which.end = cache_.root(which.context);
    const auto behind = model_.find(path(which, which.committed));
    const bool stale = which.committed != 0 && (!behind || behind->serial != which.end_serial);
    const auto tokens = std::span<const token_id>(which.tokens)
                            .subspan(which.committed * block_tokens, (upto - which.committed) * block_tokens);
    const auto done = cache_.commit(which.end, tokens, std::span(which.table).subspan(which.committed));
    REQUIRE(done.has_value() == !stale);
    if (stale) {
      CHECK(done.code() == errc::stale_handle);
      which.committed = 0;
      return;
    }
    std::uint64_t registered = 0;
    std::uint64_t duplicates = 0;
    for (; which.committed < upto; ++which.committed) {
      const cached_path now = path(which, which.committed + 1);
      if (const auto found = model_.find(now)) {
        duplicates += found->block != which.table[which.committed] ? 1U : 0U;
      } else {
        model_.insert(now, which.table[which.committed]);
        ++registered;
      }
      which.end_serial = model_.find(now)->serial;
    }
    REQUIRE(done->registered == registered);
    REQUIRE(done->duplicates == duplicates);
    which.end = done->end;
  }

  void share() {
    if (alive_.empty() || alive_.size() > 6) return;
    const sequence twin = alive_[random_.below(alive_.size())];
    REQUIRE(cache_.share(twin.table));
    for (const block_id block : twin.table)
      model_.hold(block);
    alive_.push_back(twin);
  }

  void end() {
    if (alive_.empty()) return;
    std::swap(alive_[random_.below(alive_.size())], alive_.back());
    const sequence gone = alive_.back();
    alive_.pop_back();
    const shard_id shard{random_.below(std::uint32_t{5})};
    if (random_.once_in(2)) {
      std::vector<block_handle> handles;
      for (const block_id block : gone.table)
        handles.push_back(cache_.handle(block));
      REQUIRE(cache_.release(handles, shard));
    } else {
      REQUIRE(cache_.release(gone.table, shard));
    }
    for (const block_id block : gone.table)
      model_.let_go(block);
  }

  void evict() {
    const std::uint64_t count = random_.below(std::uint64_t{4});
    const std::uint64_t expected = std::min(count, model_.evictable());
    wrong_victims_ = evicted_ = 0;
    REQUIRE(cache_.evict(count, {}, on_evict()) == expected);
    REQUIRE(wrong_victims_ == 0);
    REQUIRE(evicted_ == expected);
  }

  void drop_idle() {
    const std::uint64_t expected = model_.evictable();
    wrong_victims_ = 0;
    REQUIRE(cache_.drop_idle({}, on_evict()) == expected);
    REQUIRE(wrong_victims_ == 0);
    REQUIRE(model_.evictable() == 0);
  }

  random_numbers random_;
  std::uint64_t blocks_;
  shared_prefix_cache<Traits> cache_;
  shared_model model_;
  std::vector<cached_path> memory_;  // what the engine keeps in each block
  std::vector<sequence> alive_;
  std::uint64_t wrong_victims_ = 0;
  std::uint64_t evicted_ = 0;
};

template <class Traits>
void behaves_as_defined() {
  for (const auto seed : seeds(150)) {
    CAPTURE(seed);
    shared_world<Traits> world(seed);
    for (int i = 0; i < 400; ++i) {
      world.step();
      if (i % 8 == 0) world.check();
    }
    world.check();
  }
}

/// A sequence of `count` blocks that begin with `first`, computed, committed and still held.
template <class Traits>
std::vector<block_id> cached_chain(shared_prefix_cache<Traits>& cache, token_id first, std::size_t count) {
  std::vector<token_id> tokens(count * cache.block_tokens(), first);
  std::vector<block_id> table(count);
  cache.allocate(table).value();
  cache.commit(cache.root(), tokens, table).value();
  return table;
}

template <class Traits>
std::vector<block_id> victims(shared_prefix_cache<Traits>& cache, std::uint64_t count) {
  std::vector<block_id> out;
  out.reserve(count);
  cache.evict(count, {}, [&](std::span<const block_id> gone) noexcept {
    out.insert(out.end(), gone.begin(), gone.end());
  });
  return out;
}

}  // namespace

TEST_CASE("a shared cache in one thread behaves as a map of prefixes with references") {
  behaves_as_defined<shared_traits>();
}

TEST_CASE("colliding keys cost no hits: tokens, context and the previous block decide") {
  behaves_as_defined<colliding_traits>();
}

TEST_CASE("an idle chain leaves tail first, and only as many blocks as necessary") {
  shared_prefix_cache<> cache({.blocks = 40, .block_tokens = 1});
  auto chain = cached_chain(cache, 7, 10);
  CHECK(victims(cache, 3).empty());
  // Another as good, which the hand would meet next if it did not stay with the first.
  cache.release(cached_chain(cache, 8, 10)).value();
  cache.release(chain).value();
  std::reverse(chain.begin(), chain.end());
  CHECK(victims(cache, 3) == std::vector(chain.begin(), chain.begin() + 3));
  CHECK(victims(cache, 4) == std::vector(chain.begin() + 3, chain.begin() + 7));
  CHECK(victims(cache, 3) == std::vector(chain.begin() + 7, chain.end()));
}

TEST_CASE("blocks released since the hand's last round outlive the others") {
  constexpr std::uint64_t count = 64;
  shared_prefix_cache<> cache({.blocks = count, .block_tokens = 1, .shards = 1});
  std::vector<block_id> used;
  for (token_id first = 0; first < token_id{count}; ++first)
    cache.release(cached_chain(cache, first, 1)).value();
  // The hand goes round, evicting a quarter: from here on ages differ by use alone.
  CHECK(victims(cache, 16).size() == 16);
  std::vector<token_id> kept;
  std::array<block_id, 1> at{};
  for (token_id first = 0; first < token_id{count} && kept.size() < 8; ++first) {
    if (cache.match(std::span(&first, 1), {}, at).blocks == 0) continue;
    kept.push_back(first);
    cache.release(at).value();
  }
  CHECK(victims(cache, 40).size() == 40);
  for (const token_id first : kept) {
    CAPTURE(first);
    CHECK(cache.match(std::span(&first, 1), {}, at).blocks == 1);
  }
}

TEST_CASE("a match reports where to continue, and the next commit does") {
  shared_prefix_cache<> cache({.blocks = 16, .block_tokens = 2});
  const std::vector<token_id> prompt{1, 2, 3, 4, 5, 6, 7};
  std::vector<block_id> first(3);
  cache.allocate(first).value();
  const auto done = cache.commit(cache.root(), std::span(prompt).first(4), first).value();
  CHECK(done.registered == 2);
  std::vector<block_id> second(3);
  const shared_match hit = cache.match(prompt, {}, second);
  CHECK(hit.blocks == 2);
  CHECK(hit.end == done.end);
  CHECK(cache.commit(hit.end, std::span(prompt).subspan(4), std::span(first).subspan(2))->registered == 1);
  std::vector<block_id> third(3);
  CHECK(cache.match(prompt, {}, third).blocks == 3);
  CHECK(third == first);
  CHECK(cache.match(prompt, {.salt = {1, 0}}, third).blocks == 0);
}

TEST_CASE("a chain does not continue after other contents of a block, even with the same key") {
  shared_prefix_cache<colliding_traits> cache({.blocks = 8, .block_tokens = 1, .shards = 1});
  std::vector<block_id> lent(1);
  std::vector<block_id> own(2);
  cache.allocate(lent).value();
  cache.allocate(own).value();
  const std::vector<token_id> tokens{2, 3};
  cache.commit(cache.root(), std::span(tokens).first(1), lent).value();
  const auto first = cache.commit(cache.root(), std::span(tokens).first(1), own).value();
  CHECK(first.duplicates == 1);
  CHECK(first.end.block == lent[0]);

  const auto rest = std::span(tokens).subspan(1);
  cache.release(lent).value();
  CHECK(cache.drop_idle() == 1);
  const std::vector<block_id> reused(1, lent[0]);
  cache.allocate(lent).value();
  REQUIRE(lent == reused);
  const std::vector<token_id> others{4};
  cache.commit(cache.root(), others, lent).value();
  CHECK(cache.commit(first.end, rest, std::span(own).subspan(1)).code() == errc::stale_handle);
  CHECK(cache.commit(cache.root(), tokens, own)->registered == 2);
}

TEST_CASE("each misuse is named and changes nothing") {
  shared_prefix_cache<> cache({.blocks = 8, .block_tokens = 1, .name = "kv"});
  shared_prefix_cache<> other({.blocks = 8, .block_tokens = 1});
  const std::vector<token_id> tokens{1, 2, 3};
  std::vector<block_id> table(3);
  cache.allocate(table).value();
  std::vector<block_id> none(9);

  CHECK(cache.allocate(none).error().message() ==
        "kv: 9 blocks needed, 5 free or evictable; release sequences, or build the cache with more blocks");
  CHECK(cache.commit(cache.root(), tokens, std::span(table).first(2)).error().message() ==
        "kv: two lengths must be equal, but are 2 and 3");
  const std::array<block_id, 1> never{block_id{8}};
  CHECK(cache.release(never).error().message() ==
        "kv: double free: block 8 has no references left; release each reference once, through one owner");
  CHECK(cache.commit(cache.root(), std::span(tokens).first(1), never).code() == errc::double_free);
  CHECK(cache.share(never).code() == errc::double_free);

  const auto end = cache.commit(cache.root(), tokens, table)->end;
  const std::vector<token_id> unlike{9};
  CHECK(cache.commit(cache.root(), unlike, std::span(table).subspan(1)).error().message() ==
        "kv: block " + std::to_string(to_index(table[1])) +
            " is already cached with other contents; commit each block once, with the contents it held then");

  // Ends of chains, blocks and handles of other caches, with numbers that are ours too, and that are not.
  std::vector<block_id> theirs(8);
  other.allocate(theirs).value();
  const auto foreign = other.commit(other.root({.salt = {1, 1}}), tokens, theirs)->end;
  std::vector<block_id> more(1);
  cache.allocate(more).value();
  CHECK(foreign.block == table[2]);
  CHECK(cache.commit(foreign, unlike, more).code() == errc::stale_handle);
  const std::array<block_id, 1> beyond{block_id{9}};
  CHECK(cache.release(beyond).code() == errc::foreign_handle);
  CHECK(cache.release(std::array{null_block}).code() == errc::null_handle);
  CHECK(cache.share(beyond).code() == errc::foreign_handle);
  CHECK(cache.commit({.context = {}, .key = {}, .block = beyond[0]}, unlike, more).code() ==
        errc::foreign_handle);
  CHECK(cache.release(std::array{block_handle{}}).code() == errc::null_handle);
  cache.release(more).value();

  const block_handle kept = cache.handle(table[2]);
  const std::array handles{kept};
  CHECK(other.release(handles).code() == errc::foreign_handle);
  cache.release(table).value();
  CHECK(cache.release(handles).code() == errc::double_free);
  CHECK(cache.drop_idle() == 3);
  CHECK(cache.release(handles).error().message() ==
        "kv: stale handle to slot " + std::to_string(to_index(kept.block)) +
            " (generation 0, now 1): it was already released; keep one owner for each handle");
  cache.allocate(std::span(none).first(8)).value();
  CHECK(cache.commit(end, unlike, none).code() == errc::stale_handle);
  CHECK(cache.audit().empty());
}

TEST_CASE("an impossible shared cache is refused with the reason") {
  CHECK_THROWS_WITH_AS(shared_prefix_cache<>({.blocks = 0}),
                       "shared_prefix_cache: blocks 0; use 1 to 2147483646", length_error);
  CHECK_THROWS_WITH_AS(shared_prefix_cache<>({.blocks = 1, .block_tokens = 0}),
                       "shared_prefix_cache: block_tokens 0; use 1 to 65536", length_error);
  CHECK_THROWS_WITH_AS(shared_prefix_cache<>({.blocks = 1, .shards = 0}),
                       "sharded_free_list: 0 shards; use 1 to 65536, one for each thread that allocates",
                       length_error);
  CHECK(llmmem_tests::fail_each_allocation([](metadata_source source) {
          shared_prefix_cache<> cache({.blocks = 100, .metadata = source});
        }) == 7);
}

TEST_CASE("an audit names the broken invariant") {
  shared_prefix_cache<> cache({.blocks = 4, .block_tokens = 1, .name = "kv"});
  const auto chain = cached_chain(cache, 1, 2);
  CHECK(cache.audit().empty());
  // Releases that nobody had a right to: the reference that the second block keeps to the first goes.
  cache.release(std::span(chain).first(1)).value();
  cache.release(std::span(chain).first(1)).value();
  CHECK(cache.audit() == std::vector<std::string>{"kv: block 1 has 0 references, 1 cached blocks follow it"});
}
