/// @file
/// Lanes: work whose items are each for a group of lanes that speak to each other all along. Written once, in
/// terms of what each lane holds; on a device a lane is a thread of a warp, on a host a turn of a loop.
#pragma once

#include <llmmem/config.hpp>

#include <concepts>
#include <cstdint>
#include <type_traits>

namespace llmmem {
inline namespace v0 {

/// Lanes on a host: all of a group are one thread's.
class host_lanes {
 public:
  static constexpr std::uint32_t most = 32;

  /// Something that each lane has one of.
  template <class T>
  class held {
   public:
    [[nodiscard]] LLMMEM_HD T& operator[](std::uint32_t lane) noexcept { return of_[lane]; }
    [[nodiscard]] LLMMEM_HD const T& operator[](std::uint32_t lane) const noexcept { return of_[lane]; }

   private:
    T of_[most]{};
  };

  /// @param idle_turns  more turns of each loop than the group has itself: as if another one of a device's
  ///     warp had them.
  /// @pre `lanes` is a power of two, up to 32
  LLMMEM_HD explicit constexpr host_lanes(std::uint32_t lanes, std::uint32_t idle_turns = 0) noexcept
      : lanes_(lanes), idle_turns_(idle_turns) {}

  [[nodiscard]] LLMMEM_HD constexpr std::uint32_t count() const noexcept { return lanes_; }

  /// How many turns a loop takes in which lanes speak, where this group has `own`.
  [[nodiscard]] LLMMEM_HD constexpr std::uint32_t turns(std::uint32_t own) const noexcept {
    return own + idle_turns_;
  }

  /// All lanes are here: before a product, which no lane may come to later than others.
  LLMMEM_HD void meet() const noexcept {}
  /// Each lane does something.
  template <class Do>
  LLMMEM_HD void each(const Do& act) const noexcept {
    for (std::uint32_t lane = 0; lane < lanes_; ++lane)
      act(lane);
  }
  /// Each lane gets what the one has whose number differs by the bit `step`.
  LLMMEM_HD void swap(held<float>& values, std::uint32_t step) const noexcept {
    const held<float> before = values;
    for (std::uint32_t lane = 0; lane < lanes_; ++lane)
      values[lane] = before[lane ^ step];
  }
  /// Each lane gets what the one has whose number `from(lane)` is.
  template <class From>
  LLMMEM_HD void take_from(held<float>& out, const held<float>& values, const From& from) const noexcept {
    for (std::uint32_t lane = 0; lane < lanes_; ++lane)
      out[lane] = values[from(lane)];
  }
  /// What number `i` has of the eight that `lane` is one of. @pre i < 8
  [[nodiscard]] LLMMEM_HD float of_eight(const held<float>& values, std::uint32_t lane,
                                         std::uint32_t i) const noexcept {
    return values[(lane & ~7U) | i];
  }

 private:
  std::uint32_t lanes_;
  std::uint32_t idle_turns_;
};

/// Work of which `lanes()` lanes, a power of two from 8 to 32, do an item together. Trivially copyable; the
/// pointers in it are those of whoever runs it. Its members are `LLMMEM_HD`, as a `row_map`'s.
///
/// `run(item, group)` is called by each thread that is a lane of the group, or once by a host. What a lane
/// has stands in a `Group::held<T>`; `group.each(f)` calls `f(lane)` for each lane that the caller is;
/// between two of them `swap`, `take_from` and `of_eight` are asked by all lanes.
///
/// A device's warp has several groups, and all of them ask at once. So `run` is also called with an item that
/// is none, `items()` and above: it asks as if it were one, and reads and writes nothing. A loop with
/// questions in it takes `group.turns(own)` turns, where `own` are those that the group needs: in others it
/// asks, and nothing comes of it. No branch around a question may depend on the item in any other way.
///
/// One that needs more of a device than others has `compute_capability`, 80 for 8.0: kernels that were
/// compiled for less are not launched.
///
/// `threads` is how many a block of a device's launch has, a multiple of 32, and `blocks` for how many of
/// them a multiprocessor is to have room: fewer leave each thread more registers.
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
