/// @file
/// Muon: momentum whose matrix is made nearly orthogonal by five Newton-Schulz steps, with fixed-order
/// products.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/result.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

/// A row-major matrix of two rows and columns or more. Vectors, embeddings and heads take another optimizer,
/// which the caller names: no function here falls back to one.
struct muon_shape {
  std::uint64_t rows = 0;
  std::uint64_t columns = 0;

  [[nodiscard]] constexpr std::uint64_t elements() const noexcept { return rows * columns; }
  [[nodiscard]] constexpr std::uint64_t shorter() const noexcept { return rows < columns ? rows : columns; }
  /// Returns the floats that `orthogonalize` needs: three matrices, and two squares of the shorter side.
  [[nodiscard]] constexpr std::uint64_t scratch() const noexcept {
    return 3 * elements() + 2 * shorter() * shorter();
  }
};

/// The settings of a step.
struct muon_hyper {
  double rate = 0.02;
  double momentum = 0.95;
  double weight_decay = 0;
  double epsilon = 1e-7;        ///< the least norm that a matrix is divided by
  float gradient_scale = 1.0F;  ///< multiplies each gradient: 1 / loss scale, times the clipping factor
};

/// Runs all rows on the calling thread.
struct rows_in_turn {
  template <class Act>
  void operator()(std::uint64_t rows, const Act& act) const noexcept {
    act(std::uint64_t{0}, rows);
  }
};

// A step of a matrix of r rows and c columns is `muon_momentum`, `orthogonalize` and `muon_apply`:
//
//     g = gradient * gradient_scale
//     M = momentum * M + (1 - momentum) * g                                   the state
//     U = momentum * M + (1 - momentum) * g                                   Nesterov's step
//     X = U / max(norm of U, epsilon); if r > c, X is its transpose from here on
//     5 times: A = X X^T;  B = -4.775 A + 2.0315 (A A);  X = 3.4445 X + B X
//     w = (1 - rate * weight_decay) * w - rate * sqrt(max(1, r / c)) * X
//
// The norm is an `unordered_sum`, rounded once to a float. Everything else is floats, and no bf16: each
// product and each sum is rounded once, and no product is fused into a sum. A product of matrices adds over
// the inner index from 0 up. So the bits depend neither on threads nor on the compiler, as long as it keeps
// IEEE arithmetic (no -ffast-math).
//
// The first and the last phase may be called for pieces; the second needs the whole matrix, on one rank
// (`whole_matrices`). Gradients that are not finite make the whole matrix NaN, and its momentum: decide
// before the first phase (`decide_step`). All spans are of host memory; muon_phases.hpp has the same phases
// on a device.
//
// Errors: `errc::size_mismatch` for spans of different lengths, or of another one than the shape's;
// `errc::out_of_range` for a matrix with fewer than two rows or columns, or more than 2^31 elements. Then
// nothing has changed.
//
// Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; the rule and its constants
// are those of torch.optim.Muon.

/// Changes momentum by gradients, and writes the updates for `orthogonalize`.
/// @par Complexity   O(elements).
[[nodiscard]] result<void> muon_momentum(std::span<const float> gradients, std::span<float> momentum,
                                         std::span<float> updates, const muon_hyper& hyper) noexcept;

/// Replaces a matrix by one whose singular values are near 1.
/// @param scratch  of `shape.scratch()` floats; its contents do not matter.
/// @param in_rows  calls its second argument for ranges of rows that cover 0 to its first argument, also on
///                 several threads at a time, and returns when all are done.
/// @par Complexity   5 (2 m^2 n + m^3) multiplications, with m the shorter and n the longer side:
///      `newton_schulz_cost`.
template <class InRows = rows_in_turn>
[[nodiscard]] result<void> orthogonalize(const muon_shape& shape, std::span<float> matrix,
                                         std::span<float> scratch, const muon_hyper& hyper = {},
                                         const InRows& in_rows = {}) noexcept;

/// Changes weights by an orthogonal update.
/// @param shape  of the whole matrix; the spans may be a piece of it.
/// @par Complexity   O(elements).
[[nodiscard]] result<void> muon_apply(const muon_shape& shape, std::span<float> weights,
                                      std::span<const float> updates, const muon_hyper& hyper) noexcept;

}  // namespace v0
}  // namespace llmmem

#include <llmmem/kernels/detail/muon_body.hpp>
