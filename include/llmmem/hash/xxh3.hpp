/// @file
/// XXH3 with a 128-bit result as the hash of the prefix chain. Needs xxHash (0.8 or newer).
#pragma once

#include <llmmem/config.hpp>

#if !__has_include(<xxhash.h>)
#error "llmmem/hash/xxh3.hpp needs xxHash: install libxxhash-dev and link llmmem::xxhash, or use siphash_128."
#endif

#include <llmmem/hash/block_key.hpp>

#ifndef XXH_INLINE_ALL
#define XXH_INLINE_ALL  // header-only: nothing of xxHash is linked
#endif
#include <xxhash.h>

#include <array>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

/// For long blocks: several times faster than SipHash, but resistant only to accidents, not to attackers.
/// With exact token verification a collision costs a hit, never a leak; without it, keep `siphash_128`.
///
/// @par Thread safety   const throughout.
class xxh3_128 {
 public:
  explicit xxh3_128(hash_seed seed = {}) noexcept : seed_(seed) {}

  [[nodiscard]] block_key root(const prefix_context& context) const noexcept {
    return digest(std::array{std::uint64_t{0}, seed_.high, context.salt[0], context.salt[1],
                             context.extra_keys[0], context.extra_keys[1]});
  }

  [[nodiscard]] block_key chain(const block_key& parent, std::span<const token_id> tokens) const noexcept {
    const XXH128_hash_t own = XXH3_128bits_withSeed(tokens.data(), tokens.size_bytes(), seed_.low);
    return digest(std::array{std::uint64_t{1}, seed_.high, parent.low, parent.high, own.low64, own.high64});
  }

 private:
  [[nodiscard]] block_key digest(const std::array<std::uint64_t, 6>& words) const noexcept {
    const XXH128_hash_t key = XXH3_128bits_withSeed(words.data(), sizeof(words), seed_.low);
    return {.low = key.low64, .high = key.high64};
  }

  hash_seed seed_;
};

static_assert(block_hash<xxh3_128>);

}  // namespace v0
}  // namespace llmmem
