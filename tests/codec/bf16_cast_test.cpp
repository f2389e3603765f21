#include <llmmem/codec/bf16_cast.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

/// The value of a finite bfloat16 without sign, from its definition; what follows the largest is 2^128.
double magnitude(std::uint32_t bits) {
  const auto exponent = static_cast<int>(bits >> 7);
  const double fraction = (bits & 0x7FU) / 128.0;
  return exponent == 0 ? std::ldexp(fraction, -126) : std::ldexp(1 + fraction, exponent - 127);
}

/// The definition: of the two bfloat16s around a value the nearer one, the even one in the middle.
std::uint16_t nearest(std::uint32_t f32) {
  const float value = std::bit_cast<float>(f32);
  const std::uint32_t sign = f32 >> 31 << 15;
  if (std::isnan(value)) return static_cast<std::uint16_t>(f32 >> 16 | 0x40U);
  if (std::isinf(value)) return static_cast<std::uint16_t>(sign | 0x7F80U);
  const double size = std::fabs(static_cast<double>(value));
  const std::uint32_t below = f32 >> 16 & 0x7FFFU;  // of the bits of a float, those of a bfloat16 come first
  const double to_below = size - magnitude(below);
  const double to_above = magnitude(below + 1) - size;
  const bool up = to_above < to_below || (to_above == to_below && below % 2 == 1);
  return static_cast<std::uint16_t>(sign | (up ? below + 1 : below));
}

std::vector<std::uint32_t> decoded_words(std::span<const std::uint16_t> forms) {
  bf16_cast codec(forms.size() * 4);
  std::vector<std::uint32_t> back(forms.size());
  codec.decode(std::as_bytes(forms), std::as_writable_bytes(std::span(back))).value();
  return back;
}

std::vector<std::uint16_t> encoded_words(std::span<const std::uint32_t> words) {
  bf16_cast codec(words.size() * 4);
  std::vector<std::uint16_t> forms(words.size());
  REQUIRE(codec.encode(std::as_bytes(words), std::as_writable_bytes(std::span(forms))).value() ==
          words.size() * 2);
  return forms;
}

}  // namespace

TEST_CASE("every float becomes the bfloat16 nearest to it") {
  // A seed is one of 4096 slices of all 2^32 patterns, each with every exponent: LLMMEM_SEED_FACTOR=512 makes
  // it all of them.
  constexpr std::uint32_t slices = 4096;
  for (const auto seed : seeds(8)) {
    CAPTURE(seed);
    std::vector<std::uint32_t> words((std::uint64_t{1} << 32) / slices);
    for (std::size_t i = 0; i < words.size(); ++i)
      words[i] = static_cast<std::uint32_t>(i * slices + seed % slices);
    const std::vector<std::uint16_t> forms = encoded_words(words);
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < words.size(); ++i)
      wrong += forms[i] != nearest(words[i]) ? 1U : 0U;
    REQUIRE(wrong == 0);
  }
}

TEST_CASE("rounding is right around every bfloat16, and in the middle between two") {
  std::vector<std::uint32_t> words;
  for (std::uint32_t high = 0; high < 0x1'0000; ++high) {
    for (const std::uint32_t low : {0U, 1U, 0x7FFFU, 0x8000U, 0x8001U, 0xFFFFU})
      words.push_back(high << 16 | low);
  }
  const std::vector<std::uint16_t> forms = encoded_words(words);
  for (std::size_t i = 0; i < words.size(); ++i) {
    CAPTURE(words[i]);
    REQUIRE(forms[i] == nearest(words[i]));
  }
}

TEST_CASE("every bfloat16 widens to its float and comes back, with NaNs made quiet") {
  std::vector<std::uint16_t> forms(0x1'0000);
  for (std::size_t i = 0; i < forms.size(); ++i)
    forms[i] = static_cast<std::uint16_t>(i);
  const std::vector<std::uint32_t> words = decoded_words(forms);
  const std::vector<std::uint16_t> again = encoded_words(words);
  for (std::size_t i = 0; i < forms.size(); ++i) {
    CAPTURE(i);
    const auto value = static_cast<double>(std::bit_cast<float>(words[i]));
    REQUIRE(words[i] == static_cast<std::uint32_t>(i) << 16);
    if (std::isnan(value)) {
      REQUIRE(again[i] == (i | 0x40U));
      continue;
    }
    if (std::isfinite(value)) {
      REQUIRE(std::fabs(value) == magnitude(static_cast<std::uint32_t>(i) & 0x7FFFU));
    }
    REQUIRE(again[i] == i);
  }
}

TEST_CASE(
    "the error reaches the bound and never exceeds it; above the largest value the result is infinite") {
  constexpr codec_error bound = bf16_cast::error_bound;
  double worst_relative = 0;
  double worst_absolute = 0;
  std::vector<std::uint32_t> words;
  for (std::uint64_t i = 0; i < std::uint64_t{1} << 32; i += 4093)
    words.push_back(static_cast<std::uint32_t>(i));
  for (std::uint32_t high = 0; high < 0x7F80U; ++high) {
    for (const std::uint32_t low : {0x7FFFU, 0x8000U, 0x8001U})
      words.push_back(high << 16 | low);
  }
  const std::vector<std::uint32_t> back = decoded_words(encoded_words(words));
  for (std::size_t i = 0; i < words.size(); ++i) {
    const auto value = static_cast<double>(std::bit_cast<float>(words[i]));
    const auto came = static_cast<double>(std::bit_cast<float>(back[i]));
    if (!std::isfinite(value) || std::fabs(value) > bound.largest) continue;
    CAPTURE(value);
    const double error = std::fabs(came - value);
    REQUIRE(error <= std::max(bound.relative * std::fabs(value), bound.absolute));
    if (std::fabs(value) >= 0x1p-126) {
      worst_relative = std::max(worst_relative, error / std::fabs(value));
    } else {
      worst_absolute = std::max(worst_absolute, error);
    }
  }
  CHECK(worst_relative > 0.99 * bound.relative);
  CHECK(worst_absolute == bound.absolute);
  // The largest bfloat16 stays, what is nearer to 2^128 does not.
  CHECK(bf16_from_f32_bits(std::bit_cast<std::uint32_t>(static_cast<float>(bound.largest))) == 0x7F7F);
  CHECK(bf16_from_f32_bits(std::bit_cast<std::uint32_t>(std::numeric_limits<float>::max())) == 0x7F80);
}

TEST_CASE("signs, zeros, infinities and NaNs are kept") {
  constexpr std::array<std::uint32_t, 8> words{0x0000'0000, 0x8000'0000, 0x7F80'0000, 0xFF80'0000,
                                               0x7FC0'0000, 0xFF80'0001, 0x7FFF'FFFF, 0x0000'0001};
  constexpr std::array<std::uint16_t, 8> forms{0x0000, 0x8000, 0x7F80, 0xFF80,
                                               0x7FC0, 0xFFC0, 0x7FFF, 0x0000};
  CHECK(std::ranges::equal(encoded_words(words), forms));
  static_assert(bf16_from_f32_bits(0x3F80'0000) == 0x3F80);
  static_assert(f32_from_bf16_bits(0x3F80) == 0x3F80'0000);
}

TEST_CASE("bfloat16s for another chunk are refused with both sizes") {
  bf16_cast codec(64);
  const std::array<std::byte, 30> form{};
  std::array<std::byte, 64> out{};
  CHECK(codec.decode(form, out).error().message() ==
        "bf16_cast: the encoded bytes are damaged at block 0: 30 found, 32 expected; discard the decoded "
        "bytes, and fetch the encoded ones again");
}
