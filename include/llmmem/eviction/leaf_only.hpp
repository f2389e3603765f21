/// @file
/// Eviction that drops the ends of prefixes before the blocks before them.
#pragma once

#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/eviction/concepts.hpp>
#include <llmmem/eviction/detail/slot_list.hpp>
#include <llmmem/eviction/lru.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace llmmem {
inline namespace v0 {

/// Evicts the first entry in a `Policy`'s order among leaves: entries without cached children.
///
/// An entry's parent is `access_hint::parent` of its insert: the entry that holds the contents before it.
/// After a parent is dropped, no lookup can hit the blocks cached after it; so a parent stays until its last
/// child has left. An LRU over chains that are freed tail first already has leaves first, and gains nothing;
/// FIFO, LFU, S3-FIFO and priorities gain.
///
/// An entry with children that becomes the policy's first is set aside: the policy sees it as pinned, and as
/// unpinned when it becomes a leaf. A policy that ranks by arrival, uses or worth then has it first again. A
/// policy that ranks by the moment of the unpin sees it as just used; with LRU this is rare, because it needs
/// a child that was unpinned after its parent. If all candidates have children, which are then in use, the
/// candidate set aside first is evicted. From then on its children count as roots, like entries whose parent
/// was unknown at their insert. If a parent's slot received other contents before the child's insert, the new
/// entry counts as the parent, which affects only the order.
///
/// @par Complexity   in addition to the policy: O(1), and a pin and an unpin of the policy for each entry set
///      aside: amortised at most one for each unpin and each eviction; in one operation, as many as there are
///      parents at the front of the order. 24 bytes a slot in addition to the policy's, allocated once in the
///      constructor.
/// @par Thread safety   one writer at a time; const calls may run together.
/// @par Errors   the constructor's, see `eviction_policy`, and the policy's; nothing else fails.
template <eviction_policy Policy = lru_eviction>
class leaf_only {
 public:
  explicit leaf_only(slot_count capacity, const metadata_source& source = {})
      : policy_(capacity, source),
        links_(to_number(capacity), link{}, source, "leaf_only"),
        aside_(capacity, source, "leaf_only") {}

  void insert(slot_id slot, const access_hint& hint = {}) noexcept {
    policy_.insert(slot, hint);
    link& at = links_[to_index(slot)];
    at = {.generation = at.generation + 1};
    const std::uint32_t parent = to_index(hint.parent);
    if (parent < links_.size() && parent != to_index(slot) && is_known(links_[parent])) {
      at.parent = parent;
      at.parent_generation = links_[parent].generation;
      ++links_[parent].children;
    }
    settle();
  }

  void touch(slot_id slot, const access_hint& hint = {}) noexcept {
    policy_.touch(slot, hint);
    settle();
  }

  void pin(slot_id slot) noexcept {
    if (aside_.contains(slot)) {
      aside_.remove(slot);
    } else {
      policy_.pin(slot);
      settle();
    }
  }

  void unpin(slot_id slot) noexcept {
    policy_.unpin(slot);
    settle();
  }

  void erase(slot_id slot) noexcept {
    policy_.erase(slot);
    leave(slot);
  }
  void evict(slot_id slot) noexcept {
    detail::evict(policy_, slot);
    leave(slot);
  }

  void expect(slot_id slot, std::uint64_t next_use) noexcept
    requires expects_uses<Policy>
  {
    policy_.expect(slot, next_use);
    settle();
  }
  void advance(std::uint64_t now) noexcept
    requires keeps_time<Policy>
  {
    policy_.advance(now);
    settle();
  }
  void retain(slot_id slot, retention keep) noexcept
    requires retains<Policy>
  {
    policy_.retain(slot, keep);
    settle();
  }

  [[nodiscard]] std::optional<slot_id> victim() const noexcept {
    const auto leaf = policy_.victim();
    return leaf ? leaf : aside_.front();
  }
  [[nodiscard]] bool is_candidate(slot_id slot) const noexcept {
    return policy_.is_candidate(slot) || aside_.contains(slot);
  }
  [[nodiscard]] slot_count capacity() const noexcept { return policy_.capacity(); }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept {
    return policy_.metadata_bytes() + links_.bytes() + aside_.bytes();
  }

  [[nodiscard]] const Policy& policy() const noexcept { return policy_; }

 private:
  static constexpr std::uint32_t none = to_index(no_slot);

  struct link {
    std::uint32_t generation = 0;  // rises when an entry comes and when it leaves: odd while known
    std::uint32_t children = 0;
    std::uint32_t parent = none;
    std::uint32_t parent_generation = 0;  // of the parent at the insert: later contents of its slot are no
                                          // parent
  };

  [[nodiscard]] static bool is_known(const link& at) noexcept { return at.generation % 2 == 1; }

  /// Sets parents aside until the policy's first candidate is a leaf.
  void settle() noexcept {
    for (auto first = policy_.victim(); first && links_[to_index(*first)].children != 0;
         first = policy_.victim()) {
      policy_.pin(*first);
      aside_.push_back(*first);
    }
  }

  void leave(slot_id slot) noexcept {
    aside_.remove(slot);
    link& at = links_[to_index(slot)];
    if (!is_known(at)) return;
    const link was = at;
    at = {.generation = was.generation + 1};
    if (was.parent != none && links_[was.parent].generation == was.parent_generation) {
      const slot_id parent{was.parent};
      if (--links_[was.parent].children == 0 && aside_.contains(parent)) {
        aside_.remove(parent);
        policy_.unpin(parent);
      }
    }
    settle();
  }

  Policy policy_;
  detail::fixed_array<link> links_;
  detail::slot_list aside_;  // candidates with children that were the policy's first, in that order
};

static_assert(eviction_policy<leaf_only<>> && remembers_evictions<leaf_only<>>);

}  // namespace v0
}  // namespace llmmem
