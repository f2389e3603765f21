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
  /// How long a request may take, counted from `ask`: one deadline, which never restarts, and which counts
  /// time in which the engine computes. The first `progress` or wait after it takes the messages that are
  /// there, then gives up the blocks that have not arrived, and the engine computes them. Default: 1 s.
  std::uint64_t patience_ns = 1'000'000'000;
  /// Time after which an unanswered question is sent again, because a busy node drops answers; a requested
  /// block of which nothing has arrived for four times as long is requested again. Each repetition doubles
  /// the time, up to 64 times.
  std::uint64_t ask_again_ns = 250'000'000;
  std::uint32_t max_requests = 64;  ///< requests that have begun and not ended
  std::uint32_t max_gets = 256;     ///< blocks that all requests together await from other nodes at once
  /// Blocks that other nodes await from this one at once; it refuses further ones as missing.
  std::uint32_t max_serving = 1024;
  /// Bytes of blocks after which one `progress` sends no further block, so that the engine's step continues.
  /// With a mover also those after which it reads no further one, and puts no further one into its index.
  std::uint64_t serve_bytes = std::uint64_t{64} << 20;
  /// How long the sends of one `progress` together may delay it because receivers take nothing. Then no send
  /// waits for such a receiver until it has taken every frame at once for `slow_ns`; its blocks go as it
  /// reads, and those of which it takes nothing for `patience_ns` are refused as missing.
  std::uint64_t send_ns = 50'000'000;
  std::uint64_t slow_ns = 1'000'000'000;
  /// How long a block may stay pinned for a receiver that has taken a part of it, however slowly that reads
  /// on. Then the rest is refused as missing.
  std::uint64_t pin_ns = 10'000'000'000;
  /// Spans that this node can remember for the directory, and the same number of its own spans. It forgets
  /// the oldest first.
  std::uint32_t directory_spans = 16384;
  /// A digest of the weights, the layout (`kv_layout::fingerprint`) and the split over ranks, which two nodes
  /// must have in common for a block of one to be right in the other. Nodes that differ exchange no blocks.
  std::uint64_t model = 0;
  /// Where this node is: a host, a rack. Nodes of one domain may fail together.
  std::uint32_t domain = 0;
  /// How many nodes of other domains, each of another one, keep the blocks of a hot span as well: 0 to
  /// `pool::max_holders` - 1. A node that publishes a hot span asks them to fetch its blocks.
  std::uint32_t copies = 0;
  std::uint32_t hot_uses = 2;  ///< a span is hot when this node has published it for so many requests
  /// Spans that this node fetches for others at once, with at most half of `max_gets`; it ignores more. 0: it
  /// keeps no copies.
  std::uint32_t max_copying = 8;
  /// With a mover: published blocks that wait to be put into its index. Others come by message, at first.
  std::uint32_t max_offers = 16384;
  /// Copies that this node verifies within a second because one other node reports them damaged; it ignores
  /// further reports of that node. A check reads one block. 0: it ignores all.
  std::uint32_t max_checks = 64;
  std::string name = "kv_pool";  ///< its name in error texts
  metadata_source metadata{};
};

namespace pool {

/// The number of chunks of a chain that one node records in the directory, and that move together.
inline constexpr std::uint32_t span_chunks = 64;
/// The most nodes that a directory names for a span.
inline constexpr std::uint32_t max_holders = 4;
[[deprecated("its name is max_holders")]] inline constexpr std::uint32_t most_holders = max_holders;

/// Whether blocks pass between this node and another.
enum class peer_state : std::uint8_t {
  absent,    ///< no process is connected there, or it has not introduced itself yet
  present,   ///< blocks pass
  different  ///< its cache has other blocks, keys, weights or another epoch: no blocks pass
};

/// The result of a request.
struct fetch_result {
  std::uint64_t first = 0;          ///< tokens that the caller had
  std::uint64_t tokens = 0;         ///< tokens that this node's tiers have, or load, `first` included
  std::uint64_t blocks = 0;         ///< blocks that came from other nodes
  std::uint64_t failed_blocks = 0;  ///< blocks damaged in flight, or whose node died or no longer had them
  std::uint64_t late_blocks = 0;    ///< blocks that had not arrived when the patience or the request ended
  std::uint64_t without_slot = 0;   ///< blocks for which the first tier had no space
  std::uint64_t costly_tokens =
      0;          ///< tokens that a fetch with costs left to compute, because moving was costlier
  failure why{};  ///< the reason of a failed block; `errc::ok` if its node no longer had it
};

/// Counters of a `kv_pool`.
struct stats {
  std::uint64_t asked_spans = 0;     ///< questions to the directory, own part included
  std::uint64_t asked_again = 0;     ///< questions, and requests for a block, that were sent again
  std::uint64_t fetched_blocks = 0;  ///< from other nodes
  std::uint64_t fetched_bytes = 0;
  std::uint64_t served_blocks = 0;  ///< to other nodes
  std::uint64_t served_bytes = 0;
  std::uint64_t missing_blocks = 0;    ///< blocks that others asked for and this node no longer had
  std::uint64_t damaged_blocks = 0;    ///< blocks that arrived, or were read, with a wrong checksum
  std::uint64_t refused_frames = 0;    ///< frames that are malformed, or for blocks that no request awaits
  std::uint64_t directory_spans = 0;   ///< spans that this node remembers now
  std::uint64_t dropped_messages = 0;  ///< messages not sent, because the receiver had not read earlier ones
  std::uint64_t posted_messages = 0;   ///< small messages sent: questions, answers, announcements
  std::uint64_t ordered_copies = 0;    ///< hot spans that nodes of other domains were asked to keep
  std::uint64_t copied_spans = 0;      ///< spans that this node keeps because it was asked to
  std::uint64_t offered_blocks = 0;    ///< put into the mover's index, for others to read
  std::uint64_t read_blocks = 0;       ///< of `fetched_blocks`: read from the memory of other nodes
  std::uint64_t failed_reads = 0;      ///< blocks not in the index, or rewritten meanwhile: asked by message
  std::uint64_t refused_introductions = 0;  ///< memory of other nodes that the mover cannot reach
  std::uint64_t reported_blocks = 0;        ///< damaged blocks of which this node has told their holders
  std::uint64_t checked_blocks = 0;         ///< own copies verified because other nodes reported them damaged
  std::uint64_t dropped_blocks = 0;         ///< of `checked_blocks`: damaged here, and dropped
  std::uint64_t ignored_reports = 0;  ///< beyond `max_checks`, or about a block without a copy to verify
  std::uint64_t metadata_bytes = 0;
};

}  // namespace pool
}  // namespace v0
}  // namespace llmmem
