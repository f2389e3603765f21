/// @file
/// Bodies of paged_allocator.hpp: caching and lookup. Only paged_allocator_body.hpp includes it.
#pragma once

#include <llmmem/paging/errors.hpp>
#include <llmmem/paging/paged_allocator.hpp>

#include <array>
#include <utility>

namespace llmmem {
inline namespace v0 {

template <class Traits>
result<match_result> paged_allocator<Traits>::match(sequence_id sequence,
                                                    std::span<const token_id> tokens) noexcept {
  pool_.set_actor(sequence.slot);
  if (const auto fresh = check_fresh(sequence); !fresh) return fresh.error();
  record& taker = at(sequence);
  const std::uint64_t before = pool_.available();
  ++counters_.matches;
  counters_.requested_blocks += partial_type::source == partial_source::none
                                    ? tokens.size() / block_tokens_
                                    : detail::blocks_for(tokens.size(), block_tokens_);
  const std::uint64_t limit = detail::lesser(tokens.size(), max_sequence_tokens_) / block_tokens_;
  const std::uint64_t chain = detail::blocks_for(tokens.size(), block_tokens_);
  walk(tokens.first(static_cast<std::size_t>(limit * block_tokens_)), taker.chain, taker.context,
       [&](block_id found) noexcept { return take(sequence.slot, found, {}, chain); });
  taker.keyed = taker.blocks;
  if (taker.blocks != 0) {
    const block_id last = row(sequence.slot)[taker.blocks - 1];
    taker.chain = index_.key(last);
    taker.parent = verification_.link(last);
  }
  match_result out{.tokens = std::uint64_t{taker.blocks} * block_tokens_};
  if constexpr (partial_type::source != partial_source::none) {
    take_beginning(sequence.slot, tokens.subspan(static_cast<std::size_t>(out.tokens)), out);
  }
  return found_so_far(sequence.slot, out, before);
}

template <class Traits>
result<match_result> paged_allocator<Traits>::match(sequence_id sequence,
                                                    const keyed_blocks& given) noexcept {
  pool_.set_actor(sequence.slot);
  if (const auto fresh = check_fresh(sequence); !fresh) return fresh.error();
  if (const auto fit = check_keys(given); !fit) return fit.error();
  const keyed_blocks prompt = in_chain(given, at(sequence).context);
  const std::uint64_t before = pool_.available();
  ++counters_.matches;
  counters_.requested_blocks += prompt.keys.size();
  // Lookups are independent here: each prefetches the cache line of a later one before it waits for its own.
  constexpr std::size_t ahead = 8;
  match_result out;
  for (std::size_t i = 0; i < prompt.keys.size(); ++i) {
    if (i + ahead < prompt.keys.size()) index_.prefetch(prompt.keys[i + ahead]);
    const std::uint64_t part = detail::lesser(prompt.tokens - out.tokens, block_tokens_);
    const block_id found = index_.block_of(prompt.keys[i]);
    if (found == null_block || index_.tokens(found) != part) break;
    if (!verification_.holds_key(found, at(sequence).context)) break;
    if (!followers_.comes_after(found, i == 0 ? block_key{} : prompt.keys[i - 1])) break;
    if (part > max_sequence_tokens_ - out.tokens) break;
    if (!take(sequence.slot, found, hint_of(prompt, i), prompt.keys.size())) break;
    out.tokens += part;
  }
  if (out.tokens != 0) at(sequence).tokens_known = false;
  return found_so_far(sequence.slot, out, before);
}

/// Calls `visit(block)` for each cached full block of the prefix, in order, until it returns false.
///
/// It computes keys, and prefetches their lines of the index, ahead of the lookups: none at the first block,
/// then more the longer the prefix continues. So an uncached prompt costs no extra hash, any other prompt at
/// most three.
template <class Traits>
template <class Visit>
void paged_allocator<Traits>::walk(std::span<const token_id> tokens, const block_key& root,
                                   const prefix_context& context, Visit&& visit) const noexcept {
  static constexpr std::size_t most_ahead = 4;
  std::array<block_key, most_ahead> keys{};
  const auto part = [&](std::size_t i) noexcept { return tokens.subspan(i * block_tokens_, block_tokens_); };
  const std::size_t end = tokens.size() / block_tokens_;
  std::size_t made = 0;
  chained_keys chain(hash_, root, tokens, block_tokens_);
  chain_link parent{};
  for (std::size_t i = 0; i < end; ++i) {
    const std::size_t until = detail::lesser(end, i + detail::lesser(i, most_ahead - 1) + 1);
    for (; made < until; ++made) {
      const block_key key = chain.next();
      index_.prefetch(key);
      keys[made % most_ahead] = key;
    }
    const block_key& key = keys[i % most_ahead];
    const block_id found = index_.block_of(key);
    if (found == null_block || !verification_.holds(found, part(i), parent, context)) return;
    parent = verification_.link(found);
    if (!visit(found)) return;
  }
}

template <class Traits>
result<void> paged_allocator<Traits>::check_fresh(sequence_id sequence) const noexcept {
  if (const auto alive = check(sequence); !alive) return alive.error();
  if (at(sequence).tokens != 0) return refusal(errc::not_fresh, sequence.slot, 0, at(sequence).tokens);
  return {};
}

template <class Traits>
result<void> paged_allocator<Traits>::check_keys(const keyed_blocks& blocks) const noexcept {
  const std::uint64_t needed = detail::blocks_for(blocks.tokens, block_tokens_);
  if (blocks.keys.size() != needed) return refusal(errc::size_mismatch, 0, blocks.keys.size(), needed);
  if (!blocks.hints.empty() && blocks.hints.size() != blocks.keys.size()) {
    return refusal(errc::size_mismatch, 0, blocks.hints.size(), blocks.keys.size());
  }
  return {};
}

/// Returns the facts for policies about the contents of `holder`, which follow those of `parent`, in a chain
/// of `chain` blocks. Returns `told` unchanged if no policy uses them.
template <class Traits>
access_hint paged_allocator<Traits>::placed(const access_hint& told, const record& sequence, block_id holder,
                                            block_id parent, std::uint64_t position,
                                            std::uint64_t chain) const noexcept {
  access_hint hint = told;
  if (!asks_admission && !pool_.reads_hints()) return hint;
  if (hint.session == 0) hint.session = sequence.hints.session;
  if (hint.cost == 1) hint.cost = sequence.hints.cost;
  if (hint.keep == retention{}) hint.keep = kept(sequence, position);
  hint.content = index_.key(holder).low;
  hint.parent = parent == null_block ? no_slot : slot_id{to_index(parent)};
  hint.position = static_cast<std::uint32_t>(position);
  hint.chain = static_cast<std::uint32_t>(detail::lesser(chain, 0xFFFF'FFFF));
  return hint;
}

/// Adds a cached block to a sequence, unless the block has the maximum number of references.
template <class Traits>
bool paged_allocator<Traits>::take(std::uint32_t slot, block_id found, const access_hint& hint,
                                   std::uint64_t chain) noexcept {
  record& sequence = records_[slot];
  if (!pool_.share(found)) return false;
  block_id* const end = row(slot) + sequence.blocks;
  if constexpr (sharing_observer<observer_type>) observer_.on_shared(found, index_.key(found));
  if (pool_.reads_hints()) {
    const block_id parent = sequence.blocks == 0 ? null_block : end[-1];
    pool_.touch(found, placed(hint, sequence, found, parent, sequence.blocks, chain));
  } else {
    pool_.touch(found, detail::no_hint);
  }
  *end = found;
  ++sequence.blocks;
  sequence.committed = sequence.blocks;
  return true;
}

template <class Traits>
match_result paged_allocator<Traits>::found_so_far(std::uint32_t slot, match_result out,
                                                   std::uint64_t before) noexcept {
  record& sequence = records_[slot];
  sequence.tokens = out.tokens;
  out.blocks = sequence.blocks;
  counters_.tokens += out.tokens;
  counters_.table_blocks += sequence.blocks;
  counters_.hit_tokens += out.tokens;
  counters_.hit_blocks += out.blocks;
  warn_if_low(before);  // shared idle blocks are no longer available
  return out;
}

template <class Traits>
result<std::uint64_t> paged_allocator<Traits>::commit(sequence_id sequence) noexcept {
  return commit(sequence, tokens(sequence));
}

template <class Traits>
result<std::uint64_t> paged_allocator<Traits>::commit(sequence_id sequence, std::uint64_t written) noexcept {
  if (const auto alive = begin(sequence); !alive) return alive.error();
  record& writer = at(sequence);
  if (written > writer.tokens) return refusal(errc::past_the_end, sequence.slot, written, writer.tokens);
  if (writer.epoch != epoch_) return std::uint64_t{0};
  return commit_tokens(sequence.slot, detail::lesser(written, writer.limit));
}

/// Caches those full blocks of the first `written` tokens that can be cached; returns how many are newly
/// cached.
template <class Traits>
std::uint64_t paged_allocator<Traits>::commit_tokens(std::uint32_t slot, std::uint64_t written) noexcept {
  record& writer = records_[slot];
  const std::uint64_t full =
      detail::lesser(detail::lesser(writer.keyed, written / block_tokens_), writer.sound);
  if (writer.committed < full) look_again_if_stale(writer);
  std::uint64_t registered = 0;
  block_id parent = null_block;
  if (writer.committed != 0 && writer.committed < full) {
    const block_key& last = index_.key(row(slot)[writer.committed - 1]);
    parent = index_.block_of(last);
  }
  const auto hint_at = [&](std::uint64_t i) noexcept {
    const block_id block = row(slot)[i];
    return std::pair(placed({}, writer, block, null_block, i, writer.blocks), std::uint64_t{block_tokens_});
  };
  ask_on(writer, full, hint_at);
  constexpr std::uint64_t ahead = 8;  // as in `match`: a large table is not in the processor's caches
  for (; writer.committed < detail::lesser(full, writer.refused_from); ++writer.committed) {
    const block_id block = row(slot)[writer.committed];
    if (writer.committed + ahead < full) index_.prefetch(index_.key(row(slot)[writer.committed + ahead]));
    const adoption done = adopt(slot, block, parent);
    if (done.holder == null_block) break;
    registered += done.is_new ? 1U : 0U;
    parent = done.holder;
  }
  ask_on(writer, full, hint_at);
  return registered;
}

/// Caches `block` after the sequence's last committed block, whose contents `parent` holds, unless equal
/// contents are cached already. Returns which case it was, and the block that holds the contents now.
template <class Traits>
typename paged_allocator<Traits>::adoption paged_allocator<Traits>::adopt(std::uint32_t slot, block_id block,
                                                                          block_id parent) noexcept {
  record& sequence = records_[slot];
  const block_id existing = index_.block_of(index_.key(block));
  if (existing != null_block) {
    if (verification_.holds(existing, verification_.tokens(block), sequence.parent, sequence.context)) {
      sequence.parent = verification_.link(existing);
      if (existing != block) {
        sequence.borrowed = sequence.committed + 1;
        ++counters_.duplicates;
        if constexpr (retains<eviction_type>) {
          const retention keep = kept(sequence, sequence.committed);
          if (keep != retention{}) pool_.retain(existing, keep);
        }
      }
      return {.is_new = false, .holder = existing};
    }
    if (existing == block) {  // was cached after dropped contents; now after their replacement
      verification_.enrol(block, sequence.parent, sequence.context);
      sequence.parent = verification_.link(block);
      followers_.relink(block, parent);
      return {.is_new = false, .holder = block};
    }
  }
  if (pool_.is_retiring(block)) return {};
  std::optional<access_hint> built;
  if (asks_admission || pool_.reads_hints())
    built = placed({}, sequence, block, parent, sequence.committed, sequence.blocks);
  const access_hint& hint = built ? *built : detail::no_hint;
  if (!admits(sequence, hint, block_tokens_)) return {};
  if (existing != null_block) {
    // The same key names other contents, or a child of a dropped parent, which no match can find.
    drop_contents(existing);
    ++counters_.replaced;
    if (parent != null_block && !index_.contains(parent)) return {};  // it was after a dropped block
  }
  verification_.enrol(block, sequence.parent, sequence.context);
  const block_key before =
      sequence.committed == 0 ? block_key{} : index_.key(row(slot)[sequence.committed - 1]);
  stored_block stored{.block = block,
                      .parent = before,
                      .first = std::uint64_t{sequence.committed} * block_tokens_,
                      .tokens = block_tokens_,
                      .token_ids = verification_.tokens(block)};
  register_block(sequence, stored, parent, hint);
  sequence.parent = verification_.link(block);
  return {.is_new = true, .holder = block};
}

template <class Traits>
result<std::uint64_t> paged_allocator<Traits>::commit(sequence_id sequence,
                                                      const keyed_blocks& given) noexcept {
  if (const auto alive = begin(sequence); !alive) return alive.error();
  if (const auto fit = check_keys(given); !fit) return fit.error();
  record& writer = at(sequence);
  if (given.tokens > writer.tokens)
    return refusal(errc::past_the_end, sequence.slot, given.tokens, writer.tokens);
  if (writer.epoch != epoch_) return std::uint64_t{0};
  keyed_blocks contents = in_chain(given, writer.context);
  if (writer.limit < contents.tokens) {
    contents.tokens = writer.limit;
    contents.keys = contents.keys.first(static_cast<std::size_t>(writer.limit / block_tokens_));
  }
  if (!contents.keys.empty()) forget_tokens(writer);
  if (writer.committed < contents.keys.size()) look_again_if_stale(writer);
  std::uint64_t registered = 0;
  block_id parent = null_block;
  if (writer.committed != 0 && writer.committed < contents.keys.size()) {
    parent = index_.block_of(contents.keys[writer.committed - 1]);
  }
  const auto part_of = [&](std::uint64_t i) noexcept {
    return detail::lesser(contents.tokens - i * block_tokens_, block_tokens_);
  };
  const auto hint_at = [&](std::uint64_t i) noexcept {
    access_hint hint = placed(hint_of(contents, static_cast<std::size_t>(i)), writer, null_block, null_block,
                              i, contents.keys.size());
    hint.content = contents.keys[static_cast<std::size_t>(i)].low;
    return std::pair(hint, part_of(i));
  };
  ask_on(writer, contents.keys.size(), hint_at);
  const std::uint64_t end = detail::lesser(contents.keys.size(), writer.sound);
  for (std::uint32_t& i = writer.committed; i < detail::lesser(end, writer.refused_from); ++i) {
    const block_id block = row(sequence.slot)[i];
    const std::uint64_t part = part_of(i);
    if (const block_id existing = index_.block_of(contents.keys[i]); existing != null_block) {
      if (verification_.holds_key(existing, writer.context)) {
        if (!followers_.comes_after(existing, i == 0 ? block_key{} : contents.keys[i - 1])) {
          ++counters_.unchained;
          break;
        }
        if (pool_.reads_hints()) {
          pool_.touch(existing,
                      placed(hint_of(contents, i), writer, existing, parent, i, contents.keys.size()));
        } else {
          pool_.touch(existing, detail::no_hint);
        }
        if (existing != block) {
          ++counters_.duplicates;
          writer.borrowed = i + 1;
        }
        parent = existing;
        continue;
      }
      drop_contents(existing);  // the same key in another context
      ++counters_.replaced;
      if (parent != null_block && !index_.contains(parent)) break;  // it was after a dropped block
    }
    if (pool_.is_retiring(block)) break;
    if (!index_.contains(block) || index_.tokens(block) < part) {
      std::optional<access_hint> built;
      if (asks_admission || pool_.reads_hints()) {
        built = hint_at(i).first;
        if (parent != null_block) built->parent = slot_id{to_index(parent)};
      }
      const access_hint& hint = built ? *built : detail::no_hint;
      if (!admits(writer, hint, part)) break;
      // The key of the present contents replaces the key of fewer tokens.
      if (index_.contains(block)) drop_contents(block);
      if (parent != null_block && !index_.contains(parent)) break;
      index_.stage(contents.keys[i], block);
      verification_.enrol_by_key(block, writer.context);
      const block_key before = i == 0 ? block_key{} : contents.keys[i - 1];
      stored_block stored{.block = block,
                          .parent = before,
                          .first = std::uint64_t{i} * block_tokens_,
                          .tokens = static_cast<std::uint32_t>(part)};
      register_block(writer, stored, parent, hint);
      ++registered;
    }
    parent = block;
  }
  ask_on(writer, contents.keys.size(), hint_at);
  // The last key covers fewer tokens than its block holds, so a later key of more tokens may replace it.
  if (writer.committed == contents.keys.size() && contents.tokens % block_tokens_ != 0 &&
      contents.tokens < writer.tokens) {
    --writer.committed;
  }
  return registered;
}

/// Marks the sequence as known by keys alone, because the given keys may have replaced its blocks' own keys.
template <class Traits>
void paged_allocator<Traits>::forget_tokens(record& sequence) noexcept {
  if (sequence.keyed != 0) {
    sequence.keyed = 0;
    sequence.chain = root_of(sequence);
    sequence.recommit_from(sequence.committed);
  }
  sequence.tokens_known = false;
  sequence.unnamed = ~std::uint64_t{0};
}

/// Makes the next commit examine all blocks again if cached contents that the sequence relies on may have
/// been dropped: contents in use, or other blocks equal to its own.
template <class Traits>
void paged_allocator<Traits>::look_again_if_stale(record& sequence) noexcept {
  if (is_stale(sequence)) sequence.recommit_from(0);
  sequence.cuts = cuts_;
  sequence.evictions = pool_.evictions();
}

/// Caches contents that the sequence has committed by tokens and that are no longer cached anywhere.
template <class Traits>
void paged_allocator<Traits>::commit_again(std::uint32_t slot) noexcept {
  record& sequence = records_[slot];
  if (!is_stale(sequence) || sequence.epoch != epoch_ || sequence.keyed == 0) return;
  const std::uint64_t committed = detail::lesser(sequence.committed, sequence.keyed);
  if (committed == 0) return;
  sequence.recommit_from(0);
  static_cast<void>(commit_tokens(slot, committed * block_tokens_));
}

template <class Traits>
inline void paged_allocator<Traits>::register_block(const record& owner, stored_block& stored,
                                                    block_id parent, const access_hint& hint) noexcept {
  const block_id block = stored.block;
  index_.insert(block, stored.tokens);
  pool_.mark_cached(block, hint);
  followers_.link(block, parent, stored.parent);
  stored.key = index_.key(block);
  stored.context = &owner.context;
  observer_.on_cached(stored);
  ++counters_.registrations;
}

template <class Traits>
void paged_allocator<Traits>::unregister(block_id block) noexcept {
  observer_.on_dropped(block, index_.key(block));
  leave_followers(block);
  index_.erase(block);
}

template <class Traits>
void paged_allocator<Traits>::drop_contents(block_id block) noexcept {
  if (index_.tokens(block) == block_tokens_) ++cuts_;  // nothing is cached after a partial block
  unregister(block);
  pool_.unmark_cached(block);
  drop_orphans();
}

template <class Traits>
std::uint64_t paged_allocator<Traits>::tokens(sequence_id sequence) const noexcept {
  return check(sequence) ? at(sequence).tokens : 0;
}

template <class Traits>
std::span<const block_id> paged_allocator<Traits>::blocks(sequence_id sequence) const noexcept {
  if (!check(sequence)) return {};
  return {row(sequence.slot), at(sequence).blocks};
}

template <class Traits>
paged_stats paged_allocator<Traits>::stats() const noexcept {
  const block_pool_stats pool = pool_.stats();
  return {.sequences = records_.size() - free_slot_count_,
          .tokens = counters_.tokens,
          .table_blocks = counters_.table_blocks,
          .blocks = pool.blocks,
          .active_blocks = pool.active,
          .idle_blocks = pool.idle,
          .free_blocks = pool.free,
          .retiring_blocks = pool.retiring,
          .cached_blocks = index_.size(),
          .deferred = deferred_.held(),
          .matches = counters_.matches,
          .requested_blocks = counters_.requested_blocks,
          .hit_blocks = counters_.hit_blocks,
          .hit_tokens = counters_.hit_tokens,
          .partial_hits = counters_.partial_hits,
          .stolen_blocks = counters_.stolen_blocks,
          .allocations = pool.allocations,
          .evictions = pool.evictions,
          .evicting_allocations = pool.evicting_allocations,
          .registrations = counters_.registrations,
          .duplicates = counters_.duplicates,
          .orphans = counters_.orphans,
          .invalidated = counters_.invalidated,
          .unchained = counters_.unchained,
          .replaced = counters_.replaced,
          .deduplicated = counters_.deduplicated,
          .refused = counters_.refused,
          .copies = counters_.copies,
          .metadata_bytes = pool.metadata_bytes + index_.metadata_bytes() + deferred_.metadata_bytes() +
                            pins_.bytes() + admission_.metadata_bytes() + followers_.metadata_bytes() +
                            retained_.bytes() + chained_.bytes() + records_.bytes() + rows_.bytes() +
                            tails_.bytes() + free_slots_.bytes(),
          .verification_bytes = verification_.metadata_bytes()};
}

}  // namespace v0
}  // namespace llmmem
