/// @file
/// Belady's rule on bytes: the basis of a schedule's bounds. Private to schedule/.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/schedule/detail/position_set.hpp>
#include <llmmem/schedule/trace.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Which gaps cost their bytes if they are not kept.
enum class gap_kind : std::uint8_t {
  to_read,         ///< from a release to the next acquire, if it reads; leases take space
  between_writes,  ///< from one acquire that writes to the next such acquire, without a discard between
};

/// The contents of the tiers at the beginning.
enum class beginning : std::uint8_t { empty, free_choice };

/// Sizes of gaps, each of which moves at most once and whole: counts and bytes as sums over ranges of sizes
/// (Fenwick, 1994), because a trace may have as many sizes as chunks.
class gap_sizes {
 public:
  explicit gap_sizes(std::span<const std::uint64_t> chunks) : sizes_(chunks.begin(), chunks.end()) {
    const auto is_larger = [](std::uint64_t a, std::uint64_t b) { return a > b; };
    std::ranges::sort(sizes_, is_larger);
    const auto again = std::ranges::unique(sizes_);
    sizes_.erase(again.begin(), again.end());
    ranks_.reserve(chunks.size());
    for (const std::uint64_t size : chunks)
      ranks_.push_back(
          static_cast<std::size_t>(std::ranges::lower_bound(sizes_, size, is_larger) - sizes_.begin()));
    clear();
  }

  void clear() { sums_.assign(sizes_.size() + 1, {}); }
  /// Adds a gap of a chunk. O(log different sizes).
  void add(chunk_id chunk) noexcept {
    const std::size_t rank = ranks_[to_index(chunk)];
    for (std::size_t at = rank + 1; at < sums_.size(); at += at & (~at + 1)) {
      ++sums_[at].count;
      sums_[at].bytes += sizes_[rank];
    }
  }
  /// Returns the fewest gaps that have `bytes` together, the largest first; more bytes than all have are as
  /// many gaps as there are. O(log different sizes).
  [[nodiscard]] std::uint64_t fewest(std::uint64_t bytes) const noexcept {
    std::uint64_t gaps = 0;
    std::size_t at = 0;
    for (std::size_t step = std::bit_floor(sizes_.size()); step != 0; step /= 2) {
      if (at + step > sizes_.size() || sums_[at + step].bytes > bytes) continue;
      at += step;
      gaps += sums_[at].count;
      bytes -= sums_[at].bytes;
    }
    if (at == sizes_.size()) return gaps;
    return gaps + bytes / sizes_[at] + (bytes % sizes_[at] != 0 ? 1 : 0);
  }

 private:
  struct sum {
    std::uint64_t count = 0;
    std::uint64_t bytes = 0;
  };
  std::vector<std::uint64_t> sizes_;  // different ones, the largest first
  std::vector<std::size_t> ranks_{};  // by chunk
  std::vector<sum> sums_{};
};

/// Visits some iterations event by event. While the open gaps have more bytes than the budget, it gives up
/// bytes of the gap that ends last. A gap is filed under the position of the event that ends it, which is
/// unique.
///
/// @par Complexity   `start` O(events), `advance` O(log events).
class fractional_min {
 public:
  fractional_min(const schedule_trace& trace, std::uint64_t budget, gap_kind kind, std::size_t iterations)
      : trace_(&trace),
        count_(trace.events().size()),
        budget_(budget),
        kind_(kind),
        ends_(count_, never),
        iterations_(iterations),
        filed_(0),
        gaps_(trace.sizes()) {
    std::vector<std::uint64_t> ahead(trace.sizes().size(), never);
    for (std::size_t i = count_ * 2; i-- > 0;) {
      const trace_event& event = trace.events()[i % count_];
      std::uint64_t& next = ahead[to_index(event.chunk)];
      if (i < count_ && opens(event)) ends_[i] = next;
      if (event.call == trace_call::discard) next = never;
      if (event.call != trace_call::acquire) continue;
      if (kind == gap_kind::to_read) next = tiering::reads(event.mode) ? i : never;
      if (kind == gap_kind::between_writes && tiering::writes(event.mode)) next = i;
    }
  }

  /// Begins before event `begin` of the first iteration.
  void start(std::uint64_t begin, beginning how) {
    chunks_.assign(trace_->sizes().size(), {});
    filed_ = position_set((iterations_ + 1) * count_);
    position_ = begin;
    used_ = 0;
    moved_ = 0;
    given_up_ = 0;
    gaps_.clear();
    if (how == beginning::empty) return;
    // The state before, as if everything fitted: the gaps that the previous iteration leaves open.
    const std::uint64_t seen = begin + count_;
    for (std::uint64_t i = begin; i < seen; ++i) {
      const trace_event& event = trace_->events()[i % count_];
      chunk_state& own = chunks_[to_index(event.chunk)];
      if (closes(event))
        own = {.bytes = kind_ == gap_kind::to_read && event.call == trace_call::acquire
                            ? trace_->size(event.chunk)
                            : 0};
      if (!opens(event)) continue;
      const std::uint64_t end = ends_[i % count_];
      own = {};
      if (end != never) own = {.bytes = trace_->size(event.chunk), .end = end + i / count_ * count_ - count_};
    }
    for (chunk_state& each : chunks_) {
      used_ += each.bytes;
      if (each.end != never) filed_.insert(each.end);
    }
    give_up();
    given_up_ = 0;
  }

  /// Returns the bytes of gaps given up since the beginning, including gaps that have not ended.
  [[nodiscard]] std::uint64_t given_up() const noexcept { return given_up_; }

  /// Returns the sizes of the gaps since the beginning that may have moved: those that have ended, or,
  /// between writes, have opened.
  [[nodiscard]] const gap_sizes& gaps() const noexcept { return gaps_; }

  /// Advances over one event. @return the bytes that must have moved since the beginning.
  std::uint64_t advance() {
    const std::uint64_t index = position_ % count_;
    const trace_event& event = trace_->events()[index];
    chunk_state& own = chunks_[to_index(event.chunk)];
    const std::uint64_t size = trace_->size(event.chunk);
    if (closes(event)) {
      const bool wanted = kind_ == gap_kind::to_read
                              ? event.call == trace_call::acquire && tiering::reads(event.mode)
                              : event.call == trace_call::acquire && own.end != never;
      if (wanted) moved_ += size - own.bytes;
      if (wanted && kind_ == gap_kind::to_read) gaps_.add(event.chunk);
      if (own.end != never && own.bytes != 0) filed_.erase(own.end);
      own.end = never;
      hold(own, kind_ == gap_kind::to_read && event.call == trace_call::acquire ? size : 0);
    }
    if (opens(event)) {
      const std::uint64_t end = ends_[index];
      hold(own, end == never ? 0 : size);
      if (end != never) {
        own.end = end + (position_ - index);
        if (kind_ == gap_kind::between_writes) gaps_.add(event.chunk);
        filed_.insert(own.end);
      }
    }
    give_up();
    ++position_;
    return moved_;
  }

 private:
  static constexpr std::uint64_t never = std::numeric_limits<std::uint64_t>::max();
  struct chunk_state {
    std::uint64_t bytes = 0;
    std::uint64_t end = never;  // of the open gap
  };

  [[nodiscard]] bool opens(const trace_event& event) const noexcept {
    return kind_ == gap_kind::to_read ? event.call == trace_call::release
                                      : event.call == trace_call::acquire && tiering::writes(event.mode);
  }
  [[nodiscard]] bool closes(const trace_event& event) const noexcept {
    if (event.call == trace_call::discard) return true;
    return event.call == trace_call::acquire && (kind_ == gap_kind::to_read || tiering::writes(event.mode));
  }
  void hold(chunk_state& own, std::uint64_t bytes) noexcept {
    used_ = used_ - own.bytes + bytes;
    own.bytes = bytes;
  }
  void give_up() noexcept {
    while (used_ > budget_) {
      const std::uint64_t last = filed_.last();
      if (last == position_set::none) return;
      chunk_state& own = chunks_[to_index(trace_->events()[last % count_].chunk)];
      const std::uint64_t bytes = std::min(own.bytes, used_ - budget_);
      hold(own, own.bytes - bytes);
      given_up_ += bytes;
      if (own.bytes == 0) filed_.erase(last);
    }
  }

  const schedule_trace* trace_;
  std::uint64_t count_;
  std::uint64_t budget_;
  gap_kind kind_;
  std::vector<std::uint64_t> ends_;  // by event: position of the event that ends the gap it opens
  std::size_t iterations_;
  std::vector<chunk_state> chunks_;
  position_set filed_;  // gaps that have bytes
  std::uint64_t position_ = 0;
  std::uint64_t used_ = 0;
  std::uint64_t moved_ = 0;
  std::uint64_t given_up_ = 0;
  gap_sizes gaps_;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
