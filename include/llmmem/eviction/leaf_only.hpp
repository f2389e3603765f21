/// @file
/// Eviction that drops the ends of prefixes before what they continue.
#pragma once

#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/eviction/concepts.hpp>
#include <llmmem/eviction/detail/slot_list.hpp>
#include <llmmem/eviction/lru.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace llmmem::inline v0 {

/// Lets a `Policy` choose, and evicts a leaf: an entry without cached children.
///
/// An entry's parent is `access_hint::parent` of its insert: the entry that holds the contents before it.
/// Whatever is cached behind a dropped parent can no longer be hit, so when the policy names an entry that
/// has children, the entries behind it go first, leaves first, and it goes last; the policy's own order stays
/// as it is. With an LRU over chains that are freed tail first that order is leaves first already, and this
/// adds nothing; FIFO, LFU and priorities need it.
///
/// An entry counts as in use while one behind it is: the policy sees it pinned, and unpinned in its turn. If
/// nothing else is left, it is evicted all the same, the one that waits longest first, and its children
/// become roots. A parent that is not known at the insert is not counted; one whose slot was given other
/// contents before the insert is taken for the parent, which costs order and nothing else.
///
/// @par Complexity   on top of the policy: insert, pin, unpin O(1) for chains pinned head first and unpinned
///      tail first, else O(entries of the chain before it); erase and evict O(1) and O(children) for an entry
///      that has some; victim follows a chain down from what the policy names, in evictions one after the
///      other each link once: O(1) amortised, O(entries of the chain behind it) at worst. 32 bytes a slot
///      more than the policy, allocated once in the constructor.
/// @par Thread safety   one writer at a time; const calls may run together.
/// @par Errors   the constructor's, see `eviction_policy`, and the policy's; nothing else fails.
template <eviction_policy Policy = lru_eviction>
class leaf_only {
 public:
  explicit leaf_only(slot_count capacity, const metadata_source& source = {})
      : policy_(capacity, source),
        links_(to_number(capacity), link{}, source, "leaf_only"),
        waiting_(capacity, source, "leaf_only") {}

  void insert(slot_id slot, const access_hint& hint = {}) noexcept {
    policy_.insert(slot, hint);
    const std::uint32_t i = to_index(slot);
    links_[i] = {.state = pinned};
    const std::uint32_t parent = to_index(hint.parent);
    if (parent >= links_.size() || parent == i || links_[parent].state == unknown) return;
    links_[i].parent = parent;
    links_[i].next = links_[parent].child;
    if (links_[i].next != none) links_[links_[i].next].previous = i;
    links_[parent].child = i;
    hold_from(parent);
  }

  void touch(slot_id slot, const access_hint& hint = {}) noexcept { policy_.touch(slot, hint); }

  void pin(slot_id slot) noexcept {
    link& at = links_[to_index(slot)];
    if (at.state != idle) return;
    at.state = pinned;
    if (at.held_children != 0) {
      waiting_.remove(slot);
    } else {
      policy_.pin(slot);
      hold_from(at.parent);
    }
  }

  void unpin(slot_id slot) noexcept {
    link& at = links_[to_index(slot)];
    at.state = idle;
    if (at.held_children != 0) {
      waiting_.push_back(slot);
    } else {
      policy_.unpin(slot);
      let_go_from(at.parent);
    }
  }

  void erase(slot_id slot) noexcept {
    leave(slot);
    policy_.erase(slot);
  }
  void evict(slot_id slot) noexcept {
    const auto named = policy_.victim();
    const std::uint32_t parent = links_[to_index(slot)].parent;
    const bool on_the_way = named && *named != slot && victim() == slot;
    leave(slot);
    if (on_the_way) {
      top_ = to_index(*named);
      reached_ = parent;
    }
    detail::evict(policy_, slot);
  }

  void expect(slot_id slot, std::uint64_t next_use) noexcept
    requires expects_uses<Policy>
  {
    policy_.expect(slot, next_use);
  }
  void advance(std::uint64_t now) noexcept
    requires keeps_time<Policy>
  {
    policy_.advance(now);
  }
  void retain(slot_id slot, retention keep) noexcept
    requires retains<Policy>
  {
    policy_.retain(slot, keep);
  }

  [[nodiscard]] std::optional<slot_id> victim() const noexcept {
    const auto named = policy_.victim();
    if (!named) return waiting_.front();
    std::uint32_t leaf = to_index(*named) == top_ ? reached_ : to_index(*named);
    while (links_[leaf].child != none)
      leaf = links_[leaf].child;
    return slot_id{leaf};
  }
  [[nodiscard]] bool is_candidate(slot_id slot) const noexcept {
    return links_[to_index(slot)].state == idle;
  }
  [[nodiscard]] slot_count capacity() const noexcept { return policy_.capacity(); }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept {
    return policy_.metadata_bytes() + links_.bytes() + waiting_.bytes();
  }

  [[nodiscard]] const Policy& policy() const noexcept { return policy_; }

 private:
  static constexpr std::uint32_t none = to_index(no_slot);
  static constexpr std::uint32_t unknown = 0;
  static constexpr std::uint32_t pinned = 1;
  static constexpr std::uint32_t idle = 2;

  struct link {
    std::uint32_t parent = none;
    std::uint32_t child = none;     // the latest
    std::uint32_t next = none;      // among the parent's children
    std::uint32_t previous = none;  // likewise
    std::uint32_t held_children = 0;
    std::uint32_t state = unknown;
  };

  [[nodiscard]] bool is_held(const link& at) const noexcept {
    return at.state == pinned || at.held_children != 0;
  }

  /// A child of `i` has come into use.
  void hold_from(std::uint32_t i) noexcept {
    for (; i != none; i = links_[i].parent) {
      const bool was_held = is_held(links_[i]);
      ++links_[i].held_children;
      if (was_held) return;
      policy_.pin(slot_id{i});
      waiting_.push_back(slot_id{i});
    }
  }

  /// A child of `i` is in use no more.
  void let_go_from(std::uint32_t i) noexcept {
    for (; i != none; i = links_[i].parent) {
      --links_[i].held_children;
      if (is_held(links_[i])) return;
      waiting_.remove(slot_id{i});
      policy_.unpin(slot_id{i});
    }
  }

  void leave(slot_id slot) noexcept {
    const std::uint32_t i = to_index(slot);
    link& at = links_[i];
    if (at.state == unknown) return;
    waiting_.remove(slot);
    if (i == top_ || i == reached_ || at.child != none) top_ = none;
    for (std::uint32_t child = at.child; child != none;) {
      link& orphan = links_[child];
      child = orphan.next;
      orphan.parent = orphan.next = orphan.previous = none;
    }
    if (at.parent != none) {
      (at.previous == none ? links_[at.parent].child : links_[at.previous].next) = at.next;
      if (at.next != none) links_[at.next].previous = at.previous;
      if (is_held(at)) let_go_from(at.parent);
    }
    at = link{};
  }

  Policy policy_;
  detail::fixed_array<link> links_;
  detail::slot_list waiting_;     // unpinned, with something in use behind them
  std::uint32_t top_ = none;      // the entry with children that the policy named of late
  std::uint32_t reached_ = none;  // and the parent of the leaf that was evicted for it
};

static_assert(eviction_policy<leaf_only<>> && remembers_evictions<leaf_only<>>);

}  // namespace llmmem::inline v0
