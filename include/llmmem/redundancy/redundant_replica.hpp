/// @file
/// `redundant_replica`: the state of ranks, kept so that it outlives the loss of some of them.
#pragma once

#include <llmmem/comm/collectives.hpp>
#include <llmmem/comm/endpoint.hpp>
#include <llmmem/comm/ranks.hpp>
#include <llmmem/comm/transport.hpp>
#include <llmmem/config.hpp>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/redundancy/detail/redundant_replica_rooms.hpp>
#include <llmmem/redundancy/part_ownership.hpp>
#include <llmmem/redundancy/placement.hpp>
#include <llmmem/redundancy/redundancy.hpp>
#include <llmmem/redundancy/replica_map.hpp>
#include <llmmem/result.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

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

/// Names where a part is to lie: the engine's own memory for it, of the part's size.
template <class R>
concept part_rooms = requires(R& rooms, part_id part) {
  { rooms(part) } -> std::convertible_to<std::span<std::byte>>;
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

/// Why there is nothing to give back, and so what all ranks load instead: each the parts that it owns now,
/// also where it has loaded them in an epoch before, as a step that was begun has changed them.
enum class absence : std::uint8_t {
  none,        ///< there is something
  never_kept,  ///< nobody has committed anything so far: what the run began from
  forgotten,   ///< all were told to `forget`: the checkpoint that they went back to
  gone,  ///< nobody is left of those who know what was kept: the newest checkpoint; where there is none,
         ///< what was trained is lost
};

/// What `recover` found: the same on all ranks, but for the bytes.
struct recovered_state {
  bool is_there = false;            ///< else `why_not` tells what to load
  absence why_not = absence::none;  ///< there is nothing
  std::uint64_t version = 0;        ///< that all parts are of
  std::uint64_t moved_bytes = 0;    ///< between ranks
  std::uint64_t rebuilt_bytes = 0;  ///< of parts here whose owner was lost, or had them damaged
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
///   whatever epoch, and `why_not` tells what to load.
/// - **Memory**: the own parts once, and what the scheme asks for (`redundancy_scheme::extra_bytes`), for
///   each version held: the committed one, and between `keep` and `commit` the new one. From a `recover`
///   without rooms to the next `commit` besides: the parts that came from others, or were put together. What
///   this rank holds whole is not copied for it.
/// - **A smaller world** than the scheme's groups has the nearest scheme that fits, see `scheme_for`;
///   alone, a rank keeps but its own. `tolerates()` tells what the members of now could lose.
/// - **Checked**: each part has a CRC-32C, made when it is kept, which all ranks know. What comes back is
///   held to it: `errc::message_damaged`, never wrong bytes. Who recovers twice from the same version first
///   proves all that it holds of it, and says what is damaged: from there nothing comes, so that the second
///   time does not end as the first did, and all else that it holds still counts.
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
  /// The transport outlives it. The scheme, sizes, homes and placement must be the same on all ranks:
  /// `recover` compares them.
  /// @param sizes  bytes of each part.
  /// @param homes  the seat of each part. While nobody sits there, another rank owns the part.
  /// @throws argument_error  when these two differ in number, or a home is no seat of the job, where the
  ///      transport knows: `ranks.endpoint().seats()`, as a communicator does.
  redundant_replica(T& ranks, const redundancy_scheme& scheme, std::span<const std::uint64_t> sizes,
                    std::span<const seat_id> homes, Place place = Place(),
                    const replica_options& options = {});
  redundant_replica(const redundant_replica&) = delete;
  redundant_replica& operator=(const redundant_replica&) = delete;

  /// What the members of this epoch own, and have kept. All must call it, once an epoch has begun and before
  /// anything else; again, if it failed, in the next. Afterwards `recovered(part)` has the bytes of what this
  /// rank owns, until the next `commit`.
  /// @return `errc::state_lost` when more was lost or damaged than the scheme bears, for all ranks alike:
  ///      `lost()`. Then `forget`, and go back to a checkpoint: `mine()` are the parts to load, and the epoch
  ///      goes on. Without `forget` the next `recover` comes to the same: nothing is given up unless all are
  ///      told to. `errc::setup_differs` when ranks were given another scheme, sizes, homes or placement, for
  ///      all alike: nothing was given back.
  result<recovered_state> recover(deadline by);
  /// The same, and the parts that this rank owns now lie where `into(part)` says: in memory that is there
  /// already nothing is cleared or copied twice. It is asked once for each of these, in order, and only where
  /// there is something to give back.
  ///
  /// Until this has succeeded, the rooms that were named have anything in them, from the first on.
  /// @param into  `std::span<std::byte>(part_id)`, of the part's size: else `errc::size_mismatch`, index the
  ///      part, wanted its bytes, found the room's, and the epoch is revoked. What it throws passes through,
  ///      after that.
  /// @pre no two rooms overlap: each part is proved as it comes, not once all are there
  template <part_rooms Rooms>
  result<recovered_state> recover(deadline by, Rooms into);
  /// Its bytes, until the next `commit`, `forget` or `recover`: in the room that was named, or in memory of
  /// the replica's. @pre `recover` has found something, and this rank owns the part
  [[nodiscard]] std::span<const std::byte> recovered(part_id part) const noexcept LLMMEM_LIFETIMEBOUND;
  /// Members of the epoch in which the last version was kept whose state is lost, after `errc::state_lost`.
  [[nodiscard]] const rank_set& lost() const noexcept { return lost_; }
  /// All that was kept counts for nothing any more. All ranks must call it, or none.
  void forget() noexcept;

  /// By part, in this epoch.
  [[nodiscard]] std::span<const rank_id> owners() const noexcept LLMMEM_LIFETIMEBOUND { return owners_; }
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
  ///      found are its bytes, wanted 0 where it is not its own, found 0 where it is missing.
  ///      `errc::not_recovered` before `recover` has come to something in this epoch, be it
  ///      `errc::state_lost`: nobody owns anything as yet.
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
    std::uint32_t about = 0;  // CRC-32C of what others are told of it
  };
  /// What a rank knows to have been last, when nothing is there. Of several the highest is so.
  enum class past : std::uint32_t { unknown, never_kept, forgotten, kept };
  /// What each rank says of itself when an epoch begins.
  struct presence {
    std::uint64_t version = 0;
    std::uint64_t epoch = 0;
    std::uint32_t rank = 0;   // in that epoch
    std::uint32_t world = 0;  // of that epoch; 0: it holds nothing
    std::uint32_t setup = 0;  // digest of what must be the same on all
    past last = past::unknown;
    std::uint32_t damaged = 0;  // places, of what it holds
    std::uint32_t sum = 0;

    [[nodiscard]] bool is_of(const presence& other) const noexcept {
      return version == other.version && epoch == other.epoch;
    }
    [[nodiscard]] bool is_newer_than(const presence& other) const noexcept {
      return std::pair(epoch, version) > std::pair(other.epoch, other.version);
    }
  };
  /// What there is to give back, and who was who.
  struct found_version {
    generation about{};
    membership_change change{};
    damaged_places damaged{};
  };
  [[nodiscard]] static std::uint32_t sum_of(const presence& said) noexcept {
    return crc32c(0, std::as_bytes(std::span(&said, 1)).first(offsetof(presence, sum)));
  }

  /// The most of a part that is sent at once when it is given back.
  static constexpr std::uint64_t recovery_piece = std::uint64_t{1} << 20;

  [[nodiscard]] std::optional<replica_map> place(std::span<const seat_id> seats) const;
  [[nodiscard]] collective_call call(deadline by) const;
  [[nodiscard]] failure refuse(error_code code, std::uint32_t index, std::uint64_t wanted,
                               std::uint64_t found) const noexcept;

  [[nodiscard]] std::uint32_t setup_digest() const;
  [[nodiscard]] std::vector<std::optional<rank_id>> homes_now() const;
  void own_by_home();
  using ask_room = std::span<std::byte> (*)(void* whom, part_id part);
  result<recovered_state> recover_for(ask_room ask, void* whom, deadline by);
  result<recovered_state> recover_now(ask_room ask, void* whom, deadline by);
  result<void> tell_all(std::vector<std::uint32_t>& words, rank_id from, deadline by);
  result<void> learn(generation& about, rank_id from, std::uint32_t world, deadline by);
  [[nodiscard]] static std::uint32_t sum_about(const generation& held) noexcept;
  [[nodiscard]] std::vector<std::uint32_t> damage_in(const generation& held) const;
  [[nodiscard]] static constexpr std::size_t damage_words(std::uint32_t world) noexcept {
    return (1 + 2 * std::size_t{world} + 31) / 32;
  }
  [[nodiscard]] static std::uint32_t bits_in(std::span<const std::uint32_t> words) noexcept;
  result<std::vector<presence>> hear_all(std::uint32_t damaged, deadline by);
  [[nodiscard]] static const presence* newest_of(std::span<const presence> all) noexcept;
  result<found_version> find(std::span<const presence> all, const presence& newest,
                             std::vector<std::uint32_t> damage, deadline by);
  result<void> learn_damage(found_version& of, std::vector<std::uint32_t> own, deadline by);
  void begin_afresh();
  result<recovered_state> give_back(const found_version& found, const ownership_plan& plan, ask_room ask,
                                    void* whom, deadline by);
  result<void> make_rooms(const ownership_plan& plan, ask_room ask, void* whom);
  result<void> carry_out(const ownership_plan& plan, deadline by);
  result<void> carry_out(const part_transfer& transfer, std::uint64_t at, deadline by);
  [[nodiscard]] std::span<const std::byte> bytes_at(const part_transfer& transfer) const noexcept;

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

  std::uint64_t recovered_epoch_ = 0;  // 0: not in this one
  past past_ = past::unknown;
  std::uint64_t epoch_ = 0;  // that the next four are of
  std::vector<rank_id> owners_{};
  std::optional<replica_map> map_{};
  rank_set lost_{};

  std::vector<detail::part_room> rooms_{};               // own ones, of parts given back
  std::vector<detail::part_arrival> arrivals_{};         // by part, while they come
  std::vector<std::span<const std::byte>> recovered_{};  // by part; empty where it is another's
  bool is_doubted_ = false;                              // what is committed was given back from before

  generation committed_{};
  generation pending_{};
  std::vector<std::byte> scratch_{};
  std::vector<std::vector<std::uint32_t>> stripe_sums_{};  // by rank, of what is being kept
  std::uint64_t keeps_ = 0;
  std::uint64_t recoveries_ = 0;
};

}  // namespace v0
}  // namespace llmmem

#include <llmmem/redundancy/detail/redundant_replica_damage.hpp>
#include <llmmem/redundancy/detail/redundant_replica_keeping.hpp>
#include <llmmem/redundancy/detail/redundant_replica_recovery.hpp>
