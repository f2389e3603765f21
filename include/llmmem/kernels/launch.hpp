/// @file
/// How many threads run over rows, and which thread takes which packets. Plain arithmetic that hosts can
/// test.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/rows.hpp>

#include <algorithm>
#include <bit>
#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// Returns the largest power of two, up to 16, that divides all of these addresses and distances.
template <std::convertible_to<std::uint64_t>... Numbers>
[[nodiscard]] constexpr std::uint32_t alignment_of(Numbers... numbers) noexcept {
  const std::uint64_t all = (std::uint64_t{16} | ... | static_cast<std::uint64_t>(numbers));
  return std::uint32_t{1} << std::countr_zero(all);
}

/// Returns how many elements one access can move: as many as both ends' alignments allow.
template <row_op Op>
[[nodiscard]] constexpr unsigned packet_elements(const row_alignment& aligned) noexcept {
  unsigned elements = widest_packet<Op>;
  while (elements > 1 && (elements * Op::from_bytes > aligned.from || elements * Op::to_bytes > aligned.to))
    elements /= 2;
  return elements;
}

/// The work to run.
struct row_work {
  std::uint64_t rows = 0;
  std::uint32_t parts = 0;
  std::uint32_t packets = 0;  ///< packets of the longest row

  template <row_map Map>
  [[nodiscard]] static constexpr row_work of(const Map& map, unsigned packet_elements) noexcept {
    const std::uint32_t packets = map.longest_row() / packet_elements;
    return {map.rows(), map.parts(), packets * packet_elements == map.longest_row() ? packets : packets + 1};
  }
};

/// Returns the elements of the packets by which lanes share a row: those of an access, or of 16 bytes where
/// long rows are copied at any alignment.
template <row_op Op, row_map Map>
[[nodiscard]] constexpr unsigned shared_elements(const Map& map, unsigned elements) noexcept {
  return detail::copies_at_any_alignment<Map, Op> && map.longest_row() >= detail::least_shifted_row
             ? 16U
             : elements;
}

/// Limits on the part of a device that a launch takes.
struct launch_limits {
  std::uint32_t multiprocessors = 132;
  std::uint32_t blocks = 0;  ///< the most at once, to leave space for others; 0: as many as are useful
};

/// Threads of a launch: blocks by rows and by parts, and in a block lanes that share a row.
struct row_launch {
  std::uint32_t row_blocks = 0;  ///< 0: no work
  std::uint32_t part_blocks = 0;
  std::uint32_t lane_bits = 0;  ///< 2^lane_bits lanes share a row

  static constexpr std::uint32_t threads = 256;

  friend constexpr bool operator==(const row_launch&, const row_launch&) noexcept = default;
};

/// Few rows: each packet gets a lane, because then the time of one access dominates. Many: a lane moves up to
/// four packets, whose reads are in flight together.
[[nodiscard]] constexpr row_launch plan_launch(const row_work& work, const launch_limits& limits) noexcept {
  row_launch out;
  if (work.rows == 0 || work.parts == 0 || work.packets == 0) return out;
  constexpr std::uint32_t resident = 2048;  // threads a multiprocessor holds
  const std::uint64_t at_once = std::uint64_t{limits.multiprocessors} * resident;
  const bool is_little = work.rows <= at_once / work.parts / work.packets;
  const std::uint32_t wanted = is_little ? work.packets : (work.packets + 3) / 4;
  out.lane_bits = static_cast<std::uint32_t>(std::bit_width(std::min(wanted, row_launch::threads) - 1));
  const std::uint32_t rows_a_block = row_launch::threads >> out.lane_bits;
  // A grid's x, whose blocks are consecutive, is parts: heads of the same tokens are adjacent. Its y is rows,
  // and its limit is lower.
  constexpr std::uint32_t most_part_blocks = 0x7FFF'FFFF;
  constexpr std::uint64_t most_row_blocks = 0xFFFF;
  out.part_blocks = std::min(work.parts, most_part_blocks);
  out.row_blocks = static_cast<std::uint32_t>(std::min((work.rows - 1) / rows_a_block + 1, most_row_blocks));
  if (limits.blocks != 0) {
    out.part_blocks = std::min(out.part_blocks, limits.blocks);
    out.row_blocks = std::min(out.row_blocks, std::max(limits.blocks / out.part_blocks, 1U));
  }
  return out;
}

/// Returns the rows that a thread of a launch takes.
[[nodiscard]] LLMMEM_HD constexpr row_share share_of(const row_launch& launch, std::uint32_t row_block,
                                                     std::uint32_t part_block,
                                                     std::uint32_t thread) noexcept {
  const std::uint32_t rows_a_block = row_launch::threads >> launch.lane_bits;
  return {.first = std::uint64_t{row_block} * rows_a_block + (thread >> launch.lane_bits),
          .stride = std::uint64_t{launch.row_blocks} * rows_a_block,
          .part = part_block,
          .parts = launch.part_blocks,
          .lane = thread & ((1U << launch.lane_bits) - 1U),
          .lanes = 1U << launch.lane_bits};
}

}  // namespace v0
}  // namespace llmmem
