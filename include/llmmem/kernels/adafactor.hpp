/// @file
/// Adafactor: one step of an optimizer that keeps a factor for each row and column of a matrix, in phases, so
/// that no cut of a tensor into pieces changes a bit.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/optimizer_types.hpp>
#include <llmmem/kernels/unordered_sum.hpp>
#include <llmmem/model/optimizer_form.hpp>
#include <llmmem/result.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

/// A row-major tensor as rows x columns; a vector has one of the two.
struct adafactor_shape {
  std::uint64_t rows = 1;
  std::uint64_t columns = 0;

  [[nodiscard]] constexpr std::uint64_t elements() const noexcept { return rows * columns; }
  [[nodiscard]] constexpr bool is_factored() const noexcept { return rows > 1 && columns > 1; }
  /// Returns the floats of the tensor's state: rows first, then columns; of a vector, its elements.
  [[nodiscard]] constexpr std::uint64_t factors() const noexcept { return factor_count(rows, columns); }
  /// Returns the sums of a step: one for each float of the state, and that of the weights.
  [[nodiscard]] constexpr std::uint64_t sums() const noexcept { return factors() + 1; }
};

/// The settings of a step, the same for all pieces of a tensor.
struct adafactor_hyper {
  double rate = 1e-2;        ///< the largest relative step
  double least_size = 1e-3;  ///< steps are relative to the weights' root mean square, or to this (eps2)
  double least_square =
      0x1p-23;      ///< eps1; PyTorch takes the epsilon of the gradients' type, this one for floats
  double clip = 1;  ///< the largest root mean square of an update (d)
  double weight_decay = 0;
  std::uint64_t step = 1;       ///< the run's step, from 1
  float gradient_scale = 1.0F;  ///< multiplies each gradient: 1 / loss scale, times the clipping factor
};

/// What `adafactor_factors` computes of a whole tensor for its pieces.
struct adafactor_terms {
  double row_mean = 1;  ///< the divisor of rows
  double size = 0;      ///< of the step, before updates are clipped
  double clipped = 0;   ///< the same, after that: `adafactor_apply` on an executor keeps it here
};

// A step of a tensor has four phases. Each is called for all pieces of the tensor before the next one begins:
//
//     adafactor_add          adds squares of gradients and weights to `sums`, which the ranks merge
//     adafactor_factors      changes the state by `sums`, once for each copy of it
//     adafactor_add_updates  adds squares of updates to one sum, which the ranks merge
//     adafactor_apply        changes the piece's weights
//
// With t the step, of a matrix with r rows and c columns:
//
//     share = t^-0.8, keep = 1 - rate * weight_decay
//     g = gradient * gradient_scale
//     R_i = (1 - share) * R_i + share * (mean of g^2 in row i);  C_j in the same way for column j
//     row_mean = max(mean of all R_i, least_square, 2^-126)
//     V_ij = (R_i / row_mean) * C_j
//     U_ij = g_ij / sqrt(max(V_ij, least_square^2, 2^-126))
//     size = max(least_size, rms(w)) * min(rate, 1 / sqrt(t)) / max(1, rms(U) / clip)
//     w = keep * w - size * U
//
// rms is the root of the mean of squares; that of the weights is taken before decay. A vector has a state V_j
// for each element, (1 - share) * V_j + share * g_j^2. The rule is PyTorch's, which divides V_ij by the mean
// after it has multiplied the factors; here small gradients do not underflow there.
//
// Sums are `unordered_sum`s; means, roots and constants are doubles. g, the state, R_i / row_mean, V, U, size
// and keep are each rounded once to a float, and so is each operation on them. So the bits depend neither on
// pieces, which may begin and end anywhere, nor on threads, ranks or the compiler, as long as it keeps IEEE
// arithmetic (no -ffast-math).
//
// The whole state takes so few bytes that each rank keeps all of it: the merged sums are alike, and so is the
// state. A gradient that is not finite, or a mean of squares that no float holds, makes all weights of its
// tensor NaN, and its state: decide before the first phase (`decide_step`).
//
// All pointers are of host memory; `adafactor_phases.hpp` has the same phases on a device. Gradients are
// `f32` or `bf16`; of a piece, `weights`, `first` and `count` are used.
//
// Errors: `errc::size_mismatch` for gradients of another length than the piece, or spans of another length
// than `adafactor_shape` has; `errc::no_conversion` for gradients that are neither f32 nor bf16;
// `errc::too_short` for a null array; `errc::bad_granularity` for one that is not aligned to its element;
// `errc::out_of_range` for step 0, a tensor of more than 2^31 elements and a piece that ends outside of it.
// Then nothing has changed.
//
// Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", 2018 (arXiv
// 1804.04235); torch/optim/_adafactor.py for the defaults and for the order of decay.

/// Adds the squares of a piece's gradients and weights.
/// @param sums  of `shape.sums()`; all zero (`unordered_sum{}`) before the tensor's first piece. Threads that
///              add concurrently have their own, and merge them.
/// @par Complexity   O(1) for each element; reads weights and gradients once.
[[nodiscard]] result<void> adafactor_add(const adafactor_shape& shape, const optimizer_piece& piece,
                                         const gradient_piece& gradients, const adafactor_hyper& hyper,
                                         std::span<unordered_sum> sums) noexcept;

/// Changes a copy of the tensor's state by the sums of all its pieces.
/// @param factors  of `shape.factors()`, zero before the first step.
/// @par Complexity   O(rows + columns); of a vector, O(elements).
[[nodiscard]] result<adafactor_terms> adafactor_factors(const adafactor_shape& shape,
                                                        std::span<const unordered_sum> sums,
                                                        const adafactor_hyper& hyper,
                                                        std::span<float> factors) noexcept;

/// Adds the squares of a piece's updates.
/// @param updates  zero before the tensor's first piece.
[[nodiscard]] result<void> adafactor_add_updates(const adafactor_shape& shape, const optimizer_piece& piece,
                                                 const gradient_piece& gradients,
                                                 const adafactor_hyper& hyper, std::span<const float> factors,
                                                 const adafactor_terms& terms,
                                                 unordered_sum& updates) noexcept;

/// Changes a piece's weights.
/// @param updates  of all the tensor's pieces.
[[nodiscard]] result<void> adafactor_apply(const adafactor_shape& shape, const optimizer_piece& piece,
                                           const gradient_piece& gradients, const adafactor_hyper& hyper,
                                           std::span<const float> factors, const adafactor_terms& terms,
                                           const unordered_sum& updates) noexcept;

}  // namespace v0
}  // namespace llmmem

#include <llmmem/kernels/detail/adafactor_body.hpp>
