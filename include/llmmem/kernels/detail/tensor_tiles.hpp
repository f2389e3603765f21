/// @file
/// Products of small matrices whose elements are spread over the lanes of a warp: by a device's tensor cores,
/// and the same products on a host.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/float_steps.hpp>
#include <llmmem/kernels/elements.hpp>
#include <llmmem/kernels/lanes.hpp>
#include <llmmem/model/dtype.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

// Lane 4 g + t, with g below 8 and t below 4, has of a product of 16 x 16 by 16 x 8 elements of 16 bits, two
// to a word and the first in its lower half:
//
//   left   word 0: row g, columns 2t and 2t + 1;  1: row g + 8;  2 and 3: the same of columns 2t + 8, 2t + 9
//   right  word 0: rows 2t and 2t + 1 of column g;  1: rows 2t + 8, 2t + 9
//   sum    row g, columns 2t and 2t + 1;  row g + 8, the same
//
// This is `mma.m16n8k16` of PTX ISA 9.0, section 9.7.14.5.8.
struct tensor_left {
  std::uint32_t word[4];
};
struct tensor_right {
  std::uint32_t word[2];
};
struct tensor_sum {
  float of[4];
};

/// Types of 16 bits that tensor cores multiply.
template <dtype E>
concept tensor_element = E == dtype::bf16 || E == dtype::f16;

/// sum += left x right. All lanes have met before. Products are exact; the order and precision of their sum
/// depend on the device; here they are a host's.
template <dtype E>
  requires tensor_element<E>
LLMMEM_HD void multiply_add(const host_lanes& group, host_lanes::held<tensor_sum>& sum,
                            const host_lanes::held<tensor_left>& left,
                            const host_lanes::held<tensor_right>& right) noexcept {
  const auto half = [](std::uint32_t word, std::uint32_t which) {
    const float_pair both = floats_of_pair<E>(word);
    return which == 0 ? both.first : both.second;
  };
  group.each([&](std::uint32_t lane) {
    for (std::uint32_t i = 0; i < 4; ++i) {
      const std::uint32_t row = lane / 4 + i / 2 * 8;
      const std::uint32_t column = lane % 4 * 2 + i % 2;
      for (std::uint32_t k = 0; k < 16; ++k) {
        const std::uint32_t t = k % 8 / 2;
        const float a = half(left[row % 8 * 4 + t].word[row / 8 + k / 8 * 2], k % 2);
        const float b = half(right[column * 4 + t].word[k / 8], k % 2);
        sum[lane].of[i] = fused(a, b, sum[lane].of[i]);
      }
    }
  });
}

/// Lane 4 g + t, which has elements 2t and 2t + 1 of row g of 8 x 8 elements of 16 bits, gets those of column
/// g. This is `movmatrix` of PTX ISA 9.0, section 9.7.14.5.17.
LLMMEM_HD inline void transpose(const host_lanes& group, host_lanes::held<std::uint32_t>& words) noexcept {
  const host_lanes::held<std::uint32_t> before = words;
  group.each([&](std::uint32_t lane) {
    std::uint32_t out = 0;
    for (std::uint32_t i = 0; i < 2; ++i) {
      const std::uint32_t row = lane % 4 * 2 + i;
      const std::uint32_t column = lane / 4;
      const std::uint32_t element = before[row * 4 + column / 2] >> (column % 2 * 16) & 0xFFFFU;
      out |= element << (i * 16);
    }
    words[lane] = out;
  });
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
