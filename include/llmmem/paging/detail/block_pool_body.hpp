/// @file
/// Bodies of block_pool.hpp; included by it alone.
#pragma once

#include <llmmem/paging/block_pool.hpp>

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

}  // namespace detail

template <eviction_policy Eviction>
block_pool<Eviction>::block_pool(block_pool_options options)
    : block_pool(options, Eviction(slot_count{detail::checked_blocks(options) + 1}, options.metadata)) {}

template <eviction_policy Eviction>
block_pool<Eviction>::block_pool(block_pool_options options, Eviction eviction)
    : name_(std::move(options.name)),
      records_(detail::checked_blocks(options) + 1, block_record{}, options.metadata, "block_pool: records"),
      free_(options.blocks, options.metadata, "block_pool: free list"),
      free_count_(options.blocks),
      owner_(detail::owner_tag(records_.data())),
      eviction_(std::move(eviction)) {
  if (to_number(eviction_.capacity()) < records_.size()) {
    throw length_error(name_ + ": an eviction policy of " + std::to_string(to_number(eviction_.capacity())) +
                       " slots, " + std::to_string(records_.size()) +
                       " are needed: one a block and the null block's");
  }
  // A fresh pool hands out 1, 2, 3...: neighbours in a sequence are neighbours in memory.
  for (std::uint64_t i = 0; i < free_count_; ++i)
    free_[i] = block_id{static_cast<std::uint32_t>(free_count_ - i)};
}

template <eviction_policy Eviction>
template <eviction_callback OnEvict>
result<void> block_pool<Eviction>::allocate(std::span<block_id> out, OnEvict&& on_evict) noexcept {
  return allocate_all(out, on_evict);
}

template <eviction_policy Eviction>
template <eviction_callback OnEvict>
result<void> block_pool<Eviction>::allocate(std::span<block_handle> out, OnEvict&& on_evict) noexcept {
  return allocate_all(out, on_evict);
}

template <eviction_policy Eviction>
template <eviction_callback OnEvict>
result<block_handle> block_pool<Eviction>::allocate(OnEvict&& on_evict) noexcept {
  if (free_count_ == 0) {
    if (const auto done = make_free(1, on_evict); !done) return done.error();
  }
  return handle(take_free());
}

template <eviction_policy Eviction>
template <class Name, class OnEvict>
result<void> block_pool<Eviction>::allocate_all(std::span<Name> out, OnEvict& on_evict) noexcept {
  if (out.size() > free_count_) {
    if (const auto done = make_free(out.size(), on_evict); !done) return done;
  }
  for (Name& name : out)
    give(take_free(), name);
  return {};
}

template <eviction_policy Eviction>
inline block_id block_pool<Eviction>::take_free() noexcept {
  const block_id block = free_[--free_count_];
  records_[to_index(block)].allocate();
  ++allocations_;
  return block;
}

template <eviction_policy Eviction>
template <class OnEvict>
result<void> block_pool<Eviction>::make_free(std::uint64_t count, OnEvict& on_evict) noexcept {
  if (count > available()) return refusal(errc::out_of_blocks, 0, count, available());
  const std::uint64_t missing = count - free_count_;
  // A policy that withholds a candidate breaks its contract; what was evicted meanwhile stays free.
  if (reclaim(missing, on_evict) != missing) return refusal(errc::out_of_blocks, 0, count, free_count_);
  return {};
}

template <eviction_policy Eviction>
template <eviction_callback OnEvict>
std::uint64_t block_pool<Eviction>::reclaim(std::uint64_t count, OnEvict&& on_evict) noexcept {
  const std::uint64_t first = free_count_;
  while (free_count_ - first < count && idle_count_ != 0) {
    const auto victim = eviction_.victim();
    if (!victim) break;
    const block_id block{to_index(*victim)};
    detail::evict(eviction_, *victim);
    block_record& record = records_[to_index(block)];
    record.give_up(transition::evicted);
    record.end_life();
    push_free(block);
    --idle_count_;
  }
  const std::uint64_t done = free_count_ - first;
  if (done != 0) on_evict(std::span<const block_id>(free_.data() + first, static_cast<std::size_t>(done)));
  evictions_ += done;
  return done;
}

template <eviction_policy Eviction>
result<void> block_pool<Eviction>::check(block_id block) const noexcept {
  const std::uint32_t i = to_index(block);
  if (i == 0) return refusal(errc::null_handle, 0, 0, 0);
  if (i >= records_.size()) return refusal(errc::foreign_handle, i, 0, 0);
  if (!records_[i].is_active()) return refusal(errc::double_free, i, 0, 0);
  return {};
}

template <eviction_policy Eviction>
result<void> block_pool<Eviction>::check(block_handle handle) const noexcept {
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

template <eviction_policy Eviction>
template <class Name>
result<void> block_pool<Eviction>::share_all(std::span<const Name> names) noexcept {
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

template <eviction_policy Eviction>
template <class Name>
result<void> block_pool<Eviction>::release_all(std::span<const Name> names) noexcept {
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

template <eviction_policy Eviction>
void block_pool<Eviction>::add_reference(block_id block) noexcept {
  block_record& record = records_[to_index(block)];
  if (record.is_idle()) {
    eviction_.pin(slot_id{to_index(block)});
    --idle_count_;
    record.add_reference(transition::revived);
  } else {
    record.add_reference(transition::shared);
  }
}

template <eviction_policy Eviction>
void block_pool<Eviction>::drop_reference(block_id block) noexcept {
  block_record& record = records_[to_index(block)];
  if (!record.drop_reference()) return;
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

template <eviction_policy Eviction>
void block_pool<Eviction>::undo_drop(block_id block) noexcept {
  block_record& record = records_[to_index(block)];
  if (!record.is_active() && !record.is_cached()) {
    --free_count_;
    record.undo_end_life();
    record.add_reference(transition::allocated);
  } else {
    add_reference(block);
  }
}

template <eviction_policy Eviction>
void block_pool<Eviction>::mark_cached(block_id block, const access_hint& hint) noexcept {
  records_[to_index(block)].keep();
  eviction_.insert(slot_id{to_index(block)}, hint);
}

template <eviction_policy Eviction>
void block_pool<Eviction>::unmark_cached(block_id block) noexcept {
  block_record& record = records_[to_index(block)];
  if (!record.is_cached()) return;
  const bool was_idle = record.is_idle();
  eviction_.erase(slot_id{to_index(block)});
  record.give_up(transition::uncached);
  if (was_idle) {
    record.end_life();
    push_free(block);
    --idle_count_;
  }
}

template <eviction_policy Eviction>
void block_pool<Eviction>::touch(block_id block, const access_hint& hint) noexcept {
  eviction_.touch(slot_id{to_index(block)}, hint);
}

template <eviction_policy Eviction>
block_pool_stats block_pool<Eviction>::stats() const noexcept {
  return {.blocks = blocks(),
          .active = blocks() - available(),
          .idle = idle_count_,
          .free = free_count_,
          .allocations = allocations_,
          .evictions = evictions_,
          .metadata_bytes = records_.bytes() + free_.bytes() + eviction_.metadata_bytes()};
}

template <eviction_policy Eviction>
std::vector<std::string> block_pool<Eviction>::audit() const {
  std::vector<std::string> found;
  const auto blame = [&](std::uint64_t block, const std::string& what) {
    found.push_back(name_ + ": block " + std::to_string(block) + " " + what +
                    " (last: " + std::string(to_string(records_[block].last())) + ")");
  };
  if (free_count_ > free_.size()) {
    found.push_back(name_ + ": the free list holds " + std::to_string(free_count_) + " of " +
                    std::to_string(free_.size()) + " blocks");
    return found;
  }
  std::vector<bool> listed(records_.size());
  for (std::uint64_t i = 0; i < free_count_; ++i) {
    const std::uint32_t block = to_index(free_[i]);
    if (block == 0 || block >= records_.size()) {
      found.push_back(name_ + ": the free list names block " + std::to_string(block) +
                      ", which does not exist");
      continue;
    }
    if (listed[block]) blame(block, "is twice in the free list");
    listed[block] = true;
  }
  if (records_[0].is_active() || records_[0].is_cached() || eviction_.is_candidate(slot_id{0})) {
    blame(0, "is the null block, which nobody may hold or keep");
  }
  std::uint64_t idle = 0;
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
    if (!listed[i] && !record.is_active() && !record.is_cached())
      blame(i, "is leaked: neither held, kept nor free");
  }
  if (idle != idle_count_) {
    found.push_back(name_ + ": " + std::to_string(idle) + " blocks are idle, counted are " +
                    std::to_string(idle_count_));
  }
  return found;
}

}  // namespace llmmem::inline v0
