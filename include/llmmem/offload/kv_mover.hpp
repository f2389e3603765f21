/// @file
/// Movers, which copy blocks between the memory of a cache and the slots of the first tier below it.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/kv_blocks.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/paging/kv_layout.hpp>
#include <llmmem/paging/layer_group.hpp>
#include <llmmem/paging/super_page_types.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/fence.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace offload {

/// The slots of one group in the first tier: slot i is `stride` bytes from `data + i * stride` on.
struct slot_memory {
  std::byte* data = nullptr;
  std::uint64_t slots = 0;
  std::uint64_t stride = 0;
};

/// A block of a cache and the slot that it is copied to or from.
struct slot_pair {
  block_id block = null_block;
  std::uint32_t slot = 0;
};

/// The maximum number of pairs in one call of a mover.
inline constexpr std::size_t max_slot_pairs = 128;
[[deprecated("its name is max_slot_pairs")]] inline constexpr std::size_t most_slot_pairs = max_slot_pairs;

/// Copies blocks of a cache into slots (`save`) and back (`restore`), layer by layer on request.
///
/// - `groups()`: the number of groups of layers that it serves; 1 for a `paged_allocator`.
/// - `block_bytes(g)`: the bytes that a block of group g takes in a slot.
/// - `layers(g)`: the parts of a block that `restore` can bring one by one.
/// - `save(g, slots, pairs, after)`: begins after the fence `after`, and reads the blocks before the engine's
///   later work can write to them. Its fence passes when all slots are written.
/// - `restore(g, slots, pairs, layers)`: its fence passes when those layers are in the cache's memory, and no
///   earlier than those of earlier calls, as on one stream: a load waits for the last of several.
/// - If a copy fails, either the call returns the failure, or its fence and all later fences of the mover
///   report it, as on a stream whose device is lost.
/// - `blocks()`, optional: the number of blocks in its memory, at least the number in the cache.
/// - `runs_on_caller`: whether the calls copy before they return. The tiers then call `save` only with fences
///   that have passed.
template <class M>
concept kv_mover = std::movable<M> && fence<typename M::fence_type> &&
                   requires(M& mover, const M& seen, std::size_t group, const slot_memory& slots,
                            std::span<const slot_pair> pairs, const typename M::fence_type& after,
                            const layer_range& layers) {
                     { seen.groups() } noexcept -> std::convertible_to<std::size_t>;
                     { seen.block_bytes(group) } noexcept -> std::convertible_to<std::uint64_t>;
                     { seen.layers(group) } noexcept -> std::convertible_to<std::uint32_t>;
                     {
                       mover.save(group, slots, pairs, after)
                     } -> std::same_as<result<typename M::fence_type>>;
                     {
                       mover.restore(group, slots, pairs, layers)
                     } -> std::same_as<result<typename M::fence_type>>;
                     { M::runs_on_caller } -> std::convertible_to<bool>;
                   };

/// Marks work on a host executor; its fence has always passed.
struct passed_mark {
  using fence_type = host_fence;
  static constexpr bool runs_on_caller = true;
  [[nodiscard]] result<host_fence> operator()() const noexcept { return host_fence{}; }
  result<void> wait_for(const host_fence& after) const noexcept {
    after.wait();
    return {};
  }
};

/// Marks the work submitted to a queue so far, for an executor that runs on the same stream:
///
///     offload::layout_mover mover(device_executor(stream), memory, offload::queue_mark(queue));
///
/// @tparam Queue  with `mark()` and `follow(fences)`, such as a `device_queue`; outlives the mark.
template <class Queue>
class queue_mark {
 public:
  using fence_type = typename Queue::fence_type;
  static constexpr bool runs_on_caller = false;

  explicit queue_mark(Queue& queue) noexcept : queue_(&queue) {}
  [[nodiscard]] result<fence_type> operator()() const noexcept { return queue_->mark(); }
  result<void> wait_for(const fence_type& after) const noexcept {
    return queue_->follow(std::span(&after, 1));
  }

 private:
  Queue* queue_;
};

/// Moves blocks through the description of their layout: slots hold them packed (`kv_layout::packed`), so
/// that a slot's bytes do not depend on the order of the cache's memory.
///
///     offload::layout_mover mover(host_executor{}, {.data = kv, .blocks = n, .layout = layout});
///
/// @tparam Run   `host_executor`, or a `device_executor` whose kernels can access the slots (pinned
///               memory).
/// @tparam Mark  returns a fence for the work submitted to `Run` so far, and makes `Run` wait for a fence:
///               `passed_mark`, or `queue_mark` of a stream's queue.
template <class Run, class Mark = passed_mark>
class layout_mover {
 public:
  using fence_type = typename Mark::fence_type;
  static constexpr bool runs_on_caller = Mark::runs_on_caller;

  /// @param memory  all physical blocks of the cache (`physical_blocks()`, the null block included), laid
  ///                out for the cache's blocks. The bytes outlive the mover.
  /// @throws length_error, argument_error  for a layout that `kv_layout::checked` refuses.
  layout_mover(Run run, kv_memory memory, Mark mark = Mark())
      : run_(std::move(run)),
        mark_(std::move(mark)),
        memory_(memory),
        packed_(memory.layout.checked().packed()) {}

  [[nodiscard]] std::size_t groups() const noexcept { return 1; }
  [[nodiscard]] std::uint64_t block_bytes(std::size_t) const noexcept { return packed_.block_bytes(); }
  [[nodiscard]] std::uint32_t layers(std::size_t) const noexcept { return packed_.layers; }
  [[nodiscard]] std::uint64_t blocks() const noexcept { return memory_.blocks; }
  [[nodiscard]] const kv_memory& memory() const noexcept { return memory_; }

  result<fence_type> save(std::size_t, const slot_memory& slots, std::span<const slot_pair> pairs,
                          const fence_type& after) {
    if (const auto waits = mark_.wait_for(after); !waits) return waits.error();
    block_pair list[max_slot_pairs];
    for (std::size_t i = 0; i < pairs.size(); ++i)
      list[i] = {.from = to_index(pairs[i].block), .to = pairs[i].slot};
    if (is_packed(slots)) {
      return finish(copy_few_kv_blocks(run_, memory_of(slots), memory_, std::span(list).first(pairs.size())));
    }
    for (std::size_t i = 0; i < pairs.size(); ++i) {
      const kv_memory slot = slot_of(slots, pairs[i].slot);
      list[i].to = 0;
      if (const auto begun = copy_few_kv_blocks(run_, slot, memory_, std::span(list).subspan(i, 1)); !begun)
        return begun.error();
    }
    return mark_();
  }
  result<fence_type> restore(std::size_t, const slot_memory& slots, std::span<const slot_pair> pairs,
                             const layer_range& layers) {
    block_pair list[max_slot_pairs];
    for (std::size_t i = 0; i < pairs.size(); ++i)
      list[i] = {.from = pairs[i].slot, .to = to_index(pairs[i].block)};
    if (is_packed(slots)) {
      return finish(copy_few_kv_blocks(run_, memory_, memory_of(slots), std::span(list).first(pairs.size()),
                                       {.layers = layers}));
    }
    for (std::size_t i = 0; i < pairs.size(); ++i) {
      const kv_memory slot = slot_of(slots, pairs[i].slot);
      list[i].from = 0;
      const auto begun =
          copy_few_kv_blocks(run_, memory_, slot, std::span(list).subspan(i, 1), {.layers = layers});
      if (!begun) return begun.error();
    }
    return mark_();
  }

 private:
  /// Returns whether slots are contiguous, so that one call can move many. Otherwise each slot counts as a
  /// memory of one block.
  [[nodiscard]] bool is_packed(const slot_memory& slots) const noexcept {
    return slots.stride == packed_.block_bytes();
  }
  [[nodiscard]] kv_memory memory_of(const slot_memory& slots) const noexcept {
    return {.data = slots.data, .blocks = slots.slots, .layout = packed_};
  }
  [[nodiscard]] kv_memory slot_of(const slot_memory& slots, std::uint32_t slot) const noexcept {
    return {.data = slots.data + slot * slots.stride, .blocks = 1, .layout = packed_};
  }
  [[nodiscard]] result<fence_type> finish(const result<void>& begun) {
    if (!begun) return begun.error();
    return mark_();
  }

  Run run_;
  Mark mark_;
  kv_memory memory_;
  kv_layout packed_;
};

/// A mover whose executor runs on the calling thread.
template <class Run>
layout_mover(Run, kv_memory) -> layout_mover<Run>;
/// A mover whose executor runs on a stream.
template <class Run, class Mark>
layout_mover(Run, kv_memory, Mark) -> layout_mover<Run, Mark>;

/// Moves blocks of a `hybrid_allocator` whose pages are in host memory, unchanged: each block is one run of
/// bytes in its page, divided into equal parts for its layers.
///
/// @par Thread safety   as a plain value.
class page_mover {
 public:
  using fence_type = host_fence;
  static constexpr bool runs_on_caller = true;

  /// The contents of one group's blocks.
  struct group_form {
    std::uint64_t block_bytes = 0;
    std::uint32_t layers = 1;  ///< parts of equal length in a block
  };

  /// @param pages   the memory of the allocator's pool, its null page included.
  /// @param layout  `hybrid_allocator::layout()`.
  /// @throws length_error  for a block whose bytes are not a multiple of its layers.
  page_mover(std::span<std::byte> pages, const super_page_layout& layout, std::span<const group_form> groups)
      : pages_(pages), layout_(layout), groups_(groups.begin(), groups.end()) {
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      const group_form& each = groups_[g];
      if (each.layers != 0 && each.block_bytes != 0 && each.block_bytes % each.layers == 0) continue;
      throw length_error("page_mover: group " + std::to_string(g) + " has blocks of " +
                         std::to_string(each.block_bytes) + " bytes for " + std::to_string(each.layers) +
                         " layers; a block must divide into its layers");
    }
  }

  [[nodiscard]] std::size_t groups() const noexcept { return groups_.size(); }
  [[nodiscard]] std::uint64_t block_bytes(std::size_t group) const noexcept {
    return groups_[group].block_bytes;
  }
  [[nodiscard]] std::uint32_t layers(std::size_t group) const noexcept { return groups_[group].layers; }

  result<host_fence> save(std::size_t group, const slot_memory& slots, std::span<const slot_pair> pairs,
                          const host_fence& after) {
    after.wait();
    const auto bytes = static_cast<std::size_t>(groups_[group].block_bytes);
    for (const slot_pair& each : pairs)
      std::memcpy(slots.data + each.slot * slots.stride, place(group, each.block), bytes);
    return host_fence{};
  }
  result<host_fence> restore(std::size_t group, const slot_memory& slots, std::span<const slot_pair> pairs,
                             const layer_range& layers) {
    const std::uint64_t part = groups_[group].block_bytes / groups_[group].layers;
    const std::uint64_t first = layers.first * part;
    for (const slot_pair& each : pairs) {
      std::memcpy(place(group, each.block) + first, slots.data + each.slot * slots.stride + first,
                  static_cast<std::size_t>(layers.count * part));
    }
    return host_fence{};
  }

 private:
  [[nodiscard]] std::byte* place(std::size_t group, block_id block) const noexcept {
    return pages_.data() + layout_.offset(block, groups_[group].block_bytes);
  }

  std::span<std::byte> pages_;
  super_page_layout layout_;
  std::vector<group_form> groups_;
};

/// Moves blocks whose bytes are in two memories under one table, such as codes and their scales: a slot holds
/// the first mover's bytes, followed by the second's.
///
///     offload::joint_mover mover(layout_mover(run, codes), layout_mover(run, scales));
///
/// Both movers must work in order on the same stream, or on the caller, because the second mover's fence
/// counts for both.
///
/// @par Errors   the constructor throws `argument_error` if the movers differ in groups or layers.
template <kv_mover First, kv_mover Second>
class joint_mover {
  static_assert(std::same_as<typename First::fence_type, typename Second::fence_type>,
                "the two movers of a joint_mover must have the same fences: give both the same stream");

 public:
  using fence_type = typename First::fence_type;
  static constexpr bool runs_on_caller = First::runs_on_caller && Second::runs_on_caller;

  joint_mover(First first, Second second) : first_(std::move(first)), second_(std::move(second)) {
    const auto refuse = [](const char* what, std::uint64_t one, std::uint64_t other) {
      throw argument_error("joint_mover: the first mover has " + std::to_string(one) + " " + what +
                           ", the second " + std::to_string(other) +
                           "; both must move the same blocks of the same layers");
    };
    if (first_.groups() != second_.groups()) refuse("groups", first_.groups(), second_.groups());
    for (std::size_t g = 0; g < first_.groups(); ++g) {
      if (first_.layers(g) != second_.layers(g)) refuse("layers", first_.layers(g), second_.layers(g));
    }
  }

  [[nodiscard]] std::size_t groups() const noexcept { return first_.groups(); }
  [[nodiscard]] std::uint64_t block_bytes(std::size_t group) const noexcept {
    return first_.block_bytes(group) + second_.block_bytes(group);
  }
  [[nodiscard]] std::uint32_t layers(std::size_t group) const noexcept { return first_.layers(group); }
  /// Returns the number of blocks that both memories have.
  [[nodiscard]] std::uint64_t blocks() const noexcept
    requires requires(const First& one, const Second& other) {
      one.blocks();
      other.blocks();
    }
  {
    return first_.blocks() < second_.blocks() ? first_.blocks() : second_.blocks();
  }

  result<fence_type> save(std::size_t group, const slot_memory& slots, std::span<const slot_pair> pairs,
                          const fence_type& after) {
    if (const auto begun = first_.save(group, slots, pairs, after); !begun) return begun;
    return second_.save(group, behind(group, slots), pairs, after);
  }
  result<fence_type> restore(std::size_t group, const slot_memory& slots, std::span<const slot_pair> pairs,
                             const layer_range& layers) {
    if (const auto begun = first_.restore(group, slots, pairs, layers); !begun) return begun;
    return second_.restore(group, behind(group, slots), pairs, layers);
  }

 private:
  [[nodiscard]] slot_memory behind(std::size_t group, const slot_memory& slots) const noexcept {
    return {slots.data + first_.block_bytes(group), slots.slots, slots.stride};
  }

  First first_;
  Second second_;
};

static_assert(kv_mover<layout_mover<host_executor>> && kv_mover<page_mover> &&
              kv_mover<joint_mover<page_mover, layout_mover<host_executor>>>);

}  // namespace offload
}  // namespace v0
}  // namespace llmmem
