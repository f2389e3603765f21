/// @file
/// The kept part of each layer's activations, by the run's settings.
#pragma once

#include <llmmem/training/kept_records.hpp>
#include <llmmem/training/recompute_plan.hpp>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "train_gpt/activation_codec.hpp"
#include "train_gpt/run_options.hpp"
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

/// The form of a block's record with all of it kept, encoded but for the statistics of norms: the backward
/// pass multiplies by these, and they are few.
[[nodiscard]] inline llmmem::record_form encoded_form(const gpt_shape& shape, layer_id layer,
                                                      std::uint32_t bits) {
  const layer_layout layout = activation_layout(shape, layer);
  const activation_codec codec(bits);
  llmmem::record_form form{.bytes = layout.elements * sizeof(float), .kept = {}};
  std::uint64_t begin = 0;
  const auto keep_until = [&](std::uint64_t end) {
    if (end > begin) form.kept.push_back({begin, end - begin, codec.worst_case_bytes(end - begin)});
    begin = end;
  };
  for (const block_activation each :
       {block_activation::norm1_statistics, block_activation::norm2_statistics}) {
    const tensor_place& exact = layout.tensors[static_cast<std::size_t>(each)];
    const std::uint64_t bytes = exact.rows * exact.columns * sizeof(float);
    keep_until(exact.offset * sizeof(float));
    form.kept.push_back({begin, bytes});
    begin += bytes;
  }
  keep_until(form.bytes);
  return form;
}

}  // namespace detail

/// @param bits  of the kept activations of blocks; 0: floats. @pre without recomputation, if not 0
/// @throws llmmem::argument_error  for a budget that no choice meets, with the smallest possible one.
[[nodiscard]] inline planned_records plan_records(const gpt_shape& shape, const recompute_options& asked,
                                                  std::uint32_t bits = 0) {
  planned_records all;
  std::vector<std::vector<llmmem::record_form>> forms;
  for (std::size_t i = 1; i < shape.layers(); ++i) {
    auto [choices, of_layer] = detail::ways_of(shape, shape.layer(i));
    if (bits != 0 && shape.layer(i) != shape.head()) {
      of_layer = {detail::encoded_form(shape, shape.layer(i), bits)};
      choices.ways = {{of_layer.front().kept_bytes(), 0}};
    }
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
