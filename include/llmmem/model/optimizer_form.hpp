/// @file
/// The forms of an optimizer's state, and the bytes that they take.
#pragma once

#include <llmmem/config.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// The rule of an optimizer, and the form in which it keeps weights and moments.
enum class optimizer_form : std::uint8_t {
  adamw,             ///< AdamW: weights and both moments as floats
  adamw_split16,     ///< the same, with each weight as a rounded bf16 and 16 low bits: the same bits
  adamw_stochastic,  ///< AdamW on bf16 weights, rounded stochastically by a counter; moments as floats
  adamw_8bit,        ///< AdamW with 8-bit moments in groups of 256, each with its scale; weights as floats
  sgd,               ///< stochastic gradient descent with momentum: weights and one moment as floats
  adafactor,         ///< Adafactor: weights as floats; of each matrix's variance a factor per row and column
  muon               ///< Muon: weights and momentum as floats; other tensors than matrices take `adamw`
};

/// Elements of a group of 8-bit moments.
inline constexpr std::uint64_t optimizer_group = 256;

/// Bytes that an element takes in each array of a form, and bytes of one group's scale.
struct optimizer_widths {
  std::uint32_t weights = 0;
  std::uint32_t low = 0;
  std::uint32_t mean = 0;
  std::uint32_t variance = 0;
  std::uint32_t group_scale = 0;  ///< one per group in each of the two arrays of scales; 0: no groups

  friend constexpr bool operator==(const optimizer_widths&, const optimizer_widths&) noexcept = default;
};
/// Returns the widths of a form. `adafactor`'s variance is that of a vector: a matrix has `factor_count`
/// floats in its place.
[[nodiscard]] LLMMEM_HD constexpr optimizer_widths widths_of(optimizer_form form) noexcept {
  switch (form) {
    case optimizer_form::adamw:
      return {.weights = 4, .mean = 4, .variance = 4};
    case optimizer_form::adamw_split16:
      return {.weights = 2, .low = 2, .mean = 4, .variance = 4};
    case optimizer_form::adamw_stochastic:
      return {.weights = 2, .mean = 4, .variance = 4};
    case optimizer_form::adamw_8bit:
      return {.weights = 4, .mean = 1, .variance = 1, .group_scale = 4};
    case optimizer_form::sgd:
      return {.weights = 4, .mean = 4};
    case optimizer_form::adafactor:
      return {.weights = 4, .variance = 4};
    case optimizer_form::muon:
      return {.weights = 4, .mean = 4};
  }
  return {};
}

/// Returns the floats of `adafactor`'s state for a tensor of rows x columns: one for each row and each column
/// of a matrix, one for each element of a vector. A matrix of one row or one column is a vector.
/// @pre rows * columns is below 2^60
[[nodiscard]] LLMMEM_HD constexpr std::uint64_t factor_count(std::uint64_t rows,
                                                             std::uint64_t columns) noexcept {
  return rows > 1 && columns > 1 ? rows + columns : rows * columns;
}

/// Returns the bytes of weights and state of `elements` parameters, without gradients; for `adafactor`, those
/// of a vector.
/// @pre they are below 2^60
[[nodiscard]] constexpr std::uint64_t optimizer_bytes(optimizer_form form, std::uint64_t elements) noexcept {
  const optimizer_widths each = widths_of(form);
  const std::uint64_t groups = (elements + optimizer_group - 1) / optimizer_group;
  return elements * (each.weights + each.low + each.mean + each.variance) + groups * 2 * each.group_scale;
}

/// The same for a matrix.
[[nodiscard]] constexpr std::uint64_t optimizer_bytes(optimizer_form form, std::uint64_t rows,
                                                      std::uint64_t columns) noexcept {
  if (form != optimizer_form::adafactor) return optimizer_bytes(form, rows * columns);
  return rows * columns * widths_of(form).weights + factor_count(rows, columns) * sizeof(float);
}

/// A piece must begin at a multiple of this, counted in elements from the tensor's first. Its length is free.
[[nodiscard]] constexpr std::uint64_t cut_multiple(optimizer_form form) noexcept {
  return widths_of(form).group_scale == 0 ? 1 : optimizer_group;
}

/// Returns the form for a tensor of `elements`: `adamw` instead of `adamw_8bit` below 4,096 elements.
/// The caller asks with the elements of the whole tensor, so that shards come to the same form.
[[nodiscard]] constexpr optimizer_form form_for(optimizer_form wanted, std::uint64_t elements) noexcept {
  return wanted == optimizer_form::adamw_8bit && elements < 4096 ? optimizer_form::adamw : wanted;
}

}  // namespace v0
}  // namespace llmmem
