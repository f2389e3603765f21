/// @file
/// The bytes that `predict` gives for plans of published models, as JSON lines, for estimators.py.
#include <llmmem/model/presets.hpp>
#include <llmmem/training/training_plan.hpp>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>

namespace {

using namespace llmmem;

/// Embedding, blocks in `parts` each, and the head with the last norm. Without activations, which the
/// estimators do not count: a record of one byte, because the backward pass of a layer with a record reads
/// its weights.
training_shape layers_of(const model_shape& model, std::uint32_t value_bytes, std::uint64_t parts) {
  training_shape shape{.value_bytes = value_bytes};
  const std::uint64_t embedding = model.embedding_parameters();
  const std::uint64_t head = model.output == output_kind::separate ? embedding : 0;
  const std::uint64_t last_norm = model.hidden * (model.norm == norm_kind::layer ? 2 : 1);
  const std::uint64_t block = (model.parameters() - embedding - head - last_norm) / model.layers;
  const auto add = [&](std::uint64_t parameters, std::uint64_t record) {
    shape.layers.push_back({.parameters = parameters, .record = {.bytes = record, .kept = {}}});
  };
  add(embedding, 0);
  for (std::uint64_t i = 0; i < model.layers; ++i) {
    for (std::uint64_t part = 0; part < parts; ++part) {
      add(block * (part + 1) / parts - block * part / parts, part == 0 ? 1 : 0);
      shape.layers.back().continues = part != 0;
    }
  }
  for (std::uint64_t part = 0; part < parts; ++part) {
    const std::uint64_t of = head + last_norm;
    add(of * (part + 1) / parts - of * part / parts, part == 0 ? 1 : 0);
    shape.layers.back().continues = part != 0;
  }
  return shape;
}

/// The largest rank's bytes of fast memory and of the tier below, if the plan has one: with the least first
/// tier that can work. Weights and gradients are bf16, the optimizer's form is `adamw_split16`: 14 bytes a
/// parameter.
void print(const model_shape& model, std::uint32_t ranks, std::uint32_t node_ranks, zero_stage stage,
           bool is_offloaded, std::uint64_t parts) {
  const training_shape shape = layers_of(model, widths_of(optimizer_form::adamw_split16).weights, parts);
  training_plan plan{.ranks = ranks, .zero = stage, .optimizer = optimizer_form::adamw_split16};
  std::uint64_t fast = 0;
  std::uint64_t kept = 0;
  std::uint64_t below = 0;
  for (const std::uint32_t rank : {0U, ranks - 1}) {
    if (is_offloaded) plan.tiers = {step_trace(plan, shape, rank_id{rank}).max_leased_bytes()};
    const training_prediction of = predict(plan, shape, rank_id{rank});
    fast = std::max(fast, of.fast.bytes);
    kept = std::max(kept, of.kept.total());
    if (is_offloaded) below = std::max(below, of.tiers.back().bytes);
  }
  std::printf(
      "{\"model\": \"%.*s\", \"parameters\": %llu, \"ranks\": %u, \"node_ranks\": %u, \"stage\": %u, "
      "\"offload\": %s, \"parts\": %llu, \"fast\": %llu, \"kept\": %llu, \"below_node\": "
      "%llu}\n",
      static_cast<int>(model.name.size()), model.name.data(),
      static_cast<unsigned long long>(model.parameters()), ranks, node_ranks, static_cast<unsigned>(stage),
      is_offloaded ? "true" : "false", static_cast<unsigned long long>(parts),
      static_cast<unsigned long long>(fast), static_cast<unsigned long long>(kept),
      static_cast<unsigned long long>(below * node_ranks));
}

}  // namespace

int main() {
  for (const model_shape* const model : {&models::gpt2_124m, &models::llama2_7b, &models::llama2_70b}) {
    for (const std::uint32_t ranks : {8U, 64U}) {
      for (const zero_stage stage : {zero_stage::optimizer, zero_stage::gradients, zero_stage::weights}) {
        for (const bool is_offloaded : {false, true}) {
          print(*model, ranks, 8, stage, is_offloaded, 1);
          if (stage != zero_stage::weights) continue;
          print(*model, ranks, 8, stage, is_offloaded, 16);
        }
      }
    }
  }
}
