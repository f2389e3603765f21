/// @file
/// SHA-256 as the hash of the prefix chain, for engines that require a standard digest.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/hash/detail/sha256_state.hpp>

#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

/// SHA-256 of (seed, parent, tokens), truncated to 128 bits. Portable code at about twenty times the cost
/// of SipHash.
///
/// @par Thread safety   const throughout.
class sha256_128 {
 public:
  constexpr explicit sha256_128(hash_seed seed = {}) noexcept : seed_(seed) {}

  [[nodiscard]] constexpr block_key root(const prefix_context& context) const noexcept {
    detail::sha256_state state = begin(0);
    for (const std::uint64_t word : context.salt)
      state.absorb64(word);
    for (const std::uint64_t word : context.extra_keys)
      state.absorb64(word);
    return key(state);
  }

  [[nodiscard]] constexpr block_key chain(const block_key& parent,
                                          std::span<const token_id> tokens) const noexcept {
    detail::sha256_state state = begin(1);
    state.absorb64(parent.low);
    state.absorb64(parent.high);
    for (const token_id token : tokens)
      state.absorb(static_cast<std::uint32_t>(token));
    return key(state);
  }

 private:
  [[nodiscard]] constexpr detail::sha256_state begin(std::uint64_t domain) const noexcept {
    detail::sha256_state state;
    state.absorb64(seed_.low);
    state.absorb64(seed_.high);
    state.absorb64(domain);
    return state;
  }

  [[nodiscard]] static constexpr block_key key(detail::sha256_state& state) noexcept {
    const auto digest = state.finish();
    return {.low = (std::uint64_t{digest[0]} << 32) | digest[1],
            .high = (std::uint64_t{digest[2]} << 32) | digest[3]};
  }

  hash_seed seed_;
};

static_assert(block_hash<sha256_128>);

}  // namespace v0
}  // namespace llmmem
