/// @file
/// Collectives: operations of all ranks of a transport. Broadcast, all-gather, reduce-scatter, all-reduce,
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

/// How the ranks sum. n is the number of bytes, N the number of ranks.
enum class reduce_algorithm : std::uint8_t {
  /// Each rank sends each other rank its part, and the receiver adds all copies in the order of the ranks. So
  /// the bits of a sum depend only on the number of ranks, not on where the parts begin. Sends n (N - 1) / N
  /// bytes for a reduce-scatter, in N - 1 messages; a small all-reduce sends all data to all ranks instead.
  direct,
  /// Around a ring, each rank sends to the next: the same bytes, only two neighbours. The order of a sum
  /// begins with the rank after the owner of the part. Gibiansky, "Bringing HPC techniques to deep learning",
  /// 2017.
  ring,
  /// Up a binomial tree and down again: at most n log N bytes, log N steps. All-reduce only.
  tree,
};

using reduce_way [[deprecated("its name is reduce_algorithm")]] = reduce_algorithm;

/// The state of a collective, without its data. A reused one stops allocating once it is large enough.
struct collective_call {
  deadline by = no_deadline;
  std::uint32_t tag = 0;  ///< the same for all ranks; two concurrent collectives need two
  reduce_algorithm algorithm = reduce_algorithm::direct;
  /// Parts are sent, combined and gathered in pieces of this size, the same for all ranks, so that received
  /// data is still in the processor's caches when it is used. Between devices, larger is better.
  std::uint32_t segment_bytes = 256 * 1024;
  /// An all-reduce sends all data to all ranks, and each rank adds it, if that takes at most this many bytes.
  std::uint32_t small_bytes = 65536;
  std::vector<std::byte> scratch{};
};

/// Returns where each rank's block begins, and the end of the last one: N + 1 numbers. The blocks are as even
/// as `elements` allow, in whole elements.
[[nodiscard]] std::vector<std::uint64_t> even_blocks(std::uint64_t bytes, rank_count world,
                                                     std::uint32_t element_bytes = 1);

// All ranks must make the same call, with the same sizes. A rank that finds a failure ends its call with that
// failure and revokes the transport, so that no rank waits for it; the contents of the data are then
// undefined. Additional errors: `errc::size_mismatch` for blocks that do not fit the data or that split
// elements; nothing was sent then.

/// Copies `root`'s `bytes` to all ranks. A binomial tree: log N steps, n bytes to send per child.
template <transport T>
result<void> broadcast(T& ranks, std::span<std::byte> bytes, rank_id root, const collective_call& call);

/// Copies each rank's block, block r of its `all`, to all ranks. Sends n (N - 1) / N bytes if the blocks are
/// even.
template <transport T>
result<void> all_gather(T& ranks, std::span<std::byte> all, std::span<const std::uint64_t> blocks,
                        const collective_call& call);

/// As above, in two hops: first between the ranks with the same position in their nodes, ranks n g to n g + g
/// - 1, then within each node. So each block enters a node once, and not once for each of its ranks: with
/// even blocks of n / N bytes, n (1 / g - 1 / N) of a rank's bytes go to other nodes. `errc::size_mismatch`
/// when `node_ranks` does not divide the world. Wang et al., "ZeRO++", arXiv 2306.10209, 2023.
template <transport T>
result<void> two_hop_all_gather(T& ranks, std::span<std::byte> all, std::span<const std::uint64_t> blocks,
                                std::uint32_t node_ranks, const collective_call& call);

/// Combines the blocks r of all ranks into rank r's block of `data`; other blocks of `data` are undefined
/// with `reduce_algorithm::ring`, and unchanged with `direct`.
template <transport T>
result<void> reduce_scatter(T& ranks, std::span<std::byte> data, std::span<const std::uint64_t> blocks,
                            const reduce_op& op, collective_call& call);

/// Combines all of `data` on all ranks: the same bits everywhere.
template <transport T>
result<void> all_reduce(T& ranks, std::span<std::byte> data, const reduce_op& op, collective_call& call);

/// Sends block r of `out` to rank r, where it becomes the block of `into` with this rank's number. Blocks may
/// have any size, but the sender and the receiver of a block pass the same.
template <transport T>
result<void> all_to_all(T& ranks, std::span<const std::byte> out, std::span<const std::uint64_t> out_blocks,
                        std::span<std::byte> into, std::span<const std::uint64_t> into_blocks,
                        const collective_call& call);

/// As above for blocks of one size, in two hops: first within each node, ranks n g to n g + g - 1, then
/// between the ranks with the same position in their nodes. Each rank sends g - 1 + N / g - 1 messages
/// instead of N - 1, and those between nodes are g times as large. Wang et al., "ZeRO++", arXiv 2306.10209,
/// 2023. `errc::size_mismatch` when `node_ranks` does not divide the world.
template <transport T>
result<void> two_hop_all_to_all(T& ranks, std::span<const std::byte> out, std::span<std::byte> into,
                                std::uint32_t node_ranks, collective_call& call);

/// Returns when all ranks have called it. log2 N steps. Hensgen et al., "Two algorithms for barrier
/// synchronization", 1988.
template <transport T>
result<void> barrier(T& ranks, const collective_call& call);

}  // namespace v0
}  // namespace llmmem

#include <llmmem/comm/detail/collectives_body.hpp>
