/// @file
/// How tiers name blocks: by one key for each chunk of a prefix and group of layers, and a digest of the
/// previous chunk.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/hash/block_key.hpp>

#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The contents before a block's: `paging::key_digest` of their key, none, or unknown.
enum class parent_digest : std::uint64_t { none = 0, unknown = 1 };

/// Returns the key of a group's block in a tier's index, which has the keys of all groups.
[[nodiscard]] constexpr block_key tier_key(const block_key& key, std::size_t group) noexcept {
  return {.low = key.low ^ group * 0x9E37'79B9'7F4A'7C15ULL,
          .high = key.high + group * 0xD1B5'4A32'D192'ED03ULL};
}
/// The inverse of `tier_key`.
[[nodiscard]] constexpr block_key chain_key_of(const block_key& key, std::size_t group) noexcept {
  return {.low = key.low ^ group * 0x9E37'79B9'7F4A'7C15ULL,
          .high = key.high - group * 0xD1B5'4A32'D192'ED03ULL};
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
