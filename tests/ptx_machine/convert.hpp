// convert.hpp: handlers for `cvt`. numbers.hpp converts one number.
#pragma once

#include "ptx_machine/rows.hpp"

namespace ptx_machine {

/// Any conversion. inst::more holds the bytes of a `conversion`.
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
      if (by.to.is_integer() &&
          by.to.bits < 64) {  // a wider register holds the sign, or zeros, above the number
        const u64 of = (u64{1} << by.to.bits) - 1;
        made = by.to.kind == 's' && (made >> (by.to.bits - 1) & 1) != 0 ? made | ~of : made & of;
      }
    }
    write_row(w, i.row[0], by.to_row, k, made);
  }
}
/// Vectorised handlers for the conversions that kernels use most. Returns null for the others.
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
