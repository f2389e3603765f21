/// @file
/// `grid_executor`: runs rows and items on the host as a device does, thread by thread.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/errors.hpp>
#include <llmmem/kernels/items.hpp>
#include <llmmem/kernels/launch.hpp>
#include <llmmem/kernels/rows.hpp>
#include <llmmem/result.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace llmmem {
inline namespace v0 {
namespace testing {

/// The blocks of a launch that one thread walks: all, unless several threads share them as a device's
/// multiprocessors do. A race between these threads is one between the blocks of a device.
struct block_share {
  std::uint32_t first = 0;
  std::uint32_t stride = 1;  ///< blocks to the next one
};

/// Plans a launch as a device does, and walks all of its blocks and threads, with the kernel's own
/// arithmetic. So it finds without a device the bytes that a launch leaves out, moves twice or takes past an
/// end. Rows and items have no barriers, so threads may run one after the other; lanes of a group take, then
/// exchange their results as a device's do, then give.
///
/// The packets are as wide as the alignment that the map promises. The executor checks that promise first,
/// because a device would end with an error.
///
/// @par Thread safety   as `host_executor`.
/// @par Errors          `errc::misaligned` for a row that is less aligned than its map says: index the part,
///      wanted = the alignment, found = the row. Then nothing has moved. `errc::lanes_differ` if a group's
///      `combine` depends on the order: the items before that one are done.
class grid_executor {
 public:
  explicit grid_executor(const launch_limits& limits = {}, const block_share& share = {}) noexcept
      : limits_(limits), share_(share) {}

  template <cache_hint Read = cache_hint::streaming, cache_hint Write = cache_hint::kept, row_map Map,
            row_op Op>
  result<void> move(const Map& map, const Op& op) const noexcept {
    const unsigned elements = packet_elements<Op>(map.alignment());
    if (auto aligned = check(map, elements * Op::from_bytes, elements * Op::to_bytes); !aligned)
      return aligned;
    const row_launch launch = plan_launch(row_work::of(map, shared_elements<Op>(map, elements)), limits_);
    const std::uint64_t blocks = std::uint64_t{launch.row_blocks} * launch.part_blocks;
    for (std::uint64_t block = share_.first; block < blocks; block += share_.stride) {
      const auto row_block = static_cast<std::uint32_t>(block / launch.part_blocks);
      const auto part_block = static_cast<std::uint32_t>(block % launch.part_blocks);
      for (std::uint32_t thread = 0; thread < row_launch::threads; ++thread)
        step<widest_packet<Op>>(map, op, share_of(launch, row_block, part_block, thread), elements);
    }
    return {};
  }

  template <item_work Work>
  result<void> each(const Work& work) const noexcept {
    const item_launch launch = plan_items(work.items(), 1, limits_);
    for (std::uint64_t each = share_.first; each < launch.blocks; each += share_.stride) {
      const auto block = static_cast<std::uint32_t>(each);
      for (std::uint32_t thread = 0; thread < launch.threads; ++thread)
        run_items(work, share_of(launch, block, thread));
    }
    return {};
  }

  template <group_work Work>
  result<void> each(const Work& work) const noexcept {
    const item_launch launch = plan_items(work.items(), work.lanes(), limits_);
    for (std::uint64_t each = share_.first; each < launch.blocks; each += share_.stride) {
      const auto block = static_cast<std::uint32_t>(each);
      for (std::uint32_t thread = 0; thread < launch.threads; thread += work.lanes()) {
        if (auto done = run_group(work, launch, block, thread); !done) return done;
      }
    }
    return {};
  }

  /// The lanes of a group in turns, as the host takes them: they depend on each other only where the work
  /// says so. Their loops have one idle turn, as next to a group with more work.
  template <lane_work Work>
  result<void> each(const Work& work) const noexcept {
    const item_launch launch = plan_items(work.items(), work.lanes(), limits_, Work::threads);
    for (std::uint64_t each = share_.first; each < launch.blocks; each += share_.stride) {
      const auto block = static_cast<std::uint32_t>(each);
      for (std::uint32_t thread = 0; thread < launch.threads; thread += work.lanes())
        run_lanes(work, share_of(launch, block, thread), host_lanes(work.lanes(), 1));
    }
    return {};
  }

 private:
  /// Runs the lanes whose first is a thread of a block, item by item.
  template <group_work Work>
  static result<void> run_group(const Work& work, const item_launch& launch, std::uint32_t block,
                                std::uint32_t thread) noexcept {
    using held_type = typename Work::held;
    using partial = typename Work::partial;
    constexpr std::uint32_t most = 32;
    const std::uint32_t lanes = work.lanes();
    const item_share share = share_of(launch, block, thread);
    static_cast<void>(Work::measure(held_type{}));  // as for lanes without an item next to lanes with one
    for (std::uint64_t item = share.first; item < work.items(); item += share.stride) {
      std::array<held_type, most> held{};
      std::array<partial, most> known{};
      for (std::uint32_t i = 0; i < lanes; ++i) {
        held[i] = work.take(item, {i, lanes});
        known[i] = Work::measure(held[i]);
      }
      for (std::uint32_t step = lanes / 2; step != 0; step /= 2) {
        const std::array<partial, most> before = known;
        for (std::uint32_t i = 0; i < lanes; ++i)
          known[i] = Work::combine(before[i], before[i ^ step]);
      }
      for (std::uint32_t i = 0; i < lanes; ++i) {
        if (std::memcmp(&known[i], &known[0], sizeof(partial)) != 0)
          return failure{errc::lanes_differ, i, 0, item, "grid_executor"};
        work.give(item, {i, lanes}, held[i], known[i]);
      }
    }
    return {};
  }

  template <row_map Map>
  static result<void> check(const Map& map, unsigned from, unsigned to) noexcept {
    const auto is_aligned = [](const std::byte* end, unsigned to_what) {
      return reinterpret_cast<std::uintptr_t>(end) % to_what == 0;
    };
    for (std::uint32_t part = 0; part < map.parts(); ++part) {
      for (std::uint64_t row = 0; row < map.rows(); ++row) {
        const row_move each = map.at(row, part);
        if (each.elements == 0 || (is_aligned(each.from, from) && is_aligned(each.to, to))) continue;
        return failure{errc::misaligned, part, is_aligned(each.from, from) ? to : from, row, "grid_executor"};
      }
    }
    return {};
  }

  template <unsigned N, row_map Map, row_op Op>
  static void step(const Map& map, const Op& op, const row_share& share, unsigned elements) noexcept {
    if constexpr (N > 1) {
      if (elements < N) return step<N / 2>(map, op, share, elements);
    }
    move_rows<N>(map, op, share);
  }

  launch_limits limits_;
  block_share share_;
};

}  // namespace testing
}  // namespace v0
}  // namespace llmmem
