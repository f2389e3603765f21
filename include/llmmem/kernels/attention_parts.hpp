/// @file
/// Parts of attention: the result over some of a row's tokens, in a form that merges with the results over
/// its other tokens.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/errors.hpp>
#include <llmmem/kernels/kv_tokens.hpp>
#include <llmmem/result.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <type_traits>

namespace llmmem {
inline namespace v0 {

/// The most parts that one call merges: the launch carries their addresses. More parts are merged in rounds,
/// each round to a part.
inline constexpr std::size_t max_merged_parts = 32;
[[deprecated("its name is max_merged_parts")]] inline constexpr std::size_t most_merged_parts =
    max_merged_parts;

/// The weights of a part: its largest product, and the sum of its exponentials relative to that. Products are
/// those of a query and a key, times the softmax's scale and log2(e), so that 2 to the power of them are the
/// weights.
///
/// Two numbers, not the logarithm of the sum of exponentials: above 16, half a unit in the last place of one
/// float is 1e-6, at 512 it is 3e-5, and this becomes an error of the weights.
///
/// A part is empty if `total` is 0 or less, or if `most` is -infinity and `total` a number: no code reads its
/// sums. A NaN in `total` comes from a product that was a NaN, and stays visible in every merge with it.
struct attention_state {
  float most = -std::numeric_limits<float>::infinity();
  float total = 0;

  friend constexpr bool operator==(const attention_state&, const attention_state&) noexcept = default;
};
static_assert(sizeof(attention_state) == 8 && std::is_trivially_copyable_v<attention_state>);

/// The number and length of a part's vectors.
struct attention_part_shape {
  std::uint64_t rows = 0;
  std::uint32_t query_heads = 0;
  std::uint32_t value_dim = 0;  ///< floats of a vector: a multiple of 8

  friend constexpr bool operator==(const attention_part_shape&,
                                   const attention_part_shape&) noexcept = default;
};

/// One part of each row's attention, in memory that its reader and writer can access. Distances are in bytes,
/// and each part has its own.
template <class Byte>
  requires std::same_as<std::remove_const_t<Byte>, std::byte>
struct basic_attention_part {
  /// [rows][query_heads][value_dim] floats: sums of 2^(product - most) x value, not divided by their total.
  /// Addresses and distances are multiples of 16.
  token_vectors<Byte> sums{};
  /// [rows][query_heads] `attention_state`. Addresses and distances are multiples of 8.
  token_vectors<Byte> states{};

  /// A part that was written converts to one to read.
  template <class Read>
    requires(std::same_as<Read, const std::byte> && !std::is_const_v<Byte>)
  [[nodiscard]] constexpr operator basic_attention_part<Read>() const noexcept {
    return {{sums.data, sums.token_stride, sums.head_stride},
            {states.data, states.token_stride, states.head_stride}};
  }
};
using attention_part = basic_attention_part<const std::byte>;   ///< to be merged
using attention_part_output = basic_attention_part<std::byte>;  ///< to be written

/// Returns the bytes of a contiguous part, as `attention_part_in` lays it out: for each row and query head, 4
/// for each element and 8 for the state. A part is sent in this form. 2^64 - 1 if the bytes exceed that.
[[nodiscard]] constexpr std::uint64_t attention_part_bytes(const attention_part_shape& shape) noexcept {
  constexpr std::uint64_t all = std::numeric_limits<std::uint64_t>::max();
  const std::uint64_t each = std::uint64_t{shape.value_dim} * sizeof(float) + sizeof(attention_state);
  const std::uint64_t a_row = each * shape.query_heads;  // below 2^67: checked before
  if (shape.query_heads != 0 && each > all / shape.query_heads) return all;
  return a_row != 0 && shape.rows > all / a_row ? all : shape.rows * a_row;
}

namespace detail {

template <class Byte>
[[nodiscard]] result<basic_attention_part<Byte>> part_side_by_side(
    std::span<Byte> memory, const attention_part_shape& shape) noexcept {
  if (shape.value_dim % 8 != 0)
    return failure{errc::bad_granularity, 0, shape.value_dim, 8, "attention_part: value_dim"};
  const std::uint64_t needed = attention_part_bytes(shape);
  if (memory.size() < needed)
    return failure{errc::too_short, 0, needed, memory.size(), "attention_part: memory (bytes)"};
  const auto at = reinterpret_cast<std::uintptr_t>(memory.data());
  if (at % 16 != 0) return failure{errc::bad_granularity, 0, at, 16, "attention_part: memory"};
  const std::uint64_t vector = std::uint64_t{shape.value_dim} * sizeof(float);
  const std::uint64_t states = shape.rows * shape.query_heads * vector;
  return basic_attention_part<Byte>{
      {memory.data(), shape.query_heads * vector, vector},
      {memory.data() + states, shape.query_heads * sizeof(attention_state), sizeof(attention_state)}};
}

}  // namespace detail

/// Lays out a contiguous part in `memory`, aligned to 16: the sums of all rows, then their states.
///
/// @return `errc::too_short` for less than `attention_part_bytes`, `errc::bad_granularity` for memory that is
///      not aligned to 16 or a vector length that is not a multiple of 8.
[[nodiscard]] inline result<attention_part_output> attention_part_in(
    std::span<std::byte> memory, const attention_part_shape& shape) noexcept {
  return detail::part_side_by_side(memory, shape);
}
/// The same for a received part, to merge it.
[[nodiscard]] inline result<attention_part> attention_part_of(std::span<const std::byte> memory,
                                                              const attention_part_shape& shape) noexcept {
  return detail::part_side_by_side(memory, shape);
}

/// The base of logarithms.
enum class log_base : std::uint8_t { e, two };

/// Logarithms of sums of exponentials, [rows][query_heads] floats, to the base in their type: engines use
/// both (FlashInfer and FlashMLA use 2, FlashAttention and vLLM e), and the wrong base gives silent errors of
/// a tenth. Distances are in bytes. Null: not given.
template <log_base Base, class Float = float>
  requires std::same_as<std::remove_const_t<Float>, float>
struct log_sums {
  Float* data = nullptr;
  std::uint64_t row_stride = 0;
  std::uint64_t head_stride = sizeof(float);
};

}  // namespace v0
}  // namespace llmmem
