/// @file
/// The sizes of a replay's slower tiers.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace replay_trace {

/// How many blocks each slower tier holds, and the size of a block.
struct tier_blocks {
  std::uint64_t host = 0;
  std::uint64_t nvme = 0;
  std::uint64_t block_bytes = 16;  ///< of a block's keys and values; a multiple of 8
  /// The folder of the NVMe tier's file; none: host memory replaces it.
  std::optional<std::string> folder{};
  std::uint32_t nodes = 1;  ///< nodes that serve the trace, each with a cache and tiers of this size
};

}  // namespace replay_trace
