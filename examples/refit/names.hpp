/// @file
/// The engine's tensors, and the rules that map a trainer's layers to them.
#pragma once

#include <llmmem/refit/refit_rules.hpp>
#include <llmmem/refit/refit_tensor.hpp>
#include <llmmem/sharding/split_2d.hpp>

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "train_gpt/gather_plan.hpp"
#include "train_gpt/shape.hpp"

namespace refit_example {

/// The form of the engine's matrices.
enum class weight_form : std::uint8_t { bf16, int8, fp8 };

/// What the engine has, and where it comes from. The trainer has one tensor of floats for each layer, so that
/// ZeRO cuts it anywhere; the engine has the matrices of a layer, with queries, keys and values apart.
struct engine_model {
  std::vector<llmmem::refit_tensor> source;
  std::vector<llmmem::refit_tensor> target;
  std::vector<llmmem::refit_rule> rules;
  std::vector<llmmem::split_axis> axes;  ///< of the target's tensors
};

namespace detail {

/// Elements `run` at a time, `stride` apart, of a flat layer.
[[nodiscard]] inline llmmem::refit_bands elements(std::size_t first, std::size_t run, std::size_t stride,
                                                  std::size_t count) {
  return {llmmem::split_axis::rows, first, run, stride, count};
}

/// Layers that share out their outputs split columns, because weights are stored input by output; the ones
/// after them split rows.
[[nodiscard]] inline llmmem::split_axis axis_of_tensor(const std::string& name) {
  using llmmem::split_axis;
  if (name.ends_with("c_fc.weight") || name.ends_with("c_fc.bias") || name.ends_with("lm_head.weight"))
    return split_axis::columns;
  if (name.ends_with("c_proj.weight")) return split_axis::rows;
  return split_axis::none;
}

/// A tensor of the engine: matrices whose columns are whole groups in the wanted form, all else as bf16.
[[nodiscard]] inline llmmem::refit_tensor engine_tensor(std::string name, std::size_t rows,
                                                        std::size_t columns, weight_form form) {
  llmmem::refit_tensor tensor{.name = std::move(name), .shape = llmmem::tensor_shape::matrix(rows, columns)};
  if (form != weight_form::bf16 && rows > 1 && columns % 32 == 0) {
    tensor.element = form == weight_form::int8 ? llmmem::dtype::int8 : llmmem::dtype::fp8_e4m3;
    tensor.group = 32;
  }
  return tensor;
}

/// Refuses engines that would cut the groups in which a matrix is quantised.
/// @throws llmmem::argument_error  with the numbers of engines that cut none.
inline void check_engines(const engine_model& model, std::uint32_t engines) {
  std::uint64_t shared = 0;  // what divides the groups in a row of all matrices that are cut in columns
  const llmmem::refit_tensor* cut = nullptr;
  for (std::size_t i = 0; i < model.target.size(); ++i) {
    const llmmem::refit_tensor& each = model.target[i];
    if (each.group == 0 || model.axes[i] != llmmem::split_axis::columns) continue;
    const std::uint64_t groups = each.shape.columns() / each.group;
    shared = std::gcd(shared, groups);
    if (groups % engines != 0 && cut == nullptr) cut = &each;
  }
  if (cut == nullptr) return;
  std::string allowed;
  for (std::uint64_t i = 1; i <= shared && i <= 16; ++i) {
    if (shared % i == 0) allowed += (allowed.empty() ? "" : ", ") + std::to_string(i);
  }
  throw llmmem::argument_error("--engines " + std::to_string(engines) + ": " + std::to_string(cut->group) +
                               " columns have one scale, and the " + std::to_string(cut->shape.columns()) +
                               " columns of '" + cut->name + "' are " +
                               std::to_string(cut->shape.columns() / cut->group) +
                               " such groups, which so many engines do not share evenly; take --engines " +
                               allowed + ", or --form bf16");
}

}  // namespace detail

[[nodiscard]] inline engine_model engine_of(const train_gpt::gpt_shape& shape, weight_form form) {
  using namespace llmmem;
  engine_model made;
  for (const tensor_facts& each : train_gpt::layer_catalogue(shape, sizeof(float)))
    made.source.push_back({.name = each.name, .shape = each.shape, .element = dtype::f32});
  const auto add = [&](const std::string& layer, std::string name, std::size_t rows, std::size_t columns,
                       split_axis axis, const refit_bands& from) {
    refit_tensor tensor = detail::engine_tensor(std::move(name), rows, columns, form);
    made.rules.push_back({layer, tensor.name, from, {}});
    made.target.push_back(std::move(tensor));
    made.axes.push_back(axis);
  };
  for (std::size_t i = 0; i < shape.layers(); ++i) {
    const std::string& layer = made.source[i].name;
    for (const train_gpt::tensor_place& at : train_gpt::parameter_layout(shape, shape.layer(i)).tensors) {
      const std::size_t fused = at.name.find("c_attn");
      if (fused == std::string::npos) {
        add(layer, at.name, at.rows, at.columns, detail::axis_of_tensor(at.name),
            detail::elements(at.offset, at.rows * at.columns, at.rows * at.columns, 1));
        continue;
      }
      // Columns of the fused matrix: a third of each of its rows.
      const std::size_t width = at.columns / 3;
      for (std::size_t part = 0; part < 3; ++part) {
        std::string name = at.name;
        name.replace(fused, 6, std::string(1, "qkv"[part]));
        add(layer, std::move(name), at.rows, width, split_axis::columns,
            detail::elements(at.offset + part * width, width, at.columns, at.rows));
      }
    }
  }
  return made;
}

}  // namespace refit_example
