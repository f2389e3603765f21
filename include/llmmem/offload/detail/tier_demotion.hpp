/// @file
/// Bodies of tier_stack.hpp: how a middle tier frees slots, and sends down what it evicts. Only that file
/// includes this one.
///
/// A demotion reads a block that a middle tier evicts into a reserved slot of the first tier, and writes it
/// to the next tier from there. The block stays where it is, pinned, until the next tier has it: a request
/// finds it all the time, and a process that ends in between loses nothing.
#pragma once

#include <llmmem/offload/detail/tier_stack.hpp>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Frees a slot of tier `K`. `later`: the block that leaves is on its way to the next tier.
template <class... Tiers>
template <std::size_t K>
typename kv_tier_stack<Tiers...>::sent kv_tier_stack<Tiers...>::make_room(std::size_t group) noexcept {
  auto& level = std::get<K>(this->levels_);
  auto& slots = level.slots[group];
  const auto victim = slots.victim();
  if constexpr (K + 1 < levels) {
    const std::size_t asked = level.owed_count == 0 ? 1 : level.owed_count;
    if (level.demoting[group] >= asked) return sent::later;
    if (victim && level.down.on_eviction &&
        !std::get<K + 1>(this->levels_).slots[group].find(slots.key(*victim))) {
      const sent how = begin_demotion(level, group, *victim);
      if (how != sent::impossible) return sent::later;
      ++std::get<K + 1>(this->levels_).counted.declined;
    } else if (!victim && level.demoting[group] != 0) {
      return sent::later;
    }
  }
  if (!victim) {
    ++level.counted.declined;
    return sent::impossible;
  }
  leave(level, group, *victim);
  return sent::begun;
}

/// Evicts contents of a lower tier, and takes them out of its index.
template <class... Tiers>
template <class Level>
void kv_tier_stack<Tiers...>::leave(Level& level, std::size_t group, slot_id slot) noexcept {
  const block_key gone = level.slots[group].key(slot);
  level.slots[group].evict(slot);
  forget(level, gone);
}

template <class... Tiers>
template <class Level>
typename kv_tier_stack<Tiers...>::sent kv_tier_stack<Tiers...>::begin_demotion(Level& level,
                                                                               std::size_t group,
                                                                               slot_id lower) noexcept {
  if (level.passage[group].empty() || level.transfer_count == level.transfers.size()) return sent::later;
  const slot_id by = level.passage[group].back();
  const auto copy =
      level.medium.read(group, lower, level.slots[group].stored(lower), first().medium.bytes_of(group, by));
  if (!copy) {
    if (is_busy(copy.error()) && level.transfer_count != 0) return sent::later;
    ++level.counted.failures;
    last_failure_ = copy.error();
    return sent::impossible;
  }
  level.passage[group].pop_back();
  level.slots[group].pin(lower);
  ++level.demoting[group];
  level.transfers[level.transfer_count++] = {.copy = *copy,
                                             .group = static_cast<std::uint32_t>(group),
                                             .upper = by,
                                             .lower = lower,
                                             .demotes = true};
  return sent::begun;
}

/// Ends a demotion: the block leaves the middle tier unless a load uses it.
template <class... Tiers>
template <class Level>
void kv_tier_stack<Tiers...>::end_demotion(Level& level, std::size_t group, slot_id by,
                                           slot_id lower) noexcept {
  level.passage[group].push_back(by);
  --level.demoting[group];
  auto& slots = level.slots[group];
  slots.unpin(lower);
  if (slots.can_leave(lower)) leave(level, group, lower);
}

/// Writes a block that has been read for its demotion from tier `K`. Returns whether the read is over.
template <class... Tiers>
template <std::size_t K, class Transfer>
bool kv_tier_stack<Tiers...>::continue_demotion(Transfer& of, std::uint64_t now) noexcept {
  auto& level = std::get<K>(this->levels_);
  if constexpr (K + 1 < levels) {
    auto& slots = level.slots[of.group];
    const auto bytes = first().medium.bytes_of(of.group, of.upper);
    const auto give_up = [&] {
      end_demotion(level, of.group, of.upper, of.lower);
      return true;
    };
    if (!of.has_arrived) {
      const auto outcome = level.medium.outcome_of(of.copy.fence);
      if (!outcome) fail(level, outcome.error(), now);
      const bool is_good = outcome && accept(level, of).code == errc::ok;
      level.medium.release(of.copy);
      if (!is_good) return give_up();
      of.has_arrived = true;
    }
    auto& next = std::get<K + 1>(this->levels_);
    auto& below = next.slots[of.group];
    if (!slots.is_live(of.lower) || below.find(slots.key(of.lower))) return give_up();
    if (next.transfer_count == next.transfers.size()) return false;
    if (below.free() == 0) {
      const sent room = make_room<K + 1>(of.group);
      if (room == sent::later) return false;
      if (room == sent::impossible) return give_up();
    }
    const slot_id target = below.begin_fill(slots.key(of.lower), slots.parent(of.lower));
    // The checksum goes along: one that is computed here would cover damage from before.
    const auto sum = sum_of(level, of.group, of.lower);
    first().slots[of.group].note_sum(of.upper, sum);
    const auto copy = next.medium.write(of.group, target, bytes, sum);
    if (!copy) {
      below.abandon_fill(target);
      if (is_busy(copy.error()) && next.transfer_count != 0) return false;
      note_refused(next, copy.error());
      return give_up();
    }
    next.transfers[next.transfer_count++] = {.copy = *copy,
                                             .group = of.group,
                                             .upper = of.upper,
                                             .lower = target,
                                             .goes_down = true,
                                             .demotes = true,
                                             .source = of.lower};
  }
  return true;
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
