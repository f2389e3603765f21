/// @file
/// `dirty_ranges`: the bytes of a copy that are newer than those of the copy below it.
#pragma once

#include <llmmem/config.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

/// Bytes `[begin, end)`.
struct byte_interval {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;

  friend constexpr bool operator==(const byte_interval&, const byte_interval&) noexcept = default;
};

/// A set of bytes in at most `capacity` intervals, in order, with gaps between. It is exact while these
/// suffice; then it closes the smallest gap, so it may contain bytes that were not added, but misses none.
///
/// @par Complexity      `add` O(capacity), everything else O(1).
/// @par Thread safety   as a plain value.
class dirty_ranges {
 public:
  static constexpr std::size_t capacity = 8;

  /// Adds `[begin, end)`; does nothing if the interval is empty.
  constexpr void add(byte_interval more) noexcept {
    if (more.begin >= more.end) return;
    for (const byte_interval& each : intervals()) {
      if (each.begin <= more.begin && more.end <= each.end) return;
    }
    std::size_t kept = 0;
    std::array<byte_interval, capacity + 1> merged{};
    bool placed = false;
    for (std::size_t i = 0; i < count_; ++i) {
      const byte_interval each = intervals_[i];
      if (each.end < more.begin) {
        merged[kept++] = each;
      } else if (more.end < each.begin) {
        if (!placed) merged[kept++] = more;
        placed = true;
        merged[kept++] = each;
      } else {
        more = {each.begin < more.begin ? each.begin : more.begin, each.end > more.end ? each.end : more.end};
      }
    }
    if (!placed) merged[kept++] = more;
    if (kept > capacity) close_smallest_gap(merged, kept);
    for (std::size_t i = 0; i < kept; ++i)
      intervals_[i] = merged[i];
    count_ = static_cast<std::uint8_t>(kept);
  }

  /// Adds all of `other`.
  constexpr void add(const dirty_ranges& other) noexcept {
    for (const byte_interval& each : other.intervals())
      add(each);
  }

  constexpr void clear() noexcept { count_ = 0; }

  [[nodiscard]] constexpr bool empty() const noexcept { return count_ == 0; }
  [[nodiscard]] constexpr std::span<const byte_interval> intervals() const noexcept LLMMEM_LIFETIMEBOUND {
    return {intervals_.data(), count_};
  }
  /// Returns the number of bytes.
  [[nodiscard]] constexpr std::uint64_t bytes() const noexcept {
    std::uint64_t sum = 0;
    for (const byte_interval& each : intervals())
      sum += each.end - each.begin;
    return sum;
  }

  /// Returns the same set with each interval extended to multiples of `unit` and cut at `most`.
  [[nodiscard]] constexpr dirty_ranges aligned(std::uint64_t unit, std::uint64_t most) const noexcept {
    dirty_ranges grown;
    for (const byte_interval& each : intervals()) {
      const std::uint64_t end = (each.end + unit - 1) / unit * unit;
      grown.add({each.begin / unit * unit, end < most ? end : most});
    }
    return grown;
  }

 private:
  static constexpr void close_smallest_gap(std::array<byte_interval, capacity + 1>& intervals,
                                           std::size_t& count) noexcept {
    std::size_t best = 0;
    const auto gap = [&](std::size_t i) { return intervals[i + 1].begin - intervals[i].end; };
    for (std::size_t i = 1; i + 1 < count; ++i) {
      if (gap(i) < gap(best)) best = i;
    }
    intervals[best].end = intervals[best + 1].end;
    for (std::size_t i = best + 1; i + 1 < count; ++i)
      intervals[i] = intervals[i + 1];
    --count;
  }

  std::array<byte_interval, capacity> intervals_{};
  std::uint8_t count_ = 0;
};

}  // namespace v0
}  // namespace llmmem
