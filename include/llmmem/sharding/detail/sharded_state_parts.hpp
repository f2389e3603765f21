/// @file
/// The parts of a `sharded_state`: a range it owns, bytes in several places as one stream, a set of elements
/// less another.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>
#include <llmmem/sharding/element_runs.hpp>
#include <llmmem/space/concepts.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Bytes alive and their maximum, counted from any thread.
struct live_bytes {
  std::atomic<std::uint64_t> now{0};
  std::atomic<std::uint64_t> peak{0};

  void add(std::uint64_t bytes) noexcept {
    const std::uint64_t is = now.fetch_add(bytes, std::memory_order_relaxed) + bytes;
    std::uint64_t most = peak.load(std::memory_order_relaxed);
    while (is > most && !peak.compare_exchange_weak(most, is, std::memory_order_relaxed)) {
    }
  }
  void remove(std::uint64_t bytes) noexcept { now.fetch_sub(bytes, std::memory_order_relaxed); }
};

/// The owner of a range from `try_allocate`, or of none. It returns a shortage as a value.
template <memory_space Space>
class held_range {
 public:
  held_range() noexcept = default;
  held_range(held_range&& other) noexcept
      : space_(std::exchange(other.space_, nullptr)),
        range_(std::exchange(other.range_, {})),
        bytes_(std::exchange(other.bytes_, 0)),
        counted_(std::exchange(other.counted_, nullptr)) {}
  held_range& operator=(held_range&& other) noexcept {
    if (this != &other) {
      reset();
      space_ = std::exchange(other.space_, nullptr);
      range_ = std::exchange(other.range_, {});
      bytes_ = std::exchange(other.bytes_, 0);
      counted_ = std::exchange(other.counted_, nullptr);
    }
    return *this;
  }
  ~held_range() { reset(); }

  /// Allocates `bytes` bytes, with unspecified contents, after it frees its earlier range; 0 bytes allocate
  /// nothing.
  /// @param counted  counts them while they are held, or null.
  [[nodiscard]] result<void> take(Space& space, std::uint64_t bytes, std::uint64_t alignment,
                                  live_bytes* counted = nullptr) noexcept {
    reset();
    if (bytes == 0) return {};
    const auto range = space.try_allocate(bytes, alignment);
    if (!range) return range.error();
    space_ = &space;
    range_ = *range;
    bytes_ = bytes;
    counted_ = counted;
    if (counted_ != nullptr) counted_->add(bytes_);
    return {};
  }
  void reset() noexcept {
    if (space_ != nullptr) std::exchange(space_, nullptr)->deallocate(range_);
    if (counted_ != nullptr) std::exchange(counted_, nullptr)->remove(bytes_);
    range_ = {};
    bytes_ = 0;
  }
  [[nodiscard]] std::byte* data() const noexcept { return range_.data; }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }

 private:
  Space* space_ = nullptr;
  typename Space::range_type range_{};
  std::uint64_t bytes_ = 0;
  live_bytes* counted_ = nullptr;
};

/// Returns the first multiple of `of` that is not below `bytes`. @throws length_error past 2^63 - 1, of
/// `name`.
[[nodiscard]] inline std::uint64_t next_multiple(std::uint64_t bytes, std::uint64_t of, const char* name) {
  return bytes % of == 0 ? bytes : checked_add(bytes, of - bytes % of, name);
}

/// Bytes in several places, as one stream. Adjacent ones are one part.
class scattered_bytes {
 public:
  void clear() noexcept {
    parts_.clear();
    bytes_ = 0;
  }
  void add(std::byte* at, std::uint64_t bytes) {
    if (bytes == 0) return;
    if (!parts_.empty() && parts_.back().at + parts_.back().bytes == at) {
      parts_.back().bytes += bytes;
    } else {
      parts_.push_back({at, bytes, bytes_});
    }
    bytes_ += bytes;
  }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
  /// Returns how many of the `most` bytes from `from` on exist.
  [[nodiscard]] std::uint64_t left(std::uint64_t from, std::uint64_t most) const noexcept {
    if (from >= bytes_) return 0;
    return bytes_ - from < most ? bytes_ - from : most;
  }

  /// Returns where bytes `from` to `from + count` are, if they are contiguous; else null. @pre these bytes
  /// exist, and `count` is not 0
  [[nodiscard]] std::byte* together(std::uint64_t from, std::uint64_t count) const noexcept {
    const part& it = parts_[part_of(from)];
    const std::uint64_t skipped = from - it.before;
    return count <= it.bytes - skipped ? it.at + skipped : nullptr;
  }
  /// Calls `visit(address, bytes)` for the places of bytes `from` to `from + count`, in order.
  template <class Visit>
  void each_part(std::uint64_t from, std::uint64_t count, Visit visit) const {
    if (count == 0) return;
    for (std::size_t i = part_of(from); count != 0; ++i) {
      const std::uint64_t skipped = from - parts_[i].before;
      const std::uint64_t some = parts_[i].bytes - skipped < count ? parts_[i].bytes - skipped : count;
      visit(parts_[i].at + skipped, some);
      from += some;
      count -= some;
    }
  }
  void copy_to(std::byte* to, std::uint64_t from, std::uint64_t count) const noexcept {
    each_part(from, count, [&](std::byte* at, std::uint64_t bytes) {
      std::memcpy(to, at, bytes);
      to += bytes;
    });
  }
  void copy_from(const std::byte* source, std::uint64_t from, std::uint64_t count) const noexcept {
    each_part(from, count, [&](std::byte* at, std::uint64_t bytes) {
      std::memcpy(at, source, bytes);
      source += bytes;
    });
  }

 private:
  struct part {
    std::byte* at = nullptr;
    std::uint64_t bytes = 0;
    std::uint64_t before = 0;  // bytes before it in the stream
  };

  /// Returns the part with byte `from`.
  [[nodiscard]] std::size_t part_of(std::uint64_t from) const noexcept {
    std::size_t low = 0;
    for (std::size_t high = parts_.size(); high - low > 1;) {
      const std::size_t middle = low + (high - low) / 2;
      (parts_[middle].before <= from ? low : high) = middle;
    }
    return low;
  }

  std::vector<part> parts_{};
  std::uint64_t bytes_ = 0;
};

/// Calls `visit(element, count)` for each range of `set` that is not in `less`, in increasing order.
///
/// @par Complexity   as `intersect`, and O(1) for each run of `set`.
template <class Visit>
constexpr void without(const element_runs& set, const element_runs& less, Visit&& visit) {
  std::uint64_t run = 0;
  std::uint64_t next = set.begin;  // the first element that was neither visited nor passed over
  const auto visit_up_to = [&](std::uint64_t limit) {
    for (; run < set.count; ++run) {
      const std::uint64_t begin = set.begin + run * set.stride;
      const std::uint64_t end = begin + set.run;
      if (next < begin) next = begin;
      if (limit <= next) return;
      const std::uint64_t last = limit < end ? limit : end;
      if (next < last) visit(next, last - next);
      if (next < last) next = last;
      if (limit < end) return;
    }
  };
  intersect(set, less, [&](std::uint64_t first, std::uint64_t count) {
    visit_up_to(first);
    next = first + count;
  });
  visit_up_to(set.end());
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
