/// @file
/// `sharded_wires`: the forms in which a `sharded_state` gathers and sums.
#pragma once

#include <llmmem/comm/wire_form.hpp>
#include <llmmem/comm/wire_traffic.hpp>
#include <llmmem/comm/wired_sums.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The messages of a `sharded_state` of floats. The default changes nothing.
struct sharded_wires {
  wire_form gather{};            ///< of `gather` and `gather_within`
  hop_wires<> sum{};             ///< of `reduce_scatter` and `all_reduce`; in one hop, `sum.within`
  std::uint32_t node_ranks = 0;  ///< ranks n g to n g + g - 1 share a node: operations in two hops; 0: in one
  bool keeps_errors = false;     ///< error feedback: what a sum's wire loses is part of the next sum

  [[nodiscard]] constexpr bool has_plain_gathers() const noexcept {
    return gather.is_plain() && node_ranks == 0;
  }
  [[nodiscard]] constexpr bool has_plain_sums() const noexcept {
    return sum.within.is_plain() && sum.between.is_plain() && node_ranks == 0;
  }
  [[nodiscard]] constexpr bool is_plain() const noexcept {
    return has_plain_gathers() && has_plain_sums() && !keeps_errors;
  }
  /// Returns the wire of contributions: with nodes of one rank, the hop within a node sends nothing.
  [[nodiscard]] constexpr const wire_form& of_contributions() const noexcept {
    return node_ranks == 1 ? sum.between : sum.within;
  }
  /// Returns the wire of the second half of an all-reduce.
  [[nodiscard]] constexpr const wire_form& of_sums() const noexcept {
    return node_ranks == 0 ? sum.within : sum.between;
  }

  friend constexpr bool operator==(const sharded_wires& a, const sharded_wires& b) noexcept {
    return a.gather == b.gather && a.sum.within == b.sum.within && a.sum.between == b.sum.between &&
           a.node_ranks == b.node_ranks && a.keeps_errors == b.keeps_errors;
  }
};

/// Refuses wires that `world` ranks cannot use.
/// @throws argument_error  for nodes that do not divide the world, and for errors to keep of contributions
///                         over a plain wire, which loses nothing.
inline void check_wires(const sharded_wires& wires, std::uint32_t world, const std::string& name) {
  if (wires.node_ranks != 0 && world % wires.node_ranks != 0) {
    throw argument_error(name + ": nodes of " + std::to_string(wires.node_ranks) + " ranks do not divide " +
                         std::to_string(world) + " ranks; give a divisor, or 0 for one hop");
  }
  if (wires.keeps_errors && wires.of_contributions().is_plain())
    throw argument_error(name + ": keeps_errors with plain sums, which lose nothing; give sums another wire");
}

/// Returns the bytes of a gather's messages in memory, of all ranks: `blocks` has the first element of each
/// rank's part, and the end of the last one.
[[nodiscard]] constexpr std::uint64_t gather_scratch_bytes(std::span<const std::uint64_t> blocks,
                                                           const wire_form& wire) noexcept {
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i + 1 < blocks.size(); ++i)
    bytes += wire.bytes(blocks[i + 1] - blocks[i]);
  return bytes;
}

/// Returns what `rank` sends to gather these blocks over these wires.
[[nodiscard]] constexpr wire_traffic gather_traffic(std::span<const std::uint64_t> blocks,
                                                    const wire_form& wire, const sharded_wires& wires,
                                                    rank_id rank) {
  const auto world = static_cast<std::uint32_t>(blocks.size() - 1);
  return wires.node_ranks == 0 ? gather_traffic(blocks, wire, world, rank)
                               : two_hop_gather_traffic(blocks, wire, wires.node_ranks, rank);
}

}  // namespace v0
}  // namespace llmmem
