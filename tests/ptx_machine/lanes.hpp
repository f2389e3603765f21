// lanes.hpp: instructions that the lanes of a warp execute together, and those that do nothing or only fail.
#pragma once

#include "ptx_machine/arithmetic.hpp"
#include "ptx_machine/predicates.hpp"
#include "ptx_machine/tensor_cores.hpp"

namespace ptx_machine {

/// shfl.sync. inst::form: 0 bfly, 1 idx, 2 up, 3 down. Rows: d, a, b, c. inst::more has the row of the
/// predicate, if any. A lane whose source lies outside its segment keeps its own value.
inline void shuffle(warp& w, inst& i) {
  u32 made[32];
  u32 inside = 0;
  for (u32 m = w.now; m != 0; m &= m - 1) {
    const auto k = static_cast<u32>(std::countr_zero(m));
    const u32 b = w.row<u32>(i.row[2])[k] & 31;
    const u32 c = w.row<u32>(i.row[3])[k];
    const u32 segment = c >> 8 & 31;
    const u32 most = (k & segment) | (c & 31 & ~segment);
    const u32 from = i.form == 0   ? k ^ b
                     : i.form == 1 ? (k & segment) | (b & ~segment)
                     : i.form == 2 ? k - b
                                   : k + b;
    const bool is_inside = i.form == 2 ? static_cast<i32>(from) >= static_cast<i32>(most) : from <= most;
    const u32 lane = is_inside ? from : k;
    inside |= static_cast<u32>(is_inside) << k;
    if ((w.now >> lane & 1) == 0)
      w.wrong(i, fault_kind::divergence, k,
              "a shuffle from lane " + std::to_string(lane) + ", which takes no part");
    made[k] = w.row<u32>(i.row[1])[lane];
  }
  for (u32 m = w.now; m != 0; m &= m - 1)
    w.row<u32>(i.row[0])[std::countr_zero(m)] = made[std::countr_zero(m)];
  if (!i.more.empty()) put_mask(w, i.more[0], inside);
}
inline void put_all(warp& w, u32 row, u32 value) {
  for (u32 m = w.now; m != 0; m &= m - 1)
    w.row<u32>(row)[std::countr_zero(m)] = value;
}
/// vote.sync. inst::form: 0 all, 1 any, 2 uni, 3 ballot; bit 2 negates the source.
inline void vote(warp& w, inst& i) {
  const u32 votes = (*w.row<u32>(i.row[1]) ^ ((i.form & 4) != 0 ? ~u32{0} : 0)) & w.now;
  const bool answers[] = {votes == w.now, votes != 0, votes == w.now || votes == 0};
  if ((i.form & 3) == 3)
    put_all(w, i.row[0], votes);
  else
    put_mask(w, i.row[0], answers[i.form & 3] ? ~u32{0} : 0);
}
/// match.sync. inst::size has the bytes of a value. inst::form: 0 any, 1 all.
inline void match(warp& w, inst& i) {
  u32 made[32]{};
  for (u32 m = w.now; m != 0; m &= m - 1) {
    for (u32 n = w.now; n != 0; n &= n - 1) {
      const auto k = static_cast<u32>(std::countr_zero(m)), other = static_cast<u32>(std::countr_zero(n));
      if (read_row(w, i.row[1], i.size, k) == read_row(w, i.row[1], i.size, other)) made[k] |= 1U << other;
    }
  }
  const bool is_all = made[std::countr_zero(w.now)] == w.now;
  for (u32 m = w.now; m != 0; m &= m - 1) {
    const int k = std::countr_zero(m);
    w.row<u32>(i.row[0])[k] = i.form == 0 ? made[k] : is_all ? w.now : 0;
  }
  if (!i.more.empty()) put_mask(w, i.more[0], is_all ? ~u32{0} : 0);
}
template <auto F, class T>
void reduce(warp& w, inst& i) {
  T made = w.row<T>(i.row[1])[std::countr_zero(w.now)];
  for (u32 m = w.now & (w.now - 1); m != 0; m &= m - 1)
    made = static_cast<T>(F(made, w.row<T>(i.row[1])[std::countr_zero(m)]));
  put_all(w, i.row[0], static_cast<u32>(made));
}
template <auto F>
[[nodiscard]] handler reduces(std::string_view type) {
  return type == "s32" ? reduce<F, i32> : reduce<F, u32>;
}
/// mma.sync: D = A B + C, of 16 rows and 8 columns. inst::more has the rows of D, A, B and C, then the kind
/// of B's elements; inst::form is the kind of A's, inst::size the number of A's registers. The PTX ISA tells
/// where the elements lie, in "Matrix Fragments for mma.m16n8k16" and the sections beside it.
inline void multiply_matrices(warp& w, inst& i) {
  const number_type type{static_cast<char>(i.form), static_cast<u8>(i.form == 'f' || i.form == 'b' ? 16 : 8),
                         false};
  const u32 count_a = i.size, count_b = i.size / 2, each = 32 / type.bits, mask = (1U << type.bits) - 1;
  tensor_tile tile;
  tile.depth = count_b * 4 * each;
  tile.left_type = type.format();
  tile.right_type = number_type{static_cast<char>(i.more.back()), type.bits, false}.format();
  for (u32 k = 0; k < 32; ++k) {
    const u32 group = k / 4, part = k % 4;
    for (u32 r = 0; r < count_a; ++r) {
      const u32 word = w.row<u32>(i.more[4 + r])[k];
      for (u32 e = 0; e < each; ++e)
        tile.left.bits[group + r % 2 * 8][r / 2 * 4 * each + part * each + e] =
            word >> (e * type.bits) & mask;
    }
    for (u32 r = 0; r < count_b; ++r) {
      const u32 word = w.row<u32>(i.more[4 + count_a + r])[k];
      for (u32 e = 0; e < each; ++e)
        tile.right.bits[r * 4 * each + part * each + e][group] = word >> (e * type.bits) & mask;
    }
    for (u32 r = 0; r < 4; ++r)
      tile.sum[group + r / 2 * 8][part * 2 + r % 2] = w.row<u32>(i.more[4 + count_a + count_b + r])[k];
  }
  tile.multiply_add(w.in.of.of->arch);
  for (u32 k = 0; k < 32; ++k) {
    for (u32 r = 0; r < 4; ++r)
      w.row<u32>(i.more[r])[k] = tile.sum[k / 4 + r / 2 * 8][k % 4 * 2 + r % 2];
  }
}
/// movmatrix.trans of 8 rows and columns of 16 bits.
inline void transpose_matrix(warp& w, inst& i) {
  u16 of[8][8];
  for (u32 k = 0; k < 32; ++k)
    std::memcpy(&of[k / 4][k % 4 * 2], &w.row<u32>(i.row[1])[k], 4);
  for (u32 k = 0; k < 32; ++k)
    w.row<u32>(i.row[0])[k] = of[k % 4 * 2][k / 4] | u32{of[k % 4 * 2 + 1][k / 4]} << 16;
}
inline void nothing(warp&, inst&) {}
inline void meet_in_order(warp& w, inst&) {
  w.met = true;
}
inline void unsupported(warp& w, inst& i) {
  w.wrong(i, fault_kind::unsupported, static_cast<u32>(std::countr_zero(w.now)),
          "an instruction that the machine does not know");
}
inline void trap(warp& w, inst& i) {
  w.wrong(i, fault_kind::trap, static_cast<u32>(std::countr_zero(w.now)), "a trap");
}
}  // namespace ptx_machine
