/// @file
/// `result<T>`: the return type of `noexcept` operations, a value or a `failure` with the shortage in it.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/failure.hpp>

#include <type_traits>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// A `T`, or the `failure` that prevented it. Success costs a few words more than `T`: only a refusal writes
/// the bytes of the name in `failure`.
///
///     if (auto sequence = cache.create()) use(*sequence);
///     else log(sequence.error().message());
///
///     auto sequence = cache.create().value();   // throws instead
template <class T>
class LLMMEM_NODISCARD_TYPE result {
 public:
  static_assert(std::is_nothrow_move_constructible_v<T> && std::is_default_constructible_v<T>);

  constexpr result(T value) noexcept : value_(std::move(value)) {}
  constexpr result(const failure& why) noexcept : failure_(why) {}
  constexpr result(const result& other) noexcept(std::is_nothrow_copy_constructible_v<T>)
    requires std::is_copy_constructible_v<T>
      : value_(other.value_) {
    if (!other.has_value()) failure_ = other.failure_;
  }
  constexpr result(result&& other) noexcept : value_(std::move(other.value_)) {
    if (!other.has_value()) failure_ = other.failure_;
  }
  constexpr result& operator=(const result& other) noexcept(std::is_nothrow_copy_assignable_v<T>)
    requires std::is_copy_assignable_v<T>
  {
    value_ = other.value_;
    assign(other);
    return *this;
  }
  constexpr result& operator=(result&& other) noexcept(std::is_nothrow_move_assignable_v<T>)
    requires std::is_move_assignable_v<T>
  {
    value_ = std::move(other.value_);
    assign(other);
    return *this;
  }
  constexpr ~result() = default;

  /// Whether there is a value. Not available for `result<bool>`, where it would look like the answer: use
  /// `has_value()`, then `value()`.
  [[nodiscard]] constexpr explicit operator bool() const noexcept
    requires(!std::is_same_v<T, bool>)
  {
    return failure_.code == errc::ok;
  }
  explicit operator bool() const
    requires std::is_same_v<T, bool>
  = delete;
  [[nodiscard]] constexpr bool has_value() const noexcept { return failure_.code == errc::ok; }

  /// The value. @pre `has_value()`.
  [[nodiscard]] constexpr T& operator*() & noexcept LLMMEM_LIFETIMEBOUND { return value_; }
  [[nodiscard]] constexpr const T& operator*() const& noexcept LLMMEM_LIFETIMEBOUND { return value_; }
  [[nodiscard]] constexpr T&& operator*() && noexcept LLMMEM_LIFETIMEBOUND { return std::move(value_); }
  [[nodiscard]] constexpr T* operator->() noexcept LLMMEM_LIFETIMEBOUND { return &value_; }
  [[nodiscard]] constexpr const T* operator->() const noexcept LLMMEM_LIFETIMEBOUND { return &value_; }

  /// Returns the value, or throws an exception with the failure's text. May be called only for the exception.
  constexpr T& value() & LLMMEM_LIFETIMEBOUND {
    check();
    return value_;
  }
  constexpr const T& value() const& LLMMEM_LIFETIMEBOUND {
    check();
    return value_;
  }
  /// Returns by value, so that `for (auto& each : call().value().parts)` iterates over a living object.
  constexpr T value() && {
    check();
    return std::move(value_);
  }

  /// Returns why there is no value; `errc::ok` when there is one.
  [[nodiscard]] constexpr const failure& error() const noexcept LLMMEM_LIFETIMEBOUND { return failure_; }
  [[nodiscard]] constexpr error_code code() const noexcept { return failure_.code; }

 private:
  constexpr void check() const {
    if (!has_value()) failure_.raise();
  }
  /// Copies of a success do not touch the bytes of the name either.
  constexpr void assign(const result& other) noexcept {
    if (!other.has_value()) {
      failure_ = other.failure_;
    } else if (!has_value()) {
      failure_ = failure{};
    }
  }

  T value_{};
  failure failure_{};
};

/// Success without a value, or the `failure` that prevented it.
template <>
class LLMMEM_NODISCARD_TYPE result<void> {
 public:
  // Not defaulted: `return {};` would first zero all bytes of the name.
  constexpr result() noexcept {}  // NOLINT(modernize-use-equals-default)
  constexpr result(const failure& why) noexcept : failure_(why) {}
  constexpr result(const result& other) noexcept {
    if (!other.has_value()) failure_ = other.failure_;
  }
  constexpr result& operator=(const result& other) noexcept {
    if (!other.has_value()) {
      failure_ = other.failure_;
    } else if (!has_value()) {
      failure_ = failure{};
    }
    return *this;
  }
  constexpr ~result() = default;

  [[nodiscard]] constexpr explicit operator bool() const noexcept { return failure_.code == errc::ok; }
  [[nodiscard]] constexpr bool has_value() const noexcept { return failure_.code == errc::ok; }

  /// Throws if the operation was refused.
  constexpr void value() const {
    if (!has_value()) failure_.raise();
  }

  [[nodiscard]] constexpr const failure& error() const noexcept LLMMEM_LIFETIMEBOUND { return failure_; }
  [[nodiscard]] constexpr error_code code() const noexcept { return failure_.code; }

 private:
  failure failure_{};
};

}  // namespace v0
}  // namespace llmmem
