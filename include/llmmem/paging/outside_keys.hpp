/// @file
/// What a caller's key identifies: a block and everything before it, or a block alone.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/hash/block_key.hpp>

#include <array>
#include <bit>
#include <concepts>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

namespace paging {

/// The default: a key names a block's contents and everything before it, like the `hash_ids` of traces and
/// the block hashes of engines. The allocator still checks that each key is cached after the key that
/// precedes it.
struct prefix_keys {
  static constexpr bool chains = false;
};

/// A key names the contents of one block alone. The allocator chains the keys with `Traits::hash`; observers
/// and the index have only the chained keys.
struct block_keys {
  static constexpr bool chains = true;
};

/// A policy that states whether the allocator must chain the caller's keys.
template <class P>
concept outside_key_policy = requires {
  { P::chains } -> std::convertible_to<bool>;
};

static_assert(outside_key_policy<prefix_keys> && outside_key_policy<block_keys>);

/// Returns the key that `block_keys` makes for a block after `parent` whose own contents `alone` names. For
/// routers that must know the allocator's keys.
template <block_hash Hash>
[[nodiscard]] block_key chain_key(const Hash& hash, const block_key& parent,
                                  const block_key& alone) noexcept {
  const auto words = std::bit_cast<std::array<token_id, 4>>(alone);
  return hash.chain(parent, std::span<const token_id>(words));
}

/// Returns 64 bits of a key, for code that identifies a parent by 64 bits; 0 for the zero key, which names
/// nothing.
[[nodiscard]] constexpr std::uint64_t key_digest(const block_key& key) noexcept {
  return key.low ^ std::rotl(key.high, 32);
}

/// Returns the key before the first block of a sequence, in an allocator whose epoch is `epoch` (see
/// `paged_allocator::reset`). In epoch 0 it is `hash.root(context)`.
template <block_hash Hash>
[[nodiscard]] block_key root_key(const Hash& hash, const prefix_context& context,
                                 std::uint64_t epoch) noexcept {
  const block_key root = hash.root(context);
  return epoch == 0 ? root : chain_key(hash, root, {.low = epoch, .high = 0});
}

}  // namespace paging

}  // namespace v0
}  // namespace llmmem
