/// @file
/// Bodies of paged_allocator.hpp: construction, creation and release of sequences, growth. Only
/// paged_allocator.hpp includes it.
#pragma once

#include <llmmem/paging/errors.hpp>
#include <llmmem/paging/paged_allocator.hpp>

#include <cstring>
#include <utility>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// Returns the number of blocks that `tokens` tokens fill or begin.
[[nodiscard]] constexpr std::uint64_t blocks_for(std::uint64_t tokens, std::uint32_t block_tokens) noexcept {
  return tokens / block_tokens + (tokens % block_tokens != 0 ? 1 : 0);
}

[[nodiscard]] constexpr std::uint64_t lesser(std::uint64_t a, std::uint64_t b) noexcept {
  return a < b ? a : b;
}

/// The most blocks that the pool may ever have.
[[nodiscard]] constexpr std::uint64_t block_capacity(const paged_options& options) noexcept {
  return options.block_capacity > options.blocks ? options.block_capacity : options.blocks;
}

/// The number of entries of the longest block table.
[[nodiscard]] constexpr std::uint64_t table_blocks(const paged_options& options) noexcept {
  return lesser(blocks_for(options.max_sequence_tokens, options.block_tokens), block_capacity(options));
}

/// Returns the options of the pool after checking every number and every product in `options`.
[[nodiscard]] inline block_pool_options checked_pool_options(const paged_options& options) {
  if (options.block_tokens == 0 || options.block_tokens > max_block_tokens) {
    throw length_error(options.name + ": blocks of " + std::to_string(options.block_tokens) +
                       " tokens; use 1 to " + std::to_string(max_block_tokens));
  }
  if (options.max_sequences == 0)
    throw length_error(options.name + ": max_sequences is 0; at least 1 is needed");
  if (options.max_sequence_tokens == 0) {
    throw length_error(options.name + ": max_sequence_tokens is 0; at least 1 is needed");
  }
  block_pool_options pool{.blocks = options.blocks,
                          .block_capacity = options.block_capacity,
                          .name = options.name,
                          .metadata = options.metadata};
  static_cast<void>(checked_most_blocks(pool));
  const std::uint64_t table_bytes = (table_blocks(options) + 1) * sizeof(block_id);
  static_cast<void>(
      checked_multiply(table_bytes, options.max_sequences, (options.name + ": block tables").c_str()));
  return pool;
}

/// One slot per block, including the null block.
[[nodiscard]] inline slot_count eviction_slots(const paged_options& options) {
  static_cast<void>(checked_pool_options(options));
  return slot_count{block_capacity(options) + 1};
}

}  // namespace detail

template <class Traits>
paged_allocator<Traits>::paged_allocator(paged_options options, observer_type observer)
    : paged_allocator(options, eviction_type(detail::eviction_slots(options), options.metadata),
                      std::move(observer)) {}

template <class Traits>
paged_allocator<Traits>::paged_allocator(paged_options options, eviction_type eviction,
                                         observer_type observer)
    : pool_(detail::checked_pool_options(options), std::move(eviction)),
      index_(pool_.block_capacity(), options.metadata),
      verification_(pool_.block_capacity(), options.block_tokens, options.metadata),
      hash_(options.seed),
      admission_(slot_count{pool_.block_capacity() + 1}, options.metadata),
      followers_(pool_.block_capacity(), options.metadata),
      observer_(std::move(observer)),
      block_tokens_(options.block_tokens),
      epoch_(options.epoch),
      max_table_blocks_(detail::table_blocks(options)),
      max_sequence_tokens_(detail::lesser(options.max_sequence_tokens, max_table_blocks_ * block_tokens_)),
      max_idle_blocks_(options.max_idle_blocks),
      pressure_(options.pressure),
      metadata_(options.metadata),
      records_(options.max_sequences, record{}, options.metadata, "paged_allocator: sequences"),
      rows_((max_table_blocks_ + 1) * options.max_sequences, options.metadata,
            "paged_allocator: block tables"),
      tails_(std::uint64_t{options.max_sequences} * block_tokens_, options.metadata,
             "paged_allocator: tails"),
      retained_(retains<eviction_type> ? options.max_sequences : 0, detail::retained_ranges{},
                options.metadata, "paged_allocator: retained ranges"),
      chained_(Traits::keys::chains ? max_table_blocks_ : 0, options.metadata,
               "paged_allocator: chained keys"),
      free_slots_(options.max_sequences, options.metadata, "paged_allocator: free slots"),
      free_slot_count_(options.max_sequences),
      owner_(detail::owner_tag(records_.data())),
      deferred_(options.max_deferred == unlimited ? pool_.block_capacity() : options.max_deferred,
                std::uint64_t{options.max_sequences} * 4, options.metadata),
      pins_(pool_.block_capacity() + 1, options.metadata) {
  for (std::uint32_t i = 0; i < free_slot_count_; ++i)
    free_slots_[i] = free_slot_count_ - 1 - i;
}

// Creation and release of sequences

template <class Traits>
result<void> paged_allocator<Traits>::check(sequence_id sequence) const noexcept {
  if (sequence == sequence_id{}) return refusal(errc::null_handle, 0, 0, 0);
  if (sequence.owner != owner_ || sequence.slot >= records_.size()) {
    return refusal(errc::foreign_handle, sequence.slot, 0, 0);
  }
  const std::uint32_t now = records_[sequence.slot].generation;
  if (sequence.generation != now || !at(sequence).alive())
    return refusal(errc::stale_handle, sequence.slot, sequence.generation, now);
  return {};
}

template <class Traits>
result<sequence_id> paged_allocator<Traits>::create(const prefix_context& context,
                                                    const request_hints& hints) noexcept {
  if (hints.keep.priority > retention::max_priority) {
    return refusal(errc::bad_priority, 0, hints.keep.priority, retention::max_priority);
  }
  if (free_slot_count_ == 0) return refusal(errc::out_of_sequences, 0, 1, records_.size());
  const std::uint32_t slot = free_slots_[--free_slot_count_];
  record& fresh = records_[slot];
  fresh = record{.generation = fresh.generation + 1, .context = context, .hints = hints};
  fresh.cuts = cuts_;
  fresh.evictions = pool_.evictions();
  reset(fresh);
  if constexpr (retains<eviction_type>) retained_[slot].count = 0;
  return sequence_id{slot, fresh.generation, owner_};
}

template <class Traits>
result<sequence_id> paged_allocator<Traits>::fork(sequence_id parent) noexcept {
  if (const auto alive = begin(parent); !alive) return alive.error();
  if (free_slot_count_ == 0) return refusal(errc::out_of_sequences, 0, 1, records_.size());
  const record& original = at(parent);
  if (const auto shared = pool_.share(blocks(parent)); !shared) return shared.error();

  const std::uint32_t slot = free_slots_[--free_slot_count_];
  record& copy = records_[slot];
  const std::uint32_t generation = copy.generation + 1;
  copy = original;
  copy.generation = generation;
  if constexpr (retains<eviction_type>) retained_[slot] = retained_[parent.slot];
  std::memcpy(row(slot), row(parent.slot), original.blocks * sizeof(block_id));
  std::memcpy(tail(slot), tail(parent.slot), (original.tokens % block_tokens_) * sizeof(token_id));
  counters_.tokens += copy.tokens;
  counters_.table_blocks += copy.blocks;
  return sequence_id{slot, generation, owner_};
}

template <class Traits>
result<void> paged_allocator<Traits>::release(sequence_id sequence) noexcept {
  if (const auto alive = begin(sequence); !alive) return alive.error();
  commit_again(sequence.slot);
  if (const auto released = pool_.release(blocks(sequence)); !released) return released.error();
  end(sequence.slot);
  trim_idle();
  return {};
}

template <class Traits>
result<void> paged_allocator<Traits>::release_after(sequence_id sequence, const fence_type& after) noexcept {
  if (const auto alive = begin(sequence); !alive) return alive.error();
  commit_again(sequence.slot);
  if (const auto queued = defer(sequence.slot, blocks(sequence), after); !queued) return queued;
  end(sequence.slot);
  return {};
}

template <class Traits>
result<void> paged_allocator<Traits>::defer(std::uint32_t slot, std::span<const block_id> blocks,
                                            const fence_type& after) noexcept {
  if (blocks.empty() || deferred_.push(blocks, after)) return {};
  collect();  // fences may have passed since
  if (deferred_.push(blocks, after)) return {};
  return refusal(errc::deferred_full, slot, blocks.size(), deferred_.free_entries());
}

template <class Traits>
std::uint64_t paged_allocator<Traits>::collect() noexcept {
  pool_.set_actor(paging::no_actor);
  const std::uint64_t gone = deferred_.collect([this](block_id block) noexcept {
    static_cast<void>(pool_.release(block));  // cannot fail: the queue held this reference
  });
  trim_idle();
  return gone;
}

template <class Traits>
void paged_allocator<Traits>::end(std::uint32_t slot) noexcept {
  record& ended = records_[slot];
  counters_.tokens -= ended.tokens;
  counters_.table_blocks -= ended.blocks;
  ++ended.generation;
  free_slots_[free_slot_count_++] = slot;
}

template <class Traits>
void paged_allocator<Traits>::trim_idle() noexcept {
  pool_.trim_idle(max_idle_blocks_, forget_evicted());
}

template <class Traits>
std::uint64_t paged_allocator<Traits>::drop_idle() noexcept {
  const std::uint64_t before = pool_.idle();
  pool_.trim_idle(0, forget_evicted());
  return before - pool_.idle();
}

template <class Traits>
result<std::uint64_t> paged_allocator<Traits>::resize(std::uint64_t blocks) noexcept {
  const std::uint64_t before = pool_.available();
  const std::uint64_t cached = index_.size();
  const auto retiring = pool_.resize(blocks, forget_evicted());
  if (!retiring) return retiring;
  // Blocks above the end have lost their contents, so nothing may be cached after them until equal contents
  // are cached again.
  if (index_.size() != cached) ++cuts_;
  warn_if_low(before);
  return retiring;
}

// Growing and shrinking

template <class Traits>
result<append_result> paged_allocator<Traits>::append(sequence_id sequence,
                                                      std::span<const token_id> tokens) noexcept {
  const auto required = make_room(sequence, tokens.size());
  if (!required) return required.error();
  const std::uint64_t before = pool_.available();
  const auto grown = grow(sequence.slot, tokens.size(), *required);
  if (grown && at(sequence).tokens_known) fill(sequence.slot, grown->first, tokens);
  warn_if_low(before);  // last, because the callback may change everything
  return grown;
}

template <class Traits>
result<append_result> paged_allocator<Traits>::extend(sequence_id sequence, std::uint64_t count) noexcept {
  const auto required = make_room(sequence, count);
  if (!required) return required.error();
  const std::uint64_t before = pool_.available();
  const auto grown = grow(sequence.slot, count, *required);
  if (grown && count != 0) at(sequence).lose_tokens(grown->first);
  warn_if_low(before);
  return grown;
}

template <class Traits>
result<void> paged_allocator<Traits>::name_tokens(sequence_id sequence,
                                                  std::span<const token_id> tokens) noexcept {
  if (const auto alive = begin(sequence); !alive) return alive.error();
  record& named = at(sequence);
  const std::uint64_t first = detail::lesser(named.unnamed, named.tokens);
  if (tokens.size() > named.tokens - first)
    return refusal(errc::past_the_end, sequence.slot, first + tokens.size(), named.tokens);
  if (tokens.empty()) return {};
  fill(sequence.slot, first, tokens);
  named.tokens_known = first + tokens.size() == named.tokens;
  named.unnamed = named.tokens_known ? ~std::uint64_t{0} : first + tokens.size();
  return {};
}

template <class Traits>
result<void> paged_allocator<Traits>::check_length(std::uint32_t slot, std::uint64_t count) const noexcept {
  const std::uint64_t tokens = records_[slot].tokens;
  if (count <= max_sequence_tokens_ - tokens) return {};
  const std::uint64_t wanted = count > max_bytes ? max_bytes : tokens + count;
  return refusal(errc::sequence_full, slot, wanted, max_sequence_tokens_);
}

/// Returns the blocks that `count` more tokens would take, including the block for a copy on write.
template <class Traits>
typename paged_allocator<Traits>::need paged_allocator<Traits>::needed_for(
    std::uint32_t slot, std::uint64_t count) const noexcept {
  if (count == 0) return {};
  const record& sequence = records_[slot];
  const std::uint64_t total = detail::blocks_for(sequence.tokens + count, block_tokens_);
  const bool copies =
      sequence.tokens % block_tokens_ != 0 && pool_.record(row(slot)[sequence.blocks - 1]).references() > 1;
  return {.blocks = total - sequence.blocks + (copies ? 1 : 0), .copies = copies};
}

/// Ensures that blocks for `count` more tokens are available, and returns their purpose.
template <class Traits>
result<typename paged_allocator<Traits>::need> paged_allocator<Traits>::make_room(
    sequence_id sequence, std::uint64_t count) noexcept {
  for (;;) {
    if (const auto alive = begin(sequence); !alive) return alive.error();
    if (const auto fits = check_length(sequence.slot, count); !fits) return fits.error();
    const need required = needed_for(sequence.slot, count);
    if (required.blocks <= pool_.available()) return required;
    if (collect() != 0) continue;  // collected references may be the missing blocks, or the reason to copy
    // The pressure callback may change everything: this sequence too, and the reason to copy.
    if (relieve(required.blocks)) continue;
    if (check(sequence) && needed_for(sequence.slot, count).blocks < required.blocks) continue;
    return refusal(errc::out_of_blocks, 0, required.blocks, pool_.available());
  }
}

/// @pre `required` is the result of `needed_for`, and that many blocks are available.
template <class Traits>
result<append_result> paged_allocator<Traits>::grow(std::uint32_t slot, std::uint64_t count,
                                                    const need& required) noexcept {
  record& sequence = records_[slot];
  append_result out{.first = sequence.tokens, .new_blocks = required.blocks};
  if (count == 0) return out;
  block_id* const table = row(slot);
  const auto used = static_cast<std::uint32_t>(sequence.tokens % block_tokens_);
  const std::uint64_t total = detail::blocks_for(sequence.tokens + count, block_tokens_);
  const std::uint64_t more = total - sequence.blocks;
  block_id* const last = sequence.blocks == 0 ? nullptr : &table[sequence.blocks - 1];

  // A copy's block follows the new ones, so that the new ones are in order of allocation.
  const std::span<block_id> fresh(&table[sequence.blocks], required.blocks);
  const block_id tail = last == nullptr ? null_block : *last;
  if (const auto done = pool_.allocate(fresh, forget_evicted(), tail); !done) return done.error();
  if (required.copies) {
    out.copy = {.source = *last, .destination = table[total], .tokens = used};
    static_cast<void>(pool_.release(*last));  // cannot fail: this sequence held it
    *last = out.copy.destination;
    ++counters_.copies;
  } else if (used != 0 && index_.contains(*last) && index_.tokens(*last) > used) {
    // The sequence was truncated into cached contents and is about to overwrite them; no other sequence
    // shares them.
    drop_contents(*last);
  }
  // The last block's contents will differ from its cached ones.
  if (used != 0 && sequence.committed == sequence.blocks) --sequence.committed;
  sequence.blocks = static_cast<std::uint32_t>(total);
  sequence.tokens += count;
  counters_.tokens += count;
  counters_.table_blocks += more;
  return out;
}

template <class Traits>
void paged_allocator<Traits>::fill(std::uint32_t slot, std::uint64_t first,
                                   std::span<const token_id> tokens) noexcept {
  if (tokens.empty()) return;
  const auto used = static_cast<std::size_t>(first % block_tokens_);
  if (used != 0) {
    const auto part = static_cast<std::size_t>(detail::lesser(tokens.size(), block_tokens_ - used));
    std::memcpy(tail(slot) + used, tokens.data(), part * sizeof(token_id));
    if (used + part == block_tokens_) {
      const std::span<const token_id> block(tail(slot), block_tokens_);
      complete_block(slot, block, hash_.chain(records_[slot].chain, block));
    }
    tokens = tokens.subspan(part);
  }
  if (tokens.size() >= block_tokens_) {
    const std::size_t whole = tokens.size() - tokens.size() % block_tokens_;
    for (chained_keys keys(hash_, records_[slot].chain, tokens.first(whole), block_tokens_); keys.has_next();
         tokens = tokens.subspan(block_tokens_))
      complete_block(slot, tokens.first(block_tokens_), keys.next());
  }
  if (!tokens.empty()) std::memcpy(tail(slot), tokens.data(), tokens.size_bytes());
}

/// Records the tokens and the key of a sequence's next block, whose tokens are all known now.
template <class Traits>
void paged_allocator<Traits>::complete_block(std::uint32_t slot, std::span<const token_id> tokens,
                                             const block_key& key) noexcept {
  record& sequence = records_[slot];
  const block_id block = row(slot)[sequence.keyed++];
  sequence.chain = key;
  // A fork that was committed by keys may have cached the block while it was partial.
  if (index_.contains(block)) drop_contents(block);
  index_.stage(key, block);
  verification_.store(block, tokens);
}

template <class Traits>
result<void> paged_allocator<Traits>::truncate(sequence_id sequence, std::uint64_t tokens) noexcept {
  if (const auto alive = begin(sequence); !alive) return alive.error();
  if (tokens > at(sequence).tokens)
    return refusal(errc::past_the_end, sequence.slot, tokens, at(sequence).tokens);
  const auto gone = blocks(sequence).subspan(detail::blocks_for(tokens, block_tokens_));
  static_cast<void>(pool_.release(gone));  // cannot fail: this sequence holds them
  shorten(sequence.slot, tokens);
  trim_idle();
  return {};
}

template <class Traits>
result<void> paged_allocator<Traits>::truncate_after(sequence_id sequence, std::uint64_t tokens,
                                                     const fence_type& after) noexcept {
  if (const auto alive = begin(sequence); !alive) return alive.error();
  if (tokens > at(sequence).tokens)
    return refusal(errc::past_the_end, sequence.slot, tokens, at(sequence).tokens);
  const auto gone = blocks(sequence).subspan(detail::blocks_for(tokens, block_tokens_));
  if (const auto queued = defer(sequence.slot, gone, after); !queued) return queued;
  shorten(sequence.slot, tokens);
  return {};
}

/// Forgets all tokens except the first `tokens`; the caller has taken over the references to the blocks after
/// them.
template <class Traits>
void paged_allocator<Traits>::shorten(std::uint32_t slot, std::uint64_t tokens) noexcept {
  rewind_chain(slot, tokens);
  record& sequence = records_[slot];
  const std::uint64_t keep = detail::blocks_for(tokens, block_tokens_);
  counters_.tokens -= sequence.tokens - tokens;
  counters_.table_blocks -= sequence.blocks - keep;
  sequence.tokens = tokens;
  sequence.blocks = static_cast<std::uint32_t>(keep);
}

template <class Traits>
void paged_allocator<Traits>::rewind_chain(std::uint32_t slot, std::uint64_t tokens) noexcept {
  record& sequence = records_[slot];
  const auto full = static_cast<std::uint32_t>(tokens / block_tokens_);
  const auto used = static_cast<std::size_t>(tokens % block_tokens_);
  if (full < sequence.committed) {
    // No record says which cached block equals the new last one; the next commit finds it by a search from
    // the start.
    sequence.recommit_from(sequence.keyed == 0 ? full : 0);
  }
  if (tokens == 0) reset(sequence);
  if (tokens <= std::uint64_t{sequence.sound} * block_tokens_) sequence.sound = ~0U;
  if (tokens <= sequence.limit) sequence.limit = ~std::uint64_t{0};
  // The admission policy decides again about the blocks that follow.
  if (full < sequence.asked) sequence.asked = full;
  if (full <= sequence.refused_from) sequence.refused_from = ~0U;
  const bool all_named = tokens <= sequence.unnamed && sequence.unnamed != ~std::uint64_t{0};
  if (all_named) sequence.unnamed = ~std::uint64_t{0};
  if (full >= sequence.keyed) {
    if (all_named || (full == sequence.keyed && used == 0))
      sequence.tokens_known = true;  // no token without a known value is left
    return;
  }
  const block_id cut = row(slot)[full];
  sequence.keyed = full;
  sequence.chain = full == 0 ? root_of(sequence) : index_.key(row(slot)[full - 1]);
  if constexpr (verification_type::keeps_tokens) {
    if (used != 0) std::memcpy(tail(slot), verification_.tokens(cut).data(), used * sizeof(token_id));
    sequence.tokens_known = true;
  } else {
    sequence.tokens_known = used == 0;
  }
}

}  // namespace v0
}  // namespace llmmem

#include <llmmem/paging/detail/paged_allocator_audit.hpp>
#include <llmmem/paging/detail/paged_allocator_batch.hpp>
#include <llmmem/paging/detail/paged_allocator_cache.hpp>
#include <llmmem/paging/detail/paged_allocator_compaction.hpp>
#include <llmmem/paging/detail/paged_allocator_reuse.hpp>
#include <llmmem/paging/detail/paged_allocator_withdrawal.hpp>
