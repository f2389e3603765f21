/// @file
/// `agreement`: how members of an epoch come to the same answer though some of them die. No I/O: messages in,
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

/// What members have agreed on.
struct agreed {
  std::uint64_t bits = ~std::uint64_t{0};  ///< set where all had set it who were heard
  seat_set failed{};                       ///< members that are out: the same for all
  seat_set joining{};                      ///< seats that everybody heard of knew to wait for admission

  friend constexpr bool operator==(const agreed&, const agreed&) noexcept = default;
};

}  // namespace comm

using agreed [[deprecated("its name is comm::agreed")]] = comm::agreed;

/// What is said to agree.
enum class agree_kind : std::uint16_t {
  report,   ///< to the coordinator: what I say, or what I have accepted, and who I know to be dead
  query,    ///< of a coordinator: report to me
  propose,  ///< of a coordinator: accept this
  accept,
  decide,     ///< this it is
  estranged,  ///< to one that is not heard any more: so that it does not count on who says it
  ask,        ///< to the coordinator: whom do you wait for?
  waits       ///< of a coordinator: for those in `value.failed`, who have not failed for all it knows
};

/// One message of an agreement.
struct agree_message {
  agree_kind kind = agree_kind::report;
  std::uint64_t instance = 0;
  seat_id accepted_by = no_seat;  ///< of a report: whose proposal `value` is, or none's: then it is a say
  comm::agreed value{};
  seat_set certain{};    ///< known to be dead
  seat_set suspected{};  ///< not heard, and maybe alive; without those that only say the same of the sender

  friend constexpr bool operator==(const agree_message&, const agree_message&) noexcept = default;
};

/// What carries its messages.
template <class P>
concept agree_post = requires(const P& post, seat_id to, const agree_message& message) {
  { post(to, message) } noexcept;
};

/// One member's part in the agreements of an epoch, one after the other: instance 0, 1 and so on.
///
///     agreement part(self, members);
///     part.begin(bits, joining, post);            // what I say
///     part.hear(from, message, post);             // for each that comes
///     part.died(seat, comm::death::certain, post);      // for each that is noticed
///     if (auto outcome = part.take_outcome()) ... // the same for all that get one
///
/// The lowest member that is not known to have failed coordinates. Members report to it; when it has heard
/// all that it does not know to have failed, it proposes the AND of what they said, and decides once all of
/// these have accepted. A coordinator that dies is followed by the next: as members report what they had
/// accepted, it finds what may have been decided, and proposes that. Without failures: four messages one
/// after another, 4 (n - 1) in all.
///
/// - **Failures** are for good within an epoch, and catching: who hears that another member has failed holds
///   it for failed, too. A member that is told that itself has failed hears no more from him who says so, but
///   tells nobody: it may be wrong about itself alone, and must not take others with it.
/// - **Who may decide.** When all others are dead for certain, whoever is left. When some are or were
///   suspected, and may therefore have agreed on something else, whether they live now or not, more than
///   half of the epoch's members, the dead ones counted; of two equal halves the one with the lowest member.
///   So two halves that cannot hear each other do not both go on: `has_quorum`.
/// - **Who is out** gets no outcome: of a decision that counts this member among the failed it learns that it
///   has no quorum any more.
/// - What was decided is the same for all that live and get an outcome. One that died may have got another,
///   when all that knew it died with it.
///
/// @par Complexity      O(1) a message, and O(n) where a coordinator sends to all.
/// @par Thread safety   one thread at a time.
/// @par Errors          none. Messages of who is no member are ignored.
/// @par Source          the synod of Lamport, "The Part-Time Parliament", TOCS 1998, with coordinators for
///      ballots; the use: Bland et al., "Post-failure recovery of MPI communication capability", IJHPCA 2013.
class agreement {
 public:
  agreement() = default;
  /// @pre `members` has `self`
  agreement(seat_id self, const seat_set& members) noexcept : self_(self), members_(members) {}

  [[nodiscard]] seat_id self() const noexcept { return self_; }
  [[nodiscard]] const seat_set& members() const noexcept { return members_; }
  /// Members known to be dead, or not heard any more.
  [[nodiscard]] seat_set failed() const noexcept { return certain_ | suspected_ | estranged_; }
  [[nodiscard]] const seat_set& certain() const noexcept { return certain_; }
  [[nodiscard]] const seat_set& suspected() const noexcept { return suspected_; }
  /// The member that coordinates, for what this one knows.
  [[nodiscard]] seat_id coordinator() const noexcept {
    return (members_ - failed()).lowest().value_or(no_seat);
  }
  /// The member that this one waits for, be it by way of the coordinator: the lowest of them, for all that
  /// is known since it last did `ask`.
  [[nodiscard]] seat_id waits_for() const noexcept;
  /// Agreements that are over.
  [[nodiscard]] std::uint64_t instance() const noexcept { return instance_; }
  /// Whether one was begun that is not over.
  [[nodiscard]] bool is_begun() const noexcept { return begun_; }
  /// Members that must be heard, those that are suspected being as many as they are.
  [[nodiscard]] std::uint32_t quorum() const noexcept;
  /// Whether those that are heard may decide, this member among them.
  [[nodiscard]] bool has_quorum() const noexcept;

  /// Says what this member has to say in the agreement that is next. @pre not `is_begun()`
  template <agree_post Post>
  void begin(std::uint64_t bits, const seat_set& joining, const Post& post) noexcept;
  /// A member has failed. One that was suspected may still die for certain.
  template <agree_post Post>
  void died(seat_id seat, comm::death how, const Post& post) noexcept;
  template <agree_post Post>
  void hear(seat_id from, const agree_message& message, const Post& post) noexcept;
  /// Asks the coordinator for whom it waits, where this is another one. For `waits_for`, and nothing else.
  template <agree_post Post>
  void ask(const Post& post) const noexcept;

  /// The outcome of the agreement that is just over; once.
  [[nodiscard]] std::optional<comm::agreed> take_outcome() noexcept;

 private:
  // What was said to this member as the coordinator of an instance.
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
  seat_set estranged_{};  // say that this one has failed
  seat_set told_estranged_{};

  std::uint64_t instance_ = 0;
  comm::agreed last_{};
  std::optional<comm::agreed> outcome_{};

  bool is_out_ = false;  // it was decided that this member has failed
  bool begun_ = false;
  comm::agreed say_{};
  seat_id accepted_by_ = no_seat;
  comm::agreed accepted_{};
  seat_id reported_to_ = no_seat;
  seat_set awaited_there_{};  // by the coordinator, as it said

  gathered now_{};
  gathered next_{};  // of members that are one agreement ahead
  bool asked_ = false;
  bool proposed_ = false;
  seat_set agreeing_{};  // have accepted what this coordinator proposes
};

}  // namespace v0
}  // namespace llmmem

#include <llmmem/comm/detail/agreement_body.hpp>
