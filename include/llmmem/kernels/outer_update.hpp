/// @file
/// `outer_update`: the arithmetic of an outer step of workers that train apart, for `outer_rounds`.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/optimizer_arithmetic.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

/// The optimizer of the outer steps. The defaults are those of DiLoCo.
struct outer_hyper {
  float rate = 0.7F;        ///< 1 without momentum: the workers take the mean of their weights
  float momentum = 0.9F;    ///< from 0 to below 1
  bool nesterov = true;     ///< the step looks ahead by one momentum
  float keep_local = 0.0F;  ///< the share of a worker's own weights that it keeps, from 0 to below 1
};

/// Changes momentum, base weights and a worker's weights. In floats, each operation rounded once:
///
///     g = sum / workers
///     m = momentum * m + g
///     base = base - rate * (nesterov ? g + momentum * m : m)
///     weights = base + keep_local * (weights - base)
///
/// @param sums     of all workers' changes, base weights - weights
/// @param workers  in the sum, at least 1
/// @pre all spans have one length, and overlap in nothing
/// @par Complexity      O(elements).
/// @par Thread safety   any number at once, on different elements.
inline void outer_update(std::span<const float> sums, std::uint32_t workers, const outer_hyper& by,
                         std::span<float> momentum, std::span<float> base,
                         std::span<float> weights) noexcept {
  const auto count = static_cast<float>(workers);
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const float mean = sums[i] / count;
    const float m = detail::unfused(by.momentum, momentum[i]) + mean;
    const float step = by.nesterov ? mean + detail::unfused(by.momentum, m) : m;
    const float b = base[i] - detail::unfused(by.rate, step);
    momentum[i] = m;
    base[i] = b;
    weights[i] = by.keep_local == 0 ? b : b + detail::unfused(by.keep_local, weights[i] - b);
  }
}

}  // namespace v0
}  // namespace llmmem
