/// @file
/// `chunk_digest`: how an incremental save finds out that bytes are the same as before.
#pragma once

#include <llmmem/config.hpp>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

/// Bytes of a chunk in 128 bits. A chunk with the digest that it had before is taken to be the same, so that
/// 128 bits it must be: of 32, one changed chunk in four billion would be lost.
///
/// - `tells`       false: there is none, and all chunks count as changed.
/// - `of(bytes)`   the digest; called by the thread that writes.
template <class D>
concept chunk_digest = requires(std::span<const std::byte> bytes) {
  requires std::same_as<std::remove_cv_t<decltype(D::tells)>, bool>;
  { D::of(bytes) } noexcept -> std::same_as<std::array<std::uint64_t, 2>>;
};

/// None: a view that tells what changed may still (`change_tracking_view`).
struct no_chunk_digest {
  static constexpr bool tells = false;
  [[nodiscard]] static std::array<std::uint64_t, 2> of(std::span<const std::byte> /*bytes*/) noexcept {
    return {};
  }
};

static_assert(chunk_digest<no_chunk_digest>);

}  // namespace v0
}  // namespace llmmem
