/// @file
/// `communicator`: ranks that exchange messages, detect deaths, agree on them, and continue without the dead.
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

/// Whether the bytes of messages carry a checksum in addition to the header's.
enum class payload_check : std::uint8_t {
  none,
  crc32c,  ///< each frame: damage in transit is an error, and never reaches the message
};

}  // namespace comm

using payload_check [[deprecated("its name is comm::payload_check")]] = comm::payload_check;

/// The construction parameters of a communicator.
struct communicator_options {
  const char* name = "communicator";  ///< the name in error texts; outlives it
  /// The most memory for messages that have not been requested yet. Each is charged its bytes and
  /// `comm::early_message_bytes`.
  std::uint64_t early_bytes = std::uint64_t{64} << 20;
  comm::payload_check check = comm::payload_check::none;
};

/// Bytes of messages between this process and a seat, without headers and agreement messages.
struct peer_traffic {
  std::uint64_t sent_messages = 0;
  std::uint64_t sent_bytes = 0;
  std::uint64_t received_messages = 0;
  std::uint64_t received_bytes = 0;

  friend constexpr bool operator==(const peer_traffic&, const peer_traffic&) noexcept = default;
};

/// The counters of a communicator.
struct communicator_stats {
  std::uint64_t agreements = 0;
  std::uint64_t epochs = 0;        ///< epochs that it was a member of
  std::uint64_t stale_frames = 0;  ///< from ended epochs, or from excluded processes: ignored
  std::uint64_t torn_frames = 0;   ///< frames of messages that were abandoned halfway
  std::uint64_t bad_frames = 0;    ///< control frames that do not follow this version's protocol
  std::uint64_t early_bytes = 0;   ///< charged at present
};

/// The processes of a job as ranks 0 to `world()` - 1 of an *epoch*, which is a fixed set of members. Any of
/// them may die at any time, without notice.
///
///     communicator ranks(endpoint);
///     ranks.join(ranks.after(10'000'000'000)).value();
///     for (...) {
///       const auto done = all_reduce(ranks, gradients, sum_f32, call);
///       if (!done) ranks.revoke();                          // others may wait for living ranks
///       const comm::agreed outcome = ranks.agree(done ? 1 : 0, ranks.after(30'000'000'000)).value();
///       if (outcome.bits == 1 && outcome.failed.empty()) continue;
///       ranks.shrink(outcome);                              // without the dead, ranks renumbered
///       ...                                                 // bring the state to where all can continue
///     }
///
/// - **Messages** have a tag and any length, including 0. Messages with the same tag from the same rank are
///   received in the order in which they were sent; others may be received in any order. A message that
///   arrives before it is requested is kept, up to `early_bytes` in all; beyond that it waits in the
///   transport, with everything that rank sent after it. The receive buffer must have exactly the message's
///   length; otherwise `errc::size_mismatch`, and the message is discarded.
/// - **Nothing waits** beyond its deadline: `errc::peer_timed_out`, for `join` `errc::seat_missing`. A
///   message partly transferred by then is lost for sender and receiver; the next one is complete again. The
///   usual response is `revoke`.
/// - **Death**: operations with a dead rank end with `errc::peer_failed` (`errc::frame_forged` if its
///   connection carried frames that it did not send). Messages that arrived complete before the death can
///   still be received. Ranks that wait for a living rank learn of the death by `revoke`: it ends all waiting
///   of this epoch, on all ranks, with `errc::epoch_revoked`, and prevents new waits.
/// - **Agreement**: `agree` works whether or not the epoch is revoked; it returns the same answer on all
///   ranks that get one, see `agreement`. `shrink` and `admit` begin the next epoch with the agreed outcome:
///   all living ranks do the same. Messages of an earlier epoch, such as those of a process that returns
///   after a long silence, are ignored: *fenced*. Such a process gets `errc::no_quorum`, and must be
///   restarted.
/// - **Joining**: `join` forms the first epoch once all seats are taken; later, fresh processes wait in
///   `waiting()` until the members agree, and `admit` them.
///
/// @par Complexity      a message of n bytes is n / frame_bytes frames, read in place if the receiver is
///   waiting; an agreement is 4 messages of some hundred bytes for each other rank.
/// @par Thread safety   one thread at a time. (Any thread may call the endpoint's `wake`.)
/// @par Errors          `result`s as above, `errc::out_of_range` for ranks that do not exist,
///   `errc::not_joined` before `join` has succeeded. Without memory, waiting calls throw `std::bad_alloc`.
/// @par Source          the calls and their guarantees: User Level Failure Mitigation (Bland et al., IJHPCA
///   2013).
template <endpoint E>
class communicator {
 public:
  using endpoint_type = E;

  /// `end` must outlive the communicator.
  explicit communicator(E& end, const communicator_options& options = {});
  communicator(const communicator&) = delete;
  communicator& operator=(const communicator&) = delete;

  /// The endpoint that it sends and receives with.
  [[nodiscard]] E& endpoint() noexcept { return *end_; }
  [[nodiscard, deprecated("call endpoint()")]] E& end() noexcept { return *end_; }
  /// Returns the time `ns` from now.
  [[nodiscard]] deadline after(std::uint64_t ns) const noexcept;

  /// Becomes a member: of the first epoch, when fresh processes have taken all seats, or of the next, when
  /// the members admit it. `errc::seat_missing` names the lowest seat missing at the deadline, and why, as
  /// far as this process knows (`seat_absence`); `join` may be called again. The epoch may already be revoked
  /// when it returns: then call `agree`.
  result<void> join(deadline by);

  /// 0 before it has joined.
  [[nodiscard]] std::uint64_t epoch() const noexcept { return epoch_; }
  [[nodiscard]] rank_id rank() const noexcept { return rank_; }
  [[nodiscard]] rank_count world() const noexcept {
    return rank_count{static_cast<std::uint32_t>(seats_.size())};
  }
  /// The seats of the ranks, ascending.
  [[nodiscard]] std::span<const seat_id> seats() const noexcept LLMMEM_LIFETIMEBOUND { return seats_; }
  [[nodiscard]] seat_id seat_of(rank_id rank) const noexcept { return seats_[to_index(rank)]; }
  /// Returns the rank in that seat, or nothing.
  [[nodiscard]] std::optional<rank_id> rank_of(seat_id seat) const noexcept;

  /// Sends a message. Returns once `bytes` may be overwritten.
  result<void> send(std::span<const std::byte> bytes, rank_id to, std::uint32_t tag, deadline by);
  /// Receives a message into `bytes`.
  result<void> recv(std::span<std::byte> bytes, rank_id from, std::uint32_t tag, deadline by);
  /// Sends and receives at once, so that a ring of ranks that send to the next does not deadlock.
  result<void> exchange(std::span<const std::byte> out, rank_id to, std::span<std::byte> into, rank_id from,
                        std::uint32_t tag, deadline by);
  /// Returns the length of the next message, once it is in flight.
  result<std::uint64_t> probe(rank_id from, std::uint32_t tag, deadline by);

  /// Handles arrived messages without waiting, so that other ranks get their answers while this one computes.
  void poll();

  /// Members of this epoch that are dead or unreachable, as far as this process knows.
  [[nodiscard]] seat_set failed() const noexcept { return part_.failed(); }
  [[nodiscard]] bool has_failed(rank_id rank) const noexcept { return failed().contains(seat_of(rank)); }
  /// Fresh processes that wait for admission.
  [[nodiscard]] const seat_set& waiting() const noexcept { return waiting_; }

  /// Ends all waiting of this epoch, on all ranks. Does not wait.
  void revoke() noexcept;
  [[nodiscard]] bool is_revoked() const noexcept { return is_revoked_; }

  /// Returns the AND of all ranks' bits, the members that are out, and the seats to admit: the same on all
  /// ranks that get an answer. All living ranks must call it. After its deadline it continues when called
  /// again, with the bits of the first call. @return `errc::no_quorum` when the reachable members may not
  /// decide; `errc::peer_timed_out` with the lowest rank that this rank or the coordinator waits for, or with
  /// the coordinator if it has not answered.
  result<comm::agreed> agree(std::uint64_t bits, deadline by);
  /// Begins the next epoch, without the failed members. All ranks that got `outcome` must call it, or all
  /// `admit`.
  /// @pre `outcome` comes from `agree`, in this epoch, and this process is not out
  void shrink(const comm::agreed& outcome);
  /// Begins the next epoch, without the failed members and with the waiting processes. Ranks are renumbered
  /// by seat.
  void admit(const comm::agreed& outcome);

  [[nodiscard]] communicator_stats stats() const noexcept;
  /// The traffic with the present process in `seat` and its predecessors.
  [[nodiscard]] const peer_traffic& traffic(seat_id seat) const noexcept { return traffic_[to_index(seat)]; }

 private:
  // The kinds of control messages, by `frame_header::kind`.
  enum class post_kind : std::uint16_t { hello = 1, welcome, revoke, fenced, agree };
  struct early_word {
    seat_id from{};
    std::uint64_t epoch = 0;
    agree_message message{};
  };
  /// Sends the messages of an agreement, in its epoch.
  struct poster {
    communicator* all;
    std::uint64_t epoch;
    void operator()(seat_id to, const agree_message& message) const noexcept {
      all->tell_agree(to, message, epoch);
    }
  };
  /// The calls that the endpoint makes.
  struct hearing {
    communicator* all;
    frame_buffer buffer_for(seat_id from, const frame_header& frame) noexcept {
      return all->buffer_for(from, frame);
    }
    void on_frame(seat_id from, const frame_header& frame) noexcept { all->on_frame(from, frame); }
    void on_message(seat_id from, const frame_header& frame, std::span<const std::byte> bytes) noexcept {
      all->on_message(from, frame, bytes);
    }
    void on_death(seat_id seat, comm::death how) noexcept { all->on_death(seat, how); }
    void on_joined(seat_id seat) noexcept { all->on_joined(seat); }
    [[nodiscard]] bool keeps_waiting() const noexcept { return all->keeps_waiting(); }
  };
  static_assert(frame_handler<hearing>);

  [[nodiscard]] frame_buffer buffer_for(seat_id from, const frame_header& frame) noexcept;
  void on_frame(seat_id from, const frame_header& frame) noexcept;
  void on_message(seat_id from, const frame_header& frame, std::span<const std::byte> bytes) noexcept;
  void on_death(seat_id seat, comm::death how) noexcept;
  void on_joined(seat_id seat) noexcept;
  [[nodiscard]] bool keeps_waiting() const noexcept;

  void hear_hello(seat_id from, const frame_header& frame, std::span<const std::byte> bytes) noexcept;
  void hear_welcome(seat_id from, const frame_header& frame, std::span<const std::byte> bytes) noexcept;
  void hear_revoke(const frame_header& frame) noexcept;
  void hear_agree(seat_id from, const frame_header& frame, std::span<const std::byte> bytes) noexcept;
  void post(seat_id to, post_kind kind, std::uint64_t epoch, std::span<const std::byte> bytes) noexcept;
  void tell_agree(seat_id to, const agree_message& message, std::uint64_t epoch) noexcept;
  void tell_welcome(const seat_set& to) noexcept;

  /// Whether the process that is, or was, connected in that seat is the member.
  [[nodiscard]] bool is_member(seat_id seat) const noexcept {
    return part_.members().contains(seat) && nonces_[to_index(seat)] == member_nonces_[to_index(seat)];
  }
  /// Whether the process in that seat may have been a member of that part's epoch: it ended before it
  /// identified itself.
  [[nodiscard]] bool was_member_of(const agreement& part, seat_id seat) const noexcept {
    const std::uint64_t nonce = nonces_[to_index(seat)];
    return part.members().contains(seat) && (nonce == member_nonces_[to_index(seat)] || nonce == 0);
  }
  [[nodiscard]] bool was_member(seat_id seat) const noexcept { return was_member_of(part_, seat); }
  /// How certain the death of the member is. A process that ended before it identified itself may have had
  /// the seat before the member, which then lives.
  [[nodiscard]] comm::death death_of_member(seat_id seat, comm::death how) const noexcept {
    return is_member(seat) ? how : comm::death::suspected;
  }
  /// A member of the former epoch. A process admitted since has a number other than the member before it.
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
  /// Whether the process there has announced an epoch with founders other than this one's.
  [[nodiscard]] bool has_other_founders(seat_id seat) const noexcept {
    return foundings_[to_index(seat)] != 0 && foundings_[to_index(seat)] != founding_;
  }
  void note_founding(seat_id from, std::uint64_t founding) noexcept;
  void wait_once(deadline by);

  [[nodiscard]] failure refuse(error_code code, rank_id rank, std::uint64_t wanted,
                               std::uint64_t found) const noexcept;
  /// Returns the failure for a failed rank.
  [[nodiscard]] failure why_failed(rank_id rank, std::uint64_t wanted, std::uint64_t found) const noexcept {
    error_code why = errc::peer_failed;
    if constexpr (detail::reports_failure<E>) why = end_->why_failed(seat_of(rank));
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
  seat_set newcomers_{};     // members admitted to this epoch
  bool is_revoked_ = false;
  bool is_fenced_ = false;

  seat_set gone_{};                    // processes that died, members or not
  seat_set certain_{};                 // of these, certain deaths
  seat_set fresh_{};                   // processes that are in no epoch, as far as they reported
  seat_set anew_{};                    // processes that came after the epoch began and are not its members
  seat_set given_up_{};                // processes that this one has stopped listening to
  seat_set waiting_{};                 // fresh processes that wait for admission
  std::vector<std::uint64_t> nonces_;  // by seat, of the last process connected there; 0: not yet reported
  std::vector<std::uint64_t> member_nonces_;
  std::uint64_t founding_ = 0;            // identifies the members of the first epoch, and all later epochs
  std::vector<std::uint64_t> foundings_;  // by seat, as reported; 0: a fresh process
  std::optional<seat_set> welcomed_{};
  std::uint64_t welcome_epoch_ = 0;
  std::vector<std::uint64_t> welcome_nonces_;
  std::uint64_t welcome_founding_ = 0;

  std::vector<early_word> early_words_{};  // for the next epoch
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
