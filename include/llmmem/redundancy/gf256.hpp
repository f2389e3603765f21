/// @file
/// Arithmetic in GF(2^8), the field of Reed-Solomon codes, for single bytes and for buffers.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/redundancy/detail/gf256_kernels.hpp>
#include <llmmem/redundancy/simd_path.hpp>
#include <llmmem/result.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

/// The field's polynomial, x^8 + x^4 + x^3 + x^2 + 1; its root x (2) generates all bytes except 0.
///
/// @par Source   H. Peter Anvin, "The mathematics of RAID-6", 2004; ISA-L uses the same one.
inline constexpr std::uint32_t gf256_polynomial = 0x11D;

namespace detail {

struct gf256_tables {
  std::array<std::uint8_t, 256> log{};
  std::array<std::uint8_t, 510> exp{};  // stored twice, so that a sum of two logarithms needs no remainder
};

inline constexpr gf256_tables gf256 = [] {
  gf256_tables tables;
  std::uint32_t power = 1;
  for (std::uint32_t i = 0; i < 255; ++i) {
    tables.exp[i] = tables.exp[i + 255] = static_cast<std::uint8_t>(power);
    tables.log[power] = static_cast<std::uint8_t>(i);
    power <<= 1;
    if (power > 255) power ^= gf256_polynomial;
  }
  return tables;
}();

}  // namespace detail

// Addition and subtraction are `a ^ b`.

/// Returns the product.
[[nodiscard]] constexpr std::uint8_t gf256_multiply(std::uint8_t a, std::uint8_t b) noexcept {
  if (a == 0 || b == 0) return 0;
  return detail::gf256.exp[std::size_t{detail::gf256.log[a]} + detail::gf256.log[b]];
}

/// Returns the byte whose product with `a` is 1. @pre a != 0
[[nodiscard]] constexpr std::uint8_t gf256_inverse(std::uint8_t a) noexcept {
  return detail::gf256.exp[std::size_t{255} - detail::gf256.log[a]];
}

/// Returns `a` times the inverse of `b`. @pre b != 0
[[nodiscard]] constexpr std::uint8_t gf256_divide(std::uint8_t a, std::uint8_t b) noexcept {
  return gf256_multiply(a, gf256_inverse(b));
}

/// Returns `a` to the `exponent`-th power; 0 to the 0th is 1.
[[nodiscard]] constexpr std::uint8_t gf256_power(std::uint8_t a, std::uint32_t exponent) noexcept {
  if (exponent == 0) return 1;
  if (a == 0) return 0;
  return detail::gf256.exp[(std::uint64_t{detail::gf256.log[a]} * exponent) % 255];
}

namespace detail {

[[nodiscard]] constexpr gf_product_table gf_table_of(std::uint8_t coefficient) noexcept {
  gf_product_table table;
  for (std::uint32_t nibble = 0; nibble < 16; ++nibble) {
    table.low[nibble] = table.low[nibble + 16] =
        gf256_multiply(coefficient, static_cast<std::uint8_t>(nibble));
    table.high[nibble] = table.high[nibble + 16] =
        gf256_multiply(coefficient, static_cast<std::uint8_t>(nibble << 4));
  }
  // Bit i of a product is the parity of those bits j of the factor where c x^j has bit i. The instruction
  // takes bit i's row from byte 7 - i.
  for (std::uint32_t j = 0; j < 8; ++j) {
    const std::uint64_t image = gf256_multiply(coefficient, static_cast<std::uint8_t>(1U << j));
    for (std::uint32_t i = 0; i < 8; ++i)
      table.affine |= (image >> i & 1U) << (8 * (7 - i) + j);
  }
  return table;
}

/// Multiplies one source into one destination, which is overwritten or added to.
template <gf_start Start>
result<void> gf_multiply(std::span<std::byte> destination, std::span<const std::byte> source,
                         std::uint8_t coefficient, simd_path path, const char* where) noexcept {
  if (source.size() > destination.size()) {
    return failure{
        .code = errc::past_the_bytes, .wanted = source.size(), .found = destination.size(), .where = where};
  }
  const gf_product_table table = gf_table_of(coefficient);
  const std::byte* const from = source.data();
  std::byte* const to = destination.data();
  gf_run<1, Start>(path,
                   {.tables = &table, .stride = 1, .sources = &from, .source_count = 1, .destinations = &to},
                   source.size());
  return {};
}

}  // namespace detail

/// Computes `destination += coefficient * source`, byte by byte.
///
/// @par Complexity      one pass; on the portable path two look-ups a byte.
/// @par Thread safety   any number of threads on different destinations.
/// @pre has_simd_path(path). Source and destination are the same bytes, or share none.
/// @return `errc::past_the_bytes` if the source is longer than the destination, which then is unchanged. A
///         shorter source counts as if zeros followed it.
/// @par Source   products of nibbles by shuffles: Plank, Greenan and Miller, "Screaming Fast Galois Field
///               Arithmetic Using Intel SIMD Instructions", FAST 2013; as maps of bits: Intel's GFNI.
inline result<void> gf256_multiply_add(std::span<std::byte> destination, std::span<const std::byte> source,
                                       std::uint8_t coefficient, simd_path path = best_simd_path()) noexcept {
  return detail::gf_multiply<detail::gf_start::destination>(destination, source, coefficient, path,
                                                            "gf256_multiply_add");
}

/// Computes `destination = coefficient * source`, byte by byte: like `gf256_multiply_add` to zeros, without a
/// need to write these.
///
/// @par Complexity      one pass, which does not read the destination.
/// @par Thread safety   any number of threads on different destinations.
/// @pre has_simd_path(path). Source and destination are the same bytes, or share none.
/// @return `errc::past_the_bytes` if the source is longer than the destination, which then is unchanged.
///         Bytes of the destination past the end of a shorter source stay unchanged.
inline result<void> gf256_multiply_into(std::span<std::byte> destination, std::span<const std::byte> source,
                                        std::uint8_t coefficient,
                                        simd_path path = best_simd_path()) noexcept {
  return detail::gf_multiply<detail::gf_start::zero>(destination, source, coefficient, path,
                                                     "gf256_multiply_into");
}

}  // namespace v0
}  // namespace llmmem
