/// @file
/// `optimizer_step`: one step of an optimizer on a piece of a tensor, with the same bits on host and device
/// and for every cut into pieces.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/optimizer_types.hpp>
#include <llmmem/model/optimizer_form.hpp>
#include <llmmem/result.hpp>

namespace llmmem {
inline namespace v0 {

/// Changes weights and state by one step.
///
/// With t the step, and constants that are computed as doubles and rounded once to floats:
///
///     share1 = 1 - mean_decay, share2 = 1 - variance_decay, keep = 1 - rate * weight_decay
///     size = rate / (1 - mean_decay^t), correction = 1 / (1 - variance_decay^t)
///     g = gradient * gradient_scale
///     m = mean_decay * m + share1 * g
///     v = variance_decay * v + (share2 * g) * g
///     w = keep * w - (size * m) / (sqrt(v * correction) + epsilon)       AdamW: decay before the step
///
///     m = mean_decay * m + g;  w = keep * w - rate * m                   SGD
///
/// Each operation is rounded once to a float, in this order: no product is fused into a sum. epsilon is added
/// to the root, not under it. Weight decay is decoupled in both rules; SGD has no dampening and no Nesterov
/// step. A NaN is stored as 0x7FC00000. So host and device have the same bits, as long as the caller's
/// compiler keeps IEEE arithmetic: no -ffast-math, and for clang++ no -ffp-contract=fast, with which it fuses
/// also where a pragma forbids that (g++ may have it, its default).
///
/// - **Split16.** high = bits >> 16, plus 1 if bit 15 is set (ties go away from zero); low = the lower 16
///   bits. The step undoes this, so weights have the bits of `adamw`. high alone is an infinity for finite
///   weights above 0x7F7F7FFF: save both halves.
/// - **Stochastic.** The result is rounded away from zero with the probability of its lower 16 bits / 2^16.
///   The random bits depend on the seed, the step and the element's index in the tensor.
/// - **8 bit.** Codes are those of dynamic quantisation; they are restored as `value(code) * scale`. Weights
///   change by the unrounded moments. The new scale of a group is its largest moment (0 where all are 0, at
///   least 2^-126), and each moment becomes the code nearest to moment * (1 / scale), of two equally near the
///   lower one. A restored mean differs by at most 0.00703 of the group's scale, a variance by at most
///   0.00352. A variance above 0 is restored as at least 3.25e-7 of the scale, never as 0, so that no step
///   divides a mean by epsilon alone. A group with a moment that is not finite is restored as NaNs.
///
/// @param run  `host_executor` or `device_executor`; all pointers are of its memory.
/// @pre the outputs overlap no other memory of the call
/// @pre hyper's rate, decays, epsilon and gradient_scale are finite; the two decays of moments are below 1
/// @return `errc::size_mismatch` for gradients of another length; `errc::no_conversion` for gradients that
///      are neither f32 nor bf16; `errc::too_short` for a null array; `errc::bad_granularity` for an array
///      that is not aligned to its element, and for a piece that does not begin at a multiple of
///      `cut_multiple`; `errc::out_of_range` for step 0, for a `first` or `count` of 2^60 or more, and for
///      `adafactor` and `muon`, which need whole matrices: see `adafactor_add` and `muon_momentum`. Then
///      nothing has begun. Otherwise the result of `run`. Without elements it does nothing.
/// @par Complexity   each byte read once and written once.
/// @par Thread safety   any number at once, on different pieces.
/// @par Source   Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019 (arXiv 1711.05101);
///      Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021 (arXiv 2110.02861); Zamirai et
///      al., "Revisiting BFloat16 Training", 2020 (arXiv 2010.06192).
template <class Run>
result<void> optimizer_step(const Run& run, optimizer_form form, const optimizer_piece& piece,
                            const gradient_piece& gradients, const optimizer_hyper& hyper);

/// Sets a piece's weights to floats (bf16 weights are rounded to nearest even, split ones are exact), and its
/// state to a fresh one. Errors as `optimizer_step`.
template <class Run>
result<void> optimizer_begin(const Run& run, optimizer_form form, const optimizer_piece& piece,
                             const float* weights);

/// Writes a piece's weights as floats; for `adamw_split16`, both halves joined. Errors as `optimizer_step`.
template <class Run>
result<void> optimizer_weights(const Run& run, optimizer_form form, const optimizer_piece& piece,
                               float* weights);

}  // namespace v0
}  // namespace llmmem

#include <llmmem/kernels/detail/optimizer_step_body.hpp>
