/// @file
/// `exact_sum_work`: what kernels share whose warps add numbers to an `unordered_sum`.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/items.hpp>
#include <llmmem/kernels/unordered_sum.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// A base of such a `group_work`: a lane adds its numbers in `take`, the lanes' sums are merged, and `give`
/// uses the sum of an item.
class exact_sum_work {
 public:
  using partial = unordered_sum;
  using held = unordered_sum;

  [[nodiscard]] LLMMEM_HD std::uint32_t lanes() const noexcept { return warp_threads; }
  [[nodiscard]] static LLMMEM_HD partial measure(const held& mine) noexcept { return mine; }
  [[nodiscard]] static LLMMEM_HD partial combine(const partial& a, const partial& b) noexcept {
    partial both = a;
    both.merge(b);
    return both;
  }
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
