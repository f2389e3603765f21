/// @file
/// `refit_tensor`: a tensor of a trainer's or of an engine's catalogue, with the form of its elements.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/sharding/tensor_shape.hpp>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// A tensor by its name, shape and form.
struct refit_tensor {
  std::string name;
  tensor_shape shape{};
  dtype element = dtype::bf16;  ///< of a quantised tensor: the codes' type, `int8` or `fp8_e4m3`
  std::uint32_t group = 0;      ///< elements of a row that share a scale: 32, 64 or 128; 0: not quantised
};

/// Returns the catalogue that partitions of these tensors are made from.
/// @throws argument_error  for elements of less than a byte.
[[nodiscard]] inline std::vector<tensor_facts> facts_of(std::span<const refit_tensor> tensors) {
  std::vector<tensor_facts> facts;
  facts.reserve(tensors.size());
  for (const refit_tensor& each : tensors) {
    if (bits_of(each.element) < 8) {
      throw argument_error("refit: tensor '" + each.name + "' has elements of " +
                           std::to_string(bits_of(each.element)) +
                           " bits; pack them in bytes, and describe it as int8");
    }
    facts.push_back({.name = each.name,
                     .shape = each.shape,
                     .element_bytes = static_cast<std::uint32_t>(bits_of(each.element) / 8)});
  }
  return facts;
}

}  // namespace v0
}  // namespace llmmem
