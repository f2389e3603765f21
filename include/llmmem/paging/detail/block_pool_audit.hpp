/// @file
/// Bodies of block_pool.hpp: counts, and the proof of its invariants. Only block_pool_body.hpp includes it.
#pragma once

#include <llmmem/paging/block_pool.hpp>

#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

template <eviction_policy Eviction, free_list FreeList, block_history History>
std::string block_pool<Eviction, FreeList, History>::last_of(block_id block) const {
  const std::string trail = history_.history_of(block);
  const std::string last(to_string(records_[to_index(block)].last()));
  return trail.empty() ? last : last + "; " + trail;
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
    if (listed[block]) blame(block, "is in the free list twice");
    listed[block] = true;
  });
  if (records_[0].is_active() || records_[0].is_cached() || eviction_.is_candidate(slot_id{0})) {
    blame(0, "is the null block, which must not be held or cached");
  }
  std::uint64_t idle = 0;
  std::uint64_t retiring = 0;
  for (std::uint64_t i = 1; i < records_.size(); ++i) {
    const block_record& record = records_[i];
    const bool candidate = eviction_.is_candidate(slot_id{static_cast<std::uint32_t>(i)});
    if (record.is_idle()) ++idle;
    if (record.is_idle() != candidate) {
      blame(i, candidate ? "is an eviction candidate but not idle" : "is idle but not an eviction candidate");
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
    found.push_back(name_ + ": " + std::to_string(retiring) + " blocks are retiring, the count says " +
                    std::to_string(retiring_));
  }
  if (idle != idle_count_) {
    found.push_back(name_ + ": " + std::to_string(idle) + " blocks are idle, the count says " +
                    std::to_string(idle_count_));
  }
  return found;
}

}  // namespace v0
}  // namespace llmmem
