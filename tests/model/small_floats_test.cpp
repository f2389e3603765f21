#include <llmmem/model/bf16.hpp>
#include <llmmem/model/f16.hpp>
#include <llmmem/model/fp8.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace {

using namespace llmmem;

/// A format of at most 16 bits, by its definition: sign, exponent, digits.
struct small_format {
  int exponent_bits;
  int digit_bits;
  bool has_infinity;  ///< else its largest exponent is an ordinary one, but for the last code
  std::uint32_t (*encode)(std::uint32_t);
  std::uint32_t (*decode)(std::uint32_t);

  [[nodiscard]] int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  /// Codes of one sign.
  [[nodiscard]] std::uint32_t codes() const { return 1U << (exponent_bits + digit_bits); }
  /// The largest finite code of one sign.
  [[nodiscard]] std::uint32_t largest() const {
    return has_infinity ? codes() - (1U << digit_bits) - 1 : codes() - 2;
  }
  [[nodiscard]] double value(std::uint32_t code) const {
    const int exponent = static_cast<int>(code >> digit_bits);
    const int digits = static_cast<int>(code & ((1U << digit_bits) - 1));
    const int whole = exponent == 0 ? digits : digits + (1 << digit_bits);
    return std::ldexp(whole, (exponent == 0 ? 1 : exponent) - bias() - digit_bits);
  }
};

const small_format bf16{
    8, 7, true, [](std::uint32_t bits) -> std::uint32_t { return bf16_from_f32_bits(bits); },
    [](std::uint32_t code) { return f32_from_bf16_bits(static_cast<std::uint16_t>(code)); }};
const small_format f16{
    5, 10, true, [](std::uint32_t bits) -> std::uint32_t { return f16_from_f32_bits(bits); },
    [](std::uint32_t code) { return f32_from_f16_bits(static_cast<std::uint16_t>(code)); }};
const small_format e4m3{
    4, 3, false, [](std::uint32_t bits) -> std::uint32_t { return e4m3_from_f32_bits(bits); },
    [](std::uint32_t code) { return f32_from_e4m3_bits(static_cast<std::uint8_t>(code)); }};

float float_of(std::uint32_t bits) {
  return std::bit_cast<float>(bits);
}
std::uint32_t bits_of_float(float value) {
  return std::bit_cast<std::uint32_t>(value);
}

void check_both_signs(const small_format& format, float value, std::uint32_t code) {
  CAPTURE(value);
  CHECK(format.encode(bits_of_float(value)) == code);
  CHECK(format.encode(bits_of_float(-value)) == (code | format.codes()));
}

}  // namespace

TEST_SUITE("small_floats") {
  TEST_CASE("each code means what its sign, exponent and digits say") {
    for (const small_format* const format : {&bf16, &f16, &e4m3}) {
      for (std::uint32_t code = 0; code <= format->largest(); ++code) {
        CAPTURE(code);
        const double value = format->value(code);
        CHECK(double{float_of(format->decode(code))} == value);
        const float negative = float_of(format->decode(code | format->codes()));
        CHECK(double{negative} == -value);
        CHECK(std::signbit(negative));
      }
    }
  }

  TEST_CASE("rounding takes the nearer neighbour, or the even one in the middle, to the last bit") {
    for (const small_format* const format : {&bf16, &f16, &e4m3}) {
      for (std::uint32_t code = 0; code < format->largest(); ++code) {
        CAPTURE(code);
        // The middle has one digit more than the format: a float has room for it, but below bfloat16's least.
        const double middle = (format->value(code) + format->value(code + 1)) / 2;
        const auto there = static_cast<float>(middle);
        if (double{there} != middle) continue;
        check_both_signs(*format, float_of(format->decode(code)), code);
        check_both_signs(*format, there, code % 2 == 0 ? code : code + 1);
        check_both_signs(*format, std::nextafter(there, 0.0F), code);
        check_both_signs(*format, std::nextafter(there, std::numeric_limits<float>::max()), code + 1);
      }
    }
  }

  TEST_CASE(
      "a value that is too large becomes an infinity if the type has one, otherwise the largest value") {
    for (const small_format* const format : {&f16, &e4m3}) {
      const std::uint32_t beyond = format->has_infinity ? format->largest() + 1 : format->largest();
      const double last = format->value(format->largest());
      const auto next = static_cast<float>(last + std::ldexp(last, -format->digit_bits - 1));
      check_both_signs(*format, static_cast<float>(last), format->largest());
      check_both_signs(*format, 2 * next, beyond);
      check_both_signs(*format, std::numeric_limits<float>::max(), beyond);
      check_both_signs(*format, std::numeric_limits<float>::infinity(), beyond);
    }
    CHECK(e4m3_max == 448.0F);
    CHECK(float_of(f32_from_e4m3_bits(0x7E)) == e4m3_max);
    check_both_signs(f16, 65519.0F, 0x7BFF);
    check_both_signs(f16, 65520.0F, 0x7C00);
    check_both_signs(bf16, std::numeric_limits<float>::infinity(), 0x7F80);
    CHECK(std::isinf(float_of(f16.decode(0x7C00))));
  }

  TEST_CASE("a NaN stays a NaN in both directions") {
    for (const small_format* const format : {&bf16, &f16, &e4m3}) {
      for (const std::uint32_t bits :
           {0x7F80'0001U, 0x7FC0'0000U, 0x7FFF'FFFFU, 0x7FBF'FFFFU, 0xFF80'0001U, 0xFFFF'FFFFU})
        CHECK(std::isnan(float_of(format->decode(format->encode(bits)))));
    }
    CHECK(bf16_from_f32_bits(0xFF80'0001U) == 0xFFC0);  // of its sign
    CHECK(f16_from_f32_bits(0xFF80'0001U) == 0x7FFF);   // the one that devices make
    CHECK(e4m3_from_f32_bits(0xFF80'0001U) == 0x7F);
    CHECK(std::signbit(float_of(f32_from_e4m3_bits(0xFF))));
  }

  TEST_CASE("every bfloat16 becomes the nearest e4m3 value and the nearest half") {
    for (const small_format* const format : {&f16, &e4m3}) {
      std::vector<double> values;
      for (std::uint32_t code = 0; code <= format->largest(); ++code)
        values.push_back(format->value(code));
      const double too_large = values.back() + (values.back() - values[values.size() - 2]) / 2;
      for (std::uint32_t bits = 0; bits < 0x7F80; ++bits) {
        const float value = float_of(bits << 16);
        const std::uint32_t code = format->encode(bits << 16);
        if (double{value} >= values.back()) {
          const bool is_infinite = format->has_infinity && double{value} >= too_large;
          CHECK(code == format->largest() + (is_infinite ? 1 : 0));
          continue;
        }
        // By the definition: no other value is nearer, and of two as near it is the even one.
        const double off = std::abs(values[code] - double{value});
        if (code > 0) CHECK(std::abs(values[code - 1] - double{value}) >= off);
        if (code < format->largest()) CHECK(std::abs(values[code + 1] - double{value}) >= off);
        if (code % 2 == 1) {
          CHECK(std::abs(values[code - 1] - double{value}) > off);
          CHECK(std::abs(values[std::min<std::size_t>(code + 1, format->largest())] - double{value}) >= off);
        }
      }
    }
  }
}
