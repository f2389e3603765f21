/// @file
/// `spinner`: whether it is worth looking for a while before sleeping.
#pragma once

#include <llmmem/config.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Who waits may look again and again, and offer the core in between to whoever is to do what it waits for:
/// that is quicker than to be put to sleep and woken. It is of no use where what is awaited takes longer, and
/// does harm where others want the core. So it is done for a short time, and ever more seldom while it finds
/// nothing: at worst once in `2^most_misses` waits.
class spinner {
 public:
  static constexpr std::uint32_t most_misses = 10;
  /// More than it takes to fill or to empty a socket's buffer, less than the scheduler gives to who computes.
  static constexpr std::uint64_t crowded_ns = 1'000'000;

  /// A wait begins. @param most_ns  that it may look; 0: it never does.
  void begin(std::uint64_t now, std::uint64_t most_ns) noexcept {
    since_ = now;
    most_ns_ = most_ns;
    if (sleeps_ == 0) return;
    --sleeps_;
    most_ns_ = 0;
  }
  /// Nothing was found: whether to look again. Once it says no it is no until the next wait.
  [[nodiscard]] bool goes_on(std::uint64_t now) noexcept {
    if (most_ns_ == 0) return false;
    if (now - since_ < most_ns_) return true;
    miss(now);
    return false;
  }
  /// Some of it has come, and more may.
  void found_some(std::uint64_t now) noexcept { since_ = now; }
  /// What it waited for has come, while it looked or asleep.
  void end(std::uint64_t now) noexcept {
    if (most_ns_ == 0) return;
    if (is_crowded(now)) return miss(now);
    if (misses_ != 0) --misses_;
    most_ns_ = 0;
  }

 private:
  /// Who gets the core back so late shares it with others: they would get it next time too.
  [[nodiscard]] bool is_crowded(std::uint64_t now) const noexcept { return now - since_ > crowded_ns; }
  void miss(std::uint64_t now) noexcept {
    misses_ = is_crowded(now) || misses_ == most_misses ? most_misses : misses_ + 1;
    sleeps_ = 1U << misses_;
    most_ns_ = 0;
  }

  std::uint64_t since_ = 0;
  std::uint64_t most_ns_ = 0;
  std::uint32_t misses_ = 0;
  std::uint32_t sleeps_ = 0;  // so many waits do not look
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
