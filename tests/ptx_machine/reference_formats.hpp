// reference_formats.hpp: number formats for tests of the machine, written without its code: a format of at
// most 16 bits is a table of its values, and rounding is a search in it.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace reference {

using u32 = std::uint32_t;
using u64 = std::uint64_t;
__extension__ using i128 = __int128;
__extension__ using u128 = unsigned __int128;

struct type {
  std::string name;
  unsigned bits = 0;
  bool is_float = false, is_signed = false;
  int digits = 0, bias = 0;  // of floats

  explicit type(std::string_view of) : name(of) {
    if (name == "f64") *this = type(name, 64, 52, 1023);
    if (name == "f32") *this = type(name, 32, 23, 127);
    if (name == "f16") *this = type(name, 16, 10, 15);
    if (name == "bf16") *this = type(name, 16, 7, 127);
    if (name == "e4m3") *this = type(name, 8, 3, 7);
    if (name == "e5m2") *this = type(name, 8, 2, 15);
    if (bits != 0) return;
    is_signed = name[0] == 's';
    bits = static_cast<unsigned>(std::stoi(name.substr(1)));
  }
  type(std::string_view of, unsigned width, int fraction, int above)
      : name(of), bits(width), is_float(true), digits(fraction), bias(above) {}

  [[nodiscard]] bool is_e4m3() const { return is_float && digits == 3; }
  [[nodiscard]] u64 mask() const { return bits == 64 ? ~u64{0} : (u64{1} << bits) - 1; }
  [[nodiscard]] u64 sign() const { return u64{1} << (bits - 1); }
  [[nodiscard]] bool is_nan(u64 of) const {
    const u64 rest = of & (sign() - 1);
    return is_e4m3() ? rest == 0x7F : rest > infinity();
  }
  [[nodiscard]] u64 infinity() const {
    return ((u64{1} << (bits - 1 - static_cast<unsigned>(digits))) - 1) << digits;
  }
  [[nodiscard]] u64 largest() const { return is_e4m3() ? 0x7E : infinity() - 1; }

  /// As a double, which holds all floats here and all integers but those of 64 bits.
  [[nodiscard]] double value(u64 of) const {
    if (bits == 64) return std::bit_cast<double>(of);
    if (bits == 32) return std::bit_cast<float>(static_cast<u32>(of));
    const u64 rest = of & (sign() - 1);
    const double way = (of & sign()) != 0 ? -1.0 : 1.0;
    if (is_nan(of)) return std::numeric_limits<double>::quiet_NaN();
    if (rest > largest()) return way * HUGE_VAL;
    const auto field = static_cast<int>(rest >> digits);
    const auto fraction = static_cast<double>(rest & ((u64{1} << digits) - 1));
    const double size = field == 0 ? fraction : fraction + std::ldexp(1, digits);
    return way * std::ldexp(size, std::max(field, 1) - bias - digits);
  }
  [[nodiscard]] i128 integer(u64 of) const {
    const u64 low = of & mask();
    return is_signed && (low & sign()) != 0 ? static_cast<i128>(low) - (static_cast<i128>(1) << bits)
                                            : static_cast<i128>(low);
  }
};

/// The finite values of a format of at most 16 bits from 0 on, by their bits.
inline const std::vector<double>& values_of(const type& of) {
  static std::map<std::string, std::vector<double>> known;
  std::vector<double>& values = known[of.name];
  for (u64 bits = values.size(); bits <= of.largest(); ++bits)
    values.push_back(of.value(bits));
  return values;
}

/// Of two neighbours of a size, whether the larger is taken. `is_odd`: the last bit of the smaller.
inline bool is_larger_taken(long double size, long double smaller, long double larger, bool is_negative,
                            bool is_odd, char way) {
  if (size == smaller) return false;
  if (way == 'n') return size - smaller > larger - size || (size - smaller == larger - size && is_odd);
  return way != 'z' && (way == 'm') == is_negative;
}
/// The bits of a small format that are nearest to `value` in the direction `way`.
inline u64 searched(const type& to, const std::vector<double>& values, long double value, char way,
                    bool is_kept_finite) {
  const u64 sign = std::signbit(value) ? to.sign() : 0;
  const long double size = std::fabs(value);
  const u64 overflow = is_kept_finite ? to.largest() : to.infinity();
  if (std::isinf(size)) return sign | overflow;
  const auto above = std::upper_bound(values.begin(), values.end(), size);
  const u64 below = static_cast<u64>(above - values.begin()) - 1;
  const double step = values[to.largest()] - values[to.largest() - 1];
  const double next = above == values.end() ? values[to.largest()] + step : *above;
  // Beyond the value that would come after the largest, which side is nearer is no question.
  const bool is_larger = size >= next
                             ? is_larger_taken(next - step / 8, next - step, next, sign != 0, true, way)
                             : is_larger_taken(size, values[below], next, sign != 0, (below & 1) != 0, way);
  const u64 made = below + (is_larger ? 1 : 0);
  return sign | (made > to.largest() ? overflow : made);
}
}  // namespace reference
