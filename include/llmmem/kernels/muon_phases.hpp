/// @file
/// Muon's phases on an executor: momentum, Newton-Schulz steps and weights in a device's memory, or in a
/// host's, with the bits of muon.hpp.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/muon.hpp>
#include <llmmem/result.hpp>

#include <span>

namespace llmmem {
inline namespace v0 {

// The three phases of muon.hpp as kernels in the order of `run`; none waits. All spans are of the executor's
// memory.
//
// A product of matrices adds over the inner index from 0 up, each product and each sum rounded once, as on
// the host. A thread computes a tile of 8 x 4 elements in registers: for each inner index it reads 4
// neighbouring elements of the right matrix and, as all threads of the same rows do, 8 of the left one. So a
// step runs at the rate of separate multiplications and additions, half that of fused ones. Tensor cores
// would take the products as bf16, at about 15 times the rate of an H100's float multiplications and
// additions (989 and 67 TFLOP/s, NVIDIA's data sheet, dense); PyTorch and Jordan et al. do that. Their sums
// have another order, and factors of 8 bits: bits would no longer show that a device, or another split, makes
// the host's step.
//
// Errors: as muon.hpp's, and those of `run`.

/// Changes momentum by gradients, and writes the updates for `orthogonalize`.
/// @par Complexity   O(elements).
template <class Run>
result<void> muon_momentum(const Run& run, std::span<const float> gradients, std::span<float> momentum,
                           std::span<float> updates, const muon_hyper& hyper);

/// Replaces a matrix by one whose singular values are near 1.
/// @param scratch  of `shape.scratch()` floats; its contents do not matter.
/// @par Complexity   5 (2 m^2 n + m^3) multiplications, with m the shorter and n the longer side:
///      `newton_schulz_cost`.
template <class Run>
result<void> orthogonalize(const Run& run, const muon_shape& shape, std::span<float> matrix,
                           std::span<float> scratch, const muon_hyper& hyper = {});

/// Changes weights by an orthogonal update.
/// @param shape  of the whole matrix; the spans may be a piece of it.
/// @par Complexity   O(elements).
template <class Run>
result<void> muon_apply(const Run& run, const muon_shape& shape, std::span<float> weights,
                        std::span<const float> updates, const muon_hyper& hyper);

}  // namespace v0
}  // namespace llmmem

#include <llmmem/kernels/detail/muon_phases_body.hpp>
