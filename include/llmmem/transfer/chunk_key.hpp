/// @file
/// `chunk_key`: what names a chunk beyond the life of a process.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/paging/block_key.hpp>
#include <llmmem/paging/sha256.hpp>

#include <cstdint>
#include <string_view>

namespace llmmem::inline v0 {

/// 128 evenly distributed bits: the key of a block's contents as it is, or `key_of_name`, `key_from_id`.
using chunk_key = block_key;

/// The key of a name, such as that of a tensor: the first half of a SHA-256, so that no two names that
/// anybody comes up with have the same.
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

}  // namespace llmmem::inline v0
