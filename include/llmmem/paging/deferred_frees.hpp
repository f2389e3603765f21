/// @file
/// Frees that wait for a fence, so that a block returns to the pool only after the kernels that read it.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/paging/errors.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/fence.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

namespace llmmem {
inline namespace v0 {

/// A bounded queue of references, in groups, each of which waits for a fence.
///
/// Until its fence has passed, a group holds its references, so the pool counts the blocks as in use and does
/// not allocate them. Groups leave in order of arrival: pass fences of one stream, or accept that a slow
/// fence delays the groups after it.
///
/// @par Complexity   O(1) per reference; 4 bytes for each of `references`, a fence and 8 bytes for each of
///   `groups`.
/// @par Thread safety   one caller at a time.
/// @par Errors   the constructor throws `length_error` and `out_of_memory`; a full queue is a `failure`.
template <fence Fence>
class deferred_frees {
 public:
  static_assert(std::is_trivially_copyable_v<Fence>,
                "a fence that waits in a queue must be trivially copyable");

  deferred_frees(std::uint64_t references, std::uint64_t groups, const metadata_source& source)
      : references_(references, source, "deferred_frees: references"),
        groups_(groups, group{}, source, "deferred_frees: groups") {}

  /// Queues one reference to each of `blocks`, to be dropped once `after` has passed: all or none. Skips null
  /// blocks.
  result<void> push(std::span<const block_id> blocks, const Fence& after) noexcept {
    return push_parts(std::span(&blocks, 1), after);
  }

  /// Queues the blocks of several spans as one group.
  result<void> push_parts(std::span<const std::span<const block_id>> parts, const Fence& after) noexcept {
    std::uint64_t count = 0;
    for (const auto& part : parts) {
      for (const block_id block : part)
        count += block != null_block ? 1U : 0U;
    }
    if (!fits(count, 1)) return failure{errc::deferred_full, 0, count, free_entries(), "deferred_frees"};
    for (const auto& part : parts) {
      for (const block_id block : part) {
        if (block != null_block) references_[wrap(first_ + held_++, references_.size())] = block;
      }
    }
    groups_[wrap(first_group_ + group_count_++, groups_.size())] = {after, count};
    return {};
  }

  /// Passes the groups whose fences have passed, oldest first, to `release(block_id)`, `noexcept`, the last
  /// block of each group first; stops at the first fence that has not passed. Returns the number of
  /// references dropped.
  template <class Release>
  std::uint64_t collect(Release&& release) noexcept {
    std::uint64_t gone = 0;
    while (group_count_ != 0 && groups_[first_group_].after.ready()) {
      const std::uint64_t count = groups_[first_group_].count;
      for (std::uint64_t i = count; i > 0; --i)
        release(references_[wrap(first_ + i - 1, references_.size())]);
      first_ = wrap(first_ + count, references_.size());
      held_ -= count;
      gone += count;
      first_group_ = wrap(first_group_ + 1, groups_.size());
      --group_count_;
    }
    return gone;
  }

  /// Calls `visit(block_id)` for each reference that is still held.
  template <class Visit>
  void for_each(Visit&& visit) const {
    for (std::uint64_t i = 0; i < held_; ++i)
      visit(references_[wrap(first_ + i, references_.size())]);
  }

  /// Calls `change(block_id&)` for each reference that is still held.
  template <class Change>
  void each_block(Change&& change) noexcept {
    for (std::uint64_t i = 0; i < held_; ++i)
      change(references_[wrap(first_ + i, references_.size())]);
  }

  /// The number of references that `push` could accept now.
  [[nodiscard]] std::uint64_t free_entries() const noexcept {
    return group_count_ == groups_.size() ? 0 : references_.size() - held_;
  }
  [[nodiscard, deprecated("call free_entries()")]] std::uint64_t room() const noexcept {
    return free_entries();
  }
  /// Whether `groups` pushes with `references` references in total could be accepted now.
  [[nodiscard]] bool fits(std::uint64_t references, std::uint64_t groups) const noexcept {
    return references <= references_.size() - held_ && groups <= groups_.size() - group_count_;
  }
  /// References still held.
  [[nodiscard]] std::uint64_t held() const noexcept { return held_; }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return references_.bytes() + groups_.bytes(); }

 private:
  struct group {
    Fence after{};
    std::uint64_t count = 0;
  };

  [[nodiscard]] static std::uint64_t wrap(std::uint64_t i, std::uint64_t size) noexcept {
    return i < size ? i : i - size;
  }

  detail::fixed_array<block_id> references_;  // both are rings
  detail::fixed_array<group> groups_;
  std::uint64_t first_ = 0;
  std::uint64_t held_ = 0;
  std::uint64_t first_group_ = 0;
  std::uint64_t group_count_ = 0;
};

}  // namespace v0
}  // namespace llmmem
