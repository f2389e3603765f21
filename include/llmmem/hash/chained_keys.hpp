/// @file
/// `chained_keys`: the keys of a prompt's blocks, one after the other.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/hash/block_key.hpp>

#include <array>
#include <cstddef>
#include <span>

namespace llmmem {
inline namespace v0 {

/// Computes the keys of the blocks of a prompt, in order.
///
/// With a `folding_block_hash` it folds the tokens of the next block before it chains those of this one. The
/// two do not depend on each other, so the processor executes them at the same time. Folding all tokens of a
/// block immediately before its key would make one wait for the other.
///
/// @par Complexity   one `chain` for each key, and at most four `fold` more than keys: one more at the first
///      key, or four at once. Prompts that are not cached end there.
/// @par Thread safety   none; the hash and the tokens must outlive it.
template <block_hash Hash>
class chained_keys {
 public:
  /// @param parent  the key before the first block
  /// @param tokens  any number; those after the last whole block are ignored
  /// @pre `block_tokens` is at least 1.
  chained_keys(const Hash& hash LLMMEM_LIFETIMEBOUND, const block_key& parent,
               std::span<const token_id> tokens, std::size_t block_tokens) noexcept
      : hash_(hash), last_(parent), tokens_(tokens), block_tokens_(block_tokens) {
    if constexpr (folding_block_hash<Hash>) {
      if (has_next()) fold_ahead();
    }
  }

  [[nodiscard]] bool has_next() const noexcept { return tokens_.size() >= block_tokens_; }

  /// Returns the key of the next block. @pre has_next().
  block_key next() noexcept {
    if constexpr (folding_block_hash<Hash>) {
      const auto now = folded_.of[folded_.used++];
      tokens_ = tokens_.subspan(block_tokens_);
      if (folded_.used == folded_.count && has_next()) fold_ahead();
      last_ = hash_.chain(last_, now);
    } else {
      last_ = hash_.chain(last_, block());
      tokens_ = tokens_.subspan(block_tokens_);
    }
    return last_;
  }

 private:
  struct nothing {};
  template <class H>
  struct folded_by {
    using type = nothing;
  };
  template <folding_block_hash H>
  struct folded_by<H> {
    /// Folded blocks: those from `used` to `count` have no keys so far.
    struct type {
      std::array<typename H::folded_tokens, 4> of;
      std::size_t used = 0;
      std::size_t count = 0;
      bool by_four = false;  // from the second block on
    };
  };

  /// Folds the next block; after the first one the next four, if the hash folds four at once.
  void fold_ahead() noexcept {
    folded_.used = 0;
    if constexpr (requires { hash_.fold_four(tokens_, folded_.of); }) {
      if (folded_.by_four && tokens_.size() / 4 >= block_tokens_) {
        hash_.fold_four(tokens_.first(4 * block_tokens_), folded_.of);
        folded_.count = 4;
        return;
      }
      if (folded_.count == 0) folded_.by_four = hash_.folds_four(block_tokens_);
    }
    folded_.of[0] = hash_.fold(block());
    folded_.count = 1;
  }

  [[nodiscard]] std::span<const token_id> block() const noexcept { return tokens_.first(block_tokens_); }

  const Hash& hash_;
  block_key last_;
  std::span<const token_id> tokens_;  // of the blocks without keys so far
  std::size_t block_tokens_;
  [[no_unique_address]] typename folded_by<Hash>::type folded_{};
};

}  // namespace v0
}  // namespace llmmem
