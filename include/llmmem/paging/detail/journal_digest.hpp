/// @file
/// Computes a digest of a cache's state. Private to paging/.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/hash/siphash.hpp>
#include <llmmem/paging/detail/journal_format.hpp>
#include <llmmem/paging/hybrid_types.hpp>
#include <llmmem/paging/paged_types.hpp>
#include <llmmem/paging/super_page_types.hpp>

#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

class word_digest {
 public:
  void operator()(std::uint64_t word) noexcept {
    state_.absorb(word);
    ++words_;
  }
  [[nodiscard]] std::uint64_t finish() const noexcept {
    siphash_state<2, 4> state = state_;
    return state.finish(0, 8 * words_).low;
  }

 private:
  siphash_state<2, 4> state_{hash_seed{}};
  std::uint64_t words_ = 0;
};

/// Returns 64 bits computed from counts, blocks, keys and the order of free blocks: equal for caches made by
/// the same operations. O(blocks).
template <class Cache>
[[nodiscard]] std::uint64_t state_digest(const Cache& cache) noexcept {
  word_digest absorb;
  const paged_stats now = cache.stats();
  for (const std::uint64_t each : {now.sequences,
                                   now.tokens,
                                   now.table_blocks,
                                   now.blocks,
                                   now.active_blocks,
                                   now.idle_blocks,
                                   now.free_blocks,
                                   now.retiring_blocks,
                                   now.cached_blocks,
                                   now.deferred,
                                   now.matches,
                                   now.requested_blocks,
                                   now.hit_blocks,
                                   now.hit_tokens,
                                   now.partial_hits,
                                   now.stolen_blocks,
                                   now.allocations,
                                   now.evictions,
                                   now.evicting_allocations,
                                   now.registrations,
                                   now.duplicates,
                                   now.replaced,
                                   now.deduplicated,
                                   now.refused,
                                   now.copies,
                                   now.orphans,
                                   now.invalidated,
                                   now.unchained,
                                   cache.epoch()})
    absorb(each);
  for (std::uint64_t i = 1; i <= cache.pool().block_capacity(); ++i) {
    const block_id block{static_cast<std::uint32_t>(i)};
    const auto& record = cache.pool().record(block);
    absorb((std::uint64_t{record.references()} << 32) | record.generation());
    absorb((std::uint64_t{cache.index().tokens(block)} << 32) | static_cast<std::uint64_t>(record.last()));
    if (!cache.index().contains(block)) continue;
    absorb(cache.index().key(block).low);
    absorb(cache.index().key(block).high);
  }
  cache.pool().for_each_free([&](block_id block) noexcept { absorb(to_index(block)); });
  return absorb.finish();
}

/// The same for a cache with groups of layers: its pages, and the order in which it would take them, too.
/// O(block ids).
template <journaled_hybrid_cache Cache>
[[nodiscard]] std::uint64_t state_digest(const Cache& cache) noexcept {
  word_digest absorb;
  const hybrid_stats now = cache.stats();
  for (const std::uint64_t each : {now.sequences,
                                   now.tokens,
                                   now.chunks,
                                   now.matches,
                                   now.hit_tokens,
                                   now.registrations,
                                   now.duplicates,
                                   now.released_early,
                                   now.invalidated,
                                   now.deferred,
                                   now.copies,
                                   now.deduplicated,
                                   now.pages.free_pages,
                                   now.pages.pages,
                                   now.pages.retiring_pages,
                                   now.pages.idle_bytes,
                                   now.pages.active_bytes,
                                   now.pages.allocations,
                                   now.pages.evictions,
                                   now.pages.pages_assigned,
                                   now.pages.pages_emptied,
                                   cache.epoch()})
    absorb(each);
  const auto& pool = cache.pool();
  for (std::uint64_t i = 0; i < pool.block_ids(); ++i) {
    const block_id block{static_cast<std::uint32_t>(i)};
    const auto& record = pool.record(block);
    absorb((std::uint64_t{record.references()} << 32) | record.generation());
    absorb(static_cast<std::uint64_t>(record.last()));
    const auto key = cache.cached_key(block);
    if (!key) continue;
    absorb(key->low);
    absorb(key->high);
    absorb(cache.parent_digest(block));
  }
  pool.visit_order(absorb);
  return absorb.finish();
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
