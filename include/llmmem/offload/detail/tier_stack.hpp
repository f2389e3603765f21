/// @file
/// The tiers beneath a cache: their slots, and the transfers between the first and the lower ones.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/hash/errors.hpp>
#include <llmmem/offload/detail/pending_save.hpp>
#include <llmmem/offload/detail/prefix_links.hpp>
#include <llmmem/offload/detail/tier_keys.hpp>
#include <llmmem/offload/detail/tier_level.hpp>
#include <llmmem/offload/detail/tier_medium.hpp>
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
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Where a key was found.
struct tier_place_found {
  std::size_t tier = 0;
  slot_id slot = no_slot;
};

/// The tiers, of which the first is the gateway to the others. The stack does not use the cache.
///
/// @par Thread safety   one thread at a time.
template <class... Tiers>
class kv_tier_stack {
 public:
  static constexpr std::size_t levels = sizeof...(Tiers);

  kv_tier_stack(const kv_tiers_options& options, std::span<const std::uint64_t> block_bytes,
                std::span<const double> shares, const Tiers&... tiers)
      : options_(&options), groups_(block_bytes.size()), levels_(make_level(tiers, block_bytes, shares)...) {
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
    for_each_lower([&](auto, auto& level) { recover(level); });
  }
  kv_tier_stack(const kv_tier_stack&) = delete;
  kv_tier_stack& operator=(const kv_tier_stack&) = delete;

  [[nodiscard]] auto& first() noexcept { return std::get<0>(levels_); }
  [[nodiscard]] const auto& first() const noexcept { return std::get<0>(levels_); }
  /// Calls `f(level)` with tier `k`.
  template <class F>
  decltype(auto) with(std::size_t k, F&& f) {
    return visit<0>(*this, k, f);
  }
  template <class F>
  decltype(auto) with(std::size_t k, F&& f) const {
    return visit<0>(*this, k, f);
  }

  /// Returns the fastest tier that has the key.
  [[nodiscard]] std::optional<tier_place_found> find(std::size_t group, const block_key& key) const noexcept {
    std::optional<tier_place_found> out;
    each_level(*this, [&](std::size_t k, const auto& level) {
      if (out) return;
      if (const auto slot = level.slots[group].find(key)) out = tier_place_found{k, *slot};
    });
    return out;
  }
  /// Counts a use in every tier that has the key.
  void touch(std::size_t group, const block_key& key) noexcept {
    each_level(*this, [&](std::size_t, auto& level) {
      if (const auto slot = level.slots[group].find(key)) level.slots[group].touch(*slot);
    });
  }
  /// Pins contents of tier `k` for a load, and counts a use in every tier that has the key.
  void take(std::size_t k, std::size_t group, slot_id slot, const block_key& key) noexcept {
    each_level(*this, [&](std::size_t at, auto& level) {
      auto& slots = level.slots[group];
      if (at == k) {
        slots.pin(slot);
        slots.begin_load(slot);
        slots.touch(slot);
      } else if (const auto copy = slots.find(key)) {
        slots.touch(*copy);
      }
    });
  }
  void prefetch(std::size_t group, const block_key& key) const noexcept {
    each_level(*this, [&](std::size_t, const auto& level) { level.slots[group].prefetch(key); });
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
      const auto fence = level.medium.read(group, lower, first().medium.bytes_of(group, *upper));
      if (!fence) {
        first().slots[group].abandon_fill(*upper);
        slots.unpin(lower);
        if (is_busy(fence.error())) {
          out = begun::no_transfer;
        } else {
          fail(level, fence.error(), now);
        }
        return;
      }
      level.transfers[level.transfer_count++] = {.fence = *fence,
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
        wait_for(level.transfers[i].fence);
    });
  }
  /// Returns when files and their indices are on their devices; otherwise the first failure, which may also
  /// be an index update since the last call.
  result<void> sync() noexcept {
    result<void> out;
    if (index_failure_.code != errc::ok) out = std::exchange(index_failure_, failure{});
    each_lower(*this, [&](std::size_t, auto& level) {
      const auto synced = level.medium.sync();
      if (out && !synced) out = synced;
    });
    return out;
  }

  /// Gives up the contents that a tier has under a key.
  template <class Level>
  void drop(Level& level, std::size_t group, slot_id slot) noexcept {
    const block_key key = level.slots[group].key(slot);
    const bool was_ready = level.slots[group].is_ready(slot);
    level.slots[group].drop(slot);
    if (was_ready) forget(level, key);
  }
  void drop(std::size_t k, std::size_t group, slot_id slot) noexcept {
    with(k, [&](auto& level) { drop(level, group, slot); });
  }
  /// Gives up the contents of all tiers.
  void clear() noexcept {
    each_level(*this, [&](std::size_t, auto& level) {
      for_each_live(level, [&](std::size_t g, slot_id slot) { drop(level, g, slot); });
    });
  }
  /// Gives up a key and all contents that may build on it: those after it, and those without a complete chain
  /// to the beginning of a prompt. Returns how many blocks. O(slots); allocates.
  std::uint64_t drop_with_followers(const block_key& key);

  [[nodiscard]] std::uint64_t metadata_bytes() const noexcept {
    std::uint64_t bytes = 0;
    each_level(*this, [&](std::size_t, const auto& level) {
      bytes += level.transfers.bytes() + level.owed.bytes();
      for (const auto& slots : level.slots)
        bytes += slots.metadata_bytes();
    });
    return bytes;
  }
  void count(offload::kv_tiers_stats& into) const noexcept {
    each_level(*this, [&](std::size_t k, const auto& level) {
      offload::kv_tier_stats& out = into.tiers[k] = level.counted;
      out.bytes = level.medium.bytes();
      for (const auto& slots : level.slots) {
        out.slots += slots.capacity();
        out.held += slots.held();
        out.in_use += slots.in_use();
        out.evictions += slots.evictions();
      }
    });
    into.last_failure = last_failure_;
  }
  [[nodiscard]] std::vector<std::string> audit() const {
    std::vector<std::string> found;
    each_level(*this, [&](std::size_t k, const auto& level) {
      for (std::size_t g = 0; g < groups_; ++g) {
        const std::string who =
            options_->name + ": tier " + std::to_string(k) + " group " + std::to_string(g);
        for (std::string& each : level.slots[g].audit(who))
          found.push_back(std::move(each));
      }
    });
    return found;
  }
  /// Calls `f(group, slot)` for each slot of a tier that is filling or ready.
  template <class Level, class F>
  static void for_each_live(Level& level, F&& f) {
    for (std::size_t g = 0; g < level.slots.size(); ++g) {
      for (std::uint64_t i = 0; i < level.slots[g].capacity(); ++i) {
        const slot_id slot{static_cast<std::uint32_t>(i)};
        if (level.slots[g].is_live(slot)) f(g, slot);
      }
    }
  }
  /// Calls `f(k, level)` for each tier.
  template <class F>
  void for_each_level(F&& f) const {
    each_level(*this, f);
  }
  /// Calls `f(k, group)` for each block on its way between tier k and the first one.
  template <class F>
  void for_each_transfer(F&& f) const {
    each_lower(*this, [&](std::size_t k, const auto& level) {
      for (std::size_t i = 0; i < level.transfer_count; ++i)
        f(k, std::size_t{level.transfers[i].group});
    });
  }
  [[nodiscard]] const failure& last_failure() const noexcept { return last_failure_; }
  /// Counts blocks that a load took from each tier.
  void count_loaded(std::span<const std::uint64_t> blocks) noexcept {
    each_level(*this, [&](std::size_t k, auto& level) { level.counted.loaded += blocks[k]; });
  }

 private:
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

  template <class Tier>
  [[nodiscard]] tier_level<Tier> make_level(const Tier& tier, std::span<const std::uint64_t> block_bytes,
                                            std::span<const double> shares) const {
    const std::uint64_t unit =
        tier.granularity != 0 ? tier.granularity : (Tier::space_type::is_host_accessible ? 1 : 4096);
    const std::string who = options_->name + ": " + std::string(tier.space->name());
    return tier_level<Tier>(tier, divide_tier(tier.budget, unit, block_bytes, shares, who), groups_,
                            *options_);
  }
  template <std::size_t Index, class Self, class F>
  static decltype(auto) visit(Self& self, std::size_t k, F& f) {
    if constexpr (Index + 1 == levels) {
      return f(std::get<Index>(self.levels_));
    } else {
      return k == Index ? f(std::get<Index>(self.levels_)) : visit<Index + 1>(self, k, f);
    }
  }
  template <class Self, class F>
  static void each_level(Self& self, F&& f) {
    [&]<std::size_t... Index>(std::index_sequence<Index...>) {
      (f(Index, std::get<Index>(self.levels_)), ...);
    }(std::make_index_sequence<levels>());
  }
  template <class Self, class F>
  static void each_lower(Self& self, F&& f) {
    [&]<std::size_t... Index>(std::index_sequence<Index...>) {
      (f(Index + 1, std::get<Index + 1>(self.levels_)), ...);
    }(std::make_index_sequence<levels - 1>());
  }
  template <class F>
  void for_each_lower(F&& f) {
    each_lower(*this, [&](std::size_t k, auto& level) { f(k, level); });
  }

  void note_index(const failure& why) noexcept { last_failure_ = index_failure_ = why; }
  /// Returns whether a queue refused only because all of its places are in use.
  [[nodiscard]] static bool is_busy(const failure& why) noexcept { return why.code == errc::table_full; }
  template <class Level>
  void forget(Level& level, const block_key& key) noexcept {
    if (const auto done = level.medium.forget(key); !done) note_index(done.error());
  }
  template <class Level>
  void fail(Level& level, const failure& why, std::uint64_t now) noexcept {
    ++level.counted.failures;
    last_failure_ = why;
    level.quiet_until = now + options_->quiet_ns;
  }
  template <class Level>
  void recover(Level& level) {
    level.counted.recovered =
        level.medium.recover([&](std::size_t g, slot_id slot, const chunk_extent& extent) {
          auto& slots = level.slots[g];
          if (!slots.is_free(slot) || slots.find(extent.key)) return false;
          slots.recover(slot, extent.key, parent_digest{extent.format}, extent.checksum);
          return true;
        });
    for (auto& slots : level.slots)
      slots.end_recovery();
  }

  [[nodiscard]] bool must_go_down(std::size_t group, slot_id slot) const noexcept {
    if constexpr (levels == 1) {
      return false;
    } else {
      return first().down.on_eviction &&
             !std::get<1>(levels_).slots[group].find(first().slots[group].key(slot));
    }
  }

  /// Begins to write a slot of the first tier to tier `K`.
  template <std::size_t K>
  sent send_down(std::size_t group, slot_id upper, bool for_room = false) noexcept {
    if constexpr (K >= levels) {
      return sent::impossible;
    } else {
      auto& level = std::get<K>(levels_);
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
      const std::span<const std::byte> bytes = first().medium.bytes_of(group, upper);
      const std::uint32_t checksum =
          std::remove_reference_t<decltype(level.medium)>::leaves_memory ? crc32c(0, bytes) : 0;
      const auto fence = level.medium.write(group, lower, bytes);
      if (!fence) {
        slots.abandon_fill(lower);
        if (is_busy(fence.error()) && level.transfer_count != 0) return sent::later;
        ++level.counted.failures;
        last_failure_ = fence.error();
        return sent::impossible;
      }
      above.pin(upper);
      if (for_room) ++leaving_[group];
      level.transfers[level.transfer_count++] = {.fence = *fence,
                                                 .group = static_cast<std::uint32_t>(group),
                                                 .upper = upper,
                                                 .lower = lower,
                                                 .checksum = checksum,
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
      if (!std::get<K - 1>(levels_).down.writes_at(uses)) return;
      if (std::get<K>(levels_).slots[group].find(above.key(upper))) return pass_down<K + 1>(group, upper);
      if (send_down<K>(group, upper) != sent::later) return;
      auto& level = std::get<K>(levels_);
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
      auto& level = std::get<K>(levels_);
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
      auto& level = std::get<K>(levels_);
      // Transfers are checked in the order in which they began. Writes also end in that order, so that
      // evictions do not depend on the order of the device.
      std::size_t kept = 0;
      bool is_write_under_way = false;
      for (std::size_t i = 0; i < level.transfer_count; ++i) {
        auto done = level.transfers[i];
        if (!done.fence.ready() || (done.goes_down && is_write_under_way)) {
          is_write_under_way = is_write_under_way || done.goes_down;
          level.transfers[kept++] = done;
          continue;
        }
        if (done.demotes && !done.goes_down) {
          if (!continue_demotion<K>(done, now)) level.transfers[kept++] = done;
          continue;
        }
        const result<void> outcome = level.medium.outcome_of(done.fence);
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
  void finish_write(const Transfer& done, const result<void>& outcome, std::uint64_t now) noexcept {
    auto& level = std::get<K>(levels_);
    auto& slots = level.slots[done.group];
    auto& above = first().slots[done.group];
    if (!outcome) {
      slots.abandon_fill(done.lower);
      fail(level, outcome.error(), now);
    } else {
      const bool wanted = slots.finish_fill(done.lower);
      if (wanted) {
        ++level.counted.stored;
        slots.set_checksum(done.lower, done.checksum);
        const auto kept = level.medium.keep(done.group, done.lower, slots.key(done.lower),
                                            slots.parent(done.lower), done.checksum);
        if (!kept) note_index(kept.error());  // this process finds the block regardless
      }
      slots.unpin(done.lower);
      if (wanted && above.is_ready(done.upper)) pass_down<K + 1>(done.group, done.upper);
    }
    if constexpr (K > 1) {
      if (done.demotes) return end_demotion(std::get<K - 1>(levels_), done.group, done.upper, done.source);
    }
    above.unpin(done.upper);
    if (done.for_room) --leaving_[done.group];
    // The slot was chosen to leave, so it leaves now: otherwise all slots would be sent down in turn, and
    // none would leave.
    if (done.for_room && above.can_leave(done.upper)) above.evict(done.upper);
  }
  template <class Level, class Transfer, class Arrived>
  void finish_read(Level& level, const Transfer& done, const result<void>& outcome, std::uint64_t now,
                   Arrived& arrived) noexcept {
    auto& slots = level.slots[done.group];
    auto& above = first().slots[done.group];
    failure why{};
    if (!outcome) {
      why = outcome.error();
      fail(level, why, now);
    } else if constexpr (Level::medium_type::leaves_memory) {
      const std::uint32_t found = crc32c(0, first().medium.bytes_of(done.group, done.upper));
      if (found != slots.checksum(done.lower)) {
        why = {errc::checksum_differs, to_index(done.lower), slots.checksum(done.lower), found,
               level.medium.name()};
        ++level.counted.damaged;
        last_failure_ = why;
        if (slots.is_live(done.lower)) drop(level, done.group, done.lower);
      }
    }
    if (slots.is_doomed(done.lower) && why.code == errc::ok)
      why = {errc::cancelled, to_index(done.lower), 0, 0, level.medium.name()};
    if (why.code == errc::ok && !above.finish_fill(done.upper))
      why = {errc::cancelled, to_index(done.lower), 0, 0, level.medium.name()};
    slots.unpin(done.lower);
    if (why.code == errc::ok) {
      slots_used(slots, done.lower);
      if (done.waiting.generation != 0) return arrived(done.waiting, done.upper, why);
      return above.unpin(done.upper);
    }
    above.abandon_fill(done.upper);
    if (done.waiting.generation != 0) arrived(done.waiting, no_slot, why);
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
        wait_for(level.transfers[i].fence);
        has_waited = true;
      }
    });
    return has_waited;
  }
  template <class Fence>
  static void wait_for(const Fence& fence) noexcept {
    static_cast<void>(settled(fence));  // the fence keeps a failure, and `poll` takes it
  }

  /// Returns a count that grows with each key that comes or leaves.
  [[nodiscard]] std::uint64_t changes() const noexcept {
    std::uint64_t sum = 0;
    each_level(*this, [&](std::size_t, const auto& level) {
      for (const auto& slots : level.slots)
        sum += slots.changes();
    });
    return sum;
  }

  const kv_tiers_options* options_;
  std::uint64_t judged_at_ = ~std::uint64_t{0};
  std::size_t groups_;
  std::array<std::uint64_t, max_layer_groups> headroom_{};
  // Slots of the first tier that will leave once they are written.
  std::array<std::uint64_t, max_layer_groups> leaving_{};
  std::tuple<tier_level<Tiers>...> levels_;
  failure last_failure_{};
  failure index_failure_{};  // the first index update that failed since the last `sync`
};

template <class... Tiers>
std::uint64_t kv_tier_stack<Tiers...>::drop_with_followers(const block_key& key) {
  // After an earlier call, all remaining chunks have their complete chain in the tiers, so none builds on a
  // key that the tiers lack.
  if (changes() == judged_at_) {
    bool is_here = false;
    for (std::size_t g = 0; g < groups_; ++g)
      is_here = is_here || find(g, tier_key(key, g)).has_value();
    if (!is_here) return 0;
  }
  prefix_links links;
  each_level(*this, [&](std::size_t, auto& level) {
    for_each_live(level, [&](std::size_t g, slot_id slot) {
      links.add(chain_key_of(level.slots[g].key(slot), g), level.slots[g].parent(slot));
    });
  });
  links.judge(key);
  std::uint64_t dropped = 0;
  each_level(*this, [&](std::size_t, auto& level) {
    for_each_live(level, [&](std::size_t g, slot_id slot) {
      if (links.is_sound(chain_key_of(level.slots[g].key(slot), g))) return;
      drop(level, g, slot);
      ++dropped;
    });
  });
  judged_at_ = changes();
  return dropped;
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem

#include <llmmem/offload/detail/tier_demotion.hpp>
