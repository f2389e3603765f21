/// @file
/// `kv_chain`: the keys of a request's tokens, by which caches and tiers identify its blocks.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/hash/chained_keys.hpp>
#include <llmmem/paging/outside_keys.hpp>
#include <llmmem/paging/paged_types.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace llmmem {
inline namespace v0 {

namespace detail {
struct key_chains;
}  // namespace detail

/// The keys of a request's prefix, chunk by chunk: key i names the tokens of chunk i and all before it, with
/// the names of the cache that the chain was made for. Compute it once for a request, and extend it as the
/// request generates tokens.
///
///     kv_chain chain(cache, prompt);               // O(tokens): one hash of each chunk
///     chain.append(cache, generated);
///
/// A chunk has the tokens of a block of a `paged_allocator`, or `chunk_tokens()` of a `hybrid_allocator`. The
/// keys depend on the context, which separates tenants (pass the sequence's), and on the cache's epoch: make
/// a new chain after `reset`.
///
/// A load keeps the chain's address: the chain must neither move nor end before its load has ended.
///
/// @par Thread safety   as a plain value.
class kv_chain {
 public:
  /// Makes a chain of tokens, which it copies. Tokens after the last whole chunk have no key yet.
  template <class Cache>
  kv_chain(const Cache& cache, std::span<const token_id> tokens, const prefix_context& context = {})
      : context_(context), chunk_tokens_(chunk_of(cache)), epoch_(cache.epoch()) {
    append(cache, tokens);
  }

  /// Makes a chain of the caller's keys, for a `paged_allocator`; the last may name a partial block.
  template <class Cache>
    requires requires(const Cache& cache) { cache.block_tokens(); }
  kv_chain(const Cache& cache, const keyed_blocks& blocks, const prefix_context& context = {})
      : context_(context),
        chunk_tokens_(cache.block_tokens()),
        epoch_(cache.epoch()),
        given_(blocks.keys.begin(), blocks.keys.end()),
        hints_(blocks.hints.begin(), blocks.hints.end()),
        tokens_told_(blocks.tokens) {
    if constexpr (Cache::chains_outside_keys) {
      block_key last = paging::root_key(cache.hash(), context, epoch_);
      for (const block_key& each : blocks.keys)
        keys_.push_back(last = paging::chain_key(cache.hash(), last, each));
    } else {
      keys_ = given_;
    }
  }

  /// Adds tokens at the end. @pre the chain was made of tokens, for this cache in its present epoch
  template <class Cache>
  void append(const Cache& cache, std::span<const token_id> tokens) {
    tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
    tokens_told_ = tokens_.size();
    const block_key last = keys_.empty() ? paging::root_key(cache.hash(), context_, epoch_) : keys_.back();
    const auto unkeyed = std::span<const token_id>(tokens_).subspan(keys_.size() * chunk_tokens_);
    for (chained_keys next(cache.hash(), last, unkeyed, chunk_tokens_); next.has_next();)
      keys_.push_back(next.next());
  }

  [[nodiscard]] std::span<const block_key> keys() const noexcept LLMMEM_LIFETIMEBOUND { return keys_; }
  /// Returns the tokens; none if the chain was made of keys.
  [[nodiscard]] std::span<const token_id> token_ids() const noexcept LLMMEM_LIFETIMEBOUND { return tokens_; }
  [[nodiscard]] std::uint64_t tokens() const noexcept { return tokens_told_; }
  /// Returns how many tokens the first `chunks` keys cover.
  [[nodiscard]] std::uint64_t tokens_of(std::uint64_t chunks) const noexcept {
    const std::uint64_t whole = chunks * chunk_tokens_;
    return whole < tokens_told_ ? whole : tokens_told_;
  }
  [[nodiscard]] std::uint32_t chunk_tokens() const noexcept { return chunk_tokens_; }
  [[nodiscard]] std::uint64_t epoch() const noexcept { return epoch_; }
  [[nodiscard]] const prefix_context& context() const noexcept LLMMEM_LIFETIMEBOUND { return context_; }
  /// Whether the chain was made of keys.
  [[nodiscard]] bool is_keyed() const noexcept { return !given_.empty(); }
  /// Returns the first `chunks` keys as the caller gave them, for the cache. @pre `is_keyed()`
  [[nodiscard]] keyed_blocks blocks(std::uint64_t chunks) const noexcept LLMMEM_LIFETIMEBOUND {
    keyed_blocks out{.keys = std::span(given_).first(static_cast<std::size_t>(chunks))};
    out.tokens = tokens_of(chunks);
    if (!hints_.empty()) out.hints = std::span(hints_).first(static_cast<std::size_t>(chunks));
    return out;
  }

 private:
  friend struct detail::key_chains;
  kv_chain(std::uint32_t chunk_tokens, std::uint64_t epoch) noexcept
      : chunk_tokens_(chunk_tokens), epoch_(epoch) {}
  template <class Cache>
  [[nodiscard]] static std::uint32_t chunk_of(const Cache& cache) noexcept {
    if constexpr (requires { cache.chunk_tokens(); }) {
      return cache.chunk_tokens();
    } else {
      return cache.block_tokens();
    }
  }

  prefix_context context_;
  std::uint32_t chunk_tokens_;
  std::uint64_t epoch_;
  std::vector<block_key> keys_;
  std::vector<block_key> given_;  // the caller's keys, before they were chained
  std::vector<access_hint> hints_;
  std::vector<token_id> tokens_;
  std::uint64_t tokens_told_ = 0;
};

namespace detail {

/// Makes a chain of some keys of another one, for code that passes blocks on. It has no tokens, so nothing
/// can be loaded or computed by it.
struct key_chains {
  [[nodiscard]] static kv_chain of(std::uint32_t chunk_tokens, std::uint64_t epoch,
                                   std::span<const block_key> keys) {
    kv_chain out(chunk_tokens, epoch);
    out.keys_.assign(keys.begin(), keys.end());
    out.tokens_told_ = std::uint64_t{chunk_tokens} * keys.size();
    return out;
  }
};

}  // namespace detail

}  // namespace v0
}  // namespace llmmem
