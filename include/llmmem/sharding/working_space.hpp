/// @file
/// The concept of a space that the host cannot access, and that copies, clears and adds its own bytes.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/concepts.hpp>
#include <llmmem/transfer/copy_task.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

/// A space whose bytes a `sharded_state` can keep although the host cannot access them: the space has one
/// line of work, such as a device's stream, that does what the host would do. `kernel_space`
/// (kernels/kernel_space.hpp) is one.
///
/// Work is done after the call, in the order of the calls; lists are read before a call returns. Addresses
/// are of the space, or of other memory that its line of work can access. Each returns a failure if the work
/// was refused: the calls before it still run.
///
/// - `clear(at, bytes)` writes zeros.
/// - `copy(tasks)` copies; no byte is written twice, or both read and written.
/// - `add(elements, parts, into, bytes)` sets `into` to the sum of the parts in their order, each sum rounded
///   to the element's type: f32, bf16 or f16. `into` overlaps no part.
/// - `finish()` waits until all work is done, also after a refusal of earlier calls; a failure means that the
///   device is lost, with its contents.
/// - `follow(queue)`, for pieces in tiers: work from now on runs after the work that the queue of tier 0 has
///   been given so far. Any thread may call it.
/// - `precede(stream)`, for a transport with `stream()`: what that stream is given from now on runs after the
///   work so far.
template <class S>
concept working_space =
    memory_space<S> && (!S::is_host_accessible) &&
    requires(S& space, std::byte* at, std::uint64_t bytes, std::span<const copy_task> tasks, dtype elements,
             std::span<const std::byte* const> parts) {
      { space.clear(at, bytes) } -> std::same_as<result<void>>;
      { space.copy(tasks) } -> std::same_as<result<void>>;
      { space.add(elements, parts, at, bytes) } -> std::same_as<result<void>>;
      { space.finish() } noexcept -> std::same_as<result<void>>;
    };

/// A transport whose messages are on a stream that can wait for the space's work: `nccl_transport`.
template <class T, class S>
concept messages_after_work_of = requires(T& ranks, S& space) {
  { space.precede(ranks.stream()) } -> std::same_as<result<void>>;
};

}  // namespace v0
}  // namespace llmmem
