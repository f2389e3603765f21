/// @file
/// Lanes: work with an item for each group of lanes that communicate throughout. Written once, in terms of
/// what each lane holds; on a device a lane is a thread of a warp, on a host a turn of a loop.
#pragma once

#include <llmmem/config.hpp>

#include <concepts>
#include <cstdint>
#include <type_traits>

namespace llmmem {
inline namespace v0 {

/// Lanes on a host: one thread has all lanes of a group.
class host_lanes {
 public:
  static constexpr std::uint32_t most = 32;

  /// One value for each lane.
  template <class T>
  class held {
   public:
    [[nodiscard]] LLMMEM_HD T& operator[](std::uint32_t lane) noexcept { return of_[lane]; }
    [[nodiscard]] LLMMEM_HD const T& operator[](std::uint32_t lane) const noexcept { return of_[lane]; }

   private:
    T of_[most]{};
  };

  /// @param idle_turns  turns of each loop in addition to the group's own: as if another group of a device's
  ///     warp needed them.
  /// @pre `lanes` is a power of two, up to 32
  LLMMEM_HD explicit constexpr host_lanes(std::uint32_t lanes, std::uint32_t idle_turns = 0) noexcept
      : lanes_(lanes), idle_turns_(idle_turns) {}

  [[nodiscard]] LLMMEM_HD constexpr std::uint32_t count() const noexcept { return lanes_; }

  /// Returns how many turns a loop with communication takes, if this group needs `own`.
  [[nodiscard]] LLMMEM_HD constexpr std::uint32_t turns(std::uint32_t own) const noexcept {
    return own + idle_turns_;
  }

  /// Waits for all lanes: before a product, which all lanes must begin together.
  LLMMEM_HD void meet() const noexcept {}
  /// Each lane executes `f`.
  template <class Do>
  LLMMEM_HD void each(const Do& act) const noexcept {
    for (std::uint32_t lane = 0; lane < lanes_; ++lane)
      act(lane);
  }
  /// Each lane gets the value of the lane whose number differs by the bit `step`.
  template <class T>
    requires(sizeof(T) == 4)
  LLMMEM_HD void swap(held<T>& values, std::uint32_t step) const noexcept {
    const held<T> before = values;
    for (std::uint32_t lane = 0; lane < lanes_; ++lane)
      values[lane] = before[lane ^ step];
  }
  /// Each lane gets the value of lane `from(lane)`.
  template <class T, class From>
    requires(sizeof(T) == 4)
  LLMMEM_HD void take_from(held<T>& out, const held<T>& values, const From& from) const noexcept {
    for (std::uint32_t lane = 0; lane < lanes_; ++lane)
      out[lane] = values[from(lane)];
  }
  /// Returns the lanes that hold `true`, a bit each. @pre the group has 32 lanes
  [[nodiscard]] LLMMEM_HD std::uint32_t ballot(const held<bool>& values) const noexcept {
    std::uint32_t out = 0;
    for (std::uint32_t lane = 0; lane < lanes_; ++lane)
      out |= (values[lane] ? 1U : 0U) << lane;
    return out;
  }
  /// Returns the value of number `i` of the eight lanes that include `lane`. @pre i < 8
  [[nodiscard]] LLMMEM_HD float of_eight(const held<float>& values, std::uint32_t lane,
                                         std::uint32_t i) const noexcept {
    return values[(lane & ~7U) | i];
  }

 private:
  std::uint32_t lanes_;
  std::uint32_t idle_turns_;
};

/// Work whose items each take `lanes()` lanes together, a power of two from 8 to 32. Trivially copyable; the
/// pointers in it belong to the executor's memory. Its members are `LLMMEM_HD`, as a `row_map`'s.
///
/// Each thread that is a lane of the group calls `run(item, group)`, or a host once. A lane's values are in a
/// `Group::held<T>`; `group.each(f)` calls `f(lane)` for each lane of the calling thread; between two such
/// calls all lanes call `swap`, `take_from`, `ballot` and `of_eight`. What one lane writes to memory another
/// may read after all have called `meet`.
///
/// A device's warp has several groups, and all of them communicate at once. So `run` is also called with an
/// item past the end, `items()` and above: it communicates as for an item, but reads and writes nothing. A
/// loop with communication takes `group.turns(own)` turns, where `own` are those that the group needs: in the
/// others it communicates without effect. No branch around communication may depend on the item in any other
/// way.
///
/// Work that needs a newer device has `compute_capability`, 80 for 8.0: kernels compiled for less are not
/// launched.
///
/// `threads` is the number of threads in a block of a device's launch, a multiple of 32, and `blocks` the
/// number of blocks for which a multiprocessor must have space: fewer leave each thread more registers.
template <class W>
concept lane_work =
    std::is_trivially_copyable_v<W> && requires(const W& work, std::uint64_t item, const host_lanes& group) {
      { work.items() } noexcept -> std::same_as<std::uint64_t>;
      { work.lanes() } noexcept -> std::same_as<std::uint32_t>;
      { W::threads } -> std::convertible_to<std::uint32_t>;
      { W::blocks } -> std::convertible_to<std::uint32_t>;
      { work.run(item, group) } noexcept -> std::same_as<void>;
    };

}  // namespace v0
}  // namespace llmmem
