/// @file
/// How a hit in the prefix index is verified: by its tokens, or by its hash alone.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/paging/ids.hpp>

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace llmmem {
inline namespace v0 {

/// Identity of a block's cached contents: the block, and how often it was cached before. Unlike keys,
/// identities cannot collide. The root of every chain is the null block.
struct chain_link {
  block_id block = null_block;
  std::uint32_t stamp = 0;

  /// By one comparison of eight bytes.
  friend constexpr bool operator==(const chain_link& a, const chain_link& b) noexcept {
    return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b);
  }
};

/// Verifies hits for a prefix index.
///
/// `store` keeps a full block's tokens. `enrol` records that they are now cached, as the child of `parent` in
/// `context`. `holds` returns whether a cached block has exactly these tokens after exactly that parent.
/// `needs_parent` returns whether `holds` returns false permanently once that parent is no longer cached.
/// `enrol_by_key` records that the block was cached by an external key. `holds_key` returns whether a
/// sequence in `context` may use a block found by its key.
template <class V>
concept block_verification =
    std::constructible_from<V, std::uint64_t, std::uint32_t, const metadata_source&> && std::movable<V> &&
    requires(V verify, const V& read, block_id block, std::span<const token_id> tokens, chain_link parent,
             const prefix_context& context, void (*change)(chain_link&) noexcept) {
      { V::keeps_tokens } -> std::convertible_to<bool>;
      { verify.store(block, tokens) } noexcept;
      { verify.enrol(block, parent, context) } noexcept;
      { verify.enrol_by_key(block, context) } noexcept;
      { verify.move(block, block) } noexcept;
      { verify.each_parent(change) } noexcept;
      { read.tokens(block) } noexcept -> std::same_as<std::span<const token_id>>;
      { read.link(block) } noexcept -> std::same_as<chain_link>;
      { read.holds(block, tokens, parent, context) } noexcept -> std::same_as<bool>;
      { read.holds_key(block, context) } noexcept -> std::same_as<bool>;
      { read.needs_parent(block) } noexcept -> std::same_as<bool>;
      { read.metadata_bytes() } noexcept -> std::same_as<std::size_t>;
    };

namespace detail {

// NOLINTNEXTLINE(modernize-use-using): `using` would lose the vector's size
typedef std::uint64_t four_tokens __attribute__((vector_size(16)));

/// Whether two runs of tokens are equal. A block of a usual size has few tokens: to compare all of them and
/// then decide once takes less time than a call of `memcmp`.
[[nodiscard]] inline bool equal_tokens(const token_id* a, const token_id* b, std::size_t count) noexcept {
  if (count % 16 != 0) return std::memcmp(a, b, count * sizeof(token_id)) == 0;
  const auto different = [&](std::size_t i) noexcept {
    four_tokens of_a;
    four_tokens of_b;
    std::memcpy(&of_a, a + i, sizeof(of_a));
    std::memcpy(&of_b, b + i, sizeof(of_b));
    return of_a ^ of_b;
  };
  four_tokens differences{};
  for (std::size_t i = 0; i != count; i += 16)
    differences |= (different(i) | different(i + 4)) | (different(i + 8) | different(i + 12));
  return (differences[0] | differences[1]) == 0;
}

}  // namespace detail

/// The default: a hit counts only if the block's own tokens, its context and the *identity* of the block
/// before it are equal. By induction from the root the whole prefix is then equal, regardless of the hash: a
/// tenant never gets another tenant's KV, and a collision costs only a hit.
///
/// If a parent was evicted and computed again, it has another identity, so its former child is not a hit:
/// `paged_allocator` drops a child with its parent. Policies that evict tails first (all of this library's
/// except LFU and MIN under pressure) lose nothing by this.
///
/// @par Complexity   `holds` and `store` O(block_tokens); 4 bytes per token and 48 per block, taken as they
///   are used.
class verify_tokens {
 public:
  static constexpr bool keeps_tokens = true;

  verify_tokens(std::uint64_t blocks, std::uint32_t block_tokens, const metadata_source& source)
      : tokens_(checked_multiply(blocks + 1, block_tokens, "verify_tokens: blocks x tokens a block"), source,
                "verify_tokens: tokens"),
        records_(blocks + 1, record{}, source, "verify_tokens: records"),
        block_tokens_(block_tokens) {}

  /// @pre `tokens` fill the block, and are not the block's own.
  void store(block_id block, std::span<const token_id> tokens) noexcept {
    std::memcpy(tokens_.data() + first(block), tokens.data(), tokens.size_bytes());
  }

  void enrol(block_id block, chain_link parent, const prefix_context& context) noexcept {
    record& at = records_[to_index(block)];
    at = {.context = context, .parent = parent, .stamp = at.stamp + 1};
  }

  /// Records a block cached by an external key: its tokens are unknown, so `holds` is always false for it.
  void enrol_by_key(block_id block, const prefix_context& context) noexcept {
    enrol(block, unknown_parent, context);
  }

  /// Moves the record of `from` to `to`, under a new identity; the old record stays readable until `from` is
  /// enrolled again.
  void move(block_id from, block_id to) noexcept {
    std::memcpy(tokens_.data() + first(to), tokens_.data() + first(from), block_tokens_ * sizeof(token_id));
    const record& source = records_[to_index(from)];
    enrol(to, source.parent, source.context);
  }

  /// Calls `change(chain_link&)` for the parent of every block. O(blocks).
  template <class Change>
  void each_parent(Change&& change) noexcept {
    for (std::size_t i = 0; i < records_.size(); ++i)
      change(records_[i].parent);
  }

  [[nodiscard]] std::span<const token_id> tokens(block_id block) const noexcept LLMMEM_LIFETIMEBOUND {
    return {tokens_.data() + first(block), block_tokens_};
  }

  [[nodiscard]] chain_link link(block_id block) const noexcept {
    return {block, records_[to_index(block)].stamp};
  }

  [[nodiscard]] bool holds(block_id block, std::span<const token_id> tokens, chain_link parent,
                           const prefix_context& context) const noexcept {
    const record& at = records_[to_index(block)];
    return at.parent == parent && at.context == context &&
           detail::equal_tokens(tokens_.data() + first(block), tokens.data(), tokens.size());
  }

  /// Compares the context, because an external key contains nothing about it.
  [[nodiscard]] bool holds_key(block_id block, const prefix_context& context) const noexcept {
    return records_[to_index(block)].context == context;
  }

  [[nodiscard]] bool needs_parent(block_id block) const noexcept {
    return records_[to_index(block)].parent != unknown_parent;
  }

  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return tokens_.bytes() + records_.bytes(); }

 private:
  struct record {
    prefix_context context{};
    chain_link parent{};
    std::uint32_t stamp = 0;
  };

  // No chain has a parent like this: only the root is the null block, and the root has no stamp.
  static constexpr chain_link unknown_parent{null_block, 1};

  [[nodiscard]] std::size_t first(block_id block) const noexcept {
    return std::size_t{to_index(block)} * block_tokens_;
  }

  detail::fixed_array<token_id> tokens_;  // by block
  detail::fixed_array<record> records_;   // by block
  std::uint32_t block_tokens_;
};

static_assert(block_verification<verify_tokens>);

/// Trusts equal keys: keeps no tokens and no contexts, so external keys must themselves distinguish tenants
/// and adapters. For keys that come from elsewhere (traces, another service), and for engines that accept a
/// 128-bit keyed hash as proof. A sequence truncated into a full block caches nothing from that block on,
/// because the block's tokens are unknown.
class trust_hash {
 public:
  static constexpr bool keeps_tokens = false;

  trust_hash(std::uint64_t, std::uint32_t, const metadata_source&) noexcept {}

  void store(block_id, std::span<const token_id>) noexcept {}
  void enrol(block_id, chain_link, const prefix_context&) noexcept {}
  void enrol_by_key(block_id, const prefix_context&) noexcept {}
  void move(block_id, block_id) noexcept {}
  template <class Change>
  void each_parent(Change&&) noexcept {}
  [[nodiscard]] std::span<const token_id> tokens(block_id) const noexcept { return {}; }
  [[nodiscard]] chain_link link(block_id) const noexcept { return {}; }
  [[nodiscard]] bool holds(block_id, std::span<const token_id>, chain_link,
                           const prefix_context&) const noexcept {
    return true;
  }
  [[nodiscard]] bool holds_key(block_id, const prefix_context&) const noexcept { return true; }
  [[nodiscard]] bool needs_parent(block_id) const noexcept { return false; }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return 0; }
};

static_assert(block_verification<trust_hash>);

}  // namespace v0
}  // namespace llmmem
