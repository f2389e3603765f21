/// @file
/// Collectives of floats whose messages have another form: `all_gather`, `reduce_scatter`, `all_reduce`, and
/// the same in two hops.
#pragma once

#include <llmmem/comm/collectives.hpp>
#include <llmmem/comm/transport.hpp>
#include <llmmem/comm/wire_form.hpp>
#include <llmmem/comm/wire_traffic.hpp>
#include <llmmem/config.hpp>
#include <llmmem/result.hpp>

#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

// As the collectives of bytes: all ranks make the same call with the same sizes and wires; a rank that finds
// a failure ends its call with that failure and revokes the transport, and the floats are then undefined.
// A message has no name of its wire: ranks with other wires find a failure only where lengths differ.
// `blocks` has the first *element* of each rank's block, and the end of the last one: N + 1 numbers.
//
// Groups count from the beginning of each block. Each rank restores every message from the bytes that were
// sent, also its own part, and sums add restored values in floats, in the order of ranks. So all ranks have
// the same bits. These depend on the values, the blocks, the wire and the number of ranks, and not on
// `segment_bytes` or on the time of a message. With one rank nothing is restored, and nothing changes.
//
// Errors: those of the transport. `errc::size_mismatch` for blocks that do not fit the values, for
// `node_ranks` that do not divide the world, and for a residual of another length: nothing was sent then.
// Without memory for `collective_call::scratch` they throw `std::bad_alloc`.
//
// `wire_traffic.hpp` has the bytes that each sends.

/// Gives all ranks each rank's block of `values`, as the wire restores it. The rank's own block changes to
/// that, too: keep master weights elsewhere. Takes scratch memory for all encoded blocks.
template <transport T, wire_codec W>
result<void> all_gather(T& ranks, std::span<float> values, std::span<const std::uint64_t> blocks,
                        const W& wire, collective_call& call);

/// Sums the blocks r of all ranks into rank r's block of `values`; the other blocks are unchanged. Always
/// direct (`reduce_algorithm`), because a ring would round at each of its steps.
///
/// @param residual  empty, or as many floats as `values`, in other memory, zeros at first: *error feedback*.
///                  They are added to the values before these are encoded, and become the difference that
///                  the wire lost, 0 where it is not finite. So what one step loses is part of the next
///                  one's sum. (Seide et al., "1-bit stochastic gradient descent", Interspeech 2014.)
template <transport T, wire_codec W>
result<void> reduce_scatter(T& ranks, std::span<float> values, std::span<const std::uint64_t> blocks,
                            const W& wire, collective_call& call, std::span<float> residual = {});

/// Sums `values` on all ranks: `reduce_scatter` of even blocks, and `all_gather` of the sums. Each element is
/// rounded to the wire twice. `collective_call::algorithm` applies to the second half; there is no other way
/// for few bytes.
template <transport T, wire_codec W>
result<void> all_reduce(T& ranks, std::span<float> values, const W& wire, collective_call& call,
                        std::span<float> residual = {});

/// As `all_gather`, in two hops: each block enters a node once. It is encoded once, so the bits are the same.
template <transport T, wire_codec W>
result<void> two_hop_all_gather(T& ranks, std::span<float> values, std::span<const std::uint64_t> blocks,
                                std::uint32_t node_ranks, const W& wire, collective_call& call);

/// As `reduce_scatter`, in two hops. Within each node, ranks n g to n g + g - 1, the rank with position p
/// sums the blocks of position p of all nodes, in the order of ranks; then the owner of a block adds the
/// nodes' sums, in the order of nodes. Each sum is encoded again for the second hop, so with g ranks a node,
/// a node sends and takes 1 / g as many bytes as in one hop. A hop of one rank changes nothing.
///
/// @param residual  of the first hop, or of the only one.
/// @par Source   qgZ of Wang et al., "ZeRO++", arXiv 2306.10209, 2023.
template <transport T, wire_codec W>
result<void> two_hop_reduce_scatter(T& ranks, std::span<float> values, std::span<const std::uint64_t> blocks,
                                    std::uint32_t node_ranks, const hop_wires<W>& wires,
                                    collective_call& call, std::span<float> residual = {});

/// As `all_reduce`, in the hierarchy: a sum within each node, of these between nodes, and a gather within the
/// node. `two_hop_reduce_scatter` of even blocks, then `two_hop_all_gather` with `wires.between`.
template <transport T, wire_codec W>
result<void> hierarchical_all_reduce(T& ranks, std::span<float> values, std::uint32_t node_ranks,
                                     const hop_wires<W>& wires, collective_call& call,
                                     std::span<float> residual = {});

}  // namespace v0
}  // namespace llmmem

#include <llmmem/comm/detail/wired_collectives_body.hpp>
