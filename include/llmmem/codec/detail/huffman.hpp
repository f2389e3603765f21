/// @file
/// Prefix codes of bytes: optimal lengths, and the codes and tables that follow from the lengths.
#pragma once

#include <llmmem/config.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The longest code: one lookup in a table of 2^11 entries decodes it.
inline constexpr std::uint32_t longest_code = 11;

/// The length of each byte value's code; 0 for values that do not occur.
using code_lengths = std::array<std::uint8_t, 256>;

/// The number of occurrences of each byte value.
using byte_counts = std::array<std::uint32_t, 256>;

/// @pre `bytes` has fewer than 2^32 bytes.
[[nodiscard]] inline byte_counts count_bytes(std::span<const std::byte> bytes) noexcept {
  // Four tables, so that counts of equal neighbours do not wait for each other.
  std::array<byte_counts, 4> parts{};
  std::size_t i = 0;
  for (; bytes.size() - i >= 4; i += 4) {
    for (std::size_t k = 0; k < 4; ++k)
      ++parts[k][static_cast<std::size_t>(bytes[i + k])];
  }
  for (; i < bytes.size(); ++i)
    ++parts[0][static_cast<std::size_t>(bytes[i])];
  byte_counts sum = parts[0];
  for (std::size_t k = 1; k < 4; ++k) {
    for (std::size_t value = 0; value < 256; ++value)
      sum[value] += parts[k][value];
  }
  return sum;
}

/// Returns the lengths, none above `longest_code`, that encode all counted bytes in the fewest bits.
///
/// @pre at least two values occur.
/// @par Source   package-merge: Larmore and Hirschberg, "A fast algorithm for optimal length-limited Huffman
///      codes", 1990.
[[nodiscard]] inline code_lengths best_lengths(const byte_counts& counts) noexcept {
  struct leaf {
    std::uint64_t weight;
    std::uint8_t value;
  };
  std::array<leaf, 256> leaves{};
  std::size_t n = 0;
  for (std::size_t value = 0; value < 256; ++value) {
    if (counts[value] != 0) leaves[n++] = {counts[value], static_cast<std::uint8_t>(value)};
  }
  std::sort(leaves.data(), leaves.data() + n, [](const leaf& a, const leaf& b) {
    return a.weight != b.weight ? a.weight < b.weight : a.value < b.value;
  });

  // A round's items are the leaves and the pairs of the round before, by weight. Of each item, only
  // `is_leaf` is kept.
  static constexpr std::size_t most = 512;
  std::array<std::array<bool, most>, longest_code> is_leaf{};
  std::array<std::uint64_t, most> weights{};
  std::size_t items = 0;
  for (std::size_t round = 0; round < longest_code; ++round) {
    std::array<std::uint64_t, most> merged{};
    const std::size_t pairs = items / 2;
    std::size_t l = 0;
    std::size_t p = 0;
    for (items = 0; l < n || p < pairs; ++items) {
      const std::uint64_t pair = p < pairs ? weights[2 * p] + weights[2 * p + 1] : ~std::uint64_t{0};
      const bool takes_leaf = l < n && leaves[l].weight <= pair;
      is_leaf[round][items] = takes_leaf;
      merged[items] = takes_leaf ? leaves[l++].weight : pair;
      if (!takes_leaf) ++p;
    }
    weights = merged;
  }

  // Takes the lightest 2n - 2 items of the last round; a taken pair takes two items of the round before. The
  // length of a leaf's code is the number of times it was taken.
  code_lengths lengths{};
  std::size_t taken = 2 * n - 2;
  for (std::size_t round = longest_code; round-- > 0;) {
    const auto& kinds = is_leaf[round];
    const auto taken_leaves = static_cast<std::size_t>(std::count(kinds.data(), kinds.data() + taken, true));
    for (std::size_t i = 0; i < taken_leaves; ++i)
      ++lengths[leaves[i].value];
    taken = 2 * (taken - taken_leaves);
  }
  return lengths;
}

/// A code, its first bit lowest, and its length.
struct prefix_code {
  std::uint16_t bits = 0;
  std::uint16_t length = 0;
};

/// Returns the codes: codes of one length count upwards in the order of their values, after all shorter codes
/// (canonical codes). Returns nothing if the lengths are not a complete code of at least two values.
[[nodiscard]] inline std::optional<std::array<prefix_code, 256>> canonical_codes(
    const code_lengths& lengths) noexcept {
  std::array<std::uint32_t, longest_code + 1> of_length{};
  for (const std::uint8_t length : lengths) {
    if (length > longest_code) return std::nullopt;
    ++of_length[length];
  }
  of_length[0] = 0;
  std::array<std::uint32_t, longest_code + 1> next{};
  std::uint32_t code = 0;
  for (std::uint32_t length = 1; length <= longest_code; ++length) {
    code = (code + of_length[length - 1]) << 1;
    next[length] = code;
  }
  if (code + of_length[longest_code] != std::uint32_t{1} << longest_code) return std::nullopt;

  std::array<prefix_code, 256> codes{};
  for (std::size_t value = 0; value < 256; ++value) {
    const std::uint32_t length = lengths[value];
    if (length == 0) continue;
    std::uint32_t forwards = next[length]++;
    std::uint32_t bits = 0;
    for (std::uint32_t k = 0; k < length; ++k, forwards >>= 1)
      bits = bits << 1 | (forwards & 1U);
    codes[value] = {static_cast<std::uint16_t>(bits), static_cast<std::uint16_t>(length)};
  }
  return codes;
}

/// The meaning of the next `longest_code` bits of a stream: one to four bytes.
struct decoded_bytes {
  std::uint32_t bytes = 0;   ///< the first in the lowest bits
  std::uint16_t length = 0;  ///< bits of all codes together
  std::uint16_t count = 0;
};

inline constexpr std::size_t decoding_entries = std::size_t{1} << longest_code;

/// Fills `table`: each entry holds the bytes of the complete codes in its index, up to four.
///
/// @pre the codes are complete; `table` and `singles` have `decoding_entries` entries.
inline void fill_decoding_table(const std::array<prefix_code, 256>& codes, std::span<decoded_bytes> table,
                                std::span<decoded_bytes> singles) noexcept {
  for (std::uint32_t value = 0; value < 256; ++value) {
    const prefix_code code = codes[value];
    if (code.length == 0) continue;
    for (std::size_t i = code.bits; i < decoding_entries; i += std::size_t{1} << code.length)
      singles[i] = {value, code.length, 1};
  }
  const auto joined = [](const decoded_bytes& first, const decoded_bytes& second) -> decoded_bytes {
    const bool fits = first.length + second.length <= int{longest_code};
    return {first.bytes | (fits ? second.bytes << (8 * first.count) : 0U),
            static_cast<std::uint16_t>(first.length + (fits ? second.length : 0)),
            static_cast<std::uint16_t>(first.count + (fits ? second.count : 0))};
  };
  // Joins up to four codes one by one: the entry whose lowest bits are those after a code has the next one.
  for (std::size_t i = 0; i < decoding_entries; ++i) {
    decoded_bytes entry = singles[i];
    for (int more = 0; more < 3; ++more)
      entry = joined(entry, singles[i >> entry.length]);
    table[i] = entry;
  }
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
