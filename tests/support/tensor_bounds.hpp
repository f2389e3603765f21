/// @file
/// How near attention by tensor cores over codes must come to attention over their dequantised floats.
#pragma once

#include <llmmem/kernels/detail/tensor_codes.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/paging/kv_layout.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "support/attention_world.hpp"
#include "support/coded_world.hpp"
#include "support/small_elements.hpp"

namespace llmmem_tests {

/// Whether tensor cores take both planes' codes as they are.
[[nodiscard]] inline bool has_exact_numbers(const llmmem::kv_layout& layout) {
  return llmmem::detail::tensor_exactness_of(layout) != llmmem::detail::tensor_exactness::rounded;
}

/// How far products and outputs of a row's query head may be from those of floats, by the roundings that
/// `tensor_cores` names.
struct tensor_bounds {
  double product = 0;
  std::vector<double> outputs{};
};
[[nodiscard]] inline tensor_bounds tensor_bounds_of(const coded_world& of, std::uint64_t row,
                                                    std::uint32_t query) {
  const attention_world& world = of.floats;
  const llmmem::kv_layout& layout = world.layout;
  const bool is_exact = has_exact_numbers(of.codes.layout);
  const double rounding = is_exact ? 0x1p-11 : 0x1p-8;  // of queries and weights
  const double of_values = is_exact ? 0 : 0x1p-8;
  const bool has_zeros = is_exact && of.codes.layout.value_scales.numbers == 2;
  constexpr double of_sums = 1e-5;
  const std::uint32_t head = query / world.group;
  const auto [sequence, first, end, scale] = world.attended_by(row);
  const auto number = [&](std::uint32_t p, std::int64_t t, std::uint64_t e) {
    return static_cast<double>(
        load_element(llmmem::dtype::f32, world.cache.data() + world.place(p, sequence, t, head) + 4 * e));
  };
  const std::byte* const asked =
      world.queries.data() + row * world.query_strides[0] + query * world.query_strides[1];
  tensor_bounds out;
  std::vector<double> products;
  double most = -std::numeric_limits<double>::infinity();
  for (std::int64_t t = first; t < end; ++t) {
    double product = 0;
    double size = 0;
    for (std::uint64_t e = 0; e < layout.vector_elements(0); ++e) {
      const double term =
          number(0, t, e) * static_cast<double>(load_element(llmmem::dtype::f32, asked + 4 * e));
      product += term;
      size += std::fabs(term);
    }
    products.push_back(product * scale);
    most = std::max(most, products.back());
    out.product = std::max(out.product, size * scale * (rounding + of_values));
  }
  out.product += of_sums;
  double total = 0;
  out.outputs.assign(layout.vector_elements(1), 0);
  const double swing = std::exp(2 * out.product) - 1;
  for (std::size_t i = 0; i < products.size(); ++i) {
    const double weight = std::exp(products[i] - most);
    total += weight;
    const std::int64_t position = first + static_cast<std::int64_t>(i);
    for (std::uint64_t e = 0; e < layout.vector_elements(1); ++e) {
      const double size = std::fabs(number(1, position, e));
      // Weights are rounded where they multiply codes, and not where they multiply zeros.
      const double rounded = has_zeros ? of.size_without_zero(1, sequence, position, head, e) : size;
      out.outputs[e] += weight * (size * (swing + of_values) + rounded * rounding);
    }
  }
  for (double& each : out.outputs)
    each = (total == 0 ? 0 : each / total) + of_sums;
  return out;
}

}  // namespace llmmem_tests
