/// @file
/// Bodies of shared_prefix_cache.hpp: eviction and allocation. Only shared_prefix_cache_body.hpp includes it.
#pragma once

#include <llmmem/paging/errors.hpp>
#include <llmmem/paging/shared_prefix_cache.hpp>

#include <array>

namespace llmmem {
inline namespace v0 {

// Eviction

/// Claims an idle block that is old enough, so that it belongs to the caller alone.
template <class Traits>
bool shared_prefix_cache<Traits>::claim(block_id block, std::uint8_t now, std::uint32_t least_age) noexcept {
  const auto word = states_[to_index(block)];
  const detail::shared_state seen(word.load(std::memory_order_relaxed));
  if (!seen.is_idle()) return false;
  // Ages just below zero belong to blocks used while another thread was ahead with the hand.
  const std::uint32_t age = static_cast<std::uint8_t>(now - seen.last_use());
  if (least_age != 0 && (age < least_age || age >= 0x100 - full_age_)) return false;
  steps::point();
  std::uint64_t expected = seen.word();
  // Acquires the accesses of its holders before their releases. On failure, another thread uses it: skip it.
  return word.compare_exchange_strong(expected, seen.evicted().word(), std::memory_order_acquire,
                                      std::memory_order_relaxed);
}

/// Removes a claimed block from the index; returns the block before it if that becomes idle, else the null
/// block.
template <class Traits>
block_id shared_prefix_cache<Traits>::forget(block_id block) noexcept {
  const entry& gone = entries_[to_index(block)];
  const block_id parent = gone.parent;
  steps::point();
  index_.erase(gone.key, block);
  if (parent == null_block) return null_block;
  return unpin(parent) ? parent : null_block;
}

/// Frees claimed blocks.
template <class Traits>
void shared_prefix_cache<Traits>::give_back(std::span<const block_id> evicted, shard_id shard) noexcept {
  for (const block_id block : evicted) {
    const auto word = states_[to_index(block)];
    word.store(word.load(std::memory_order_relaxed) - detail::shared_state::one_reference,
               std::memory_order_relaxed);
  }
  free_.push(evicted, shard);
}

template <class Traits>
template <class OnEvict>
std::uint64_t shared_prefix_cache<Traits>::sweep(std::uint64_t count, shard_id shard,
                                                 OnEvict& on_evict) noexcept {
  const std::uint64_t round = blocks();
  const std::uint64_t start = hand_.load(std::memory_order_relaxed);
  std::uint64_t position = start % round;
  std::uint64_t eighths = start / eighth_;
  std::uint64_t left_of_eighth = eighth_ - start % eighth_;
  std::uint64_t steps_taken = 0;
  std::uint64_t done = 0;
  std::array<block_id, batch> evicted{};
  std::size_t held = 0;
  const auto flush = [&]() noexcept {
    if (held == 0) return;
    const std::span<const block_id> all(evicted.data(), held);
    on_evict(all);
    give_back(all, shard);
    held = 0;
  };
  block_id next{follow_.exchange(0, std::memory_order_relaxed)};
  for (;;) {
    // Two rounds by age; then any idle block, because the hand has skipped each of them twice.
    const std::uint32_t least_age = steps_taken < rounds_by_age * round ? full_age_ : 0;
    while (next != null_block && done < count && claim(next, static_cast<std::uint8_t>(eighths), least_age)) {
      evicted[held++] = next;
      ++done;
      next = forget(next);
      if (held == batch) flush();
    }
    if (done == count || steps_taken == (rounds_by_age + 1) * round) break;
    next = block_id{static_cast<std::uint32_t>(position + 1)};
    position = position + 1 == round ? 0 : position + 1;
    ++steps_taken;
    if (--left_of_eighth == 0) {
      left_of_eighth = eighth_;
      ++eighths;
    }
  }
  if (done == count) follow_.store(to_index(next), std::memory_order_relaxed);
  hand_.fetch_add(steps_taken, std::memory_order_relaxed);
  time_.store(static_cast<std::uint8_t>(eighths), std::memory_order_relaxed);
  evictions_.fetch_add(done, std::memory_order_relaxed);
  flush();
  return done;
}

template <class Traits>
template <eviction_callback OnEvict>
std::uint64_t shared_prefix_cache<Traits>::evict(std::uint64_t count, shard_id shard,
                                                 OnEvict&& on_evict) noexcept {
  return count == 0 ? 0 : sweep(count, shard, on_evict);
}

template <class Traits>
template <eviction_callback OnEvict>
std::uint64_t shared_prefix_cache<Traits>::drop_idle(shard_id shard, OnEvict&& on_evict) noexcept {
  std::uint64_t done = 0;
  for (std::uint64_t i = 1; i <= blocks(); ++i) {
    block_id next{static_cast<std::uint32_t>(i)};
    while (next != null_block && claim(next, 0, 0)) {
      const block_id evicted = next;
      next = forget(evicted);
      on_evict(std::span<const block_id>(&evicted, 1));
      give_back(std::span(&evicted, 1), shard);
      ++done;
    }
  }
  evictions_.fetch_add(done, std::memory_order_relaxed);
  return done;
}

// Allocation

template <class Traits>
result<void> shared_prefix_cache<Traits>::try_allocate(std::span<block_id> out, shard_id shard) noexcept {
  if (!free_.try_take(out, shard)) return refusal(errc::out_of_blocks, 0, out.size(), free_.size());
  for (const block_id block : out) {
    const auto word = states_[to_index(block)];
    word.store(word.load(std::memory_order_relaxed) + detail::shared_state::one_reference,
               std::memory_order_relaxed);
  }
  return {};
}

template <class Traits>
template <eviction_callback OnEvict>
result<void> shared_prefix_cache<Traits>::allocate(std::span<block_id> out, shard_id shard,
                                                   OnEvict&& on_evict) noexcept {
  if (out.size() > blocks()) return refusal(errc::out_of_blocks, 0, out.size(), free_.size());
  for (;;) {
    const auto taken = try_allocate(out, shard);
    if (taken) return taken;
    // Evicted blocks go to the free lists, for all threads: a thread that kept some while it lacks more would
    // withhold them from threads that lack fewer.
    const std::uint64_t free = free_.size();
    const std::uint64_t missing = out.size() > free ? out.size() - free : 1;
    if (sweep(missing, shard, on_evict) == 0) return try_allocate(out, shard);
  }
}

}  // namespace v0
}  // namespace llmmem
