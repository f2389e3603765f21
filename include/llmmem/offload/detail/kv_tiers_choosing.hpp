/// @file
/// Bodies of kv_tiers.hpp: how much of a prompt is worth loading. Only that file includes this one.
#pragma once

#include <llmmem/offload/kv_tiers.hpp>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// No other cache has a block.
struct no_other_caches {
  [[nodiscard]] bool has(std::size_t, std::uint64_t) const noexcept { return false; }
  void clear() noexcept {}
  void add(std::size_t, std::uint64_t) noexcept {}
  [[nodiscard]] std::uint64_t bytes() const noexcept { return 0; }
  [[nodiscard]] std::uint64_t arrival_ns(bool) noexcept { return 0; }
};

}  // namespace detail

template <class Cache, offload::kv_mover Mover, class... Tiers>
offload::load_choice kv_tiers<Cache, Mover, Tiers...>::choose_load(
    const kv_chain& chain, std::uint64_t first, std::uint64_t chunks,
    const offload::load_costs& costs) const noexcept {
  detail::no_other_caches none;
  return choose_load_with(chain, first, chunks, costs, none);
}

/// Chooses among the lengths of the chain's first `chunks` chunks that can be loaded, now or after a wait.
template <class Cache, offload::kv_mover Mover, class... Tiers>
template <class Others>
offload::load_choice kv_tiers<Cache, Mover, Tiers...>::choose_load_with(const kv_chain& chain,
                                                                        std::uint64_t first,
                                                                        std::uint64_t chunks,
                                                                        const offload::load_costs& costs,
                                                                        Others&& others) const {
  offload::load_costs with_ours = costs;
  add_pending(with_ours);
  offload::load_chooser chooser(with_ours, first, chain.tokens());
  const std::uint64_t at = now();
  std::uint64_t pending = 0;
  each_hit(
      chain, first, chunks, at,
      [&](std::size_t g, std::uint64_t c, offload::answer found) {
        const bool is_pending = found == offload::answer::pending;
        const bool is_elsewhere = found == offload::answer::miss && others.has(g, c);
        if constexpr (!detail::cache_view<Cache>::is_hybrid) {
          // Each length adds one block to the length before.
          if (is_pending) pending += mover_.block_bytes(g);
          if (is_elsewhere) others.add(g, c);
        }
        return is_pending || is_elsewhere;
      },
      [&](const offload::kv_lookup_result& found, const detail::tier_place_found&) {
        offload::loadable_length length{.tokens = found.tokens};
        if constexpr (detail::cache_view<Cache>::is_hybrid) {
          others.clear();
          each_needed(chain, first, found.tokens, at,
                      [&](std::size_t g, offload::answer what, std::size_t tier, std::uint64_t c) {
                        if (what == offload::answer::miss) return others.add(g, c);
                        const bool is_pending = what == offload::answer::pending || tier >= tiers;
                        (is_pending ? length.pending_bytes : length.bytes[tier]) += mover_.block_bytes(g);
                      });
        } else {
          for (std::size_t k = 0; k < tiers; ++k)
            length.bytes[k] = found.blocks[k] * mover_.block_bytes(0);
          length.pending_bytes = pending;
        }
        length.elsewhere_bytes = others.bytes();
        length.elsewhere_ns = others.arrival_ns(length.pending_bytes != 0);
        chooser.offer(length);
      });
  return chooser.choice();
}

/// Adds the bytes that the tiers still move over each link, or will for the loads under way.
template <class Cache, offload::kv_mover Mover, class... Tiers>
void kv_tiers<Cache, Mover, Tiers...>::add_pending(offload::load_costs& costs) const noexcept {
  // A caller may say by the largest number that nothing crosses a link.
  const auto add = [&](std::size_t link, std::uint64_t bytes) {
    costs.links[link].pending_bytes = detail::saturating_add(costs.links[link].pending_bytes, bytes);
  };
  stack_.for_each_transfer([&](std::size_t k, std::size_t group) { add(k, mover_.block_bytes(group)); });
  for (std::size_t i = 0; i < save_count_; ++i)
    add(0, mover_.block_bytes(saves_[i].group));
  for (const record& of : loads_) {
    if (of.state != record::phase::running) continue;
    for (const part& each : of.parts) {
      const std::uint64_t bytes = mover_.block_bytes(each.group);
      if (each.state == part_state::queued) add(each.tier, bytes);
      if (each.state == part_state::queued || each.state == part_state::reading ||
          each.state == part_state::ready)
        add(0, bytes);
    }
  }
}

}  // namespace v0
}  // namespace llmmem
