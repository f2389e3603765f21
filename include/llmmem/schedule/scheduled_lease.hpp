/// @file
/// A lease of a chunk, granted by a schedule.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/result.hpp>
#include <llmmem/tiering/access.hpp>

#include <cstdint>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// A lease of the buffer that reports its end to the schedule. Movable. The schedule outlives it.
///
/// @tparam Desk   the part of `prefetch_schedule` that grants leases.
/// @tparam Lease  the buffer's lease.
/// @par Thread safety   as the buffer's lease.
template <class Desk, class Lease, access_mode Mode>
class scheduled_lease {
 public:
  using buffer_lease = Lease;

  scheduled_lease() noexcept = default;
  /// Called by the schedule: `held` is the buffer's lease of the chunk that `desk` knows as `chunk`.
  scheduled_lease(Desk& desk, chunk_id chunk, Lease held) noexcept
      : desk_(&desk), chunk_(chunk), held_(std::move(held)) {}
  scheduled_lease(scheduled_lease&& other) noexcept
      : desk_(std::exchange(other.desk_, nullptr)), chunk_(other.chunk_), held_(std::move(other.held_)) {}
  scheduled_lease& operator=(scheduled_lease&& other) noexcept {
    if (this != &other) {
      end();
      desk_ = std::exchange(other.desk_, nullptr);
      chunk_ = other.chunk_;
      held_ = std::move(other.held_);
    }
    return *this;
  }
  ~scheduled_lease() { end(); }

  /// Ends the lease now.
  void end() noexcept {
    held_.end();
    if (desk_ != nullptr) std::exchange(desk_, nullptr)->released(chunk_);
  }
  [[nodiscard]] auto span() const noexcept
    requires requires(const Lease& held) { held.span(); }
  {
    return held_.span();
  }
  [[nodiscard]] auto range() const noexcept { return held_.range(); }
  [[nodiscard]] explicit operator bool() const noexcept { return static_cast<bool>(held_); }
  /// As the buffer's. @pre the lease has not ended.
  result<void> also_changes(std::uint64_t offset, std::uint64_t count) noexcept
    requires(Mode == access_mode::read_write)
  {
    const result<void> noted = held_.also_changes(offset, count);
    if (noted && count != 0) desk_->changed(chunk_);
    return noted;
  }

 private:
  Desk* desk_ = nullptr;
  chunk_id chunk_{};
  Lease held_;
};

}  // namespace v0
}  // namespace llmmem
