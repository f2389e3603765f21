/// @file
/// `chunk_key`, which identifies a chunk beyond the life of a process, and `chunk_extent`, where a file
/// stores it.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/hash/sha256.hpp>

#include <cstdint>
#include <string_view>

namespace llmmem {
inline namespace v0 {

/// 128 evenly distributed bits: a block's content key, `key_of_name` or `key_from_id`.
using chunk_key = block_key;

/// Returns the key of a name, such as a tensor's: the first half of a SHA-256, so that no two names that
/// occur in practice have the same key.
[[nodiscard]] constexpr chunk_key key_of_name(std::string_view name) noexcept {
  detail::sha256_state state;
  state.absorb64(name.size());
  std::uint32_t word = 0;
  for (std::size_t i = 0; i < name.size(); ++i) {
    word = word << 8 | static_cast<std::uint8_t>(name[i]);
    if (i % 4 != 3) continue;
    state.absorb(word);
    word = 0;
  }
  if (name.size() % 4 != 0) state.absorb(word);
  const auto digest = state.finish();
  return {.low = std::uint64_t{digest[0]} << 32 | digest[1],
          .high = std::uint64_t{digest[2]} << 32 | digest[3]};
}

/// Where a chunk is stored, in what form, and the checksum that proves it complete.
struct chunk_extent {
  chunk_key key{};
  std::uint64_t offset = 0;    ///< in the tier's file
  std::uint64_t bytes = 0;     ///< bytes of the chunk
  std::uint64_t stored = 0;    ///< bytes of its stored form
  std::uint64_t format = 0;    ///< the codec's `format_id`
  std::uint32_t checksum = 0;  ///< CRC-32C of the stored form

  friend constexpr bool operator==(const chunk_extent&, const chunk_extent&) noexcept = default;
};

}  // namespace v0
}  // namespace llmmem
