/// @file
/// `call_schedule`: when a socket endpoint calls each seat next.
#pragma once

#include <llmmem/comm/detail/listening_clock.hpp>
#include <llmmem/comm/id_set.hpp>
#include <llmmem/config.hpp>

#include <cstdint>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The next call to each seat: at once at first, then after a time that doubles with each failure.
///
/// @invariant  The time between two calls is `first_ns` to `last_ns`, except for `call_now`.
/// @par Complexity      O(1).
/// @par Thread safety   one thread at a time.
class call_schedule {
 public:
  call_schedule(listening_clock& clock, std::uint32_t seats, std::uint64_t first_ns, std::uint64_t last_ns)
      : clock_(clock), first_ns_(first_ns), last_ns_(last_ns), calls_(seats, next_call{0, first_ns}) {}

  /// Whether it is time to call. If not, the clock's timer is set to that time.
  [[nodiscard]] bool is_due(seat_id seat) noexcept {
    const std::uint64_t at = calls_[to_index(seat)].at;
    if (clock_.now() >= at) return true;
    clock_.due(at);
    return false;
  }
  /// A call has failed.
  void failed(seat_id seat) noexcept {
    next_call& next = calls_[to_index(seat)];
    next.at = clock_.now() + next.back_off;
    next.back_off = next.back_off * 2 < last_ns_ ? next.back_off * 2 : last_ns_;
    clock_.due(next.at);
  }
  /// The process in that seat is dead: another one may come soon.
  void seat_freed(seat_id seat) noexcept {
    calls_[to_index(seat)] = {clock_.now() + first_ns_, first_ns_};
    clock_.due(clock_.now() + first_ns_);
  }
  /// A process has come and waits for a call.
  void call_now(seat_id seat) noexcept {
    calls_[to_index(seat)] = {clock_.now(), first_ns_};
    clock_.due(clock_.now());
  }
  /// The seat is connected: the next failure counts as the first again.
  void connected(seat_id seat) noexcept { calls_[to_index(seat)].back_off = first_ns_; }

 private:
  struct next_call {
    std::uint64_t at;
    std::uint64_t back_off;  // after the next failure
  };

  listening_clock& clock_;
  std::uint64_t first_ns_;
  std::uint64_t last_ns_;
  std::vector<next_call> calls_;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
