/// @file
/// Bodies of shared_prefix_cache.hpp. Included by it alone.
#pragma once

#include <llmmem/detail/owner_tag.hpp>
#include <llmmem/paging/shared_prefix_cache.hpp>

#include <array>
#include <type_traits>
#include <utility>

namespace llmmem::inline v0 {

namespace detail {

[[nodiscard]] inline std::uint64_t checked_shared(const shared_prefix_options& options) {
  const auto bad = [&](const char* what, std::uint64_t value, std::uint64_t most) {
    return length_error(options.name + ": " + what + " " + std::to_string(value) + ", allowed are 1 to " +
                        std::to_string(most));
  };
  if (options.blocks == 0 || options.blocks > max_blocks) throw bad("blocks", options.blocks, max_blocks);
  if (options.block_tokens == 0 || options.block_tokens > max_block_tokens) {
    throw bad("block_tokens", options.block_tokens, max_block_tokens);
  }
  return options.blocks;
}

/// `lock` from here to the end of the block; <mutex> has more than that.
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
shared_prefix_cache<Traits>::shared_prefix_cache(shared_prefix_options options)
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
  // Each shard gets a range of its own, the lowest ids on top.
  const std::uint64_t each = (options.blocks + options.shards - 1) / options.shards;
  for (std::uint64_t block = options.blocks; block > 0; --block) {
    const block_id freed{static_cast<std::uint32_t>(block)};
    free_.push(std::span(&freed, 1), shard_id{static_cast<std::uint32_t>((block - 1) / each)});
  }
}

// References

/// Takes a reference to a cached block, whatever it holds now: the caller looks at it then, and can rely on
/// what it sees.
template <class Traits>
bool shared_prefix_cache<Traits>::pin(block_id block) noexcept {
  const auto word = states_[to_index(block)];
  detail::shared_state seen(word.load(std::memory_order_relaxed));
  for (std::uint64_t expected = seen.word();; seen = detail::shared_state(expected)) {
    if (!seen.is_cached() || seen.references() == detail::shared_state::max_references) return false;
    steps::point();
    // Acquires what the writer wrote before it made the block findable.
    if (word.compare_exchange_weak(expected, seen.with_reference().word(), std::memory_order_acquire,
                                   std::memory_order_relaxed)) {
      return true;
    }
  }
}

/// Takes it back, as if it had not been; says whether the block is idle now. The block is cached: it cannot
/// become free by this.
template <class Traits>
bool shared_prefix_cache<Traits>::unpin(block_id block) noexcept {
  steps::point();
  const detail::shared_state before(
      states_[to_index(block)].fetch_sub(detail::shared_state::one_reference, std::memory_order_release));
  return before.references() == 1;
}

/// A block with exactly these contents behind `parent`, which the caller holds; with a reference.
///
/// A block that is cached keeps a reference to the one before it. So if it says that `parent` comes before
/// it, that is the block that the caller holds, in the same life.
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
  // A key ahead: an exchange keeps the processor from looking further by itself, so what the next search
  // reads is asked for before it.
  block_key key = limit == 0 ? block_key{} : hash_.chain(found.end.key, part(0));
  for (std::size_t i = 0; i < limit; ++i) {
    block_key next{};
    if (i + 1 < limit) {
      next = hash_.chain(key, part(i + 1));
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

template <class Traits>
result<void> shared_prefix_cache<Traits>::check(block_id block, detail::shared_state seen) const noexcept {
  if (seen.references() == 0) return refusal(errc::double_free, to_index(block), 0, 0);
  return {};
}

template <class Traits>
result<void> shared_prefix_cache<Traits>::check(const block_handle& handle,
                                                detail::shared_state seen) const noexcept {
  if (handle.owner != owner_) return refusal(errc::foreign_handle, to_index(handle.block), 0, 0);
  if (handle.generation != seen.generation()) {
    return refusal(errc::stale_handle, to_index(handle.block), handle.generation, seen.generation());
  }
  return check(handle.block, seen);
}

template <class Traits>
result<void> shared_prefix_cache<Traits>::share(std::span<const block_id> blocks) noexcept {
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const auto word = states_[to_index(blocks[i])];
    std::uint64_t expected = word.load(std::memory_order_relaxed);
    for (;;) {
      const detail::shared_state seen(expected);
      const bool full = seen.references() == detail::shared_state::max_references;
      if (seen.references() == 0 || full) {
        static_cast<void>(release(blocks.first(i)));
        return refusal(full ? errc::too_many_shares : errc::double_free, to_index(blocks[i]), full ? 1 : 0,
                       seen.references());
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
  std::array<block_id, batch> freed;
  std::size_t first_freed = batch;  // filled from its end, so that the head of the span comes out on top
  const auto push_freed = [&]() noexcept {
    free_.push(std::span(freed).subspan(first_freed), shard);
    first_freed = batch;
  };
  for (std::size_t i = names.size(); i-- > 0;) {
    const block_id block = id_of(names[i]);
    const auto word = states_[to_index(block)];
    // Acquires what other holders did before they released, in case this call is left with the last
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
        // Nobody else can come by it: no exchange is needed.
        word.store(next.word(), std::memory_order_relaxed);
        freed[--first_freed] = block;
        if (first_freed == 0) push_freed();
        break;
      }
      // Releases what the caller read and wrote to whoever evicts the block, or frees it.
      if (word.compare_exchange_weak(expected, next.word(), std::memory_order_release,
                                     std::memory_order_acquire)) {
        break;
      }
    }
  }
  push_freed();
  return {};
}

// Eviction

/// Makes an idle block that is old enough the caller's alone.
template <class Traits>
bool shared_prefix_cache<Traits>::claim(block_id block, std::uint8_t now, std::uint32_t least_age) noexcept {
  const auto word = states_[to_index(block)];
  const detail::shared_state seen(word.load(std::memory_order_relaxed));
  if (!seen.is_idle()) return false;
  // Ages just below zero are those of blocks used while another thread was ahead with the hand.
  const std::uint32_t age = static_cast<std::uint8_t>(now - seen.last_use());
  if (least_age != 0 && (age < least_age || age >= 0x100 - full_age_)) return false;
  steps::point();
  std::uint64_t expected = seen.word();
  // Acquires what its holders did until they released it. If it fails somebody uses the block: not this one.
  return word.compare_exchange_strong(expected, seen.evicted().word(), std::memory_order_acquire,
                                      std::memory_order_relaxed);
}

/// Takes a claimed block out of the index; says which block has become idle by that, if one has.
template <class Traits>
block_id shared_prefix_cache<Traits>::forget(block_id block) noexcept {
  const entry& gone = entries_[to_index(block)];
  const block_id parent = gone.parent;
  steps::point();
  index_.erase(gone.key, block);
  if (parent == null_block) return null_block;
  return unpin(parent) ? parent : null_block;
}

/// Claimed blocks become free.
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
  std::array<block_id, batch> evicted;
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
    // Twice round by age; then, since everything idle has been passed over twice, any.
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
    // What is evicted is free for all: a thread that holds some and lacks others would keep them from those
    // who lack less.
    const std::uint64_t free = free_.size();
    const std::uint64_t missing = out.size() > free ? out.size() - free : 1;
    if (sweep(missing, shard, on_evict) == 0) return try_allocate(out, shard);
  }
}

// Commit

/// Makes a private block findable behind `after`, to whose block somebody holds on. False: it cannot be.
template <class Traits>
bool shared_prefix_cache<Traits>::register_block(block_id block, const chain_end& after, const block_key& key,
                                                 std::span<const token_id> part) noexcept {
  if (after.block != null_block && !pin(after.block)) return false;
  verification_.store(block, part);
  verification_.enrol(block, verification_.link(after.block), after.context);
  entries_[to_index(block)] = {.key = key, .parent = after.block};
  index_.insert(key, block);
  steps::point();
  // From here on it may be found: releases all that was written into it, here and by the caller.
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
  // `end.block` is held throughout, so that what comes behind it comes behind that life of it.
  if (end.block != null_block) {
    const bool pinned = pin(end.block);
    const std::uint32_t generation = state(end.block).generation();
    if (!pinned || generation != end.generation) {
      if (pinned) unpin(end.block);
      return refusal(errc::stale_handle, to_index(end.block), end.generation, generation);
    }
  }
  failure why;
  for (std::size_t i = 0; i < full; ++i) {
    const auto part = tokens.subspan(i * block_tokens_, block_tokens_);
    const block_key key = hash_.chain(end.key, part);
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

// The whole

template <class Traits>
shared_stats shared_prefix_cache<Traits>::stats() const noexcept {
  shared_stats out{
      .blocks = blocks(),
      .registrations = registrations_.load(std::memory_order_relaxed),
      .duplicates = duplicates_.load(std::memory_order_relaxed),
      .evictions = evictions_.load(std::memory_order_relaxed),
      .metadata_bytes = states_.bytes() + index_.metadata_bytes() + entries_.bytes() + free_.metadata_bytes(),
      .verification_bytes = verification_.metadata_bytes()};
  for (std::uint32_t i = 1; i <= blocks(); ++i) {
    const detail::shared_state seen = state(block_id{i});
    out.cached += seen.is_cached() ? 1 : 0;
    out.active += seen.references() != 0 ? 1 : 0;
    out.idle += seen.is_idle() ? 1 : 0;
  }
  out.free = out.blocks - out.active - out.idle;
  return out;
}

template <class Traits>
std::vector<std::string> shared_prefix_cache<Traits>::audit() const {
  std::vector<std::string> found;
  const auto say = [&](std::uint64_t block, const std::string& what) {
    found.push_back(name_ + ": block " + std::to_string(block) + " " + what);
  };
  std::vector<std::uint32_t> children(states_.size());
  std::vector<std::uint32_t> listed(states_.size());
  std::uint64_t cached = 0;
  std::uint64_t gone_on = 0;
  std::uint64_t free = 0;
  free_.for_each([&](block_id block) { ++listed[to_index(block)]; });
  for (std::uint32_t i = 1; i <= blocks(); ++i) {
    const detail::shared_state seen = state(block_id{i});
    const bool is_free = seen.references() == 0 && !seen.is_cached();
    if (listed[i] != (is_free ? 1U : 0U)) {
      say(i, "is " + std::string(is_free ? "free" : "in use") + " and " + std::to_string(listed[i]) +
                 " times on a free list");
    }
    free += is_free ? 1 : 0;
    if (!seen.is_cached()) continue;
    ++cached;
    const entry& at = entries_[i];
    if (index_.find(at.key, [&](block_id b) noexcept { return to_index(b) == i; }) == null_block) {
      say(i, "is not found by its key");
    } else {
      gone_on += index_.distance(at.key, block_id{i});
    }
    if (at.parent == null_block) continue;
    ++children[to_index(at.parent)];
    if (!state(at.parent).is_cached()) {
      say(i, "comes behind block " + std::to_string(to_index(at.parent)) + ", which is not cached");
    }
  }
  for (std::uint32_t i = 1; i <= blocks(); ++i) {
    const std::uint32_t references = state(block_id{i}).references();
    if (references < children[i]) {
      say(i, "has " + std::to_string(references) + " references, " + std::to_string(children[i]) +
                 " cached blocks come behind it");
    }
  }
  const auto in_index = index_.count();
  if (in_index.present != cached || in_index.gone_on != gone_on) {
    found.push_back(name_ + ": the index holds " + std::to_string(in_index.present) + " blocks, " +
                    std::to_string(cached) + " are cached; it counts " + std::to_string(in_index.gone_on) +
                    " gone on, there are " + std::to_string(gone_on));
  }
  if (free != free_.size()) {
    found.push_back(name_ + ": counts " + std::to_string(free_.size()) + " free blocks, there are " +
                    std::to_string(free));
  }
  return found;
}

}  // namespace llmmem::inline v0
