/// @file
/// `redundant_replica`: keeps the state of ranks so that it survives the loss of some of them.
#pragma once

#include <llmmem/comm/endpoint.hpp>
#include <llmmem/comm/id_set.hpp>
#include <llmmem/comm/ranks.hpp>
#include <llmmem/config.hpp>
#include <llmmem/redundancy/detail/epoch_owners.hpp>
#include <llmmem/redundancy/detail/held_versions.hpp>
#include <llmmem/redundancy/detail/part_restorer.hpp>
#include <llmmem/redundancy/detail/replica_ranks.hpp>
#include <llmmem/redundancy/detail/replica_rendezvous.hpp>
#include <llmmem/redundancy/detail/replica_sender.hpp>
#include <llmmem/redundancy/detail/replica_setup.hpp>
#include <llmmem/redundancy/part_ownership.hpp>
#include <llmmem/redundancy/redundancy.hpp>
#include <llmmem/redundancy/replica_map.hpp>
#include <llmmem/redundancy/replica_types.hpp>
#include <llmmem/redundancy/seat_placement.hpp>
#include <llmmem/result.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Keeps each version of a state also in the memory of other ranks, by copies, parity or a Reed-Solomon code.
/// When ranks die, the live ranks restore the lost state, to a fresh process in the seat or to the ranks that
/// adopt the parts. Training continues from the last committed version.
///
/// The state is divided into *parts* of fixed sizes. Each part has a home seat and an owner: the rank at that
/// seat, or the rank that has adopted the part. In every epoch:
///
///     replica.recover(by)                       // the owners now, and the bytes of the last version kept
///     for (each step) {
///       ... change this rank's parts ...
///       replica.keep(version, ours, by)         // sent to the ranks that keep it; not valid yet
///       if (all agree that theirs is kept) replica.commit(); else replica.drop();
///     }
///
/// - **Two phases, as with files.** Either all ranks commit a version, which makes it valid, or none does.
///   The caller makes the agreement between both phases, with `communicator::agree`, because it decides more
///   than that. Whenever a rank dies, either the previous version is complete, or the new one: a step is
///   repeated at most once.
/// - **Before the first commit there is nothing to restore**: `recovered_state::is_recovered` is false,
///   in every epoch, and `reason` says what to load.
/// - **Memory**: for each version held, the own parts once, and the bytes that the scheme takes
///   (`redundancy_scheme::extra_bytes`). The committed version is held, and between `keep` and `commit` the
///   new one as well. From a `recover` without destinations to the next `commit`, the replica also has the
///   parts that came from others, or were rebuilt; it makes no copy of a part that this rank has complete.
/// - **A smaller world** than the scheme's groups has the nearest scheme that fits, see `scheme_for`; a
///   single rank keeps only its own parts. `tolerates()` returns how many of the present members may be lost.
/// - **Verified**: each part has a CRC-32C, computed when it is kept, which all ranks know. Restored bytes
///   are compared with it: `errc::message_damaged`, never wrong bytes. A rank that recovers a second time
///   from the same version first verifies all its data of that version, and reports damage to the others. The
///   second attempt takes nothing from damaged places, so that it does not fail like the first; it still uses
///   the rank's other data.
/// - **Redundant computation** (`redundancy_kind::compute`): no state is sent. A rank that keeps a part for
///   another computes it as well, and passes it to `keep` with its own: `wards()`. Checksums are compared: if
///   a part differs between the two ranks, the error is `errc::checksum_differs` with the part as index, and
///   neither copy is used.
///
/// @tparam Place   decides where copies go, by the seats of an epoch's members.
/// @par Complexity      `keep`: for each owned byte one copy and one checksum, plus the scheme's transfers: F
///                      - 1 copies, or m stripes of a coded state, in as many rounds as the group has other
///                      members.
/// @par Thread safety   one thread at a time, which owns the transport during the call.
/// @par Errors          those of the transport: then revoke, agree, and `recover` in the next epoch. Calls
///   that wait end at `by`.
/// @par Source          copies in peers' memory: Wang et al., "Gemini", SOSP 2023; parity: Plank and Li, FTCS
///   1994; redundant computation: Thorpe et al., "Bamboo", NSDI 2023.
template <seated_transport T, seat_placement Place = any_seats<>>
class redundant_replica {
 public:
  /// The transport must outlive it. The scheme, sizes, homes and placement must be the same on all ranks:
  /// `recover` compares them.
  /// @param sizes  bytes of each part.
  /// @param homes  the seat of each part. While that seat is empty, another rank owns the part.
  /// @throws argument_error  if `sizes` and `homes` differ in number, or a home is not a seat of the job; the
  ///                         latter if the transport has `ranks.endpoint().seats()`, as a communicator does.
  redundant_replica(T& ranks, const redundancy_scheme& scheme, std::span<const std::uint64_t> sizes,
                    std::span<const seat_id> homes, Place place = Place(),
                    const replica_options& options = {});
  redundant_replica(const redundant_replica&) = delete;
  redundant_replica& operator=(const redundant_replica&) = delete;

  /// Restores the kept parts to their owners in this epoch. All members must call it when an epoch has begun,
  /// before anything else; after a failure, they call it again in the next epoch. Afterwards
  /// `recovered(part)` has the bytes of each part that this rank owns, until the next `commit`.
  /// @return `errc::state_lost` on all ranks if more was lost or damaged than the scheme tolerates: see
  ///         `lost()`. Then call `forget`, and return to a checkpoint: load `own_parts()`, and the epoch
  ///         continues. Without `forget` the next `recover` has the same result, because nothing is given up
  ///         unless all ranks ask for it. `errc::setup_differs` on all ranks if they were given different
  ///         schemes, sizes, homes or placements; nothing was restored.
  result<recovered_state> recover(deadline by) { return recover_to({}, by); }
  /// As above, and writes the parts that this rank now owns to `into(part)`: existing memory is not cleared,
  /// and no byte is copied twice. The replica calls `into` once for each of these parts, in order, and only
  /// if there is something to restore.
  ///
  /// Until this has succeeded, the contents of all destinations are undefined.
  /// @param into  `std::span<std::byte>(part_id)`, of the part's size: otherwise `errc::size_mismatch`, index
  ///              the part, wanted its bytes, found the destination's, and the epoch is revoked. An exception
  ///              from `into` also revokes the epoch, and passes through.
  /// @pre no two destinations overlap, because each part is verified when it arrives, before the others have
  template <part_destinations Destinations>
  result<recovered_state> recover(deadline by, Destinations into) {
    return recover_to(detail::destinations_ref(into), by);
  }
  /// Returns the part's bytes, until the next `commit`, `forget` or `recover`: at the caller's destination,
  /// or in the replica's memory. @pre `recover` has restored something, and this rank owns the part
  [[nodiscard]] std::span<const std::byte> recovered(part_id part) const noexcept LLMMEM_LIFETIMEBOUND {
    return restorer_.recovered(part);
  }
  /// After `errc::state_lost`: the ranks whose state is lost, as numbered in the epoch in which the last
  /// version was kept.
  [[nodiscard]] const rank_set& lost() const noexcept { return owners_.lost(); }
  /// Invalidates all kept versions. All ranks must call it, or none.
  void forget() noexcept;

  /// The owners by part, in this epoch.
  [[nodiscard]] std::span<const rank_id> owners() const noexcept LLMMEM_LIFETIMEBOUND {
    return owners_.all();
  }
  /// The parts that this rank owns.
  [[nodiscard]] std::vector<part_id> own_parts() const { return owners_.own_parts(); }
  [[nodiscard, deprecated("call own_parts()")]] std::vector<part_id> mine() const { return own_parts(); }
  /// The parts that this rank keeps for others by copies, and under `compute` computes as well.
  [[nodiscard]] std::vector<part_id> wards() const { return owners_.wards(); }
  /// The number of this epoch's members, regardless of which, that may be lost at once without losing any
  /// state.
  [[nodiscard]] std::uint32_t tolerates() const noexcept { return map() ? map()->scheme().tolerates() : 0; }
  /// The map of which rank keeps which state in this epoch; none for a single rank.
  [[nodiscard]] const std::optional<replica_map>& map() const noexcept { return owners_.map(); }

  /// Keeps a version of all parts that this rank owns, and under `compute` of its wards. Copies their bytes,
  /// which may change as soon as `keep` returns.
  /// @return `errc::size_mismatch` for a part that is missing, of another owner, or of another size. Wanted
  ///   is its size, 0 for a part of another owner; found the size given, 0 for a missing part.
  ///   `errc::not_recovered` before `recover` has had a result in this epoch, including `errc::state_lost`:
  ///   the parts have no owners yet.
  result<void> keep(std::uint64_t version, std::span<const part_bytes> parts, deadline by);
  /// Makes the last kept version the valid one. @pre all ranks have kept it
  void commit() noexcept;
  /// Drops the last kept version, if it is not committed.
  void drop() noexcept { held_.drop(); }
  /// The valid version, if there is one.
  [[nodiscard]] std::optional<std::uint64_t> version() const noexcept { return held_.version(); }

  [[nodiscard]] replica_stats stats() const noexcept;

 private:
  friend struct testing_access;

  result<recovered_state> recover_to(detail::destinations_ref into, deadline by);
  result<recovered_state> recover_now(detail::destinations_ref into, deadline by);
  [[nodiscard]] recovered_state nothing_found();

  detail::replica_ranks_of<T> ranks_;
  Place place_;
  detail::replica_setup setup_;
  detail::epoch_owners owners_;
  detail::held_versions held_{};
  detail::replica_rendezvous rendezvous_;
  detail::replica_sender sender_;
  detail::part_restorer restorer_;
  std::uint64_t keeps_ = 0;
  std::uint64_t recoveries_ = 0;
};

}  // namespace v0
}  // namespace llmmem

#include <llmmem/redundancy/detail/redundant_replica_body.hpp>
