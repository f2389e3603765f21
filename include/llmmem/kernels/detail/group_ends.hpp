/// @file
/// Where the packets of groups are.
#pragma once

#include <llmmem/config.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Packets of groups, by row and place in the row.
template <class Byte>
struct group_end {
  Byte* data = nullptr;
  std::uint64_t row_stride = 0;
  std::uint32_t group_bytes = 0;
  std::uint32_t width = 1;  ///< the alignment of every packet

  [[nodiscard]] LLMMEM_HD Byte* at(std::uint64_t row, std::uint64_t group,
                                   std::uint64_t in_group) const noexcept {
    return data + row * row_stride + group * group_bytes + in_group;
  }
};

/// Values, codes and scales of groups, some read and others written.
template <class Value, class Code>
struct group_ends {
  group_end<Value> values;
  group_end<Code> codes;
  group_end<Code> scales;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
