/// @file
/// Bodies of shared_prefix_cache.hpp: lookup, references and commit. Only shared_prefix_cache.hpp includes
/// it.
#pragma once

#include <llmmem/detail/owner_tag.hpp>
#include <llmmem/paging/errors.hpp>
#include <llmmem/paging/shared_prefix_cache.hpp>

#include <array>

namespace llmmem {
inline namespace v0 {

namespace detail {

[[nodiscard]] inline std::uint64_t checked_shared(const shared_prefix_options& options) {
  const auto bad = [&](const char* what, std::uint64_t value, std::uint64_t most) {
    return length_error(options.name + ": " + what + " " + std::to_string(value) + "; use 1 to " +
                        std::to_string(most));
  };
  if (options.blocks == 0 || options.blocks > max_blocks) throw bad("blocks", options.blocks, max_blocks);
  if (options.block_tokens == 0 || options.block_tokens > max_block_tokens) {
    throw bad("block_tokens", options.block_tokens, max_block_tokens);
  }
  return options.blocks;
}

/// Holds the mutex to the end of the scope. Not std::lock_guard, because <mutex> includes much more.
template <class Mutex>
class turn {
 public:
  explicit turn(Mutex& mutex) noexcept : mutex_(mutex) { mutex_.lock(); }
  turn(const turn&) = delete;
  turn& operator=(const turn&) = delete;
  ~turn() { mutex_.unlock(); }

 private:
  Mutex& mutex_;
};

}  // namespace detail

template <class Traits>
shared_prefix_cache<Traits>::shared_prefix_cache(const shared_prefix_options& options)
    : name_(options.name),
      block_tokens_(options.block_tokens),
      states_(detail::checked_shared(options) + 1, 0, options.metadata, "shared_prefix_cache: states"),
      index_(options.blocks, options.metadata),
      entries_(options.blocks + 1, entry{}, options.metadata, "shared_prefix_cache: entries"),
      verification_(options.blocks, options.block_tokens, options.metadata),
      hash_(options.seed),
      free_(options.blocks, options.shards, options.metadata),
      eighth_(options.blocks < 8 ? 1 : options.blocks / 8),
      full_age_(options.blocks < 8 ? static_cast<std::uint32_t>(options.blocks) : 8) {
  owner_ = detail::owner_tag(&states_);
  // Each shard gets its own range of blocks, with the lowest ids on top.
  const std::uint64_t each = (options.blocks + options.shards - 1) / options.shards;
  for (std::uint64_t block = options.blocks; block > 0; --block) {
    const block_id freed{static_cast<std::uint32_t>(block)};
    free_.push(std::span(&freed, 1), shard_id{static_cast<std::uint32_t>((block - 1) / each)});
  }
}

// References

/// Takes a reference to a cached block, regardless of its present contents. The caller then examines the
/// contents, which can no longer change.
template <class Traits>
bool shared_prefix_cache<Traits>::pin(block_id block) noexcept {
  const auto word = states_[to_index(block)];
  detail::shared_state seen(word.load(std::memory_order_relaxed));
  for (std::uint64_t expected = seen.word();; seen = detail::shared_state(expected)) {
    if (!seen.is_cached() || seen.references() == detail::shared_state::max_references) return false;
    steps::point();
    // Acquires the writer's writes before it cached the block.
    if (word.compare_exchange_weak(expected, seen.with_reference().word(), std::memory_order_acquire,
                                   std::memory_order_relaxed)) {
      return true;
    }
  }
}

/// Drops the reference that `pin` took; returns whether the block is idle now. The block is cached, so it
/// cannot become free.
template <class Traits>
bool shared_prefix_cache<Traits>::unpin(block_id block) noexcept {
  steps::point();
  const detail::shared_state before(
      states_[to_index(block)].fetch_sub(detail::shared_state::one_reference, std::memory_order_release));
  return before.references() == 1;
}

/// Finds a block with exactly these contents after `parent`, which the caller holds, and takes a reference to
/// it.
///
/// A cached block keeps a reference to the block before it. So if it names `parent`, that is the block that
/// the caller holds, in the same generation.
template <class Traits>
block_id shared_prefix_cache<Traits>::find_and_pin(const block_key& key, std::span<const token_id> part,
                                                   block_id parent, const prefix_context& context) noexcept {
  const chain_link link = verification_.link(parent);
  return index_.find(key, [&](block_id block) noexcept {
    steps::point();
    if (!pin(block)) return false;
    const entry& found = entries_[to_index(block)];
    if (found.key == key && found.parent == parent && verification_.holds(block, part, link, context)) {
      return true;
    }
    unpin(block);
    return false;
  });
}

template <class Traits>
shared_match shared_prefix_cache<Traits>::match(std::span<const token_id> tokens,
                                                const prefix_context& context,
                                                std::span<block_id> out) noexcept {
  shared_match found{.end = root(context)};
  const std::size_t full = tokens.size() / block_tokens_;
  const std::size_t limit = full < out.size() ? full : out.size();
  const auto part = [&](std::size_t i) noexcept { return tokens.subspan(i * block_tokens_, block_tokens_); };
  // Computes one key ahead: an exchange stops the processor's speculation, so the next search's data is
  // prefetched before it.
  chained_keys keys(hash_, found.end.key, tokens.first(limit * block_tokens_), block_tokens_);
  block_key key = limit == 0 ? block_key{} : keys.next();
  for (std::size_t i = 0; i < limit; ++i) {
    block_key next{};
    if (keys.has_next()) {
      next = keys.next();
      index_.prefetch(next);
    }
    const block_id block = find_and_pin(key, part(i), found.end.block, context);
    if (block == null_block) break;
    out[i] = block;
    found.end.key = key;
    found.end.block = block;
    ++found.blocks;
    key = next;
  }
  found.tokens = found.blocks * block_tokens_;
  if (found.blocks != 0) found.end.generation = state(found.end.block).generation();
  return found;
}

/// Checks that a caller holds the block, whose word was `seen`; for an id that is not of this cache, `seen`
/// is the null block's word.
template <class Traits>
result<void> shared_prefix_cache<Traits>::check(block_id block, detail::shared_state seen) const noexcept {
  if (seen.references() != 0) return {};
  if (block == null_block) return refusal(errc::null_handle, 0, 0, 0);
  return refusal(is_ours(block) ? errc::double_free : errc::foreign_handle, to_index(block), 0, 0);
}

template <class Traits>
result<void> shared_prefix_cache<Traits>::check(const block_handle& handle,
                                                detail::shared_state seen) const noexcept {
  if (handle.block != null_block) {
    if (handle.owner != owner_) return refusal(errc::foreign_handle, to_index(handle.block), 0, 0);
    if (handle.generation != seen.generation()) {
      return refusal(errc::stale_handle, to_index(handle.block), handle.generation, seen.generation());
    }
  }
  return check(handle.block, seen);
}

template <class Traits>
result<void> shared_prefix_cache<Traits>::share(std::span<const block_id> blocks) noexcept {
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const auto word = word_of(blocks[i]);
    std::uint64_t expected = word.load(std::memory_order_relaxed);
    for (;;) {
      const detail::shared_state seen(expected);
      const bool full = seen.references() == detail::shared_state::max_references;
      if (seen.references() == 0 || full) {
        static_cast<void>(release(blocks.first(i)));
        if (!full) return check(blocks[i], seen);
        return refusal(errc::too_many_shares, to_index(blocks[i]), 1, seen.references());
      }
      if (word.compare_exchange_weak(expected, seen.with_reference().word(), std::memory_order_relaxed))
        break;
    }
  }
  return {};
}

template <class Traits>
template <class Name>
result<void> shared_prefix_cache<Traits>::release_all(std::span<const Name> names, shard_id shard) noexcept {
  const std::uint8_t now = time_.load(std::memory_order_relaxed);
  std::array<block_id, batch> freed{};
  std::size_t first_freed = batch;  // filled from its end, so that the head of the span is on top
  const auto push_freed = [&]() noexcept {
    free_.push(std::span(freed).subspan(first_freed), shard);
    first_freed = batch;
  };
  for (std::size_t i = names.size(); i-- > 0;) {
    const block_id block = id_of(names[i]);
    const auto word = word_of(block);
    // Acquires the accesses of other holders before their releases, in case this call drops the last
    // reference.
    std::uint64_t expected = word.load(std::memory_order_acquire);
    for (;;) {
      const detail::shared_state seen(expected);
      if (const auto held = check(names[i], seen); !held) {
        push_freed();
        return held.error();
      }
      const detail::shared_state next = seen.without_reference(now);
      steps::point();
      if (seen.references() == 1 && !seen.is_cached()) {
        // No other thread can reach the block: no exchange is needed.
        word.store(next.word(), std::memory_order_relaxed);
        freed[--first_freed] = block;
        if (first_freed == 0) push_freed();
        break;
      }
      // Releases the caller's accesses to the thread that evicts or frees the block.
      if (word.compare_exchange_weak(expected, next.word(), std::memory_order_release,
                                     std::memory_order_acquire)) {
        break;
      }
    }
  }
  push_freed();
  return {};
}

// Commit

/// Caches a private block after `after`, whose block the caller or `commit` holds. Returns false if it
/// cannot.
template <class Traits>
bool shared_prefix_cache<Traits>::register_block(block_id block, const chain_end& after, const block_key& key,
                                                 std::span<const token_id> part) noexcept {
  if (after.block != null_block && !pin(after.block)) return false;
  verification_.store(block, part);
  verification_.enrol(block, verification_.link(after.block), after.context);
  entries_[to_index(block)] = {.key = key, .parent = after.block};
  index_.insert(key, block);
  steps::point();
  // From here on readers may find the block: releases all writes to it, by this call and by the caller.
  states_[to_index(block)].fetch_or(detail::shared_state::cached_bit, std::memory_order_release);
  return true;
}

template <class Traits>
result<shared_commit> shared_prefix_cache<Traits>::commit(const chain_end& after,
                                                          std::span<const token_id> tokens,
                                                          std::span<const block_id> blocks) noexcept {
  const std::size_t full = tokens.size() / block_tokens_;
  if (blocks.size() < full) return refusal(errc::size_mismatch, 0, blocks.size(), full);
  for (const block_id block : blocks.first(full)) {
    if (const auto held = check(block, state(block)); !held) return held.error();
  }
  const detail::turn<mutex_type> writing(mutex_);
  shared_commit out{.end = after};
  chain_end& end = out.end;
  // This call holds `end.block` throughout, so blocks cached after it follow its present generation.
  if (!is_ours(end.block) && end.block != null_block) {
    return refusal(errc::foreign_handle, to_index(end.block), 0, 0);
  }
  if (end.block != null_block) {
    const bool pinned = pin(end.block);
    const std::uint32_t generation = state(end.block).generation();
    // The key proves that the end belongs to this cache, and not to another cache with a block of the same
    // number.
    if (!pinned || generation != end.generation || entries_[to_index(end.block)].key != end.key) {
      if (pinned) unpin(end.block);
      return refusal(errc::stale_handle, to_index(end.block), end.generation, generation);
    }
  }
  failure why;
  chained_keys keys(hash_, end.key, tokens.first(full * block_tokens_), block_tokens_);
  for (std::size_t i = 0; i < full; ++i) {
    const auto part = tokens.subspan(i * block_tokens_, block_tokens_);
    const block_key key = keys.next();
    block_id holder = find_and_pin(key, part, end.block, end.context);
    if (holder == null_block) {
      const detail::shared_state seen = state(blocks[i]);
      if (seen.is_cached()) {
        why = refusal(errc::already_cached, to_index(blocks[i]), 0, 0);
        break;
      }
      if (!register_block(blocks[i], end, key, part)) {
        why = refusal(errc::too_many_shares, to_index(end.block), 1, detail::shared_state::max_references);
        break;
      }
      holder = blocks[i];
      ++out.registered;
      if (!pin(holder)) {
        why = refusal(errc::too_many_shares, to_index(holder), 1, detail::shared_state::max_references);
        break;
      }
    } else if (holder != blocks[i]) {
      ++out.duplicates;
    }
    if (end.block != null_block) unpin(end.block);
    end.key = key;
    end.block = holder;
    end.generation = state(holder).generation();
  }
  if (end.block != null_block) unpin(end.block);
  registrations_.fetch_add(out.registered, std::memory_order_relaxed);
  duplicates_.fetch_add(out.duplicates, std::memory_order_relaxed);
  if (why.code != errc::ok) return why;
  return out;
}

}  // namespace v0
}  // namespace llmmem

#include <llmmem/paging/detail/shared_prefix_cache_audit.hpp>
#include <llmmem/paging/detail/shared_prefix_cache_eviction.hpp>
