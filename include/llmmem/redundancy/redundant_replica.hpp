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

/// Keeps each version of a state in the memory of other ranks as well: by copies, parity or a Reed-Solomon
/// code. When ranks die, the living ranks restore their state, to a fresh process in their seat or to the
/// ranks that adopt it. Training continues from the last committed version.
///
/// The state is divided into *parts* of fixed sizes. Each has a home seat and an owner: the rank at home, or
/// the one that has adopted it. In every epoch:
///
///     replica.recover(by)                       // the owners now, and the bytes of the last version kept
///     for (each step) {
///       ... change this rank's parts ...
///       replica.keep(version, ours, by)         // sent to the ranks that keep it; not valid yet
///       if (all agree that theirs is kept) replica.commit(); else replica.drop();
///     }
///
/// - **Two phases, as with files.** A version is valid once all ranks commit it, or none: the caller makes
///   the agreement in between, with `communicator::agree`, since it decides more than that. Whenever a rank
///   dies, either the previous version is complete, or the new one: a step is repeated at most once.
/// - **Before the first commit there is nothing to restore**: `recovered_state::is_recovered` is false,
///   in every epoch, and `reason` says what to load.
/// - **Memory**: the own parts once, and the scheme's needs (`redundancy_scheme::extra_bytes`), for each
///   version held: the committed one, and between `keep` and `commit` the new one. From a `recover` without
///   destinations to the next `commit` also the parts that came from others, or were rebuilt. A part that
///   this rank holds whole is not copied for it.
/// - **A smaller world** than the scheme's groups has the nearest scheme that fits, see `scheme_for`; a rank
///   alone keeps only its own parts. `tolerates()` returns what the present members could lose.
/// - **Verified**: each part has a CRC-32C, computed when it is kept, which all ranks know. Restored bytes
///   are compared with it: `errc::message_damaged`, never wrong bytes. A rank that recovers a second time
///   from the same version first verifies everything that it holds of it, and reports damage to the others.
///   Nothing is taken from there, so that the second attempt does not fail like the first; everything else
///   that it holds is still used.
/// - **Redundant computation** (`redundancy_kind::compute`): no state is sent. A rank that keeps a part for
///   another computes it as well, and passes it to `keep` with its own: `wards()`. Checksums are compared: a
///   part that differs between the two is `errc::checksum_differs`, its index that part, and neither is used.
///
/// @tparam Place   where copies go, by the seats of an epoch's members.
/// @par Complexity      `keep`: for each byte owned one copy and one checksum, and what the scheme sends: F -
///   1 copies, or m stripes of a coded state, in as many rounds as the group has other members.
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
  /// @throws argument_error  when these two differ in number, or a home is not a seat of the job, if the
  ///   transport knows: `ranks.endpoint().seats()`, as a communicator does.
  redundant_replica(T& ranks, const redundancy_scheme& scheme, std::span<const std::uint64_t> sizes,
                    std::span<const seat_id> homes, Place place = Place(),
                    const replica_options& options = {});
  redundant_replica(const redundant_replica&) = delete;
  redundant_replica& operator=(const redundant_replica&) = delete;

  /// Restores what the members of this epoch own, and have kept. All must call it, once an epoch has begun
  /// and before anything else; if it failed, again in the next. Afterwards `recovered(part)` has the bytes of
  /// each part that this rank owns, until the next `commit`.
  /// @return `errc::state_lost` on all ranks when more was lost or damaged than the scheme tolerates:
  ///   `lost()`. Then call `forget`, and return to a checkpoint: `own_parts()` are the parts to load, and the
  ///   epoch continues. Without `forget` the next `recover` has the same result: nothing is given up unless
  ///   all ranks ask for it. `errc::setup_differs` on all ranks when they were given different schemes,
  ///   sizes, homes or placements: nothing was restored.
  result<recovered_state> recover(deadline by) { return recover_to({}, by); }
  /// As above, and places the parts that this rank now owns at `into(part)`: existing memory is not cleared,
  /// and no byte is copied twice. The replica asks once for each of these parts, in order, and only if there
  /// is something to restore.
  ///
  /// Until this has succeeded, the contents of the destinations are undefined, from the first on.
  /// @param into  `std::span<std::byte>(part_id)`, of the part's size: otherwise `errc::size_mismatch`, index
  ///   the part, wanted its bytes, found the destination's, and the epoch is revoked. An exception from it
  ///   passes through, after that.
  /// @pre no two destinations overlap, because each part is verified as it arrives, not once all have arrived
  template <part_destinations Destinations>
  result<recovered_state> recover(deadline by, Destinations into) {
    return recover_to(detail::destinations_ref(into), by);
  }
  /// Returns its bytes, until the next `commit`, `forget` or `recover`: at the destination named by the
  /// caller, or in the replica's memory. @pre `recover` has found something, and this rank owns the part
  [[nodiscard]] std::span<const std::byte> recovered(part_id part) const noexcept LLMMEM_LIFETIMEBOUND {
    return restorer_.recovered(part);
  }
  /// Members of the epoch in which the last version was kept whose state is lost, after `errc::state_lost`.
  [[nodiscard]] const rank_set& lost() const noexcept { return owners_.lost(); }
  /// Invalidates everything that was kept. All ranks must call it, or none.
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
  /// How many of this epoch's members may be lost at once, any of them, without losing any state.
  [[nodiscard]] std::uint32_t tolerates() const noexcept { return map() ? map()->scheme().tolerates() : 0; }
  /// Which rank keeps whose state in this epoch; nothing for one rank alone.
  [[nodiscard]] const std::optional<replica_map>& map() const noexcept { return owners_.map(); }

  /// Keeps a version of all parts that this rank owns, and under `compute` of its wards. Copies their bytes,
  /// which may change when it returns.
  /// @return `errc::size_mismatch` for parts that are missing, not its own, or of another size: wanted and
  ///   found are its bytes, wanted 0 if it is not its own, found 0 if it is missing. `errc::not_recovered`
  ///   before `recover` has had a result in this epoch, including `errc::state_lost`: the parts have no
  ///   owners yet.
  result<void> keep(std::uint64_t version, std::span<const part_bytes> parts, deadline by);
  /// Makes the version kept last the valid one. @pre all ranks have kept it
  void commit() noexcept;
  /// Drops the version kept last, if it is not committed.
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
