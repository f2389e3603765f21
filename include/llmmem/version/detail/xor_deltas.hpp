/// @file
/// Differences between versions of equal length, in a ring of bytes: the memory of `delta`.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/metadata.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Calls `visit(begin, end)` for the runs in which `a` and `b` differ, in order. Joins runs with fewer equal
/// bytes between them than a record's head. O(bytes), eight at a time while they are equal.
template <class Visit>
void for_each_difference(std::span<const std::byte> a, std::span<const std::byte> b, const Visit& visit) {
  constexpr std::uint64_t head = 16;
  const std::uint64_t size = a.size();
  const auto equal_until = [&](std::uint64_t at) {
    while (at + 8 <= size) {
      std::uint64_t left = 0;
      std::uint64_t right = 0;
      std::memcpy(&left, a.data() + at, 8);
      std::memcpy(&right, b.data() + at, 8);
      if (left != right) break;
      at += 8;
    }
    while (at < size && a[at] == b[at])
      ++at;
    return at;
  };
  std::uint64_t begin = equal_until(0);
  while (begin < size) {
    std::uint64_t end = begin + 1;
    std::uint64_t next = end;
    for (;;) {
      while (end < size && a[end] != b[end])
        ++end;
      next = equal_until(end);
      if (next == size || next - end >= head) break;
      end = next;
    }
    visit(begin, end);
    begin = next;
  }
}

/// Differences of neighbouring versions, newest last; the oldest leaves first. A record is a run's begin and
/// length, 8 bytes each, and the xor of both versions, so it can be applied in both directions.
class xor_deltas {
 public:
  xor_deltas(std::uint64_t bytes, std::uint64_t most, const metadata_source& source, const char* what)
      : bytes_(bytes, source, what), entries_(most, entry{}, source, what) {}

  [[nodiscard]] std::uint64_t count() const noexcept { return count_; }
  [[nodiscard]] std::uint64_t most() const noexcept { return entries_.size(); }
  [[nodiscard]] std::uint64_t used() const noexcept { return used_; }
  [[nodiscard]] std::uint64_t capacity() const noexcept { return bytes_.size(); }

  /// Returns the bytes that the difference of `older` and `newer` takes.
  [[nodiscard]] static std::uint64_t size_of(std::span<const std::byte> older,
                                             std::span<const std::byte> newer) noexcept {
    std::uint64_t size = 0;
    for_each_difference(older, newer,
                        [&](std::uint64_t begin, std::uint64_t end) { size += 16 + end - begin; });
    return size;
  }

  void drop_oldest() noexcept {
    used_ -= entries_[first_].bytes;
    tail_ = wrapped(tail_ + entries_[first_].bytes);
    first_ = (first_ + 1) % entries_.size();
    --count_;
  }

  /// @pre `size` is the `size_of` of both, `count() < most()` and `used() + size <= capacity()`.
  void append(std::span<const std::byte> older, std::span<const std::byte> newer,
              std::uint64_t size) noexcept {
    std::uint64_t at = wrapped(tail_ + used_);
    for_each_difference(older, newer, [&](std::uint64_t begin, std::uint64_t end) {
      const std::uint64_t head[2] = {begin, end - begin};
      std::byte raw[16];
      std::memcpy(raw, head, 16);
      for (const std::byte each : raw)
        put(at, each);
      for (std::uint64_t i = begin; i < end; ++i)
        put(at, older[i] ^ newer[i]);
    });
    entries_[(first_ + count_) % entries_.size()] = {size};
    ++count_;
    used_ += size;
  }

  /// Changes `value` from the newest version back by `steps`. @pre `steps <= count()`.
  void take_back(std::span<std::byte> value, std::uint64_t steps) const noexcept {
    std::uint64_t end = wrapped(tail_ + used_);
    for (std::uint64_t i = 0; i < steps; ++i) {
      const std::uint64_t size = entries_[(first_ + count_ - 1 - i) % entries_.size()].bytes;
      std::uint64_t at = wrapped(end + capacity() - size);
      end = at;
      for (std::uint64_t left = size; left != 0;) {
        std::byte raw[16];
        for (std::byte& each : raw)
          each = get(at);
        std::uint64_t head[2];
        std::memcpy(head, raw, 16);
        for (std::uint64_t j = 0; j < head[1]; ++j)
          value[head[0] + j] ^= get(at);
        left -= 16 + head[1];
      }
    }
  }

 private:
  struct entry {
    std::uint64_t bytes = 0;
  };

  [[nodiscard]] std::uint64_t wrapped(std::uint64_t at) const noexcept {
    return at >= capacity() ? at - capacity() : at;
  }
  void put(std::uint64_t& at, std::byte value) noexcept {
    bytes_[at] = value;
    at = wrapped(at + 1);
  }
  [[nodiscard]] std::byte get(std::uint64_t& at) const noexcept {
    const std::byte value = bytes_[at];
    at = wrapped(at + 1);
    return value;
  }

  detail::fixed_array<std::byte> bytes_;
  detail::fixed_array<entry> entries_;
  std::uint64_t tail_ = 0;  // begin of the oldest difference
  std::uint64_t used_ = 0;
  std::uint64_t first_ = 0;  // entry of the oldest difference
  std::uint64_t count_ = 0;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
