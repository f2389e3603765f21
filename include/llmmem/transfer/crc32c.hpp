/// @file
/// CRC-32C: the checksum of chunks, frames and files.
#pragma once

#include <llmmem/config.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#if defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

namespace llmmem::inline v0 {

namespace detail {

/// Table k takes a byte that k zero bytes follow.
inline constexpr std::array<std::array<std::uint32_t, 256>, 8> crc32c_tables = [] {
  std::array<std::array<std::uint32_t, 256>, 8> tables{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit)
      crc = (crc >> 1) ^ ((crc & 1U) != 0 ? 0x82F6'3B78U : 0U);
    tables[0][i] = crc;
  }
  for (std::size_t k = 1; k < tables.size(); ++k) {
    for (std::size_t i = 0; i < 256; ++i)
      tables[k][i] = (tables[k - 1][i] >> 8) ^ tables[0][tables[k - 1][i] & 0xFFU];
  }
  return tables;
}();

/// One byte; `state` is the checksum's complement.
[[nodiscard]] constexpr std::uint32_t crc32c_byte(std::uint32_t state, std::byte byte) noexcept {
  return (state >> 8) ^ crc32c_tables[0][(state ^ static_cast<std::uint32_t>(byte)) & 0xFFU];
}

/// Eight bytes, the first of them lowest.
[[nodiscard]] constexpr std::uint32_t crc32c_word_by_table(std::uint32_t state, std::uint64_t word) noexcept {
  word ^= state;
  std::uint32_t next = 0;
  for (std::size_t k = 0; k < 8; ++k)
    next ^= crc32c_tables[7 - k][(word >> (8 * k)) & 0xFFU];
  return next;
}

[[nodiscard]] inline bool has_crc32c_instruction() noexcept {
#if defined(__x86_64__)
  return __builtin_cpu_supports("sse4.2") != 0;
#elif defined(__ARM_FEATURE_CRC32)
  return true;
#else
  return false;
#endif
}

/// @pre has_crc32c_instruction().
[[nodiscard]] inline std::uint32_t crc32c_word_by_instruction(std::uint32_t state,
                                                              std::uint64_t word) noexcept {
#if defined(__x86_64__)
  // Not the intrinsic: that asks for SSE4.2 in every translation unit, or for a target attribute, of which
  // nvcc knows nothing.
  std::uint64_t wide = state;
  asm("crc32q %1, %0" : "+r"(wide) : "rm"(word));
  return static_cast<std::uint32_t>(wide);
#elif defined(__ARM_FEATURE_CRC32)
  return __crc32cd(state, word);
#else
  return crc32c_word_by_table(state, word);
#endif
}

template <class TakeWord>
[[nodiscard]] constexpr std::uint32_t crc32c_run(std::uint32_t state, std::span<const std::byte> bytes,
                                                 TakeWord&& take_word) noexcept {
  std::size_t i = 0;
  for (; bytes.size() - i >= sizeof(std::uint64_t); i += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    if (std::is_constant_evaluated()) {
      for (std::size_t k = 0; k < sizeof(word); ++k)
        word |= static_cast<std::uint64_t>(bytes[i + k]) << (8 * k);
    } else {
      std::memcpy(&word, bytes.data() + i, sizeof(word));
    }
    state = take_word(state, word);
  }
  for (; i < bytes.size(); ++i)
    state = crc32c_byte(state, bytes[i]);
  return state;
}

}  // namespace detail

/// CRC-32C (Castagnoli) of `bytes` behind others whose checksum is `crc`; 0 at the beginning.
///
///     auto sum = llmmem::crc32c(0, head);
///     sum = llmmem::crc32c(sum, rest);        // that of head and rest together
///
/// @par Complexity   by the processor's instruction where there is one (x86-64 with SSE4.2, asked at run
/// time;
///      Arm where the compiler may use it), eight bytes at a time, else eight bytes by table.
/// @par Source   the polynomial of RFC 3720; tables by Kounavis and Berry, "A systematic approach to building
///      high performance software-based CRC generators", 2005.
[[nodiscard]] constexpr std::uint32_t crc32c(std::uint32_t crc, std::span<const std::byte> bytes) noexcept {
  if (!std::is_constant_evaluated() && detail::has_crc32c_instruction())
    return ~detail::crc32c_run(~crc, bytes, detail::crc32c_word_by_instruction);
  return ~detail::crc32c_run(~crc, bytes, detail::crc32c_word_by_table);
}

}  // namespace llmmem::inline v0
