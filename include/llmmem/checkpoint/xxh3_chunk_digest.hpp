/// @file
/// XXH3 with a 128-bit result as the digest of a chunk. Needs xxHash (0.8 or newer).
#pragma once

#include <llmmem/config.hpp>

#if !__has_include(<xxhash.h>)
#error "llmmem/checkpoint/xxh3_chunk_digest.hpp needs xxHash: install libxxhash-dev and link llmmem::xxhash."
#endif

#include <llmmem/checkpoint/chunk_digest.hpp>

#ifndef XXH_INLINE_ALL
#define XXH_INLINE_ALL  // header-only: nothing of xxHash is linked
#endif
#include <xxhash.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

/// XXH3, which runs at about memory speed. It protects against accidents, not against an attacker that
/// chooses the state's bytes so that two chunks have the same digest.
struct xxh3_chunk_digest {
  static constexpr bool detects_changes = true;
  [[nodiscard]] static std::array<std::uint64_t, 2> of(std::span<const std::byte> bytes) noexcept {
    const XXH128_hash_t digest = XXH3_128bits(bytes.data(), bytes.size());
    return {digest.low64, digest.high64};
  }
};

static_assert(chunk_digest<xxh3_chunk_digest>);

}  // namespace v0
}  // namespace llmmem
