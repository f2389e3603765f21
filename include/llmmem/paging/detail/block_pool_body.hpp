/// @file
/// Bodies of block_pool.hpp: construction, allocation, eviction. Only block_pool.hpp includes it.
#pragma once

#include <llmmem/paging/block_pool.hpp>
#include <llmmem/paging/errors.hpp>

#include <array>
#include <utility>

namespace llmmem {
inline namespace v0 {

namespace detail {

[[nodiscard]] inline std::uint64_t checked_blocks(const block_pool_options& options) {
  if (options.blocks == 0) throw length_error(options.name + ": 0 blocks; a pool needs at least one");
  if (options.blocks > max_blocks) {
    throw length_error(options.name + ": " + std::to_string(options.blocks) +
                       " blocks, more than the limit of " + std::to_string(max_blocks) +
                       " (block ids are non-negative int32)");
  }
  return options.blocks;
}

/// The most blocks that a pool may ever have.
[[nodiscard]] inline std::uint64_t checked_most_blocks(const block_pool_options& options) {
  const std::uint64_t blocks = checked_blocks(options);
  if (options.block_capacity == 0) return blocks;
  if (options.block_capacity < blocks || options.block_capacity > max_blocks) {
    throw length_error(options.name + ": block_capacity is " + std::to_string(options.block_capacity) +
                       "; use " + std::to_string(blocks) + " (what it starts with) to " +
                       std::to_string(max_blocks) + ", or 0 for a pool that never grows");
  }
  return options.block_capacity;
}

}  // namespace detail

template <eviction_policy Eviction, free_list FreeList, block_history History>
block_pool<Eviction, FreeList, History>::block_pool(block_pool_options options)
    : block_pool(options, Eviction(slot_count{detail::checked_most_blocks(options) + 1}, options.metadata)) {}

template <eviction_policy Eviction, free_list FreeList, block_history History>
block_pool<Eviction, FreeList, History>::block_pool(block_pool_options options, Eviction eviction)
    : name_(std::move(options.name)),
      records_(detail::checked_most_blocks(options) + 1, block_record{}, options.metadata,
               "block_pool: records"),
      free_(records_.size() - 1, options.metadata),
      last_(options.blocks),
      owner_(detail::owner_tag(records_.data())),
      eviction_(std::move(eviction)) {
  if (to_number(eviction_.capacity()) < records_.size()) {
    throw length_error(name_ + ": the eviction policy has " +
                       std::to_string(to_number(eviction_.capacity())) + " slots, but " +
                       std::to_string(records_.size()) +
                       " are needed: one per block and one for the null block");
  }
  // A new pool allocates 1, 2, 3... in order, so that neighbours in a sequence are neighbours in memory.
  for (std::uint64_t i = last_; i > 0; --i)
    push_free(block_id{static_cast<std::uint32_t>(i)});
}

template <eviction_policy Eviction, free_list FreeList, block_history History>
template <eviction_callback OnEvict>
result<void> block_pool<Eviction, FreeList, History>::allocate(std::span<block_id> out, OnEvict&& on_evict,
                                                               block_id neighbour) noexcept {
  return allocate_all(out, on_evict, neighbour);
}

template <eviction_policy Eviction, free_list FreeList, block_history History>
template <eviction_callback OnEvict>
result<void> block_pool<Eviction, FreeList, History>::allocate(std::span<block_handle> out,
                                                               OnEvict&& on_evict,
                                                               block_id neighbour) noexcept {
  return allocate_all(out, on_evict, neighbour);
}

template <eviction_policy Eviction, free_list FreeList, block_history History>
template <eviction_callback OnEvict>
result<block_handle> block_pool<Eviction, FreeList, History>::allocate(OnEvict&& on_evict) noexcept {
  if (free() == 0) {
    if (const auto done = make_free(1, on_evict); !done) return done.error();
  }
  return handle(take_free(null_block));
}

template <eviction_policy Eviction, free_list FreeList, block_history History>
template <class Name, class OnEvict>
result<void> block_pool<Eviction, FreeList, History>::allocate_all(std::span<Name> out, OnEvict& on_evict,
                                                                   block_id neighbour) noexcept {
  if (out.size() > free()) {
    if (const auto done = make_free(out.size(), on_evict); !done) return done;
  }
  for (Name& name : out) {
    neighbour = take_free(neighbour);
    give(neighbour, name);
  }
  return {};
}

template <eviction_policy Eviction, free_list FreeList, block_history History>
inline block_id block_pool<Eviction, FreeList, History>::take_free(block_id neighbour) noexcept {
  const block_id block = free_.take(neighbour);
  records_[to_index(block)].allocate();
  history_.note(block, paging::transition::allocated);
  ++allocations_;
  return block;
}

template <eviction_policy Eviction, free_list FreeList, block_history History>
template <class OnEvict>
result<void> block_pool<Eviction, FreeList, History>::make_free(std::uint64_t count,
                                                                OnEvict& on_evict) noexcept {
  if (count > available()) return refusal(errc::out_of_blocks, 0, count, available());
  evicting_allocations_ += evict_while([&](std::uint64_t) noexcept { return free() < count; }, on_evict);
  // Reached only if a policy breaks its contract and withholds a candidate; blocks already evicted stay free.
  if (count > free()) return refusal(errc::out_of_blocks, 0, count, free());
  return {};
}

template <eviction_policy Eviction, free_list FreeList, block_history History>
template <eviction_callback OnEvict>
std::uint64_t block_pool<Eviction, FreeList, History>::reclaim(std::uint64_t count,
                                                               OnEvict&& on_evict) noexcept {
  return evict_while([&](std::uint64_t done) noexcept { return done < count; }, on_evict);
}

/// Evicts idle blocks while there are any and `more(evicted)` is true; returns how many.
template <eviction_policy Eviction, free_list FreeList, block_history History>
template <class More, class OnEvict>
std::uint64_t block_pool<Eviction, FreeList, History>::evict_while(More&& more, OnEvict& on_evict) noexcept {
  // Reports blocks in groups, so that the callback can prefetch several cache lines at once.
  std::array<block_id, 16> group{};
  std::uint64_t done = 0;
  for (std::size_t size = 1; size != 0;) {
    size = 0;
    for (bool ends = false; !ends && size < group.size() && idle_count_ != 0 && more(done);) {
      const slot_id victim = detail::evict_victim(eviction_);
      if (victim == no_slot) break;
      const block_id block{to_index(victim)};
      block_record& record = records_[to_index(block)];
      record.give_up(paging::transition::evicted);
      history_.note(block, paging::transition::evicted);
      record.end_life();
      push_free(block);
      --idle_count_;
      ++done;
      group[size++] = block;
      if constexpr (requires { on_evict.reported_alone(block); }) ends = on_evict.reported_alone(block);
    }
    if (size != 0) on_evict(std::span<const block_id>(group.data(), size));
  }
  evictions_ += done;
  return done;
}

}  // namespace v0
}  // namespace llmmem

#include <llmmem/paging/detail/block_pool_audit.hpp>
#include <llmmem/paging/detail/block_pool_references.hpp>
#include <llmmem/paging/detail/block_pool_resize.hpp>
