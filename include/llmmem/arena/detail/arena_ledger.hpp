/// @file
/// The common part of all arenas: checks of sizes, counters, and the texts of an audit.
#pragma once

#include <llmmem/arena/arena.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/errors.hpp>
#include <llmmem/space/virtual_range.hpp>

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Counts an arena's allocations.
class arena_ledger {
 public:
  explicit arena_ledger(std::string name) : name_(std::move(name)) {}

  [[nodiscard]] const char* name() const noexcept { return name_.c_str(); }

  [[nodiscard]] failure refuse(failure why) noexcept {
    ++stats_.refusals;
    why.where = name_.c_str();
    return why;
  }

  /// Checks whether an allocation of `bytes` is possible at all; `errc::ok` if so.
  [[nodiscard]] static failure check_size(std::uint64_t bytes) noexcept {
    if (bytes == 0) return {.code = errc::zero_bytes};
    if (bytes > max_arena_bytes) {
      return {.code = errc::past_the_bytes, .wanted = bytes, .found = max_arena_bytes};
    }
    return {};
  }

  void given(std::uint64_t requested, std::uint64_t granted) noexcept {
    ++stats_.live;
    ++stats_.allocations;
    raise(stats_.requested, stats_.peak_requested, requested);
    raise(stats_.granted, stats_.peak_granted, granted);
  }
  void taken_back(std::uint64_t requested, std::uint64_t granted) noexcept {
    --stats_.live;
    stats_.requested -= requested;
    stats_.granted -= granted;
  }
  void reserved_more(std::uint64_t bytes) noexcept { raise(stats_.reserved, stats_.peak_reserved, bytes); }
  void reserved_less(std::uint64_t bytes) noexcept { stats_.reserved -= bytes; }

  [[nodiscard]] const arena_stats& stats() const noexcept { return stats_; }

  /// Compares the sums of an audit with the counters.
  void audit_sums(std::vector<std::string>& found, std::uint64_t live, std::uint64_t requested,
                  std::uint64_t granted, std::uint64_t reserved) const {
    const auto sum = [&](const char* what, std::uint64_t counted, std::uint64_t added) {
      if (counted == added) return;
      found.push_back(name_ + ": " + what + " is counted as " + std::to_string(counted) + ", it adds up to " +
                      std::to_string(added));
    };
    sum("live", stats_.live, live);
    sum("requested", stats_.requested, requested);
    sum("granted", stats_.granted, granted);
    sum("reserved", stats_.reserved, reserved);
  }

 private:
  static void raise(std::uint64_t& now, std::uint64_t& peak, std::uint64_t by) noexcept {
    now += by;
    if (now > peak) peak = now;
  }

  std::string name_;
  arena_stats stats_;
};

/// Addresses backed by one piece of physical memory, like those from `cudaMalloc`.
struct arena_segment {
  virtual_range range{};
  std::uint64_t bytes = 0;
};

/// Makes a segment of `bytes`, a multiple of the granularity. A refusal changes nothing.
template <virtual_memory Memory>
[[nodiscard]] result<arena_segment> take_segment(Memory& memory, std::uint64_t bytes) noexcept {
  const result<virtual_range> range = memory.try_reserve(bytes);
  if (!range) return range.error();
  if (const result<physical_handle> made = commit(memory, *range, 0, bytes); !made) {
    static_cast<void>(memory.release(*range));  // cannot be refused: nothing is mapped there
    return made.error();
  }
  return arena_segment{*range, bytes};
}

/// Frees a segment. After a refusal it still exists.
template <virtual_memory Memory>
[[nodiscard]] result<void> give_segment(Memory& memory, const arena_segment& segment) noexcept {
  if (const result<void> gone = memory.decommit(segment.range, 0, segment.bytes); !gone) return gone;
  static_cast<void>(memory.release(segment.range));
  return {};
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
