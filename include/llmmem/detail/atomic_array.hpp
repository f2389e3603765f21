/// @file
/// A table of numbers that several threads read and write concurrently.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// A `fixed_array` whose elements are accessed only atomically. Constness applies to the table, not to its
/// elements.
template <class T>
class atomic_array {
 public:
  static_assert(std::atomic_ref<T>::is_always_lock_free);

  /// Sets every element to `value`; a thread that receives the table sees that.
  atomic_array(std::uint64_t count, T value, const metadata_source& source, const char* what)
      : values_(count, value, source, what) {}

  [[nodiscard]] std::atomic_ref<T> operator[](std::size_t i) const noexcept {
    return std::atomic_ref<T>(values_[i]);
  }
  [[nodiscard]] std::size_t size() const noexcept { return values_.size(); }
  [[nodiscard]] std::size_t bytes() const noexcept { return values_.bytes(); }

  void prefetch(std::size_t i) const noexcept { LLMMEM_PREFETCH(&values_[i]); }

 private:
  mutable fixed_array<T> values_;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
