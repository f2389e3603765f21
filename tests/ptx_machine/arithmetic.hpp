// arithmetic.hpp: what instructions calculate in one lane. Each function is one of the PTX ISA's, for
// operands of one lane; bind_arithmetic.hpp makes handlers of them.
#pragma once

#include "ptx_machine/rows.hpp"

#include <limits>

namespace ptx_machine {

/// shr. An amount of the width or more leaves zeros, or signs.
template <class T>
[[nodiscard]] T shifted_right(T a, u32 by) {
  const T some = static_cast<T>(a >> std::min<u32>(by, 8 * sizeof a - 1));
  return by < 8 * sizeof a ? some : static_cast<T>(some >> (8 * sizeof a - 1));
}
/// shf: the upper or the lower word of two after a shift. @pre `by` is at most 32.
[[nodiscard]] inline u32 funnel_left(u32 low, u32 high, u32 by) {
  return static_cast<u32>((u64{high} << 32 | low) << by >> 32);
}
[[nodiscard]] inline u32 funnel_right(u32 low, u32 high, u32 by) {
  return static_cast<u32>((u64{high} << 32 | low) >> by);
}
/// prmt. Each four bits of `c` choose a byte of the eight; the highest of the four asks for its sign instead.
[[nodiscard]] inline u32 permuted(u32 a, u32 b, u32 c) {
  const u64 both = u64{b} << 32 | a;
  u32 made = 0;
  for (u32 n = 0; n < 4; ++n) {
    const u32 which = c >> (4 * n) & 15;
    const u32 byte = static_cast<u32>(both >> (8 * (which & 7))) & 0xFF;
    made |= ((which & 8) != 0 ? (byte >> 7) * 0xFF : byte) << (8 * n);
  }
  return made;
}
[[nodiscard]] inline u32 reversed(u32 a) {
  u32 made = 0;
  for (u32 b = 0; b < 32; ++b)
    made |= (a >> b & 1) << (31 - b);
  return made;
}
/// bfe. A field of length 0 is 0. Above a signed field lies its sign, also where the field ends beyond the
/// register.
template <class T>
[[nodiscard]] T extracted(T a, u32 position, u32 length) {
  using U = std::make_unsigned_t<T>;
  constexpr u32 bits = 8 * sizeof a;
  position &= 255, length &= 255;
  if (length == 0) return 0;
  const u32 top = std::min(position + length - 1, bits - 1);
  const U sign = std::is_signed_v<T> && (static_cast<U>(a) >> top & 1) != 0 ? ~U{0} : U{0};
  const u32 kept = position < bits ? std::min(length, bits - position) : 0;
  const U moved = position < bits ? static_cast<U>(a) >> position : U{0};
  const U mask = kept >= bits ? ~U{0} : (U{1} << kept) - 1;
  return static_cast<T>((moved & mask) | (sign & ~mask));
}
/// bfi. `where` has the position in its upper half and the length in its lower half.
template <class U>
[[nodiscard]] U inserted(U a, U b, u64 where) {
  constexpr u64 bits = 8 * sizeof a;
  const u64 position = where >> 32 & 255, length = where & 255;
  if (length == 0 || position >= bits) return b;
  const U mask = (length >= bits ? ~U{0} : (U{1} << length) - 1) << position;
  return (b & ~mask) | (static_cast<U>(a << position) & mask);
}
/// div of integers. The ISA leaves a division by zero open; devices return all ones.
template <class T>
[[nodiscard]] T quotient(T a, T b) {
  if (b == 0) return static_cast<T>(~T{0});
  if (std::is_signed_v<T> && b == static_cast<T>(-1)) return static_cast<T>(u64{0} - static_cast<u64>(a));
  return static_cast<T>(a / b);
}
template <class T>
[[nodiscard]] T remainder_of(T a, T b) {
  if (b == 0) return a;
  return std::is_signed_v<T> && b == static_cast<T>(-1) ? T{0} : static_cast<T>(a % b);
}
template <class T>
[[nodiscard]] T magnitude(T a) {
  if constexpr (std::is_floating_point_v<T>)
    return std::fabs(a);
  else
    return a < T{0} ? static_cast<T>(u64{0} - static_cast<u64>(a)) : a;
}
template <class T>
[[nodiscard]] T negated(T a) {
  if constexpr (std::is_floating_point_v<T>)
    return -a;
  else
    return static_cast<T>(u64{0} - static_cast<u64>(a));
}
template <class T>
[[nodiscard]] u64 wide_product(T a, T b) {
  using wide = std::conditional_t<std::is_signed_v<T>, i64, u64>;
  return static_cast<u64>(static_cast<wide>(a) * static_cast<wide>(b));
}

__extension__ using i128 = __int128;
__extension__ using u128 = unsigned __int128;
template <class T>
[[nodiscard]] T high_product(T a, T b) {
  using wide = std::conditional_t<std::is_signed_v<T>, i128, u128>;
  return static_cast<T>((static_cast<wide>(a) * static_cast<wide>(b)) >> (8 * sizeof(T)));
}
/// min and max. A NaN loses against a number; -0 is below +0.
template <bool Least, class T>
[[nodiscard]] T extreme(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (a != a) return b;
    if (b != b) return a;
    if (a == b) return std::signbit(a) == Least ? a : b;
  }
  return (a < b) == Least ? a : b;
}

// ---- bits ----

/// bfind: the place of the highest bit that differs from the sign, or its distance from the top; all ones if
/// there is none.
template <class T>
[[nodiscard]] u32 highest_bit(T a, bool is_distance) {
  using U = std::make_unsigned_t<T>;
  const U bits = a < T{0} ? static_cast<U>(~a) : static_cast<U>(a);
  if (bits == 0) return ~u32{0};
  const auto zeros = static_cast<u32>(std::countl_zero(bits));
  return is_distance ? zeros : 8 * sizeof a - 1 - zeros;
}
/// fns: the place of the n-th one, counted upwards from `base`, or downwards for a negative n; all ones if
/// there is none.
[[nodiscard]] inline u32 nth_one(u32 mask, u32 base, i32 n) {
  if (n == 0) return base < 32 && (mask >> base & 1) != 0 ? base : ~u32{0};
  i64 left = n < 0 ? -i64{n} : i64{n};
  for (i64 at = base; at >= 0 && at < 32; at += n > 0 ? 1 : -1) {
    if ((mask >> at & 1) != 0 && --left == 0) return static_cast<u32>(at);
  }
  return ~u32{0};
}
/// prmt with a mode, 0 to 5: f4e, b4e, rc8, ecl, ecr, rc16. The table tells which byte goes where, lowest
/// first.
template <unsigned Mode>
[[nodiscard]] u32 permuted_by_mode(u32 a, u32 b, u32 c) {
  const u32 s = c & 3;
  const u32 from[6][4] = {{s, s + 1, s + 2, s + 3},
                          {s, (s + 7) % 8, (s + 6) % 8, (s + 5) % 8},
                          {s, s, s, s},
                          {s, std::max(s, 1U), std::max(s, 2U), 3},
                          {0, std::min(s, 1U), std::min(s, 2U), s},
                          {s % 2 * 2, s % 2 * 2 + 1, s % 2 * 2, s % 2 * 2 + 1}};
  const auto& bytes = from[Mode];
  return permuted(a, b, bytes[0] | bytes[1] << 4 | bytes[2] << 8 | bytes[3] << 12);
}

/// mul24: the product of the lower 24 bits, which has 48.
[[nodiscard]] inline u64 low_24(u32 a, u32 b) {
  return u64{a & 0xFF'FFFF} * (b & 0xFF'FFFF);
}
[[nodiscard]] inline u64 low_24(i32 a, i32 b) {
  const auto of = [](i32 x) { return i64{static_cast<i32>(static_cast<u32>(x) << 8) >> 8}; };
  return static_cast<u64>(of(a) * of(b));
}
template <class T>
[[nodiscard]] u32 middle_24(T a, T b) {
  return static_cast<u32>(low_24(a, b) >> 16);
}
[[nodiscard]] inline i32 saturated(i64 a) {
  return static_cast<i32>(
      std::clamp<i64>(a, std::numeric_limits<i32>::min(), std::numeric_limits<i32>::max()));
}

// ---- several numbers in a register ----

/// dp4a (Count 4) adds four products of bytes to c; dp2a (Count 2) adds two products of a half of a and a
/// byte of b.
template <bool IsSignedA, bool IsSignedB, unsigned Count>
[[nodiscard]] u32 dot_product(u32 a, u32 b, u32 c) {
  constexpr unsigned width = 32 / Count;
  for (unsigned n = 0; n < Count; ++n) {
    u32 x = a >> (width * n), y = b >> (8 * n) & 0xFF;
    x = width == 8 ? x & 0xFF : x & 0xFFFF;
    if (IsSignedA && (x >> (width - 1) & 1) != 0) x -= u32{1} << width;
    if (IsSignedB && (y >> 7 & 1) != 0) y -= 0x100;
    c += x * y;
  }
  return c;
}
/// Applies F to the lower halves and to the upper halves.
template <auto F, class T>
[[nodiscard]] u32 by_halves(u32 a, u32 b) {
  const auto low = static_cast<u16>(F(static_cast<T>(a & 0xFFFF), static_cast<T>(b & 0xFFFF)));
  const auto high = static_cast<u16>(F(static_cast<T>(a >> 16), static_cast<T>(b >> 16)));
  return u32{high} << 16 | low;
}

// ---- carry chains ----

enum class carry_op : u8 { add, sub, low_product, high_product };
constexpr u8 carry_comes_in = 1, carry_goes_out = 2;  // bits of inst::form
/// add.cc, addc, sub.cc, subc, mad.cc, madc. inst::size is the carry_op, inst::target the row of the carries,
/// which is a mask of lanes.
template <class T>
void carry(warp& w, inst& i) {
  using U = std::make_unsigned_t<T>;
  u32& flags = *w.row<u32>(i.target);
  for (u32 m = w.now; m != 0; m &= m - 1) {
    const auto k = static_cast<u32>(std::countr_zero(m));
    const T a = w.row<T>(i.row[1])[k], b = w.row<T>(i.row[2])[k];
    const auto op = static_cast<carry_op>(i.size);
    U x = static_cast<U>(a), y = static_cast<U>(b);
    if (op == carry_op::low_product || op == carry_op::high_product) {
      x = op == carry_op::low_product ? static_cast<U>(x * y) : static_cast<U>(high_product(a, b));
      y = w.row<U>(i.row[3])[k];
    }
    const U in = (i.form & carry_comes_in) != 0 ? static_cast<U>(flags >> k & 1) : U{0};
    U made;
    bool is_out;
    if (op == carry_op::sub) {
      made = x - y - in;
      is_out = x < y || (x == y && in != 0);
    } else {
      made = x + y + in;
      is_out = made < x || (made == x && in != 0 && y != 0);
    }
    if ((i.form & carry_goes_out) != 0) flags = (flags & ~(u32{1} << k)) | static_cast<u32>(is_out) << k;
    w.row<U>(i.row[0])[k] = made;
  }
}

}  // namespace ptx_machine
