/// @file
/// `host_executor`: runs kernels on the host.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/items.hpp>
#include <llmmem/kernels/rows.hpp>
#include <llmmem/result.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// The values of other lanes, for a host without any.
struct no_other_lane {
  template <class Partial>
  [[nodiscard]] LLMMEM_HD constexpr Partial operator()(const Partial& known,
                                                       std::uint32_t /*step*/) const noexcept {
    return known;
  }
};

}  // namespace detail

/// Runs rows and items on the host, in the calling thread: the reference for all other executors. A kernel
/// takes this executor, or `device_executor` of <llmmem/kernels/device_executor.cuh>.
///
/// @par Complexity      O(bytes).
/// @par Thread safety   any number at once, on different bytes.
struct host_executor {
  /// Moves each row's elements. @tparam Read, Write  what happens to the lines that a device reads and writes
  template <cache_hint Read = cache_hint::streaming, cache_hint Write = cache_hint::kept, row_map Map,
            row_op Op>
  result<void> move(const Map& map, const Op& op) const noexcept {
    // Alignment does not matter on a host: it moves packets by memcpy.
    move_rows<widest_packet<Op>, Read, Write>(map, op, row_share{});
    return {};
  }

  template <item_work Work>
  result<void> each(const Work& work) const noexcept {
    run_items(work, item_share{});
    return {};
  }

  /// One lane for each item, which needs no other lane's values.
  template <group_work Work>
  result<void> each(const Work& work) const noexcept {
    run_groups(work, item_share{}, detail::no_other_lane{});
    return {};
  }

  /// All lanes of each item, in turns.
  template <lane_work Work>
  result<void> each(const Work& work) const noexcept {
    run_lanes(work, item_share{}, host_lanes(work.lanes()));
    return {};
  }
};

}  // namespace v0
}  // namespace llmmem
