/// @file
/// The real fences that a journaled cache's recorded fences represent. Private to paging/.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/space/fence.hpp>

#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// A ring of fences, oldest first. Each has a point; points pass in order.
template <fence Fence>
class journal_fences {
 public:
  static_assert(std::is_trivially_copyable_v<Fence>,
                "a fence that waits in a ring must be trivially copyable");

  /// @param most  fences that may wait at once: for `wait_for`, the groups that a `deferred_frees` holds.
  journal_fences(std::uint64_t most, const metadata_source& source)
      : ring_(most, entry{}, source, "journaled: fences"), passed_(1, 0, source, "journaled: passed") {}

  /// The last point that has passed; its address stays the same when this object moves.
  [[nodiscard]] const std::uint64_t* passed() const noexcept { return passed_.data(); }

  /// Returns the point of the next fence.
  [[nodiscard]] std::uint64_t issue() noexcept { return ++issued_; }

  /// Stores the fence of `point`, for which blocks now wait.
  void wait_for(const Fence& after, std::uint64_t point) noexcept {
    ring_[(first_ + count_++) % ring_.size()] = {after, point};
  }

  /// Returns the point of `after` for a cache that may keep it: one that has passed if the fence has, that of
  /// the newest fence if it is the same fence, otherwise the next one; nothing if too many fences wait.
  [[nodiscard]] std::optional<std::uint64_t> keep(const Fence& after) noexcept {
    if (after.ready()) return passed_[0];
    if (count_ != 0) {
      const entry& newest = ring_[(first_ + count_ - 1) % ring_.size()];
      if (std::memcmp(&newest.after, &after, sizeof(Fence)) == 0) return newest.point;
    }
    if (count_ == ring_.size()) return std::nullopt;
    wait_for(after, issue());
    return issued_;
  }

  /// Checks the fences, oldest first; returns whether any has passed.
  bool poll() noexcept {
    const std::uint64_t before = passed_[0];
    for (; count_ != 0 && ring_[first_].after.ready(); --count_) {
      passed_[0] = ring_[first_].point;
      first_ = (first_ + 1) % ring_.size();
    }
    return passed_[0] != before;
  }

 private:
  struct entry {
    Fence after{};
    std::uint64_t point = 0;
  };

  fixed_array<entry> ring_;
  fixed_array<std::uint64_t> passed_;
  std::uint64_t first_ = 0;
  std::uint64_t count_ = 0;
  std::uint64_t issued_ = 0;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
