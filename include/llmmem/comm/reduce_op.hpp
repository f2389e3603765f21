/// @file
/// `reduce_op`: combines two buffers element by element.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/model/bf16.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/model/f16.hpp>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace llmmem {
inline namespace v0 {

/// Combines elements; chosen at run time, so that collectives are compiled once per transport and not once
/// per type as well.
struct reduce_op {
  /// Computes `into[i] = into[i] op from[i]` for `bytes` bytes, a multiple of `element_bytes`. Any alignment;
  /// the two do not overlap.
  using function = void (*)(std::byte* into, const std::byte* from, std::size_t bytes) noexcept;

  function combine = nullptr;
  std::uint32_t element_bytes = 1;
  /// Whether it adds `elements`, each sum rounded to nearest even. A device cannot call `combine`: it
  /// computes the sums that these two name.
  bool is_sum = false;
  dtype elements = dtype::int8;  ///< the type, of a sum
};

namespace detail {

/// In tiles of known length, through local arrays: compilers vectorise this for any alignment.
template <class Element, class Combine>
void combine_elements(std::byte* into, const std::byte* from, std::size_t bytes, Combine one) noexcept {
  static constexpr std::size_t tile = 64;
  const auto some = [&](std::size_t count) {
    std::array<Element, tile> a;  // NOLINT(cppcoreguidelines-pro-type-member-init)
    std::array<Element, tile> b;  // NOLINT(cppcoreguidelines-pro-type-member-init)
    std::memcpy(a.data(), into, count * sizeof(Element));
    std::memcpy(b.data(), from, count * sizeof(Element));
    for (std::size_t i = 0; i < count; ++i)
      a[i] = one(a[i], b[i]);
    std::memcpy(into, a.data(), count * sizeof(Element));
    into += count * sizeof(Element);
    from += count * sizeof(Element);
  };
  const std::size_t count = bytes / sizeof(Element);
  for (std::size_t tiles = count / tile; tiles != 0; --tiles)
    some(tile);
  if (count % tile != 0) some(count % tile);  // with nothing left the pointers may be null
}

}  // namespace detail

/// The sum of floats.
inline constexpr reduce_op sum_f32{
    .combine =
        [](std::byte* into, const std::byte* from, std::size_t bytes) noexcept {
          detail::combine_elements<float>(into, from, bytes, [](float a, float b) { return a + b; });
        },
    .element_bytes = 4,
    .is_sum = true,
    .elements = dtype::f32};

/// The sum of bfloat16s, each sum rounded to nearest even: for many ranks, better widened first.
inline constexpr reduce_op sum_bf16{
    .combine =
        [](std::byte* into, const std::byte* from, std::size_t bytes) noexcept {
          detail::combine_elements<std::uint16_t>(into, from, bytes, [](std::uint16_t a, std::uint16_t b) {
            const float sum =
                std::bit_cast<float>(f32_from_bf16_bits(a)) + std::bit_cast<float>(f32_from_bf16_bits(b));
            return bf16_from_f32_bits(std::bit_cast<std::uint32_t>(sum));
          });
        },
    .element_bytes = 2,
    .is_sum = true,
    .elements = dtype::bf16};

/// The sum of halves, each sum rounded to nearest even.
inline constexpr reduce_op sum_f16{
    .combine =
        [](std::byte* into, const std::byte* from, std::size_t bytes) noexcept {
          detail::combine_elements<std::uint16_t>(into, from, bytes, [](std::uint16_t a, std::uint16_t b) {
            const float sum =
                std::bit_cast<float>(f32_from_f16_bits(a)) + std::bit_cast<float>(f32_from_f16_bits(b));
            return f16_from_f32_bits(std::bit_cast<std::uint32_t>(sum));
          });
        },
    .element_bytes = 2,
    .is_sum = true,
    .elements = dtype::f16};

/// Exclusive or: parity.
inline constexpr reduce_op xor_bytes{
    .combine =
        [](std::byte* into, const std::byte* from, std::size_t bytes) noexcept {
          detail::combine_elements<std::byte>(into, from, bytes,
                                              [](std::byte a, std::byte b) { return a ^ b; });
        },
    .element_bytes = 1};

}  // namespace v0
}  // namespace llmmem
