/// @file
/// Least-frequently-used eviction that drops the ends of long chains first.
#pragma once

#include <llmmem/eviction/concepts.hpp>
#include <llmmem/eviction/detail/ranked_eviction.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// The uses of an entry, its position in its chain, and its last use.
struct depth {
  std::uint32_t uses = 0;
  std::uint32_t position = 0;
  std::uint64_t last = 0;  // number of the last event, so that no two slots rank equal

  friend bool operator<(const depth& a, const depth& b) noexcept {
    if (a.uses != b.uses) return a.uses < b.uses;
    return a.position != b.position ? a.position > b.position : a.last < b.last;
  }
};

}  // namespace detail

/// Evicts the entry used least often since its insert; among equals, the one furthest along its chain; then,
/// the one longest without a user.
///
/// After the LengthAwareCache that Qin et al., "Mooncake: a KVCache-centric disaggregated architecture for
/// LLM serving" (arXiv 2407.00079), compare with LRU and LFU in their table 1. They say only that it is
/// similar to LFU and gives priority to blocks that occur later in requests; they publish neither the formula
/// nor whether that means priority to stay or to leave. Here it means priority to leave, because a block
/// cannot be hit without the blocks before it, and heads of prompts are shared more (the opposite order hits
/// half as often, see docs/eviction.md). Their finding holds here, too: on chat traffic LRU is better.
///
/// @par Complexity   insert O(1), the others O(log n); 24 bytes a slot, allocated once in the constructor.
/// @par Thread safety   one writer at a time; const calls may run together.
/// @par Errors   the constructor's, see `eviction_policy`; nothing else fails.
class length_aware_eviction : public detail::ranked_eviction<detail::depth> {
 public:
  explicit length_aware_eviction(slot_count capacity, const metadata_source& source = {})
      : ranked_eviction(capacity, source, "length_aware_eviction") {}

  void insert(slot_id slot, const access_hint& hint = {}) noexcept {
    candidates_.set_rank(slot, {.uses = 1, .position = hint.position, .last = next_++});
  }

  /// Keeps the position in the chain, because equal contents have equal positions.
  void touch(slot_id slot, const access_hint& = {}) noexcept {
    detail::depth rank = candidates_.rank(slot);
    if (rank.uses != ~std::uint32_t{0}) ++rank.uses;
    rank.last = next_++;
    candidates_.set_rank(slot, rank);
  }

  void unpin(slot_id slot) noexcept {
    detail::depth rank = candidates_.rank(slot);
    rank.last = next_++;
    candidates_.set_rank(slot, rank);
    candidates_.push(slot);
  }

 private:
  std::uint64_t next_ = 0;
};

static_assert(eviction_policy<length_aware_eviction>);

}  // namespace v0
}  // namespace llmmem
