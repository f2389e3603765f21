/// @file
/// `refit_part`: a rule applied to two tensors; and the options of a plan.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/sharding/element_runs.hpp>
#include <llmmem/sharding/ids.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// The elements at positions 0, 1, ... of `from` in `source` become those of `to` in `target`.
struct refit_part {
  tensor_id source{};
  tensor_id target{};
  element_runs from{};
  element_runs to{};
  dtype wire = dtype::bf16;  ///< the form in which they travel
};

/// What is decided before a plan is made, alike on all ranks.
struct refit_plan_options {
  /// The most memory that a rank has for tensors that it quantises on arrival, in the form in which they
  /// travel. More of it means fewer rounds.
  std::uint64_t arrival_bytes = std::uint64_t{256} << 20;
  /// Whether receivers also keep quantised tensors in the form in which they arrive, all of them at once and
  /// beyond `arrival_bytes`: then these have a base, too, and travel as changes.
  bool keeps_arrivals = false;
  /// `bf16` or `f16`: f32 sources of quantised tensors are rounded to it and travel so, in half of the bytes.
  dtype quantizes_from = dtype::f32;
};

}  // namespace v0
}  // namespace llmmem
