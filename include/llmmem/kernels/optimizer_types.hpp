/// @file
/// The inputs and outputs of an optimizer step: a piece of a tensor, its gradients, and the step's settings.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/model/dtype.hpp>

#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// Some consecutive elements of a tensor: the addresses of its weights and its state. `widths_of` says how
/// wide the elements of each array are; an array of width 0 is not read, and may be null. Arrays of scales
/// have a float for each group. Zero bytes are fresh moments and scales; weights come from `optimizer_begin`.
struct optimizer_piece {
  std::byte* weights = nullptr;
  std::byte* low = nullptr;
  std::byte* mean = nullptr;
  std::byte* variance = nullptr;
  std::byte* mean_scales = nullptr;
  std::byte* variance_scales = nullptr;
  std::uint64_t first = 0;  ///< index of its first element in the whole tensor
  std::uint64_t count = 0;
};

/// A piece's gradients: `f32` or `bf16`.
struct gradient_piece {
  const std::byte* data = nullptr;
  dtype element = dtype::f32;
  std::uint64_t count = 0;
};

/// The settings of a step, the same for all pieces of a tensor.
struct optimizer_hyper {
  double rate = 1e-3;
  double mean_decay = 0.9;  ///< for SGD: the momentum
  double variance_decay = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 0;
  std::uint64_t step = 1;       ///< the run's step, from 1
  float gradient_scale = 1.0F;  ///< multiplies each gradient: 1 / loss scale, times the clipping factor
  std::uint64_t seed = 0;       ///< seeds stochastic rounding: one for each tensor
};

}  // namespace v0
}  // namespace llmmem
