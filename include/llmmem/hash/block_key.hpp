/// @file
/// The name of a block's contents in the prefix index, and the concept of a hash policy.
#pragma once

#include <llmmem/config.hpp>

#include <array>
#include <concepts>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

/// A token in the tokenizer's numbering.
using token_id = std::int32_t;

/// 128 bits that identify a block's tokens *and all tokens before them*: key = hash(parent's key, tokens).
///
/// The index uses the top 32 bits of `high` unchanged, so keys must be evenly distributed: the keys of hash
/// policies are, and `key_from_id` distributes the ids of a trace or another service.
struct block_key {
  std::uint64_t low = 0;
  std::uint64_t high = 0;

  friend constexpr bool operator==(const block_key&, const block_key&) noexcept = default;
};

/// The facts, in addition to the tokens, that must be equal for two sequences to share blocks.
///
/// Sequences in different contexts never share. To distinguish content that tokens do not show (images,
/// audio), use an extra key for the whole sequence. A finer way is to give its placeholder positions token
/// ids made from a digest of the content, as SGLang does.
struct prefix_context {
  std::array<std::uint64_t, 2> salt{};  ///< the tenant: a UUID, or 128 bits of a digest of its salt string
  std::array<std::uint64_t, 2> extra_keys{};  ///< the adapter (LoRA) id, and one for the engine's own use

  /// By words: the default compares each array by a call of `memcmp`, and every hit compares its context.
  friend constexpr bool operator==(const prefix_context& a, const prefix_context& b) noexcept {
    return ((a.salt[0] ^ b.salt[0]) | (a.salt[1] ^ b.salt[1]) | (a.extra_keys[0] ^ b.extra_keys[0]) |
            (a.extra_keys[1] ^ b.extra_keys[1])) == 0;
  }
};

/// The secret that keys a hash. The default makes runs repeatable; a service whose tenants distrust each
/// other chooses it at random at start-up, so that no tenant can prepare colliding prompts.
struct hash_seed {
  std::uint64_t low = 0x6C6C'6D6D'656D'2030ULL;
  std::uint64_t high = 0x626C'6F63'6B20'6B65ULL;
};

/// Makes the keys of a hash chain. No state except the seed; `noexcept`; safe to call from several threads.
///
///     root(context)          the key before the first block
///     chain(parent, tokens)  the key of a block that follows `parent`
template <class H>
concept block_hash = std::constructible_from<H, hash_seed> && std::copyable<H> &&
                     requires(const H& hash, const prefix_context& context, const block_key& parent,
                              std::span<const token_id> tokens) {
                       { hash.root(context) } noexcept -> std::same_as<block_key>;
                       { hash.chain(parent, tokens) } noexcept -> std::same_as<block_key>;
                     };

/// A hash whose `chain` is two steps, the first of which needs no parent: `chain(parent, fold(tokens))` is
/// `chain(parent, tokens)`. `chained_keys` executes the first step for a block while the key of the block
/// before it is being computed. A hash may also have `fold_four(tokens, out)`, which folds four blocks that
/// follow each other in `tokens`; `folds_four(block_tokens)` says whether this takes less time than one after
/// the other.
template <class H>
concept folding_block_hash =
    block_hash<H> && requires(const H& hash, const block_key& parent, std::span<const token_id> tokens,
                              const typename H::folded_tokens& folded) {
      { hash.fold(tokens) } noexcept -> std::same_as<typename H::folded_tokens>;
      { hash.chain(parent, folded) } noexcept -> std::same_as<block_key>;
    };

/// Returns a key for an id that already identifies a block's contents and all contents before it, such as a
/// trace's `hash_ids`.
///
/// A bijection of the id in each half (the finaliser of SplitMix64, by Steele, Lea and Flood 2014), so
/// different ids get different keys. Not keyed: pass ids from untrusted clients through a hash policy.
[[nodiscard]] constexpr block_key key_from_id(std::uint64_t id) noexcept {
  const auto mix = [](std::uint64_t x) noexcept {
    x = (x ^ (x >> 30)) * 0xBF58'476D'1CE4'E5B9ULL;
    x = (x ^ (x >> 27)) * 0x94D0'49BB'1331'11EBULL;
    return x ^ (x >> 31);
  };
  return {.low = mix(id), .high = mix(id + 0x9E37'79B9'7F4A'7C15ULL)};
}

}  // namespace v0
}  // namespace llmmem
