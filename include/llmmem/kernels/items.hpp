/// @file
/// Items: the loop of kernels other than copies of rows, on the host and on a device. An item is for one
/// thread, for a group of lanes with one common result, or for a group whose lanes communicate throughout.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/lanes.hpp>
#include <llmmem/kernels/launch.hpp>

#include <algorithm>
#include <atomic>
#include <bit>
#include <concepts>
#include <cstdint>
#include <type_traits>

namespace llmmem {
inline namespace v0 {

/// Work with independent items: `run(item)` does one of `items()`. Trivially copyable; the pointers in it
/// belong to the executor's memory. Consecutive items should be neighbours in memory, 16 bytes apart, because
/// neighbouring threads take them. Its members are `LLMMEM_HD`, as a `row_map`'s.
template <class W>
concept item_work = std::is_trivially_copyable_v<W> && requires(const W& work, std::uint64_t item) {
  { work.items() } noexcept -> std::same_as<std::uint64_t>;
  { work.run(item) } noexcept -> std::same_as<void>;
};

/// One of the lanes that share an item.
struct group_lane {
  std::uint32_t lane = 0;
  std::uint32_t lanes = 1;
};

/// Work with an item for each group of lanes, which compute one result together: a maximum, a sum, whether
/// anything differs.
///
/// - Its members are `LLMMEM_HD`, as a `row_map`'s.
/// - `lanes()` is their number: a power of two up to 32. A host uses one lane for all, so the result must not
///   depend on the number.
/// - `take(item, lane)` reads a lane's share and holds it; `measure(held)` returns the lane's own result. The
///   lane may write at once, and need not hold, what depends on no other lane. Lanes without an item also
///   call `measure`, for a `held{}`, when other lanes of their warp have an item.
/// - `combine(a, b)` joins the results of two lanes. It must give the same bits in any order and grouping:
///   maxima, integers and bits do, sums of floats do not. A `partial` consists of 32-bit words.
/// - `give(item, lane, held, total)` writes, given the joint result of all lanes.
template <class W>
concept group_work =
    std::is_trivially_copyable_v<W> && std::is_trivially_copyable_v<typename W::held> &&
    std::default_initializable<typename W::held> && std::is_trivially_copyable_v<typename W::partial> &&
    sizeof(typename W::partial) % 4 == 0 &&
    requires(const W& work, std::uint64_t item, group_lane lane, const typename W::held& held,
             const typename W::partial& known) {
      { work.items() } noexcept -> std::same_as<std::uint64_t>;
      { work.lanes() } noexcept -> std::same_as<std::uint32_t>;
      { work.take(item, lane) } noexcept -> std::same_as<typename W::held>;
      { W::measure(held) } noexcept -> std::same_as<typename W::partial>;
      { W::combine(known, known) } noexcept -> std::same_as<typename W::partial>;
      { work.give(item, lane, held, known) } noexcept -> std::same_as<void>;
    };

/// The items that a thread takes, and its lane in their groups.
struct item_share {
  std::uint64_t first = 0;
  std::uint64_t stride = 1;  ///< the distance to its next item
  group_lane lane{};
  std::uint32_t ahead = 0;  ///< groups of the same warp that take lower items: they take turns together

  /// Whether any lane of the warp has an item in the turn in which this lane's item is `item`: the same
  /// answer in all lanes.
  [[nodiscard]] LLMMEM_HD constexpr bool turns(std::uint64_t item, std::uint64_t items) const noexcept {
    return item - ahead < items;
  }
};

/// Threads that a device runs together.
inline constexpr std::uint32_t warp_threads = 32;

/// Threads of a launch over items.
struct item_launch {
  std::uint32_t blocks = 0;  ///< 0: no work
  std::uint32_t lane_bits = 0;
  std::uint32_t threads = default_threads;  ///< threads of a block

  static constexpr std::uint32_t default_threads = 256;
  [[deprecated("its name is default_threads")]] static constexpr std::uint32_t usual_threads =
      default_threads;

  friend constexpr bool operator==(const item_launch&, const item_launch&) noexcept = default;
};

/// A thread or a group for each item, unless the limits allow fewer blocks.
/// @pre `lanes` is a power of two, up to 32; `threads` are a multiple of 32
[[nodiscard]] constexpr item_launch plan_items(
    std::uint64_t items, std::uint32_t lanes, const launch_limits& limits,
    std::uint32_t threads = item_launch::default_threads) noexcept {
  if (items == 0) return {};
  const auto lane_bits = static_cast<std::uint32_t>(std::countr_zero(lanes));
  const std::uint64_t wanted = (items - 1) / (threads >> lane_bits) + 1;
  const std::uint64_t most = limits.blocks == 0 ? 0x7FFF'FFFF : limits.blocks;
  return {static_cast<std::uint32_t>(std::min(wanted, most)), lane_bits, threads};
}

/// Returns the items that a thread of a launch takes.
[[nodiscard]] LLMMEM_HD constexpr item_share share_of(const item_launch& launch, std::uint32_t block,
                                                      std::uint32_t thread) noexcept {
  const std::uint32_t items_a_block = launch.threads >> launch.lane_bits;
  return {.first = std::uint64_t{block} * items_a_block + (thread >> launch.lane_bits),
          .stride = std::uint64_t{launch.blocks} * items_a_block,
          .lane = {thread & ((1U << launch.lane_bits) - 1U), 1U << launch.lane_bits},
          .ahead = (thread % warp_threads) >> launch.lane_bits};
}

/// The loop of one thread over items.
template <item_work Work>
LLMMEM_HD inline void run_items(const Work& work, const item_share& share) noexcept {
  for (std::uint64_t item = share.first; item < work.items(); item += share.stride)
    work.run(item);
}

/// The loop of one lane over items. `other(known, step)` is the value of the lane whose number differs by the
/// bit `step`. All lanes of a warp exchange at once, including those whose group has no item left: if each
/// group exchanged alone, the device would determine the participants each time.
template <group_work Work, class Other>
LLMMEM_HD inline void run_groups(const Work& work, const item_share& share, const Other& other) noexcept {
  const std::uint64_t items = work.items();
  for (std::uint64_t item = share.first; share.turns(item, items); item += share.stride) {
    const bool has_item = item < items;
    const typename Work::held held = has_item ? work.take(item, share.lane) : typename Work::held{};
    typename Work::partial known = Work::measure(held);
    for (std::uint32_t step = share.lane.lanes / 2; step != 0; step /= 2)
      known = Work::combine(known, other(known, step));
    if (has_item) work.give(item, share.lane, held, known);
  }
}

/// The loop of one lane, or of a host for all of a group, over items, and over empty items while other lanes
/// of the warp have one.
template <lane_work Work, class Group>
LLMMEM_HD inline void run_lanes(const Work& work, const item_share& share, const Group& group) noexcept {
  for (std::uint64_t item = share.first; share.turns(item, work.items()); item += share.stride)
    work.run(item, group);
}

/// Sets bits of a word, atomically with respect to other threads that do so.
LLMMEM_HD inline void join_bits(std::uint32_t& word, std::uint32_t bits) noexcept {
#if defined(__CUDA_ARCH__)
  atomicOr(&word, bits);
#else
  std::atomic_ref(word).fetch_or(bits, std::memory_order_relaxed);
#endif
}

/// Adds to a number modulo 2^64, atomically with respect to other threads that do so.
LLMMEM_HD inline void add_to(std::uint64_t& number, std::uint64_t more) noexcept {
#if defined(__CUDA_ARCH__)
  atomicAdd(reinterpret_cast<unsigned long long*>(&number), static_cast<unsigned long long>(more));
#else
  std::atomic_ref(number).fetch_add(more, std::memory_order_relaxed);
#endif
}

/// Lowers a number to at most `most`, atomically with respect to other threads that do so.
template <class Number>
  requires(std::same_as<Number, std::uint64_t> || std::same_as<Number, std::int32_t>)
LLMMEM_HD inline void lower_to(Number& number, std::type_identity_t<Number> most) noexcept {
#if defined(__CUDA_ARCH__)
  using word = std::conditional_t<sizeof(Number) == 8, unsigned long long, int>;
  atomicMin(reinterpret_cast<word*>(&number), static_cast<word>(most));
#else
  const std::atomic_ref shared(number);
  Number now = shared.load(std::memory_order_relaxed);
  while (most < now && !shared.compare_exchange_weak(now, most, std::memory_order_relaxed)) {
  }
#endif
}

/// Raises a number to at least `least`, atomically with respect to other threads that do so.
LLMMEM_HD inline void raise_to(std::int32_t& number, std::int32_t least) noexcept {
#if defined(__CUDA_ARCH__)
  atomicMax(&number, least);
#else
  const std::atomic_ref shared(number);
  std::int32_t now = shared.load(std::memory_order_relaxed);
  while (least > now && !shared.compare_exchange_weak(now, least, std::memory_order_relaxed)) {
  }
#endif
}

/// Combines bits with a word by exclusive or, atomically with respect to other threads that do so.
LLMMEM_HD inline void join_xor(std::uint32_t& word, std::uint32_t bits) noexcept {
#if defined(__CUDA_ARCH__)
  atomicXor(&word, bits);
#else
  std::atomic_ref(word).fetch_xor(bits, std::memory_order_relaxed);
#endif
}

}  // namespace v0
}  // namespace llmmem
