/// @file
/// Digests of long blocks at any alignment.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/block_lists.hpp>
#include <llmmem/kernels/detail/checksum_give.hpp>
#include <llmmem/kernels/detail/checksum_tiles.hpp>
#include <llmmem/kernels/detail/lane_packets.hpp>
#include <llmmem/kernels/divider.hpp>
#include <llmmem/kernels/items.hpp>
#include <llmmem/kernels/lanes.hpp>
#include <llmmem/kernels/packet.hpp>

#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// An item is a tile, for all lanes of a warp. A row is 16 bytes for each of them.
template <checksum_use Use, block_list Blocks>
struct digest_rows_work {
  using value = std::uint64_t;
  static constexpr std::uint32_t threads = 128;
  static constexpr std::uint32_t blocks = 8;

  Blocks list;
  digest_sum sum;
  std::uint64_t tile_bytes = 0;
  std::uint64_t longest = 0;
  divider tiles{};  ///< of a block
  value* out = nullptr;

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return list.size() * tiles.by(); }
  [[nodiscard]] LLMMEM_HD std::uint32_t lanes() const noexcept { return 32; }

  template <class Group>
  LLMMEM_HD void run(std::uint64_t item, const Group& group) const noexcept {
    if (item >= items()) return;
    const std::uint64_t number = tiles.quotient(item);
    const std::uint64_t begin = (item - number * tiles.by()) * tile_bytes;
    const copy_task block = block_of(list, number, longest);
    typename Group::template held<value> part{};
    const bool is_there = begin < block.bytes;
    if (is_there) {
      take(block, begin, part, group);
      for (std::uint32_t step = 16; step != 0; step /= 2)
        add_other(part, step, group);
    }
    group.each([&](std::uint32_t lane) {
      if (lane == 0) give_sum(sum, tiles.by() == 1, is_there, block.bytes, part[0], out[number]);
    });
  }

 private:
  static constexpr std::uint32_t at_once = 4;

  template <class Group>
  using packets = typename Group::template held<packet<16>>;
  struct row_packets {
    packet<16> of[at_once];
  };

  template <class Group, class Part>
  static LLMMEM_HD void add_other(Part& part, std::uint32_t step, const Group& group) noexcept {
    typename Group::template held<std::uint32_t> low{};
    typename Group::template held<std::uint32_t> high{};
    group.each([&](std::uint32_t lane) {
      low[lane] = static_cast<std::uint32_t>(part[lane]);
      high[lane] = static_cast<std::uint32_t>(part[lane] >> 32);
    });
    group.swap(low, step);
    group.swap(high, step);
    group.each([&](std::uint32_t lane) { part[lane] += std::uint64_t{high[lane]} << 32 | low[lane]; });
  }

  /// The row at hand.
  template <class Group>
  struct row_state {
    packets<Group> word;    ///< as they are aligned
    packets<Group> before;  ///< of the block, in the row before
    std::uint32_t first = 0;
  };

  template <class Group, class Part>
  LLMMEM_HD void take(const copy_task& block, std::uint64_t begin, Part& part,
                      const Group& group) const noexcept {
    const std::byte* const from = block.from + begin;
    std::byte* const to = Use == checksum_use::copied ? block.to + begin : nullptr;
    const auto skew = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(from) % 16);
    const auto to_skew = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(to) % 16);
    const std::uint64_t left = block.bytes - begin;
    const bool is_last = left <= tile_bytes;
    const auto bytes = static_cast<std::uint32_t>(is_last ? left : tile_bytes);
    const std::uint32_t count = (bytes + 15) / 16;
    // Behind the block's last packet its last bytes may be left for the destination.
    const std::uint32_t turns = count + (is_last && to_skew != 0 ? 1U : 0U);
    const std::uint32_t words = count + (skew != 0 ? 1U : 0U);
    const packet_limits limits{begin == 0 ? 0 : 32,
                               static_cast<std::int32_t>(left < tile_bytes + 16 ? left : tile_bytes + 16)};
    const auto word = [&](std::uint32_t k) {
      return limits.read<16>(from, static_cast<std::int32_t>(k * 16) - static_cast<std::int32_t>(skew));
    };
    row_state<Group> row{};
    group.each([&](std::uint32_t lane) {
      if (lane < words) row.word[lane] = word(lane);
      if constexpr (Use == checksum_use::copied) {
        // The packet before the tile: its last bytes share a packet of the destination with the first here.
        if (lane == 31 && begin != 0 && to_skew != 0) {
          const packet<16> here = skew == 0 ? packet<16>{} : word(0);
          row.before[lane] = between_packets<16>(word(0U - 1U), here, skew);
        }
      }
    });
    const auto limit = static_cast<std::int32_t>(bytes);
    const packet_limits written{begin == 0 ? 0 : 16, limit};
    while (row.first < turns) {
      typename Group::template held<row_packets> next{};
      group.each([&](std::uint32_t lane) {
        LLMMEM_UNROLL
        for (std::uint32_t i = 0; i < at_once; ++i) {
          const std::uint32_t k = row.first + (i + 1) * 32 + lane;
          if (k < words) next[lane].of[i] = word(k);
        }
      });
      LLMMEM_UNROLL
      for (std::uint32_t i = 0; i < at_once; ++i) {
        if (row.first >= turns) break;
        packets<Group> after{};
        group.each([&](std::uint32_t lane) { after[lane] = next[lane].of[i]; });
        packets<Group> own = row.word;
        if (skew != 0) {
          const packets<Group> other =
              packets_of_neighbours<lane_neighbour::next, 16>(row.word, after, group);
          group.each([&](std::uint32_t lane) {
            own[lane] = between_packets<16>(row.word[lane], other[lane], skew);
          });
        }
        group.each([&](std::uint32_t lane) {
          const std::uint32_t p = row.first + lane;
          if (p < count) part[lane] += digest_sum::of_packet(own[lane], begin / 8 + 2 * std::uint64_t{p});
        });
        if constexpr (Use == checksum_use::copied) {
          packets<Group> sent = own;
          if (to_skew != 0) {
            const packets<Group> other =
                packets_of_neighbours<lane_neighbour::previous, 16>(own, row.before, group);
            group.each([&](std::uint32_t lane) {
              sent[lane] = between_packets<16>(other[lane], own[lane], 16 - to_skew);
            });
            row.before = own;
          }
          group.each([&](std::uint32_t lane) {
            const std::uint32_t p = row.first + lane;
            if (p < turns)
              written.write<16>(to, static_cast<std::int32_t>(p * 16) - static_cast<std::int32_t>(to_skew),
                                sent[lane]);
          });
        }
        row.word = after;
        row.first += 32;
      }
    }
  }
};
static_assert(lane_work<digest_rows_work<checksum_use::copied, strided_blocks>>);
static_assert(sizeof(digest_rows_work<checksum_use::copied, few_copies>) <= 4096 - 64,
              "an argument of a kernel");

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
