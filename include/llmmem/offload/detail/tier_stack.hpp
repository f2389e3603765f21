/// @file
/// The tiers beneath a cache, and the transfers between the first and the lower ones.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/hash/errors.hpp>
#include <llmmem/offload/detail/pending_save.hpp>
#include <llmmem/offload/detail/tier_level.hpp>
#include <llmmem/offload/detail/tier_medium.hpp>
#include <llmmem/offload/detail/tier_places.hpp>
#include <llmmem/offload/detail/tier_slots.hpp>
#include <llmmem/offload/kv_tiers_types.hpp>
#include <llmmem/result.hpp>
#include <llmmem/transfer/errors.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Moves blocks between the tiers, of which the first is the gateway to the others. The stack does not use
/// the cache.
///
/// @par Thread safety   one thread at a time.
template <class... Tiers>
class kv_tier_stack : public kv_tier_places<Tiers...> {
  using places = kv_tier_places<Tiers...>;

 public:
  using places::drop;
  using places::first;
  using places::levels;

  kv_tier_stack(const kv_tiers_options& options, std::span<const std::uint64_t> block_bytes,
                std::span<const double> shares, const Tiers&... tiers)
      : places(options, block_bytes, shares, tiers...) {
    for (std::size_t g = 0; g < groups_; ++g) {
      std::uint64_t slots = first().slots[g].capacity();
      slots -= reserve_passages(g);
      headroom_[g] = options.load_headroom == ~std::uint64_t{0} ? slots / 16 : options.load_headroom;
      if (headroom_[g] >= slots) {
        throw argument_error(options.name + ": load_headroom is " + std::to_string(headroom_[g]) +
                             "; the first tier has " + std::to_string(slots) + " slots for group " +
                             std::to_string(g) + " after those for demotions, of which stores need some");
      }
    }
    this->recover_all();
  }

  /// Begins to fill a slot of the first tier. Evicts for that if necessary, after it has sent down contents
  /// that must not be lost.
  [[nodiscard]] std::optional<slot_id> begin_fill(std::size_t group, const block_key& key,
                                                  parent_digest parent, bool is_for_load) noexcept {
    auto& slots = first().slots[group];
    const std::uint64_t leave = is_for_load ? 0 : headroom_[group];
    while (slots.available() > leave) {
      if (slots.free() != 0) return slots.begin_fill(key, parent);
      const auto victim = slots.victim();
      if (!victim) break;
      if (must_go_down(group, *victim)) {
        if (leaving_[group] > slots.capacity() / 16) break;  // enough slots will soon be free
        // The victim leaves when its contents have arrived below; another slot may be able to leave at once.
        const sent how = send_down<1>(group, *victim, true);
        if (how == sent::begun) continue;
        if (how == sent::later) break;
      }
      slots.evict(*victim);
    }
    ++first().counted.declined;
    return std::nullopt;
  }
  /// Notes that the contents of a slot have arrived, from where they may move further down. Removes the
  /// filler's pin.
  void settle(std::size_t group, slot_id slot) noexcept {
    auto& slots = first().slots[group];
    if (slots.finish_fill(slot)) {
      ++first().counted.stored;
      pass_down<1>(group, slot);
    }
    slots.unpin(slot);
  }
  /// Notes a use of contents in the first tier, which its policy may now send down.
  void use(std::size_t group, slot_id slot) noexcept { pass_down<1>(group, slot); }

  /// The outcome of `begin_read`.
  enum class begun : std::uint8_t { yes, no_slot, no_transfer, withdrawn, failed };
  /// Brings a block of tier `k` into the first tier; `poll` reports its arrival, and the slot's pin then
  /// belongs to the reader. The load keeps the lower slot pinned until then. A read without a reader leaves
  /// the headroom to loads.
  [[nodiscard]] begun begin_read(std::size_t k, std::size_t group, slot_id lower, load_cookie waiting,
                                 std::uint64_t now) noexcept {
    begun out = begun::failed;
    each_lower(*this, [&](std::size_t at, auto& level) {
      if (at != k) return;
      if (level.transfer_count == level.transfers.size()) {
        out = begun::no_transfer;
        return;
      }
      auto& slots = level.slots[group];
      if (!slots.is_live(lower)) {  // another slot may have its key by now
        out = begun::withdrawn;
        return;
      }
      if (level.quiet_until > now) return;
      if (first().slots[group].find(slots.key(lower))) {  // another load already brings it, from another tier
        out = begun::withdrawn;
        return;
      }
      slots.pin(lower);  // the write that makes space above must not evict it
      const auto upper = begin_fill(group, slots.key(lower), slots.parent(lower), waiting.generation != 0);
      if (!upper) {
        slots.unpin(lower);
        out = begun::no_slot;
        return;
      }
      // The write that makes space has taken the last transfer.
      if (level.transfer_count == level.transfers.size()) {
        first().slots[group].abandon_fill(*upper);
        slots.unpin(lower);
        out = begun::no_transfer;
        return;
      }
      const auto copy =
          level.medium.read(group, lower, slots.stored(lower), first().medium.bytes_of(group, *upper));
      if (!copy) {
        first().slots[group].abandon_fill(*upper);
        slots.unpin(lower);
        if (is_busy(copy.error())) {
          out = begun::no_transfer;
        } else {
          fail(level, copy.error(), now);
        }
        return;
      }
      level.transfers[level.transfer_count++] = {.copy = *copy,
                                                 .group = static_cast<std::uint32_t>(group),
                                                 .upper = *upper,
                                                 .lower = lower,
                                                 .waiting = waiting};
      out = begun::yes;
    });
    return out;
  }
  /// Notes that no load waits for these reads any longer.
  void forget_reader(std::uint32_t load, std::uint32_t generation) noexcept {
    each_lower(*this, [&](std::size_t, auto& level) {
      for (std::size_t i = 0; i < level.transfer_count; ++i) {
        load_cookie& each = level.transfers[i].waiting;
        if (each.load == load && each.generation == generation) each = {};
      }
    });
  }

  /// Ends the transfers whose fences have passed, and begins owed writes.
  /// @param arrived  `arrived(const load_cookie&, slot_id, const failure&)`: the block that a load waits for
  ///                 is in the first tier, pinned for that load, or the failure says why it is not.
  template <class Arrived>
  void poll(std::uint64_t now, Arrived&& arrived) noexcept {
    each_lower(*this, [&](std::size_t, auto& level) { level.medium.poll(); });
    poll_levels<1>(now, arrived);
    poll_owed<1>();
  }
  /// Returns whether no transfer is in flight or owed.
  [[nodiscard]] bool is_idle() const noexcept {
    bool idle = true;
    each_level(*this, [&](std::size_t, const auto& level) {
      idle = idle && level.transfer_count == 0 && level.owed_count == 0;
    });
    return idle;
  }
  /// Waits for one transfer, a read of the load if there is one. Returns whether there was any.
  bool wait_for_one(std::uint32_t load, std::uint32_t generation) noexcept {
    return wait_for_first(
               [&](const load_cookie& each) { return each.load == load && each.generation == generation; }) ||
           wait_for_first([](const load_cookie&) { return true; });
  }
  /// Waits for the transfers in flight.
  void wait() noexcept {
    each_lower(*this, [&](std::size_t, auto& level) {
      for (std::size_t i = 0; i < level.transfer_count; ++i)
        wait_for(level.transfers[i].copy.fence);
    });
  }
  /// Calls `f(k, group)` for each block on its way between tier k and the first one.
  template <class F>
  void for_each_transfer(F&& f) const {
    each_lower(*this, [&](std::size_t k, const auto& level) {
      for (std::size_t i = 0; i < level.transfer_count; ++i)
        f(k, std::size_t{level.transfers[i].group});
    });
  }

 private:
  using places::each_level;
  using places::each_lower;
  using places::fail;
  using places::forget;
  using places::groups_;
  using places::last_failure_;
  using places::note_index;

  enum class sent : std::uint8_t { begun, later, impossible };

  /// Reserves slots of the first tier for demotions of a group: a block that a middle tier evicts must not
  /// displace one that waits for that tier. Each such tier has its own, because a block on its way may wait
  /// for the next tier's demotion. Returns how many.
  std::uint64_t reserve_passages(std::size_t group) {
    auto& slots = first().slots[group];
    const std::uint64_t part = slots.capacity() / 64;
    const std::uint64_t wanted = part == 0 ? 1 : part < 16 ? part : 16;
    std::uint64_t reserved = 0;
    each_lower(*this, [&](std::size_t k, auto& level) {
      if (k + 1 == levels || !level.down.on_eviction) return;
      for (std::uint64_t i = 0; i < wanted && slots.free() != 0; ++i, ++reserved)
        level.passage[group].push_back(slots.reserve());
    });
    return reserved;
  }

  /// Returns whether a queue refused only because all of its places are in use.
  [[nodiscard]] static bool is_busy(const failure& why) noexcept { return why.code == errc::table_full; }
  [[nodiscard]] bool must_go_down(std::size_t group, slot_id slot) const noexcept {
    if constexpr (levels == 1) {
      return false;
    } else {
      return first().down.on_eviction &&
             !std::get<1>(this->levels_).slots[group].find(first().slots[group].key(slot));
    }
  }

  /// Begins to write a slot of the first tier to tier `K`.
  template <std::size_t K>
  sent send_down(std::size_t group, slot_id upper, bool for_room = false) noexcept {
    if constexpr (K >= levels) {
      return sent::impossible;
    } else {
      auto& level = std::get<K>(this->levels_);
      auto& above = first().slots[group];
      auto& slots = level.slots[group];
      if (slots.find(above.key(upper))) return sent::impossible;
      if (level.transfer_count == level.transfers.size()) return sent::later;
      if (slots.free() == 0) {
        if (const sent room = make_room<K>(group); room != sent::begun) return room;
        // A demotion that tier `K` began for the room may have taken the last transfer.
        if (level.transfer_count == level.transfers.size()) return sent::later;
      }
      const slot_id lower = slots.begin_fill(above.key(upper), above.parent(upper));
      const auto copy =
          level.medium.write(group, lower, first().medium.bytes_of(group, upper), above.sum(upper));
      if (!copy) {
        slots.abandon_fill(lower);
        if (is_busy(copy.error()) && level.transfer_count != 0) return sent::later;
        note_refused(level, copy.error());
        return sent::impossible;
      }
      if constexpr (std::remove_cvref_t<decltype(level)>::medium_type::sums_blocks)
        above.note_sum(upper, copy->checksum);
      above.pin(upper);
      if (for_room) ++leaving_[group];
      level.transfers[level.transfer_count++] = {.copy = *copy,
                                                 .group = static_cast<std::uint32_t>(group),
                                                 .upper = upper,
                                                 .lower = lower,
                                                 .goes_down = true,
                                                 .for_room = for_room};
      return sent::begun;
    }
  }
  template <std::size_t K>
  sent make_room(std::size_t group) noexcept;
  template <class Level>
  void leave(Level& level, std::size_t group, slot_id slot) noexcept;
  template <class Level>
  sent begin_demotion(Level& level, std::size_t group, slot_id lower) noexcept;
  template <class Level>
  void end_demotion(Level& level, std::size_t group, slot_id by, slot_id lower) noexcept;
  template <std::size_t K, class Transfer>
  bool continue_demotion(Transfer& of, std::uint64_t now) noexcept;
  /// Sends ready contents of the first tier to tier `K`, if the policy of the tier above `K` says so.
  template <std::size_t K>
  void pass_down(std::size_t group, slot_id upper) noexcept {
    if constexpr (K < levels) {
      auto& above = first().slots[group];
      const std::uint32_t uses = K == 1 ? above.count_use(upper) : above.uses(upper);
      if (!std::get<K - 1>(this->levels_).down.writes_at(uses)) return;
      if (std::get<K>(this->levels_).slots[group].find(above.key(upper)))
        return pass_down<K + 1>(group, upper);
      if (send_down<K>(group, upper) != sent::later) return;
      auto& level = std::get<K>(this->levels_);
      if (level.owed_count == level.owed.size()) {
        ++level.counted.declined;
        return;
      }
      above.pin(upper);
      level.owed[(level.owed_first + level.owed_count++) % level.owed.size()] = {
          static_cast<std::uint32_t>(group), upper};
    }
  }
  template <std::size_t K>
  void poll_owed() noexcept {
    if constexpr (K < levels) {
      auto& level = std::get<K>(this->levels_);
      while (level.owed_count != 0) {
        const auto next = level.owed[level.owed_first];
        auto& above = first().slots[next.group];
        if (above.is_ready(next.upper) && send_down<K>(next.group, next.upper) == sent::later) break;
        level.owed_first = (level.owed_first + 1) % level.owed.size();
        --level.owed_count;
        above.unpin(next.upper);
      }
      poll_owed<K + 1>();
    }
  }
  template <std::size_t K, class Arrived>
  void poll_levels(std::uint64_t now, Arrived& arrived) noexcept {
    if constexpr (K < levels) {
      auto& level = std::get<K>(this->levels_);
      // Transfers are checked in the order in which they began. Writes also end in that order, so that
      // evictions do not depend on the order of the device.
      std::size_t kept = 0;
      bool is_write_under_way = false;
      for (std::size_t i = 0; i < level.transfer_count; ++i) {
        auto done = level.transfers[i];
        if (!done.copy.fence.ready() || (done.goes_down && is_write_under_way)) {
          is_write_under_way = is_write_under_way || done.goes_down;
          level.transfers[kept++] = done;
          continue;
        }
        if (done.demotes && !done.goes_down) {
          if (!continue_demotion<K>(done, now)) level.transfers[kept++] = done;
          continue;
        }
        const result<void> outcome = level.medium.outcome_of(done.copy.fence);
        if (done.goes_down) {
          finish_write<K>(done, outcome, now);
        } else {
          finish_read(level, done, outcome, now, arrived);
        }
      }
      level.transfer_count = kept;
      poll_levels<K + 1>(now, arrived);
    }
  }
  template <std::size_t K, class Transfer>
  void finish_write(Transfer& done, const result<void>& outcome, std::uint64_t now) noexcept {
    auto& level = std::get<K>(this->levels_);
    level.medium.release(done.copy);
    auto& slots = level.slots[done.group];
    auto& above = first().slots[done.group];
    if (!outcome) {
      slots.abandon_fill(done.lower);
      fail(level, outcome.error(), now);
    } else {
      const bool wanted = slots.finish_fill(done.lower);
      if (wanted) {
        ++level.counted.stored;
        level.counted.stored_bytes += done.copy.stored;
        slots.set_stored(done.lower, done.copy.checksum, done.copy.stored);
        if constexpr (std::remove_cvref_t<decltype(level)>::medium_type::passes_sums)
          slots.note_sum(done.lower, above.sum(done.upper));
        const auto kept = level.medium.keep(done.group, done.lower, slots.key(done.lower),
                                            slots.parent(done.lower), done.copy);
        if (!kept) note_index(kept.error());  // this process finds the block regardless
      }
      slots.unpin(done.lower);
      if (wanted && above.is_ready(done.upper)) pass_down<K + 1>(done.group, done.upper);
    }
    if constexpr (K > 1) {
      if (done.demotes)
        return end_demotion(std::get<K - 1>(this->levels_), done.group, done.upper, done.source);
    }
    above.unpin(done.upper);
    if (done.for_room) --leaving_[done.group];
    // The slot was chosen to leave, so it leaves now: otherwise all slots would be sent down in turn, and
    // none would leave.
    if (done.for_room && above.can_leave(done.upper)) above.evict(done.upper);
  }
  template <class Level, class Transfer, class Arrived>
  void finish_read(Level& level, Transfer& done, const result<void>& outcome, std::uint64_t now,
                   Arrived& arrived) noexcept {
    auto& slots = level.slots[done.group];
    auto& above = first().slots[done.group];
    failure why{};
    if (!outcome) {
      why = outcome.error();
      fail(level, why, now);
    } else {
      why = accept(level, done);
    }
    level.medium.release(done.copy);
    if (slots.is_doomed(done.lower) && why.code == errc::ok)
      why = {errc::cancelled, to_index(done.lower), 0, 0, level.medium.name()};
    if (why.code == errc::ok && !above.finish_fill(done.upper))
      why = {errc::cancelled, to_index(done.lower), 0, 0, level.medium.name()};
    slots.unpin(done.lower);
    if (why.code == errc::ok) {
      above.note_sum(done.upper, sum_of(level, done.group, done.lower));
      slots_used(slots, done.lower);
      if (done.waiting.generation != 0) return arrived(done.waiting, done.upper, why);
      return above.unpin(done.upper);
    }
    above.abandon_fill(done.upper);
    if (done.waiting.generation != 0) arrived(done.waiting, no_slot, why);
  }
  /// Verifies and restores what a read has brought; a damaged block leaves its tier.
  template <class Level, class Transfer>
  failure accept(Level& level, const Transfer& done) noexcept {
    auto& slots = level.slots[done.group];
    const auto good = level.medium.accept(done.group, done.lower, done.copy, slots.checksum(done.lower),
                                          first().medium.bytes_of(done.group, done.upper));
    if (good) return {};
    ++level.counted.damaged;
    last_failure_ = good.error();
    if (slots.is_live(done.lower)) drop(level, done.group, done.lower);
    return good.error();
  }
  /// Notes that a block could not be written to a tier.
  template <class Level>
  void note_refused(Level& level, const failure& why) noexcept {
    if (why.code == errc::too_short) {
      ++level.counted.declined;
      ++level.counted.too_long;
      return;
    }
    ++level.counted.failures;
    last_failure_ = why;
  }
  /// Returns the checksum of a block in a lower tier, if the tier knows that of the block itself.
  template <class Level>
  static std::optional<std::uint32_t> sum_of(const Level& level, std::size_t group, slot_id slot) noexcept {
    if constexpr (Level::medium_type::sums_blocks) return level.slots[group].checksum(slot);
    return level.slots[group].sum(slot);
  }
  template <class Slots>
  static void slots_used(Slots& slots, slot_id slot) noexcept {
    if (slots.is_live(slot)) slots.touch(slot);
  }
  template <class IsMeant>
  bool wait_for_first(IsMeant&& is_meant) noexcept {
    bool has_waited = false;
    each_lower(*this, [&](std::size_t, auto& level) {
      for (std::size_t i = 0; i < level.transfer_count && !has_waited; ++i) {
        // A demotion that has been read waits for other transfers.
        if (level.transfers[i].has_arrived || !is_meant(level.transfers[i].waiting)) continue;
        wait_for(level.transfers[i].copy.fence);
        has_waited = true;
      }
    });
    return has_waited;
  }
  template <class Fence>
  static void wait_for(const Fence& fence) noexcept {
    static_cast<void>(settled(fence));  // the fence keeps a failure, and `poll` takes it
  }

  std::array<std::uint64_t, max_layer_groups> headroom_{};
  // Slots of the first tier that will leave once they are written.
  std::array<std::uint64_t, max_layer_groups> leaving_{};
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem

#include <llmmem/offload/detail/tier_demotion.hpp>
