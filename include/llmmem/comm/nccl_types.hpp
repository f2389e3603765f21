/// @file
/// The side channel, options and counters of an `nccl_transport`. Needs no NCCL.
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

/// The channel next to NCCL's, over the host: a `communicator` of any endpoint, or a type with the same
/// calls. It knows which ranks live, reports the end of an epoch, and carries NCCL's unique ids.
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

/// The construction parameters of a transport over NCCL.
struct nccl_options {
  const char* name = "nccl_transport";    ///< the name in error texts; outlives the transport
  std::uint64_t poll_ns = 20'000;         ///< between two checks of NCCL and the side channel
  std::uint64_t stop_ns = 2'000'000'000;  ///< the time for NCCL to stop its work, before it is aborted
  std::uint32_t side_tag = 0xFFFF'FF00;   ///< the tag of messages over the side channel
};

/// How NCCL may use a window.
enum class nccl_window : std::uint8_t {
  any_offset,  ///< ranks may use different offsets in one call
  symmetric,   ///< all ranks use the same offset in a call, which may be faster
};

/// Counters of a transport over NCCL.
struct nccl_stats {
  std::uint64_t fresh = 0;    ///< NCCL communicators made by a unique id
  std::uint64_t shrunk = 0;   ///< made from the previous one, without the failed ranks
  std::uint64_t grown = 0;    ///< made from the previous one, with the joining ranks
  std::uint64_t revoked = 0;  ///< stopped, and fit to be shrunk
  std::uint64_t aborted = 0;
  std::uint64_t failed_calls = 0;
};

}  // namespace v0
}  // namespace llmmem
