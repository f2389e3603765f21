/// @file
/// `vector_path`: the processor's vector instructions that compute attention.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/kernels/detail/amx_tiles.hpp>

#include <array>
#include <cstdint>
#include <string>

namespace llmmem {
inline namespace v0 {

/// A width of vectors. It is passed as a value, so that each path of a machine can be tested on it. Paths add
/// in different orders: their results differ by roundings.
enum class vector_path : std::uint8_t {
  baseline,  ///< 4 floats: what every processor of the architecture has (SSE2 on x86-64, NEON on aarch64)
  avx2,      ///< x86-64 with AVX2 and FMA: 8 floats
  avx512,    ///< x86-64 with AVX-512 F, BW, DQ and VL: 16 floats
  /// The same with AMX (INT8) on Linux: tiles of bytes for `host_integers`; for `host_vectors` tiles of bf16
  /// over caches of bf16 and fp8, where the processor has these and AVX512-VBMI; else as `avx512`.
  amx,
};

/// All paths, available on this machine or not.
inline constexpr std::array<vector_path, 4> vector_paths{vector_path::baseline, vector_path::avx2,
                                                         vector_path::avx512, vector_path::amx};

/// Returns its name.
[[nodiscard]] constexpr const char* to_text(vector_path path) noexcept {
  switch (path) {
    case vector_path::baseline:
      return "baseline";
    case vector_path::avx2:
      return "avx2";
    case vector_path::avx512:
      return "avx512";
    case vector_path::amx:
      return "amx";
  }
  return "unknown";
}

/// Whether this machine has it. Uses what the compiler's runtime detected at the program's start; for `amx`
/// asks Linux to let the program use tiles, about 0.1 microseconds. Linux may refuse (older than 5.16, or an
/// alternate signal stack too small for the tiles' 8 KiB): then the machine does not have it.
[[nodiscard]] inline bool has_vector_path(vector_path path) noexcept {
  switch (path) {
    case vector_path::baseline:
      return true;
#if defined(__x86_64__)
    case vector_path::avx2:
      return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
    case vector_path::avx512:
      return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
             __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0;
    case vector_path::amx:
      return has_vector_path(vector_path::avx512) && detail::may_use_amx();
#endif
    default:
      return false;
  }
}

/// Returns the widest path of this machine for floats as they are: never `amx`, which takes subnormal bf16
/// for zeros. Asks Linux for nothing.
[[nodiscard]] inline vector_path best_vector_path() noexcept {
  for (const vector_path path : {vector_path::avx512, vector_path::avx2}) {
    if (has_vector_path(path)) return path;
  }
  return vector_path::baseline;
}

/// Returns the widest path of this machine for integers. About 0.1 microseconds, where `has_vector_path` asks
/// Linux.
[[nodiscard]] inline vector_path best_integer_path() noexcept {
  return has_vector_path(vector_path::amx) ? vector_path::amx : best_vector_path();
}

namespace detail {

/// Returns the path whose floats a path multiplies: of types that no tile multiplies.
[[nodiscard]] constexpr vector_path float_path(vector_path path) noexcept {
  return path == vector_path::amx ? vector_path::avx512 : path;
}

}  // namespace detail

/// Returns `path` itself. @throws argument_error if this machine does not have it.
inline vector_path checked_vector_path(vector_path path) {
  if (!has_vector_path(path)) {
    throw argument_error(std::string("vector_path: this machine has no ") + to_text(path) +
                         (path == vector_path::amx ? ", or the system refuses it" : "") +
                         "; use best_vector_path(), here " + to_text(best_vector_path()));
  }
  return path;
}

}  // namespace v0
}  // namespace llmmem
