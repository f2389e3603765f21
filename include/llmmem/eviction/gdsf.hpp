/// @file
/// Greedy-Dual-Size-Frequency eviction.
#pragma once

#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/eviction/concepts.hpp>
#include <llmmem/eviction/detail/ranked_eviction.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// The worth of an entry, and its last use.
struct worth {
  double value = 0;
  std::uint64_t last = 0;  // number of the last event, so that no two slots rank equal

  friend bool operator<(const worth& a, const worth& b) noexcept {
    return a.value != b.value ? a.value < b.value : a.last < b.last;
  }
};

}  // namespace detail

/// Evicts the entry that is cheapest to restore, weighted by its uses; unused entries age.
///
/// Cherkasova, "Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching policy", HP Labs
/// 1998. An entry's worth is L + uses x cost. Cost is `access_hint::cost`, the price of restoring it for each
/// byte (the paper's cost over size). L is the worth of the latest victim, so every entry inserted or used
/// since eventually outranks an unused one. With one cost for all entries it is an LFU that ages. Suits
/// blocks of different cost: late blocks of a long prompt cost more to recompute than early ones, contents of
/// a slow tier cost more to fetch.
///
/// Uses count from the entry's insert; the latest access sets its cost. A cost below 0 or NaN counts as 0.
/// Among equals, the entry longest without a user leaves first. Worth is a double: L grows with each
/// eviction, and once it is 2^53 times a cost, entries of that cost rank by time alone.
///
/// @par Complexity   insert O(1), the others O(log n); 32 bytes a slot, allocated once in the constructor.
/// @par Thread safety   one writer at a time; const calls may run together.
/// @par Errors   the constructor's, see `eviction_policy`; nothing else fails.
class gdsf_eviction : public detail::ranked_eviction<detail::worth> {
 public:
  explicit gdsf_eviction(slot_count capacity, const metadata_source& source = {})
      : ranked_eviction(capacity, source, "gdsf_eviction"),
        uses_(to_number(capacity), source, "gdsf_eviction") {}

  void insert(slot_id slot, const access_hint& hint = {}) noexcept {
    uses_[to_index(slot)] = {.uses = 1, .cost = usable(hint.cost)};
  }

  void touch(slot_id slot, const access_hint& hint = {}) noexcept {
    price& p = uses_[to_index(slot)];
    p = {.uses = p.uses + (p.uses != ~std::uint32_t{0} ? 1U : 0U), .cost = usable(hint.cost)};
    if (is_candidate(slot)) value(slot);
  }

  /// The entry was in use until now, so it gets the worth of an access at this moment.
  void unpin(slot_id slot) noexcept {
    value(slot);
    candidates_.push(slot);
  }

  /// As `erase`, but all other entries age by the victim's worth.
  void evict(slot_id slot) noexcept {
    if (is_candidate(slot)) age_ = std::max(age_, candidates_.rank(slot).value);
    erase(slot);
  }

  [[nodiscard]] std::size_t metadata_bytes() const noexcept {
    return ranked_eviction::metadata_bytes() + uses_.bytes();
  }

 private:
  struct price {
    std::uint32_t uses;
    float cost;
  };

  [[nodiscard]] static float usable(float cost) noexcept {
    return cost > 0 ? std::min(cost, std::numeric_limits<float>::max()) : 0.0F;
  }

  void value(slot_id slot) noexcept {
    const price& p = uses_[to_index(slot)];
    candidates_.set_rank(slot, {age_ + double{p.cost} * p.uses, next_++});
  }

  detail::fixed_array<price> uses_;  // of every known slot
  double age_ = 0;                   // the paper's L
  std::uint64_t next_ = 0;
};

static_assert(eviction_policy<gdsf_eviction> && remembers_evictions<gdsf_eviction>);

}  // namespace v0
}  // namespace llmmem
