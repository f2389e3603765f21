/// @file
/// The options, results and counters of `kv_pool`.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/failure.hpp>
#include <llmmem/metadata.hpp>

#include <cstddef>
#include <cstdint>
#include <string>

namespace llmmem {
inline namespace v0 {

/// How a `kv_pool` is set up. Times in nanoseconds.
struct kv_pool_options {
  /// How long a request may take, from `ask` on. It gives up blocks that have not arrived by then, and the
  /// engine computes them. Default: 1 s.
  std::uint64_t patience_ns = 1'000'000'000;
  /// After how long a question is sent again that was not answered, because a busy node drops answers; a
  /// block that was asked for and did not begin to come, after four times as long. Each repetition doubles
  /// it, up to 64 times.
  std::uint64_t ask_again_ns = 250'000'000;
  std::uint32_t max_requests = 64;  ///< requests that are asked and not ended
  std::uint32_t max_gets = 256;     ///< blocks that all requests together await from other nodes at once
  /// Blocks that other nodes await from this one at once; beyond that it answers that it has none.
  std::uint32_t max_serving = 1024;
  /// Bytes of blocks after which one `progress` sends no further block, so that the engine's step continues.
  std::uint64_t serve_bytes = std::uint64_t{64} << 20;
  /// How long the send of one frame may hold up `progress` when its receiver takes nothing. The node then
  /// serves that receiver nothing for `slow_ns`.
  std::uint64_t send_ns = 50'000'000;
  std::uint64_t slow_ns = 1'000'000'000;
  /// Spans that this node can remember for all nodes, and again of its own. The oldest is forgotten first.
  std::uint32_t directory_spans = 16384;
  /// What two nodes must also have in common for a block of one to be right in the other: the weights, the
  /// layout (`kv_layout::fingerprint`), the split over ranks. Nodes that differ exchange nothing.
  std::uint64_t model = 0;
  std::string name = "kv_pool";  ///< what error texts call it
  metadata_source metadata{};
};

namespace pool {

/// The number of chunks of a chain that one node records in the directory, and that move together.
inline constexpr std::uint32_t span_chunks = 64;
/// The nodes that a directory names for a span.
inline constexpr std::uint32_t max_holders = 4;
[[deprecated("its name is max_holders")]] inline constexpr std::uint32_t most_holders = max_holders;

/// Whether blocks pass between this node and another.
enum class peer_state : std::uint8_t {
  absent,    ///< no process is connected there, or it has not introduced itself yet
  present,   ///< blocks pass
  different  ///< its cache has other blocks, keys, weights or another epoch: nothing passes
};

/// The result of a request.
struct fetch_result {
  std::uint64_t first = 0;          ///< tokens that the caller had
  std::uint64_t tokens = 0;         ///< tokens that this node's tiers have, or load, `first` included
  std::uint64_t blocks = 0;         ///< that came from other nodes
  std::uint64_t failed_blocks = 0;  ///< damaged in flight, or their node died or no longer had them
  std::uint64_t late_blocks = 0;    ///< had not arrived when the patience or the request ended
  std::uint64_t without_slot = 0;   ///< for which the first tier had no space
  failure why{};                    ///< of a block that failed; `errc::ok` if its node no longer had it
};

/// Counters of a `kv_pool`.
struct stats {
  std::uint64_t asked_spans = 0;     ///< questions to the directory, own part included
  std::uint64_t asked_again = 0;     ///< questions, and requests for a block, that were sent again
  std::uint64_t fetched_blocks = 0;  ///< from other nodes
  std::uint64_t fetched_bytes = 0;
  std::uint64_t served_blocks = 0;  ///< to other nodes
  std::uint64_t served_bytes = 0;
  std::uint64_t missing_blocks = 0;    ///< that others asked for and this node no longer had
  std::uint64_t damaged_blocks = 0;    ///< arrived with a wrong checksum
  std::uint64_t refused_frames = 0;    ///< that are malformed, or for blocks that no request awaits
  std::uint64_t directory_spans = 0;   ///< that this node remembers now
  std::uint64_t dropped_messages = 0;  ///< not sent, because the receiver had not read those before
  std::uint64_t posted_messages = 0;   ///< small messages sent: questions, answers, announcements
  std::uint64_t metadata_bytes = 0;
};

}  // namespace pool
}  // namespace v0
}  // namespace llmmem
