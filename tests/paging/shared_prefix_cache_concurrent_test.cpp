#include <llmmem/paging/shared_prefix_cache.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/giving_way.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using llmmem_tests::giving_way;
using llmmem_tests::random_numbers;
using llmmem_tests::seeds;

namespace {

// Few different keys: searchers take references to blocks that are not theirs, and give them back.
struct few_keys {
  explicit few_keys(hash_seed) noexcept {}
  [[nodiscard]] block_key root(const prefix_context&) const noexcept { return {}; }
  [[nodiscard]] block_key chain(const block_key&, std::span<const token_id> tokens) const noexcept {
    return {.low = static_cast<std::uint64_t>(tokens[0] & 1), .high = 0};
  }
};

struct one_writer : shared_traits {
  using steps = giving_way;
};
struct one_writer_few_keys : one_writer {
  using hash = few_keys;
};
struct many_writers : one_writer {
  using mutex = std::mutex;
};

constexpr std::uint32_t block_tokens = 2;
constexpr std::size_t longest = 5;  // blocks

/// The one value that a block at this place of these tokens may have.
std::uint64_t value_of(std::span<const token_id> tokens, std::uint64_t salt, std::size_t block) {
  std::uint64_t value = salt + 1;
  for (std::size_t i = 0; i < (block + 1) * block_tokens; ++i)
    value = value * std::uint64_t{0x9E37'79B9'7F4A'7C15} + static_cast<std::uint64_t>(tokens[i]) + 1;
  return value;
}

/// A cache and the memory of its blocks, which is read and written like any memory: the thread sanitizer sees
/// whether what orders it is there.
template <class Traits>
struct engine {
  explicit engine(std::uint64_t blocks, std::uint32_t shards = 2)
      : cache({.blocks = blocks, .block_tokens = block_tokens, .shards = shards}), memory(blocks + 1) {}

  shared_prefix_cache<Traits> cache;
  std::vector<std::uint64_t> memory;
  std::atomic<std::uint64_t> wrong{0};  // contents that belong to other tokens
  std::atomic<std::uint64_t> hits{0};
  std::atomic<std::uint64_t> evicted{0};
};

struct prompt {
  std::vector<token_id> tokens;
  prefix_context context{};
};

prompt random_prompt(random_numbers& random) {
  prompt out;
  out.context.salt[0] = random.below(std::uint64_t{2});
  out.tokens.resize((1 + random.below(longest)) * block_tokens);
  for (token_id& token : out.tokens)
    token = random.once_in(4) ? 1 : 0;
  return out;
}

/// Takes what is cached of a prompt, and looks whether it is that.
template <class Traits>
std::pair<shared_match, std::vector<block_id>> match_and_verify(engine<Traits>& on, const prompt& asked) {
  std::vector<block_id> table(asked.tokens.size() / block_tokens);
  const shared_match hit = on.cache.match(asked.tokens, asked.context, table);
  table.resize(hit.blocks);
  for (std::size_t i = 0; i < table.size(); ++i) {
    if (on.memory[to_index(table[i])] != value_of(asked.tokens, asked.context.salt[0], i)) on.wrong += 1;
  }
  on.hits += hit.blocks;
  return {hit, table};
}

template <class Traits>
void read(engine<Traits>& on, random_numbers& random, int rounds) {
  for (int i = 0; i < rounds; ++i) {
    const prompt asked = random_prompt(random);
    const auto [hit, table] = match_and_verify(on, asked);
    if (random.once_in(32)) std::this_thread::yield();
    // Held all the while: still the same.
    for (std::size_t b = 0; b < table.size(); ++b) {
      if (on.memory[to_index(table[b])] != value_of(asked.tokens, asked.context.salt[0], b)) on.wrong += 1;
    }
    if (!on.cache.release(table)) on.wrong += 1;
  }
}

/// A whole request: match, allocate, write, commit. Returns the blocks, held.
template <class Traits>
std::vector<block_id> serve(engine<Traits>& on, random_numbers& random, shard_id shard) {
  const prompt asked = random_prompt(random);
  auto [hit, table] = match_and_verify(on, asked);
  const std::size_t known = table.size();
  table.resize(asked.tokens.size() / block_tokens);
  const auto fresh = std::span(table).subspan(known);
  const auto on_evict = [&on](std::span<const block_id> gone) noexcept { on.evicted += gone.size(); };
  if (!on.cache.allocate(fresh, shard, on_evict)) {
    table.resize(known);
    return table;
  }
  for (std::size_t i = known; i < table.size(); ++i)
    on.memory[to_index(table[i])] = value_of(asked.tokens, asked.context.salt[0], i);
  if (!on.cache.commit(hit.end, std::span(asked.tokens).subspan(known * block_tokens), fresh)) on.wrong += 1;
  for (std::size_t i = known; i < table.size(); ++i) {
    if (on.memory[to_index(table[i])] != value_of(asked.tokens, asked.context.salt[0], i)) on.wrong += 1;
  }
  return table;
}

template <class Traits>
void serve_and_release(engine<Traits>& on, random_numbers& random, shard_id shard, int rounds) {
  std::vector<block_id> kept;  // a request's that is still running
  for (int i = 0; i < rounds; ++i) {
    std::vector<block_id> table = serve(on, random, shard);
    if (random.once_in(3)) std::swap(kept, table);
    if (!on.cache.release(table, shard)) on.wrong += 1;
    if (random.once_in(16)) on.evicted += on.cache.evict(1 + random.below(std::uint64_t{3}), shard);
  }
  if (!on.cache.release(kept, shard)) on.wrong += 1;
}

/// Runs each body in a thread of its own, with random numbers of its own.
void run_together(std::uint64_t seed, const std::vector<std::function<void(random_numbers&)>>& bodies) {
  std::atomic<bool> go{false};
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < bodies.size(); ++t) {
    threads.emplace_back([&, t] {
      random_numbers random(seed * 16 + t);
      giving_way::seed(random.next());
      while (!go.load(std::memory_order_relaxed))
        std::this_thread::yield();
      bodies[t](random);
    });
  }
  go.store(true, std::memory_order_relaxed);
  for (std::thread& each : threads)
    each.join();
}

template <class Traits>
void check_at_rest(engine<Traits>& on) {
  CHECK(on.wrong == 0);
  CHECK(on.cache.audit() == std::vector<std::string>{});
  on.cache.drop_idle();
  CHECK(on.cache.stats().free == on.cache.blocks());
  CHECK(on.cache.audit() == std::vector<std::string>{});
}

/// Nothing but the cache orders the threads: what readers see, and what the writer overwrites.
template <class Traits>
void readers_beside_a_writer() {
  std::uint64_t hits = 0;
  std::uint64_t evicted = 0;
  for (const auto seed : seeds(50)) {
    CAPTURE(seed);
    engine<Traits> on(8 + seed % 24);
    run_together(seed, {[&](random_numbers& random) { serve_and_release(on, random, shard_id{0}, 200); },
                        [&](random_numbers& random) { read(on, random, 200); },
                        [&](random_numbers& random) { read(on, random, 200); }});
    check_at_rest(on);
    hits += on.hits;
    evicted += on.evicted;
  }
  CHECK(hits > 1000);
  CHECK(evicted > 1000);
}

}  // namespace

TEST_CASE("readers that hold blocks see the contents of their tokens, while a writer evicts") {
  readers_beside_a_writer<one_writer>();
}

TEST_CASE("readers see those contents, too, if nearly all keys collide") {
  readers_beside_a_writer<one_writer_few_keys>();
}

TEST_CASE("several threads serve whole requests, taking turns to commit alone") {
  for (const auto seed : seeds(50)) {
    CAPTURE(seed);
    engine<many_writers> on(12 + seed % 24, static_cast<std::uint32_t>(1 + seed % 3));
    run_together(seed, {[&](random_numbers& random) { serve_and_release(on, random, shard_id{0}, 300); },
                        [&](random_numbers& random) { serve_and_release(on, random, shard_id{1}, 300); },
                        [&](random_numbers& random) { read(on, random, 300); },
                        [&](random_numbers& random) {
                          for (int i = 0; i < 100; ++i)
                            on.cache.evict(1 + random.below(std::uint64_t{4}));
                        }});
    check_at_rest(on);
  }
}

TEST_CASE("a private block that two threads hold becomes free after the fences of both") {
  for (const auto seed : seeds(10)) {
    CAPTURE(seed);
    engine<one_writer> on(4, 1);
    // Handed from one to the other by relaxed stores: the cache alone orders what they do to the memory
    // afterwards. What comes before is ordered by the share, which the other acquires with `handed`.
    std::atomic<std::uint32_t> handed{0};
    constexpr int rounds = 100;
    run_together(seed, {[&](random_numbers&) {
                          for (int i = 0; i < rounds; ++i) {
                            std::array<block_id, 1> own{};
                            while (!on.cache.try_allocate(own))
                              std::this_thread::yield();
                            on.memory[to_index(own[0])] = static_cast<std::uint64_t>(i);
                            if (!on.cache.share(own)) on.wrong += 1;
                            while (handed.load(std::memory_order_relaxed) != 0)
                              std::this_thread::yield();
                            handed.store(to_index(own[0]), std::memory_order_release);
                            giving_way::point();
                            if (on.memory[to_index(own[0])] != static_cast<std::uint64_t>(i)) on.wrong += 1;
                            if (!on.cache.release(own)) on.wrong += 1;
                          }
                        },
                        [&](random_numbers&) {
                          for (int i = 0; i < rounds; ++i) {
                            std::uint32_t taken = 0;
                            while ((taken = handed.load(std::memory_order_acquire)) == 0)
                              std::this_thread::yield();
                            handed.store(0, std::memory_order_relaxed);
                            const std::array<block_id, 1> own{block_id{taken}};
                            if (on.memory[taken] != static_cast<std::uint64_t>(i)) on.wrong += 1;
                            if (!on.cache.release(own)) on.wrong += 1;
                          }
                        },
                        [&](random_numbers& random) {
                          for (int i = 0; i < rounds; ++i) {
                            std::array<block_id, 1> own{};
                            if (!on.cache.try_allocate(own)) continue;
                            on.memory[to_index(own[0])] = random.next();
                            if (!on.cache.release(own)) on.wrong += 1;
                          }
                        }});
    check_at_rest(on);
  }
}
