// rows.hpp: turns a function of one lane into a handler of an instruction.
//
// A register is a row of 32 values. A handler applies the function to each lane in a loop, which the compiler
// vectorises. It writes the lanes that execute and leaves the others as they are.
#pragma once

#include "ptx_machine/numbers.hpp"
#include "ptx_machine/warp.hpp"

#include <cfenv>

namespace ptx_machine {

/// Writes F(sources) to the destination of each lane. D is the destination's type, S the sources' types.
template <auto F, class D, class... S>
void map_rows(warp& w, inst& i) {
  [&]<std::size_t... N>(std::index_sequence<N...>) {
    D* const d = w.row<D>(i.row[0]);
    const std::tuple<const S*...> s{w.row<const S>(i.row[N + 1])...};
    const u32 now = w.now;
    if (now == ~u32{0}) {
      LLMMEM_PTX_INDEPENDENT_LANES
      for (u32 k = 0; k < 32; ++k)
        d[k] = settled(static_cast<D>(F(std::get<N>(s)[k]...)));
    } else {
      LLMMEM_PTX_INDEPENDENT_LANES
      for (u32 k = 0; k < 32; ++k) {
        const D made = settled(static_cast<D>(F(std::get<N>(s)[k]...)));
        d[k] = (now >> k & 1) != 0 ? made : d[k];
      }
    }
  }(std::index_sequence_for<S...>{});
}

/// Writes a predicate.
inline void put_mask(warp& w, u32 row, u32 mask) {
  u32& to = *w.row<u32>(row);
  to = (to & ~w.now) | (mask & w.now);
}
/// Reads and writes one lane of a register of 2, 4 or 8 bytes.
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
/// Calls `make` with a value of the C++ type for a PTX type. Returns null where there is none.
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
/// F of N sources, all of type T.
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
template <class T>
using wider = std::conditional_t<std::is_signed_v<T>, std::conditional_t<sizeof(T) == 2, i32, i64>,
                                 std::conditional_t<sizeof(T) == 2, u32, u64>>;
/// `.wide`: the destination, and the third source if F adds one, have twice the bits of the first two
/// sources.
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
/// F of a value and a shift amount of 32 bits.
template <auto F>
[[nodiscard]] handler shifts(std::string_view type) {
  return by_type(type, []<class T>(T) -> handler {
    if constexpr (std::is_integral_v<T>)
      return map_rows<F, T, T, u32>;
    else
      return nullptr;
  });
}

// ---- registers of several values ----

/// mov of a tuple: pack joins registers to one, unpack splits one. inst::more has the rows of the parts,
/// inst::size their bytes.
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

// ---- floating-point operations with modifiers ----

/// What inst::form says: bit 0 is .ftz, bit 1 .sat; the rounding is above them.
constexpr u8 float_flushes = 1, float_saturates = 2;
constexpr unsigned float_rounding_at = 2;

/// map_rows for directed rounding and .sat. It sets the host's rounding mode while it calculates, and is
/// slow; kernels seldom use these modifiers.
template <auto F, class T, std::size_t... N>
void map_rows_modified(warp& w, inst& i, std::index_sequence<N...>) {
  constexpr int modes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
  const bool flushes = (i.form & float_flushes) != 0, saturates = (i.form & float_saturates) != 0;
  const auto read = [&](std::size_t n, u32 k) {
    const T value = w.row<T>(i.row[n + 1])[k];
    if constexpr (std::is_same_v<T, float>)
      return flushes ? flushed(value) : value;
    else
      return value;
  };
  volatile T made[32];  // keeps the compiler from moving an operation to where another mode is set
  volatile T from[sizeof...(N)][32];
  const auto copy = [&](std::size_t n) {
    for (u32 k = 0; k < 32; ++k)
      from[n][k] = read(n, k);
  };
  (copy(N), ...);
  std::fesetround(modes[i.form >> float_rounding_at]);
  for (u32 k = 0; k < 32; ++k)
    made[k] = static_cast<T>(F(static_cast<T>(from[N][k])...));
  std::fesetround(FE_TONEAREST);
  for (u32 m = w.now; m != 0; m &= m - 1) {
    const auto k = static_cast<u32>(std::countr_zero(m));
    T value = made[k];
    if constexpr (std::is_same_v<T, float>) value = flushes ? flushed(value) : value;
    if (saturates) value = value > 0 ? std::min(value, T{1}) : T{0};
    w.row<T>(i.row[0])[k] = settled(value);
  }
}
template <auto F, class T, unsigned N>
void map_modified(warp& w, inst& i) {
  map_rows_modified<F, T>(w, i, std::make_index_sequence<N>());
}
/// Runs an instruction that has no exact bits, and counts the lanes that execute it, so that a test can ask.
template <handler Run>
void counted(warp& w, inst& i) {
  w.in.approximate += static_cast<u64>(std::popcount(w.now));
  Run(w, i);
}
template <auto F, unsigned N>
[[nodiscard]] handler approximate(inst& i, std::string_view type, bool flushes) {
  i.is_approximate = true;
  if (type == "f64") return counted<same<F, N, double>()>;
  if (type != "f32") return nullptr;
  return flushes ? counted<same<[](auto... x) { return flushed(F(flushed(x)...)); }, N, float>()>
                 : counted<same<F, N, float>()>;
}

}  // namespace ptx_machine
