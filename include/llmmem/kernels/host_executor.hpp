/// @file
/// `host_executor`: runs kernels on the host.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/items.hpp>
#include <llmmem/kernels/rows.hpp>
#include <llmmem/result.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>

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
    if constexpr (std::same_as<Op, copy_op>) {
      copy_rows(map);
    } else {
      // Alignment does not matter on a host: it moves packets by memcpy.
      move_rows<widest_packet<Op>, Read, Write>(map, op, row_share{});
    }
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

 private:
  /// Copies rows that do not change on their way: memcpy uses the widest registers that the machine has. Rows
  /// that continue each other at both ends, such as the tiles of a block, are one copy.
  template <row_map Map>
  static void copy_rows(const Map& map) noexcept {
    const std::byte* from = nullptr;
    std::byte* to = nullptr;
    std::size_t bytes = 0;
    const auto copy = [&]() noexcept {
      if (bytes != 0) std::memcpy(to, from, bytes);
    };
    for (std::uint32_t part = 0; part < map.parts(); ++part) {
      for (std::uint64_t row = 0; row < map.rows(); ++row) {
        const row_move each = map.at(row, part);
        if (each.elements == 0) continue;
        if (bytes != 0 && each.from == from + bytes && each.to == to + bytes) {
          bytes += each.elements;
          continue;
        }
        copy();
        from = each.from;
        to = each.to;
        bytes = each.elements;
      }
    }
    copy();
  }
};

}  // namespace v0
}  // namespace llmmem
