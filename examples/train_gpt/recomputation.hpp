/// @file
/// The kept part of each layer's activations, by the run's settings.
#pragma once

#include <llmmem/training/kept_records.hpp>
#include <llmmem/training/recompute_plan.hpp>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "train_gpt/command_line.hpp"
#include "train_gpt/shape.hpp"

namespace train_gpt {

/// The plan of a run's records, by layer from 1 on.
struct planned_records {
  std::vector<llmmem::record_choices> choices{};
  llmmem::recompute_plan plan{};
  std::vector<llmmem::record_form> forms{};
};

namespace detail {

/// The forms of a layer's record: complete; for a block, without attention's probabilities; only its input.
/// Costs are multiplications.
[[nodiscard]] inline std::pair<llmmem::record_choices, std::vector<llmmem::record_form>> ways_of(
    const gpt_shape& shape, layer_id layer) {
  const layer_layout layout = activation_layout(shape, layer);
  const std::uint64_t all = layout.elements * sizeof(float);
  const std::uint64_t input = input_elements(shape) * sizeof(float);
  const std::uint64_t tokens = shape.tokens();
  std::pair<llmmem::record_choices, std::vector<llmmem::record_form>> made;
  made.first.bytes = all;
  const auto add = [&](std::uint64_t cost, llmmem::record_form form) {
    made.first.ways.push_back({form.kept_bytes(), cost});
    made.second.push_back(std::move(form));
  };
  add(0, {.bytes = all, .kept = {}});
  if (layer == shape.head()) {
    add(tokens * shape.width * vocabulary, {.bytes = all, .kept = {{0, input}}});
    return made;
  }
  const std::uint64_t attention = 2 * tokens * shape.context * shape.width;
  const tensor_place& dropped = layout.tensors[static_cast<std::size_t>(block_activation::probabilities)];
  const std::uint64_t begin = dropped.offset * sizeof(float);
  const std::uint64_t end = begin + dropped.rows * dropped.columns * sizeof(float);
  add(attention, {.bytes = all, .kept = {{0, begin}, {end, all - end}}});
  add(attention + tokens * shape.width * (4 * shape.width + shape.inner()),
      {.bytes = all, .kept = {{0, input}}});
  return made;
}

}  // namespace detail

/// @throws llmmem::argument_error  for a budget that no choice meets, with the smallest possible one.
[[nodiscard]] inline planned_records plan_records(const gpt_shape& shape, const recompute_options& asked) {
  planned_records all;
  std::vector<std::vector<llmmem::record_form>> forms;
  for (std::size_t i = 1; i < shape.layers(); ++i) {
    auto [choices, of_layer] = detail::ways_of(shape, shape.layer(i));
    all.choices.push_back(std::move(choices));
    forms.push_back(std::move(of_layer));
  }
  if (asked.kind == recompute_kind::budget) {
    all.plan = llmmem::plan_recompute(all.choices, asked.budget_bytes);
  } else {
    // The head's record is used right after its forward pass, so it is always complete.
    for (std::size_t i = 0; i < forms.size(); ++i) {
      const std::uint32_t way = asked.kind == recompute_kind::none || i + 1 == forms.size() ? 0
                                : asked.kind == recompute_kind::selective                   ? 1
                                                                                            : 2;
      all.plan.ways.push_back(way);
      all.plan.rebuild_ns += all.choices[i].ways[way].rebuild_ns;
    }
    all.plan.peak_bytes = llmmem::peak_of(all.choices, all.plan.ways);
  }
  for (std::size_t i = 0; i < forms.size(); ++i)
    all.forms.push_back(std::move(forms[i][all.plan.ways[i]]));
  return all;
}

}  // namespace train_gpt
