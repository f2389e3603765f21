/// @file
/// Helpers for copies over any queue: start with an urgency if the queue supports one, make progress if it
/// needs calls, end with an outcome if the fence has one, and avoid waiting for space.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/concepts.hpp>
#include <llmmem/space/fence.hpp>
#include <llmmem/transfer/errors.hpp>
#include <llmmem/transfer/file_copy.hpp>

#include <cstddef>
#include <span>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The outcomes of requests in flight on a failed engine are unknown: the device may continue for any time,
/// as after a lost answer.
[[nodiscard]] inline result<void> or_lost(const result<void>& outcome) noexcept {
  if (outcome.code() != errc::engine_failed) return outcome;
  failure why = outcome.error();
  why.code = errc::completion_lost;
  return why;
}

/// Waits for a copy, and returns its outcome if its fence has one.
template <fence F>
[[nodiscard]] result<void> settle(const F& fence) {
  if constexpr (requires { fence.conclude(); }) {
    return or_lost(fence.conclude());
  } else if constexpr (requires { fence.settled(); }) {
    return or_lost(fence.settled());
  } else {
    fence.wait();
    return {};
  }
}

/// Makes progress on a queue that needs calls for it.
template <class Queue>
void poll_queue(Queue& queue) noexcept {
  if constexpr (requires { queue.queue().poll(); }) queue.queue().poll();
}

/// Whether a copy would begin at once. Queues without this function refuse copies without space.
template <class Queue>
[[nodiscard]] bool has_capacity(Queue& queue) noexcept {
  static_assert(
      !requires { queue.queue().has_room(); } || requires { queue.queue().has_capacity(); },
      "rename the queue's `has_room` to `has_capacity`: it returns whether a copy would begin at once");
  if constexpr (requires { queue.queue().has_capacity(); }) {
    return queue.queue().has_capacity();
  } else {
    return true;
  }
}

template <class Queue, class Range>
[[nodiscard]] result<typename Queue::fence_type> copy_in(Queue& queue, Range to,
                                                         std::span<const std::byte> from,
                                                         transfer::urgency how) {
  if constexpr (requires { queue.copy_in_async(to, from, {}, how); }) {
    return queue.copy_in_async(to, from, {}, how);
  } else {
    return queue.copy_in_async(to, from, {});
  }
}
template <class Queue, class Range>
[[nodiscard]] result<typename Queue::fence_type> copy_out(Queue& queue, std::span<std::byte> to, Range from,
                                                          transfer::urgency how) {
  if constexpr (requires { queue.copy_out_async(to, from, {}, how); }) {
    return queue.copy_out_async(to, from, {}, how);
  } else {
    return queue.copy_out_async(to, from, {});
  }
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
