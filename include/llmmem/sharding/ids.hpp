/// @file
/// Identifiers of the holders of stored pieces, and of ranks (`comm/ranks.hpp`).
#pragma once

#include <llmmem/comm/ranks.hpp>
#include <llmmem/config.hpp>
#include <llmmem/tiering/chunk_mapping.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// The holder of a stored piece: a file of a checkpoint by its index, or a live rank by its number.
enum class holder_id : std::uint32_t {};

/// No holder.
inline constexpr holder_id no_holder{0xFFFF'FFFF};

/// The number in a strong type, to index or compute with.
[[nodiscard]] constexpr std::uint32_t to_index(holder_id holder) noexcept {
  return static_cast<std::uint32_t>(holder);
}

}  // namespace v0
}  // namespace llmmem
