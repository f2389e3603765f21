/// @file
/// The part that copies of a view share. Not a `std::shared_ptr`, because <memory> is half of a header's
/// budget.
#pragma once

#include <llmmem/config.hpp>

#include <atomic>
#include <cstdint>
#include <utility>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// A `T` that is destroyed with its last holder, on that holder's thread. Null after a move.
template <class T>
class shared_part {
 public:
  template <class... Args>
  explicit shared_part(std::in_place_t /*make*/, Args&&... args)
      : held_(new counted(std::forward<Args>(args)...)) {}
  shared_part(const shared_part& other) noexcept : held_(other.held_) {
    if (held_ != nullptr) held_->holders.fetch_add(1, std::memory_order_relaxed);
  }
  shared_part(shared_part&& other) noexcept : held_(std::exchange(other.held_, nullptr)) {}
  shared_part& operator=(shared_part other) noexcept {
    std::swap(held_, other.held_);
    return *this;
  }
  ~shared_part() {
    if (held_ != nullptr && held_->holders.fetch_sub(1, std::memory_order_acq_rel) == 1) delete held_;
  }

  [[nodiscard]] explicit operator bool() const noexcept { return held_ != nullptr; }
  /// @pre not null, for all four functions.
  [[nodiscard]] T& operator*() noexcept { return held_->value; }
  [[nodiscard]] const T& operator*() const noexcept { return held_->value; }
  [[nodiscard]] T* operator->() noexcept { return &held_->value; }
  [[nodiscard]] const T* operator->() const noexcept { return &held_->value; }

 private:
  struct counted {
    template <class... Args>
    explicit counted(Args&&... args) : value(std::forward<Args>(args)...) {}

    std::atomic<std::uint64_t> holders{1};
    T value;
  };

  counted* held_;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
