/// @file
/// Tokens of a tile, and the queries and sums that the host's vectors attend with.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/float_steps.hpp>
#include <llmmem/kernels/detail/vector_heads.hpp>
#include <llmmem/kernels/detail/vector_lanes.hpp>
#include <llmmem/model/dtype.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Elements of a vector at most, and floats of the widest lanes, to which lengths are rounded up.
inline constexpr std::size_t vector_elements = 256;
inline constexpr std::size_t widest_lanes = 16;
/// Floats of a tile's keys or values, and its tokens at most.
inline constexpr std::size_t tile_floats = 4096;
inline constexpr std::size_t max_tile_tokens = 32;

/// Returns the sum of the widest lanes, in their order.
[[nodiscard]] inline float sum_of_lanes(const float* lanes) noexcept {
  float sum = 0.0F;
  for (std::size_t i = 0; i < widest_lanes; ++i)
    sum += lanes[i];
  return sum;
}

/// Returns how many floats a vector takes in a tile: whole groups of words of the widest lanes.
template <dtype Element>
[[nodiscard]] constexpr std::size_t lane_stride(std::size_t elements) noexcept {
  constexpr std::size_t group = widest_lanes * elements_in_word<Element>;
  return (elements + group - 1) / group * group;
}
/// Returns the tokens of a tile of vectors of so many floats: a multiple of the widest lanes.
[[nodiscard]] constexpr std::size_t tile_tokens(std::size_t stride) noexcept {
  return std::min(tile_floats / stride / widest_lanes * widest_lanes, max_tile_tokens);
}
static_assert(tile_tokens(vector_elements) == 16);

// Products below are of a tile's lengths, at most 4096. Tiles are large, and written before they are read.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result, cppcoreguidelines-pro-type-member-init)

/// Tokens, in any places.
struct vector_tokens {
  const std::byte* keys[max_tile_tokens];
  const std::byte* values[max_tile_tokens];
  std::uint32_t count = 0;
};

/// The queries of some heads, and what came of the tokens so far.
template <std::uint32_t Heads, std::size_t KeyFloats, std::size_t ValueFloats>
struct basic_vector_sums {
  // Elements are where `lane_place` says.
  alignas(64) float query[Heads * KeyFloats];  // scaled; zeros up to the stride
  alignas(64) float sum[Heads * ValueFloats];
  alignas(64) float totals[Heads * widest_lanes];  // of the exponentials, in the lanes of a path
  float most[Heads];                               // of the products
  std::size_t heads = 0;
  std::size_t key_elements = 0;
  std::size_t value_elements = 0;
  std::size_t key_stride = 0;
  std::size_t value_stride = 0;

  template <dtype Element>
  void begin(std::size_t of_heads, std::size_t keys, std::size_t values) noexcept {
    begin<Element>(of_heads, keys, values, lane_stride<Element>(keys), lane_stride<Element>(values));
  }
  /// The same with strides of the caller.
  template <dtype Element>
  void begin(std::size_t of_heads, std::size_t keys, std::size_t values, std::size_t key_step,
             std::size_t value_step) noexcept {
    heads = of_heads;
    key_elements = keys;
    value_elements = values;
    key_stride = key_step;
    value_stride = value_step;
    std::fill_n(query, heads * key_stride, 0.0F);
    std::fill_n(sum, heads * value_stride, 0.0F);
    std::fill_n(most, heads, lowest());
    std::fill_n(totals, heads * widest_lanes, 0.0F);
  }
  [[nodiscard]] float total(std::size_t head) const noexcept {
    return sum_of_lanes(totals + head * widest_lanes);
  }
};
using vector_sums = basic_vector_sums<vector_heads, vector_elements, vector_elements>;

/// The part of a head of the cache in `walked_sums`.
struct vector_sums_view {
  float* query;
  float* sum;
  float* totals;
  float* most;
  std::size_t heads;
  std::size_t key_elements;
  std::size_t value_elements;
  std::size_t key_stride;
  std::size_t value_stride;

  [[nodiscard]] float total(std::size_t head) const noexcept {
    return sum_of_lanes(totals + head * widest_lanes);
  }
};
/// As `vector_sums`, for the heads of the cache that are read together: those of one come before those of the
/// next.
struct walked_sums {
  alignas(64) float query[walked_elements];
  alignas(64) float sum[walked_elements];
  alignas(64) float totals[walked_lanes * widest_lanes];
  float most[walked_lanes];
  std::size_t walked = 0;
  vector_sums_view first{};

  template <dtype Element>
  void begin(std::size_t of_cache, std::size_t heads, std::size_t keys, std::size_t values) noexcept {
    walked = of_cache;
    first = {query,
             sum,
             totals,
             most,
             heads,
             keys,
             values,
             lane_stride<Element>(keys),
             lane_stride<Element>(values)};
    std::fill_n(query, walked * heads * first.key_stride, 0.0F);
    std::fill_n(sum, walked * heads * first.value_stride, 0.0F);
    std::fill_n(most, walked * heads, lowest());
    std::fill_n(totals, walked * heads * widest_lanes, 0.0F);
  }
  [[nodiscard]] vector_sums_view head(std::size_t walk) const noexcept {
    vector_sums_view of = first;
    const std::size_t lanes = walk * of.heads;
    of.query += lanes * of.key_stride;
    of.sum += lanes * of.value_stride;
    of.totals += lanes * widest_lanes;
    of.most += lanes;
    return of;
  }
};

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result, cppcoreguidelines-pro-type-member-init)

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
