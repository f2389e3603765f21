/// @file
/// Bodies of kv_tiers.hpp: blocks that go to and come from other caches, and prefetched blocks. Only that
/// file includes this one.
#pragma once

#include <llmmem/offload/kv_tiers.hpp>

namespace llmmem {
inline namespace v0 {

template <class Cache, offload::kv_mover Mover, class... Tiers>
std::uint64_t kv_tiers<Cache, Mover, Tiers...>::prefetch(const kv_chain& chain, std::uint64_t first,
                                                         std::uint64_t upto) noexcept {
  using begun = typename detail::kv_tier_stack<Tiers...>::begun;
  proceed();
  const std::uint64_t step = chain.chunk_tokens();
  const std::uint64_t whole = chain.keys().size();
  const std::uint64_t limit = upto >= chain.tokens() ? whole : upto / step;
  const offload::kv_lookup_result where = lookup_with(
      chain, first, limit, [](std::size_t, std::uint64_t, offload::answer) noexcept { return false; });
  const std::uint64_t at = now();
  std::uint64_t count = 0;
  bool has_room = true;
  for (std::size_t g = 0; g < groups_ && where.loadable() != 0; ++g) {
    detail::for_each_needed(view_.groups()[g], where.tokens, [&](std::uint64_t index) {
      const std::uint64_t end = (index + 1) * view_.groups()[g].block_tokens;
      if (end <= first || !has_room) return;
      const block_key key = detail::tier_key(chain.keys()[static_cast<std::size_t>(end / step - 1)], g);
      const auto found = look(g, key, at);
      if (found.first != offload::answer::hit || found.second.tier == 0) return;
      const begun came = stack_.begin_read(found.second.tier, g, found.second.slot, {}, at);
      count += came == begun::yes ? 1U : 0U;
      has_room = came != begun::no_slot && came != begun::no_transfer;
    });
  }
  return count;
}

template <class Cache, offload::kv_mover Mover, class... Tiers>
bool kv_tiers<Cache, Mover, Tiers...>::prefetch_block(std::size_t group, const block_key& key) noexcept {
  using begun = typename detail::kv_tier_stack<Tiers...>::begun;
  const std::uint64_t at = now();
  const auto found = look(group, detail::tier_key(key, group), at);
  if (found.first == offload::answer::pending) return true;
  if (found.first != offload::answer::hit) return false;
  if (found.second.tier == 0) return true;
  return stack_.begin_read(found.second.tier, group, found.second.slot, {}, at) == begun::yes;
}

template <class Cache, offload::kv_mover Mover, class... Tiers>
std::pair<offload::answer, std::size_t> kv_tiers<Cache, Mover, Tiers...>::lookup_block(
    std::size_t group, const block_key& key) const noexcept {
  const auto found = look(group, detail::tier_key(key, group), now());
  return {found.first, found.second.tier};
}

template <class Cache, offload::kv_mover Mover, class... Tiers>
std::optional<offload::held_block> kv_tiers<Cache, Mover, Tiers...>::hold(std::size_t group,
                                                                          const block_key& key) noexcept {
  auto& slots = stack_.first().slots[group];
  const auto slot = slots.find(detail::tier_key(key, group));
  if (!slot || !slots.is_ready(*slot)) return std::nullopt;
  slots.pin(*slot);
  return offload::held_block{.group = static_cast<std::uint32_t>(group), .slot = *slot};
}

template <class Cache, offload::kv_mover Mover, class... Tiers>
std::optional<offload::held_block> kv_tiers<Cache, Mover, Tiers...>::begin_arrival(
    std::size_t group, const block_key& key, std::uint64_t parent) noexcept {
  const block_key named = detail::tier_key(key, group);
  if (stack_.find(group, named)) return std::nullopt;
  const auto slot = stack_.begin_fill(group, named, detail::parent_digest{parent}, true);
  if (!slot) return std::nullopt;
  return offload::held_block{.group = static_cast<std::uint32_t>(group), .slot = *slot};
}

template <class Cache, offload::kv_mover Mover, class... Tiers>
bool kv_tiers<Cache, Mover, Tiers...>::end_arrival(const offload::held_block& block, bool is_right) noexcept {
  auto& slots = stack_.first().slots[block.group];
  if (!is_right) {
    slots.abandon_fill(block.slot);
    return false;
  }
  slots.pin(block.slot);  // for the caller: `settle` takes the filler's pin
  stack_.settle(block.group, block.slot);
  if (slots.is_ready(block.slot)) return true;
  slots.unpin(block.slot);  // the block was withdrawn meanwhile
  return false;
}

template <class Cache, offload::kv_mover Mover, class... Tiers>
offload::copy_state kv_tiers<Cache, Mover, Tiers...>::verify_copy(std::size_t group,
                                                                  const block_key& key) noexcept {
  const block_key named = detail::tier_key(key, group);
  const auto slot = stack_.first().slots[group].find(named);
  const offload::copy_state found = stack_.verify_copy(group, named);
  if (found != offload::copy_state::damaged) return found;
  const std::uint64_t tokens = view_.groups()[group].block_tokens;
  for (record& each : loads_) {
    if (each.state != record::phase::running) continue;
    const std::uint64_t step = each.chain->chunk_tokens();
    for (part& one : each.parts) {
      if (one.group != group || one.tier != 0) continue;
      // A load lets go of a slot that it has copied into the cache, if another of its blocks needs one.
      const std::uint64_t end = (std::uint64_t{one.index} + 1) * tokens;
      const bool was_here =
          one.slot == no_slot && each.chain->keys()[static_cast<std::size_t>(end / step - 1)] == key;
      if (was_here || one.slot == *slot) one.is_wrong = true;
    }
  }
  return found;
}

template <class Cache, offload::kv_mover Mover, class... Tiers>
void kv_tiers<Cache, Mover, Tiers...>::release(const offload::held_block& block) noexcept {
  stack_.first().slots[block.group].unpin(block.slot);
}

template <class Cache, offload::kv_mover Mover, class... Tiers>
std::span<std::byte> kv_tiers<Cache, Mover, Tiers...>::bytes_of(const offload::held_block& block) noexcept {
  return stack_.first().medium.bytes_of(block.group, block.slot);
}

}  // namespace v0
}  // namespace llmmem
