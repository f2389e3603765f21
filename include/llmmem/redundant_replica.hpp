/// @file
/// `redundant_replica`: the state of ranks, kept so that it outlives the loss of some of them.
#pragma once

#include <llmmem/comm/collectives.hpp>
#include <llmmem/comm/endpoint.hpp>
#include <llmmem/comm/ranks.hpp>
#include <llmmem/comm/transport.hpp>
#include <llmmem/config.hpp>
#include <llmmem/redundancy/part_ownership.hpp>
#include <llmmem/redundancy/placement.hpp>
#include <llmmem/redundancy/redundancy.hpp>
#include <llmmem/redundancy/replica_map.hpp>
#include <llmmem/result.hpp>
#include <llmmem/transfer/crc32c.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace llmmem::inline v0 {

/// A transport whose ranks sit in seats, and change with the epoch. `communicator` is one.
template <class T>
concept seated_transport = transport<T> && requires(const T& ranks) {
  { ranks.epoch() } noexcept -> std::same_as<std::uint64_t>;
  { ranks.seats() } noexcept -> std::convertible_to<std::span<const seat_id>>;
};

/// Makes the placement for the members of an epoch, by their seats.
template <class P>
concept seat_placement = std::copyable<P> && requires(const P& place, std::span<const seat_id> seats) {
  { place(seats) } -> replica_placement;
};

/// The same placement for any members: it asks for no more than their number.
template <replica_placement Placement = ring_neighbours>
class any_seats {
 public:
  explicit any_seats(Placement placement = Placement()) : placement_(std::move(placement)) {}
  [[nodiscard]] Placement operator()(std::span<const seat_id> /*seats*/) const { return placement_; }

 private:
  Placement placement_;
};

/// `failure_domains`, of those that are left: each seat has its domain. Where they cannot be kept apart any
/// more, they are spread as well as they can be.
class seat_domains {
 public:
  /// @param domains  by seat.
  explicit seat_domains(std::vector<domain_id> domains) : domains_(std::move(domains)) {}
  /// @throws argument_error  for a seat without a domain.
  [[nodiscard]] failure_domains operator()(std::span<const seat_id> seats) const;

 private:
  std::vector<domain_id> domains_;
};

/// The bytes of a part.
struct part_bytes {
  part_id part{};
  std::span<const std::byte> bytes{};
};

/// How a replica is set up.
struct replica_options {
  const char* name = "redundant_replica";  ///< for error texts; outlives it
  std::uint32_t tag = 0x7265'7000;         ///< of its messages: nothing else uses it at the same time
};

/// What `recover` found.
struct recovered_state {
  bool is_there = false;            ///< else no member has anything kept: begin anew, or from a checkpoint
  std::uint64_t version = 0;        ///< that all parts are of
  std::uint64_t moved_bytes = 0;    ///< between ranks
  std::uint64_t rebuilt_bytes = 0;  ///< of parts here whose owner was lost
};

/// What a replica holds and has done.
struct replica_stats {
  std::uint64_t own_bytes = 0;   ///< copies of this rank's own parts, of all versions held
  std::uint64_t kept_bytes = 0;  ///< copies and parity of others', of all versions held
  std::uint64_t keeps = 0;
  std::uint64_t recoveries = 0;
};

/// Keeps each version of a state on other ranks as well, in memory: by copies, parity or a Reed-Solomon code.
/// When ranks die, what they had is given back by those that live, to a fresh process in their seat, or to
/// whoever adopts it; the training goes on from the version that was kept last.
///
/// The state is cut into *parts*, of fixed sizes. Each has a home seat and an owner: the rank at home, or the
/// one that has adopted it. In every epoch:
///
///     replica.recover(by)                       // who owns what now; their bytes, of the last version kept
///     for (each step) {
///       ... change the parts that are ours ...
///       replica.keep(version, ours, by)         // sent to who keeps it; counts for nothing yet
///       if (all agree that theirs is kept) replica.commit(); else replica.drop();
///     }
///
/// - **Two phases, as with files.** A version counts once it is committed, by all or by none: the
///   agreement in between is the caller's, `communicator::agree`, since it decides more than that. Who dies
///   at any moment, the version before is whole, or the new one is: a step is repeated at most once.
/// - **Before the first commit there is nothing to give back**: `recovered_state::is_there` is false, in
///   whatever epoch. A step that was begun has changed the parts all the same: load the initial state again.
/// - **Memory**: the own parts once, and what the scheme asks for (`redundancy_scheme::extra_bytes`), for
///   each version held: the committed one, and between `keep` and `commit` the new one.
/// - **A smaller world** than the scheme's groups has the nearest scheme that fits, see `scheme_for`;
///   alone, a rank keeps but its own. `tolerates()` tells what the members of now could lose.
/// - **Checked**: each part has a CRC-32C, made when it is kept, which all ranks know. What comes back is
///   held to it: `errc::message_damaged`, never wrong bytes.
/// - **Redundant computation** (`redundancy_kind::compute`): no state is sent. Who keeps a part for another
///   computes it as well, and gives it to `keep` beside its own: `wards()`. Checksums are compared: a part
///   that came out differently on the two is `errc::checksum_differs`, its index that part, and neither is
///   taken.
///
/// @tparam Place   where copies go, by the seats of an epoch's members.
/// @par Complexity      `keep`: for each byte owned one copy and one checksum, and what the scheme sends:
///      F - 1 copies, or m stripes of a coded state, in as many rounds as the group has other members.
/// @par Thread safety   one thread at a time, which owns the transport meanwhile.
/// @par Errors          what the transport returns: then revoke, agree, and `recover` in the next epoch. What
///      waits is told `by` when to end.
/// @par Source          copies in peers' memory: Wang et al., "Gemini", SOSP 2023; parity: Plank and Li, FTCS
///      1994; redundant computation: Thorpe et al., "Bamboo", NSDI 2023.
template <seated_transport T, seat_placement Place = any_seats<>>
class redundant_replica {
 public:
  /// The transport outlives it. The scheme, sizes and homes must be the same on all ranks: that is not
  /// checked.
  /// @param sizes  bytes of each part.
  /// @param homes  the seat of each part. While nobody sits there, another rank owns the part.
  /// @throws argument_error  when these two differ in number.
  redundant_replica(T& ranks, const redundancy_scheme& scheme, std::span<const std::uint64_t> sizes,
                    std::span<const seat_id> homes, Place place = Place(),
                    const replica_options& options = {});
  redundant_replica(const redundant_replica&) = delete;
  redundant_replica& operator=(const redundant_replica&) = delete;

  /// What the members of this epoch own, and have kept. All must call it, once an epoch has begun and before
  /// anything else; again, if it failed, in the next. Afterwards `recovered(part)` has the bytes of what this
  /// rank owns, until the next `commit`.
  /// @return `errc::state_lost` when more ranks were lost than the scheme bears, for all ranks alike:
  ///      `lost()`. Then `forget`, and go back to a checkpoint: `mine()` are the parts to load, and the epoch
  ///      goes on. Without `forget` the next `recover` comes to the same.
  result<recovered_state> recover(deadline by);
  /// @pre `recover` has found something, and this rank owns the part
  [[nodiscard]] std::span<const std::byte> recovered(part_id part) const noexcept;
  /// Members of the epoch in which the last version was kept whose state is lost, after `errc::state_lost`.
  [[nodiscard]] const rank_set& lost() const noexcept { return lost_; }
  /// All that was kept counts for nothing any more. All ranks must call it, or none.
  void forget() noexcept;

  /// By part, in this epoch.
  [[nodiscard]] std::span<const rank_id> owners() const noexcept { return owners_; }
  /// The parts that this rank owns.
  [[nodiscard]] std::vector<part_id> mine() const;
  /// The parts that this rank keeps copies of for others, and computes as well under `compute`.
  [[nodiscard]] std::vector<part_id> wards() const;
  /// How many of this epoch's members may be lost at once without losing any state, whichever.
  [[nodiscard]] std::uint32_t tolerates() const noexcept { return map_ ? map_->scheme().tolerates() : 0; }
  /// How it is kept in this epoch; nothing for one rank alone.
  [[nodiscard]] const std::optional<replica_map>& map() const noexcept { return map_; }

  /// Keeps a version: of all parts that this rank owns, and under `compute` of its wards. Their bytes are
  /// copied, and may be changed when it returns.
  /// @return `errc::size_mismatch` for parts that are missing, not its own, or of another size: wanted and
  ///      found are its bytes, wanted 0 where it is not its own, found 0 where it is missing. Before
  ///      `recover` no part is its own.
  result<void> keep(std::uint64_t version, std::span<const part_bytes> parts, deadline by);
  /// What was kept last is the version that counts. @pre all ranks have kept it
  void commit() noexcept;
  /// What was kept last is forgotten, if it is not committed.
  void drop() noexcept;
  /// The version that counts, if there is one.
  [[nodiscard]] std::optional<std::uint64_t> version() const noexcept {
    return committed_.is_there ? std::optional(committed_.version) : std::nullopt;
  }

  [[nodiscard]] replica_stats stats() const noexcept;

 private:
  friend struct testing_access;
  /// A version as one rank holds it.
  struct generation {
    bool is_there = false;
    std::uint64_t version = 0;
    std::uint64_t epoch = 0;
    rank_id self{};                // of that epoch
    std::vector<seat_id> seats{};  // its members
    kept_layout layout{};
    std::vector<std::uint32_t> sums{};               // CRC-32C by part
    std::vector<std::byte> own{};                    // the blob
    std::vector<std::vector<std::byte>> copies{};    // of the blobs of others, by rank
    std::vector<std::vector<std::byte>> parities{};  // by codeword of the own group
    std::vector<std::uint32_t> parity_sums{};
  };
  /// What each rank says of itself when an epoch begins.
  struct presence {
    std::uint64_t version = 0;
    std::uint64_t epoch = 0;
    std::uint32_t rank = 0;   // in that epoch
    std::uint32_t world = 0;  // of that epoch; 0: it holds nothing
    std::uint32_t sum = 0;
    std::uint32_t unused = 0;
  };
  [[nodiscard]] static std::uint32_t sum_of(const presence& said) noexcept {
    return crc32c(0, std::as_bytes(std::span(&said, 1)).first(offsetof(presence, sum)));
  }

  [[nodiscard]] std::optional<replica_map> place(std::span<const seat_id> seats) const;
  [[nodiscard]] collective_call call(deadline by) const;
  [[nodiscard]] failure refuse(errc code, std::uint32_t index, std::uint64_t wanted,
                               std::uint64_t found) const noexcept;

  [[nodiscard]] std::vector<std::optional<rank_id>> homes_now() const;
  void own_by_home();
  result<recovered_state> recover_now(deadline by);
  result<void> tell_all(std::vector<std::uint32_t>& words, rank_id from, deadline by);
  result<void> learn(generation& about, rank_id from, std::uint32_t world, deadline by);
  [[nodiscard]] bool is_whole(const generation& held) const noexcept;
  result<void> carry_out(const ownership_plan& plan, deadline by);
  [[nodiscard]] std::span<const std::byte> bytes_at(const part_transfer& transfer) const noexcept;
  void apply(const part_transfer& transfer, std::span<const std::byte> bytes) noexcept;

  [[nodiscard]] result<std::vector<std::span<const std::byte>>> sorted(
      std::span<const part_bytes> parts) const;
  result<void> share_sums(generation& of, deadline by);
  [[nodiscard]] result<void> check_blob(const generation& of, rank_id owner,
                                        std::span<const std::byte> blob) const noexcept;
  result<void> send_copies(generation& of, deadline by);
  result<void> compare_wards(generation& of, std::span<const std::span<const std::byte>> parts);
  result<void> send_stripes(generation& of, deadline by);
  result<void> trade(std::optional<std::span<const std::byte>> out, rank_id to,
                     std::optional<std::span<std::byte>> into, rank_id from, deadline by);

  T* ranks_;
  redundancy_scheme scheme_;
  std::vector<std::uint64_t> sizes_;  // by part
  std::vector<seat_id> homes_;        // by part
  std::size_t home_seats_ = 0;        // different ones
  Place place_;
  replica_options options_;

  std::uint64_t epoch_ = 0;  // that the next four are of
  std::vector<rank_id> owners_{};
  std::optional<replica_map> map_{};
  std::vector<std::vector<std::byte>> recovered_{};  // by part; empty where it is another's
  rank_set lost_{};

  generation committed_{};
  generation pending_{};
  std::vector<std::byte> scratch_{};
  std::vector<std::vector<std::uint32_t>> stripe_sums_{};  // by rank, of what is being kept
  std::uint64_t keeps_ = 0;
  std::uint64_t recoveries_ = 0;
};

}  // namespace llmmem::inline v0

#include <llmmem/detail/redundant_replica_keeping.hpp>
#include <llmmem/detail/redundant_replica_recovery.hpp>
