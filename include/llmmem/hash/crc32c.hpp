/// @file
/// CRC-32C: the checksum of chunks, frames and files.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/hash/detail/crc32c_fold.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#if defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

namespace llmmem {
inline namespace v0 {

namespace detail {

/// Table k is for a byte that k zero bytes follow.
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

/// Adds one byte; `state` is the checksum's complement.
[[nodiscard]] constexpr std::uint32_t crc32c_byte(std::uint32_t state, std::byte byte) noexcept {
  return (state >> 8) ^ crc32c_tables[0][(state ^ static_cast<std::uint32_t>(byte)) & 0xFFU];
}

/// Adds eight bytes, the first in the lowest bits.
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
  // Assembly, because the intrinsic needs SSE4.2 in every translation unit, or a target attribute, which nvcc
  // does not support.
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

/// Tables, by a state's four bytes, for the state after a lane of zero bytes. A state is a remainder, so the
/// result is its product with a power of x: the sum of the products of its bits.
inline constexpr std::size_t crc32c_lane = 4096;
inline constexpr std::array<std::array<std::uint32_t, 256>, 4> crc32c_lane_tables = [] {
  constexpr std::uint32_t power = crc32c_power(8 * crc32c_lane);
  std::array<std::array<std::uint32_t, 256>, 4> tables{};
  for (std::size_t k = 0; k < tables.size(); ++k) {
    for (std::uint32_t i = 1; i < 256; ++i) {
      const std::uint32_t rest = i & (i - 1);
      tables[k][i] = rest == 0 ? crc32c_product(power, i << (8 * k)) : tables[k][rest] ^ tables[k][i ^ rest];
    }
  }
  return tables;
}();

[[nodiscard]] constexpr std::uint32_t crc32c_past_lane(std::uint32_t state) noexcept {
  return crc32c_lane_tables[0][state & 0xFFU] ^ crc32c_lane_tables[1][(state >> 8) & 0xFFU] ^
         crc32c_lane_tables[2][(state >> 16) & 0xFFU] ^ crc32c_lane_tables[3][state >> 24];
}

/// As `crc32c_run` by instruction, but three lanes at a time, because an instruction takes three cycles, and
/// one can begin in each cycle. @pre has_crc32c_instruction().
[[nodiscard]] inline std::uint32_t crc32c_run_in_lanes(std::uint32_t state,
                                                       std::span<const std::byte> bytes) noexcept {
  while (bytes.size() >= 3 * crc32c_lane) {
    std::uint32_t second = 0;
    std::uint32_t third = 0;
    for (std::size_t i = 0; i < crc32c_lane; i += sizeof(std::uint64_t)) {
      std::array<std::uint64_t, 3> words{};
      for (std::size_t lane = 0; lane < words.size(); ++lane)
        std::memcpy(&words[lane], bytes.data() + lane * crc32c_lane + i, sizeof(std::uint64_t));
      state = crc32c_word_by_instruction(state, words[0]);
      second = crc32c_word_by_instruction(second, words[1]);
      third = crc32c_word_by_instruction(third, words[2]);
    }
    state = crc32c_past_lane(crc32c_past_lane(state) ^ second) ^ third;
    bytes = bytes.subspan(3 * crc32c_lane);
  }
  return crc32c_run(state, bytes, crc32c_word_by_instruction);
}

/// Returns whether a run is long enough to be folded, this machine can, and no sanitizer must see the bytes.
/// The length is looked at first, because it is in a register.
[[nodiscard]] inline bool folds_crc32c(std::size_t bytes) noexcept {
  return !crc32c_is_watched && bytes >= 2 * crc32c_round && has_crc32c_folding() && has_crc32c_instruction();
}
/// Returns the state after a folded run and the bytes that follow it.
[[nodiscard]] inline std::uint32_t crc32c_after_fold(const crc32c_rest& rest,
                                                     std::span<const std::byte> bytes) noexcept {
  return crc32c_run(crc32c_run(0, rest, crc32c_word_by_instruction), bytes, crc32c_word_by_instruction);
}

/// As `crc32c_run` by folding. @pre folds_crc32c(bytes.size())
[[nodiscard]] inline std::uint32_t crc32c_run_folded(std::uint32_t state,
                                                     std::span<const std::byte> bytes) noexcept {
  crc32c_rest rest;
  crc32c_fold(state, bytes.data(), bytes.size() / crc32c_round, rest);
  return crc32c_after_fold(rest, bytes.last(bytes.size() % crc32c_round));
}

}  // namespace detail

/// Returns the CRC-32C (Castagnoli) of `bytes` after earlier bytes whose checksum is `crc`; 0 at the
/// beginning.
///
///     auto sum = llmmem::crc32c(0, head);
///     sum = llmmem::crc32c(sum, rest);        // that of head and rest together
///
/// @par Complexity   by the processor's instruction if it has one (x86-64 with SSE4.2, tested at run time;
///      Arm if the compiler may use it), eight bytes at a time, in long runs three times eight; runs of 512
///      bytes and more by multiplication of 64 bytes at a time where the processor has VPCLMULQDQ and
///      AVX-512; otherwise eight bytes at a time by table.
/// @par Source   the polynomial of RFC 3720; tables by Kounavis and Berry, "A systematic approach to building
///      high performance software-based CRC generators", 2005; lanes by Gopal et al., "Fast CRC Computation
///      for iSCSI Polynomial Using CRC32 Instruction", Intel, 2011; multiplication by Gopal et al., "Fast CRC
///      Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel, 2009.
[[nodiscard]] constexpr std::uint32_t crc32c(std::uint32_t crc, std::span<const std::byte> bytes) noexcept {
  if (!std::is_constant_evaluated()) {
    if (detail::folds_crc32c(bytes.size())) return ~detail::crc32c_run_folded(~crc, bytes);
    if (detail::has_crc32c_instruction()) return ~detail::crc32c_run_in_lanes(~crc, bytes);
  }
  return ~detail::crc32c_run(~crc, bytes, detail::crc32c_word_by_table);
}

/// Returns the checksum of a run whose beginning has checksum `first` and whose last `second_bytes` bytes
/// have `second`, for parts that are computed separately or in any order.
///
/// @par Complexity   O(log second_bytes), a microsecond or two.
/// @par Source   Mark Adler's `crc32_combine` in zlib: zero bytes add a product with a power of x, and the
///      second part's checksum is added to it.
[[nodiscard]] constexpr std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second,
                                                     std::uint64_t second_bytes) noexcept {
  std::uint32_t power = 0x0080'0000U;  // x^8: one byte
  for (; second_bytes != 0; second_bytes >>= 1) {
    if ((second_bytes & 1U) != 0) first = detail::crc32c_product(power, first);
    power = detail::crc32c_product(power, power);
  }
  return first ^ second;
}

}  // namespace v0
}  // namespace llmmem
