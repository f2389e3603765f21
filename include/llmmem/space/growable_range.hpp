/// @file
/// `growable_range`: a contiguous array that grows and shrinks while its elements stay where they are.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/virtual_range.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// An array of `T` in a virtual memory: addresses for `capacity()` elements are reserved at once, and
/// `resize` adds and removes memory behind them in steps. Pointers to elements stay valid while the elements
/// exist: suitable for the KV cache of one sequence, or a table that grows during a run, instead of copying.
///
/// New elements have the system's contents: zeros on the host, undefined on a device, and the earlier
/// contents if the step was never removed. The memory must outlive the range.
///
/// @par Complexity      O(steps added or removed) mappings.
/// @par Thread safety   none; for the memory, see there.
/// @par Errors          the constructor throws `length_error` and the exception of a refused reservation;
///   nothing else throws.
template <virtual_memory Memory, class T = std::byte>
class growable_range {
 public:
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);

  /// Constructs an empty range that cannot grow.
  growable_range() noexcept = default;

  /// @param capacity    the most elements it will ever hold; only addresses are reserved for them.
  /// @param step_bytes  the unit in which memory is added and removed, rounded up to the granularity; 0: the
  ///   granularity.
  growable_range(Memory& memory, std::uint64_t capacity, std::uint64_t step_bytes = 0) : memory_(&memory) {
    const std::string who(memory.name());
    if (capacity == 0) throw length_error(who + ": growable_range: a capacity of 0 elements");
    const std::uint64_t bytes =
        checked_multiply(capacity, sizeof(T), (who + ": growable_range: elements x bytes").c_str());
    const std::uint64_t unit = memory.granularity();
    const auto rounded = [&](std::uint64_t n, std::uint64_t to) {
      static_cast<void>(checked_add(n, to, (who + ": growable_range: bytes + step").c_str()));
      return round_up_to(to, n);
    };
    step_ = rounded(step_bytes == 0 ? unit : step_bytes, unit);
    range_ = memory.try_reserve(rounded(bytes, step_)).value();
    capacity_ = capacity;
  }

  growable_range(growable_range&& other) noexcept { swap(other); }
  growable_range& operator=(growable_range&& other) noexcept {
    growable_range taken(std::move(other));
    swap(taken);
    return *this;
  }

  ~growable_range() {
    if (memory_ == nullptr) return;
    if (committed_ != 0) static_cast<void>(memory_->decommit(range_, 0, committed_));
    static_cast<void>(memory_->release(range_));  // refused after a refusal above: the memory keeps both
  }

  /// Makes it hold `count` elements: adds missing memory, and removes whole steps that are no longer needed.
  /// A refusal changes nothing. `errc::out_of_range` past the capacity.
  [[nodiscard]] result<void> resize(std::uint64_t count) noexcept {
    if (count > capacity_) {
      return failure{.code = errc::out_of_range,
                     .wanted = count,
                     .found = capacity_,
                     .where = "growable_range: elements"};
    }
    const std::uint64_t wanted = round_up_to(step_, count * sizeof(T));
    if (wanted > committed_) {
      if (const result<void> grown = grow(wanted); !grown) return grown;
    } else if (wanted < committed_) {
      const result<void> gone = memory_->decommit(range_, wanted, committed_ - wanted);
      if (!gone) return gone;
      committed_ = wanted;
    }
    size_ = count;
    return {};
  }

  /// Appends a copy of `value`.
  [[nodiscard]] result<void> push_back(const T& value) noexcept
    requires(Memory::is_host_accessible)
  {
    const T copy = value;  // it may be an element of this range
    if (const result<void> grown = resize(size_ + 1); !grown) return grown;
    data()[size_ - 1] = copy;
    return {};
  }

  [[nodiscard]] T* data() const noexcept { return reinterpret_cast<T*>(range_.data); }
  [[nodiscard]] std::uint64_t size() const noexcept { return size_; }
  [[nodiscard]] bool empty() const noexcept { return size_ == 0; }
  [[nodiscard]] std::uint64_t capacity() const noexcept { return capacity_; }
  /// Bytes of memory behind it now, in whole steps.
  [[nodiscard]] std::uint64_t committed_bytes() const noexcept { return committed_; }
  [[nodiscard]] const virtual_range& range() const noexcept { return range_; }

  [[nodiscard]] T& operator[](std::uint64_t i) const noexcept
    requires(Memory::is_host_accessible)
  {
    return data()[i];
  }
  [[nodiscard]] T* begin() const noexcept
    requires(Memory::is_host_accessible)
  {
    return data();
  }
  [[nodiscard]] T* end() const noexcept
    requires(Memory::is_host_accessible)
  {
    return data() + size_;
  }

 private:
  /// Step by step, so that each can be removed separately; all of them or none.
  [[nodiscard]] result<void> grow(std::uint64_t wanted) noexcept {
    for (std::uint64_t at = committed_; at < wanted; at += step_) {
      const result<physical_handle> made = commit(*memory_, range_, at, step_);
      if (made) continue;
      if (at != committed_ && !memory_->decommit(range_, committed_, at - committed_)) committed_ = at;
      return made.error();
    }
    committed_ = wanted;
    return {};
  }

  void swap(growable_range& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(range_, other.range_);
    std::swap(step_, other.step_);
    std::swap(committed_, other.committed_);
    std::swap(capacity_, other.capacity_);
    std::swap(size_, other.size_);
  }

  Memory* memory_ = nullptr;
  virtual_range range_{};
  std::uint64_t step_ = 1;
  std::uint64_t committed_ = 0;
  std::uint64_t capacity_ = 0;
  std::uint64_t size_ = 0;
};

}  // namespace v0
}  // namespace llmmem
