/// @file
/// Bodies of block_pool.hpp; included by it alone.
#pragma once

#include <llmmem/paging/block_pool.hpp>

#include <array>
#include <utility>

namespace llmmem::inline v0 {

namespace detail {

[[nodiscard]] inline std::uint64_t checked_blocks(const block_pool_options& options) {
  if (options.blocks == 0) throw length_error(options.name + ": 0 blocks; a pool needs at least one");
  if (options.blocks > max_blocks) {
    throw length_error(options.name + ": " + std::to_string(options.blocks) + " blocks, the most is " +
                       std::to_string(max_blocks) + " (block ids are non-negative int32)");
  }
  return options.blocks;
}

/// Blocks that a pool may ever have.
[[nodiscard]] inline std::uint64_t checked_most_blocks(const block_pool_options& options) {
  const std::uint64_t blocks = checked_blocks(options);
  if (options.most_blocks == 0) return blocks;
  if (options.most_blocks < blocks || options.most_blocks > max_blocks) {
    throw length_error(options.name + ": most_blocks is " + std::to_string(options.most_blocks) +
                       "; allowed are " + std::to_string(blocks) + " (what it starts with) to " +
                       std::to_string(max_blocks) + ", or 0 for a pool that never grows");
  }
  return options.most_blocks;
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
    throw length_error(name_ + ": an eviction policy of " + std::to_string(to_number(eviction_.capacity())) +
                       " slots, " + std::to_string(records_.size()) +
                       " are needed: one a block and the null block's");
  }
  // A fresh pool hands out 1, 2, 3...: neighbours in a sequence are neighbours in memory.
  for (std::uint64_t i = last_; i > 0; --i)
    push_free(block_id{static_cast<std::uint32_t>(i)});
}

template <eviction_policy Eviction, free_list FreeList, block_history History>
template <eviction_callback OnEvict>
result<void> block_pool<Eviction, FreeList, History>::allocate(std::span<block_id> out, OnEvict&& on_evict,
                                                               block_id beside) noexcept {
  return allocate_all(out, on_evict, beside);
}

template <eviction_policy Eviction, free_list FreeList, block_history History>
template <eviction_callback OnEvict>
result<void> block_pool<Eviction, FreeList, History>::allocate(std::span<block_handle> out,
                                                               OnEvict&& on_evict, block_id beside) noexcept {
  return allocate_all(out, on_evict, beside);
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
                                                                   block_id beside) noexcept {
  if (out.size() > free()) {
    if (const auto done = make_free(out.size(), on_evict); !done) return done;
  }
  for (Name& name : out) {
    beside = take_free(beside);
    give(beside, name);
  }
  return {};
}

template <eviction_policy Eviction, free_list FreeList, block_history History>
inline block_id block_pool<Eviction, FreeList, History>::take_free(block_id beside) noexcept {
  const block_id block = free_.take(beside);
  records_[to_index(block)].allocate();
  history_.note(block, transition::allocated);
  ++allocations_;
  return block;
}

template <eviction_policy Eviction, free_list FreeList, block_history History>
template <class OnEvict>
result<void> block_pool<Eviction, FreeList, History>::make_free(std::uint64_t count,
                                                                OnEvict& on_evict) noexcept {
  if (count > available()) return refusal(errc::out_of_blocks, 0, count, available());
  const std::uint64_t missing = count - free();
  // A policy that withholds a candidate breaks its contract; what was evicted meanwhile stays free.
  const std::uint64_t evicted = reclaim(missing, on_evict);
  evicting_allocations_ += evicted;
  if (evicted != missing) return refusal(errc::out_of_blocks, 0, count, free());
  return {};
}

template <eviction_policy Eviction, free_list FreeList, block_history History>
template <eviction_callback OnEvict>
std::uint64_t block_pool<Eviction, FreeList, History>::reclaim(std::uint64_t count,
                                                               OnEvict&& on_evict) noexcept {
  // Told in groups, so that whoever forgets them can ask for several cache lines at once.
  std::array<block_id, 16> group{};
  std::uint64_t done = 0;
  for (bool more = true; more;) {
    std::size_t size = 0;
    while (size < group.size() && done + size < count && idle_count_ != 0) {
      const auto victim = eviction_.victim();
      if (!victim) break;
      const block_id block{to_index(*victim)};
      detail::evict(eviction_, *victim);
      block_record& record = records_[to_index(block)];
      record.give_up(transition::evicted);
      history_.note(block, transition::evicted);
      record.end_life();
      push_free(block);
      --idle_count_;
      group[size++] = block;
    }
    if (size != 0) on_evict(std::span<const block_id>(group.data(), size));
    done += size;
    more = size == group.size();
  }
  evictions_ += done;
  return done;
}

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
template <class Name>
result<void> block_pool<Eviction, FreeList, History>::share_all(std::span<const Name> names) noexcept {
  // All are looked at before any is changed: reviving an idle block would cost it its place in the order.
  for (const Name& name : names) {
    const std::uint32_t i = to_index(id_of(name));
    if (const auto done = check(name); !done) {
      if (done.code() != errc::double_free || !records_[i].is_idle()) return done;
    }
    if (records_[i].references() + names.size() > block_record::max_references) {
      return refusal(errc::too_many_shares, i, names.size(), records_[i].references());
    }
  }
  for (const Name& name : names)
    add_reference(id_of(name));
  return {};
}

template <eviction_policy Eviction, free_list FreeList, block_history History>
template <class Name>
result<void> block_pool<Eviction, FreeList, History>::release_all(std::span<const Name> names) noexcept {
  for (std::size_t i = names.size(); i > 0; --i) {
    if (const auto done = check(names[i - 1]); !done) [[unlikely]] {
      // Undone in the opposite order, so that the free stack unwinds exactly.
      for (; i < names.size(); ++i)
        undo_drop(id_of(names[i]));
      return done;
    }
    drop_reference(id_of(names[i - 1]));
  }
  return {};
}

template <eviction_policy Eviction, free_list FreeList, block_history History>
void block_pool<Eviction, FreeList, History>::add_reference(block_id block) noexcept {
  block_record& record = records_[to_index(block)];
  history_.note(block, record.is_idle() ? transition::revived : transition::shared);
  if (record.is_idle()) {
    eviction_.pin(slot_id{to_index(block)});
    --idle_count_;
    record.add_reference(transition::revived);
  } else {
    record.add_reference(transition::shared);
  }
}

template <eviction_policy Eviction, free_list FreeList, block_history History>
void block_pool<Eviction, FreeList, History>::drop_reference(block_id block) noexcept {
  block_record& record = records_[to_index(block)];
  if (!record.drop_reference()) {
    history_.note(block, transition::released);
    return;
  }
  history_.note(block, record.is_cached() ? transition::idled : transition::freed);
  if (record.is_cached()) {
    record.note(transition::idled);
    eviction_.unpin(slot_id{to_index(block)});
    ++idle_count_;
  } else {
    record.note(transition::freed);
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
    record.add_reference(transition::allocated);
  } else {
    add_reference(block);
  }
}

template <eviction_policy Eviction, free_list FreeList, block_history History>
void block_pool<Eviction, FreeList, History>::mark_cached(block_id block, const access_hint& hint) noexcept {
  records_[to_index(block)].keep();
  history_.note(block, transition::cached);
  eviction_.insert(slot_id{to_index(block)}, hint);
}

template <eviction_policy Eviction, free_list FreeList, block_history History>
void block_pool<Eviction, FreeList, History>::unmark_cached(block_id block) noexcept {
  block_record& record = records_[to_index(block)];
  if (!record.is_cached()) return;
  const bool was_idle = record.is_idle();
  eviction_.erase(slot_id{to_index(block)});
  record.give_up(transition::uncached);
  history_.note(block, transition::uncached);
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

template <eviction_policy Eviction, free_list FreeList, block_history History>
void block_pool<Eviction, FreeList, History>::relocate(std::span<const block_move> moves) noexcept {
  for (const block_move& move : moves)
    records_[to_index(move.destination)].allocate();
  free_.keep_if([this](block_id block) noexcept { return !records_[to_index(block)].is_active(); });
  for (const block_move& move : moves) {
    block_record& from = records_[to_index(move.source)];
    block_record& to = records_[to_index(move.destination)];
    if (from.is_cached())
      detail::relabel(eviction_, slot_id{to_index(move.source)}, slot_id{to_index(move.destination)});
    to.take_over(from);
    history_.note(move.source, transition::moved);
    history_.note(move.destination, transition::allocated);
    push_free(move.source);
  }
}

template <eviction_policy Eviction, free_list FreeList, block_history History>
std::string block_pool<Eviction, FreeList, History>::last_of(block_id block) const {
  const std::string trail = history_.trail(block);
  const std::string last(to_string(records_[to_index(block)].last()));
  return trail.empty() ? last : last + "; " + trail;
}

/// Above the last usable block there is no way back.
template <eviction_policy Eviction, free_list FreeList, block_history History>
inline void block_pool<Eviction, FreeList, History>::push_free(block_id block) noexcept {
  if (to_index(block) > last_) [[unlikely]] {
    --retiring_;
  } else {
    free_.push(block);
  }
}

template <eviction_policy Eviction, free_list FreeList, block_history History>
template <eviction_callback OnEvict>
result<std::uint64_t> block_pool<Eviction, FreeList, History>::resize(std::uint64_t blocks,
                                                                      OnEvict&& on_evict) noexcept {
  if (blocks == 0 || blocks > most_blocks()) return refusal(errc::bad_block_count, 0, blocks, most_blocks());
  const std::uint64_t before = std::exchange(last_, blocks);
  free_.keep_if([this](block_id block) noexcept { return !is_retiring(block); });
  for (std::uint64_t i = blocks + 1; i <= before; ++i) {
    const block_id block{static_cast<std::uint32_t>(i)};
    if (records_[i].is_active() || records_[i].is_idle()) ++retiring_;
    if (!records_[i].is_cached()) continue;
    unmark_cached(block);
    on_evict(std::span<const block_id>(&block, 1));
  }
  for (std::uint64_t i = blocks; i > before; --i) {
    const block_id block{static_cast<std::uint32_t>(i)};
    if (records_[i].is_active()) {
      --retiring_;
    } else {
      push_free(block);
    }
  }
  return retiring_;
}

template <eviction_policy Eviction, free_list FreeList, block_history History>
block_pool_stats block_pool<Eviction, FreeList, History>::stats() const noexcept {
  return {.blocks = blocks(),
          .active = blocks() - available(),
          .idle = idle_count_,
          .free = free(),
          .retiring = retiring_,
          .allocations = allocations_,
          .evictions = evictions_,
          .evicting_allocations = evicting_allocations_,
          .metadata_bytes = records_.bytes() + free_.metadata_bytes() + eviction_.metadata_bytes()};
}

template <eviction_policy Eviction, free_list FreeList, block_history History>
std::vector<std::string> block_pool<Eviction, FreeList, History>::audit() const {
  std::vector<std::string> found;
  const auto blame = [&](std::uint64_t block, const std::string& what) {
    found.push_back(name_ + ": block " + std::to_string(block) + " " + what +
                    " (last: " + last_of(block_id{static_cast<std::uint32_t>(block)}) + ")");
  };
  if (free() > blocks()) {
    found.push_back(name_ + ": the free list holds " + std::to_string(free()) + " of " +
                    std::to_string(blocks()) + " blocks");
    return found;
  }
  std::vector<bool> listed(records_.size());
  free_.for_each([&](block_id each) {
    const std::uint32_t block = to_index(each);
    if (block == 0 || block > last_) {
      found.push_back(name_ + ": the free list names block " + std::to_string(block) +
                      ", which does not exist");
      return;
    }
    if (listed[block]) blame(block, "is twice in the free list");
    listed[block] = true;
  });
  if (records_[0].is_active() || records_[0].is_cached() || eviction_.is_candidate(slot_id{0})) {
    blame(0, "is the null block, which nobody may hold or keep");
  }
  std::uint64_t idle = 0;
  std::uint64_t retiring = 0;
  for (std::uint64_t i = 1; i < records_.size(); ++i) {
    const block_record& record = records_[i];
    const bool candidate = eviction_.is_candidate(slot_id{static_cast<std::uint32_t>(i)});
    if (record.is_idle()) ++idle;
    if (record.is_idle() != candidate) {
      blame(i, candidate ? "is an eviction candidate but not idle" : "is idle but no eviction candidate");
    }
    if (listed[i] && record.is_active()) {
      blame(i, "is in the free list with " + std::to_string(record.references()) + " references");
    }
    if (listed[i] && record.is_cached()) blame(i, "is in the free list and cached");
    if (i > last_) {
      if (record.is_active()) ++retiring;
      if (record.is_idle()) blame(i, "is idle above the last usable block");
    } else if (!listed[i] && !record.is_active() && !record.is_cached()) {
      blame(i, "is leaked: neither held, kept nor free");
    }
  }
  if (retiring != retiring_) {
    found.push_back(name_ + ": " + std::to_string(retiring) + " blocks are retiring, counted are " +
                    std::to_string(retiring_));
  }
  if (idle != idle_count_) {
    found.push_back(name_ + ": " + std::to_string(idle) + " blocks are idle, counted are " +
                    std::to_string(idle_count_));
  }
  return found;
}

}  // namespace llmmem::inline v0
