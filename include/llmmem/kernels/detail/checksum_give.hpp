/// @file
/// Blocks of a list of checksums, and where their sums go.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/block_lists.hpp>
#include <llmmem/kernels/packet.hpp>

#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Returns a block of a list, cut to the list's longest.
template <block_list Blocks>
[[nodiscard]] LLMMEM_HD inline copy_task block_of(const Blocks& blocks, std::uint64_t number,
                                                  std::uint64_t longest) noexcept {
  copy_task out = blocks[number];
  if (out.bytes > longest) out.bytes = longest;
  return out;
}

template <class Value>
LLMMEM_HD inline void write_sum(Value* to, Value sum) noexcept {
  packet<sizeof(Value)> out;
  for (unsigned i = 0; i < sizeof(Value) / 4; ++i)
    out.words[i] = static_cast<std::uint32_t>(std::uint64_t{sum} >> (32 * i));
  store_packet<sizeof(Value)>(reinterpret_cast<std::byte*>(to), out);
}

/// Gives a tile's part to its block's sum: the whole, where one tile is all of a block; else added, if the
/// block has the tile.
template <class Sum>
LLMMEM_HD inline void give_sum(const Sum& sum, bool is_only_tile, bool is_there, std::uint64_t bytes,
                               typename Sum::value part, typename Sum::value& out) noexcept {
  if (is_only_tile) {
    write_sum(&out, Sum::join(part, sum.start(bytes)));
  } else if (is_there) {
    Sum::join_to(out, part);
  }
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
