/// @file
/// `executor_packer`: packs shares of a split from device memory into pinned memory, and unpacks them.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/kernels/batched_copy.hpp>
#include <llmmem/kernels/launch.hpp>
#include <llmmem/offload/detail/pending_save.hpp>
#include <llmmem/offload/kv_mover.hpp>
#include <llmmem/offload/share_packer.hpp>
#include <llmmem/paging/kv_split.hpp>
#include <llmmem/result.hpp>
#include <llmmem/transfer/copy_task.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <utility>

namespace llmmem {
inline namespace v0 {
namespace offload {

/// Packs and unpacks shares on a stream, one kernel for each share: the host lists the runs, and the kernel
/// copies them between the cache and a slot.
///
///     offload::executor_packer packer(device_executor(stream), offload::queue_mark(queue), staging);
///     kv_handover handover(ranks, plan, prefill, decode, {.max_tokens = 2048}, std::move(packer));
///     handover.send(part, memory, blocks, by, layer_is_computed).value();
///
/// A slot holds the largest message and 24 bytes for each vector of it, which is the list. As many slots as
/// fit into the staging memory are a ring: with two or more a share is packed while another one is sent. The
/// packer uses no other memory.
///
/// @tparam Run   `device_executor`, or `host_executor` for memory that the host can access.
/// @tparam Mark  `queue_mark` of a queue on the same stream, or `passed_mark` with a `host_executor`.
/// @par Complexity      O(vectors) on the host, and O(bytes) of the device.
/// @par Thread safety   one thread at a time.
/// @par Errors   those of `kv_split_plan::pack`, of the launch and of the mark; `errc::completion_lost` from
///   `wait` for a fence that throws, as of a lost device. If a mark fails after its launch, the slot and the
///   blocks may still be in use: synchronise the stream before they are used again.
template <class Run, class Mark = passed_mark>
class executor_packer {
 public:
  using fence_type = typename Mark::fence_type;

  /// @param staging  pinned memory that the host and the device access at the same address; outlives the
  ///                 packer and its kernels. Of device memory, a `kv_memory::plane_table` must be readable by
  ///                 the host.
  executor_packer(Run run, Mark mark, std::span<std::byte> staging)
      : run_(std::move(run)), mark_(std::move(mark)), staging_(staging) {}

  /// @throws length_error  with the bytes that one slot needs, if the staging memory has fewer.
  void reserve(const packer_needs& needs) {
    message_bytes_ = aligned(needs.message_bytes);
    vectors_ = needs.vectors;
    const std::uint64_t slot_bytes =
        checked_add(message_bytes_, checked_multiply(vectors_, sizeof(copy_task), "executor_packer: list"),
                    "executor_packer");
    slot_bytes_ = aligned(slot_bytes);
    void* at = staging_.data();
    std::size_t left = staging_.size();
    const std::uint64_t usable = std::align(alignment, 1, at, left) == nullptr ? 0 : left;
    first_ = static_cast<std::byte*>(at);
    if (usable < slot_bytes_)
      throw length_error(needs.name + ": the staging memory has " + std::to_string(usable) +
                         " bytes, and one share needs " + std::to_string(slot_bytes_) +
                         "; give more, or lower max_tokens");
    slots_ = static_cast<std::uint32_t>(
        std::min<std::uint64_t>(usable / slot_bytes_, std::numeric_limits<std::uint32_t>::max()));
  }
  [[nodiscard]] std::uint32_t slots() const noexcept { return slots_; }
  [[nodiscard]] std::uint64_t staging_bytes() const noexcept { return slots_ * slot_bytes_; }
  [[nodiscard]] std::span<std::byte> slot(std::uint32_t i) noexcept LLMMEM_LIFETIMEBOUND {
    return {first_ + i * slot_bytes_, static_cast<std::size_t>(message_bytes_)};
  }

  result<fence_type> pack(const layer_share& what, std::uint32_t i, const fence_type& after) noexcept {
    std::byte* at = slot(i).data();
    task_list list(tasks(i), vectors_);
    const auto listed = what.plan.each_packed(what.share, what.layer, what.range, what.memory, what.table,
                                              [&](const std::byte* from, std::uint64_t bytes) {
                                                list.add(from, at, bytes);
                                                at += bytes;
                                              });
    if (!listed) return listed.error();
    if (const auto waits = mark_.wait_for(after); !waits) return waits.error();
    return copy(list);
  }
  result<fence_type> unpack(const layer_share& what, std::uint32_t i) noexcept {
    const std::byte* at = slot(i).data();
    task_list list(tasks(i), vectors_);
    const auto listed = what.plan.each_unpacked(what.share, what.layer, what.range, what.memory, what.table,
                                                [&](std::byte* to, std::uint64_t bytes) {
                                                  list.add(at, to, bytes);
                                                  at += bytes;
                                                });
    if (!listed) return listed.error();
    return copy(list);
  }
  [[nodiscard]] result<void> wait(const fence_type& fence) const noexcept {
    return detail::settled(fence, "executor_packer: a copy");
  }

 private:
  static constexpr std::uint64_t alignment = 64;
  [[nodiscard]] static std::uint64_t aligned(std::uint64_t bytes) noexcept {
    return (bytes + alignment - 1) / alignment * alignment;
  }

  /// The runs of a share, in its slot. Runs that are adjacent at both ends are one.
  class task_list {
   public:
    task_list(copy_task* tasks, std::uint64_t most) noexcept : tasks_(tasks), most_(most) {}
    void add(const std::byte* from, std::byte* to, std::uint64_t bytes) noexcept {
      aligned_.from = std::min(aligned_.from, alignment_of(reinterpret_cast<std::uintptr_t>(from)));
      aligned_.to = std::min(aligned_.to, alignment_of(reinterpret_cast<std::uintptr_t>(to)));
      if (count_ != 0) {
        copy_task& last = tasks_[count_ - 1];
        if (last.from + last.bytes == from && last.to + last.bytes == to) {
          last.bytes += bytes;
          longest_ = std::max(longest_, last.bytes);
          return;
        }
      }
      if (count_ == most_) return;  // cannot happen: a run has at least one vector
      ::new (static_cast<void*>(tasks_ + count_++)) copy_task{.from = from, .to = to, .bytes = bytes};
      longest_ = std::max(longest_, bytes);
    }
    [[nodiscard]] std::span<const copy_task> all() const noexcept {
      return {tasks_, static_cast<std::size_t>(count_)};
    }
    [[nodiscard]] std::uint64_t longest() const noexcept { return longest_; }
    [[nodiscard]] row_alignment alignment() const noexcept { return aligned_; }

   private:
    copy_task* tasks_;
    std::uint64_t most_;
    std::uint64_t count_ = 0;
    std::uint64_t longest_ = 0;
    row_alignment aligned_{16, 16};
  };

  [[nodiscard]] copy_task* tasks(std::uint32_t i) noexcept {
    return reinterpret_cast<copy_task*>(first_ + i * slot_bytes_ + message_bytes_);
  }
  [[nodiscard]] result<fence_type> copy(const task_list& list) noexcept {
    if (auto begun = copy_batch(run_, list.all(), list.longest(), list.alignment()); !begun)
      return begun.error();
    return mark_();
  }

  Run run_;
  Mark mark_;
  std::span<std::byte> staging_;
  std::byte* first_ = nullptr;
  std::uint64_t message_bytes_ = 0;
  std::uint64_t vectors_ = 0;
  std::uint64_t slot_bytes_ = 0;
  std::uint32_t slots_ = 0;
};
static_assert(share_packer<executor_packer<host_executor>>);

}  // namespace offload
}  // namespace v0
}  // namespace llmmem
