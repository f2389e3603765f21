/// @file
/// Features of x86-64 processors whose names some supported compilers do not know.
#pragma once

#include <llmmem/config.hpp>

#include <cstdint>

#if defined(__x86_64__) && defined(__clang__) && __clang_major__ < 19
#include <cpuid.h>
#endif

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The values are bits of CPUID's leaf 7: those below 32 of ECX, the others of EDX.
enum class cpu_feature : std::uint8_t {
  avx512_vbmi = 1,     ///< permutations of bytes
  vaes = 9,            ///< AES of several blocks at once
  amx_bf16 = 32 + 22,  ///< products of bf16 in tiles
  amx_tile = 32 + 24,  ///< tiles
  amx_int8 = 32 + 25,  ///< products of bytes in tiles
};

/// Whether the processor has it; the system may still have to enable its registers. False except on x86-64.
/// A load, or with clang++ before 19 a CPUID, which a virtual machine answers in some microseconds.
[[nodiscard]] inline bool has_cpu_feature(cpu_feature feature) noexcept {
#if !defined(__x86_64__)
  static_cast<void>(feature);
  return false;
#elif defined(__clang__) && __clang_major__ < 19
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  const auto bit = static_cast<unsigned>(feature);
  return ((bit < 32 ? ecx : edx) >> (bit % 32) & 1U) != 0;
#else
  switch (feature) {
    case cpu_feature::avx512_vbmi:
      return __builtin_cpu_supports("avx512vbmi") != 0;
    case cpu_feature::amx_bf16:
      return __builtin_cpu_supports("amx-bf16") != 0;
    case cpu_feature::vaes:
      return __builtin_cpu_supports("vaes") != 0;
    case cpu_feature::amx_tile:
      return __builtin_cpu_supports("amx-tile") != 0;
    case cpu_feature::amx_int8:
      return __builtin_cpu_supports("amx-int8") != 0;
  }
  return false;
#endif
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
