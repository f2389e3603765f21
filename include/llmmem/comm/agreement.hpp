/// @file
/// `agreement`: how members of an epoch reach the same answer although some of them die. No I/O: messages in,
/// messages out.
#pragma once

#include <llmmem/comm/endpoint.hpp>
#include <llmmem/comm/id_set.hpp>
#include <llmmem/config.hpp>

#include <concepts>
#include <cstdint>
#include <optional>

namespace llmmem {
inline namespace v0 {

namespace comm {

/// The outcome of an agreement.
struct agreed {
  std::uint64_t bits = ~std::uint64_t{0};  ///< a bit is set if every reporting member had set it
  seat_set failed{};                       ///< excluded members: the same for all
  seat_set joining{};                      ///< waiting for admission, as every reporting member knew

  friend constexpr bool operator==(const agreed&, const agreed&) noexcept = default;
};

}  // namespace comm

using agreed [[deprecated("its name is comm::agreed")]] = comm::agreed;

/// The kinds of messages in an agreement.
enum class agree_kind : std::uint16_t {
  report,   ///< to the coordinator: this member's value or the accepted one, and the members it knows to be
            ///< dead
  query,    ///< from a coordinator: report to me
  propose,  ///< from a coordinator: accept this value
  accept,
  decide,     ///< the decided value
  estranged,  ///< to a member that the sender cannot reach: it must not rely on the sender
  ask,        ///< to the coordinator: which members do you wait for?
  waits       ///< from a coordinator: the members in `value.failed`, which have not failed as far as it knows
};

/// One message of an agreement.
struct agree_message {
  agree_kind kind = agree_kind::report;
  std::uint64_t instance = 0;
  seat_id accepted_by = no_seat;  ///< in a report: the proposer of `value`; `no_seat` for the member's own
                                  ///< value
  comm::agreed value{};
  seat_set certain{};    ///< known to be dead
  seat_set suspected{};  ///< unreachable, possibly alive; without those that only suspect the sender

  friend constexpr bool operator==(const agree_message&, const agree_message&) noexcept = default;
};

/// A function that sends the messages of an agreement.
template <class P>
concept agree_post = requires(const P& post, seat_id to, const agree_message& message) {
  { post(to, message) } noexcept;
};

/// One member's part in the agreements of an epoch, one after the other: instance 0, 1 and so on.
///
///     agreement part(self, members);
///     part.begin(bits, joining, post);            // this member's value
///     part.on_message(from, message, post);             // for each incoming message
///     part.on_death(seat, comm::death::certain, post);      // for each detected death
///     if (auto outcome = part.take_outcome()) ... // the same for all members with an outcome
///
/// The lowest member that is not known to have failed is the coordinator. Members report to it. When it has a
/// report of all members that it does not know to have failed, it proposes the AND of their values, and
/// decides once all of these have accepted. If a coordinator dies, the next one takes over: because members
/// report what they had accepted, it finds the value that may have been decided, and proposes that. Without
/// failures: four messages one after another, 4 (n - 1) in all.
///
/// - **Failures** are permanent within an epoch, and spread: a member that hears of another member's failure
///   also treats that member as failed. A member that learns that it has failed itself stops listening to the
///   sender, but informs no other member: it may be wrong only about itself, and must not take others with
///   it.
/// - **Which members may decide.** If all others are certainly dead, the remaining member. If some are or
///   were suspected, they may have agreed on something else, alive or not: then more than half of the epoch's
///   members, dead ones included, or exactly half with the lowest member. So two halves that cannot reach
///   each other never both continue: `has_quorum`.
/// - **Excluded members** get no outcome: a member that receives a decision that counts it as failed learns
///   that it has no quorum.
/// - The decision is the same for all living members that get an outcome. A dead member may have got a
///   different one, if all members that knew that one died too.
///
/// @par Complexity      O(1) per message, and O(n) when a coordinator sends to all.
/// @par Thread safety   one thread at a time.
/// @par Errors          none. Messages from non-members are ignored.
/// @par Source          the synod of Lamport, "The Part-Time Parliament", TOCS 1998, with coordinators for
///   ballots; the use: Bland et al., "Post-failure recovery of MPI communication capability", IJHPCA 2013.
class agreement {
 public:
  agreement() = default;
  /// @pre `members` has `self`
  agreement(seat_id self, const seat_set& members) noexcept : self_(self), members_(members) {}

  [[nodiscard]] seat_id self() const noexcept { return self_; }
  [[nodiscard]] const seat_set& members() const noexcept { return members_; }
  /// Members known to be dead, or unreachable.
  [[nodiscard]] seat_set failed() const noexcept { return certain_ | suspected_ | estranged_; }
  [[nodiscard]] const seat_set& certain() const noexcept { return certain_; }
  [[nodiscard]] const seat_set& suspected() const noexcept { return suspected_; }
  /// The coordinator, as far as this member knows.
  [[nodiscard]] seat_id coordinator() const noexcept {
    return (members_ - failed()).lowest().value_or(no_seat);
  }
  /// The lowest member that this one waits for, directly or through the coordinator, as far as it has learned
  /// since the last `ask`.
  [[nodiscard]] seat_id waits_for() const noexcept;
  /// The number of completed agreements.
  [[nodiscard]] std::uint64_t instance() const noexcept { return instance_; }
  /// Whether an agreement has begun and is not complete.
  [[nodiscard]] bool is_begun() const noexcept { return begun_; }
  /// The number of members that must have reported, given the number of suspected ones.
  [[nodiscard]] std::uint32_t quorum() const noexcept;
  /// Whether the members that reported, including this one, may decide.
  [[nodiscard]] bool has_quorum() const noexcept;

  /// Submits this member's value to the next agreement. @pre not `is_begun()`
  template <agree_post Post>
  void begin(std::uint64_t bits, const seat_set& joining, const Post& post) noexcept;
  /// Reports the failure of a member. A suspected member may still die for certain.
  template <agree_post Post>
  void on_death(seat_id seat, comm::death how, const Post& post) noexcept;
  template <agree_post Post>
  void on_message(seat_id from, const agree_message& message, const Post& post) noexcept;
  template <agree_post Post>
  [[deprecated("call on_message()")]] void hear(seat_id from, const agree_message& message,
                                                const Post& post) noexcept {
    on_message(from, message, post);
  }
  /// Asks the coordinator, if it is another member, which members it waits for. Only for `waits_for`.
  template <agree_post Post>
  void ask(const Post& post) const noexcept;

  /// Returns the outcome of the agreement just completed, once.
  [[nodiscard]] std::optional<comm::agreed> take_outcome() noexcept;

 private:
  // What this member received as the coordinator of an instance.
  struct gathered {
    seat_set heard{};
    comm::agreed said{.joining = seat_set::first(rank_count{max_seats})};
    seat_id accepted_by = no_seat;
    comm::agreed accepted{};
  };

  void note(seat_id seat, comm::death how) noexcept;
  void merge(const agree_message& message) noexcept;
  void gather(gathered& into, seat_id from, const agree_message& message) noexcept;
  [[nodiscard]] agree_message message(agree_kind kind) const noexcept;
  [[nodiscard]] agree_message last_decision() const noexcept;
  [[nodiscard]] seat_set heard_members() const noexcept { return members_ - failed(); }
  [[nodiscard]] seat_set awaited() const noexcept;
  template <agree_post Post>
  void to_others(const agree_message& message, const Post& post) const noexcept;
  template <agree_post Post>
  void advance(const Post& post) noexcept;
  template <agree_post Post>
  void coordinate(const Post& post) noexcept;
  template <agree_post Post>
  void answer_late(seat_id from, const agree_message& message, const Post& post) const noexcept;
  void finish(const comm::agreed& value) noexcept;

  seat_id self_{};
  seat_set members_{};
  seat_set certain_{};
  seat_set suspected_{};
  seat_set estranged_{};  // members that say that this member has failed
  seat_set told_estranged_{};

  std::uint64_t instance_ = 0;
  comm::agreed last_{};
  std::optional<comm::agreed> outcome_{};

  bool is_out_ = false;  // the decision says that this member has failed
  bool begun_ = false;
  comm::agreed say_{};
  seat_id accepted_by_ = no_seat;
  comm::agreed accepted_{};
  seat_id reported_to_ = no_seat;
  seat_set awaited_there_{};  // members that the coordinator waits for, as it reported

  gathered now_{};
  gathered next_{};  // from members that are one agreement ahead
  bool asked_ = false;
  bool proposed_ = false;
  seat_set agreeing_{};  // accepted this coordinator's proposal
};

}  // namespace v0
}  // namespace llmmem

#include <llmmem/comm/detail/agreement_body.hpp>
