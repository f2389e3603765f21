/// @file
/// The options of `ucx_mover`, and the lanes that it can claim. Needs no UCX.
#pragma once

#include <llmmem/config.hpp>

#include <cstdint>
#include <string>

namespace llmmem {
inline namespace v0 {

/// The way that UCX takes between two nodes.
enum class ucx_lane : std::uint8_t {
  shared_memory,  ///< POSIX shared memory: both processes on one machine
  tcp,            ///< sockets, over which UCX emulates reads
  rdma            ///< InfiniBand or RoCE
};

/// How a `ucx_mover` is set up.
struct ucx_options {
  std::uint64_t bytes = 0;        ///< of its space: the budget of the tiers that take from it
  std::uint64_t blocks = 0;       ///< that others can find at once: the slots of the first tier
  std::uint64_t block_bytes = 0;  ///< of the largest block: reads by `get` land in buffers of that size
  ucx_lane lane = ucx_lane::shared_memory;
  std::uint32_t max_reads = 8;  ///< reads by `get` at once, each with a landing buffer
  /// UCX's names of the transports that it may use; empty: those of the lane. A node that is then reached by
  /// another lane than the claimed one is refused.
  std::string transports{};
  std::string name = "ucx_mover";  ///< its name in error texts, and its space's
};

}  // namespace v0
}  // namespace llmmem
