/// @file
/// Rows: the common loop of all kernels without cooperation, on the host and on a device.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/packet.hpp>

#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace llmmem {
inline namespace v0 {

/// Elements that are contiguous at both ends.
struct row_move {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  std::uint32_t elements = 0;  ///< 0: there is nothing to move
};

/// Powers of two that divide every end of every row, in bytes.
struct row_alignment {
  std::uint32_t from = 1;
  std::uint32_t to = 1;
};

/// The source and destination of each row: all indexing of a kernel, by slot mappings, tables, strides, and
/// which rows are skipped. Trivially copyable; the pointers in it belong to the executor's memory. Its
/// members are `LLMMEM_HD`: without it nvcc warns and a device runs none of them, except under `-Werror
/// cross-execution-space-call`.
///
/// - There are `rows()` times `parts()` rows; a part is constant from row to row: a layer, K or V, a head.
///   `longest_row()` is the most elements of any, below 2^31.
/// - `alignment()` is what all ends of all rows are multiples of.
/// - `at(row, part)` is called once for each row by each thread that takes a share of it, before its bytes
///   move. For any contents of the tables, it names no byte outside the memory that the map was made of.
template <class M>
concept row_map =
    std::is_trivially_copyable_v<M> && requires(const M& map, std::uint64_t row, std::uint32_t part) {
      { map.rows() } noexcept -> std::same_as<std::uint64_t>;
      { map.parts() } noexcept -> std::same_as<std::uint32_t>;
      { map.longest_row() } noexcept -> std::same_as<std::uint32_t>;
      { map.alignment() } noexcept -> std::same_as<row_alignment>;
      { map.at(row, part) } noexcept -> std::same_as<row_move>;
    };

/// What happens to the elements on their way. Trivially copyable.
///
/// - `from_bytes` and `to_bytes` are those of an element at either end.
/// - `at(part)` is a step: it reads scales and the like once for all of a part. `step.template
///   apply<N>(packet<N x from_bytes>)` is a `packet<N x to_bytes>`: N elements.
/// - Its members are `LLMMEM_HD`, as a map's.
template <class O>
concept row_op = std::is_trivially_copyable_v<O> && requires(const O& op, std::uint32_t part) {
  { O::from_bytes } -> std::convertible_to<unsigned>;
  { O::to_bytes } -> std::convertible_to<unsigned>;
  { op.at(part).template apply<1>(packet<O::from_bytes>{}) } noexcept -> std::same_as<packet<O::to_bytes>>;
};

/// Moves elements unchanged: bytes.
struct copy_op {
  static constexpr unsigned from_bytes = 1;
  static constexpr unsigned to_bytes = 1;
  struct step {
    template <unsigned N>
    [[nodiscard]] LLMMEM_HD constexpr packet<N> apply(const packet<N>& in) const noexcept {
      return in;
    }
  };
  [[nodiscard]] LLMMEM_HD constexpr step at(std::uint32_t /*part*/) const noexcept { return {}; }
};
static_assert(row_op<copy_op>);

/// The most elements that one access at each end can move, 16 bytes at the wider end: the widest packets.
template <row_op Op>
inline constexpr unsigned widest_packet =
    16 /
    (unsigned{Op::from_bytes} > unsigned{Op::to_bytes} ? unsigned{Op::from_bytes} : unsigned{Op::to_bytes});

/// Sets a flag. Other threads may set it at the same time, because all write the same value.
LLMMEM_HD inline void raise_flag(std::uint32_t& flag) noexcept {
#if defined(__CUDA_ARCH__)
  *static_cast<volatile std::uint32_t*>(&flag) = 1;
#else
  std::atomic_ref(flag).store(1, std::memory_order_relaxed);
#endif
}

/// The share of the rows of one thread, or of a host that takes all.
struct row_share {
  std::uint64_t first = 0;   ///< its first row
  std::uint64_t stride = 1;  ///< rows to its next one
  std::uint32_t part = 0;    ///< its first part
  std::uint32_t parts = 1;   ///< parts to its next one
  std::uint32_t lane = 0;    ///< its number among the lanes that share a row
  std::uint32_t lanes = 1;
};

namespace detail {

/// From so many bytes on a row of a copy is long.
inline constexpr std::uint32_t least_shifted_row = 64;

/// Whether a map copies long rows by packets of 16 at any alignment, by its own `move_shifted`. The elements
/// of other maps are mostly aligned, and looking their rows up takes the registers.
template <class Map, class Op>
inline constexpr bool copies_at_any_alignment =
    std::same_as<Op, copy_op> && requires(const row_move& row, std::uint32_t lane) {
      Map::template move_shifted<1, cache_hint::streaming, cache_hint::kept>(row, lane, lane);
    };

/// A lane's share of one row: every `lanes`-th packet, four at a time so that as many reads are in flight,
/// then single elements after the last packet.
template <unsigned N, cache_hint Read, cache_hint Write, class Map, class Op, class Step>
LLMMEM_HD inline void move_row(const row_move& row, const Step& step, std::uint32_t lane,
                               std::uint32_t lanes) noexcept {
  if constexpr (copies_at_any_alignment<Map, Op> && N < 16) {
    if (row.elements >= least_shifted_row)
      return Map::template move_shifted<N, Read, Write>(row, lane, lanes);
  }
  constexpr unsigned from_bytes = N * Op::from_bytes;
  constexpr unsigned to_bytes = N * Op::to_bytes;
  constexpr unsigned at_once = 4;
  const std::uint32_t packets = row.elements / N;
  std::uint32_t p = lane;
  // If the last of four packets exists, all do: below 2^31 elements nothing overflows.
  for (; p + (at_once - 1) * lanes < packets; p += at_once * lanes) {
    packet<from_bytes> in[at_once];
    LLMMEM_UNROLL
    for (unsigned i = 0; i < at_once; ++i)
      in[i] = load_packet<from_bytes, Read>(row.from + std::uint64_t{p + i * lanes} * from_bytes);
    LLMMEM_UNROLL
    for (unsigned i = 0; i < at_once; ++i)
      store_packet<to_bytes, Write>(row.to + std::uint64_t{p + i * lanes} * to_bytes,
                                    step.template apply<N>(in[i]));
  }
  for (; p < packets; p += lanes)
    store_packet<to_bytes, Write>(
        row.to + std::uint64_t{p} * to_bytes,
        step.template apply<N>(load_packet<from_bytes, Read>(row.from + std::uint64_t{p} * from_bytes)));
  if constexpr (N > 1) {
    for (std::uint32_t e = packets * N + lane; e < row.elements; e += lanes)
      store_packet<Op::to_bytes, Write>(row.to + std::uint64_t{e} * Op::to_bytes,
                                        step.template apply<1>(load_packet<Op::from_bytes, Read>(
                                            row.from + std::uint64_t{e} * Op::from_bytes)));
  }
}

}  // namespace detail

/// The loop. It looks a row up once, then moves its bytes: a lookup in the address of every access costs a
/// third of the bandwidth or more.
///
/// @tparam N  elements per access. @pre every row's ends are aligned to N elements
template <unsigned N, cache_hint Read = cache_hint::streaming, cache_hint Write = cache_hint::kept,
          row_map Map, row_op Op>
LLMMEM_HD inline void move_rows(const Map& map, const Op& op, const row_share& share) noexcept {
  for (std::uint32_t part = share.part; part < map.parts(); part += share.parts) {
    const auto step = op.at(part);
    for (std::uint64_t row = share.first; row < map.rows(); row += share.stride)
      detail::move_row<N, Read, Write, Map, Op>(map.at(row, part), step, share.lane, share.lanes);
  }
}

}  // namespace v0
}  // namespace llmmem
