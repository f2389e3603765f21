// ptx_ops.hpp: what each instruction does, and which of the functions here executes a statement. An
// instruction that is not known is an error only when it is executed.
#pragma once

#include "ptx_machine/machine.hpp"

namespace ptx_machine {

constexpr u32 nan_bits = 0x7FFF'FFFF;  // the NaN that devices make

template <class T>
[[nodiscard]] inline T settled(T value) {
  if constexpr (std::is_same_v<T, float>)
    return value == value ? value : std::bit_cast<float>(nan_bits);
  else
    return value;
}
[[nodiscard]] inline float flushed(float x) {
  return std::fabs(x) < 0x1p-126F ? std::copysign(0.0F, x) : x;
}

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

template <class T>
[[nodiscard]] T high_product(T a, T b) {
  __extension__ using wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
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

/// A floating-point number of few bits.
struct small_float {
  int digits, bias;
  u32 most, infinity, nan;  // without a sign
  unsigned bits;
};
constexpr small_float f16_form{10, 15, 0x7BFF, 0x7C00, 0x7FFF, 16},
    bf16_form{7, 127, 0x7F7F, 0x7F80, 0x7FFF, 16}, e4m3_form{3, 7, 0x7E, 0x7F, 0x7F, 8},
    e5m2_form{2, 15, 0x7B, 0x7C, 0x7F, 8};

[[nodiscard]] inline double decoded(const small_float& form, u32 bits) {
  const u32 sign = bits >> (form.bits - 1) & 1;
  const u32 rest = bits & ((1U << (form.bits - 1)) - 1);
  double value = 0;
  if (rest > form.most)
    value = rest == form.infinity && form.infinity != form.nan ? HUGE_VAL : std::nan("");
  else {
    const int exponent = std::max(static_cast<int>(rest >> form.digits), 1);
    const u32 low = rest & ((1U << form.digits) - 1);
    const u32 mantissa = (rest >> form.digits) != 0 ? low | 1U << form.digits : low;
    value = std::ldexp(mantissa, exponent - form.bias - form.digits);
  }
  return sign != 0 ? -value : value;
}
/// rounding: n to nearest even, z toward zero, m down, p up.
template <class T>
[[nodiscard]] T rounded(T x, char rounding) {
  return rounding == 'n'   ? std::nearbyint(x)
         : rounding == 'z' ? std::trunc(x)
         : rounding == 'm' ? std::floor(x)
                           : std::ceil(x);
}
[[nodiscard]] inline u32 encoded(const small_float& form, double value, char rounding, bool saturates) {
  if (value != value) return form.nan;
  const u32 sign = std::signbit(value) ? 1U << (form.bits - 1) : 0;
  const double size = std::fabs(value);
  u32 bits = form.most + 1;
  if (size <= 0x1p200) {
    const int exponent = size == 0 ? 1 - form.bias : std::max(std::ilogb(size), 1 - form.bias);
    const double quanta = std::ldexp(value, form.digits - exponent);
    bits = static_cast<u32>(exponent + form.bias - 1) * (1U << form.digits) +
           static_cast<u32>(std::fabs(rounded(quanta, rounding)));
  }
  const bool is_kept = rounding == 'z' || (rounding == 'm' && sign == 0) || (rounding == 'p' && sign != 0);
  if (bits > form.most) bits = saturates || (is_kept && size != HUGE_VAL) ? form.most : form.infinity;
  return sign | bits;
}

/// A type of numbers: u, s, f (of 16, 32 or 64 bits), b (bf16), 4 (e4m3), 5 (e5m2).
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
  [[nodiscard]] const small_float& form() const {
    return kind == 'b' ? bf16_form : kind == '4' ? e4m3_form : kind == '5' ? e5m2_form : f16_form;
  }
};
[[nodiscard]] inline double float_value(const number_type& type, u64 bits) {
  if (type.kind == 'f' && type.bits == 64) return std::bit_cast<double>(bits);
  if (type.kind == 'f' && type.bits == 32) return std::bit_cast<float>(static_cast<u32>(bits));
  return decoded(type.form(), static_cast<u32>(bits) & ((1U << type.bits) - 1));
}
struct conversion {
  number_type to, from;
  char rounding = 'n';
  bool to_integer = false, saturates = false, is_finite = false, flushes = false;
  u8 to_row = 0, from_row = 0;  // bytes of a lane

  /// In a format that holds all that the types here have.
  [[nodiscard]] u64 operator()(u64 bits) const {
    long double value = 0;
    if (from.is_integer()) {
      const u64 of = from.bits == 64 ? ~u64{0} : (u64{1} << from.bits) - 1;
      const bool is_negative = from.kind == 's' && (bits >> (from.bits - 1) & 1) != 0;
      bits = is_negative ? bits | ~of : bits & of;
      if (to.is_integer() && !saturates) return bits;
      value = is_negative ? static_cast<long double>(static_cast<i64>(bits)) : static_cast<long double>(bits);
    } else {
      value = float_value(from, bits);
      if (flushes && from.bits == 32) value = flushed(static_cast<float>(value));
    }
    if (to.is_integer()) {
      if (value != value) return from.bits == 64 || to.bits == 64 ? u64{1} << (to.bits - 1) : 0;
      const bool is_signed = to.kind == 's';
      const long double least = is_signed ? -std::ldexp(1.0L, to.bits - 1) : 0,
                        most = std::ldexp(1.0L, to.bits - is_signed) - 1;
      value = std::clamp(rounded(value, rounding), least, most);
      return is_signed ? static_cast<u64>(static_cast<i64>(value)) : static_cast<u64>(value);
    }
    if (to_integer) value = rounded(value, rounding);
    if (saturates) value = value >= 0 ? std::min(value, 1.0L) : 0;
    if (to.bits == 64) return std::bit_cast<u64>(static_cast<double>(value));
    if (to.bits < 32) return encoded(to.form(), static_cast<double>(value), rounding, is_finite);
    const float made = settled(static_cast<float>(value));
    return std::bit_cast<u32>(flushes ? flushed(made) : made);
  }
};
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

// ---- memory ----

/// Rows of the values follow one another in `more`.
template <class T, class Row, unsigned N>
void load(warp& w, inst& i) {
  u64 at[32];
  w.addresses(i, i.row[1], at);
  if (w.in.options.profiles) w.profile(i, at, sizeof(T) * N);
  for (u32 m = w.now; m != 0; m &= m - 1) {
    const auto k = static_cast<u32>(std::countr_zero(m));
    T value[N];
    std::memcpy(value, w.go<false, sizeof(T) * N>(i, k, at[k]), sizeof value);
    for (unsigned n = 0; n < N; ++n)
      w.row<Row>(i.more[n])[k] = static_cast<Row>(value[n]);
  }
}
template <class T, class Row, unsigned N>
void store(warp& w, inst& i) {
  u64 at[32];
  w.addresses(i, i.row[1], at);
  if (w.in.options.profiles) w.profile(i, at, sizeof(T) * N);
  for (u32 m = w.now; m != 0; m &= m - 1) {
    const auto k = static_cast<u32>(std::countr_zero(m));
    T value[N];
    for (unsigned n = 0; n < N; ++n)
      value[n] = static_cast<T>(w.row<Row>(i.more[n])[k]);
    std::memcpy(w.go<true, sizeof(T) * N>(i, k, at[k], reinterpret_cast<const u8*>(value)), value,
                sizeof value);
  }
}
template <bool Stores, class T, class Row>
[[nodiscard]] handler moving(std::size_t count) {
  if constexpr (sizeof(T) <= sizeof(Row)) {
    if (count == 1) return Stores ? store<T, Row, 1> : load<T, Row, 1>;
    if (count == 2) return Stores ? store<T, Row, 2> : load<T, Row, 2>;
    if constexpr (sizeof(T) <= 4) {
      if (count == 4) return Stores ? store<T, Row, 4> : load<T, Row, 4>;
    }
  }
  return nullptr;
}
template <bool Stores, class T>
[[nodiscard]] handler moving(std::size_t count, unsigned row_bits) {
  using row16 = std::conditional_t<std::is_signed_v<T>, i16, u16>;
  using row32 = std::conditional_t<std::is_signed_v<T>, i32, u32>;
  using row64 = std::conditional_t<std::is_signed_v<T>, i64, u64>;
  return row_bits == 16   ? moving<Stores, T, row16>(count)
         : row_bits == 32 ? moving<Stores, T, row32>(count)
                          : moving<Stores, T, row64>(count);
}

enum class atom_op : u8 { add, min, max, and_, or_, xor_, exch, cas, inc, dec };
/// size: the operation. row 2: the value, row 3: the other one of a compare-and-swap.
template <class T, bool Tells>
void atom(warp& w, inst& i) {
  u64 at[32];
  w.addresses(i, i.row[1], at);
  if (w.in.options.profiles) w.profile(i, at, sizeof(T));
  for (u32 m = w.now; m != 0; m &= m - 1) {
    const auto k = static_cast<u32>(std::countr_zero(m));
    static_cast<void>(w.go<false, sizeof(T)>(i, k, at[k]));
    T old;
    u8* const to = w.go<true, sizeof(T)>(i, k, at[k]);
    std::memcpy(&old, to, sizeof old);
    const T by = w.row<T>(i.row[2])[k];
    T made = old;
    switch (static_cast<atom_op>(i.size)) {
      case atom_op::add:
        made = old + by;
        break;
      case atom_op::min:
        made = extreme<true>(old, by);
        break;
      case atom_op::max:
        made = extreme<false>(old, by);
        break;
      case atom_op::exch:
        made = by;
        break;
      case atom_op::cas:
        made = std::memcmp(&old, &by, sizeof old) == 0 ? w.row<T>(i.row[3])[k] : old;
        break;
      default:
        if constexpr (std::is_integral_v<T>) {
          switch (static_cast<atom_op>(i.size)) {
            case atom_op::and_:
              made = old & by;
              break;
            case atom_op::or_:
              made = old | by;
              break;
            case atom_op::xor_:
              made = old ^ by;
              break;
            case atom_op::inc:
              made = old >= by ? 0 : old + 1;
              break;
            default:
              made = old == 0 || old > by ? by : old - 1;
              break;
          }
        }
    }
    std::memcpy(to, &made, sizeof made);
    if (Tells) w.row<T>(i.row[0])[k] = old;
  }
}
template <bool Tells>
[[nodiscard]] handler atoms(std::string_view type) {
  return by_type(type, []<class T>(T) -> handler {
    if constexpr (sizeof(T) >= 4)
      return atom<T, Tells>;
    else
      return nullptr;
  });
}

// ---- lanes together ----

/// form: 0 bfly, 1 idx, 2 up, 3 down. rows: d, a, b, c; more: the predicate.
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
/// form: 0 all, 1 any, 2 uni, 3 ballot; 4: negated.
inline void vote(warp& w, inst& i) {
  const u32 votes = (*w.row<u32>(i.row[1]) ^ ((i.form & 4) != 0 ? ~u32{0} : 0)) & w.now;
  const bool answers[] = {votes == w.now, votes != 0, votes == w.now || votes == 0};
  if ((i.form & 3) == 3)
    put_all(w, i.row[0], votes);
  else
    put_mask(w, i.row[0], answers[i.form & 3] ? ~u32{0} : 0);
}
/// size: bytes of a lane; form 1: all must match.
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
/// D of 16 rows and 8 columns, a product added to C. more: rows of D, A, B and C; size: registers of A; form:
/// the type of elements. A sum is exact, or nearly: in double, rounded once, which a device's need not be.
inline void multiply_matrices(warp& w, inst& i) {
  const number_type type{static_cast<char>(i.form), static_cast<u8>(i.form == 'f' || i.form == 'b' ? 16 : 8),
                         false};
  const u32 count_a = i.size, count_b = i.size / 2, each = 32 / type.bits;
  double left[16][32], right[32][8];
  const auto value = [&](u32 word, u32 e) -> double {
    const u32 bits = word >> (e * type.bits);
    if (type.kind == 'f') return float_of_half(static_cast<u16>(bits));
    if (type.kind == 'b') return std::bit_cast<float>(bits << 16);
    return decoded(type.form(), bits & 0xFF);
  };
  for (u32 k = 0; k < 32; ++k) {
    const u32 group = k / 4, part = k % 4;
    for (u32 r = 0; r < count_a; ++r) {
      for (u32 e = 0; e < each; ++e)
        left[group + r % 2 * 8][r / 2 * 4 * each + part * each + e] = value(w.row<u32>(i.more[4 + r])[k], e);
    }
    for (u32 r = 0; r < count_b; ++r) {
      for (u32 e = 0; e < each; ++e)
        right[r * 4 * each + part * each + e][group] = value(w.row<u32>(i.more[4 + count_a + r])[k], e);
    }
  }
  double sum[16][8]{};
  for (u32 row = 0; row < 16; ++row) {
    for (u32 at = 0; at < count_b * 4 * each; ++at) {
      for (u32 column = 0; column < 8; ++column)
        sum[row][column] += left[row][at] * right[at][column];
    }
  }
  for (u32 k = 0; k < 32; ++k) {
    for (u32 r = 0; r < 4; ++r) {
      const float c = w.row<float>(i.more[4 + count_a + count_b + r])[k];
      w.row<float>(i.more[r])[k] = settled(static_cast<float>(c + sum[k / 4 + r / 2 * 8][k % 4 * 2 + r % 2]));
    }
  }
}
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
/// A register of several values, or several registers of one: more has their rows; size is bytes of each.
inline void pack(warp& w, inst& i) {
  for (u32 m = w.now; m != 0; m &= m - 1) {
    const auto k = static_cast<u32>(std::countr_zero(m));
    u64 made = 0;
    for (std::size_t n = 0; n < i.more.size(); ++n)
      made |= read_row(w, i.more[n], i.size, k) << (8 * i.size * n);
    write_row(w, i.row[0], static_cast<u32>(i.size * i.more.size()), k, made);
  }
}
inline void unpack(warp& w, inst& i) {
  for (u32 m = w.now; m != 0; m &= m - 1) {
    const auto k = static_cast<u32>(std::countr_zero(m));
    const u64 from = read_row(w, i.row[1], static_cast<u32>(i.size * i.more.size()), k);
    for (std::size_t n = 0; n < i.more.size(); ++n)
      if (i.more[n] != no_guard) write_row(w, i.more[n], i.size, k, from >> (8 * i.size * n));
  }
}

}  // namespace ptx_machine
