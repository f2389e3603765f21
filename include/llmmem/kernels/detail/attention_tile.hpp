/// @file
/// A lane's work of `paged_attention` on a tile of eight tokens.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/float_steps.hpp>
#include <llmmem/kernels/elements.hpp>
#include <llmmem/kernels/packet.hpp>
#include <llmmem/model/dtype.hpp>

#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Tokens of a tile, and elements of a vector that a lane has.
inline constexpr std::uint32_t attention_tile = 8;
inline constexpr std::uint32_t attention_pack = 8;

/// A lane's elements of a vector, in their form in memory.
template <dtype Element>
struct attention_raw {
  static constexpr unsigned bytes = sizeof(element_bits<Element>) * attention_pack;
  static constexpr unsigned access_bytes = bytes < 16 ? bytes : 16;
  static constexpr unsigned accesses = bytes / access_bytes;

  packet<access_bytes> part[accesses];

  LLMMEM_HD void load(const std::byte* from) noexcept {
    LLMMEM_UNROLL
    for (unsigned i = 0; i < accesses; ++i)
      part[i] = load_packet<access_bytes, cache_hint::streaming>(from + std::size_t{i} * access_bytes);
  }
  /// Sets elements that do not count to -0, which changes no bit of a sum.
  LLMMEM_HD void clear() noexcept {
    constexpr std::uint32_t of_word = bytes == attention_pack       ? 0x8080'8080U
                                      : bytes == 2 * attention_pack ? 0x8000'8000U
                                                                    : 0x8000'0000U;
    LLMMEM_UNROLL
    for (unsigned i = 0; i < accesses; ++i) {
      LLMMEM_UNROLL
      for (std::uint32_t& word : part[i].words)
        word = of_word;
    }
  }
  LLMMEM_HD void store(std::byte* to) const noexcept {
    LLMMEM_UNROLL
    for (unsigned i = 0; i < accesses; ++i)
      store_packet<access_bytes>(to + std::size_t{i} * access_bytes, part[i]);
  }
};

/// The same as floats.
struct attention_floats {
  float of[attention_pack];
};

template <dtype Element>
[[nodiscard]] LLMMEM_HD inline attention_floats floats_of(const attention_raw<Element>& raw) noexcept {
  constexpr unsigned a_part = attention_pack / 2 / attention_raw<Element>::accesses;  // pairs
  attention_floats out{};
  LLMMEM_UNROLL
  for (unsigned i = 0; i < attention_pack; i += 2) {
    const float_pair both = pair_of<Element>(raw.part[i / 2 / a_part], i / 2 % a_part);
    out.of[i] = both.first;
    out.of[i + 1] = both.second;
  }
  return out;
}

template <dtype Element>
[[nodiscard]] LLMMEM_HD inline attention_raw<Element> raw_of(const attention_floats& values) noexcept {
  constexpr unsigned a_part = attention_pack / attention_raw<Element>::accesses;
  attention_raw<Element> out{};
  LLMMEM_UNROLL
  for (unsigned i = 0; i < attention_pack; ++i)
    set_element(out.part[i / a_part], i % a_part, nearest_of<Element>(values.of[i]));
  return out;
}

/// Reads a lane's elements of a query, of any type.
[[nodiscard]] LLMMEM_HD inline attention_floats read_floats(const std::byte* from, dtype element) noexcept {
  if (element == dtype::f32) {
    attention_raw<dtype::f32> raw{};
    raw.load(from);
    return floats_of(raw);
  }
  if (element == dtype::f16) {
    attention_raw<dtype::f16> raw{};
    raw.load(from);
    return floats_of(raw);
  }
  attention_raw<dtype::bf16> raw{};
  raw.load(from);
  return floats_of(raw);
}

/// Writes a lane's elements of an output.
LLMMEM_HD inline void write_floats(std::byte* to, dtype element, const attention_floats& values) noexcept {
  if (element == dtype::f32) return raw_of<dtype::f32>(values).store(to);
  if (element == dtype::f16) return raw_of<dtype::f16>(values).store(to);
  raw_of<dtype::bf16>(values).store(to);
}

/// Returns a lane's part of a product.
[[nodiscard]] LLMMEM_HD inline float dot(const attention_floats& a, const attention_floats& b) noexcept {
  float sum = 0;
  LLMMEM_UNROLL
  for (unsigned i = 0; i < attention_pack; ++i)
    sum = fused(a.of[i], b.of[i], sum);
  return sum;
}

/// A lane's keys and values of a tile, and which of its tokens count.
template <dtype Element>
struct attention_read {
  attention_raw<Element> key[attention_tile];
  attention_raw<Element> value[attention_tile];
  std::uint32_t counts = 0;  // a bit each
};

/// A lane's products with a tile's keys.
struct attention_scores {
  float of[attention_tile];
};

/// Adds up the lanes' parts of eight products: afterwards each lane has that of token `lane % 8`. Each step
/// exchanges half of the numbers, so eight sums take 7 exchanges; then numbers of lanes that are equal modulo
/// 8 are added, with the same result in each order.
template <class Group>
LLMMEM_HD inline void add_up(const Group& group,
                             typename Group::template held<attention_scores>& parts) noexcept {
  typename Group::template held<float> sent;
  LLMMEM_UNROLL
  for (std::uint32_t step = attention_tile / 2; step != 0; step /= 2) {
    LLMMEM_UNROLL
    for (std::uint32_t i = 0; i < step; ++i) {
      group.each([&](std::uint32_t lane) {
        float* const of = parts[lane].of;
        const bool is_upper = (lane & step) != 0;
        sent[lane] = is_upper ? of[i] : of[i + step];
        of[i] = is_upper ? of[i + step] : of[i];
      });
      group.swap(sent, step);
      group.each([&](std::uint32_t lane) { parts[lane].of[i] += sent[lane]; });
    }
  }
  for (std::uint32_t step = attention_tile; step < group.count(); step *= 2) {
    group.each([&](std::uint32_t lane) { sent[lane] = parts[lane].of[0]; });
    group.swap(sent, step);
    group.each([&](std::uint32_t lane) { parts[lane].of[0] += sent[lane]; });
  }
}

/// Joins the values of two lanes whose numbers differ by a bit, by an operation with the same bits either
/// way.
template <class Group, class Join>
LLMMEM_HD inline void join_pairs(const Group& group, typename Group::template held<float>& values,
                                 std::uint32_t step, const Join& join) noexcept {
  typename Group::template held<float> other;
  group.each([&](std::uint32_t lane) { other[lane] = values[lane]; });
  group.swap(other, step);
  group.each([&](std::uint32_t lane) { values[lane] = join(values[lane], other[lane]); });
}
/// Joins the values of eight neighbours.
template <class Group, class Join>
LLMMEM_HD inline void join_eight(const Group& group, typename Group::template held<float>& values,
                                 const Join& join) noexcept {
  LLMMEM_UNROLL
  for (std::uint32_t step = 1; step < attention_tile; step *= 2)
    join_pairs(group, values, step, join);
}
/// Joins the values of all lanes.
template <class Group, class Join>
LLMMEM_HD inline void join_lanes(const Group& group, typename Group::template held<float>& values,
                                 const Join& join) noexcept {
  for (std::uint32_t step = 1; step < group.count(); step *= 2)
    join_pairs(group, values, step, join);
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
