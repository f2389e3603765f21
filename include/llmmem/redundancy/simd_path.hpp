/// @file
/// `simd_path`: the processor's vector instructions that compute erasure codes.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <array>
#include <cstdint>
#include <string>

namespace llmmem {
inline namespace v0 {

/// A set of instructions. All paths compute the same bytes. Functions take the path as a value, so that tests
/// can run every path of a machine.
enum class simd_path : std::uint8_t {
  portable,  ///< available on every processor of the architecture
  ssse3,     ///< x86-64: 16 bytes, products by shuffles
  avx2,      ///< x86-64: 32 bytes, products by shuffles
  gfni,      ///< x86-64 with AVX-512 and GFNI: 64 bytes, products by affine maps of bits
  neon,      ///< aarch64: 16 bytes, products by table look-ups
};

/// All paths, available on this machine or not.
inline constexpr std::array<simd_path, 5> simd_paths{simd_path::portable, simd_path::ssse3, simd_path::avx2,
                                                     simd_path::gfni, simd_path::neon};

/// Returns its name.
[[nodiscard]] constexpr const char* to_text(simd_path path) noexcept {
  switch (path) {
    case simd_path::portable:
      return "portable";
    case simd_path::ssse3:
      return "ssse3";
    case simd_path::avx2:
      return "avx2";
    case simd_path::gfni:
      return "gfni";
    case simd_path::neon:
      return "neon";
  }
  return "unknown";
}

/// Returns whether this machine has the path. Uses what the compiler's runtime detected at the program's
/// start.
[[nodiscard]] inline bool has_simd_path(simd_path path) noexcept {
  switch (path) {
    case simd_path::portable:
      return true;
#if defined(__x86_64__)
    case simd_path::ssse3:
      return __builtin_cpu_supports("ssse3") != 0;
    case simd_path::avx2:
      return __builtin_cpu_supports("avx2") != 0;
    case simd_path::gfni:
      return __builtin_cpu_supports("gfni") != 0 && __builtin_cpu_supports("avx512f") != 0 &&
             __builtin_cpu_supports("avx512bw") != 0;
#elif defined(__aarch64__)
    case simd_path::neon:
      return true;
#endif
    default:
      return false;
  }
}

/// Returns the fastest path of this machine, in a few nanoseconds.
[[nodiscard]] inline simd_path best_simd_path() noexcept {
  for (const simd_path path : {simd_path::gfni, simd_path::avx2, simd_path::ssse3, simd_path::neon}) {
    if (has_simd_path(path)) return path;
  }
  return simd_path::portable;
}

/// Returns `path` itself. @throws argument_error if this machine does not have it.
inline simd_path checked_simd_path(simd_path path) {
  if (!has_simd_path(path)) {
    throw argument_error(std::string("simd_path: this processor has no ") + to_text(path) +
                         "; use best_simd_path(), here " + to_text(best_simd_path()));
  }
  return path;
}

}  // namespace v0
}  // namespace llmmem
