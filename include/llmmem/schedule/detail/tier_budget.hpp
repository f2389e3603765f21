/// @file
/// The bytes taken in a tier, now and at times that are already decided. Private to schedule/.
#pragma once

#include <llmmem/config.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// A time that is not yet known.
inline constexpr std::uint64_t unresolved = ~std::uint64_t{0};

/// The bytes of a tier over time: those taken now, and every decided start and end of a copy. All changes of
/// one instant happen together.
class tier_budget {
 public:
  explicit tier_budget(std::uint64_t budget) noexcept : budget_(budget) {}

  /// Returns the earliest time from `from` on after which `bytes` more always fit; `unresolved` if the
  /// decided changes leave no such time.
  [[nodiscard]] std::uint64_t earliest(std::uint64_t from, std::uint64_t bytes) const noexcept {
    if (!fits(bytes)) return unresolved;
    std::uint64_t taken = last_;
    for (std::size_t i = changes_.size(); i != first_ && changes_[i - 1].time > from;) {
      --i;
      taken = changes_[i].takes ? taken - changes_[i].bytes : taken + changes_[i].bytes;
      const bool instant = i != first_ && changes_[i - 1].time == changes_[i].time;
      if (!instant && (taken > budget_ || bytes > budget_ - taken)) return changes_[i].time;
    }
    return from;
  }
  /// Returns whether `bytes` more fit when all decided changes have happened.
  [[nodiscard]] bool fits(std::uint64_t bytes) const noexcept {
    return last_ <= budget_ && bytes <= budget_ - last_;
  }
  /// Returns by how much `bytes` more would exceed the budget then.
  [[nodiscard]] std::uint64_t lacks(std::uint64_t bytes) const noexcept {
    return fits(bytes) ? 0 : last_ + bytes - budget_;
  }

  /// @pre `earliest(time, bytes) == time`.
  void take(std::uint64_t time, std::uint64_t bytes) {
    last_ += bytes;
    insert({time, bytes, true});
  }
  void give(std::uint64_t time, std::uint64_t bytes) {
    last_ -= bytes;
    insert({time, bytes, false});
  }

  /// Advances the time to `now`, and drops earlier changes.
  void advance(std::uint64_t now) noexcept {
    while (first_ != changes_.size() && changes_[first_].time <= now) {
      const change& each = changes_[first_++];
      taken_ = each.takes ? taken_ + each.bytes : taken_ - each.bytes;
      const bool instant = first_ != changes_.size() && changes_[first_].time == each.time;
      if (!instant) most_ = std::max(most_, taken_);
    }
    if (first_ == changes_.size()) {
      changes_.clear();
      first_ = 0;
    }
  }

  [[nodiscard]] std::uint64_t most() const noexcept { return most_; }
  [[nodiscard]] std::uint64_t budget() const noexcept { return budget_; }

 private:
  struct change {
    std::uint64_t time;
    std::uint64_t bytes;
    bool takes;
  };

  void insert(const change& made) {
    if (first_ > 64 && first_ * 2 > changes_.size()) {
      changes_.erase(changes_.begin(), changes_.begin() + static_cast<std::ptrdiff_t>(first_));
      first_ = 0;
    }
    changes_.push_back(made);
    for (std::size_t i = changes_.size() - 1; i > first_; --i) {
      const change& before = changes_[i - 1];
      if (before.time <= made.time) break;
      std::swap(changes_[i - 1], changes_[i]);
    }
  }

  std::uint64_t budget_;
  std::uint64_t taken_ = 0;  // now
  std::uint64_t last_ = 0;   // when all changes have happened
  std::uint64_t most_ = 0;
  std::vector<change> changes_;
  std::size_t first_ = 0;  // index of the next change
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
