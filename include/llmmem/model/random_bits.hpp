/// @file
/// Random bits of a counter, for stochastic rounding: a function of a key and an index, the same everywhere.
#pragma once

#include <llmmem/config.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// Returns 64 bits that are unrelated for neighbouring numbers: the finaliser of splitmix64 (Steele, Lea and
/// Flood, 2014). 0 stays 0.
[[nodiscard]] LLMMEM_HD constexpr std::uint64_t mixed_bits(std::uint64_t number) noexcept {
  number = (number ^ (number >> 30U)) * 0xBF58'476D'1CE4'E5B9U;
  number = (number ^ (number >> 27U)) * 0x94D0'49BB'1331'11EBU;
  return number ^ (number >> 31U);
}

/// Two rounds of MurmurHash3's finaliser, with a second word added after the first round. @tparam Word  32
/// bits, or a vector of them
template <class Word>
LLMMEM_HD LLMMEM_ALWAYS_INLINE constexpr void mix_random(Word& mixed, const Word& second) noexcept {
  for (int round = 0; round < 2; ++round) {
    mixed = (mixed ^ (mixed >> 16U)) * 0x85EB'CA6BU;
    mixed = (mixed ^ (mixed >> 13U)) * 0xC2B2'AE35U;
    mixed ^= mixed >> 16U;
    if (round == 0) mixed += second;
  }
}

/// Returns 32 random bits for an index under a key. Nothing is stored, so any thread, rank or device draws
/// the same bits for an element, in any order.
[[nodiscard]] LLMMEM_HD constexpr std::uint32_t random_bits(std::uint64_t index, std::uint64_t key) noexcept {
  std::uint32_t mixed = static_cast<std::uint32_t>(index) ^ static_cast<std::uint32_t>(key);
  mix_random(mixed, static_cast<std::uint32_t>(index >> 32U) ^ static_cast<std::uint32_t>(key >> 32U));
  return mixed;
}

}  // namespace v0
}  // namespace llmmem
