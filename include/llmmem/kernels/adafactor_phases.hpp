/// @file
/// Adafactor's phases on an executor: the arrays are in a device's memory, or in a host's, and the bits are
/// those of adafactor.hpp.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/adafactor.hpp>
#include <llmmem/kernels/optimizer_types.hpp>
#include <llmmem/kernels/unordered_sum.hpp>
#include <llmmem/result.hpp>

#include <algorithm>
#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// What a tensor's phases use, in the executor's memory.
struct adafactor_arrays {
  float* factors = nullptr;          ///< of `shape.factors()`: the state, zero before the first step
  unordered_sum* sums = nullptr;     ///< of `adafactor_sums(shape)`
  adafactor_terms* terms = nullptr;  ///< one
};

/// Returns how many sums of 40 bytes a tensor needs: `shape.sums()`, that of the updates after them, then
/// scratch. For a matrix of r rows and c columns the scratch is max(r, c * min(16, ceil(r / 64))), and for a
/// vector its elements.
[[nodiscard]] constexpr std::uint64_t adafactor_sums(const adafactor_shape& shape) noexcept;

// A step of a tensor:
//
//     adafactor_begin        clears the sums
//     adafactor_add          adds squares of a piece's gradients and weights
//                            then the ranks merge the first `shape.sums()` of `sums`
//     adafactor_factors      changes the state and the terms
//     adafactor_add_updates  adds squares of a piece's updates
//                            then the ranks merge `sums[shape.sums()]`
//     adafactor_apply        changes the piece's weights
//
// Each phase is several kernels in the order of `run`, and none waits. Pieces of one tensor share its
// arrays, so their phases run one after the other. Sums are trivially copyable, and merge in any order.
//
// A column's squares are added by one thread for each of up to 16 bands of rows; a row's, and those of
// weights and updates, by a warp. There are no atomic operations.
//
// Errors: as adafactor.hpp's, `errc::too_short` also for null arrays; and those of `run`.

/// Clears the sums, before the tensor's first piece.
/// @par Complexity   O(rows + columns).
template <class Run>
result<void> adafactor_begin(const Run& run, const adafactor_shape& shape, const adafactor_arrays& arrays);

/// Adds the squares of a piece's gradients and weights.
/// @par Complexity   reads gradients twice and weights once.
template <class Run>
result<void> adafactor_add(const Run& run, const adafactor_shape& shape, const optimizer_piece& piece,
                           const gradient_piece& gradients, const adafactor_hyper& hyper,
                           const adafactor_arrays& arrays);

/// Changes the state by the sums of all pieces, and computes the terms.
/// @par Complexity   O(rows + columns); of a vector, O(elements).
template <class Run>
result<void> adafactor_factors(const Run& run, const adafactor_shape& shape, const adafactor_hyper& hyper,
                               const adafactor_arrays& arrays);

/// Adds the squares of a piece's updates.
/// @par Complexity   reads gradients once.
template <class Run>
result<void> adafactor_add_updates(const Run& run, const adafactor_shape& shape, const optimizer_piece& piece,
                                   const gradient_piece& gradients, const adafactor_hyper& hyper,
                                   const adafactor_arrays& arrays);

/// Changes a piece's weights.
/// @par Complexity   reads gradients and weights once, and writes weights.
template <class Run>
result<void> adafactor_apply(const Run& run, const adafactor_shape& shape, const optimizer_piece& piece,
                             const gradient_piece& gradients, const adafactor_hyper& hyper,
                             const adafactor_arrays& arrays);

}  // namespace v0
}  // namespace llmmem

#include <llmmem/kernels/detail/adafactor_phases_body.hpp>
