/// @file
/// Counts the bytes moved over each link, and how long the program waited, by cause.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/transfer/flow.hpp>
#include <llmmem/transfer/link_model.hpp>

#include <time.h>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// A clock that returns nanoseconds since any origin, never going back.
template <class C>
concept meter_clock = requires(const C& clock) {
  { clock.now_ns() } noexcept -> std::convertible_to<std::uint64_t>;
};

/// The machine's monotonic clock.
struct steady_meter_clock {
  [[nodiscard]] std::uint64_t now_ns() const noexcept {
    // Not <chrono>, which costs 13,000 lines wherever a tiered buffer is included.
    timespec now{};
    ::clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(now.tv_nsec);
  }
};
static_assert(meter_clock<steady_meter_clock>);

namespace transfer {

/// The counters of a meter. A plain value.
template <std::size_t Links>
struct meter_stats {
  std::array<link_flow, Links> links{};
  stall_times stalls{};
  std::uint64_t stalled = 0;  ///< times that the program had to wait

  friend constexpr bool operator==(const meter_stats&, const meter_stats&) noexcept = default;
};

/// Counts bytes, operations and waiting, so that a `tiered_buffer`'s report can be compared with a plan's
/// prediction, in the same units and by the same causes.
///
///     meter<2> counted;                                            // two links, the machine's clock
///     counted.moved(0, link_direction::onboard, bytes);
///     { const auto wait = counted.stalling(stall_cause::demand_fetch);  arrival.wait(); }
///
/// @tparam Links  the number of links, at least 1.
/// @tparam Clock  a virtual clock makes the counts the same on every run.
/// @par Complexity      O(1), no allocation at all.
/// @par Thread safety   single writer: one thread counts and reads; a copy of `stats()` may go anywhere.
///   Several movers each keep a meter and add them with `absorb`.
/// @par Errors          none; an existing link is a precondition.
template <std::size_t Links, meter_clock Clock = steady_meter_clock>
class meter {
 public:
  static_assert(Links > 0);

  /// Counts the time from its construction to its destruction as a stall.
  class [[nodiscard]] stall {
   public:
    stall(meter& owner, stall_cause cause) noexcept
        : owner_(&owner), cause_(cause), began_(owner.clock_.now_ns()) {}
    stall(const stall&) = delete;
    stall& operator=(const stall&) = delete;
    ~stall() { owner_->stalled(cause_, owner_->clock_.now_ns() - began_); }

   private:
    meter* owner_;
    stall_cause cause_;
    std::uint64_t began_;
  };

  meter() = default;
  explicit meter(Clock clock) noexcept : clock_(clock) {}

  /// Counts one transfer of `bytes`. @pre `link < Links`.
  void moved(std::size_t link, link_direction way, std::uint64_t bytes) noexcept {
    flow& taken = stats_.links[link][way];
    taken.bytes += bytes;
    ++taken.operations;
  }

  /// Counts one wait of `ns`; 0 is ignored.
  void stalled(stall_cause cause, std::uint64_t ns) noexcept {
    stats_.stalls[cause] += ns;
    if (ns != 0) ++stats_.stalled;
  }

  /// Counts one wait, as long as the returned object lives.
  stall stalling(stall_cause cause) noexcept { return stall(*this, cause); }

  /// Adds the counts of another meter.
  void absorb(const meter_stats<Links>& other) noexcept {
    for (std::size_t i = 0; i < Links; ++i) {
      for (const auto way : {link_direction::onboard, link_direction::offload}) {
        stats_.links[i][way].bytes += other.links[i][way].bytes;
        stats_.links[i][way].operations += other.links[i][way].operations;
      }
    }
    for (std::size_t i = 0; i < stall_causes; ++i)
      stats_.stalls.ns[i] += other.stalls.ns[i];
    stats_.stalled += other.stalled;
  }

  [[nodiscard]] const meter_stats<Links>& stats() const noexcept { return stats_; }
  /// Resets all counts.
  void reset() noexcept { stats_ = {}; }

 private:
  LLMMEM_NO_UNIQUE_ADDRESS Clock clock_{};
  meter_stats<Links> stats_{};
};
}  // namespace transfer

template <std::size_t Links, meter_clock Clock = steady_meter_clock>
using meter [[deprecated("its name is transfer::meter")]] = transfer::meter<Links, Clock>;
template <std::size_t Links>
using meter_stats [[deprecated("its name is transfer::meter_stats")]] = transfer::meter_stats<Links>;

}  // namespace v0
}  // namespace llmmem
