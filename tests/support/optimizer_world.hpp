/// @file
/// A tensor with gradients and an optimizer's state, for tests of every executor.
#pragma once

#include <llmmem/kernels/optimizer_step.hpp>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace llmmem_tests {

inline constexpr std::array all_optimizer_forms{
    llmmem::optimizer_form::adamw, llmmem::optimizer_form::adamw_split16,
    llmmem::optimizer_form::adamw_stochastic, llmmem::optimizer_form::adamw_8bit,
    llmmem::optimizer_form::sgd};

/// The arrays of a whole tensor.
struct optimizer_arrays {
  std::array<std::vector<std::byte>, 6> of{};  // in the order of `optimizer_piece`

  optimizer_arrays(llmmem::optimizer_form form, std::uint64_t count) {
    const llmmem::optimizer_widths each = llmmem::widths_of(form);
    const std::uint64_t groups = (count + llmmem::optimizer_group - 1) / llmmem::optimizer_group;
    const std::array<std::uint64_t, 6> bytes{count * each.weights,      count * each.low,
                                             count * each.mean,         count * each.variance,
                                             groups * each.group_scale, groups * each.group_scale};
    for (std::size_t i = 0; i < of.size(); ++i)
      of[i].resize(bytes[i]);
  }
  /// Some of its elements. @param bases  of the arrays
  static llmmem::optimizer_piece piece(llmmem::optimizer_form form, const std::array<std::byte*, 6>& bases,
                                       std::uint64_t first, std::uint64_t count) {
    const llmmem::optimizer_widths each = llmmem::widths_of(form);
    const std::uint64_t group = first / llmmem::optimizer_group;
    return {.weights = bases[0] + first * each.weights,
            .low = bases[1] + first * each.low,
            .mean = bases[2] + first * each.mean,
            .variance = bases[3] + first * each.variance,
            .mean_scales = bases[4] + group * each.group_scale,
            .variance_scales = bases[5] + group * each.group_scale,
            .first = first,
            .count = count};
  }
  [[nodiscard]] std::array<std::byte*, 6> bases() {
    std::array<std::byte*, 6> all{};
    for (std::size_t i = 0; i < of.size(); ++i)
      all[i] = of[i].data();
    return all;
  }
  [[nodiscard]] llmmem::optimizer_piece whole(llmmem::optimizer_form form, std::uint64_t count) {
    return piece(form, bases(), 0, count);
  }
  friend bool operator==(const optimizer_arrays&, const optimizer_arrays&) = default;
};

/// Numbers of the size of gradients; one in `rare` is none, or huge, or tiny.
inline std::vector<float> drawn_floats(std::uint64_t count, double size, std::uint64_t rare,
                                       std::mt19937_64& random) {
  constexpr std::array odd{std::numeric_limits<float>::infinity(),
                           -std::numeric_limits<float>::infinity(),
                           std::numeric_limits<float>::quiet_NaN(),
                           3e38F,
                           -1e-42F,
                           0.0F,
                           -0.0F};
  std::vector<float> all(count);
  for (float& each : all) {
    each = static_cast<float>((static_cast<double>(random() >> 11U) * 0x1p-52 - 1) * size);
    if (rare != 0 && random() % rare == 0) each = odd[random() % odd.size()];
  }
  return all;
}

}  // namespace llmmem_tests
