// half_arithmetic.hpp: arithmetic of f16 and bf16, and of pairs of them in a register. A result is rounded
// once: sums are made in double, and where a double does not hold a sum exactly, its last bit is set so that
// the rounding to fewer bits comes out right (rounding to odd).
#pragma once

#include "ptx_machine/arithmetic.hpp"

namespace ptx_machine {

enum class half_op : u8 { add, sub, mul, fma, min, max, neg, abs };

/// Bits of inst::form.
constexpr u8 half_is_pair = 1, half_is_bf16 = 2, half_flushes = 4, half_saturates = 8, half_clamps = 16,
             half_keeps_nan = 32;

/// a + c, or, where that is inexact, the neighbour whose last bit is 1.
[[nodiscard]] inline double odd_sum(double a, double c) {
  const double sum = a + c;
  if (!std::isfinite(sum)) return sum;
  const double other = sum - a, lost = (a - (sum - other)) + (c - other);
  const u64 bits = std::bit_cast<u64>(sum);
  if (lost == 0 || (bits & 1) != 0) return sum;
  return std::bit_cast<double>((lost > 0) == (sum > 0) ? bits + 1 : bits - 1);
}
[[nodiscard]] inline u32 half_result(half_op op, u8 form, const u32 (&source)[3]) {
  const float_format& format = (form & half_is_bf16) != 0 ? bf16_format : f16_format;
  if (op == half_op::neg) return source[0] ^ 0x8000;
  if (op == half_op::abs) return source[0] & 0x7FFF;
  const double least = std::ldexp(1.0, 1 - format.bias);
  double x[3];
  for (unsigned n = 0; n < 3; ++n) {
    x[n] = decoded(format, source[n]);
    if ((form & half_flushes) != 0 && std::fabs(x[n]) < least) x[n] = std::copysign(0.0, x[n]);
  }
  double made = 0;
  switch (op) {
    case half_op::add:
      made = odd_sum(x[0], x[1]);
      break;
    case half_op::sub:
      made = odd_sum(x[0], -x[1]);
      break;
    case half_op::mul:
      made = x[0] * x[1];
      break;
    case half_op::fma:
      made = odd_sum(x[0] * x[1], x[2]);
      break;
    default:
      made = op == half_op::min ? extreme<true>(x[0], x[1]) : extreme<false>(x[0], x[1]);
      if ((form & half_keeps_nan) != 0 && (std::isnan(x[0]) || std::isnan(x[1]))) made = std::nan("");
  }
  if ((form & half_saturates) != 0) made = made > 0 ? std::min(made, 1.0) : 0;
  if ((form & half_clamps) != 0 && made < 0) made = 0;
  const exact_number exact = exact_number::of_float(f64_format, std::bit_cast<u64>(made));
  const auto bits = static_cast<u32>(exact.as_float(format, rounding::nearest_even, false));
  const bool is_subnormal = (bits & static_cast<u32>(format.infinity)) == 0;
  return (form & half_flushes) != 0 && is_subnormal ? bits & 0x8000 : bits;
}
/// size: the operation; form: its modifiers. An operation of fewer operands finds its first one in the other
/// rows.
inline void calculate_halves(warp& w, inst& i) {
  const bool is_pair = (i.form & half_is_pair) != 0;
  const u32 bytes = is_pair ? 4 : 2;
  for (u32 m = w.now; m != 0; m &= m - 1) {
    const auto k = static_cast<u32>(std::countr_zero(m));
    u32 from[3];
    for (unsigned n = 0; n < 3; ++n)
      from[n] = static_cast<u32>(read_row(w, i.row[n + 1], bytes, k));
    const auto op = static_cast<half_op>(i.size);
    u32 made = half_result(op, i.form, {from[0] & 0xFFFF, from[1] & 0xFFFF, from[2] & 0xFFFF});
    if (is_pair) made |= half_result(op, i.form, {from[0] >> 16, from[1] >> 16, from[2] >> 16}) << 16;
    write_row(w, i.row[0], bytes, k, made);
  }
}

}  // namespace ptx_machine
