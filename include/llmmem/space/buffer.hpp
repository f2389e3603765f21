/// @file
/// `space_buffer`: owns one range of a space, and deallocates it.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/space/concepts.hpp>

#include <concepts>
#include <cstdint>
#include <new>
#include <string>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// The owner of a range; `range()` is its trivially copyable view. The space must outlive it.
///
/// Destroying a buffer deallocates the range at once: wait for the copies that use it first.
///
/// @par Thread safety   as a plain value; for the space, see there.
/// @par Errors          only the constructors throw.
template <memory_space Space>
class space_buffer {
 public:
  using range_type = typename Space::range_type;

  /// Constructs an empty owner.
  space_buffer() noexcept = default;

  /// Allocates `bytes` bytes at a multiple of `alignment`.
  /// @throws out_of_memory   when the space lacks them; the text carries the shortage.
  /// @throws length_error    for 0 bytes.
  /// @throws argument_error  for an alignment that is not a power of two.
  space_buffer(Space& space, std::uint64_t bytes, std::align_val_t alignment)
      : space_(&space), range_(space.try_allocate(bytes, static_cast<std::uint64_t>(alignment)).value()) {}

  /// Allocates `count` elements of `bytes_each`, the first at a multiple of `alignment`.
  /// @throws length_error  also when the product exceeds 2^63 - 1.
  space_buffer(Space& space, std::uint64_t count, std::uint64_t bytes_each, std::align_val_t alignment)
      : space_buffer(space,
                     checked_multiply(count, bytes_each,
                                      (std::string(space.name()) + ": elements x bytes per element").c_str()),
                     alignment) {}

  /// Two numbers after the space could mean bytes and alignment, or elements and bytes per element.
  template <std::integral Bytes, std::integral Number>
  space_buffer(Space& /*space*/, Bytes /*bytes*/, Number /*number*/) {
    static_assert(
        sizeof(Number) == 0,
        "space_buffer(space, bytes, std::align_val_t{alignment}) takes its alignment by type; elements are "
        "space_buffer(space, count, bytes_each, std::align_val_t{alignment})");
  }

  space_buffer(space_buffer&& other) noexcept
      : space_(std::exchange(other.space_, nullptr)), range_(std::exchange(other.range_, range_type{})) {}

  space_buffer& operator=(space_buffer&& other) noexcept {
    if (this != &other) {
      reset();
      space_ = std::exchange(other.space_, nullptr);
      range_ = std::exchange(other.range_, range_type{});
    }
    return *this;
  }

  ~space_buffer() { reset(); }

  /// Deallocates the range now.
  void reset() noexcept {
    if (space_ != nullptr) space_->deallocate(range_);
    space_ = nullptr;
    range_ = range_type{};
  }

  /// Hands the range to the caller, which must deallocate it.
  [[nodiscard]] range_type release() noexcept {
    space_ = nullptr;
    return std::exchange(range_, range_type{});
  }

  [[nodiscard]] range_type range() const noexcept { return range_; }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return range_.bytes; }
  [[nodiscard]] explicit operator bool() const noexcept { return space_ != nullptr; }

 private:
  Space* space_ = nullptr;
  range_type range_{};
};

}  // namespace v0
}  // namespace llmmem
