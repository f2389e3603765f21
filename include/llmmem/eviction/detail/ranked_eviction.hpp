/// @file
/// The common part of the policies that keep their candidates in one heap.
#pragma once

#include <llmmem/eviction/concepts.hpp>
#include <llmmem/eviction/detail/slot_heap.hpp>

#include <cstddef>
#include <optional>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The candidates of a policy whose victim has the smallest rank. A policy derives from it and adds the calls
/// that set the rank: `insert`, `touch` and `unpin`.
template <class Rank>
class ranked_eviction {
 public:
  void pin(slot_id slot) noexcept { candidates_.remove(slot); }
  void erase(slot_id slot) noexcept { candidates_.remove(slot); }

  [[nodiscard]] std::optional<slot_id> victim() const noexcept { return candidates_.front(); }
  [[nodiscard]] bool is_candidate(slot_id slot) const noexcept { return candidates_.contains(slot); }
  [[nodiscard]] slot_count capacity() const noexcept { return candidates_.capacity(); }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return candidates_.bytes(); }

 protected:
  ranked_eviction(slot_count capacity, const metadata_source& source, const char* who)
      : candidates_(capacity, source, who) {}

  slot_heap<Rank> candidates_;  // smallest rank first
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
