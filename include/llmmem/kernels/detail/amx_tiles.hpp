/// @file
/// Tiles of AMX: whether a program may use them, their shapes, and the instructions on them.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/cpu_feature.hpp>

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Whether the processor has AMX tiles with products of bytes, and Linux lets this program use them. Asks for
/// that on the first call of a program, for all of its threads; a refusal, as of an older kernel or a
/// sandbox, is false. A system call: about 0.1 microseconds.
[[nodiscard]] inline bool may_use_amx() noexcept {
#if defined(__x86_64__) && defined(__linux__)
  if (!has_cpu_feature(cpu_feature::amx_tile) || !has_cpu_feature(cpu_feature::amx_int8)) return false;
  constexpr long request_permission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long tile_data = 18;               // XFEATURE_XTILEDATA
  return ::syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}

/// Whether tiles multiply bf16 too, and bytes can be looked up in tables of 128.
[[nodiscard]] inline bool has_amx_floats() noexcept {
#if defined(__x86_64__) && !defined(__CUDACC__)
  return has_cpu_feature(cpu_feature::amx_bf16) && has_cpu_feature(cpu_feature::avx512_vbmi);
#else
  return false;  // of nvcc's vectors of bytes only the plainest
#endif
}

#if defined(__x86_64__)

/// What `ldtilecfg` reads: the rows and bytes of a row of each tile.
struct alignas(64) tile_shapes {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14]{};
  std::uint16_t row_bytes[16]{};
  std::uint8_t rows[16]{};

  void set(unsigned tile, std::size_t of_rows, std::size_t bytes) noexcept {
    rows[tile] = static_cast<std::uint8_t>(of_rows);
    row_bytes[tile] = static_cast<std::uint16_t>(bytes);
  }
};
static_assert(sizeof(tile_shapes) == 64);

/// Gives the calling thread's tiles their shapes while it lives; then releases them, so that switches between
/// threads do not save them.
class tile_use {
 public:
  explicit tile_use(const tile_shapes& shapes) noexcept { asm volatile("ldtilecfg %0" : : "m"(shapes)); }
  tile_use(const tile_use&) = delete;
  tile_use& operator=(const tile_use&) = delete;
  ~tile_use() { asm volatile("tilerelease"); }
};

// Compilers use no tile by themselves, so the instructions below declare none as changed.
// NOLINTBEGIN(hicpp-no-assembler)

template <int Tile>
LLMMEM_ALWAYS_INLINE void clear_tile() noexcept {
  asm volatile("tilezero %%tmm%c0" : : "n"(Tile));
}
/// Loads the rows of a tile, `stride` bytes from one to the next.
template <int Tile>
LLMMEM_ALWAYS_INLINE void load_tile(const void* from, std::size_t stride) noexcept {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "n"(Tile) : "memory");
}
template <int Tile>
LLMMEM_ALWAYS_INLINE void store_tile(void* to, std::size_t stride) noexcept {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "n"(Tile) : "memory");
}
/// Adds to word n of row m the products of the words of row m of `A` with word n of each row of `B`: of four
/// bytes each, with a sign on both sides.
template <int To, int A, int B>
LLMMEM_ALWAYS_INLINE void add_signed_dots() noexcept {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "n"(To), "n"(A), "n"(B));
}
/// The same with bytes of `A` without a sign.
template <int To, int A, int B>
LLMMEM_ALWAYS_INLINE void add_unsigned_dots() noexcept {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "n"(To), "n"(A), "n"(B));
}
/// Adds the products of pairs of bf16, each rounded to a float as it is added. Subnormal factors and results
/// are zeros.
template <int To, int A, int B>
LLMMEM_ALWAYS_INLINE void add_bf16_dots() noexcept {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "n"(To), "n"(A), "n"(B));
}

// NOLINTEND(hicpp-no-assembler)

#endif

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
