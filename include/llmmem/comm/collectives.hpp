/// @file
/// Collectives: what all ranks of a transport do together. Broadcast, all-gather, reduce-scatter, all-reduce,
/// all-to-all, barrier.
#pragma once

#include <llmmem/comm/reduce_op.hpp>
#include <llmmem/comm/transport.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// By which way the ranks sum up. n are the bytes, N the ranks.
enum class reduce_way : std::uint8_t {
  /// Everybody sends each its part, and who gets all of one adds them in the order of the ranks: so the bits
  /// of a sum depend on the ranks' number alone, not on where the parts begin. n (N - 1) / N bytes to send
  /// for a reduce-scatter, in N - 1 messages; an all-reduce of little data sends all to all instead.
  direct,
  /// Round a ring, each to the next: the same bytes, two neighbours only. The order of a sum begins with the
  /// rank after the one whose part it is. Gibiansky, "Bringing HPC techniques to deep learning", 2017.
  ring,
  /// Up a binomial tree and down again: n log N bytes at most, log N steps. All-reduce only.
  tree,
};

/// What a collective takes besides its data. One of it, kept, allocates no more once it has grown.
struct collective_call {
  deadline by = no_deadline;
  std::uint32_t tag = 0;  ///< the same for all ranks; two collectives at a time need two
  reduce_way way = reduce_way::direct;
  /// Parts are sent, combined and gathered in pieces of that size, the same for all ranks: so that what comes
  /// is still in a processor's caches when it is looked at. Over devices more is better.
  std::uint32_t segment_bytes = 256 * 1024;
  /// An all-reduce whose data, sent to all others, come to no more than that is sent so, and added
  /// everywhere.
  std::uint32_t small_bytes = 65536;
  std::vector<std::byte> scratch{};
};

/// Where each rank's block begins, and behind the last one: N + 1 numbers. As even as `elements` allow, whole
/// elements each.
[[nodiscard]] std::vector<std::uint64_t> even_blocks(std::uint64_t bytes, rank_count world,
                                                     std::uint32_t element_bytes = 1);

// All ranks must call the same, with the same sizes. What a rank finds failed ends its call with that
// failure, and revokes the transport, so that nobody waits for it any longer; what is in the data then is of
// no use. Errors besides: `errc::size_mismatch` for blocks that do not fit the data, or elements cut in two:
// nothing was sent then.

/// What `root` has in `bytes`, in everybody's. A binomial tree: log N steps, n bytes a child to send.
template <transport T>
result<void> broadcast(T& ranks, std::span<std::byte> bytes, rank_id root, const collective_call& call);

/// Block r of `all` is rank r's: everybody's blocks, in everybody's `all`. n (N - 1) / N bytes to send, when
/// the blocks are even.
template <transport T>
result<void> all_gather(T& ranks, std::span<std::byte> all, std::span<const std::uint64_t> blocks,
                        const collective_call& call);

/// Rank r's block of `data` becomes what all ranks' blocks r combine to; other blocks of `data` are undefined
/// with `reduce_way::ring`, and unchanged with `direct`.
template <transport T>
result<void> reduce_scatter(T& ranks, std::span<std::byte> data, std::span<const std::uint64_t> blocks,
                            const reduce_op& op, collective_call& call);

/// All of `data` combined, in everybody's: the same bits everywhere.
template <transport T>
result<void> all_reduce(T& ranks, std::span<std::byte> data, const reduce_op& op, collective_call& call);

/// Block r of `out` goes to rank r, whose block of `into` with this rank's number it becomes. Blocks may be
/// of any size, the two of a pair of the same.
template <transport T>
result<void> all_to_all(T& ranks, std::span<const std::byte> out, std::span<const std::uint64_t> out_blocks,
                        std::span<std::byte> into, std::span<const std::uint64_t> into_blocks,
                        const collective_call& call);

/// The same for blocks of one size, in two hops: first within each node, ranks n g to n g + g - 1, then
/// between the ranks of the same place in their nodes. Each rank sends g - 1 + N / g - 1 messages instead of
/// N - 1, and those between nodes are g times as large. Wang et al., "ZeRO++", arXiv 2306.10209, 2023.
/// `errc::size_mismatch` when `node_ranks` does not divide the world.
template <transport T>
result<void> two_hop_all_to_all(T& ranks, std::span<const std::byte> out, std::span<std::byte> into,
                                std::uint32_t node_ranks, collective_call& call);

/// Returns when all have called it. log2 N steps. Hensgen et al., "Two algorithms for barrier
/// synchronization", 1988.
template <transport T>
result<void> barrier(T& ranks, const collective_call& call);

}  // namespace v0
}  // namespace llmmem

#include <llmmem/comm/detail/collectives_body.hpp>
