/// @file
/// A link with bandwidth and latency in virtual time, on which copies queue.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/testing/virtual_clock.hpp>
#include <llmmem/transfer/link_model.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace testing {

using llmmem::link_model;
using llmmem::transfer_ns;

/// One copy at a time in either direction, first come first served: a copy starts when it may and the link is
/// free, and ends after the latency and its bytes over the bandwidth.
///
/// @par Complexity      O(1).
/// @par Thread safety   none.
/// @par Errors          the constructor throws `argument_error`; `schedule` throws `length_error` past the
///                      end of time and leaves the link unchanged.
class virtual_link {
 public:
  /// Start and end of a copy.
  struct span {
    virtual_time start;
    virtual_time finish;
  };

  /// The fastest link that it can compute with.
  static constexpr std::uint64_t max_bytes_per_second = link_model::most_bytes_per_second;

  explicit virtual_link(const link_model& model) : model_(model) { check_link(model, "virtual link"); }

  /// Queues `bytes` that may not start before `ready`.
  [[nodiscard]] span schedule(virtual_time ready, std::uint64_t bytes) {
    const virtual_time start = ready > free_ ? ready : free_;
    const virtual_time finish = time_after(time_after(start, model_.latency_ns), transfer_ns(model_, bytes));
    free_ = finish;
    busy_ns_ += finish.ns - start.ns;
    return {start, finish};
  }

  /// Returns when its last copy ends, and how long it has been busy in all.
  [[nodiscard]] virtual_time free_at() const noexcept { return free_; }
  [[nodiscard]] std::uint64_t busy_ns() const noexcept { return busy_ns_; }
  [[nodiscard]] const link_model& model() const noexcept { return model_; }

 private:
  link_model model_;
  virtual_time free_;
  std::uint64_t busy_ns_ = 0;
};

}  // namespace testing
}  // namespace v0
}  // namespace llmmem
