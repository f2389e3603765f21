/// Blocks that a transfer keeps where they are, and what observers are told of why contents go.
#include <doctest/doctest.h>

#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/hybrid_allocator.hpp>

#include <array>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

using namespace llmmem;

namespace {

std::vector<token_id> count_up(token_id first, std::size_t count) {
  std::vector<token_id> tokens(count);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

const std::array groups{full_attention({"full", 1, 10, 4})};

struct losses {
  std::uint64_t dropped = 0;
  std::uint64_t evicted = 0;
  std::uint64_t invalidated = 0;
  std::uint64_t told_of_none = 0;  ///< the first wrong chunk, cached or not
};
struct counting_observer {
  losses* to = nullptr;
  template <class... Group>
  void on_cached(const stored_block&, Group...) const noexcept {}
  template <class... Group>
  void on_dropped(block_id, const block_key&, Group...) const noexcept {
    ++to->dropped;
  }
  template <class... Group>
  void on_evicted(block_id, const block_key&, Group...) const noexcept {
    ++to->evicted;
  }
  template <class... Group>
  void on_invalidated(block_id block, const block_key&, Group...) const noexcept {
    to->invalidated += block != null_block ? 1U : 0U;
    to->told_of_none += block == null_block ? 1U : 0U;
  }
};
struct paged_told : paged_traits {
  using observer = counting_observer;
};
/// With another observer in front, which knows of no reasons.
struct paged_told_two : paged_traits {
  using observer = paging::observers<ignore_cache_events, counting_observer>;
};
struct hybrid_told : hybrid_traits {
  using observer = counting_observer;
};

/// A cache of four blocks of four tokens.
template <class Cache>
Cache make(losses& to) {
  if constexpr (std::is_same_v<Cache, hybrid_allocator<hybrid_told>>) {
    return Cache({.groups = groups,
                  .budget_bytes = 5 * 40,
                  .page_bytes = 40,
                  .max_sequences = 4,
                  .max_sequence_tokens = 16,
                  .name = "kv"},
                 counting_observer{&to});
  } else if constexpr (std::is_same_v<Cache, paged_allocator<paged_told_two>>) {
    return Cache(
        {.blocks = 4, .block_tokens = 4, .max_sequences = 4, .max_sequence_tokens = 16, .name = "kv"},
        typename paged_told_two::observer(ignore_cache_events{}, counting_observer{&to}));
  } else {
    return Cache(
        {.blocks = 4, .block_tokens = 4, .max_sequences = 4, .max_sequence_tokens = 16, .name = "kv"},
        counting_observer{&to});
  }
}

template <class Cache>
block_id first_block(const Cache& cache, sequence_id sequence) {
  if constexpr (requires { cache.table(sequence, 0); }) {
    return cache.table(sequence, 0)[0];
  } else {
    return cache.blocks(sequence)[0];
  }
}

}  // namespace

TEST_CASE_TEMPLATE("a pinned block outlives its sequence and is not evicted", Cache,
                   paged_allocator<paged_told>, paged_allocator<paged_told_two>,
                   hybrid_allocator<hybrid_told>) {
  losses told;
  Cache cache = make<Cache>(told);
  const auto prompt = count_up(0, 8);
  const sequence_id sequence = cache.create().value();
  cache.append(sequence, prompt).value();
  cache.commit(sequence).value();
  const block_id pinned = first_block(cache, sequence);
  cache.pin(pinned).value();
  cache.release(sequence).value();
  CHECK(cache.audit() == std::vector<std::string>{});

  // Three blocks are left; a fourth is refused, because the pinned one is not to be had.
  const sequence_id other = cache.create().value();
  cache.append(other, count_up(100, 12)).value();
  CHECK_FALSE(cache.append(other, count_up(112, 4)));
  CHECK(told.evicted == 1);
  CHECK(told.dropped == 0);
  CHECK(cache.cached_tokens(prompt) == 4);

  cache.unpin(pinned).value();
  CHECK(cache.audit() == std::vector<std::string>{});
  cache.append(other, count_up(112, 4)).value();
  CHECK(told.evicted == 2);
  CHECK(cache.cached_tokens(prompt) == 0);
}

TEST_CASE_TEMPLATE("pins are counted, and an excess unpin is refused", Cache, paged_allocator<paged_told>,
                   hybrid_allocator<hybrid_told>) {
  losses told;
  Cache cache = make<Cache>(told);
  const sequence_id sequence = cache.create().value();
  cache.append(sequence, count_up(0, 4)).value();
  const block_id block = first_block(cache, sequence);
  cache.pin(block).value();
  cache.pin(block).value();
  cache.release(sequence).value();
  cache.unpin(block).value();
  CHECK(cache.audit() == std::vector<std::string>{});
  cache.unpin(block).value();
  CHECK(cache.unpin(block).code() == errc::double_free);
  CHECK(cache.pin(block).code() == errc::double_free);  // it is free
  CHECK(cache.pin(null_block).code() == errc::no_such_block);
  CHECK(cache.unpin(block_id{1'000'000}).code() == errc::no_such_block);
  CHECK(cache.audit() == std::vector<std::string>{});
}

TEST_CASE_TEMPLATE("observers learn which contents are wrong", Cache, paged_allocator<paged_told>,
                   paged_allocator<paged_told_two>, hybrid_allocator<hybrid_told>) {
  losses told;
  Cache cache = make<Cache>(told);
  const sequence_id sequence = cache.create().value();
  cache.append(sequence, count_up(0, 12)).value();
  cache.commit(sequence).value();
  cache.invalidate(sequence, 4).value();
  CHECK(told.invalidated == 2);
  CHECK(told.told_of_none == (std::is_same_v<Cache, hybrid_allocator<hybrid_told>> ? 1 : 0));
  CHECK(told.evicted == 0);
  CHECK(told.dropped == 0);
  cache.truncate(sequence, 2).value();
  cache.append(sequence, count_up(50, 1)).value();  // writes into the cached block that it alone holds
  CHECK(told.dropped == 1);
}

TEST_CASE("a compaction does not move a pinned block") {
  paged_allocator<> cache({.blocks = 4, .block_tokens = 4, .max_sequences = 2});
  const sequence_id sequence = cache.create().value();
  cache.append(sequence, count_up(0, 4)).value();
  const block_id block = cache.blocks(sequence)[0];
  const block_move away{.source = block, .destination = block_id{to_index(block) == 4 ? 3U : 4U}};
  const auto move_kv = [](std::span<const block_move>) noexcept { return true; };
  cache.pin(block).value();
  CHECK(cache.compact(std::span(&away, 1), move_kv).code() == errc::stale_plan);
  cache.unpin(block).value();
  CHECK(cache.compact(std::span(&away, 1), move_kv).value() == 1);
}
