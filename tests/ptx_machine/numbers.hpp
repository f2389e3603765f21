// numbers.hpp: the number formats of PTX, and the conversions between them.
//
// A conversion splits a number into a sign, an integer and a power of two, which is exact for every format
// here, and rounds once. It follows the PTX ISA's description of `cvt`: conversions to integers saturate; a
// NaN becomes zero, or the integer with only the top bit set if either side has 64 bits; `.satfinite` turns
// overflow and infinities into the largest finite number, and keeps NaN.
#pragma once

#include "ptx_machine/parse.hpp"

#include <cmath>

// Tells GCC that a loop's lanes do not depend on one another; clang finds it out or checks when it runs.
#if defined(__GNUC__) && !defined(__clang__)
#define LLMMEM_PTX_INDEPENDENT_LANES _Pragma("GCC ivdep")
#else
#define LLMMEM_PTX_INDEPENDENT_LANES
#endif

namespace ptx_machine {

constexpr u32 nan_bits = 0x7FFF'FFFF;  // the f32 NaN that devices make

/// `value`, or the NaN that a device makes in its place.
template <class T>
[[nodiscard]] inline T settled(T value) {
  if constexpr (std::is_same_v<T, float>)
    return value == value ? value : std::bit_cast<float>(nan_bits);
  else
    return value;
}
/// `.ftz`: a subnormal becomes a zero of its sign.
[[nodiscard]] inline float flushed(float x) {
  return std::fabs(x) < 0x1p-126F ? std::copysign(0.0F, x) : x;
}

/// A floating-point format.
struct float_format {
  int digits, bias;            // fraction bits; what the exponent field is above the exponent
  u64 largest, infinity, nan;  // without a sign; e4m3 has no infinity and puts its NaN there
  unsigned bits;
};
constexpr float_format f64_format{
    52, 1023, 0x7FEF'FFFF'FFFF'FFFF, 0x7FF0'0000'0000'0000, 0x7FFF'FFFF'FFFF'FFFF, 64},
    f32_format{23, 127, 0x7F7F'FFFF, 0x7F80'0000, nan_bits, 32},
    f16_format{10, 15, 0x7BFF, 0x7C00, 0x7FFF, 16}, bf16_format{7, 127, 0x7F7F, 0x7F80, 0x7FFF, 16},
    e4m3_format{3, 7, 0x7E, 0x7F, 0x7F, 8}, e5m2_format{2, 15, 0x7B, 0x7C, 0x7F, 8};

enum class rounding : u8 { nearest_even, toward_zero, down, up };

/// A number of any format: size * 2^power, infinity or NaN.
struct exact_number {
  u64 size = 0;
  int power = 0;
  bool is_negative = false, is_infinite = false, is_nan = false;

  [[nodiscard]] static exact_number of_float(const float_format& format, u64 bits) {
    const u64 sign = u64{1} << (format.bits - 1), rest = bits & (sign - 1);
    exact_number made;
    made.is_negative = (bits & sign) != 0;
    made.is_nan = rest > format.largest && (rest != format.infinity || format.infinity == format.nan);
    made.is_infinite = rest > format.largest && !made.is_nan;
    const int field = static_cast<int>(rest >> format.digits);
    const u64 fraction = rest & ((u64{1} << format.digits) - 1);
    made.size = field != 0 ? fraction | u64{1} << format.digits : fraction;
    made.power = std::max(field, 1) - format.bias - format.digits;
    return made;
  }
  [[nodiscard]] static exact_number of_integer(u64 bits, unsigned width, bool is_signed) {
    const u64 mask = width == 64 ? ~u64{0} : (u64{1} << width) - 1;
    exact_number made;
    made.is_negative = is_signed && (bits >> (width - 1) & 1) != 0;
    made.size = made.is_negative ? 0 - (bits | ~mask) : bits & mask;
    return made;
  }
  /// The exponent of the leading bit. @pre size is not 0.
  [[nodiscard]] int exponent() const { return power + 63 - std::countl_zero(size); }

  /// The nearest multiple of 2^at in the direction of `how`. @pre The result is below 2^(64 + at).
  [[nodiscard]] exact_number rounded(int at, rounding how) const {
    const int drop = at - power;
    if (drop <= 0) return *this;
    exact_number made = *this;
    made.power = at;
    made.size = drop < 64 ? size >> drop : 0;
    // Twice what is dropped, compared with 2^at: less, equal or more.
    const u64 dropped = drop < 64 ? size << (64 - drop) : size != 0 ? 1 : 0;
    const u64 half = u64{1} << 63;
    const bool is_tie = drop == 64 ? size == half : drop < 64 && dropped == half;
    const bool is_more = drop == 64 ? size > half : drop < 64 && dropped > half;
    const bool is_up = how == rounding::nearest_even ? is_more || (is_tie && (made.size & 1) != 0)
                       : how == rounding::toward_zero
                           ? false
                           : dropped != 0 && is_negative == (how == rounding::down);
    made.size += is_up ? 1 : 0;
    return made;
  }
  [[nodiscard]] u64 as_float(const float_format& format, rounding how, bool is_kept_finite) const {
    if (is_nan) return format.nan;
    const u64 sign = is_negative ? u64{1} << (format.bits - 1) : 0;
    const bool is_away =
        how == rounding::nearest_even || how == (is_negative ? rounding::down : rounding::up);
    if (is_infinite) return sign | (is_kept_finite ? format.largest : format.infinity);
    if (size == 0) return sign;
    const int least = 1 - format.bias, top = std::max(exponent(), least);
    if (top > 2 * format.bias) return sign | (is_kept_finite || !is_away ? format.largest : format.infinity);
    const int last = top - format.digits;
    const exact_number near = rounded(last, how);
    const u64 made = (static_cast<u64>(top - least) << format.digits) + (near.size << (near.power - last));
    if (made <= format.largest) return sign | made;
    return sign | (is_kept_finite || !is_away ? format.largest : format.infinity);
  }
  /// Saturates. @pre It is no NaN.
  [[nodiscard]] u64 as_integer(unsigned width, bool is_signed, rounding how) const {
    const u64 most = (is_signed ? u64{1} << (width - 1) : width == 64 ? 0 : u64{1} << width) - 1;
    const u64 limit = !is_negative ? most : is_signed ? most + 1 : 0;
    u64 made = limit;
    if (!is_infinite && (size == 0 || exponent() < 64)) {
      const exact_number near = rounded(0, how);
      made = std::min(size == 0 ? 0 : near.size << near.power, limit);
    }
    return is_negative ? 0 - made : made;
  }
};

/// The value of a number of at most 32 bits, for printing and for infinities.
[[nodiscard]] inline double decoded(const float_format& format, u64 bits) {
  const exact_number of = exact_number::of_float(format, bits);
  const double size = of.is_nan        ? std::nan("")
                      : of.is_infinite ? HUGE_VAL
                                       : std::ldexp(static_cast<double>(of.size), of.power);
  return of.is_negative ? -size : size;
}

/// A type that `cvt` or `mma` names: u or s (integers), f (f16, f32, f64), b (bf16), 4 (e4m3), 5 (e5m2).
struct number_type {
  char kind = 0;
  u8 bits = 0;
  bool is_pair = false;

  [[nodiscard]] static number_type of(std::string_view name) {
    number_type made;
    if (name.size() > 2 && name.substr(name.size() - 2) == "x2") made.is_pair = true, name.remove_suffix(2);
    if (name == "bf16") return {'b', 16, made.is_pair};
    if (name == "e4m3" || name == "e5m2") return {name[1], 8, made.is_pair};
    made.kind = name[0] == 'b' ? 'u' : name[0];
    made.bits = static_cast<u8>(bits_of_type(name));
    return made;
  }
  [[nodiscard]] bool is_integer() const { return kind == 'u' || kind == 's'; }
  [[nodiscard]] bool is_f32() const { return kind == 'f' && bits == 32; }
  [[nodiscard]] const float_format& format() const {
    if (kind == 'b') return bf16_format;
    if (kind == '4') return e4m3_format;
    if (kind == '5') return e5m2_format;
    return bits == 64 ? f64_format : bits == 32 ? f32_format : f16_format;
  }
};

/// What a `cvt` does with one number.
struct conversion {
  number_type to, from;
  rounding how = rounding::nearest_even;
  bool is_integral = false;      // .rni, .rzi, .rmi, .rpi
  bool saturates = false;        // .sat
  bool is_kept_finite = false;   // .satfinite
  bool flushes = false;          // .ftz
  bool clamps_negative = false;  // .relu
  u8 to_row = 0, from_row = 0;   // bytes of a lane in the registers

  [[nodiscard]] u64 operator()(u64 bits) const {
    if (from.is_integer() && to.is_integer() && !saturates) {
      const u64 mask = (u64{2} << (from.bits - 1)) - 1;
      const bool is_negative = from.kind == 's' && (bits >> (from.bits - 1) & 1) != 0;
      return is_negative ? bits | ~mask : bits & mask;
    }
    exact_number value = from.is_integer() ? exact_number::of_integer(bits, from.bits, from.kind == 's')
                                           : exact_number::of_float(from.format(), bits);
    if (flushes && from.is_f32() && value.size < u64{1} << 23) value.size = 0;
    if (to.is_integer()) {
      if (value.is_nan) return from.bits == 64 || to.bits == 64 ? u64{1} << (to.bits - 1) : 0;
      return value.as_integer(to.bits, to.kind == 's', how);
    }
    if (is_integral && !value.is_nan && !value.is_infinite) value = value.rounded(0, how);
    if (saturates) {
      if (value.is_nan || value.is_negative) value = {};
      if (value.is_infinite || (value.size != 0 && value.exponent() >= 0))
        value = {1, 0, false, false, false};
    }
    if (clamps_negative && value.is_negative && !value.is_nan) value = {};
    const u64 made = value.as_float(to.format(), how, is_kept_finite);
    const bool is_subnormal = (made & 0x7F80'0000) == 0;
    return flushes && to.is_f32() && is_subnormal ? made & 0x8000'0000 : made;
  }
};

// Quick forms of the conversions that kernels make most.
[[nodiscard]] inline u16 half_of(float x) {
  return x == x ? std::bit_cast<u16>(static_cast<_Float16>(x)) : u16{0x7FFF};
}
[[nodiscard]] inline u16 bfloat_of(float x) {
  const u32 bits = std::bit_cast<u32>(x);
  return static_cast<u16>(x == x ? (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 : 0x7FFF);
}
[[nodiscard]] inline float float_of_half(u16 bits) {
  return static_cast<float>(std::bit_cast<_Float16>(bits));
}

}  // namespace ptx_machine
