/// @file
/// The tiers beneath a cache, without the transfers between them: which block has a copy where.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/hash/errors.hpp>
#include <llmmem/offload/detail/prefix_links.hpp>
#include <llmmem/offload/detail/tier_keys.hpp>
#include <llmmem/offload/detail/tier_level.hpp>
#include <llmmem/offload/detail/tier_medium.hpp>
#include <llmmem/offload/detail/tier_slots.hpp>
#include <llmmem/offload/kv_tiers_types.hpp>
#include <llmmem/offload/load_choice.hpp>
#include <llmmem/result.hpp>

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

/// The tiers and the contents of their slots. `kv_tier_stack` moves contents between them.
///
/// @par Thread safety   one thread at a time.
template <class... Tiers>
class kv_tier_places {
 public:
  static constexpr std::size_t levels = sizeof...(Tiers);

  kv_tier_places(const kv_tiers_options& options, std::span<const std::uint64_t> block_bytes,
                 std::span<const double> shares, const Tiers&... tiers)
      : options_(&options), groups_(block_bytes.size()), levels_(make_level(tiers, block_bytes, shares)...) {}
  kv_tier_places(const kv_tier_places&) = delete;
  kv_tier_places& operator=(const kv_tier_places&) = delete;

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
  /// Verifies the first tier's copy of a block. If it is damaged, drops it, and the damaged ones of other
  /// tiers that the host can read: these are not verified on their way up. Writes that copy a damaged one to
  /// another tier are given up.
  offload::copy_state verify_copy(std::size_t group, const block_key& key) noexcept {
    auto out = offload::copy_state::unknown;
    each_level(*this, [&](std::size_t k, auto& level) {
      if (k != 0 && out != offload::copy_state::damaged) return;
      const auto slot = level.slots[group].find(key);
      const offload::copy_state found = verify_copy(level, group, key);
      if (k == 0) out = found;
      if (found == offload::copy_state::damaged) give_up_writes_of(k, group, *slot);
    });
    return out;
  }
  /// Gives up the contents of all tiers. The slots' order makes the next blocks ascend in memory, because
  /// copies into descending blocks take longer.
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
      bytes += level.transfers.bytes() + level.owed.bytes() + level.medium.coding_bytes();
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
      if (level.transfer_count == 0 && !level.medium.are_buffers_free())
        found.push_back(options_->name + ": tier " + std::to_string(k) + " has no transfer, and its coding " +
                        "buffers are in use");
    });
    return found;
  }
  /// Calls `f(group, slot)` for each slot of a tier that is filling or ready, the last slot first.
  template <class Level, class F>
  static void for_each_live(Level& level, F&& f) {
    for (std::size_t g = 0; g < level.slots.size(); ++g) {
      for (std::uint64_t i = level.slots[g].capacity(); i > 0; --i) {
        const slot_id slot{static_cast<std::uint32_t>(i - 1)};
        if (level.slots[g].is_live(slot)) f(g, slot);
      }
    }
  }
  /// Calls `f(k, level)` for each tier.
  template <class F>
  void for_each_level(F&& f) const {
    each_level(*this, f);
  }
  [[nodiscard]] const failure& last_failure() const noexcept { return last_failure_; }
  /// Counts blocks that a load took from each tier.
  void count_loaded(std::span<const std::uint64_t> blocks) noexcept {
    each_level(*this, [&](std::size_t k, auto& level) { level.counted.loaded += blocks[k]; });
  }

 protected:
  /// Finds again what persistent tiers kept.
  void recover_all() {
    each_lower(*this, [&](std::size_t, auto& level) { recover(level); });
  }
  template <class Level>
  void forget(Level& level, const block_key& key) noexcept {
    if (const auto done = level.medium.forget(key); !done) note_index(done.error());
  }
  void note_index(const failure& why) noexcept { last_failure_ = index_failure_ = why; }
  template <class Level>
  offload::copy_state verify_copy(Level& level, std::size_t group, const block_key& key) noexcept {
    using medium = typename Level::medium_type;
    if constexpr (medium::is_host_accessible && medium::coding_type::is_plain) {
      const auto& slots = level.slots[group];
      const auto slot = slots.find(key);
      const auto sum = slot && slots.is_ready(*slot) ? slots.sum(*slot) : std::nullopt;
      if (!sum) return offload::copy_state::unknown;
      const std::uint32_t found = crc32c(0, level.medium.bytes_of(group, *slot));
      if (found == *sum) return offload::copy_state::sound;
      ++level.counted.damaged;
      last_failure_ = {errc::checksum_differs, to_index(*slot), *sum, found, level.medium.name()};
      drop(level, group, *slot);
      return offload::copy_state::damaged;
    } else {
      return offload::copy_state::unknown;
    }
  }
  /// Gives up the blocks that lower tiers are being written from a slot of tier `k`: none finds them, and
  /// their slots become free when the writes end.
  void give_up_writes_of(std::size_t k, std::size_t group, slot_id slot) noexcept {
    each_lower(*this, [&](std::size_t at, auto& level) {
      for (std::size_t i = 0; i < level.transfer_count; ++i) {
        const auto& each = level.transfers[i];
        if (!each.goes_down || each.group != group) continue;
        // The block of a demotion is in a slot of the tier above, and passes through one of the first tier.
        if (each.demotes ? at == k + 1 && each.source == slot : k == 0 && each.upper == slot)
          level.slots[group].drop(each.lower);
      }
    });
  }
  template <class Level>
  void fail(Level& level, const failure& why, std::uint64_t now) noexcept {
    ++level.counted.failures;
    last_failure_ = why;
    level.quiet_until = saturating_add(now, options_->quiet_ns);
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

  const kv_tiers_options* options_;
  std::size_t groups_;
  std::tuple<tier_level<Tiers>...> levels_;
  failure last_failure_{};

 private:
  template <class Tier>
  [[nodiscard]] tier_level<Tier> make_level(const Tier& tier, std::span<const std::uint64_t> block_bytes,
                                            std::span<const double> shares) const {
    const std::uint64_t unit =
        tier.granularity != 0 ? tier.granularity : (Tier::space_type::is_host_accessible ? 1 : 4096);
    const std::string who = options_->name + ": " + std::string(tier.space->name());
    using coding_type = typename tier_level<Tier>::medium_type::coding_type;
    std::vector<std::uint64_t> slot_bytes(block_bytes.begin(), block_bytes.end());
    if constexpr (!coding_type::is_plain) {
      for (std::size_t g = 0; g < slot_bytes.size(); ++g)
        slot_bytes[g] =
            stored_slot(tier, coding_type::worst_case(tier.codec, g, block_bytes[g]), block_bytes[g], who);
    }
    slot_regions regions = divide_tier(tier.budget, unit, slot_bytes, shares, who);
    for (std::size_t g = 0; g < slot_bytes.size(); ++g) {
      regions[g].bytes = block_bytes[g];
      if constexpr (!coding_type::is_plain) {
        // Coding buffers hold a worst case, and an earlier process's codec may have had longer forms.
        const std::uint64_t most = coding_type::worst_case(tier.codec, g, block_bytes[g]);
        regions[g].most_bytes = regions[g].stride < most ? regions[g].stride : most;
      }
    }
    return tier_level<Tier>(
        tier, regions, groups_, *options_,
        coding_type(tier.codec, block_bytes, tier.coding_buffers, options_->metadata, who));
  }
  /// Returns the bytes of a slot for stored forms.
  template <class Tier>
  [[nodiscard]] static std::uint64_t stored_slot(const Tier& tier, std::uint64_t worst_case,
                                                 std::uint64_t block_bytes, const std::string& who) {
    if (!(tier.slot_share >= 0 && tier.slot_share <= 16)) {
      throw argument_error(who + ": slot_share is negative, no number, or above 16; give the bytes of a " +
                           "slot as a share of a block's, or 0 for the codec's worst case");
    }
    if (tier.slot_share == 0) return worst_case;
    const auto bytes = static_cast<std::uint64_t>(tier.slot_share * static_cast<double>(block_bytes));
    return bytes == 0 ? 1 : bytes < worst_case ? bytes : worst_case;
  }
  template <std::size_t Index, class Self, class F>
  static decltype(auto) visit(Self& self, std::size_t k, F& f) {
    if constexpr (Index + 1 == levels) {
      return f(std::get<Index>(self.levels_));
    } else {
      return k == Index ? f(std::get<Index>(self.levels_)) : visit<Index + 1>(self, k, f);
    }
  }
  template <class Level>
  void recover(Level& level) {
    level.counted.recovered =
        level.medium.recover([&](std::size_t g, slot_id slot, const chunk_extent& extent) {
          auto& slots = level.slots[g];
          if (!slots.is_free(slot) || slots.find(extent.key)) return false;
          slots.recover(slot, extent.key, parent_digest{extent.format}, extent.checksum,
                        static_cast<std::uint32_t>(extent.stored));
          return true;
        });
    for (auto& slots : level.slots)
      slots.end_recovery();
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

  std::uint64_t judged_at_ = ~std::uint64_t{0};
  failure index_failure_{};  // the first index update that failed since the last `sync`
};

template <class... Tiers>
std::uint64_t kv_tier_places<Tiers...>::drop_with_followers(const block_key& key) {
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
