/// @file
/// Bodies of kv_tiers.hpp: blocks on their way from the cache to the first tier. Only that file includes this
/// one.
#pragma once

#include <llmmem/detail/named_range.hpp>
#include <llmmem/offload/kv_tiers.hpp>

namespace llmmem {
inline namespace v0 {

template <class Cache, offload::kv_mover Mover, class... Tiers>
result<std::uint64_t> kv_tiers<Cache, Mover, Tiers...>::store(sequence_id sequence, const fence_type& after) {
  const detail::named_range range("kv_tiers store");
  Cache& cache = view_.cache();
  if (const auto alive = cache.check(sequence); !alive) return alive.error();
  proceed();
  if (cursors_.size() < (std::size_t{sequence.slot} + 1) * groups_)
    cursors_.resize((std::size_t{sequence.slot} + 1) * groups_);
  std::uint64_t stored = 0;
  const std::size_t first = save_count_;
  for (std::size_t g = 0; g < groups_; ++g) {
    const std::span<const block_id> table = view_.table(sequence, g);
    // No block after the last cached one is committed yet. Before it, a block that is not cached duplicates
    // one that is.
    std::size_t end = table.size();
    while (end > 0 && !cache.cached_key(table[end - 1]))
      --end;
    cursor& at = cursor_of(sequence, g);
    if (at.generation != sequence.generation) at = {.generation = sequence.generation};
    const auto known =
        at.next == 0 || at.next > table.size() ? std::nullopt : cache.cached_key(table[at.next - 1]);
    if (at.next > table.size() || (known && *known != at.last))
      at.next = 0;                    // the sequence was truncated, and has grown differently
    constexpr std::size_t ahead = 8;  // blocks ahead whose cache lines of the tiers' indices are prefetched
    for (; at.next < end; ++at.next) {
      const block_id block = table[at.next];
      if (at.next + ahead < end) {
        if (const auto later = cache.cached_key(table[at.next + ahead]))
          stack_.prefetch(g, detail::tier_key(*later, g));
      }
      const auto key = cache.cached_key(block);
      if (!key) continue;
      const considered came =
          consider(g, block, *key, detail::parent_digest{cache.parent_digest(block)}, after);
      if (came == considered::later) break;
      stored += came == considered::stored ? 1U : 0U;
      at.last = *key;
    }
  }
  begin_saves(first);
  poll_saves();
  return stored;
}

template <class Cache, offload::kv_mover Mover, class... Tiers>
typename kv_tiers<Cache, Mover, Tiers...>::considered kv_tiers<Cache, Mover, Tiers...>::consider(
    std::size_t group, block_id block, const block_key& key, detail::parent_digest parent,
    const fence_type& after) noexcept {
  const block_key named = detail::tier_key(key, group);
  if (const auto found = stack_.find(group, named)) {
    stack_.touch(group, named);
    if (found->tier == 0 && stack_.first().slots[group].is_ready(found->slot)) stack_.use(group, found->slot);
    return considered::stored;
  }
  if (!stores_at_once_ && !options_.store.writes_at(seen_.count(named))) return considered::passed;
  if (!has_place_to_save()) {
    begin_saves(0);
    poll_saves();
    if (!has_place_to_save()) return considered::later;
  }
  const auto slot = stack_.begin_fill(group, named, parent, false);
  if (!slot) return considered::later;
  if (!view_.cache().pin(block)) {
    stack_.first().slots[group].abandon_fill(*slot);
    return considered::later;
  }
  saves_[save_count_++] = {.key = key,
                           .group = static_cast<std::uint32_t>(group),
                           .block = block,
                           .slot = *slot,
                           .is_pinned = true,
                           .after = after};
  return considered::stored;
}

/// The cache evicts contents: they are saved now, or lost. The cache calls this while it changes.
template <class Cache, offload::kv_mover Mover, class... Tiers>
void kv_tiers<Cache, Mover, Tiers...>::evicted(block_id block, const block_key& key,
                                               std::size_t group) noexcept {
  if (!options_.store.on_eviction) return;
  const block_key named = detail::tier_key(key, group);
  if (stack_.find(group, named)) return stack_.touch(group, named);
  if (!has_place_to_save()) {
    ++stack_.first().counted.declined;
    return;
  }
  const auto slot =
      stack_.begin_fill(group, named, detail::parent_digest{view_.cache().parent_digest(block)}, false);
  if (!slot) return;
  const std::size_t mine = save_count_++;
  saves_[mine] = {.key = key, .group = static_cast<std::uint32_t>(group), .block = block, .slot = *slot};
  begin_saves(mine);
  // Ends no other save, because that would call the cache.
  if (saves_[mine].fence.ready()) {
    const pending_save done = saves_[mine];
    --save_count_;
    finish_save(done);
  }
}

/// Begins the saves from `first` on that may begin.
template <class Cache, offload::kv_mover Mover, class... Tiers>
void kv_tiers<Cache, Mover, Tiers...>::begin_saves(std::size_t first) noexcept {
  std::array<offload::slot_pair, offload::max_slot_pairs> pairs;
  std::array<std::size_t, offload::max_slot_pairs> which{};
  std::size_t count = 0;
  const auto begin = [&] {
    if (count == 0) return;
    const pending_save& one = saves_[which[0]];
    const auto begun = mover_.save(one.group, stack_.first().medium.slots_of(one.group),
                                   std::span(pairs).first(count), one.after);
    for (std::size_t i = 0; i < count; ++i) {
      pending_save& each = saves_[which[i]];
      each.has_begun = true;
      each.has_failed = !begun;
      each.fence = begun ? *begun : fence_type{};
    }
    count = 0;
  };
  for (std::size_t i = first; i < save_count_; ++i) {
    const pending_save& each = saves_[i];
    if (each.has_begun || (Mover::runs_on_caller && !each.after.ready())) continue;
    const bool fits =
        count == 0 || (saves_[which[0]].group == each.group && saves_[which[0]].after == each.after);
    if (!fits || count == pairs.size()) begin();
    pairs[count] = {each.block, to_index(each.slot)};
    which[count++] = i;
  }
  begin();
}

template <class Cache, offload::kv_mover Mover, class... Tiers>
void kv_tiers<Cache, Mover, Tiers...>::poll_saves() noexcept {
  if (save_count_ == 0) return;
  begin_saves(0);
  for (std::size_t i = 0; i < save_count_;) {
    if (!saves_[i].has_begun || !saves_[i].fence.ready()) {
      ++i;
      continue;
    }
    const pending_save done = saves_[i];
    saves_[i] = saves_[--save_count_];
    finish_save(done);  // may begin further saves, because the cache can evict when the block is unpinned
  }
}

/// Waits for the save of one block.
template <class Cache, offload::kv_mover Mover, class... Tiers>
void kv_tiers<Cache, Mover, Tiers...>::wait_for_save() noexcept {
  if (save_count_ == 0) return;
  static_cast<void>(detail::settled(saves_[0].after));
  if (saves_[0].has_begun) static_cast<void>(detail::settled(saves_[0].fence));
}

/// Contents that were withdrawn meanwhile are not kept.
template <class Cache, offload::kv_mover Mover, class... Tiers>
void kv_tiers<Cache, Mover, Tiers...>::finish_save(const pending_save& done) noexcept {
  Cache& cache = view_.cache();
  const bool is_right = !done.has_failed && detail::settled(done.fence) &&
                        (!done.is_pinned || cache.cached_key(done.block) == done.key);
  if (is_right) {
    stack_.settle(done.group, done.slot);
  } else {
    stack_.first().slots[done.group].abandon_fill(done.slot);
  }
  if (done.is_pinned) static_cast<void>(cache.unpin(done.block));  // cannot fail: it was pinned
}

}  // namespace v0
}  // namespace llmmem
