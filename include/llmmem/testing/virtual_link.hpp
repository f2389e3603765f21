/// @file
/// A link with bandwidth and latency in virtual time, on which copies queue.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/testing/virtual_clock.hpp>

#include <cstdint>

namespace llmmem::inline v0::testing {

/// What a link can do.
struct link_model {
  std::uint64_t bytes_per_second = 0;
  std::uint64_t latency_ns = 0;
};

/// Nanoseconds that `bytes` take at the link's bandwidth, rounded up, without its latency.
/// @pre the bandwidth is not 0.
[[nodiscard]] constexpr std::uint64_t transfer_ns(const link_model& link, std::uint64_t bytes) {
  // bytes * 10^9 / bandwidth without a 128-bit product: by decimal digits of the fraction, nine of them.
  std::uint64_t whole = bytes / link.bytes_per_second;
  std::uint64_t rest = bytes % link.bytes_per_second;
  for (int digit = 0; digit < 9; ++digit) {
    if (whole > ~std::uint64_t{0} / 10 - 1) {
      throw length_error("virtual link: " + std::to_string(bytes) + " bytes at " +
                         std::to_string(link.bytes_per_second) + " bytes a second pass the end of time");
    }
    whole = whole * 10 + rest * 10 / link.bytes_per_second;
    rest = rest * 10 % link.bytes_per_second;
  }
  return whole + (rest != 0 ? 1 : 0);
}

/// One copy at a time, first come first served: a copy starts when it may and the link is free, and ends
/// after the latency and its bytes over the bandwidth.
///
/// @par Complexity      O(1).
/// @par Thread safety   none.
/// @par Errors          the constructor throws `argument_error`; `schedule` throws `length_error` past the
///                      end of time and leaves the link as it was.
class virtual_link {
 public:
  /// Start and end of a copy.
  struct span {
    virtual_time start;
    virtual_time finish;
  };

  /// Fastest link it computes with: ten times this fits 64 bits.
  static constexpr std::uint64_t max_bytes_per_second = std::uint64_t{1} << 60;

  explicit virtual_link(const link_model& model) : model_(model) {
    if (model.bytes_per_second == 0 || model.bytes_per_second > max_bytes_per_second) {
      throw argument_error("virtual link: a bandwidth of " + std::to_string(model.bytes_per_second) +
                           " bytes a second; it must be 1 to 2^60");
    }
  }

  /// Queues `bytes` that may not start before `ready`.
  [[nodiscard]] span schedule(virtual_time ready, std::uint64_t bytes) {
    const virtual_time start = ready > free_ ? ready : free_;
    const virtual_time finish = later(later(start, model_.latency_ns), transfer_ns(model_, bytes));
    free_ = finish;
    busy_ns_ += finish.ns - start.ns;
    return {start, finish};
  }

  /// When its last copy ends, and how long it has been taken in all.
  [[nodiscard]] virtual_time free_at() const noexcept { return free_; }
  [[nodiscard]] std::uint64_t busy_ns() const noexcept { return busy_ns_; }
  [[nodiscard]] const link_model& model() const noexcept { return model_; }

 private:
  link_model model_;
  virtual_time free_;
  std::uint64_t busy_ns_ = 0;
};

}  // namespace llmmem::inline v0::testing
