/// @file
/// CRC-32C of long runs by multiplication without carries, with or without a copy on the way.
#pragma once

#include <llmmem/config.hpp>

#include <array>
#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Returns `a` times `b` as polynomials modulo that of CRC-32C, with the coefficient of x^0 in the highest
/// bit.
[[nodiscard]] LLMMEM_HD constexpr std::uint32_t crc32c_product(std::uint32_t a, std::uint32_t b) noexcept {
  std::uint32_t product = 0;
  for (std::uint32_t bit = 0x8000'0000U; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = (b >> 1) ^ ((b & 1U) != 0 ? 0x82F6'3B78U : 0U);
  }
  return product;
}

/// Returns x^`exponent`, in the form of `crc32c_product`.
[[nodiscard]] constexpr std::uint32_t crc32c_power(std::uint64_t exponent) noexcept {
  std::uint32_t power = 0x8000'0000U;   // x^0
  std::uint32_t square = 0x4000'0000U;  // x
  for (; exponent != 0; exponent >>= 1) {
    if ((exponent & 1U) != 0) power = crc32c_product(power, square);
    square = crc32c_product(square, square);
  }
  return power;
}

/// The factors of the two halves of 16 bytes that `bytes` bytes follow. The product of two reversed numbers
/// is reversed, and one bit short: hence the shift.
struct crc32c_factors {
  std::uint64_t low = 0;
  std::uint64_t high = 0;

  [[nodiscard]] static constexpr crc32c_factors of(std::uint64_t bytes) noexcept {
    return {std::uint64_t{crc32c_power(8 * bytes + 32)} << 1,
            std::uint64_t{crc32c_power(8 * bytes - 32)} << 1};
  }
};

/// A round takes four times 64 bytes. The last step adds the first three sums to the fourth.
inline constexpr std::size_t crc32c_round = 256;
struct alignas(64) crc32c_fold_factors {
  crc32c_factors round = crc32c_factors::of(crc32c_round);
  crc32c_factors first = crc32c_factors::of(192);
  crc32c_factors second = crc32c_factors::of(128);
  crc32c_factors third = crc32c_factors::of(64);
};
inline constexpr crc32c_fold_factors crc32c_folding{};

/// What is left of a run: its checksum after state 0 is that of the whole run.
using crc32c_rest = std::array<std::byte, 64>;

/// Whether a sanitizer watches the program. None sees what assembly reads and writes through a pointer: freed
/// memory and races would go unnoticed, and the memory sanitizer would report each checksum.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool crc32c_is_watched = true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
inline constexpr bool crc32c_is_watched = true;
#else
inline constexpr bool crc32c_is_watched = false;
#endif
#else
inline constexpr bool crc32c_is_watched = false;
#endif

/// Whether this machine multiplies 64 bytes at a time: x86-64 with VPCLMULQDQ and AVX-512 F.
[[nodiscard]] inline bool has_crc32c_folding() noexcept {
#if defined(__x86_64__)
  return __builtin_cpu_supports("vpclmulqdq") != 0 && __builtin_cpu_supports("avx512f") != 0;
#else
  return false;
#endif
}

// In assembly, and in registers 16 and above, for the reasons that `aes_sum_of_four` gives. g++ accepts their
// names only where it may use AVX-512; elsewhere a caller knows nothing of a function with `noipa`.
#if defined(__AVX512F__) || defined(__clang__)
#define LLMMEM_CRC32C_WIDE_FUNCTION
#define LLMMEM_CRC32C_WIDE_REGISTERS                                                                 \
  "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25", "xmm26", \
      "xmm27", "xmm28",
#else
#define LLMMEM_CRC32C_WIDE_FUNCTION [[gnu::noipa]]
#define LLMMEM_CRC32C_WIDE_REGISTERS
#endif

#define LLMMEM_CRC32C_FOLD(sum, next, product, at, put)      \
  "vmovdqu64 " #at "(%[from]), %%zmm" #next                  \
  "\n\t"                                                     \
  "vpclmulqdq $0x00, %%zmm28, %%zmm" #sum ", %%zmm" #product \
  "\n\t"                                                     \
  "vpclmulqdq $0x11, %%zmm28, %%zmm" #sum ", %%zmm" #sum     \
  "\n\t"                                                     \
  "vpternlogq $0x96, %%zmm" #next ", %%zmm" #product ", %%zmm" #sum "\n\t" put(next, at)
#define LLMMEM_CRC32C_LAST(sum, factors)  \
  "vbroadcasti32x4 " #factors             \
  "(%[factors]), %%zmm28\n\t"             \
  "vpclmulqdq $0x00, %%zmm28, %%zmm" #sum \
  ", %%zmm24\n\t"                         \
  "vpclmulqdq $0x11, %%zmm28, %%zmm" #sum \
  ", %%zmm25\n\t"                         \
  "vpternlogq $0x96, %%zmm24, %%zmm25, %%zmm19\n\t"
#define LLMMEM_CRC32C_RUN(put) \
  asm volatile(                                                                                           \
      "vmovq %[state], %%xmm24\n\t"                                                                       \
      "vbroadcasti32x4 (%[factors]), %%zmm28\n\t"                                                         \
      "vmovdqu64 (%[from]), %%zmm16\n\t"                                                                  \
      "vmovdqu64 64(%[from]), %%zmm17\n\t"                                                                \
      "vmovdqu64 128(%[from]), %%zmm18\n\t"                                                               \
      "vmovdqu64 192(%[from]), %%zmm19\n\t" put(16, 0) put(17, 64) put(18, 128) put(19, 192)              \
      "vpxorq %%zmm24, %%zmm16, %%zmm16\n\t"                                                              \
      "jmp 2f\n"                                                                                          \
      "1:\n\t" LLMMEM_CRC32C_FOLD(16, 20, 24, 0, put) LLMMEM_CRC32C_FOLD(17, 21, 25, 64, put)             \
          LLMMEM_CRC32C_FOLD(18, 22, 26, 128, put) LLMMEM_CRC32C_FOLD(19, 23, 27, 192, put)               \
      "2:\n\t"                                                                                            \
      "addq $256, %[from]\n\t"                                                                            \
      "addq $256, %[into]\n\t"                                                                            \
      "decq %[rounds]\n\t"                                                                                \
      "jnz 1b\n\t" LLMMEM_CRC32C_LAST(16, 16) LLMMEM_CRC32C_LAST(17, 32) LLMMEM_CRC32C_LAST(18, 48)       \
      "vmovdqu64 %%zmm19, (%[rest])"                                                                      \
      : [from] "+r"(from), [into] "+r"(into), [rounds] "+r"(rounds)                                       \
      : [state] "r"(std::uint64_t{state}), [factors] "r"(&crc32c_folding), [rest] "r"(rest.data())        \
      : LLMMEM_CRC32C_WIDE_REGISTERS "cc", "memory")
#define LLMMEM_CRC32C_PUT(next, at) "vmovdqu64 %%zmm" #next ", " #at "(%[into])\n\t"
#define LLMMEM_CRC32C_PUT_NOTHING(next, at)

/// Reduces `rounds` times 256 bytes after `state` to 64. @pre `rounds` is not 0; has_crc32c_folding()
LLMMEM_CRC32C_WIDE_FUNCTION inline void crc32c_fold([[maybe_unused]] std::uint32_t state,
                                                    [[maybe_unused]] const std::byte* from,
                                                    [[maybe_unused]] std::uint64_t rounds,
                                                    [[maybe_unused]] crc32c_rest& rest) noexcept {
#if defined(__x86_64__)
  static_assert(crc32c_round == 256 && sizeof(crc32c_factors) == 16);
  std::byte* into = nullptr;
  LLMMEM_CRC32C_RUN(LLMMEM_CRC32C_PUT_NOTHING);
#endif
}

/// The same, and copies the bytes: each is read once, so that what is checked is what arrives.
LLMMEM_CRC32C_WIDE_FUNCTION inline void crc32c_fold_copy([[maybe_unused]] std::uint32_t state,
                                                         [[maybe_unused]] const std::byte* from,
                                                         [[maybe_unused]] std::byte* into,
                                                         [[maybe_unused]] std::uint64_t rounds,
                                                         [[maybe_unused]] crc32c_rest& rest) noexcept {
#if defined(__x86_64__)
  LLMMEM_CRC32C_RUN(LLMMEM_CRC32C_PUT);
#endif
}

#undef LLMMEM_CRC32C_PUT_NOTHING
#undef LLMMEM_CRC32C_PUT
#undef LLMMEM_CRC32C_RUN
#undef LLMMEM_CRC32C_LAST
#undef LLMMEM_CRC32C_FOLD
#undef LLMMEM_CRC32C_WIDE_REGISTERS
#undef LLMMEM_CRC32C_WIDE_FUNCTION

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
