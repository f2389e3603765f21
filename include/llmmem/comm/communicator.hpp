/// @file
/// `communicator`: ranks that send to each other, notice who has died, agree on it, and go on without.
#pragma once

#include <llmmem/comm/agreement.hpp>
#include <llmmem/comm/detail/agree_wire.hpp>
#include <llmmem/comm/detail/inbox.hpp>
#include <llmmem/comm/endpoint.hpp>
#include <llmmem/comm/errors.hpp>
#include <llmmem/comm/id_set.hpp>
#include <llmmem/comm/ranks.hpp>
#include <llmmem/config.hpp>
#include <llmmem/result.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace llmmem {
inline namespace v0 {

namespace comm {

/// Whether the bytes of messages carry a checksum beside that of their header.
enum class payload_check : std::uint8_t {
  none,
  crc32c,  ///< each frame: what was damaged on its way is an error, and not in the message
};

}  // namespace comm

using payload_check [[deprecated("its name is comm::payload_check")]] = comm::payload_check;

/// How a communicator is set up.
struct communicator_options {
  const char* name = "communicator";  ///< for error texts; outlives it
  /// For messages that nobody has asked for yet. Each is charged its bytes and `comm::early_message_bytes`.
  std::uint64_t early_bytes = std::uint64_t{64} << 20;
  comm::payload_check check = comm::payload_check::none;
};

/// Bytes of messages between this process and a seat. Headers, and what is said to agree, are not counted.
struct peer_traffic {
  std::uint64_t sent_messages = 0;
  std::uint64_t sent_bytes = 0;
  std::uint64_t received_messages = 0;
  std::uint64_t received_bytes = 0;

  friend constexpr bool operator==(const peer_traffic&, const peer_traffic&) noexcept = default;
};

/// What a communicator has counted.
struct communicator_stats {
  std::uint64_t agreements = 0;
  std::uint64_t epochs = 0;        ///< that it was a member of
  std::uint64_t stale_frames = 0;  ///< of epochs that are over, or of who is out: not heard
  std::uint64_t torn_frames = 0;   ///< of messages that were given up halfway
  std::uint64_t bad_frames = 0;    ///< told, and not what this version says
  std::uint64_t early_bytes = 0;   ///< charged now
};

/// The processes of a job as ranks 0 to `world()` - 1 of an *epoch*, which is a fixed set of members. Any of
/// them may die at any time, without a word.
///
///     communicator ranks(endpoint);
///     ranks.join(ranks.after(10'000'000'000)).value();
///     for (...) {
///       const auto done = all_reduce(ranks, gradients, sum_f32, call);
///       if (!done) ranks.revoke();                          // others may wait for who is well
///       const comm::agreed outcome = ranks.agree(done ? 1 : 0, ranks.after(30'000'000'000)).value();
///       if (outcome.bits == 1 && outcome.failed.empty()) continue;
///       ranks.shrink(outcome);                              // without the dead, ranks numbered anew
///       ...                                                 // bring the state to where all can go on
///     }
///
/// - **Messages** have a tag and any length, also 0. Of two with the same tag, from the same rank, the first
///   sent is the first received; others may be received in any order. One that comes before it is asked for
///   is kept, up to `early_bytes` in all; beyond that it waits where it is, and all of that rank behind it.
///   The receive buffer must have exactly the message's length; otherwise `errc::size_mismatch`, and the
///   message is discarded.
/// - **Nothing waits** beyond its deadline: `errc::peer_timed_out`, of `join` `errc::seat_missing`. A message
/// of which a part had moved by
///   then is lost, for whoever sent and received it; the next one is whole again. The usual answer is
///   `revoke`.
/// - **Death**: what concerns a rank that has died ends with `errc::peer_failed` (`errc::frame_forged` where
/// its
///   connection carried frames that it did not send), except that what came whole
///   before can still be received. Ranks that wait for one that lives learn of it by `revoke`: it ends all
///   waiting of this epoch, on all ranks, with `errc::epoch_revoked`, and lets nobody wait anew.
/// - **Agreement**: `agree` works revoked or not; it gives the same answer to all that get one, see
///   `agreement`. `shrink` and `admit` begin the next epoch with what was agreed on: all that live do the
///   same. What is left of an earlier epoch, as of a process that was silent for long and comes back, is not
///   heard: *fenced*. Such a process gets `errc::no_quorum`, and must be started afresh.
/// - **Joining**: `join` forms the first epoch once all seats are taken; later, fresh processes wait in
///   `waiting()` until the members agree, and `admit` them.
///
/// @par Complexity      a message of n bytes is n / frame_bytes frames, read in place when it is awaited; an
///      agreement 4 messages of some hundred bytes for each other rank.
/// @par Thread safety   one thread at a time. (The endpoint's `wake` is for any.)
/// @par Errors          `result`s as above, `errc::out_of_range` for ranks there are not, `errc::not_joined`
///      before `join` has succeeded. Without memory what waits throws `std::bad_alloc`.
/// @par Source          the calls and what they promise: User Level Failure Mitigation (Bland et al., IJHPCA
///      2013).
template <endpoint E>
class communicator {
 public:
  using endpoint_type = E;

  /// The endpoint outlives it.
  explicit communicator(E& end, const communicator_options& options = {});
  communicator(const communicator&) = delete;
  communicator& operator=(const communicator&) = delete;

  /// What it sends and receives by.
  [[nodiscard]] E& endpoint() noexcept { return *end_; }
  [[nodiscard, deprecated("call endpoint()")]] E& end() noexcept { return *end_; }
  /// The time `ns` from now.
  [[nodiscard]] deadline after(std::uint64_t ns) const noexcept;

  /// Becomes a member: of the first epoch, when all seats are taken by fresh processes, or of the next, when
  /// the members admit it. `errc::seat_missing` names the lowest seat that is missing at the deadline, and
  /// says why, as far as this process knows (`seat_absence`); it may be called again. The epoch may be
  /// revoked already when it returns: then agree.
  result<void> join(deadline by);

  /// 0 before it has joined.
  [[nodiscard]] std::uint64_t epoch() const noexcept { return epoch_; }
  [[nodiscard]] rank_id rank() const noexcept { return rank_; }
  [[nodiscard]] rank_count world() const noexcept {
    return rank_count{static_cast<std::uint32_t>(seats_.size())};
  }
  /// By rank, rising.
  [[nodiscard]] std::span<const seat_id> seats() const noexcept LLMMEM_LIFETIMEBOUND { return seats_; }
  [[nodiscard]] seat_id seat_of(rank_id rank) const noexcept { return seats_[to_index(rank)]; }
  /// The rank that sits there, or nothing.
  [[nodiscard]] std::optional<rank_id> rank_of(seat_id seat) const noexcept;

  /// Returns once `bytes` may be written again.
  result<void> send(std::span<const std::byte> bytes, rank_id to, std::uint32_t tag, deadline by);
  /// Fills `bytes`.
  result<void> recv(std::span<std::byte> bytes, rank_id from, std::uint32_t tag, deadline by);
  /// Both at once, so that a ring of ranks that send to the next does not wait for ever.
  result<void> exchange(std::span<const std::byte> out, rank_id to, std::span<std::byte> into, rank_id from,
                        std::uint32_t tag, deadline by);
  /// How long the next message is, once it is on its way.
  result<std::uint64_t> probe(rank_id from, std::uint32_t tag, deadline by);

  /// Takes what has come, without waiting: so that others get their answers while this one computes.
  void poll();

  /// Members of this epoch that are dead or not heard any more, for what this process knows.
  [[nodiscard]] seat_set failed() const noexcept { return part_.failed(); }
  [[nodiscard]] bool has_failed(rank_id rank) const noexcept { return failed().contains(seat_of(rank)); }
  /// Fresh processes that wait to be admitted.
  [[nodiscard]] const seat_set& waiting() const noexcept { return waiting_; }

  /// Ends all waiting of this epoch, on all ranks. Waits for nothing.
  void revoke() noexcept;
  [[nodiscard]] bool is_revoked() const noexcept { return is_revoked_; }

  /// The AND of everybody's bits, the members that are out, and the seats to admit: the same for all that get
  /// it. All that live must call it. Ended by its deadline it goes on when it is called again, with the bits
  /// of the first time. @return `errc::no_quorum` when those that are heard may not decide;
  /// `errc::peer_timed_out` with the lowest rank that was waited for, be it by the coordinator, which each
  /// asks for whom it waits: the coordinator itself where that has not answered.
  result<comm::agreed> agree(std::uint64_t bits, deadline by);
  /// The next epoch, without who has failed. All that got `outcome` must call it, or all `admit`.
  /// @pre `outcome` is of `agree`, in this epoch, and this process is not out
  void shrink(const comm::agreed& outcome);
  /// The next epoch, without who has failed, and with who waited. Ranks are numbered by seats again.
  void admit(const comm::agreed& outcome);

  [[nodiscard]] communicator_stats stats() const noexcept;
  /// With the process in `seat` now and those before it.
  [[nodiscard]] const peer_traffic& traffic(seat_id seat) const noexcept { return traffic_[to_index(seat)]; }

 private:
  // What is told, by `frame_header::kind`.
  enum class told_kind : std::uint16_t { hello = 1, welcome, revoke, fenced, agree };
  struct early_word {
    seat_id from{};
    std::uint64_t epoch = 0;
    agree_message message{};
  };
  /// Tells messages of an agreement, in its epoch.
  struct poster {
    communicator* all;
    std::uint64_t epoch;
    void operator()(seat_id to, const agree_message& message) const noexcept {
      all->tell_agree(to, message, epoch);
    }
  };
  /// What the endpoint calls.
  struct hearing {
    communicator* all;
    frame_buffer buffer_for(seat_id from, const frame_header& frame) noexcept {
      return all->buffer_for(from, frame);
    }
    void arrived(seat_id from, const frame_header& frame) noexcept { all->arrived(from, frame); }
    void told(seat_id from, const frame_header& frame, std::span<const std::byte> bytes) noexcept {
      all->told(from, frame, bytes);
    }
    void died(seat_id seat, comm::death how) noexcept { all->died(seat, how); }
    void came(seat_id seat) noexcept { all->came(seat); }
    [[nodiscard]] bool goes_on() const noexcept { return all->goes_on(); }
  };
  static_assert(frame_handler<hearing>);

  [[nodiscard]] frame_buffer buffer_for(seat_id from, const frame_header& frame) noexcept;
  void arrived(seat_id from, const frame_header& frame) noexcept;
  void told(seat_id from, const frame_header& frame, std::span<const std::byte> bytes) noexcept;
  void died(seat_id seat, comm::death how) noexcept;
  void came(seat_id seat) noexcept;
  [[nodiscard]] bool goes_on() const noexcept;

  void hear_hello(seat_id from, const frame_header& frame, std::span<const std::byte> bytes) noexcept;
  void hear_welcome(seat_id from, const frame_header& frame, std::span<const std::byte> bytes) noexcept;
  void hear_revoke(const frame_header& frame) noexcept;
  void hear_agree(seat_id from, const frame_header& frame, std::span<const std::byte> bytes) noexcept;
  void tell(seat_id to, told_kind kind, std::uint64_t epoch, std::span<const std::byte> bytes) noexcept;
  void tell_agree(seat_id to, const agree_message& message, std::uint64_t epoch) noexcept;
  void tell_welcome(const seat_set& to) noexcept;

  /// Whether the process that is, or was, connected there is the one that is a member.
  [[nodiscard]] bool is_member(seat_id seat) const noexcept {
    return part_.members().contains(seat) && nonces_[to_index(seat)] == member_nonces_[to_index(seat)];
  }
  /// Or may have been, of an epoch with that part: it ended before it said which process it is.
  [[nodiscard]] bool was_member_of(const agreement& part, seat_id seat) const noexcept {
    const std::uint64_t nonce = nonces_[to_index(seat)];
    return part.members().contains(seat) && (nonce == member_nonces_[to_index(seat)] || nonce == 0);
  }
  [[nodiscard]] bool was_member(seat_id seat) const noexcept { return was_member_of(part_, seat); }
  /// How sure the death of the member is. A process that ended before it said which it is may have sat there
  /// before the member, which then lives.
  [[nodiscard]] comm::death death_of_member(seat_id seat, comm::death how) const noexcept {
    return is_member(seat) ? how : comm::death::suspected;
  }
  /// Of the former epoch. A process that was admitted since has another number than the member before it.
  [[nodiscard]] bool was_member_before(seat_id seat) const noexcept {
    return !newcomers_.contains(seat) && was_member_of(part_before_, seat);
  }
  [[nodiscard]] seat_set missing() const noexcept;
  [[nodiscard]] seat_absence why_missing(seat_id seat) const noexcept;
  void begin_epoch(std::uint64_t epoch, const seat_set& members, const seat_set& newcomers,
                   const std::vector<std::uint64_t>& nonces);
  void leave_behind(const seat_set& failed) noexcept;
  void fence(seat_id process, std::uint64_t its_epoch) noexcept;
  void tell_begun(const seat_set& members) noexcept;
  void tell_hello(seat_id seat) noexcept;
  /// Whether the process there has said that its epoch goes back to other founders than this one's.
  [[nodiscard]] bool has_other_founders(seat_id seat) const noexcept {
    return foundings_[to_index(seat)] != 0 && foundings_[to_index(seat)] != founding_;
  }
  void note_founding(seat_id from, std::uint64_t founding) noexcept;
  void wait_once(deadline by);

  [[nodiscard]] failure refuse(error_code code, rank_id rank, std::uint64_t wanted,
                               std::uint64_t found) const noexcept;
  /// Of a rank that has failed.
  [[nodiscard]] failure why_failed(rank_id rank, std::uint64_t wanted, std::uint64_t found) const noexcept {
    error_code why = errc::peer_failed;
    if constexpr (detail::tells_failure<E>) why = end_->why_failed(seat_of(rank));
    return refuse(why, rank, wanted, found);
  }
  [[nodiscard]] result<void> may_talk(rank_id with) const noexcept;
  [[nodiscard]] result<void> send_frames(std::span<const std::byte> bytes, rank_id to, std::uint32_t tag,
                                         deadline by);
  [[nodiscard]] result<void> send_to_self(std::span<const std::byte> bytes, std::uint32_t tag);
  [[nodiscard]] result<void> wait_for_awaited(std::uint64_t bytes, rank_id from, deadline by);
  void end_await(rank_id from) noexcept;

  E* end_;
  communicator_options options_;

  std::uint64_t epoch_ = 0;
  std::vector<seat_id> seats_{};  // by rank
  rank_id rank_{};
  agreement part_{};
  agreement part_before_{};  // answers members that are one epoch behind
  seat_set newcomers_{};     // members that were admitted to this epoch
  bool is_revoked_ = false;
  bool is_fenced_ = false;

  seat_set gone_{};                    // processes that died, whether members or not
  seat_set certain_{};                 // of these, for certain
  seat_set fresh_{};                   // processes that are in no epoch, for all they said
  seat_set anew_{};                    // processes that came after the epoch began, not its members
  seat_set given_up_{};                // processes that this one does not hear any more
  seat_set waiting_{};                 // fresh ones that wait for members to admit them
  std::vector<std::uint64_t> nonces_;  // by seat, of who was connected there last; 0: it has not said so yet
  std::vector<std::uint64_t> member_nonces_;
  std::uint64_t founding_ = 0;            // names the members of the first epoch, with all that came of it
  std::vector<std::uint64_t> foundings_;  // by seat, as said there; 0: of a fresh process
  std::optional<seat_set> welcomed_{};
  std::uint64_t welcome_epoch_ = 0;
  std::vector<std::uint64_t> welcome_nonces_;
  std::uint64_t welcome_founding_ = 0;

  std::vector<early_word> early_words_{};  // of the epoch that is next
  bool is_next_revoked_ = false;

  detail::inbox inbox_;
  seat_id sending_to_ = no_seat;
  std::vector<peer_traffic> traffic_;
  communicator_stats stats_{};
};

}  // namespace v0
}  // namespace llmmem

#include <llmmem/comm/detail/communicator_body.hpp>
#include <llmmem/comm/detail/communicator_data.hpp>
