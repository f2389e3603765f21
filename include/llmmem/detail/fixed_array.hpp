/// @file
/// An array allocated once, in its constructor: the storage of everything that must not allocate later.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/metadata.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>
#include <string>
#include <type_traits>
#include <utility>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// `count` elements of trivial type `T` from a `metadata_source`; movable, never resized.
///
/// The first constructor leaves the elements unwritten, so that the pages of a large table are committed as
/// they are used; the second sets them to a value.
template <class T>
class fixed_array {
 public:
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);

  fixed_array() noexcept = default;

  /// @param what  names the table in the error text: `"block_pool: records"`.
  /// @throws length_error when the bytes exceed 2^63 - 1; out_of_memory when the source has none.
  fixed_array(std::uint64_t count, const metadata_source& source, const char* what) : source_(source) {
    const std::uint64_t bytes = checked_multiply(count, sizeof(T), what);
    static_assert(std::numeric_limits<std::size_t>::max() >= max_bytes, "a 64-bit platform");
    if (count == 0) return;
    data_ = static_cast<T*>(allocate_metadata(source_, static_cast<std::size_t>(bytes), alignment, what));
    count_ = static_cast<std::size_t>(count);
  }

  fixed_array(std::uint64_t count, const T& value, const metadata_source& source, const char* what)
      : fixed_array(count, source, what) {
    for (std::size_t i = 0; i < count_; ++i)
      ::new (static_cast<void*>(data_ + i)) T(value);
  }

  fixed_array(fixed_array&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        count_(std::exchange(other.count_, 0)),
        source_(other.source_) {}

  fixed_array& operator=(fixed_array&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    std::swap(source_, other.source_);
    return *this;
  }

  ~fixed_array() {
    if (data_ != nullptr) source_.deallocate(source_.context, static_cast<void*>(data_), bytes(), alignment);
  }

  [[nodiscard]] T& operator[](std::size_t i) noexcept { return data_[i]; }
  [[nodiscard]] const T& operator[](std::size_t i) const noexcept { return data_[i]; }
  [[nodiscard]] T* data() noexcept { return data_; }
  [[nodiscard]] const T* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t size() const noexcept { return count_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return count_ * sizeof(T); }

 private:
  // A cache line, so that records of 8, 16 or 32 bytes never straddle one.
  static constexpr std::size_t alignment = alignof(T) > 64 ? alignof(T) : 64;

  T* data_ = nullptr;
  std::size_t count_ = 0;
  metadata_source source_{};
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
