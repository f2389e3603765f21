// conversions_gpu_test.cu: `cvt` by the rules of the PTX ISA. Each kind of conversion goes through every
// value of a source of 8 or 16 bits; through specials, neighbours of all places where rounding turns, and
// random bits of a wider one. The reference searches a table of the target's values, or asks the host's
// rounding functions, and shares nothing with the machine. The program also runs on a device, which it then
// checks.
#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "ptx_machine/checks.cuh"
#include "ptx_machine/reference_formats.hpp"

namespace {

using llmmem_tests::check;
using llmmem_tests::device_array;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using reference::i128;
using reference::searched;
using reference::type;
using reference::values_of;

// ---- the conversions, each a kernel ----

struct kind {
  const char* text;
  int architecture;  // the first that has it
  void (*run)(const u64* from, u64* to, u32 count);
};

#define LLMMEM_ONE(name, text, first, D, d, S, s)                                       \
  __global__ void name(const u64* from, u64* to, u32 count) {                           \
    const u32 at = blockIdx.x * blockDim.x + threadIdx.x;                               \
    if (at >= count) return;                                                            \
    [[maybe_unused]] const S a = static_cast<S>(from[at]);                              \
    D made = 0;                                                                         \
    LLMMEM_FROM_##first(asm volatile(text " %0, %1;" : d(made) : s(a));) to[at] = made; \
  }
#define LLMMEM_TWO(name, text, first, D, d, S, s)                                                    \
  __global__ void name(const u64* from, u64* to, u32 count) {                                        \
    const u32 at = blockIdx.x * blockDim.x + threadIdx.x;                                            \
    if (at >= count) return;                                                                         \
    [[maybe_unused]] const S a = static_cast<S>(from[at]), b = static_cast<S>(from[count - 1 - at]); \
    D made = 0;                                                                                      \
    LLMMEM_FROM_##first(asm volatile(text " %0, %1, %2;" : d(made) : s(a), s(b));) to[at] = made;    \
  }

#define LLMMEM_H u16, "=h"
#define LLMMEM_R u32, "=r"
#define LLMMEM_L u64, "=l"
#define LLMMEM_FROM_H u16, "h"
#define LLMMEM_FROM_R u32, "r"
#define LLMMEM_FROM_L u64, "l"

// clang-format off
#define LLMMEM_CONVERSIONS(ONE, TWO) \
  ONE(0, "cvt.rn.f16.f32", 80, H, R) ONE(1, "cvt.rz.f16.f32", 80, H, R) \
  ONE(2, "cvt.rm.f16.f32", 80, H, R) ONE(3, "cvt.rp.f16.f32", 80, H, R) \
  ONE(4, "cvt.rn.ftz.f16.f32", 80, H, R) ONE(5, "cvt.rn.sat.f16.f32", 80, H, R) \
  ONE(6, "cvt.rn.relu.f16.f32", 80, H, R) ONE(7, "cvt.rn.satfinite.f16.f32", 80, H, R) \
  ONE(8, "cvt.rz.relu.satfinite.f16.f32", 80, H, R) \
  ONE(9, "cvt.rn.bf16.f32", 80, H, R) ONE(10, "cvt.rz.bf16.f32", 80, H, R) \
  ONE(11, "cvt.rn.relu.bf16.f32", 80, H, R) ONE(12, "cvt.rn.satfinite.bf16.f32", 80, H, R) \
  TWO(13, "cvt.rn.f16x2.f32", 80, R, R) TWO(14, "cvt.rz.f16x2.f32", 80, R, R) \
  TWO(15, "cvt.rn.relu.f16x2.f32", 80, R, R) \
  TWO(16, "cvt.rn.bf16x2.f32", 80, R, R) TWO(17, "cvt.rz.bf16x2.f32", 80, R, R) \
  TWO(18, "cvt.rn.relu.bf16x2.f32", 80, R, R) \
  TWO(19, "cvt.rn.satfinite.e4m3x2.f32", 89, H, R) TWO(20, "cvt.rn.satfinite.e5m2x2.f32", 89, H, R) \
  TWO(21, "cvt.rn.satfinite.relu.e4m3x2.f32", 89, H, R) TWO(22, "cvt.rn.satfinite.relu.e5m2x2.f32", 89, H, R) \
  ONE(23, "cvt.rn.satfinite.e4m3x2.f16x2", 89, H, R) ONE(24, "cvt.rn.satfinite.e5m2x2.f16x2", 89, H, R) \
  ONE(25, "cvt.rn.satfinite.relu.e4m3x2.f16x2", 89, H, R) \
  ONE(26, "cvt.rn.f16x2.e4m3x2", 89, R, H) ONE(27, "cvt.rn.f16x2.e5m2x2", 89, R, H) \
  ONE(28, "cvt.rn.relu.f16x2.e4m3x2", 89, R, H) \
  ONE(30, "cvt.f32.f16", 80, R, H) ONE(31, "cvt.f64.f16", 80, L, H) ONE(32, "cvt.ftz.f32.f16", 80, R, H) \
  ONE(33, "cvt.sat.f32.f16", 80, R, H) ONE(34, "cvt.f32.bf16", 80, R, H) ONE(35, "cvt.f64.bf16", 90, L, H) \
  ONE(36, "cvt.rni.f16.f16", 80, H, H) ONE(37, "cvt.rzi.f16.f16", 80, H, H) \
  ONE(38, "cvt.rmi.f16.f16", 80, H, H) ONE(39, "cvt.rpi.f16.f16", 80, H, H) \
  ONE(40, "cvt.rn.bf16.f16", 90, H, H) ONE(41, "cvt.rn.f16.bf16", 90, H, H) ONE(42, "cvt.rz.f16.bf16", 90, H, H) \
  ONE(43, "cvt.rni.bf16.bf16", 90, H, H) ONE(44, "cvt.rpi.bf16.bf16", 90, H, H) \
  ONE(50, "cvt.rni.f32.f32", 80, R, R) ONE(51, "cvt.rzi.f32.f32", 80, R, R) ONE(52, "cvt.rmi.f32.f32", 80, R, R) \
  ONE(53, "cvt.rpi.f32.f32", 80, R, R) ONE(54, "cvt.rni.ftz.f32.f32", 80, R, R) \
  ONE(55, "cvt.rpi.ftz.sat.f32.f32", 80, R, R) ONE(56, "cvt.ftz.f32.f32", 80, R, R) \
  ONE(57, "cvt.sat.f32.f32", 80, R, R) ONE(58, "cvt.f64.f32", 80, L, R) ONE(59, "cvt.ftz.f64.f32", 80, L, R) \
  ONE(60, "cvt.rni.s8.f32", 80, R, R) ONE(61, "cvt.rzi.u8.f32", 80, R, R) ONE(62, "cvt.rzi.s16.f32", 80, H, R) \
  ONE(63, "cvt.rni.u16.f32", 80, H, R) ONE(64, "cvt.rni.s32.f32", 80, R, R) ONE(65, "cvt.rzi.s32.f32", 80, R, R) \
  ONE(66, "cvt.rmi.s32.f32", 80, R, R) ONE(67, "cvt.rpi.s32.f32", 80, R, R) ONE(68, "cvt.rzi.u32.f32", 80, R, R) \
  ONE(69, "cvt.rni.u32.f32", 80, R, R) ONE(70, "cvt.rzi.s64.f32", 80, L, R) ONE(71, "cvt.rni.u64.f32", 80, L, R) \
  ONE(72, "cvt.rpi.ftz.s32.f32", 80, R, R) ONE(73, "cvt.rzi.ftz.u32.f32", 80, R, R) \
  ONE(74, "cvt.rni.sat.s32.f32", 80, R, R) \
  ONE(80, "cvt.rni.s8.f16", 80, R, H) ONE(81, "cvt.rzi.u8.f16", 80, R, H) ONE(82, "cvt.rni.s16.f16", 80, H, H) \
  ONE(83, "cvt.rzi.s32.f16", 80, R, H) ONE(84, "cvt.rmi.u32.f16", 80, R, H) ONE(85, "cvt.rpi.s64.f16", 80, L, H) \
  ONE(86, "cvt.rzi.u64.f16", 80, L, H) ONE(87, "cvt.rni.s32.bf16", 90, R, H) ONE(88, "cvt.rzi.u64.bf16", 90, L, H) \
  ONE(90, "cvt.rn.f32.f64", 80, R, L) ONE(91, "cvt.rz.f32.f64", 80, R, L) ONE(92, "cvt.rm.f32.f64", 80, R, L) \
  ONE(93, "cvt.rp.f32.f64", 80, R, L) ONE(94, "cvt.rn.f16.f64", 80, H, L) ONE(95, "cvt.rn.bf16.f64", 90, H, L) \
  ONE(96, "cvt.rni.f64.f64", 80, L, L) ONE(97, "cvt.rmi.f64.f64", 80, L, L) ONE(98, "cvt.sat.f64.f64", 80, L, L) \
  ONE(99, "cvt.rzi.s32.f64", 80, R, L) ONE(100, "cvt.rni.u32.f64", 80, R, L) ONE(101, "cvt.rzi.s64.f64", 80, L, L) \
  ONE(102, "cvt.rzi.u64.f64", 80, L, L) ONE(105, "cvt.rn.ftz.f32.f64", 80, R, L) ONE(103, "cvt.rni.s16.f64", 80, H, L) ONE(104, "cvt.rpi.u8.f64", 80, R, L) \
  ONE(110, "cvt.rn.f32.s32", 80, R, R) ONE(111, "cvt.rz.f32.s32", 80, R, R) ONE(112, "cvt.rm.f32.u32", 80, R, R) \
  ONE(113, "cvt.rn.f32.u32", 80, R, R) ONE(114, "cvt.rp.f32.s64", 80, R, L) ONE(115, "cvt.rn.f32.s64", 80, R, L) \
  ONE(116, "cvt.rn.f32.u64", 80, R, L) ONE(117, "cvt.rn.f64.s64", 80, L, L) ONE(118, "cvt.rz.f64.u64", 80, L, L) \
  ONE(119, "cvt.rn.f64.s32", 80, L, R) ONE(120, "cvt.rn.f16.s32", 80, H, R) ONE(121, "cvt.rn.f16.u64", 80, H, L) \
  ONE(122, "cvt.rn.f32.s8", 80, R, R) ONE(123, "cvt.rn.f32.u16", 80, R, H) ONE(124, "cvt.rz.bf16.u64", 90, H, L) \
  ONE(125, "cvt.rn.f16.s16", 80, H, H) ONE(126, "cvt.rn.f16.u8", 80, H, R) ONE(127, "cvt.rn.sat.f32.s32", 80, R, R) \
  ONE(130, "cvt.s32.s8", 80, R, R) ONE(131, "cvt.u32.u8", 80, R, R) ONE(132, "cvt.s16.s8", 80, H, R) \
  ONE(133, "cvt.s64.s32", 80, L, R) ONE(134, "cvt.u64.u32", 80, L, R) ONE(135, "cvt.u32.u64", 80, R, L) \
  ONE(136, "cvt.s8.s32", 80, R, R) ONE(137, "cvt.u8.u32", 80, R, R) ONE(138, "cvt.u16.u32", 80, H, R) \
  ONE(139, "cvt.s64.s16", 80, L, H) ONE(140, "cvt.sat.s8.s32", 80, R, R) ONE(141, "cvt.sat.u8.s32", 80, R, R) \
  ONE(142, "cvt.sat.u32.s32", 80, R, R) ONE(143, "cvt.sat.s32.u32", 80, R, R) ONE(144, "cvt.sat.s32.s64", 80, R, L) \
  ONE(145, "cvt.sat.u16.s64", 80, H, L) ONE(146, "cvt.sat.u64.s64", 80, L, L) ONE(147, "cvt.sat.s64.u64", 80, L, L) \
  ONE(148, "cvt.sat.s16.u64", 80, H, L) ONE(149, "cvt.u64.s8", 80, L, R) ONE(150, "cvt.sat.u8.s16", 80, R, H)
// clang-format on

#define LLMMEM_EXPAND(macro, ...) macro(__VA_ARGS__)
#define LLMMEM_KERNEL_ONE(id, text, first, d, s) \
  LLMMEM_EXPAND(LLMMEM_ONE, convert_##id, text, first, LLMMEM_##d, LLMMEM_FROM_##s)
#define LLMMEM_KERNEL_TWO(id, text, first, d, s) \
  LLMMEM_EXPAND(LLMMEM_TWO, convert_##id, text, first, LLMMEM_##d, LLMMEM_FROM_##s)
#define LLMMEM_ENTRY(id, text, first, d, s) {text, first, convert_##id},

LLMMEM_CONVERSIONS(LLMMEM_KERNEL_ONE, LLMMEM_KERNEL_TWO)
const kind kinds[] = {LLMMEM_CONVERSIONS(LLMMEM_ENTRY, LLMMEM_ENTRY)};

// ---- the reference ----

struct request {
  std::string text;
  std::vector<std::string> words;
  char way = 'n';  // n to nearest, z toward zero, m down, p up
  bool is_integral = false, saturates = false, is_kept_finite = false, clamps_negative = false,
       flushes = false;

  explicit request(std::string_view of) : text(of) {
    for (std::size_t at = 0; at <= text.size();) {
      const std::size_t dot = std::min(text.find('.', at), text.size());
      words.push_back(text.substr(at, dot - at));
      at = dot + 1;
    }
    for (const char* each : {"rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi"})
      if (has(each)) way = each[1];
    is_integral = has("rni") || has("rzi") || has("rmi") || has("rpi");
    saturates = has("sat");
    is_kept_finite = has("satfinite");
    clamps_negative = has("relu");
    flushes = has("ftz");
  }
  [[nodiscard]] bool has(std::string_view word) const {
    return std::find(words.begin(), words.end(), word) != words.end();
  }
  [[nodiscard]] static std::string one_of(std::string name) {
    if (name.size() > 2 && name.substr(name.size() - 2) == "x2") name.resize(name.size() - 2);
    return name;
  }
  [[nodiscard]] type to() const { return type(one_of(words[words.size() - 2])); }
  [[nodiscard]] type from() const { return type(one_of(words.back())); }
  [[nodiscard]] bool makes_two() const { return words[words.size() - 2].find("x2") != std::string::npos; }
  [[nodiscard]] bool takes_two() const { return words.back().find("x2") != std::string::npos; }
};

double to_integer(double value, char way) {
  return way == 'n'   ? std::nearbyint(value)
         : way == 'z' ? std::trunc(value)
         : way == 'm' ? std::floor(value)
                      : std::ceil(value);
}
/// The f32 that is nearest in the direction `way`.
u64 as_f32(long double value, char way) {
  if (value != 0 && std::fabs(value) >= 0x1p128L && !std::isinf(value)) {
    const bool is_kept = way == 'z' || (way == 'm' && value > 0) || (way == 'p' && value < 0);
    return (value < 0 ? 0x80000000 : 0) | (is_kept ? 0x7F7FFFFF : 0x7F800000);
  }
  float near = static_cast<float>(value);
  if (value == 0 || std::isinf(value)) return std::bit_cast<u32>(near);
  const bool is_over = static_cast<long double>(near) > value,
             is_under = static_cast<long double>(near) < value;
  const bool wants_up = way == 'p' || (way == 'z' && value < 0),
             wants_down = way == 'm' || (way == 'z' && value > 0);
  if (is_over && wants_down) near = std::nextafterf(near, -HUGE_VALF);
  if (is_under && wants_up) near = std::nextafterf(near, HUGE_VALF);
  return std::bit_cast<u32>(near);
}
u64 as_f64(long double value, char way) {
  double near = static_cast<double>(value);
  const bool is_over = static_cast<long double>(near) > value,
             is_under = static_cast<long double>(near) < value;
  const bool wants_up = way == 'p' || (way == 'z' && value < 0),
             wants_down = way == 'm' || (way == 'z' && value > 0);
  if (is_over && wants_down) near = std::nextafter(near, -HUGE_VAL);
  if (is_under && wants_up) near = std::nextafter(near, HUGE_VAL);
  return std::bit_cast<u64>(near);
}

/// What one number must become. NaN stands for each of the target's NaN where the ISA leaves the bits open.
u64 converted(const request& of, const type& to, const type& from, const std::vector<double>& values,
              u64 bits) {
  const char way = of.way;
  if (!from.is_float && !to.is_float) {
    i128 value = from.integer(bits);
    if (of.saturates) {
      const i128 one = 1;
      const i128 least = to.is_signed ? -(one << (to.bits - 1)) : 0;
      const i128 most = (one << (to.is_signed ? to.bits - 1 : to.bits)) - 1;
      value = std::clamp(value, least, most);
    }
    return static_cast<u64>(value) & to.mask();
  }
  if (!from.is_float) {
    long double value = static_cast<long double>(from.integer(bits));
    if (of.saturates) value = std::clamp(value, 0.0L, 1.0L);
    if (to.bits == 64) return as_f64(value, way);
    if (to.bits == 32) return as_f32(value, way);
    return searched(to, values, value, way, of.is_kept_finite);
  }
  double value = from.value(bits & from.mask());
  if (of.flushes && from.bits == 32 && std::fabs(value) < 0x1p-126) value = std::copysign(0.0, value);
  if (!to.is_float) {
    if (value != value) return from.bits == 64 || to.bits == 64 ? to.sign() : 0;
    const double whole = to_integer(value, way);
    const double end = std::ldexp(1.0, static_cast<int>(to.is_signed ? to.bits - 1 : to.bits));
    if (whole >= end) return (to.is_signed ? to.sign() : 0) - 1 & to.mask();
    if (whole < (to.is_signed ? -end : 0.0)) return to.is_signed ? to.sign() : 0;
    return static_cast<u64>(static_cast<i128>(whole)) & to.mask();
  }
  if (of.is_integral) value = to_integer(value, way);
  if (of.saturates) value = value != value ? 0.0 : std::clamp(value, 0.0, 1.0);
  if (of.clamps_negative && value < 0) value = 0;
  if (value != value) return to.bits == 8 ? 0x7F : to.bits == 16 ? 0x7FFF : ~u64{0} & to.mask();
  if (to.bits == 64) return std::bit_cast<u64>(value);
  if (to.bits < 32) return searched(to, values, value, way, of.is_kept_finite);
  const u64 made = as_f32(value, way);
  const bool is_subnormal = (made & 0x7FFFFFFF) < 0x00800000;
  return of.flushes && is_subnormal ? made & 0x80000000 : made;
}
/// Whether `made` is what `wanted` stands for.
bool is_as_wanted(const request& of, const type& to, u64 made, u64 wanted) {
  if (made == wanted) return true;
  if (!to.is_float) return false;
  if (to.bits >= 32 && to.is_nan(wanted)) return to.is_nan(made);
  // The sign of a zero that .sat or .relu makes of what is no positive number is open.
  return (of.saturates || of.clamps_negative) && (made | to.sign()) == to.sign() &&
         (wanted | to.sign()) == to.sign();
}

// ---- inputs ----

void add_around(std::vector<u64>& to, const type& of, double value) {
  for (const double each : {value, -value}) {
    const u64 bits = of.bits == 64 ? std::bit_cast<u64>(each) : std::bit_cast<u32>(static_cast<float>(each));
    for (const u64 near : {bits - 1, bits, bits + 1})
      to.push_back(near & of.mask());
  }
}
std::vector<u64> sources_of(const request& by) {
  const type from = by.from(), to = by.to();
  std::vector<u64> made;
  if (from.bits <= 16) {
    for (u64 bits = 0; bits <= from.mask(); ++bits)
      made.push_back(bits);
    return made;
  }
  std::mt19937_64 random(by.text.size() * 1000 + by.text[4]);
  if (from.is_float) {
    for (const u64 bits : {u64{0}, u64{1}, from.infinity(), from.infinity() - 1, from.infinity() + 1,
                           from.infinity() | u64{1} << (from.digits - 1), from.sign() - 1,
                           u64{1} << from.digits, (u64{1} << from.digits) - 1})
      made.insert(made.end(), {bits, bits | from.sign()});
    if (to.is_float && to.bits <= 16) {
      const std::vector<double>& values = values_of(to);
      const double last = values.back() + (values.back() - values[values.size() - 2]);
      for (std::size_t n = 0; n < values.size(); ++n) {
        const double next = n + 1 < values.size() ? values[n + 1] : last;
        add_around(made, from, values[n]);
        add_around(made, from, (values[n] + next) / 2);
      }
      add_around(made, from, last);
    } else {
      for (int n = 0; n < 300; ++n)
        add_around(made, from, n), add_around(made, from, n + 0.5);
      for (int power = -150; power <= 128; ++power)
        for (const double each : {1.0, 1.5, 1 - 0x1p-24, 1 - 0x1p-25, 1 + 0x1p-24, 1 + 0x1p-23 + 0x1p-24})
          add_around(made, from, std::ldexp(each, power));
    }
    for (u32 n = 0; n < 1 << (from.bits == 32 ? 20 : 18); ++n) {
      u64 bits = random() & from.mask();
      // Of doubles, most random ones are beyond the range of the others.
      if (from.bits == 64 && n % 2 == 0) bits = (bits & 0x800FFFFFFFFFFFFF) | (1023 - 160 + bits % 320) << 52;
      made.push_back(bits);
    }
    return made;
  }
  for (unsigned power = 0; power < from.bits; ++power)
    for (const u64 near : {(u64{1} << power) - 1, u64{1} << power, (u64{1} << power) + 1})
      made.insert(made.end(), {near & from.mask(), (0 - near) & from.mask()});
  for (u32 n = 0; n < 1 << 18; ++n) {
    const u64 bits = random() & from.mask();
    const unsigned fewer = static_cast<unsigned>(random() % from.bits);
    // Halfway between floats: few bits, then a one.
    made.insert(made.end(),
                {bits, bits >> fewer, ((bits & ~(~u64{0} >> 24)) | u64{1} << 39) >> fewer & from.mask()});
  }
  return made;
}

// ---- the test ----

int failures = 0;
u64 compared = 0;

void check_kind(const kind& each) {
  const request by(each.text);
  const type to = by.to(), from = by.from();
  std::vector<u64> sources = sources_of(by);
  if (by.takes_two()) {
    // Two numbers of one register: each with another.
    std::vector<u64> pairs;
    for (std::size_t n = 0; n < sources.size(); ++n)
      pairs.push_back(sources[n] | sources[(n * 7 + 3) % sources.size()] << from.bits);
    sources = pairs;
  } else if (from.bits == 8) {
    // The rest of the register is of no account.
    for (u64& bits : sources)
      bits |= 0xA5A5A5A5A5A5A500;
  }
  const auto count = static_cast<u32>(sources.size());
  const device_array<u64> on_device(sources);
  const device_array<u64> results(std::vector<u64>(count, 0));
  each.run<<<(count + 127) / 128, 128>>>(on_device.data(), results.data(), count);
  check(cudaGetLastError(), each.text);
  const std::vector<u64> made = results.host();
  static const std::vector<double> none;
  const std::vector<double>& values = to.is_float && to.bits <= 16 ? values_of(to) : none;
  int wrong = 0;
  for (u32 n = 0; n < count; ++n) {
    const auto compare = [&](u64 one, u64 source) {
      const u64 wanted = converted(by, to, from, values, source);
      ++compared;
      if (is_as_wanted(by, to, one & to.mask(), wanted)) return;
      ++failures;
      if (++wrong <= 5)
        std::printf("FAILED: %s of 0x%llx is 0x%llx instead of 0x%llx\n", each.text,
                    static_cast<unsigned long long>(source & from.mask()),
                    static_cast<unsigned long long>(one & to.mask()),
                    static_cast<unsigned long long>(wanted));
    };
    if (by.makes_two()) {
      compare(made[n] >> to.bits, by.takes_two() ? sources[n] >> from.bits : sources[n]);
      compare(made[n], by.takes_two() ? sources[n] : sources[count - 1 - n]);
    } else
      compare(made[n], sources[n]);
  }
}
/// What a destination wider than the type holds above it: the sign of signed integers, else zeros.
void check_extension(const kind& each) {
  const request by(each.text);
  const type to = by.to(), from = by.from();
  if (to.is_float || to.bits != 8) return;
  const device_array<u64> on_device(sources_of(by));
  const auto count = static_cast<u32>(on_device.size());
  const device_array<u64> results(std::vector<u64>(count, 0));
  each.run<<<(count + 127) / 128, 128>>>(on_device.data(), results.data(), count);
  check(cudaGetLastError(), each.text);
  const std::vector<u64> made = results.host();
  for (const u64 bits : made) {
    const u64 above = to.is_signed && (bits & 0x80) != 0 ? 0xFFFFFF00 : 0;
    if ((bits & 0xFFFFFF00) != above && ++failures < 20)
      std::printf("FAILED: %s is not extended\n", each.text);
  }
}

}  // namespace

int main() {
  llmmem_tests::require_device();
  const int architecture = llmmem_tests::architecture_of_device();
  int tested = 0;
  for (const kind& each : kinds) {
    if (each.architecture > architecture) continue;
    check_kind(each);
    check_extension(each);
    ++tested;
  }
  std::printf("%d kinds of conversions, %llu numbers: %d failed\n", tested,
              static_cast<unsigned long long>(compared), failures);
  return failures == 0 ? 0 : 1;
}
