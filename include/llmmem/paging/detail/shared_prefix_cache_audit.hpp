/// @file
/// Bodies of shared_prefix_cache.hpp: counts and the proof of its invariants. Only
/// shared_prefix_cache_body.hpp includes it.
#pragma once

#include <llmmem/paging/shared_prefix_cache.hpp>

namespace llmmem {
inline namespace v0 {

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
    out.cached += seen.is_cached() ? 1U : 0U;
    out.active += seen.references() != 0 ? 1U : 0U;
    out.idle += seen.is_idle() ? 1U : 0U;
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
    free += is_free ? 1U : 0U;
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
      say(i, "follows block " + std::to_string(to_index(at.parent)) + ", which is not cached");
    }
  }
  for (std::uint32_t i = 1; i <= blocks(); ++i) {
    const std::uint32_t references = state(block_id{i}).references();
    if (references < children[i]) {
      say(i, "has " + std::to_string(references) + " references, " + std::to_string(children[i]) +
                 " cached blocks follow it");
    }
  }
  const auto in_index = index_.count();
  if (in_index.present != cached || in_index.gone_on != gone_on) {
    found.push_back(name_ + ": the index holds " + std::to_string(in_index.present) + " blocks, " +
                    std::to_string(cached) + " are cached; it counts " + std::to_string(in_index.gone_on) +
                    " overflows, there are " + std::to_string(gone_on));
  }
  if (free != free_.size()) {
    found.push_back(name_ + ": counts " + std::to_string(free_.size()) + " free blocks, there are " +
                    std::to_string(free));
  }
  return found;
}

}  // namespace v0
}  // namespace llmmem
