/// @file
/// Bodies of block_pool.hpp: references to blocks, and what happens when the last one is released. Only
/// block_pool.hpp includes it.
#pragma once

#include <llmmem/paging/block_pool.hpp>
#include <llmmem/paging/errors.hpp>

namespace llmmem {
inline namespace v0 {

template <eviction_policy Eviction, free_list FreeList, block_history History>
result<void> block_pool<Eviction, FreeList, History>::check(block_id block) const noexcept {
  const std::uint32_t i = to_index(block);
  if (i == 0) return refusal(errc::null_handle, 0, 0, 0);
  if (i >= records_.size()) return refusal(errc::foreign_handle, i, 0, 0);
  if (!records_[i].is_active()) return refusal(errc::double_free, i, 0, 0);
  return {};
}

template <eviction_policy Eviction, free_list FreeList, block_history History>
result<void> block_pool<Eviction, FreeList, History>::check(block_handle handle) const noexcept {
  const std::uint32_t i = to_index(handle.block);
  if (i == 0) return refusal(errc::null_handle, 0, 0, 0);
  if (handle.owner != owner_ || i >= records_.size()) return refusal(errc::foreign_handle, i, 0, 0);
  const block_record& record = records_[i];
  if (handle.generation != record.generation()) {
    return refusal(errc::stale_handle, i, handle.generation, record.generation());
  }
  if (!record.is_active()) return refusal(errc::double_free, i, 0, 0);
  return {};
}

template <eviction_policy Eviction, free_list FreeList, block_history History>
bool block_pool<Eviction, FreeList, History>::is_named_by(block_id block) const noexcept {
  return to_index(block) != 0 && to_index(block) < records_.size();
}

template <eviction_policy Eviction, free_list FreeList, block_history History>
bool block_pool<Eviction, FreeList, History>::is_named_by(block_handle handle) const noexcept {
  return is_named_by(handle.block) && handle.owner == owner_ &&
         handle.generation == records_[to_index(handle.block)].generation();
}

/// Whether `count` more references to the block that `name` names are possible.
template <eviction_policy Eviction, free_list FreeList, block_history History>
template <class Name>
inline result<void> block_pool<Eviction, FreeList, History>::check_share(const Name& name,
                                                                         std::size_t count) const noexcept {
  const std::uint32_t i = to_index(id_of(name));
  if (!is_named_by(name) || !(records_[i].is_active() || records_[i].is_idle())) return check(name);
  if (records_[i].references() + count > block_record::max_references)
    return refusal(errc::too_many_shares, i, count, records_[i].references());
  return {};
}

template <eviction_policy Eviction, free_list FreeList, block_history History>
template <class Name>
inline result<void> block_pool<Eviction, FreeList, History>::share_one(const Name& name) noexcept {
  // The usual case without a `result` of the check.
  if (is_named_by(name)) [[likely]] {
    const block_record& at = records_[to_index(id_of(name))];
    if ((at.is_active() || at.is_idle()) && at.references() != block_record::max_references) [[likely]] {
      add_reference(id_of(name));
      return {};
    }
  }
  return check_share(name, 1);
}

template <eviction_policy Eviction, free_list FreeList, block_history History>
template <class Name>
result<void> block_pool<Eviction, FreeList, History>::share_all(std::span<const Name> names) noexcept {
  // Checks all blocks before it changes any, because an idle block that is revived loses its place in the
  // eviction order.
  for (const Name& name : names) {
    if (const auto checked = check_share(name, names.size()); !checked) return checked;
  }
  for (const Name& name : names)
    add_reference(id_of(name));
  return {};
}

template <eviction_policy Eviction, free_list FreeList, block_history History>
template <class Name>
result<void> block_pool<Eviction, FreeList, History>::release_all(std::span<const Name> names) noexcept {
  unpinned idle;
  for (std::size_t i = names.size(); i > 0; --i) {
    if (!is_active(names[i - 1])) [[unlikely]] {
      const auto done = check(names[i - 1]);
      idle.pass_to(eviction_);
      // Undone in reverse order, so that the free stack unwinds exactly.
      for (; i < names.size(); ++i)
        undo_drop(id_of(names[i]));
      return done;
    }
    drop_reference(id_of(names[i - 1]), idle);
  }
  idle.pass_to(eviction_);
  return {};
}

template <eviction_policy Eviction, free_list FreeList, block_history History>
inline void block_pool<Eviction, FreeList, History>::add_reference(block_id block) noexcept {
  block_record& record = records_[to_index(block)];
  history_.note(block, record.is_idle() ? paging::transition::revived : paging::transition::shared);
  if (record.is_idle()) {
    eviction_.pin(slot_id{to_index(block)});
    --idle_count_;
    record.add_reference(paging::transition::revived);
  } else {
    record.add_reference(paging::transition::shared);
  }
}

template <eviction_policy Eviction, free_list FreeList, block_history History>
inline void block_pool<Eviction, FreeList, History>::drop_reference(block_id block, unpinned& idle) noexcept {
  block_record& record = records_[to_index(block)];
  if (!record.drop_reference()) {
    history_.note(block, paging::transition::released);
    return;
  }
  history_.note(block, record.is_cached() ? paging::transition::idled : paging::transition::freed);
  if (record.is_cached()) {
    record.note(paging::transition::idled);
    idle.add(eviction_, slot_id{to_index(block)});
    ++idle_count_;
  } else {
    record.note(paging::transition::freed);
    record.end_life();
    push_free(block);
  }
}

template <eviction_policy Eviction, free_list FreeList, block_history History>
void block_pool<Eviction, FreeList, History>::undo_drop(block_id block) noexcept {
  block_record& record = records_[to_index(block)];
  if (!record.is_active() && !record.is_cached()) {
    if (to_index(block) > last_) {
      ++retiring_;
    } else {
      free_.undo_push(block);
    }
    record.undo_end_life();
    record.add_reference(paging::transition::allocated);
  } else {
    add_reference(block);
  }
}

template <eviction_policy Eviction, free_list FreeList, block_history History>
inline void block_pool<Eviction, FreeList, History>::mark_cached(block_id block,
                                                                 const access_hint& hint) noexcept {
  records_[to_index(block)].keep();
  history_.note(block, paging::transition::cached);
  eviction_.insert(slot_id{to_index(block)}, hint);
}

template <eviction_policy Eviction, free_list FreeList, block_history History>
void block_pool<Eviction, FreeList, History>::unmark_cached(block_id block) noexcept {
  block_record& record = records_[to_index(block)];
  if (!record.is_cached()) return;
  const bool was_idle = record.is_idle();
  eviction_.erase(slot_id{to_index(block)});
  record.give_up(paging::transition::uncached);
  history_.note(block, paging::transition::uncached);
  if (was_idle) {
    record.end_life();
    push_free(block);
    --idle_count_;
  }
}

template <eviction_policy Eviction, free_list FreeList, block_history History>
void block_pool<Eviction, FreeList, History>::touch(block_id block, const access_hint& hint) noexcept {
  eviction_.touch(slot_id{to_index(block)}, hint);
}

/// A block above the last usable one does not return to the free list.
template <eviction_policy Eviction, free_list FreeList, block_history History>
inline void block_pool<Eviction, FreeList, History>::push_free(block_id block) noexcept {
  if (to_index(block) > last_) [[unlikely]] {
    --retiring_;
  } else {
    free_.push(block);
  }
}

}  // namespace v0
}  // namespace llmmem
