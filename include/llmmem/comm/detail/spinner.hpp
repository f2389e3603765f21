/// @file
/// `spinner`: decides whether to spin for a while before sleeping.
#pragma once

#include <llmmem/config.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// A waiting thread may check again and again, and yield the core in between to the thread it waits for: that
/// is faster than sleeping and being woken. It is useless if the wait takes longer, and harmful if others
/// need the core. So a thread spins for a short time, and less often the longer it finds nothing: at worst
/// once in `2^most_misses` waits.
class spinner {
 public:
  static constexpr std::uint32_t most_misses = 10;
  /// More than the time to fill or empty a socket's buffer, less than the scheduler's time slice.
  static constexpr std::uint64_t crowded_ns = 1'000'000;

  /// Begins a wait. @param limit_ns  the longest time to spin; 0: never.
  void begin(std::uint64_t now, std::uint64_t limit_ns) noexcept {
    since_ = now;
    most_ns_ = limit_ns;
    if (sleeps_ == 0) return;
    --sleeps_;
    most_ns_ = 0;
  }
  /// Called when nothing was found; returns whether to check again. Once false, it stays false until the next
  /// wait.
  [[nodiscard]] bool goes_on(std::uint64_t now) noexcept {
    if (most_ns_ == 0) return false;
    if (now - since_ < most_ns_) return true;
    miss(now);
    return false;
  }
  /// Part of the awaited data has arrived, and more may follow.
  void found_some(std::uint64_t now) noexcept { since_ = now; }
  /// The awaited event has arrived, while spinning or asleep.
  void end(std::uint64_t now) noexcept {
    if (most_ns_ == 0) return;
    if (is_crowded(now)) return miss(now);
    if (misses_ != 0) --misses_;
    most_ns_ = 0;
  }

 private:
  /// A thread that gets the core back so late shares it with others: they would get it next time too.
  [[nodiscard]] bool is_crowded(std::uint64_t now) const noexcept { return now - since_ > crowded_ns; }
  void miss(std::uint64_t now) noexcept {
    misses_ = is_crowded(now) || misses_ == most_misses ? most_misses : misses_ + 1;
    sleeps_ = 1U << misses_;
    most_ns_ = 0;
  }

  std::uint64_t since_ = 0;
  std::uint64_t most_ns_ = 0;
  std::uint32_t misses_ = 0;
  std::uint32_t sleeps_ = 0;  // this many waits do not spin
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
