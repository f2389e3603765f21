/// @file
/// The largest values of a piece, by magnitude: exactly as many as asked for, in place, without scratch
/// memory.
#pragma once

#include <llmmem/config.hpp>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

/// Calls `take(place, index)` for the `count` values of largest magnitude, with places from 0 to `count` - 1
/// and indices that ascend.
///
/// The order of values is that of the bits without the sign: NaNs are above infinity, 0 and -0 are equal. Of
/// equal magnitudes the lowest index is taken. So the choice is one set for any values, on every machine.
///
/// @param count  at most `values.size()`
/// @pre `values` has at most 2^32 elements
/// @par Complexity      O(n): four passes, of which one calls `take`; 16 KiB of stack. All values: one pass.
/// @par Thread safety   pure, apart from `take`.
/// @par Source          radix selection: each pass fixes one digit of the smallest value that is taken.
template <class Take>
void select_top_magnitudes(std::span<const float> values, std::uint64_t count, Take&& take) {
  if (count == 0) return;
  const auto key_of = [](float value) { return std::bit_cast<std::uint32_t>(value) & 0x7FFF'FFFFU; };
  std::uint32_t least = 0;            // the smallest key that is taken, from its first digit on
  std::uint64_t equal_to_it = count;  // how many of it are taken
  if (count < values.size()) {
    constexpr unsigned bits = 11;
    for (const unsigned shift : {22U, 11U, 0U}) {
      std::array<std::uint64_t, std::size_t{1} << bits> counts{};
      for (const float each : values) {
        const std::uint32_t key = key_of(each);
        if (shift == 22 || key >> (shift + bits) == least >> (shift + bits))
          ++counts[key >> shift & ((1U << bits) - 1)];
      }
      std::uint32_t digit = (1U << bits) - 1;
      while (counts[digit] < equal_to_it)
        equal_to_it -= counts[digit--];
      least |= digit << shift;
    }
  }
  std::uint64_t place = 0;
  for (std::size_t i = 0; place < count; ++i) {
    const std::uint32_t key = key_of(values[i]);
    if (count < values.size()) {
      if (key < least) continue;
      if (key == least) {
        if (equal_to_it == 0) continue;
        --equal_to_it;
      }
    }
    take(place++, static_cast<std::uint32_t>(i));
  }
}

}  // namespace v0
}  // namespace llmmem
