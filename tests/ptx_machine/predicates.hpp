// predicates.hpp: comparisons, selection, and operations on predicates. A predicate is a mask of 32 lanes.
#pragma once

#include "ptx_machine/rows.hpp"

namespace ptx_machine {

/// setp. inst::size has a bit for each outcome that is true: 1 less, 2 equal, 4 greater, 8 unordered.
/// inst::form tells how to combine the result with a predicate: 1 and, 2 or, 3 xor, 0 not at all; bit 2
/// negates that predicate. inst::more has the row for the opposite result, if the statement wants it.
template <class T>
void compare(warp& w, inst& i) {
  const T* const a = w.row<T>(i.row[1]);
  const T* const b = w.row<T>(i.row[2]);
  u32 less = 0, equal = 0, greater = 0;
  for (u32 k = 0; k < 32; ++k)
    less |= static_cast<u32>(a[k] < b[k]) << k;
  for (u32 k = 0; k < 32; ++k)
    equal |= static_cast<u32>(a[k] == b[k]) << k;
  for (u32 k = 0; k < 32; ++k)
    greater |= static_cast<u32>(a[k] > b[k]) << k;
  u32 mask = ((i.size & 1) != 0 ? less : 0) | ((i.size & 2) != 0 ? equal : 0) |
             ((i.size & 4) != 0 ? greater : 0) | ((i.size & 8) != 0 ? ~(less | equal | greater) : 0);
  u32 other = ~mask;
  if ((i.form & 3) != 0) {
    const u32 with = *w.row<u32>(i.row[3]) ^ ((i.form & 4) != 0 ? ~u32{0} : 0);
    for (u32* each : {&mask, &other})
      *each = (i.form & 3) == 1 ? *each & with : (i.form & 3) == 2 ? *each | with : *each ^ with;
  }
  put_mask(w, i.row[0], mask);
  if (!i.more.empty()) put_mask(w, i.more[0], other);
}
/// The outcomes for which a comparison is true. Throws out_of_range for an unknown one.
[[nodiscard]] inline u8 outcomes(std::string_view how) {
  static const std::map<std::string_view, u8> known{
      {"eq", 2},  {"ne", 5},   {"lt", 1},   {"lo", 1},   {"le", 3},   {"ls", 3},
      {"gt", 4},  {"hi", 4},   {"ge", 6},   {"hs", 6},   {"equ", 10}, {"neu", 13},
      {"ltu", 9}, {"leu", 11}, {"gtu", 12}, {"geu", 14}, {"num", 7},  {"nan", 8}};
  return known.at(how);
}
template <class T>
void select(warp& w, inst& i) {
  const u32 of = *w.row<u32>(i.row[3]);
  T* const d = w.row<T>(i.row[0]);
  const T* const a = w.row<T>(i.row[1]);
  const T* const b = w.row<T>(i.row[2]);
  for (u32 k = 0; k < 32; ++k) {
    const T made = (of >> k & 1) != 0 ? a[k] : b[k];
    d[k] = (w.now >> k & 1) != 0 ? made : d[k];
  }
}
template <auto F>
void combine_masks(warp& w, inst& i) {
  put_mask(w, i.row[0], F(*w.row<u32>(i.row[1]), *w.row<u32>(i.row[2])));
}

/// An f16 or bf16 in a row. It compares by value.
template <bool IsBf16>
struct half_number {
  u16 bits;
  operator float() const { return IsBf16 ? std::bit_cast<float>(u32{bits} << 16) : float_of_half(bits); }
};
/// An f32 in a row, for comparisons with `.ftz`.
struct flushed_number {
  float value;
  operator float() const { return flushed(value); }
};
enum class float_class : u8 { finite, infinite, number, notanumber, normal, subnormal };
template <class T>
[[nodiscard]] bool is_of_class(T x, u8 which) {
  switch (static_cast<float_class>(which)) {
    case float_class::finite:
      return std::isfinite(x);
    case float_class::infinite:
      return std::isinf(x);
    case float_class::number:
      return !std::isnan(x);
    case float_class::notanumber:
      return std::isnan(x);
    case float_class::normal:
      return std::isnormal(x);
    default:
      return std::isfinite(x) && x != 0 && !std::isnormal(x);
  }
}
/// testp. inst::size is the float_class.
template <class T>
void test_class(warp& w, inst& i) {
  u32 mask = 0;
  for (u32 k = 0; k < 32; ++k)
    mask |= static_cast<u32>(is_of_class(w.row<T>(i.row[1])[k], i.size)) << k;
  put_mask(w, i.row[0], mask);
}
/// slct takes a where c is 0 or more, else b.
template <class T, class C>
void select_by_sign(warp& w, inst& i) {
  for (u32 m = w.now; m != 0; m &= m - 1) {
    const auto k = static_cast<u32>(std::countr_zero(m));
    const C by = w.row<C>(i.row[3])[k];
    w.row<T>(i.row[0])[k] = w.row<T>(i.row[by >= C{0} ? 1 : 2])[k];
  }
}

}  // namespace ptx_machine
