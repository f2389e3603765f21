/// @file
/// The slots of one group of layers in one tier: their keys, the transfers that use them, and the next one to
/// evict.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/eviction/concepts.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/offload/detail/tier_keys.hpp>
#include <llmmem/offload/leave_watcher.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/paging/prefix_index.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Slots of equal size. A slot is *free*; *filling*, while a transfer writes it; *ready*; or *doomed*, if its
/// contents are unwanted and a transfer still uses it. Filling and ready slots are found by their key; ready
/// slots without a pin can be evicted.
///
/// @par Complexity   O(1), and the policy's; 35 + 33 bytes per slot, and the policy's.
/// @par Thread safety   one thread at a time.
template <eviction_policy Eviction>
class tier_slots {
 public:
  tier_slots(std::uint64_t slots, Eviction eviction, const metadata_source& source)
      : index_(slots, source),
        entries_(slots, entry{}, source, "kv_tiers: slots"),
        free_(slots, source, "kv_tiers: free slots"),
        eviction_(std::move(eviction)),
        free_count_(slots) {
    for (std::uint64_t i = 0; i < slots; ++i)
      free_[i] = static_cast<std::uint32_t>(slots - 1 - i);
  }

  [[nodiscard]] std::optional<slot_id> find(const block_key& key) const noexcept {
    const block_id found = index_.block_of(key);
    if (found == null_block) return std::nullopt;
    return slot_id{to_index(found) - 1};
  }
  void prefetch(const block_key& key) const noexcept { index_.prefetch(key); }
  /// Sets what is called when a key leaves its slot, before anything else is written there.
  void watch(const offload::leave_watcher& watcher) noexcept { watcher_ = watcher; }

  /// Takes a free slot for contents that will arrive, and pins it for the filler. @pre a slot is free; no
  /// slot has `key`
  slot_id begin_fill(const block_key& key, parent_digest parent) noexcept {
    const slot_id slot{free_[--free_count_]};
    at(slot) = {.parent = parent, .pins = 1, .state = slot_state::filling};
    index_.stage(key, block_of(slot));
    index_.insert(block_of(slot), 1);
    ++changes_;
    return slot;
  }
  /// Notes that the contents have arrived. Returns whether they are still wanted. The filler keeps its pin.
  bool finish_fill(slot_id slot) noexcept {
    if (at(slot).state == slot_state::doomed) return false;
    at(slot).state = slot_state::ready;
    eviction_.insert(policy_slot(slot), hint_of(slot));
    return true;
  }
  /// Notes that the contents will not arrive. Removes the filler's pin.
  void abandon_fill(slot_id slot) noexcept {
    if (at(slot).state == slot_state::filling) doom(slot);
    unpin(slot);
  }
  /// Enters a slot whose contents an earlier process left; the caller calls `end_recovery` after the last
  /// one. @pre no slot has the key
  void recover(slot_id slot, const block_key& key, parent_digest parent, std::uint32_t checksum,
               std::uint32_t stored = 0) noexcept {
    at(slot) = {.parent = parent, .checksum = checksum, .stored = stored, .state = slot_state::ready};
    index_.stage(key, block_of(slot));
    index_.insert(block_of(slot), 1);
    ++changes_;
    eviction_.insert(policy_slot(slot), hint_of(slot));
    eviction_.unpin(policy_slot(slot));
    ++candidates_;
  }
  /// Takes a slot that never has contents of its own: memory for blocks that pass. @pre a slot is free
  slot_id reserve() noexcept {
    const slot_id slot{free_[--free_count_]};
    at(slot) = {.pins = 1, .state = slot_state::reserved};
    ++reserved_;
    return slot;
  }
  [[nodiscard]] bool is_free(slot_id slot) const noexcept { return at(slot).state == slot_state::free; }
  void end_recovery() noexcept {
    free_count_ = 0;
    for (std::uint64_t i = entries_.size(); i > 0; --i) {
      if (entries_[i - 1].state == slot_state::free) free_[free_count_++] = static_cast<std::uint32_t>(i - 1);
    }
  }

  void pin(slot_id slot) noexcept {
    if (at(slot).pins++ != 0 || at(slot).state != slot_state::ready) return;
    eviction_.pin(policy_slot(slot));
    --candidates_;
  }
  void unpin(slot_id slot) noexcept {
    if (--at(slot).pins != 0) return;
    if (at(slot).state == slot_state::ready) {
      eviction_.unpin(policy_slot(slot));
      ++candidates_;
    } else {
      make_free(slot);
    }
  }
  /// Notes that a load needs the contents, which makes the block `pending` for other requests.
  void begin_load(slot_id slot) noexcept { ++at(slot).loads; }
  void end_load(slot_id slot) noexcept { --at(slot).loads; }

  void touch(slot_id slot) noexcept {
    if (at(slot).state == slot_state::ready) eviction_.touch(policy_slot(slot), hint_of(slot));
  }
  /// Counts a use, and returns the number of uses since the contents arrived.
  std::uint32_t count_use(slot_id slot) noexcept { return ++at(slot).uses; }
  [[nodiscard]] std::uint32_t uses(slot_id slot) const noexcept { return at(slot).uses; }

  /// Returns the slot that leaves next, if any can.
  [[nodiscard]] std::optional<slot_id> victim() const noexcept {
    const auto found = eviction_.victim();
    if (!found) return std::nullopt;
    return slot_id{to_index(*found)};
  }
  /// Evicts the contents. @pre the slot is ready and unpinned
  void evict(slot_id slot) noexcept {
    detail::evict(eviction_, policy_slot(slot));
    --candidates_;
    forget_key(slot);
    make_free(slot);
    ++evictions_;
  }
  /// Drops contents that no request may use. A slot in use by transfers becomes free after the last of them.
  void drop(slot_id slot) noexcept {
    if (at(slot).state == slot_state::doomed) return;
    const bool was_ready = at(slot).state == slot_state::ready;
    if (was_ready) eviction_.erase(policy_slot(slot));
    if (at(slot).pins != 0) return doom(slot);
    --candidates_;
    forget_key(slot);
    make_free(slot);
  }

  [[nodiscard]] bool is_ready(slot_id slot) const noexcept { return at(slot).state == slot_state::ready; }
  /// Returns whether `evict` may be called.
  [[nodiscard]] bool can_leave(slot_id slot) const noexcept { return is_ready(slot) && at(slot).pins == 0; }
  [[nodiscard]] bool is_doomed(slot_id slot) const noexcept { return at(slot).state == slot_state::doomed; }
  [[nodiscard]] bool is_live(slot_id slot) const noexcept {
    return at(slot).state == slot_state::ready || at(slot).state == slot_state::filling;
  }
  /// Returns whether the contents are available immediately: no transfer or load is still bringing them.
  [[nodiscard]] bool is_settled(slot_id slot) const noexcept { return is_ready(slot) && at(slot).loads == 0; }
  [[nodiscard]] const block_key& key(slot_id slot) const noexcept { return index_.key(block_of(slot)); }
  [[nodiscard]] parent_digest parent(slot_id slot) const noexcept { return at(slot).parent; }
  [[nodiscard]] std::uint32_t checksum(slot_id slot) const noexcept { return at(slot).checksum; }
  /// Notes the CRC-32C of the contents, or that it is unknown; the next contents of the slot have none.
  void note_sum(slot_id slot, std::optional<std::uint32_t> sum) noexcept {
    at(slot).checksum = sum.value_or(0);
    at(slot).has_sum = sum.has_value();
  }
  [[nodiscard]] std::optional<std::uint32_t> sum(slot_id slot) const noexcept {
    if (!at(slot).has_sum) return std::nullopt;
    return at(slot).checksum;
  }
  /// Notes what the slot's bytes are.
  /// @param stored  how many, in a tier with a codec
  void set_stored(slot_id slot, std::uint32_t checksum, std::uint32_t stored) noexcept {
    at(slot).checksum = checksum;
    at(slot).stored = stored;
  }
  [[nodiscard]] std::uint32_t stored(slot_id slot) const noexcept { return at(slot).stored; }
  [[nodiscard]] std::uint32_t pins(slot_id slot) const noexcept { return at(slot).pins; }

  [[nodiscard]] std::uint64_t capacity() const noexcept { return entries_.size(); }
  [[nodiscard]] std::uint64_t free() const noexcept { return free_count_; }
  /// Returns the number of slots that are free, or can be evicted.
  [[nodiscard]] std::uint64_t available() const noexcept { return free_count_ + candidates_; }
  /// Returns the number of slots that transfers or loads use.
  [[nodiscard]] std::uint64_t in_use() const noexcept { return capacity() - available() - reserved_; }
  [[nodiscard]] std::uint64_t held() const noexcept { return index_.size(); }
  /// Returns how many keys have come or left so far.
  [[nodiscard]] std::uint64_t changes() const noexcept { return changes_; }
  [[nodiscard]] std::uint64_t evictions() const noexcept { return evictions_; }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept {
    return index_.metadata_bytes() + entries_.bytes() + free_.bytes() + eviction_.metadata_bytes();
  }

  /// Returns one sentence for each broken invariant.
  [[nodiscard]] std::vector<std::string> audit(const std::string& who) const {
    std::vector<std::string> found = index_.audit();
    std::uint64_t free_ones = 0;
    std::uint64_t candidates = 0;
    std::uint64_t live = 0;
    for (std::uint64_t i = 0; i < entries_.size(); ++i) {
      const slot_id slot{static_cast<std::uint32_t>(i)};
      const entry& each = at(slot);
      const bool can_leave = each.state == slot_state::ready && each.pins == 0;
      free_ones += each.state == slot_state::free ? 1U : 0U;
      candidates += can_leave ? 1U : 0U;
      live += is_live(slot) ? 1U : 0U;
      if (is_live(slot) != index_.contains(block_of(slot)))
        found.push_back(who + ": slot " + std::to_string(i) + " and the index disagree");
      if (each.state == slot_state::ready && eviction_.is_candidate(policy_slot(slot)) != can_leave)
        found.push_back(who + ": slot " + std::to_string(i) + " has " + std::to_string(each.pins) +
                        " pins, and the policy disagrees");
      if (each.state == slot_state::free && each.pins != 0)
        found.push_back(who + ": slot " + std::to_string(i) + " is free and pinned");
    }
    if (free_ones != free_count_ || candidates != candidates_ || live != index_.size())
      found.push_back(who + ": counts " + std::to_string(free_count_) + " free slots, " +
                      std::to_string(candidates_) + " that can leave and " + std::to_string(index_.size()) +
                      " held; there are " + std::to_string(free_ones) + ", " + std::to_string(candidates) +
                      " and " + std::to_string(live));
    return found;
  }

 private:
  enum class slot_state : std::uint8_t { free, filling, ready, doomed, reserved };
  struct entry {
    parent_digest parent = parent_digest::unknown;
    std::uint32_t checksum = 0;
    std::uint32_t stored = 0;  // bytes of the stored form, in a tier with a codec
    std::uint32_t pins = 0;
    std::uint32_t uses = 0;
    std::uint32_t loads = 0;
    slot_state state = slot_state::free;
    bool has_sum = false;  // whether `checksum` is that of the contents, in memory without a codec
  };

  [[nodiscard]] entry& at(slot_id slot) noexcept { return entries_[to_index(slot)]; }
  [[nodiscard]] const entry& at(slot_id slot) const noexcept { return entries_[to_index(slot)]; }
  [[nodiscard]] static block_id block_of(slot_id slot) noexcept { return block_id{to_index(slot) + 1}; }
  [[nodiscard]] static slot_id policy_slot(slot_id slot) noexcept { return slot; }
  [[nodiscard]] access_hint hint_of([[maybe_unused]] slot_id slot) const noexcept {
    access_hint hint;
    if constexpr (!ignores_hints<Eviction>) hint.content = key(slot).low | 1U;
    return hint;
  }
  void forget_key(slot_id slot) noexcept {
    if (watcher_.left != nullptr) watcher_.left(watcher_.context, key(slot));
    index_.erase(block_of(slot));
    ++changes_;
  }
  void doom(slot_id slot) noexcept {
    forget_key(slot);
    at(slot).state = slot_state::doomed;
  }
  void make_free(slot_id slot) noexcept {
    at(slot) = {};
    free_[free_count_++] = to_index(slot);
  }

  prefix_index index_;  // slot i is block i + 1
  fixed_array<entry> entries_;
  fixed_array<std::uint32_t> free_;  // a stack
  Eviction eviction_;
  std::uint64_t free_count_;
  std::uint64_t candidates_ = 0;
  std::uint64_t reserved_ = 0;
  std::uint64_t evictions_ = 0;
  std::uint64_t changes_ = 0;
  offload::leave_watcher watcher_{};
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
