/// @file
/// The layers as a catalogue, the layers whose weights a step reads, and the plan to gather them ahead.
#pragma once

#include <llmmem/sharding/gather_schedule.hpp>
#include <llmmem/sharding/tensor_shape.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "train_gpt/layer_parts.hpp"
#include "train_gpt/shape.hpp"
#include "train_gpt/stores.hpp"

namespace train_gpt {

/// The pieces of the state as a catalogue: one tensor each, so that a layer is one range of the flat space.
[[nodiscard]] inline std::vector<llmmem::tensor_facts> layer_catalogue(const gpt_shape& shape,
                                                                       std::uint32_t value_bytes) {
  std::vector<llmmem::tensor_facts> all;
  for (std::size_t i = 0; i < shape.parts(); ++i) {
    all.push_back({"layer " + std::to_string(i),
                   llmmem::tensor_shape::vector(part_elements(shape, static_cast<std::uint32_t>(i))),
                   value_bytes});
  }
  return all;
}

/// The same of a kind of their state.
[[nodiscard]] inline std::vector<llmmem::tensor_facts> state_catalogue(const gpt_shape& shape,
                                                                       state_kind kind,
                                                                       std::uint32_t value_bytes) {
  std::vector<llmmem::tensor_facts> all;
  for (std::size_t i = 0; i < shape.parts(); ++i) {
    all.push_back({"state of layer " + std::to_string(i),
                   llmmem::tensor_shape::vector(state_layout(shape, shape.layer(i), kind).elements),
                   value_bytes});
  }
  return all;
}

/// The layers whose weights a step reads, in order.
[[nodiscard]] inline std::vector<std::uint32_t> weight_reads(const gpt_shape& shape) {
  std::vector<std::uint32_t> layers;
  for (const step_event& each : step_schedule(shape, update_time::after_backward)) {
    if (each.what == step_event::call::acquire && each.kind == state_kind::weights &&
        each.mode == lease_mode::read)
      layers.push_back(to_index(each.layer));
  }
  return layers;
}

/// Plans the gathers of a step's weights, each `ahead` reads before the layer's own. They have memory for
/// that many consecutive layers plus one; complete layers that are used again soon stay, such as the last
/// ones of the forward pass.
[[nodiscard]] inline llmmem::schedule_plan plan_weight_gathers(std::span<const llmmem::tensor_facts> layers,
                                                               std::span<const std::uint32_t> reads,
                                                               std::uint32_t ahead) {
  std::vector<std::uint64_t> bytes;
  for (const llmmem::tensor_facts& each : layers)
    bytes.push_back(each.bytes());
  std::vector<llmmem::gather_use> uses;
  std::uint64_t budget = 0;
  for (std::size_t i = 0; i < reads.size(); ++i) {
    uses.push_back({.scope = reads[i], .compute_ns = bytes[reads[i]]});
    std::uint64_t together = 0;
    for (std::size_t k = i; k < reads.size() && k <= i + ahead; ++k)
      together += bytes[reads[k]];
    budget = std::max(budget, together);
  }
  // By count and not by time, so any link model works, if it is the same on all ranks.
  return llmmem::plan_gathers(bytes, uses, budget, {.bytes_per_second = 1'000'000'000},
                              llmmem::schedule::lookahead{.accesses = ahead});
}

}  // namespace train_gpt
