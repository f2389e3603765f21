/// @file
/// A MAC by AES-128 with a 128-bit result: the default hash of the prefix chain.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/hash/detail/aes.hpp>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace llmmem {
inline namespace v0 {

/// The prefix chain by PMAC over AES-128: keyed, so an attacker without the seed cannot construct two prompts
/// with one key.
///
/// Four tokens are one block of AES. All blocks of AES are encrypted independently of each other and of the
/// parent, each with a mask of its place; their sum, the parent's key and a last mask are encrypted once
/// more. So only one encryption is on the path from a parent's key to its child's. The last mask says whether
/// the message is a block of whole groups of four tokens, one with padding, or a context, so none of these
/// can be taken for another one.
///
/// All ways of computing give the same keys. The seed is the key of AES, all of its 128 bits.
///
/// **What an attacker can do**: if AES is a pseudorandom permutation, an attacker without the seed needs
/// about 2^64 blocks of AES under one seed to distinguish the keys from random ones, or to construct a
/// collision (Black and Rogaway 2002, theorem 1). An attacker with the seed constructs collisions easily, as
/// with SipHash: a service whose tenants distrust each other chooses the seed at random, and one that must
/// not depend on a secret takes `sha256_128`. If tokens verify hits, a collision costs only a hit.
///
/// @par Complexity   (n + 3) / 4 + 1 encryptions for n tokens. With AES instructions (x86-64, tested at run
///      time; aarch64 under Linux), four at a time; with those of VAES and AVX-512, the first 16 places take
///      one instruction for four. Otherwise by table, at twelve times the cost of SipHash: without the
///      instructions take `siphash13_128`.
/// @par Thread safety   const throughout.
/// @par Source   Black and Rogaway, "A block-cipher mode of operation for parallelizable message
///      authentication", EUROCRYPT 2002; with three last masks where the paper has two. AES: FIPS 197.
class aes_pmac_128 {
 public:
  explicit aes_pmac_128(hash_seed seed = {}) noexcept : aes_pmac_128(seed, best_aes_path()) {}

  /// @pre has_aes_path(path).
  aes_pmac_128(hash_seed seed, aes_path path) noexcept
      : key_(detail::aes_expand({seed.low, seed.high})), path_(path) {
    detail::aes_block mask = detail::aes_encrypt_by_table(key_, {});
    const detail::aes_block half = halved(mask);
    last_whole_ = half;
    last_padded_ = halved(half);
    last_root_ = last_whole_ ^ last_padded_;
    for (detail::aes_block& each : steps_) {
      each = mask;
      mask = doubled(mask);
    }
    detail::aes_block of_place{};
    for (std::size_t i = 0; i < masks_.size() * 4; ++i)
      masks_[i / 4][i % 4] = of_place = of_place ^ step_to(i + 1);
  }

  [[nodiscard]] block_key root(const prefix_context& context) const noexcept {
    const detail::aes_block salt{context.salt[0], context.salt[1]};
    const detail::aes_block extra{context.extra_keys[0], context.extra_keys[1]};
    return key_of(encrypted(encrypted(salt ^ steps_[0]) ^ extra ^ last_root_));
  }

  [[nodiscard]] block_key chain(const block_key& parent, std::span<const token_id> tokens) const noexcept {
    return chain(parent, fold(tokens));
  }

  /// The sum of a block's encrypted tokens and its last mask.
  using folded_tokens = detail::aes_block;

  [[nodiscard]] folded_tokens fold(std::span<const token_id> tokens) const noexcept {
#if defined(LLMMEM_AES_INSTRUCTIONS)
    // The usual sizes of blocks. So short that a compiler inserts it into the caller's loop.
    if (path_ == aes_path::wide_instructions && tokens.size() % tokens_a_four == 0 &&
        tokens.size() <= masks_.size() * tokens_a_four) {
      return detail::aes_store(detail::aes_sum_of_fours(
          key_, masks_.data(), tokens.data(), tokens.size() / tokens_a_four, detail::aes_load(last_whole_)));
    }
#endif
    return fold_any(tokens);
  }

  /// Whether `fold_four` takes less time than four calls of `fold`, for blocks of that size: with wide
  /// instructions, up to the places that have them.
  [[nodiscard]] bool folds_four(std::size_t block_tokens) const noexcept {
    return path_ == aes_path::wide_instructions && block_tokens % tokens_a_four == 0 &&
           block_tokens <= masks_.size() * tokens_a_four;
  }

  /// Folds four blocks of equal size, which follow each other in `tokens`.
  void fold_four(std::span<const token_id> tokens, std::array<folded_tokens, 4>& out) const noexcept {
    const std::size_t size = tokens.size() / out.size();
#if defined(LLMMEM_AES_INSTRUCTIONS)
    if (folds_four(size)) {
      out.fill(last_whole_);
      return detail::aes_sums_of_fours(key_, masks_.data(), tokens.data(), size / tokens_a_four, out);
    }
#endif
    for (std::size_t i = 0; i < out.size(); ++i)
      out[i] = fold(tokens.subspan(i * size, size));
  }

  [[nodiscard]] block_key chain(const block_key& parent, const folded_tokens& folded) const noexcept {
    return key_of(encrypted(folded ^ detail::aes_block{parent.low, parent.high}));
  }

 private:
  static constexpr std::size_t tokens_a_block = 4;
  static constexpr std::size_t tokens_a_four = 4 * tokens_a_block;

  /// `fold` for any number of tokens.
  [[nodiscard, gnu::noinline]] folded_tokens fold_any(std::span<const token_id> tokens) const noexcept {
    const detail::aes_block& last = tokens.size() % tokens_a_block == 0 ? last_whole_ : last_padded_;
#if defined(LLMMEM_AES_INSTRUCTIONS)
    if (path_ != aes_path::table) return fold_by_instructions(tokens, last);
#endif
    detail::aes_block mask{};
    detail::aes_block sum = last;
    for (std::size_t i = 0; i < blocks_of(tokens); ++i) {
      mask = mask ^ step_to(i + 1);
      sum = sum ^ detail::aes_encrypt_by_table(key_, part(tokens, i) ^ mask);
    }
    return sum;
  }

  /// Twice `mask` in GF(2^128), modulo x^128 + x^7 + x^2 + x + 1.
  [[nodiscard]] static constexpr detail::aes_block doubled(const detail::aes_block& mask) noexcept {
    return {(mask.low << 1) ^ ((mask.high >> 63) * 0x87), (mask.high << 1) | (mask.low >> 63)};
  }
  /// Half of `mask` in the same field.
  [[nodiscard]] static constexpr detail::aes_block halved(const detail::aes_block& mask) noexcept {
    const std::uint64_t odd = mask.low & 1;
    return {(mask.low >> 1) ^ (mask.high << 63) ^ (odd * 0x43), (mask.high >> 1) ^ (odd << 63)};
  }
  [[nodiscard]] static constexpr block_key key_of(const detail::aes_block& block) noexcept {
    return {.low = block.low, .high = block.high};
  }

  /// Returns four tokens as a block of AES; fewer are followed by a word of 1, and by words of 0.
  [[nodiscard]] static detail::aes_block part(std::span<const token_id> tokens, std::size_t i) noexcept {
    std::array<std::uint32_t, tokens_a_block> words{};
    const std::size_t begin = i * tokens_a_block;
    for (std::size_t k = 0; k < tokens_a_block; ++k) {
      if (begin + k < tokens.size()) {
        words[k] = static_cast<std::uint32_t>(tokens[begin + k]);
      } else if (begin + k == tokens.size()) {
        words[k] = 1;
      }
    }
    return detail::aes_block_of(words);
  }

  [[nodiscard]] static constexpr std::size_t blocks_of(std::span<const token_id> tokens) noexcept {
    return tokens.size() / tokens_a_block + (tokens.size() % tokens_a_block != 0 ? 1 : 0);
  }

  /// The mask of the place `i`, from 1, differs from that of the place before it by one power of two: masks
  /// are numbered by a Gray code.
  [[nodiscard]] const detail::aes_block& step_to(std::size_t i) const noexcept {
    return steps_[static_cast<std::size_t>(std::countr_zero(i))];
  }

  [[nodiscard]] detail::aes_block encrypted(const detail::aes_block& block) const noexcept {
#if defined(LLMMEM_AES_INSTRUCTIONS)
    if (path_ != aes_path::table) {
      detail::aes_register state = detail::aes_load(block);
      detail::aes_encrypt(key_, state);
      return detail::aes_store(state);
    }
#endif
    return detail::aes_encrypt_by_table(key_, block);
  }

#if defined(LLMMEM_AES_INSTRUCTIONS)
  /// Returns four whole tokens.
  [[nodiscard]] static detail::aes_register whole_part(std::span<const token_id> tokens,
                                                       std::size_t i) noexcept {
    static_assert(std::endian::native == std::endian::little);
    detail::aes_register out;
    std::memcpy(&out, tokens.data() + i * tokens_a_block, sizeof(out));
    return out;
  }

  [[nodiscard]] folded_tokens fold_by_instructions(std::span<const token_id> tokens,
                                                   const detail::aes_block& last) const noexcept {
    const std::size_t whole = tokens.size() / tokens_a_block;
    const detail::aes_register step_one = detail::aes_load(steps_[0]);
    const detail::aes_register step_two = detail::aes_load(steps_[1]);
    detail::aes_register mask{};
    detail::aes_register sum = detail::aes_load(last);
    std::size_t i = 0;
    if (path_ == aes_path::wide_instructions) {
      const std::size_t fours = whole / 4 < masks_.size() ? whole / 4 : masks_.size();
      sum = detail::aes_sum_of_fours(key_, masks_.data(), tokens.data(), fours, sum);
      if (fours != 0) mask = detail::aes_load(masks_[fours - 1].back());
      i = 4 * fours;
    }
    for (; whole - i >= 4; i += 4) {
      detail::aes_register a = whole_part(tokens, i) ^ (mask ^= step_one);
      detail::aes_register b = whole_part(tokens, i + 1) ^ (mask ^= step_two);
      detail::aes_register c = whole_part(tokens, i + 2) ^ (mask ^= step_one);
      detail::aes_register d = whole_part(tokens, i + 3) ^ (mask ^= detail::aes_load(step_to(i + 4)));
      detail::aes_encrypt(key_, a, b, c, d);
      sum ^= (a ^ b) ^ (c ^ d);
    }
    for (; i < blocks_of(tokens); ++i) {
      mask ^= detail::aes_load(step_to(i + 1));
      detail::aes_register one = detail::aes_load(part(tokens, i)) ^ mask;
      detail::aes_encrypt(key_, one);
      sum ^= one;
    }
    return detail::aes_store(sum);
  }
#endif

  detail::aes_key key_;
  std::array<detail::aes_block, 64> steps_{};  // the encrypted zero, times a power of two
  detail::aes_block last_whole_;  // a half of it, a quarter, and both: no mask of a place is these
  detail::aes_block last_padded_;
  detail::aes_block last_root_;
  std::array<detail::aes_four, 4> masks_{};  // of the first 16 places, which four blocks at once take
  aes_path path_;
};

static_assert(folding_block_hash<aes_pmac_128>);

}  // namespace v0
}  // namespace llmmem
