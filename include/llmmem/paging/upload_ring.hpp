/// @file
/// Memory in which block tables are written and from which they are uploaded, so that a table in flight is
/// never overwritten.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/error.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/paging/errors.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/buffer.hpp>
#include <llmmem/space/concepts.hpp>
#include <llmmem/space/fence.hpp>

#include <cstddef>
#include <cstdint>
#include <new>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// The construction parameters of an `upload_ring`.
struct upload_ring_options {
  std::uint64_t slot_bytes = 0;      ///< of the largest upload: a table and all that is uploaded with it
  std::uint32_t slots = 3;           ///< tables in flight at once, and the table that the host writes
  std::uint64_t alignment = 256;     ///< of every slot, on both sides; a power of two
  std::string name = "upload_ring";  ///< the name in error texts
  metadata_source metadata{};        ///< source of memory for its records
};

/// A ring of slots. Each slot is a piece of host memory, into which the engine writes a step's tables, and a
/// piece of device memory, which the step's kernels read. A slot can be acquired again only once the fence
/// given at its release has passed.
///
/// Writing the next step's table into a buffer that the last step's copy still reads would silently give a
/// kernel another batch's blocks; this ring makes that impossible.
///
///     upload_ring<host_space, device_type> ring(host, device, {.slot_bytes = bytes_of_a_batch});
///     auto slot = ring.acquire().value();                     // refused if all are in flight
///     ...                                                     // write tables into slot.staging.span()
///     auto there = ring.upload(queue, slot, bytes).value();   // one copy
///     ...                                                     // launch after `there`, on slot.target
///     ring.release_after(slot, kernels_done).value();
///
/// A slot whose upload was refused is still held: return it with `release_after(slot, {})`.
///
/// @tparam Staging  a host-accessible space, pinned for speed.
/// @tparam Target   the space that kernels read; if both are host memory, `upload` still copies.
/// @tparam Fence    trivially copyable.
///
/// @par Complexity   O(1); slots are used in turn.
/// @par Thread safety   one caller at a time.
/// @par Waits   only `acquire_wait`.
/// @par Errors   the constructor throws `length_error`, `argument_error` and `out_of_memory`; all else
///   returns a `result`.
template <memory_space Staging, memory_space Target, fence Fence = host_fence>
class upload_ring {
 public:
  static_assert(Staging::is_host_accessible,
                "the host writes tables into Staging: use a host-accessible space");
  static_assert(std::is_trivially_copyable_v<Fence>,
                "a fence that waits in a ring must be trivially copyable");

  /// A slot that a caller holds.
  struct slot {
    typename Staging::range_type staging{};
    typename Target::range_type target{};
    std::uint32_t index = 0;
    std::uint32_t generation = 0;
  };

  upload_ring(Staging& staging, Target& target, const upload_ring_options& options)
      : name_(options.name),
        stride_(stride(options)),
        slot_bytes_(options.slot_bytes),
        staging_(staging, options.slots, stride_, std::align_val_t{options.alignment}),
        target_(target, options.slots, stride_, std::align_val_t{options.alignment}),
        states_(options.slots, state{}, options.metadata, "upload_ring: slots") {}

  /// Acquires the next slot, or returns `errc::ring_busy` when that slot is still held or in flight.
  [[nodiscard]] result<slot> acquire() noexcept {
    state& next = states_[next_];
    if (next.is_held || !next.after.ready()) {
      return failure{errc::ring_busy, next_, 1, states_.size(), name_.c_str()};
    }
    return take(next);
  }

  /// Acquires the next slot, waiting for its fence. `errc::ring_busy` if waiting would not help, because the
  /// caller has not released the slot.
  [[nodiscard]] result<slot> acquire_wait() {
    state& next = states_[next_];
    if (next.is_held) return failure{errc::ring_busy, next_, 1, states_.size(), name_.c_str()};
    next.after.wait();
    return take(next);
  }

  /// Copies the first `bytes` of the slot's staging memory to its target, once all of `after` have passed.
  /// @return the fence after which kernels may read it.
  template <copy_queue<Target> Queue>
  result<typename Queue::fence_type> upload(Queue& queue, const slot& from, std::uint64_t bytes,
                                            std::span<const typename Queue::fence_type> after = {}) {
    if (const auto held = check(from); !held) return held.error();
    if (bytes > slot_bytes_)
      return failure{errc::past_the_bytes, from.index, bytes, slot_bytes_, name_.c_str()};
    typename Target::range_type to = from.target;
    to.bytes = bytes;
    return queue.copy_in_async(to, from.staging.span().first(static_cast<std::size_t>(bytes)), after);
  }

  /// Returns the slot to the ring once `after` has passed: the fence of the last kernel that reads the
  /// target.
  result<void> release_after(const slot& done, const Fence& after) noexcept {
    if (const auto held = check(done); !held) return held;
    state& now = states_[done.index];
    now.after = after;
    now.is_held = false;
    return {};
  }

  [[nodiscard]] std::uint64_t slots() const noexcept { return states_.size(); }
  [[nodiscard]] std::uint64_t slot_bytes() const noexcept { return slot_bytes_; }
  [[nodiscard]] const std::string& name() const noexcept LLMMEM_LIFETIMEBOUND { return name_; }

 private:
  struct state {
    Fence after{};
    std::uint32_t generation = 0;
    bool is_held = false;
  };

  [[nodiscard]] static std::uint64_t stride(const upload_ring_options& options) {
    if (options.slot_bytes == 0)
      throw length_error(options.name + ": slots of 0 bytes; at least 1 is needed");
    if (options.slots < 2) {
      throw length_error(options.name + ": " + std::to_string(options.slots) +
                         " slots; at least 2 are needed, one to write while one is in flight");
    }
    if (options.alignment == 0 || (options.alignment & (options.alignment - 1)) != 0) {
      throw argument_error(options.name + ": alignment " + std::to_string(options.alignment) +
                           " is not a power of two");
    }
    const std::uint64_t padded =
        checked_add(options.slot_bytes, options.alignment - 1, (options.name + ": slot bytes").c_str());
    return padded / options.alignment * options.alignment;
  }

  [[nodiscard]] slot take(state& next) noexcept {
    next.is_held = true;
    const std::uint32_t index =
        std::exchange(next_, static_cast<std::uint32_t>((next_ + 1) % states_.size()));
    const std::uint64_t offset = index * stride_;
    return {.staging = {staging_.range().data + offset, slot_bytes_},
            .target = {target_.range().data + offset, slot_bytes_},
            .index = index,
            .generation = ++next.generation};
  }

  [[nodiscard]] result<void> check(const slot& named) const noexcept {
    if (named.generation == 0) return failure{errc::null_handle, 0, 0, 0, name_.c_str()};
    if (named.index >= states_.size() ||
        named.staging.data != staging_.range().data + named.index * stride_) {
      return failure{errc::foreign_handle, named.index, 0, 0, name_.c_str()};
    }
    const state& now = states_[named.index];
    if (named.generation != now.generation || !now.is_held) {
      return failure{errc::stale_handle, named.index, named.generation, now.generation, name_.c_str()};
    }
    return {};
  }

  std::string name_;
  std::uint64_t stride_;
  std::uint64_t slot_bytes_;
  space_buffer<Staging> staging_;
  space_buffer<Target> target_;
  detail::fixed_array<state> states_;
  std::uint32_t next_ = 0;
};

}  // namespace v0
}  // namespace llmmem
