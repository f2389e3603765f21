// arithmetic.hpp: instructions that each lane executes by itself, on rows of 32 values that the compiler
// vectorises.
#pragma once

#include "ptx_machine/exec.hpp"
#include "ptx_machine/numbers.hpp"

namespace ptx_machine {

/// D of each lane from one value of each source.
template <auto F, class D, class... S>
void map_rows(warp& w, inst& i) {
  [&]<std::size_t... N>(std::index_sequence<N...>) {
    D* const d = w.row<D>(i.row[0]);
    const std::tuple<const S*...> s{w.row<const S>(i.row[N + 1])...};
    const u32 now = w.now;
    if (now == ~u32{0}) {
#pragma GCC ivdep
      for (u32 k = 0; k < 32; ++k)
        d[k] = settled(static_cast<D>(F(std::get<N>(s)[k]...)));
    } else {
#pragma GCC ivdep
      for (u32 k = 0; k < 32; ++k) {
        const D made = settled(static_cast<D>(F(std::get<N>(s)[k]...)));
        d[k] = (now >> k & 1) != 0 ? made : d[k];
      }
    }
  }(std::index_sequence_for<S...>{});
}
/// `make` of a value of the type that has this name.
template <class Make>
[[nodiscard]] handler by_type(std::string_view type, const Make& make) {
  if (type == "u32" || type == "b32") return make(u32{});
  if (type == "u64" || type == "b64") return make(u64{});
  if (type == "u16" || type == "b16") return make(u16{});
  if (type == "s32") return make(i32{});
  if (type == "s64") return make(i64{});
  if (type == "s16") return make(i16{});
  if (type == "f32") return make(float{});
  return type == "f64" ? make(double{}) : nullptr;
}
template <auto F, unsigned N, class T>
[[nodiscard]] constexpr handler same() {
  if constexpr (N == 1)
    return map_rows<F, T, T>;
  else if constexpr (N == 2)
    return map_rows<F, T, T, T>;
  else
    return map_rows<F, T, T, T, T>;
}
template <auto F, unsigned N>
[[nodiscard]] handler integers(std::string_view type) {
  return by_type(type, []<class T>(T) -> handler {
    if constexpr (std::is_integral_v<T>)
      return same<F, N, T>();
    else
      return nullptr;
  });
}
template <auto F, unsigned N>
[[nodiscard]] handler floats(std::string_view type, bool flushes) {
  if (type == "f64") return same<F, N, double>();
  if (type != "f32") return nullptr;
  return flushes ? same<[](auto... x) { return flushed(F(flushed(x)...)); }, N, float>()
                 : same<F, N, float>();
}
template <auto F, unsigned N>
[[nodiscard]] handler numbers(std::string_view type, bool flushes) {
  const handler found = floats<F, N>(type, flushes);
  return found != nullptr ? found : integers<F, N>(type);
}
template <class T>
using wider = std::conditional_t<std::is_signed_v<T>, std::conditional_t<sizeof(T) == 2, i32, i64>,
                                 std::conditional_t<sizeof(T) == 2, u32, u64>>;
/// D is twice as wide as the sources, of which a last one may be as wide.
template <auto F, bool Adds>
[[nodiscard]] handler widening(std::string_view type) {
  return by_type(type, []<class T>(T) -> handler {
    if constexpr (!std::is_integral_v<T>)
      return nullptr;
    else if constexpr (Adds)
      return map_rows<F, wider<T>, T, T, wider<T>>;
    else
      return map_rows<F, wider<T>, T, T>;
  });
}
template <auto F>
[[nodiscard]] handler shifts(std::string_view type) {
  return by_type(type, []<class T>(T) -> handler {
    if constexpr (std::is_integral_v<T>)
      return map_rows<F, T, T, u32>;
    else
      return nullptr;
  });
}

template <class T>
[[nodiscard]] T shifted_right(T a, u32 by) {
  const T some = static_cast<T>(a >> std::min<u32>(by, 8 * sizeof a - 1));
  return by < 8 * sizeof a ? some : static_cast<T>(some >> (8 * sizeof a - 1));
}
[[nodiscard]] inline u32 funnel_left(u32 low, u32 high, u32 by) {
  return static_cast<u32>((u64{high} << 32 | low) << by >> 32);
}
[[nodiscard]] inline u32 funnel_right(u32 low, u32 high, u32 by) {
  return static_cast<u32>((u64{high} << 32 | low) >> by);
}
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
/// length 0: nothing. Of signed numbers what lies beyond is the sign.
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
/// where: the position, and the length in the lower half.
template <class U>
[[nodiscard]] U inserted(U a, U b, u64 where) {
  constexpr u64 bits = 8 * sizeof a;
  const u64 position = where >> 32 & 255, length = where & 255;
  if (length == 0 || position >= bits) return b;
  const U mask = (length >= bits ? ~U{0} : (U{1} << length) - 1) << position;
  return (b & ~mask) | (static_cast<U>(a << position) & mask);
}
template <class T>
[[nodiscard]] T quotient(T a, T b) {
  if constexpr (std::is_floating_point_v<T>)
    return a / b;
  else if (b == 0)
    return static_cast<T>(~T{0});
  else if (std::is_signed_v<T> && b == static_cast<T>(-1))
    return static_cast<T>(u64{0} - static_cast<u64>(a));
  else
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
/// Wraps, as unsigned numbers do.
template <class T, class F>
[[nodiscard]] T wrapped(F act, T a, T b) {
  if constexpr (std::is_floating_point_v<T>)
    return act(a, b);
  else
    return static_cast<T>(act(static_cast<u64>(a), static_cast<u64>(b)));
}
template <bool Least, class T>
[[nodiscard]] T extreme(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (a != a) return b;
    if (b != b) return a;
    if (a == b) return std::signbit(a) == Least ? a : b;
  }
  return (a < b) == Least ? a : b;
}

// ---- predicates ----

inline void put_mask(warp& w, u32 row, u32 mask) {
  u32& to = *w.row<u32>(row);
  to = (to & ~w.now) | (mask & w.now);
}
/// size: which outcomes are wanted: 1 less, 2 equal, 4 greater, 8 none of these. form: how the result is
/// combined with a predicate: 1 and, 2 or, 3 xor; 4: that is negated. more: of the opposite.
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

// ---- conversions ----

inline u64 read_row(const warp& w, u32 row, u32 bytes, u32 k) {
  return bytes == 8 ? w.row<u64>(row)[k] : bytes == 4 ? w.row<u32>(row)[k] : w.row<u16>(row)[k];
}
inline void write_row(const warp& w, u32 row, u32 bytes, u32 k, u64 value) {
  if (bytes == 8)
    w.row<u64>(row)[k] = value;
  else if (bytes == 4)
    w.row<u32>(row)[k] = static_cast<u32>(value);
  else
    w.row<u16>(row)[k] = static_cast<u16>(value);
}
/// The conversion lies in `more`, as bytes.
inline void convert(warp& w, inst& i) {
  conversion by;
  std::memcpy(static_cast<void*>(&by), i.more.data(), sizeof by);
  for (u32 m = w.now; m != 0; m &= m - 1) {
    const auto k = static_cast<u32>(std::countr_zero(m));
    const u64 a = read_row(w, i.row[1], by.from_row, k);
    u64 made = 0;
    if (by.to.is_pair && !by.from.is_pair)
      made = by(a) << by.to.bits | by(read_row(w, i.row[2], by.from_row, k));
    else if (by.to.is_pair)
      made = by(a >> by.from.bits) << by.to.bits | by(a);
    else {
      made = by(a);
      if (by.to.is_integer() && by.to.bits < 64) {  // the row may be wider
        const u64 of = (u64{1} << by.to.bits) - 1;
        made = by.to.kind == 's' && (made >> (by.to.bits - 1) & 1) != 0 ? made | ~of : made & of;
      }
    }
    write_row(w, i.row[0], by.to_row, k, made);
  }
}
/// Those of which there are many.
[[nodiscard]] inline handler quick_conversion(std::string_view name, std::string_view to,
                                              std::string_view from) {
  if (name == "cvt.f32.f16") return map_rows<[](u16 x) { return float_of_half(x); }, float, u16>;
  if (name == "cvt.rn.f16.f32") return map_rows<[](float x) { return half_of(x); }, u16, float>;
  if (name == "cvt.rn.bf16.f32") return map_rows<[](float x) { return bfloat_of(x); }, u16, float>;
  if (name == "cvt.rn.f16x2.f32")
    return map_rows<[](float a, float b) { return u32{half_of(a)} << 16 | half_of(b); }, u32, float, float>;
  if (name == "cvt.rn.bf16x2.f32")
    return map_rows<[](float a, float b) { return u32{bfloat_of(a)} << 16 | bfloat_of(b); }, u32, float,
                    float>;
  if (name == "cvt.f64.f32") return map_rows<[](float x) { return static_cast<double>(x); }, double, float>;
  if (name == "cvt.rn.f32.s32") return map_rows<[](i32 x) { return static_cast<float>(x); }, float, i32>;
  if (name == "cvt.rn.f32.u32") return map_rows<[](u32 x) { return static_cast<float>(x); }, float, u32>;
  if (name != "cvt." + std::string(to) + "." + std::string(from)) return nullptr;
  const std::size_t bytes = bits_of_type(to) / 8;
  if (!number_type::of(to).is_integer() || bytes == 1) return nullptr;
  return by_type(from, [&]<class T>(T) -> handler {
    constexpr auto same_value = [](auto x) { return x; };
    if constexpr (std::is_integral_v<T>)
      return bytes == 2   ? map_rows<same_value, u16, T>
             : bytes == 4 ? map_rows<same_value, u32, T>
                          : map_rows<same_value, u64, T>;
    else
      return nullptr;
  });
}

}  // namespace ptx_machine
