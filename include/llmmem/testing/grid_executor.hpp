/// @file
/// `grid_executor`: runs rows on the host as a device would, thread by thread.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/launch.hpp>
#include <llmmem/kernels/rows.hpp>
#include <llmmem/result.hpp>

#include <cstddef>
#include <cstdint>

namespace llmmem::inline v0::testing {

/// Plans a launch as a device's, and walks all of its blocks and threads, with the kernel's own arithmetic:
/// what they leave out, move twice or take past an end shows without a device. Barriers are none in rows, so
/// that threads may follow each other.
///
/// The packets are as wide as the map says its ends' alignment allows, and whether that is so is checked
/// first: a device ends with an error where it is not.
///
/// @par Thread safety   as `host_executor`.
/// @par Errors          `errc::misaligned` for a row that is less aligned than its map says: index the
///      part, wanted = the alignment, found = the row. Then nothing has moved.
class grid_executor {
 public:
  explicit grid_executor(const launch_limits& limits = {}) noexcept : limits_(limits) {}

  template <access Read, access Write, row_map Map, row_op Op>
  result<void> move(const Map& map, const Op& op) const noexcept {
    const unsigned elements = packet_elements<Op>(map.alignment());
    if (auto aligned = check(map, elements * Op::from_bytes, elements * Op::to_bytes); !aligned)
      return aligned;
    const row_launch launch = plan_launch(row_work::of(map, elements), limits_);
    for (std::uint32_t row_block = 0; row_block < launch.row_blocks; ++row_block)
      run_block(map, op, launch, row_block, 0, launch.part_blocks, elements);
    return {};
  }

  /// The blocks of one row block: for tests that have several threads take some each.
  template <row_map Map, row_op Op>
  static void run_block(const Map& map, const Op& op, const row_launch& launch, std::uint32_t row_block,
                        std::uint32_t first_part, std::uint32_t parts, unsigned elements) noexcept {
    for (std::uint32_t part = first_part; part < first_part + parts; ++part) {
      for (std::uint32_t thread = 0; thread < row_launch::threads; ++thread)
        step<widest_packet<Op>>(map, op, share_of(launch, row_block, part, thread), elements);
    }
  }

 private:
  template <row_map Map>
  static result<void> check(const Map& map, unsigned from, unsigned to) noexcept {
    const auto is_aligned = [](const std::byte* end, unsigned to_what) {
      return reinterpret_cast<std::uintptr_t>(end) % to_what == 0;
    };
    for (std::uint32_t part = 0; part < map.parts(); ++part) {
      for (std::uint64_t row = 0; row < map.rows(); ++row) {
        const row_move each = map.at(row, part);
        if (each.elements == 0 || (is_aligned(each.from, from) && is_aligned(each.to, to))) continue;
        return failure{errc::misaligned, part, is_aligned(each.from, from) ? to : from, row, "grid_executor"};
      }
    }
    return {};
  }

  template <unsigned N, row_map Map, row_op Op>
  static void step(const Map& map, const Op& op, const row_share& share, unsigned elements) noexcept {
    if constexpr (N > 1) {
      if (elements < N) return step<N / 2>(map, op, share, elements);
    }
    move_rows<N>(map, op, share);
  }

  launch_limits limits_;
};

}  // namespace llmmem::inline v0::testing
