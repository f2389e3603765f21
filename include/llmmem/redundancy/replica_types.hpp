/// @file
/// The concepts of a `redundant_replica`'s transport and destinations, its parameters, and its results.
#pragma once

#include <llmmem/comm/ranks.hpp>
#include <llmmem/comm/transport.hpp>
#include <llmmem/config.hpp>
#include <llmmem/redundancy/part_ownership.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

/// A transport whose ranks have seats, and change with the epoch. `communicator` is one.
template <class T>
concept seated_transport = transport<T> && requires(const T& ranks) {
  { ranks.epoch() } noexcept -> std::same_as<std::uint64_t>;
  { ranks.seats() } noexcept -> std::convertible_to<std::span<const seat_id>>;
};

/// Returns the destination of each part: the engine's own memory, of the part's size.
template <class D>
concept part_destinations = requires(D& destinations, part_id part) {
  { destinations(part) } -> std::convertible_to<std::span<std::byte>>;
};

/// The former name of `part_destinations`. Deprecated: it will be removed in version 0.2.
template <class D>
concept part_rooms = part_destinations<D>;

/// The bytes of a part.
struct part_bytes {
  part_id part{};
  std::span<const std::byte> bytes{};
};

/// The construction parameters of a replica.
struct replica_options {
  const char* name = "redundant_replica";  ///< the name in error texts; outlives the replica
  /// Of its messages; the caller uses this tag for nothing else at the same time.
  std::uint32_t tag = 0x7265'7000;
};

namespace redundancy {

/// Why there is nothing to restore, which decides what all ranks load instead. Each rank loads the parts that
/// it owns now, even if it loaded them in an earlier epoch, because a step that had begun may have changed
/// them.
enum class absence : std::uint8_t {
  none,        ///< there is something to restore
  never_kept,  ///< no rank has committed anything so far: load the initial state of the run
  forgotten,   ///< all ranks called `forget`: load the checkpoint that they returned to
  lost,  ///< no remaining rank has what was kept: load the newest checkpoint; without one, the training so
         ///< far is lost
  gone [[deprecated("its name is lost")]] = lost
};

}  // namespace redundancy

using absence [[deprecated("its name is redundancy::absence")]] = redundancy::absence;

/// The result of `recover`: the same on all ranks, except for the bytes.
struct recovered_state {
  bool is_recovered = false;                               ///< if false, `reason` says what to load
  redundancy::absence reason = redundancy::absence::none;  ///< why there is nothing to restore
  std::uint64_t version = 0;                               ///< of all parts
  std::uint64_t moved_bytes = 0;                           ///< between ranks
  std::uint64_t rebuilt_bytes = 0;  ///< of parts on this rank whose owner was lost, or had damaged bytes
};

/// Counters of a replica.
struct replica_stats {
  std::uint64_t own_bytes = 0;   ///< copies of this rank's own parts, of all versions held
  std::uint64_t kept_bytes = 0;  ///< copies and parity for others, of all versions held
  std::uint64_t keeps = 0;
  std::uint64_t recoveries = 0;
};

}  // namespace v0
}  // namespace llmmem
