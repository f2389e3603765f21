/// @file
/// `rank_waiter`: how a coordinator waits for other ranks.
#pragma once

#include <llmmem/config.hpp>

#include <concepts>
#include <thread>  // has durations and clocks; <chrono> itself would add streams

namespace llmmem {
inline namespace v0 {

/// How a coordinator lets time pass, and measures it.
template <class W>
concept rank_waiter = requires(W& waiter, std::chrono::nanoseconds time) {
  { waiter.now() } -> std::same_as<std::chrono::nanoseconds>;  // since any origin; never decreases
  waiter.pause(time);
};

/// Waits by sleeping.
struct sleeping_waiter {
  [[nodiscard]] std::chrono::nanoseconds now() const {
    return std::chrono::steady_clock::now().time_since_epoch();
  }
  void pause(std::chrono::nanoseconds time) const { std::this_thread::sleep_for(time); }
};

static_assert(rank_waiter<sleeping_waiter>);

}  // namespace v0
}  // namespace llmmem
