/// @file
/// What a replay's slower tiers hold.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace replay_trace {

/// How many blocks each slower tier holds, and what a block is.
struct tier_blocks {
  std::uint64_t host = 0;
  std::uint64_t nvme = 0;
  std::uint64_t block_bytes = 16;  ///< of a block's keys and values; a multiple of 8
  /// Where the file of the NVMe tier lies; none: host memory stands for it.
  std::optional<std::string> folder{};
  std::uint32_t nodes = 1;  ///< that serve the trace, each with a cache and tiers of this size
};

}  // namespace replay_trace
