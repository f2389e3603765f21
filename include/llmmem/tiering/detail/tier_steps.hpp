/// @file
/// Types that the parts of a `tiered_buffer` pass to each other: tiers, transfers, outcomes of attempts.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/ordered_slots.hpp>
#include <llmmem/result.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The number of a tier as a type, for code that differs between tiers.
template <std::size_t Index>
using tier_number = std::integral_constant<std::size_t, Index>;
template <std::size_t Index>
inline constexpr tier_number<Index> nth{};

/// Calls `f` with tier `i` as a constant, or with edge `i`; does nothing if `i` is not below `Count`.
template <std::size_t Count, class F>
constexpr void with_index(std::size_t i, F&& f) {
  [&]<std::size_t... Index>(std::index_sequence<Index...>) {
    (static_cast<void>(i == Index ? (f(nth<Index>), 0) : 0), ...);
  }(std::make_index_sequence<Count>{});
}
/// Calls `f` with each tier below `Count`.
template <std::size_t Count, class F>
constexpr void for_each_index(F&& f) {
  [&]<std::size_t... Index>(std::index_sequence<Index...>) {
    (f(nth<Index>), ...);
  }(std::make_index_sequence<Count>{});
}

/// A transfer of bytes over one edge.
struct tier_transfer {
  std::uint32_t chunk = no_index;
  std::uint32_t edge = 0;
  bool stores = false;
  bool then_drops = false;
  bool demotes = false;     // a demotion, which may fail without a loss, because a lower tier has these bytes
  bool in_advance = false;  // a prefetch
  bool found_under_way = false;    // a lease began to wait for it after it had begun
  std::uint32_t stage = no_index;  // its staging slot
};

/// Returns whether that transfer's failure keeps a chunk from its destination: its own bytes did not arrive,
/// or a copy that had to make space for the chunk could not leave.
[[nodiscard]] constexpr bool is_in_the_way(const tier_transfer& failed, std::uint32_t slot,
                                           bool needs_contents) noexcept {
  const bool is_own = failed.chunk == slot;
  if (!failed.stores) return is_own && needs_contents;
  return failed.then_drops && !failed.demotes && !(is_own && failed.edge == 0);
}

/// The direction in which a chunk passes a tier.
enum class passage : std::uint8_t { up, down };

/// What a chunk has after it parts from its clones.
enum class parting : std::uint8_t {
  empty,  ///< a place in the last tier
  fresh,  ///< also a place in tier 0, for bytes that will be written
  copied  ///< also the shared contents, in that place
};

/// The outcome of an attempt: done, blocked until transfer `on` has ended, or impossible. A prefetch may also
/// be blocked without a transfer, for example until a lease ends.
struct attempt {
  enum class kind : std::uint8_t { done, blocked, failed };
  kind how = kind::done;
  std::uint32_t on = no_index;
  failure why;

  [[nodiscard]] static attempt blocked(std::uint32_t on) noexcept { return {kind::blocked, on, {}}; }
  [[nodiscard]] static attempt failed(const failure& why) noexcept { return {kind::failed, no_index, why}; }
  [[nodiscard]] bool is_done() const noexcept { return how == kind::done; }
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
