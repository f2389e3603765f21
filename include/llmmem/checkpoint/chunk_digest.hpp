/// @file
/// `chunk_digest`: how an incremental save detects that bytes are the same as before.
#pragma once

#include <llmmem/config.hpp>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

/// A digest of a chunk's bytes. A chunk with the same digest as before counts as unchanged, so the digest has
/// 128 bits: with 32, one changed chunk in four billion would be lost.
///
/// - `detects_changes` false: there is no digest, and all chunks count as changed.
/// - `of(bytes)`   returns the digest; called by the writer thread.
template <class D>
concept chunk_digest = requires(std::span<const std::byte> bytes) {
  requires std::same_as<std::remove_cv_t<decltype(D::detects_changes)>, bool>;
  { D::of(bytes) } noexcept -> std::same_as<std::array<std::uint64_t, 2>>;
};

/// No digest. A view may still report changes (`change_tracking_view`).
struct no_chunk_digest {
  static constexpr bool detects_changes = false;
  [[nodiscard]] static std::array<std::uint64_t, 2> of(std::span<const std::byte> /*bytes*/) noexcept {
    return {};
  }
};

static_assert(chunk_digest<no_chunk_digest>);

}  // namespace v0
}  // namespace llmmem
