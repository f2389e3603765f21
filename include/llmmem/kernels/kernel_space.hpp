/// @file
/// `kernel_space`: memory of a device whose bytes kernels copy, clear and add, on one queue.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/batched_copy.hpp>
#include <llmmem/kernels/ordered_sum.hpp>
#include <llmmem/kernels/xor_blocks.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/result.hpp>
#include <llmmem/transfer/copy_task.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace llmmem {
inline namespace v0 {

/// A device's memory with a line of work: a view of a space, of a queue of it, and of an executor on that
/// queue's stream. A `sharded_state` keeps its pieces in it (`working_space`).
///
///     device_space memory(device_pool_source<cuda_runtime>(device_id{0}), {.budget = bytes});
///     device_queue queue(memory, device_id{0});
///     kernel_space space(memory, queue, device_executor(queue.stream()));   // compiled by nvcc
///
/// Work is done in the order of the stream, after the call. So kernels of other streams and the work order
/// themselves by fences: `queue.follow` before the work, `queue.mark` after it. The stream must not be
/// captured into a graph.
///
/// @tparam Run  `device_executor` on the queue's stream.
/// @par Complexity      `copy`: one launch for 128 tasks, with threads for the longest; `add`: one for 16
///                      parts; `clear`: one. `precede` and `follow`: two calls of the driver, none for its
///                      own stream.
/// @par Thread safety   of allocation as the space's; one thread for the work. The three outlive the view.
/// @par Errors          `errc::device_failed` if the driver refuses, index its status, and what `copy_few`,
///                      `sum_in_order`, and the queue return.
template <class Space, class Queue, class Run>
class kernel_space {
 public:
  using range_type = typename Space::range_type;
  using queue_type = Queue;
  static constexpr bool is_host_accessible = false;
  static_assert(!Space::is_host_accessible,
                "the host works on bytes that it can access: it needs no kernels");

  kernel_space(Space& space, Queue& queue, Run run) noexcept : space_(&space), queue_(&queue), run_(run) {}

  /// @name The space's own
  /// @{
  [[nodiscard]] result<range_type> try_allocate(std::uint64_t bytes, std::uint64_t alignment) noexcept {
    return space_->try_allocate(bytes, alignment);
  }
  void deallocate(range_type range) noexcept { space_->deallocate(range); }
  [[nodiscard]] std::uint64_t capacity() const noexcept { return space_->capacity(); }
  [[nodiscard]] std::uint64_t used() const noexcept { return space_->used(); }
  [[nodiscard]] std::string_view name() const noexcept LLMMEM_LIFETIMEBOUND { return space_->name(); }
  /// @}
  [[nodiscard]] Space& space() const noexcept { return *space_; }
  [[nodiscard]] Queue& queue() const noexcept { return *queue_; }

  /// Writes zeros: the parity of no shards.
  result<void> clear(std::byte* at, std::uint64_t bytes) { return xor_parity(run_, {}, at, bytes); }
  /// Copies; no byte is written twice, or both read and written.
  result<void> copy(std::span<const copy_task> tasks) { return copy_few(run_, tasks); }
  /// As `sum_in_order`.
  result<void> add(dtype elements, std::span<const std::byte* const> parts, std::byte* into,
                   std::uint64_t bytes) {
    return sum_in_order(run_, elements, parts, into, bytes);
  }
  /// Work from now on runs after the work that another queue of the device has been given so far. Any thread
  /// may call it. @tparam Other  a `device_queue`.
  template <class Other>
  result<void> follow(Other& other) noexcept {
    if (other.stream() == queue_->stream()) return {};
    const auto so_far = other.mark();
    return so_far ? so_far->hold(queue_->stream()) : result<void>(so_far.error());
  }
  /// Work that `stream` is given from now on runs after the work so far.
  template <class Stream>
  result<void> precede(const Stream& stream) {
    if (stream == queue_->stream()) return {};
    const auto so_far = queue_->mark();
    return so_far ? so_far->hold(stream) : result<void>(so_far.error());
  }
  /// Waits for all work of the stream.
  result<void> finish() noexcept { return queue_->finish(); }

 private:
  Space* space_;
  Queue* queue_;
  Run run_;
};

}  // namespace v0
}  // namespace llmmem
