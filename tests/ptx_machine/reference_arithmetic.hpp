// reference_arithmetic.hpp: what instructions must calculate, written from the PTX ISA for tests of the
// machine and without its code. A rounded operation is calculated by x87 in a wider format, which keeps a
// sign of what it drops.
#pragma once

#include <cfenv>
#include <cstdio>
#include <cstdlib>

#include "ptx_machine/reference_formats.hpp"

namespace reference {

using i32 = std::int32_t;
using i64 = std::int64_t;

struct operands {
  u64 a, b, c, d;
};

/// x87's 64 bits of a result, cut off, with the last bit set where something was cut off: rounding it once
/// more gives what rounding the exact result gives.
template <class Act>
long double odd(Act act) {
  std::fesetround(FE_TOWARDZERO);
  std::feclearexcept(FE_ALL_EXCEPT);
  volatile long double made = act();
  const bool is_inexact = std::fetestexcept(FE_INEXACT) != 0;
  std::fesetround(FE_TONEAREST);
  const long double cut = made;
  if (!is_inexact || cut == 0 || !std::isfinite(cut)) return cut;
  int exponent;
  const long double size = std::frexp(std::fabs(cut), &exponent);
  const auto bits = static_cast<u64>(std::ldexp(size, 64)) | 1;
  return std::copysign(std::ldexp(static_cast<long double>(bits), exponent - 64), cut);
}
template <class T>
T rounded(long double value, char way) {
  const int mode = way == 'n'   ? FE_TONEAREST
                   : way == 'z' ? FE_TOWARDZERO
                   : way == 'm' ? FE_DOWNWARD
                                : FE_UPWARD;
  volatile long double from = value;
  std::fesetround(mode);
  volatile T made = static_cast<T>(from);
  std::fesetround(FE_TONEAREST);
  return made;
}

/// The words of an opcode.
struct request {
  std::string opcode;
  explicit request(const std::string& text) {
    std::size_t from = text.find("setp");
    if (from == std::string::npos) from = text.find("testp");
    if (from == std::string::npos) from = 0;
    opcode = text.substr(from, text.find(' ', from) - from) + ".";
  }
  [[nodiscard]] bool has(const std::string& word) const {
    return opcode.find("." + word + ".") != std::string::npos;
  }
  [[nodiscard]] std::string name() const { return opcode.substr(0, opcode.find('.')); }
  [[nodiscard]] char way() const { return has("rz") ? 'z' : has("rm") ? 'm' : has("rp") ? 'p' : 'n'; }
};
template <class T>
T from_bits(u64 bits) {
  if constexpr (sizeof(T) == 4)
    return std::bit_cast<T>(static_cast<u32>(bits));
  else
    return std::bit_cast<T>(bits);
}
template <class T>
inline u64 to_bits(T value) {
  if constexpr (sizeof(T) == 4)
    return value == value ? std::bit_cast<u32>(value) : 0x7FFFFFFF;
  else
    return std::bit_cast<u64>(value);
}
inline float flushed(float x) {
  return std::fabs(x) < 0x1p-126F ? std::copysign(0.0F, x) : x;
}
template <class T>
T chosen(const request& of, T a, T b, bool is_min) {
  if (a != a || b != b) return of.has("NaN") ? std::numeric_limits<T>::quiet_NaN() : a != a ? b : a;
  if (a == 0 && b == 0) return std::signbit(a) == is_min ? a : b;
  return (a < b) == is_min ? a : b;
}
template <class T>
inline u64 float_result(const request& of, const operands& from) {
  T a = from_bits<T>(from.a), b = from_bits<T>(from.b), c = from_bits<T>(from.c);
  const std::string name = of.name();
  if (of.has("ftz"))
    a = static_cast<T>(flushed(static_cast<float>(a))), b = static_cast<T>(flushed(static_cast<float>(b))),
    c = static_cast<T>(flushed(static_cast<float>(c)));
  if (name == "min" || name == "max") return to_bits(chosen(of, a, b, name == "min"));
  if (name == "abs") return to_bits(std::fabs(a));
  if (name == "neg") return to_bits(-a);
  if (name == "copysign") return to_bits(std::copysign(b, a));
  const bool is_reciprocal = name == "rcp";
  volatile long double x = is_reciprocal ? T{1} : a, y = is_reciprocal ? a : b, z = c;
  const long double exact = odd([&]() -> long double {
    if (name == "add") return x + y;
    if (name == "sub") return x - y;
    if (name == "mul") return x * y;
    if (name == "fma") return x * y + z;
    return name == "sqrt" ? std::sqrt(x) : x / y;
  });
  // A sum of zero from operands of unlike signs is -0 where results are rounded down.
  T made = rounded<T>(exact, of.way());
  if (exact == 0 && (name == "add" || name == "sub" || name == "fma")) {
    const bool first =
        std::signbit(name == "fma" ? static_cast<long double>(x) * y : static_cast<long double>(x));
    const bool second = std::signbit(name == "fma" ? static_cast<long double>(z)
                                                   : static_cast<long double>(y)) != (name == "sub");
    made = (first == second ? first : of.way() == 'm') ? -T{0} : T{0};
  }
  if (of.has("ftz")) made = static_cast<T>(flushed(static_cast<float>(made)));
  if (of.has("sat")) made = made > 0 ? std::min(made, T{1}) : T{0};
  return to_bits(made);
}
inline u64 half_result(const request& of, const operands& from) {
  const reference::type type(of.has("bf16") || of.has("bf16x2") ? "bf16" : "f16");
  const std::vector<double>& values = reference::values_of(type);
  const auto value = [&](u64 bits) {
    const double made = type.value(bits & 0xFFFF);
    return of.has("ftz") && std::fabs(made) < 0x1p-14 ? std::copysign(0.0, made) : made;
  };
  const std::string name = of.name();
  if (name == "neg") return (from.a & 0xFFFF) ^ 0x8000;
  if (name == "abs") return from.a & 0x7FFF;
  const double a = value(from.a), b = value(from.b), c = value(from.c);
  long double exact = 0;
  if (name == "min" || name == "max")
    exact = chosen(of, a, b, name == "min");
  else {
    volatile long double x = a, y = b, z = c;
    exact = odd([&]() -> long double {
      return name == "add" ? x + y : name == "sub" ? x - y : name == "mul" ? x * y : x * y + z;
    });
  }
  if (of.has("sat")) exact = exact > 0 ? std::min(exact, 1.0L) : 0;
  if (of.has("relu") && exact < 0) exact = 0;
  if (exact != exact) return 0x7FFF;
  const u64 made = reference::searched(type, values, exact, 'n', false);
  return of.has("ftz") && (made & 0x7C00) == 0 ? made & 0x8000 : made;
}

inline i128 as_signed(u64 bits, unsigned width) {
  const u64 low = width == 64 ? bits : bits & ((u64{1} << width) - 1);
  return (low >> (width - 1) & 1) != 0 ? static_cast<i128>(low) - (static_cast<i128>(1) << width)
                                       : static_cast<i128>(low);
}
struct integer_type {
  unsigned width;
  bool is_signed;
  explicit integer_type(const request& of) : width(0), is_signed(false) {
    for (const unsigned each : {16U, 32U, 64U}) {
      const std::string bits = std::to_string(each);
      if (of.has("s" + bits)) width = each, is_signed = true;
      if (of.has("u" + bits) || of.has("b" + bits)) width = each;
    }
  }
  [[nodiscard]] i128 value(u64 bits) const {
    return is_signed ? as_signed(bits, width)
                     : static_cast<i128>(width == 64 ? bits : bits & ((u64{1} << width) - 1));
  }
};
inline bool bit(u64 of, u64 at) {
  return (of >> at & 1) != 0;
}
inline u64 permuted(const request& of, const operands& x) {
  const auto byte = [&](u64 n) { return (n < 4 ? x.a >> (8 * n) : x.b >> (8 * (n - 4))) & 0xFF; };
  // The table of the ISA, most significant byte first.
  static const int tables[6][4][4] = {{{3, 2, 1, 0}, {4, 3, 2, 1}, {5, 4, 3, 2}, {6, 5, 4, 3}},
                                      {{5, 6, 7, 0}, {6, 7, 0, 1}, {7, 0, 1, 2}, {0, 1, 2, 3}},
                                      {{0, 0, 0, 0}, {1, 1, 1, 1}, {2, 2, 2, 2}, {3, 3, 3, 3}},
                                      {{3, 2, 1, 0}, {3, 2, 1, 1}, {3, 2, 2, 2}, {3, 3, 3, 3}},
                                      {{0, 0, 0, 0}, {1, 1, 1, 0}, {2, 2, 1, 0}, {3, 2, 1, 0}},
                                      {{1, 0, 1, 0}, {3, 2, 3, 2}, {1, 0, 1, 0}, {3, 2, 3, 2}}};
  static const char* const modes[] = {"f4e", "b4e", "rc8", "ecl", "ecr", "rc16"};
  u64 made = 0;
  for (int n = 0; n < 4; ++n) {
    u64 one = 0;
    bool is_moded = false;
    for (int mode = 0; mode < 6; ++mode)
      if (of.has(modes[mode])) one = byte(static_cast<u64>(tables[mode][x.c & 3][3 - n])), is_moded = true;
    if (!is_moded) {
      const u64 which = x.c >> (4 * n) & 15;
      one = byte(which & 7);
      if (which >= 8) one = one >= 128 ? 0xFF : 0;
    }
    made |= one << (8 * n);
  }
  return made;
}
inline u64 dotted(const request& of, const operands& x) {
  const std::size_t dot = of.opcode.find("32.");
  const bool is_signed_a = of.opcode[dot - 1] == 's',
             is_signed_b = of.opcode[of.opcode.find("32.", dot + 3) - 1] == 's';
  i128 sum = static_cast<i128>(x.c & 0xFFFFFFFF);
  const int count = of.name() == "dp4a" ? 4 : 2, width = 32 / count;
  for (int n = 0; n < count; ++n) {
    const u64 a = x.a >> (width * n) & ((u64{1} << width) - 1),
              b = x.b >> (8 * n + (of.has("hi") ? 16 : 0)) & 0xFF;
    sum += (is_signed_a ? as_signed(a, static_cast<unsigned>(width)) : static_cast<i128>(a)) *
           (is_signed_b ? as_signed(b, 8) : static_cast<i128>(b));
  }
  return static_cast<u64>(sum);
}
inline u64 chained(const std::string& text, const operands& x, unsigned width) {
  const auto low = [&](u64 bits) { return width == 64 ? bits : bits & 0xFFFFFFFF; };
  const u128 a = low(x.a), b = low(x.b), c = low(x.c), d = low(x.d),
             mask = (static_cast<u128>(1) << width) - 1;
  if (text.find("mad.lo.cc") != std::string::npos) {
    const u128 product = a * b, carry = ((product & mask) + c) >> width;
    return low(static_cast<u64>((product >> width) + d + carry));
  }
  const bool is_sum = text.find("add") != std::string::npos;
  const u128 first = is_sum ? (a + b) >> width & 1 : static_cast<u128>(a < b);
  if (text.find("0, 0") == std::string::npos)
    return low(static_cast<u64>(is_sum ? c + d + first : c - d - first));
  const u128 second = is_sum ? (c + d + first) >> width & 1 : static_cast<u128>(c < d + first);
  return low(static_cast<u64>(is_sum ? second : 0 - second));
}
/// Nothing where the ISA says nothing.
inline bool integer_result(const std::string& text, const request& of, const operands& x, u64& made) {
  const std::string name = of.name();
  const integer_type type(of);
  const unsigned width = type.width;
  const i128 a = type.value(x.a), b = type.value(x.b), c = type.value(x.c), one = 1;
  const u64 low_a = static_cast<u64>(a);
  const u32 b32 = static_cast<u32>(x.b), c32 = static_cast<u32>(x.c);
  made = 0;
  if (text.find(".cc") != std::string::npos)
    return made = chained(text, x, text.find(".u64") != std::string::npos ? 64 : 32), true;
  if (name == "shl") return made = b32 >= width ? 0 : static_cast<u64>(static_cast<u64>(a) << b32), true;
  if (name == "shr") return made = static_cast<u64>(b32 >= width ? (a < 0 ? -1 : 0) : a >> b32), true;
  if (name == "bfe") {
    const u64 msb = width - 1, position = b32 & 255, length = c32 & 255;
    const bool sign = type.is_signed && length != 0 && bit(low_a, std::min(position + length - 1, msb));
    for (u64 n = 0; n <= msb; ++n)
      made |= static_cast<u64>(n < length && position + n <= msb ? bit(low_a, position + n) : sign) << n;
    return true;
  }
  if (name == "bfi") {
    const bool is_fixed = text.find("%2") == std::string::npos;
    const bool is_seven = text.find(" 7,") != std::string::npos;
    const u64 position = is_fixed ? (is_seven ? 7 : 31) : b32 & 255,
              length = is_fixed ? (is_seven ? 30 : 8) : c32 & 255;
    made = x.d;
    for (u64 n = 0; n < length && position + n < width; ++n)
      made = (made & ~(u64{1} << (position + n))) | static_cast<u64>(bit(low_a, n)) << (position + n);
    return true;
  }
  if (name == "prmt") return made = permuted(of, x), true;
  if (name == "shf") {
    const u32 by = of.has("clamp") ? std::min(c32, 32U) : c32 & 31;
    const u64 both = (x.b & 0xFFFFFFFF) << 32 | (x.a & 0xFFFFFFFF);
    for (u32 n = 0; n < 32; ++n)  // bit n of the upper or the lower word after the shift
      made |= static_cast<u64>(of.has("l") ? bit(both, 32 + n - by) : n + by < 64 && bit(both, n + by)) << n;
    return true;
  }
  if (name == "div" || name == "rem") {
    if (b == 0 || (b == -1 && a == -(one << (width - 1)))) return false;
    return made = static_cast<u64>(name == "div" ? a / b : a % b), true;
  }
  if (name == "mul24") {
    const i128 p = of.has("s32") ? as_signed(x.a, 24) * as_signed(x.b, 24)
                                 : static_cast<i128>((x.a & 0xFFFFFF) * (x.b & 0xFFFFFF));
    return made = static_cast<u64>(of.has("hi") ? p >> 16 : p), true;
  }
  if (name == "mul" || name == "mad") {
    const auto product = static_cast<u128>(a) * static_cast<u128>(b);
    const u64 high = static_cast<u64>(type.is_signed ? static_cast<i128>(product) >> width
                                                     : static_cast<i128>(product >> width));
    return made =
               (of.has("hi") ? high : static_cast<u64>(product)) + (name == "mad" ? static_cast<u64>(c) : 0),
           true;
  }
  if (name == "sad") return made = static_cast<u64>(c + (a < b ? b - a : a - b)), true;
  if (of.has("sat")) {
    const i128 sum = name == "add" ? a + b : a - b;
    return made = static_cast<u64>(std::clamp<i128>(sum, -(one << 31), (one << 31) - 1)), true;
  }
  if (of.has("s16x2") || of.has("u16x2")) {
    for (unsigned half = 0; half < 32; half += 16) {
      const i128 p = as_signed(x.a >> half, 16), q = as_signed(x.b >> half, 16);
      made |= (static_cast<u64>(name == "add" ? p + q : std::min(p, q)) & 0xFFFF) << half;
    }
    return true;
  }
  if (name == "min" || name == "max")
    return made = static_cast<u64>((a < b) == (name == "min") ? a : b), true;
  if (name == "abs") return made = static_cast<u64>(a < 0 ? -a : a), true;
  if (name == "dp4a" || name == "dp2a") return made = dotted(of, x), true;
  if (name == "bfind") {
    const u64 bits = a < 0 ? ~low_a : low_a;
    made = 0xFFFFFFFF;
    for (unsigned n = 0; n < width; ++n)
      if (bit(bits, n)) made = of.has("shiftamt") ? width - 1 - n : n;
    return true;
  }
  if (name == "{") {  // fns
    const i32 offset = static_cast<i32>(c32);
    made = 0xFFFFFFFF;
    if (offset == 0) return made = bit(x.a, b32 & 31) ? b32 & 31 : 0xFFFFFFFF, true;
    i64 count = std::abs(i64{offset}) - 1;
    for (int at = static_cast<int>(b32 & 31); at >= 0 && at < 32; at += offset > 0 ? 1 : -1) {
      if (!bit(x.a, static_cast<u64>(at))) continue;
      if (count-- == 0) return made = static_cast<u64>(at), true;
    }
    return true;
  }
  if (name == "popc") {
    for (unsigned n = 0; n < width; ++n)
      made += bit(low_a, n) ? 1 : 0;
    return true;
  }
  if (name == "clz") {
    while (made < width && !bit(low_a, width - 1 - made))
      ++made;
    return true;
  }
  if (name == "brev") {
    for (unsigned n = 0; n < width; ++n)
      made |= static_cast<u64>(bit(low_a, n)) << (width - 1 - n);
    return true;
  }
  if (name == "lop3") {
    const unsigned table = text.find("0x1e") != std::string::npos ? 0x1E : 0xCA;
    for (unsigned n = 0; n < 32; ++n)
      made |= static_cast<u64>(table >> (4 * bit(x.a, n) + 2 * bit(x.b, n) + bit(x.c, n)) & 1) << n;
    return true;
  }
  if (name == "cnot") return made = a == 0 ? 1 : 0, true;
  if (name == "slct") {
    const bool is_first = of.has("s32") ? static_cast<i32>(c32) >= 0 : std::bit_cast<float>(c32) >= 0;
    return made = is_first ? x.a : x.b, true;
  }
  std::printf("FAILED: no reference for %s\n", text.c_str());
  std::exit(1);
}
inline u64 predicate(const request& of, const operands& x) {
  const float a = of.has("ftz") ? flushed(from_bits<float>(x.a)) : from_bits<float>(x.a);
  const float b = of.has("ftz") ? flushed(from_bits<float>(x.b)) : from_bits<float>(x.b);
  const bool is_nan = a != a || b != b;
  const u32 u = static_cast<u32>(x.a), v = static_cast<u32>(x.b);
  if (of.has("lo")) return u < v;
  if (of.has("hs")) return u >= v;
  if (of.has("s32"))
    return of.has("lt") ? static_cast<i32>(u) < static_cast<i32>(v)
                        : static_cast<i32>(u) >= static_cast<i32>(v);
  if (of.has("eq")) return a == b;
  if (of.has("ne")) return !is_nan && a != b;
  if (of.has("lt")) return a < b;
  if (of.has("le")) return a <= b;
  if (of.has("gt")) return a > b;
  if (of.has("ge")) return a >= b;
  if (of.has("equ")) return is_nan || a == b;
  if (of.has("neu")) return is_nan || a != b;
  if (of.has("ltu")) return is_nan || a < b;
  if (of.has("leu")) return is_nan || a <= b;
  if (of.has("gtu")) return is_nan || a > b;
  if (of.has("geu")) return is_nan || a >= b;
  if (of.has("num")) return !is_nan;
  if (of.has("nan")) return is_nan;
  const u32 exponent = u >> 23 & 0xFF, fraction = u & 0x7FFFFF;
  if (of.has("finite")) return exponent != 255;
  if (of.has("infinite")) return exponent == 255 && fraction == 0;
  if (of.has("number")) return exponent != 255 || fraction == 0;
  if (of.has("notanumber")) return exponent == 255 && fraction != 0;
  return of.has("normal") ? exponent != 0 && exponent != 255 : exponent == 0 && fraction != 0;
}

}  // namespace reference
