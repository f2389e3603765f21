// tensor_cores.hpp: the sums that a tensor core makes, bit for bit.
//
// A tensor core does not round each sum to nearest. In one step it takes the exact products of some elements
// and the accumulator, aligns all of them to the largest exponent among them, cuts each off below a fixed
// number of fraction bits, adds what is left exactly, and cuts the sum off to an f32. How many products a
// step has, and how many fraction bits, depends on the architecture. The numbers are those of MMA-Sim
// (github.com/microsoft/MMA-Sim, mmasim/simulator/nv_ptx.py and arithmetic.py, commit c785138; arXiv
// 2511.10909), which its authors compared with the devices:
//
//                        fraction bits   products of a step   fraction bits of the result
//   sm_70                     23                 all                     23
//   sm_75                     24                 all                     23
//   sm_80 to sm_89            24                   8                     23
//   sm_89, 8-bit types        13                  16                     13
//   sm_90 and newer           25                 all                     23
//
// The exponent of a product is the sum of its factors' exponents, also where the product of the significands
// is 2 or more. A subnormal has the smallest exponent of its type; a zero has exponent -126. No result is
// flushed: a subnormal sum is cut off at the last bit of a subnormal. A sum of zero is +0. A sum of 2^128 or
// more is an infinity. A NaN is 0x7FFFFFFF.
//
// An error bound. Let S be |c| + the sum of |a b| over all k, all of them normal numbers. A step of n
// products cuts off n + 1 terms, each by less than 2^-F S, and the sum by less than 2^-R S, where F and R are
// the fraction bits of the terms and of the result. So d is within
//   steps ((n + 1) 2^-F + 2^-R) S
// of the exact c + sum of a b, in whatever order the products come: 11 * 2^-23 S for 16-bit elements and k =
// 16 on sm_80, 5.25 * 2^-23 S on sm_90; 36 * 2^-13 S for 8-bit elements and k = 32 on sm_89, 9.25 * 2^-23 S
// on sm_90. Where S may be below 2^-126, add steps 2^(-126 - R).
#pragma once

#include "ptx_machine/numbers.hpp"

#include <array>

namespace ptx_machine {

/// How the tensor cores of an architecture add.
struct tensor_core {
  int fraction_bits = 25;  // of each term, below the largest exponent
  int result_bits = 23;    // of the sum
  u32 products = 16;       // of one step

  [[nodiscard]] static tensor_core of(int arch, bool is_8_bit, u32 depth) {
    if (arch == 89 && is_8_bit) return {13, 13, std::min(depth, 16U)};
    const u32 half = is_8_bit ? 16 : 8;
    if (arch >= 90) return {25, 23, depth};
    if (arch >= 80) return {24, 23, std::min(depth, half)};
    return {arch >= 75 ? 24 : 23, 23, depth};
  }
};

/// The elements of a matrix as integers: significand * 2^(exponent - fraction bits of the type). An infinity
/// or NaN counts as zero here; `has_special` tells that there is one.
template <u32 Rows, u32 Columns>
struct factors {
  u32 bits[Rows][Columns];
  i32 significand[Rows][Columns];
  i32 exponent[Rows][Columns];
  bool has_special = false;

  /// Splits the first `row_count` rows and `column_count` columns of `bits`.
  void split(const float_format& type, u32 row_count, u32 column_count) {
    const u32 sign_at = type.bits - 1, magnitude = (1U << sign_at) - 1,
              largest = static_cast<u32>(type.largest);
    const auto digits = static_cast<u32>(type.digits);
    u32 specials = 0;
    for (u32 r = 0; r < row_count; ++r) {
      LLMMEM_PTX_INDEPENDENT_LANES
      for (u32 c = 0; c < column_count; ++c) {
        const u32 all = bits[r][c], rest = all & magnitude, field = rest >> digits;
        const u32 is_special = rest > largest ? 1 : 0;
        const u32 fraction = rest & ((1U << digits) - 1);
        const u32 size = is_special != 0 ? 0 : field != 0 ? fraction | 1U << digits : fraction;
        const bool is_negative = (all >> sign_at & 1) != 0;
        significand[r][c] = is_negative ? -static_cast<i32>(size) : static_cast<i32>(size);
        exponent[r][c] = size == 0 ? -126 : static_cast<i32>(field != 0 ? field : 1) - type.bias;
        specials |= is_special;
      }
    }
    has_special = specials != 0;
  }
};

/// A tile's operands: D of 16 rows and 8 columns is A B + C, with `depth` products for each element of D.
struct tensor_tile {
  static constexpr u32 rows = 16, columns = 8, most_depth = 32;
  u32 depth = 16;
  float_format left_type = f16_format, right_type = f16_format;
  factors<rows, most_depth> left;
  factors<most_depth, columns> right;
  u32 sum[rows][columns];  // bits of f32

  void multiply_add(int arch) {
    left.split(left_type, rows, depth);
    right.split(right_type, depth, columns);
    const tensor_core core = tensor_core::of(arch, left_type.bits == 8, depth);
    for (u32 row = 0; row < rows; ++row) {
      for (u32 first = 0; first < depth; first += core.products)
        step(core, row, first);
    }
  }

 private:
  static constexpr u32 infinity = 0x7F80'0000, quiet_nan = 0x7FFF'FFFF;

  /// Adds the products [first, first + core.products) to each sum of a row.
  void step(const tensor_core& core, u32 row, u32 first) {
    i32 product[most_depth][columns], exponent[most_depth][columns], most[columns];
    u32 specials = 0;
    for (u32 c = 0; c < columns; ++c) {
      most[c] = exponent_of(sum[row][c]);
      specials |= (sum[row][c] & infinity) == infinity ? 1U : 0U;
    }
    if (specials != 0 || left.has_special || right.has_special) [[unlikely]]
      return special_step(core, row, first);
    for (u32 k = 0; k < core.products; ++k) {
      const i32 significand = left.significand[row][first + k], power = left.exponent[row][first + k];
      LLMMEM_PTX_INDEPENDENT_LANES
      for (u32 c = 0; c < columns; ++c) {
        product[k][c] = significand * right.significand[first + k][c];
        exponent[k][c] = power + right.exponent[first + k][c];
        most[c] = std::max(most[c], exponent[k][c]);
      }
    }
    // Eight products that are below 2^27 each do not overflow; doubles hold the sum of all.
    double total[columns];
    const i32 raised = core.fraction_bits - left_type.digits - right_type.digits;
    for (u32 c = 0; c < columns; ++c)
      total[c] = aligned_accumulator(core, sum[row][c], most[c]);
    for (u32 some = 0; some < core.products; some += 8) {
      i32 part[columns]{};
      for (u32 k = some; k < some + 8; ++k) {
        LLMMEM_PTX_INDEPENDENT_LANES
        for (u32 c = 0; c < columns; ++c) {
          const i32 size = product[k][c] < 0 ? -product[k][c] : product[k][c];
          const i32 kept = (size << raised) >> std::min(most[c] - exponent[k][c], 31);
          part[c] += product[k][c] < 0 ? -kept : kept;
        }
      }
      for (u32 c = 0; c < columns; ++c)
        total[c] += part[c];
    }
    for (u32 c = 0; c < columns; ++c)
      sum[row][c] = cut_off(core, total[c], most[c]);
  }

  [[nodiscard]] static i32 exponent_of(u32 bits) {
    const i32 field = static_cast<i32>(bits >> 23 & 0xFF);
    return (field != 0 ? field : 1) - 127;
  }
  [[nodiscard]] static i32 aligned_accumulator(const tensor_core& core, u32 bits, i32 most) {
    const u32 fraction = bits & 0x7F'FFFF;
    const i32 size = static_cast<i32>((bits & infinity) != 0 ? fraction | 0x80'0000 : fraction);
    const i32 scaled = size << std::max(core.fraction_bits - 23, 0) >> std::max(23 - core.fraction_bits, 0);
    const i32 kept = scaled >> std::min(most - exponent_of(bits), 31);
    return bits >> 31 != 0 ? -kept : kept;
  }
  /// total * 2^(most - fraction bits), toward zero, as f32.
  [[nodiscard]] static u32 cut_off(const tensor_core& core, double total, i32 most) {
    const u64 dropped = (u64{1} << (52 - core.result_bits)) - 1;
    const double scale = std::bit_cast<double>(static_cast<u64>(most - core.fraction_bits + 1023) << 52);
    const double value = std::bit_cast<double>(std::bit_cast<u64>(total) & ~dropped) * scale;
    const double last = std::bit_cast<double>(static_cast<u64>(1023 - 126 - core.result_bits) << 52);
    const double small = std::trunc(value * (1 / last)) * last + 0.0;  // -0 becomes +0
    return std::bit_cast<u32>(static_cast<float>(std::fabs(value) < 0x1p-126 ? small : value));
  }

  /// As `step`, where some sum of the row may have an infinity or NaN in it.
  void special_step(const tensor_core& core, u32 row, u32 first) {
    double exact[columns];
    tensor_tile finite = *this;
    finite.left.has_special = finite.right.has_special = false;
    for (u32 c = 0; c < columns; ++c) {
      exact[c] = std::bit_cast<float>(sum[row][c]);
      for (u32 k = first; k < first + core.products; ++k)
        exact[c] += decoded(left_type, left.bits[row][k]) * decoded(right_type, right.bits[k][c]);
      if (!std::isfinite(exact[c])) finite.sum[row][c] = 0;
    }
    finite.step(core, row, first);
    for (u32 c = 0; c < columns; ++c) {
      sum[row][c] = std::isfinite(exact[c]) ? finite.sum[row][c]
                    : std::isnan(exact[c])  ? quiet_nan
                    : exact[c] < 0          ? infinity | 1U << 31
                                            : infinity;
    }
  }
};

}  // namespace ptx_machine
