/// @file
/// Ranges stitched from runs of chunks: live, or kept for the next request of their length.
#pragma once

#include <llmmem/arena/detail/chunk_runs.hpp>
#include <llmmem/config.hpp>
#include <llmmem/detail/handle_table.hpp>
#include <llmmem/detail/ordered_slots.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/space/virtual_range.hpp>

#include <compare>
#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The bookkeeping of stitched ranges: the runs in each, the idle ranges, and the least recently used idle
/// range. Independent of memory.
///
/// @par Complexity   O(log n), and O(its runs) to record or forget a range.
class stitched_ranges {
 public:
  static constexpr std::uint32_t none = no_index;

  enum class condition : std::uint8_t {
    building,  ///< runs are being added
    live,      ///< belongs to an allocation
    idle,      ///< kept for a request of its length; other allocations may use its chunks
    broken,    ///< could neither be finished nor taken apart; to be taken apart later
  };

  struct stitched {
    virtual_range range{};
    std::uint32_t first_part = none;
    std::uint32_t last_part = none;
    std::uint32_t chunks = 0;
    condition now = condition::building;
  };
  struct part {
    run_of_chunks run{};
    std::uint32_t next = none;
  };

  stitched_ranges(std::uint64_t ranges, std::uint64_t parts, const metadata_source& source, const char* what)
      : ranges_(ranges, source, what),
        parts_(parts, source, what),
        by_chunks_(ranges, source, what),
        by_use_(ranges, source, what) {}

  /// Begins a range without runs; returns `none` if the table is full.
  [[nodiscard]] std::uint32_t begin() noexcept { return ranges_.acquire({}); }

  /// Adds a run at the range's end. Returns false if the table of parts is full.
  [[nodiscard]] bool append(std::uint32_t slot, const run_of_chunks& run) noexcept {
    const std::uint32_t at = parts_.acquire({.run = run});
    if (at == none) return false;
    stitched& s = ranges_[slot];
    (s.last_part == none ? s.first_part : parts_[s.last_part].next) = at;
    s.last_part = at;
    s.chunks += run.count;
    return true;
  }

  void set_range(std::uint32_t slot, const virtual_range& range) noexcept { ranges_[slot].range = range; }

  /// Changes the condition of a range.
  void set(std::uint32_t slot, condition now) noexcept {
    stitched& s = ranges_[slot];
    if (s.now == condition::idle) {
      by_chunks_.erase(slot);
      by_use_.erase(slot);
    }
    if (now == condition::idle) {
      by_chunks_.insert(slot, {s.chunks, slot});
      by_use_.insert(slot, ++clock_);
    }
    broken_ += now == condition::broken ? 1U : 0U;
    broken_ -= s.now == condition::broken ? 1U : 0U;
    s.now = now;
  }

  /// Forgets a range. @pre it is building or broken.
  void end(std::uint32_t slot) noexcept {
    for (std::uint32_t at = ranges_[slot].first_part; at != none;) {
      const std::uint32_t following = parts_[at].next;
      parts_.release(at);
      at = following;
    }
    if (ranges_[slot].now == condition::broken) --broken_;
    ranges_.release(slot);
  }

  /// Returns an idle range of exactly `chunks` chunks that are all free: the first one made; `none` if there
  /// is none.
  [[nodiscard]] std::uint32_t fitting(std::uint32_t chunks, const chunk_runs& of) const noexcept {
    for (std::uint32_t at = by_chunks_.at_least({chunks, 0}); at != none; at = by_chunks_.next(at)) {
      if (ranges_[at].chunks != chunks) return none;
      bool free = true;
      each_part(at, [&](const run_of_chunks& run) { free = free && of.all_free(run); });
      if (free) return at;
    }
    return none;
  }

  /// Returns the least recently used idle range.
  [[nodiscard]] std::uint32_t oldest() const noexcept { return by_use_.first(); }

  template <class Visit>
  void each_part(std::uint32_t slot, Visit visit) const {
    for (std::uint32_t at = ranges_[slot].first_part; at != none; at = parts_[at].next)
      visit(parts_[at].run);
  }
  template <class Visit>
  void each(Visit visit) const {
    for (std::uint32_t slot = 0; slot < ranges_.touched(); ++slot) {
      if (ranges_.is_live(slot)) visit(slot, ranges_[slot]);
    }
  }

  [[nodiscard]] const stitched& operator[](std::uint32_t slot) const noexcept { return ranges_[slot]; }
  [[nodiscard]] std::uint64_t size() const noexcept { return ranges_.live(); }
  [[nodiscard]] std::uint64_t idle() const noexcept { return by_use_.size(); }
  [[nodiscard]] std::uint64_t broken() const noexcept { return broken_; }
  [[nodiscard]] std::size_t bytes() const noexcept {
    return ranges_.bytes() + parts_.bytes() + by_chunks_.bytes() + by_use_.bytes();
  }

 private:
  struct handle {
    std::uint32_t slot = 0;
    std::uint32_t generation = 0;
    std::uint32_t owner = 0;
  };
  struct length {
    std::uint32_t chunks = 0;
    std::uint32_t slot = 0;

    friend constexpr auto operator<=>(const length&, const length&) noexcept = default;
  };

  handle_table<handle, stitched> ranges_;
  handle_table<handle, part> parts_;
  ordered_slots<length> by_chunks_;      // of idle ranges
  ordered_slots<std::uint64_t> by_use_;  // of idle ranges
  std::uint64_t clock_ = 0;
  std::uint64_t broken_ = 0;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
