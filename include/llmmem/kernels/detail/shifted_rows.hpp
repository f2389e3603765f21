/// @file
/// Rows of bytes that are copied by packets of 16 at any alignment.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/packet_frame.hpp>
#include <llmmem/kernels/packet.hpp>
#include <llmmem/kernels/rows.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// A lane's share of a row of bytes: packets that are aligned at their destination, and the bytes before the
/// first and after the last, by accesses of N. @pre the row has `least_shifted_row` bytes or more
template <unsigned N, cache_hint Read, cache_hint Write>
LLMMEM_HD inline void move_shifted(const row_move& row, std::uint32_t lane, std::uint32_t lanes) noexcept {
  const std::uint32_t head = (16 - skew_of(row.to)) % 16;
  const std::uint32_t packets = (row.elements - head) / 16;
  constexpr unsigned at_once = 4;
  const auto read = [&](std::uint32_t p) {
    return read_across<1, Read>(row.from, head + std::uint64_t{p} * 16, row.elements);
  };
  const auto place = [&](std::uint32_t p) { return row.to + head + std::uint64_t{p} * 16; };
  std::uint32_t p = lane;
  for (; p + (at_once - 1) * lanes < packets; p += at_once * lanes) {
    packet<16> in[at_once];
    LLMMEM_UNROLL
    for (unsigned i = 0; i < at_once; ++i)
      in[i] = read(p + i * lanes);
    LLMMEM_UNROLL
    for (unsigned i = 0; i < at_once; ++i)
      store_packet<16, Write>(place(p + i * lanes), in[i]);
  }
  for (; p < packets; p += lanes)
    store_packet<16, Write>(place(p), read(p));
  const auto by_pieces = [&]<unsigned Bytes>(std::uint32_t first, std::uint32_t end) {
    for (std::uint32_t at = first + lane * Bytes; at < end; at += lanes * Bytes)
      store_packet<Bytes, Write>(row.to + at, load_packet<Bytes, Read>(row.from + at));
  };
  const std::uint32_t tail = head + packets * 16;
  const std::uint32_t whole = (row.elements - tail) / N * N + tail;
  by_pieces.template operator()<N>(0, head);
  by_pieces.template operator()<N>(tail, whole);
  if constexpr (N > 1) by_pieces.template operator()<1>(whole, row.elements);
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
