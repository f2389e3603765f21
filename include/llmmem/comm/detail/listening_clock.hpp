/// @file
/// `listening_clock`: the time of a socket endpoint, the part of it spent listening, and its next timer.
#pragma once

#include <llmmem/config.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The longest time between two runs of the timers.
inline constexpr std::uint64_t timer_ns = 50'000'000;

/// Holds the last time read from a clock; the owner passes the time in. Time counts as *listened* from
/// `begin` through every `look`: the time between two calls of an endpoint does not count, and neither does a
/// pause of the whole process.
///
/// @invariant  `listened()` grows by at most the time that passes.
/// @par Thread safety   one thread at a time.
class listening_clock {
 public:
  /// A loop that never needs to wait checks all descriptors this often.
  static constexpr std::uint64_t poll_ns = 1'000'000;

  /// Without timers `is_due()` is never true.
  explicit listening_clock(bool has_timers = true) noexcept : next_timer_(has_timers ? 0 : never) {}

  [[nodiscard]] std::uint64_t now() const noexcept { return now_; }
  /// The time within calls of the endpoint, in nanoseconds. A peer's silence is measured in it.
  [[nodiscard]] std::uint64_t listened() const noexcept { return listened_; }

  /// Begins a call of the endpoint.
  void begin(std::uint64_t now) noexcept { now_ = now; }
  /// @param most  the most that counts as listened: a stopped process has not listened.
  void look(std::uint64_t now, std::uint64_t most) noexcept {
    listened_ += now - now_ < most ? now - now_ : most;
    now_ = now;
  }
  /// Records that the owner has checked all descriptors.
  void note_looked() noexcept { looked_ = now_; }

  /// @name Timers
  /// @{
  void due(std::uint64_t at) noexcept { next_timer_ = at < next_timer_ ? at : next_timer_; }
  void due_at_once() noexcept { next_timer_ = 0; }
  [[nodiscard]] bool is_due() const noexcept { return now_ >= next_timer_; }
  /// Restarts the timers, which run now: each reports its next time with `due`.
  void restart_timers() noexcept { next_timer_ = now_ + timer_ns; }
  /// Returns the earlier of `until` and the next timer.
  [[nodiscard]] std::uint64_t wait_until(std::uint64_t until) const noexcept {
    return until < next_timer_ ? until : next_timer_;
  }
  /// @}

  /// Whether it is time to check all descriptors, or to run timers.
  [[nodiscard]] bool is_look_due() const noexcept { return now_ - looked_ > poll_ns || is_due(); }
  /// Whether a wait until then may spin.
  [[nodiscard]] bool may_spin(std::uint64_t until) const noexcept { return now_ < until && !is_look_due(); }

 private:
  static constexpr std::uint64_t never = ~std::uint64_t{0};

  std::uint64_t now_ = 0;
  std::uint64_t looked_ = 0;
  std::uint64_t listened_ = 0;
  std::uint64_t next_timer_;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
