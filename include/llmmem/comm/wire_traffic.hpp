/// @file
/// The bytes that a rank sends in the collectives of `wired_collectives.hpp`: within its node, and to others.
#pragma once

#include <llmmem/comm/collectives.hpp>
#include <llmmem/comm/ranks.hpp>
#include <llmmem/comm/wire_form.hpp>
#include <llmmem/config.hpp>

#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

/// The wires of a sum in two hops.
template <wire_codec W = wire_form>
struct hop_wires {
  W within{};   ///< of the contributions, to the ranks of the node
  W between{};  ///< of the nodes' sums, and of the final sum when it is gathered
};

/// Bytes of messages that a rank sends, without headers.
struct wire_traffic {
  std::uint64_t within = 0;   ///< to ranks of its node
  std::uint64_t between = 0;  ///< to ranks of other nodes

  [[nodiscard]] constexpr std::uint64_t total() const noexcept { return within + between; }
  constexpr wire_traffic& operator+=(const wire_traffic& more) noexcept {
    within += more.within;
    between += more.between;
    return *this;
  }
  friend constexpr bool operator==(const wire_traffic&, const wire_traffic&) noexcept = default;
};

// `blocks` has the first element of each rank's block, and the end of the last one. Ranks n g to n g + g - 1
// share a node, g = `node_ranks`.

/// Returns what `rank` sends in an `all_gather`: directly, its own block to each other rank; over the ring,
/// all blocks but its successor's, to its successor.
/// @par Complexity      O(world).
/// @par Thread safety   pure.
/// @pre `blocks` has at least two numbers, `rank` a block, and `node_ranks` is not 0
template <wire_codec W>
[[nodiscard]] constexpr wire_traffic gather_traffic(std::span<const std::uint64_t> blocks, const W& wire,
                                                    std::uint32_t node_ranks, rank_id rank,
                                                    reduce_algorithm algorithm = reduce_algorithm::direct) {
  const auto world = static_cast<std::uint32_t>(blocks.size() - 1);
  const std::uint32_t self = to_index(rank);
  const auto bytes = [&](std::uint32_t of) { return wire.bytes(blocks[of + 1] - blocks[of]); };
  wire_traffic sent;
  const auto add = [&](std::uint32_t to, std::uint64_t more) {
    (to / node_ranks == self / node_ranks ? sent.within : sent.between) += more;
  };
  for (std::uint32_t d = 1; d < world; ++d) {
    if (algorithm == reduce_algorithm::ring) {
      add((self + 1) % world, bytes((self + world - (d - 1)) % world));
    } else {
      add((self + d) % world, bytes(self));
    }
  }
  return sent;
}

/// Returns what `rank` sends in a `two_hop_all_gather`. Otherwise as `gather_traffic`.
/// @pre `node_ranks` divides the world
template <wire_codec W>
[[nodiscard]] constexpr wire_traffic two_hop_gather_traffic(std::span<const std::uint64_t> blocks,
                                                            const W& wire, std::uint32_t node_ranks,
                                                            rank_id rank) {
  const auto world = static_cast<std::uint32_t>(blocks.size() - 1);
  const std::uint32_t self = to_index(rank);
  const auto bytes = [&](std::uint32_t of) { return wire.bytes(blocks[of + 1] - blocks[of]); };
  wire_traffic sent{.between = (world / node_ranks - 1) * bytes(self)};
  for (std::uint32_t of = self % node_ranks; of < world; of += node_ranks)
    sent.within += (node_ranks - 1) * bytes(of);
  return sent;
}

/// Returns what `rank` sends in a `reduce_scatter`: to each other rank, its block.
/// @par Complexity      O(world).
/// @par Thread safety   pure.
/// @pre as `gather_traffic`
template <wire_codec W>
[[nodiscard]] constexpr wire_traffic reduce_traffic(std::span<const std::uint64_t> blocks, const W& wire,
                                                    std::uint32_t node_ranks, rank_id rank) {
  const std::uint32_t self = to_index(rank);
  wire_traffic sent;
  for (std::uint32_t to = 0; to + 1 < blocks.size(); ++to) {
    if (to == self) continue;
    (to / node_ranks == self / node_ranks ? sent.within : sent.between) +=
        wire.bytes(blocks[to + 1] - blocks[to]);
  }
  return sent;
}

/// Returns what `rank` sends in a `two_hop_reduce_scatter`: within its node, to each other position, the
/// blocks of that position in all nodes; to other nodes, the blocks of its own position.
/// @par Complexity      O(world).
/// @par Thread safety   pure.
/// @pre as `two_hop_gather_traffic`
template <wire_codec W>
[[nodiscard]] constexpr wire_traffic two_hop_reduce_traffic(std::span<const std::uint64_t> blocks,
                                                            const hop_wires<W>& wires,
                                                            std::uint32_t node_ranks, rank_id rank) {
  const std::uint32_t self = to_index(rank);
  wire_traffic sent;
  for (std::uint32_t of = 0; of + 1 < blocks.size(); ++of) {
    const std::uint64_t elements = blocks[of + 1] - blocks[of];
    if (of % node_ranks != self % node_ranks) sent.within += wires.within.bytes(elements);
    if (of % node_ranks == self % node_ranks && of != self) sent.between += wires.between.bytes(elements);
  }
  return sent;
}

}  // namespace v0
}  // namespace llmmem
