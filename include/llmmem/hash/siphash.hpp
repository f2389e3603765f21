/// @file
/// SipHash with a 128-bit result: a keyed hash of the prefix chain for any processor.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/hash/block_key.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// SipHash-c-d-128 over a message added eight bytes at a time, little-endian (Aumasson and Bernstein,
/// "SipHash: a fast short-input PRF", 2012, with the 128-bit output of the authors' reference).
///
/// @tparam Compression   c, rounds per word.
/// @tparam Finalization  d, rounds at the end, for each half of the result.
template <int Compression, int Finalization>
class siphash_state {
 public:
  constexpr explicit siphash_state(hash_seed key) noexcept
      : v0_(0x736F'6D65'7073'6575ULL ^ key.low),
        v1_(0x646F'7261'6E64'6F6DULL ^ key.high ^ 0xEE),
        v2_(0x6C79'6765'6E65'7261ULL ^ key.low),
        v3_(0x7465'6462'7974'6573ULL ^ key.high) {}

  constexpr void absorb(std::uint64_t word) noexcept {
    v3_ ^= word;
    rounds<Compression>();
    v0_ ^= word;
  }

  /// @param tail  the message's last `bytes % 8` bytes, in the low end.
  /// @param bytes  the whole message's length.
  [[nodiscard]] constexpr block_key finish(std::uint64_t tail, std::uint64_t bytes) noexcept {
    absorb(tail | (bytes << 56));
    v2_ ^= 0xEE;
    const std::uint64_t low = squeeze();
    v1_ ^= 0xDD;
    return {.low = low, .high = squeeze()};
  }

 private:
  constexpr std::uint64_t squeeze() noexcept {
    rounds<Finalization>();
    return v0_ ^ v1_ ^ v2_ ^ v3_;
  }

  template <int Count>
  constexpr void rounds() noexcept {
    for (int i = 0; i < Count; ++i)
      round();
  }

  constexpr void round() noexcept {
    v0_ += v1_;
    v2_ += v3_;
    v1_ = std::rotl(v1_, 13) ^ v0_;
    v3_ = std::rotl(v3_, 16) ^ v2_;
    v0_ = std::rotl(v0_, 32);
    v2_ += v1_;
    v0_ += v3_;
    v1_ = std::rotl(v1_, 17) ^ v2_;
    v3_ = std::rotl(v3_, 21) ^ v0_;
    v2_ = std::rotl(v2_, 32);
  }

  std::uint64_t v0_, v1_, v2_, v3_;
};

}  // namespace detail

/// The prefix chain by SipHash-c-d-128: keyed, so an attacker without the seed cannot construct two prompts
/// with one key, and fast on messages as short as blocks.
///
/// @par Complexity   c rounds for every two tokens, and 3c + 2d for a block; a round is a chain of some four
///      cycles.
/// @par Thread safety   const throughout.
template <int Compression, int Finalization>
class basic_siphash {
 public:
  constexpr explicit basic_siphash(hash_seed seed = {}) noexcept : start_(seed), chain_start_(seed) {
    // The first word of a message gives its kind, so that no context reads as a block, and no block as a
    // context.
    start_.absorb(0);
    chain_start_.absorb(1);
  }

  [[nodiscard]] constexpr block_key root(const prefix_context& context) const noexcept {
    state_type state = start_;
    for (const std::uint64_t word : context.salt)
      state.absorb(word);
    for (const std::uint64_t word : context.extra_keys)
      state.absorb(word);
    return state.finish(0, 5 * sizeof(std::uint64_t));
  }

  [[nodiscard]] constexpr block_key chain(const block_key& parent,
                                          std::span<const token_id> tokens) const noexcept {
    state_type state = chain_start_;
    state.absorb(parent.low);
    state.absorb(parent.high);
    const std::size_t pairs = tokens.size() / 2;
    for (std::size_t i = 0; i < pairs; ++i)
      state.absorb(word(tokens[2 * i]) | (word(tokens[2 * i + 1]) << 32));
    const std::uint64_t tail = tokens.size() % 2 != 0 ? word(tokens.back()) : 0;
    return state.finish(tail, 3 * sizeof(std::uint64_t) + tokens.size() * sizeof(token_id));
  }

 private:
  using state_type = detail::siphash_state<Compression, Finalization>;

  [[nodiscard]] static constexpr std::uint64_t word(token_id token) noexcept {
    return static_cast<std::uint32_t>(token);
  }

  state_type start_;        // after the seed and the first word of a root
  state_type chain_start_;  // after the seed and the first word of a block
};

/// Fewer rounds, as in the hash tables of Rust and Python. If tokens verify hits, two prompts
/// constructed with one key cost only a hit.
using siphash13_128 = basic_siphash<1, 3>;

/// The authors' own choice of rounds, for keys that are trusted without verification.
using siphash_128 = basic_siphash<2, 4>;

static_assert(block_hash<siphash13_128> && block_hash<siphash_128>);

}  // namespace v0
}  // namespace llmmem
