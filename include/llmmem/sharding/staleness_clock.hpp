/// @file
/// `staleness_clock`: how far ahead of the slowest worker another worker may run.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/sharding/ids.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Bounded delay (Li et al., OSDI '14, section 3.5): with bound T, a worker may start iteration t after all
/// workers have finished all iterations before t - T. So it sees all updates except those of the last T
/// iterations. T = 0 is sequential (bulk-synchronous), `unbounded` is eventual consistency; between them it
/// is the stale synchronous parallel of Ho et al. (NIPS 2013).
///
/// @par Complexity      `may_start` O(1); `finish` O(1), and O(workers) when the slowest advances.
/// @par Thread safety   one writer; threads that share it take a lock.
class staleness_clock {
 public:
  /// A bound that delays no worker.
  static constexpr std::uint64_t unbounded = ~std::uint64_t{0};

  /// @throws argument_error  when there are no workers.
  staleness_clock(rank_count workers, std::uint64_t bound) : bound_(bound) {
    if (to_number(workers) == 0) throw argument_error("staleness_clock: 0 workers; there is at least one");
    finished_.assign(to_number(workers), 0);
    at_slowest_ = to_number(workers);
  }

  /// Returns whether `worker` may start `iteration`, from 0: it has finished all earlier ones, and no worker
  /// is too far behind.
  /// @pre `worker` exists and has not retired
  [[nodiscard]] bool may_start(rank_id worker, std::uint64_t iteration) const noexcept {
    return finished_[to_index(worker)] == iteration && iteration - slowest_ <= bound_;
  }
  /// Notes that `worker` has finished its iteration. @pre `worker` exists and has not retired
  void finish(rank_id worker) noexcept {
    if (finished_[to_index(worker)]++ == slowest_ && --at_slowest_ == 0) find_slowest();
  }
  /// Removes `worker`, which then delays no other. After all have retired, `slowest` keeps its value.
  /// @pre `worker` exists and has not retired
  void retire(rank_id worker) noexcept {
    const bool was_slowest = finished_[to_index(worker)] == slowest_;
    finished_[to_index(worker)] = retired;
    if (was_slowest && --at_slowest_ == 0) find_slowest();
  }

  /// Returns the iterations that `worker` has finished. @pre it has not retired
  [[nodiscard]] std::uint64_t finished(rank_id worker) const noexcept { return finished_[to_index(worker)]; }
  /// Returns the iterations that all workers have finished.
  [[nodiscard]] std::uint64_t slowest() const noexcept { return slowest_; }
  [[nodiscard]] std::uint64_t bound() const noexcept { return bound_; }

 private:
  static constexpr std::uint64_t retired = ~std::uint64_t{0};

  void find_slowest() noexcept {
    std::uint64_t least = retired;
    for (const std::uint64_t each : finished_) {
      if (each < least) {
        least = each;
        at_slowest_ = 0;
      }
      if (each == least) ++at_slowest_;
    }
    if (least != retired) slowest_ = least;
  }

  std::vector<std::uint64_t> finished_;  // iterations of each worker
  std::uint64_t bound_;
  std::uint64_t slowest_ = 0;
  std::uint32_t at_slowest_ = 0;  // workers that have finished exactly `slowest_`
};

}  // namespace v0
}  // namespace llmmem
