/// @file
/// What an `nccl_transport` is told, and what it tells: its side channel, options and counters. Needs no
/// NCCL.
#pragma once

#include <llmmem/comm/agreement.hpp>
#include <llmmem/comm/endpoint.hpp>
#include <llmmem/comm/id_set.hpp>
#include <llmmem/comm/ranks.hpp>
#include <llmmem/comm/transport.hpp>
#include <llmmem/config.hpp>
#include <llmmem/result.hpp>

#include <concepts>
#include <cstdint>
#include <optional>
#include <span>

namespace llmmem {
inline namespace v0 {

/// The channel beside NCCL's, over the host: a `communicator` of any endpoint, or a type with the same calls.
/// It knows which ranks live, tells when an epoch is over, and carries NCCL's unique ids.
template <class S>
concept nccl_side = transport<S> && requires(S& side, const S& seen, rank_id rank, seat_id seat,
                                             const comm::agreed& outcome, std::uint64_t bits, deadline by) {
  { seen.epoch() } noexcept -> std::same_as<std::uint64_t>;
  { seen.seats() } noexcept -> std::same_as<std::span<const seat_id>>;
  { seen.rank_of(seat) } noexcept -> std::same_as<std::optional<rank_id>>;
  { seen.failed() } noexcept -> std::same_as<seat_set>;
  { seen.has_failed(rank) } noexcept -> std::same_as<bool>;
  { seen.is_revoked() } noexcept -> std::same_as<bool>;
  side.poll();
  { side.agree(bits, by) } -> std::same_as<result<comm::agreed>>;
  side.shrink(outcome);
  side.admit(outcome);
};

/// How a transport over NCCL is set up.
struct nccl_options {
  const char* name = "nccl_transport";    ///< for error texts; outlives the transport
  std::uint64_t look_ns = 20'000;         ///< between two looks at NCCL and at the side channel
  std::uint64_t stop_ns = 2'000'000'000;  ///< for NCCL to stop its work, before it is aborted
  std::uint32_t side_tag = 0xFFFF'FF00;   ///< of messages over the side channel
};

/// How NCCL may use a window.
enum class nccl_window : std::uint8_t {
  any_offset,  ///< ranks may name other offsets of theirs in one call
  symmetric,   ///< all ranks name the same offset in a call, which NCCL can be quickest with
};

/// Counters of a transport over NCCL.
struct nccl_stats {
  std::uint64_t fresh = 0;    ///< NCCL communicators made by a unique id
  std::uint64_t shrunk = 0;   ///< made of the one before, without the ranks that have failed
  std::uint64_t grown = 0;    ///< made of the one before, with the ranks that have joined
  std::uint64_t revoked = 0;  ///< stopped, and fit to be shrunk
  std::uint64_t aborted = 0;
  std::uint64_t failed_calls = 0;
};

}  // namespace v0
}  // namespace llmmem
