/// @file
/// A lease of a chunk: the right to access its bytes in the fastest tier.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/elements.hpp>
#include <llmmem/tiering/access.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// Holds a chunk in tier 0, at one address, while it lives. Movable. The buffer outlives it.
///
/// @tparam Desk  grants leases and ends them: a part of `basic_tiered_buffer`.
/// @par Thread safety   a lease begins and ends on the buffer's thread; the holder may share the bytes
///   between threads.
template <class Desk, access_mode Mode>
class chunk_lease {
 public:
  using byte_type = std::conditional_t<Mode == access_mode::read, const std::byte, std::byte>;
  using range_type = typename Desk::range_type;

  chunk_lease() noexcept = default;
  /// Called by the buffer: `range` is the chunk's in tier 0, where `desk` holds it.
  chunk_lease(Desk& desk, std::uint32_t name, range_type range) noexcept
      : desk_(&desk), name_(name), range_(range) {}
  chunk_lease(chunk_lease&& other) noexcept
      : desk_(std::exchange(other.desk_, nullptr)),
        name_(other.name_),
        range_(std::exchange(other.range_, {})) {}
  chunk_lease& operator=(chunk_lease&& other) noexcept {
    if (this == &other) return *this;
    end();
    desk_ = std::exchange(other.desk_, nullptr);
    name_ = other.name_;
    range_ = std::exchange(other.range_, {});
    return *this;
  }
  ~chunk_lease() { end(); }

  /// Ends the lease now.
  void end() noexcept {
    range_ = {};
    if (desk_ != nullptr) std::exchange(desk_, nullptr)->end_lease(name_, Mode);
  }

  /// Marks further bytes of the chunk as changed, in addition to those that the lease was taken for.
  /// `errc::past_the_bytes`.
  /// @pre the lease has not ended.
  result<void> also_changes(std::uint64_t offset, std::uint64_t count) noexcept
    requires(Mode == access_mode::read_write)
  {
    return desk_->add_dirty(name_, offset, count);
  }

  /// Returns the bytes, if the host may access tier 0; none after the lease has ended, or was moved from.
  [[nodiscard]] std::span<byte_type> span() const noexcept LLMMEM_LIFETIMEBOUND
    requires(Desk::host_can_touch)
  {
    return range_.span();
  }
  /// Returns the bytes as elements: `lease.as<float>()`. @throws length_error, argument_error see
  /// `as_elements`.
  template <plain_element T>
  [[nodiscard]] auto as() const LLMMEM_LIFETIMEBOUND
    requires(Desk::host_can_touch)
  {
    return as_elements<T>(span(), "lease");
  }
  /// Returns the bytes as tier 0's range type.
  [[nodiscard]] range_type range() const noexcept { return range_; }
  [[nodiscard]] explicit operator bool() const noexcept { return desk_ != nullptr; }

 private:
  Desk* desk_ = nullptr;
  std::uint32_t name_ = 0;
  range_type range_{};
};

}  // namespace v0
}  // namespace llmmem
