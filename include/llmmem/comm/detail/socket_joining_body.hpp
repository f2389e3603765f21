/// @file
/// `socket_joining`: calls, answers, candidates.
#pragma once

#include <llmmem/comm/detail/socket_joining.hpp>

namespace llmmem {
inline namespace v0 {
namespace detail {

inline void socket_joining::note(const std::optional<learned_absence>& learned) noexcept {
  if (!learned) return;
  if (learned->seat == no_seat) {
    by_nobody_ = learned->why;
    return;
  }
  if (!peers_.has(learned->seat)) return;
  if (peers_.is_up(learned->seat)) return;  // a foreign process only used that name
  at(learned->seat).absence = learned->why;
}

inline seat_absence socket_joining::why_missing(seat_id seat) const noexcept {
  if (!peers_.has(seat)) return seat_absence::no_contact;
  const seat_absence known = seats_[to_index(seat)].absence;
  // Higher seats call, and a caller whose hello cannot be read does not announce its seat.
  const bool may_have_called = to_index(seat) > to_index(mine_.from) && !peers_.is_up(seat);
  return known == seat_absence::no_contact && may_have_called ? by_nobody_ : known;
}

inline void socket_joining::expire() noexcept {
  halves_.resume_accepting();
  std::uint32_t slot = halves_.next_expired(0);
  for (; slot != no_slot; slot = halves_.next_expired(slot + 1)) {
    note(halves_.learn(slot));
    half_failed(slot);
  }
}

inline void socket_joining::run_calls(handler_call& call_of) {
  const std::uint64_t now = poller_.clock().now();
  for (std::uint32_t i = 0; i < seats_.size(); ++i) {
    const seat_id seat{i};
    seat_record& of = seats_[i];
    if (i > to_index(mine_.from)) {
      if (of.next.is_any() && !of.next.is_complete()) {
        const std::uint64_t until = of.next.since() + handshake_ns_;
        if (now >= until) drop_candidate(seat);
        poller_.clock().due(until > now ? until : now + timer_ns);
      }
      if (of.must_knock && halves_.knocks() < half_open_set::most_knocks) {
        of.must_knock = false;
        static_cast<void>(begin_call(seat, hello_purpose::knock));
      }
    } else if (i < to_index(mine_.from)) {
      const bool is_calling = of.calls[0] != no_slot || of.calls[1] != no_slot;
      if (!peers_.is_free(seat) || is_calling || of.next.is_complete()) continue;
      if (calls_.is_due(seat)) call(seat);
    }
  }
  for (std::uint32_t i = 0; i < seats_.size(); ++i)
    if (seats_[i].next.is_complete() && !seats_[i].next.is_watched()) promote(seat_id{i}, call_of);
}

/// Returns the slot of the call, or `no_slot`.
inline std::uint32_t socket_joining::begin_call(seat_id seat, hello_purpose purpose) noexcept {
  const half_open_set::begun_call begun = halves_.call(seat, purpose);
  note(begun.learned);
  return begun.slot;
}

inline void socket_joining::call(seat_id seat) noexcept {
  seat_record& of = at(seat);
  of.calls[0] = begin_call(seat, hello_purpose::data);
  of.calls[1] = of.calls[0] == no_slot ? no_slot : begin_call(seat, hello_purpose::told);
  if (of.calls[1] == no_slot) call_failed(seat);
}

inline void socket_joining::call_failed(seat_id seat) noexcept {
  for (std::uint32_t& slot : at(seat).calls) {
    if (slot != no_slot) halves_.close(slot);
    slot = no_slot;
  }
  drop_candidate(seat);
  calls_.failed(seat);
}

inline void socket_joining::half_failed(std::uint32_t slot) noexcept {
  if (halves_.is_lane_call(slot)) return call_failed(halves_.called_seat(slot));
  halves_.close(slot);
}

inline void socket_joining::advance(const ready_event& event, handler_call& call) {
  if (!halves_.is_of(event)) return;
  const half_open_set::progress made = halves_.advance(event.index);
  switch (made.to) {
    case half_open_set::step::waits:
      return;
    case half_open_set::step::judge:
      return judge(event.index);
    case half_open_set::step::settled:
      return settled(event.index, call);
    case half_open_set::step::failed:
      note(made.learned);
      return half_failed(event.index);
  }
}

/// A caller knows the secret.
inline void socket_joining::judge(std::uint32_t slot) noexcept {
  const wire_hello caller = halves_.theirs(slot);
  const hello_answer answer = answer_to(caller);
  const bool is_lane = caller.purpose != hello_purpose::knock;
  if (!halves_.answer(slot, answer) || answer != hello_answer::welcome || !is_lane)
    return halves_.close(slot);
  take_lane(caller.from, slot);
  seat_candidate& next = at(caller.from).next;
  if (!next.is_complete()) return;
  // The caller may have ended in the meantime: it takes the seat when it sends something.
  const std::uint64_t key =
      event_key(socket_event::candidate, peers_.generation(caller.from), to_index(caller.from));
  next.set_watched(poller_.add(next.told_socket(), EPOLLIN, key));
}

inline hello_answer socket_joining::answer_to(const wire_hello& caller) noexcept {
  if (caller.seats != mine_.seats || caller.frame_bytes != mine_.frame_bytes) {
    ++mismatched_;
    // A caller from a job with more seats may have a seat that does not exist here.
    if (peers_.has(caller.from)) at(caller.from).absence = seat_absence::other_options;
    return hello_answer::mismatched;
  }
  seat_record& of = at(caller.from);
  if (peers_.is_rejected(caller.from, caller.incarnation)) {
    of.absence = seat_absence::ended;
    ++unwanted_;
    return hello_answer::unwanted;
  }
  if (caller.purpose == hello_purpose::knock) {
    calls_.call_now(caller.from);
    return hello_answer::welcome;
  }
  const bool is_same = of.next.is_of(caller.incarnation);
  const bool is_waited_for = !is_same && of.next.is_there();
  if (!peers_.is_free(caller.from) || is_waited_for) {
    ++busy_;
    return hello_answer::busy;
  }
  if (of.next.is_any() && (!is_same || of.next.is_complete())) drop_candidate(caller.from);
  return hello_answer::welcome;
}

/// A listener knows the secret, and has answered.
inline void socket_joining::settled(std::uint32_t slot, handler_call& call) {
  const hello_purpose purpose = halves_.purpose(slot);
  if (purpose == hello_purpose::knock) return halves_.close(slot);
  const hello_answer answer = halves_.answered(slot);
  const incarnation_id incarnation = halves_.theirs(slot).incarnation;
  const seat_id seat = halves_.called_seat(slot);
  seat_record& of = at(seat);
  if (answer == hello_answer::mismatched) ++mismatched_;
  const bool is_old = peers_.is_rejected(seat, incarnation);
  of.absence = answer == hello_answer::unwanted     ? seat_absence::given_up
               : answer == hello_answer::mismatched ? seat_absence::other_options
               : answer == hello_answer::busy       ? seat_absence::seat_taken
               : is_old                             ? seat_absence::ended
                                                    : seat_absence::no_contact;
  const bool is_another = of.next.is_any() && !of.next.is_of(incarnation);
  if (answer != hello_answer::welcome || is_old || is_another) return call_failed(seat);
  of.calls[static_cast<std::size_t>(purpose)] = no_slot;
  take_lane(seat, slot);
  if (of.next.is_complete()) promote(seat, call);
}

/// Makes the connection a lane of the seat's candidate.
inline void socket_joining::take_lane(seat_id seat, std::uint32_t slot) noexcept {
  const wire_hello theirs = halves_.theirs(slot);
  seat_candidate& next = at(seat).next;
  if (!next.is_any()) {
    const bool is_own = is_on_this_machine(theirs) && theirs.pid == mine_.pid;
    const std::uint64_t now = poller_.clock().now();
    next.begin(theirs.incarnation, process_of(theirs, slot), is_own, now);
    poller_.clock().due(now + handshake_ns_);
  }
  const bool is_told = theirs.purpose == hello_purpose::told;
  const lane_seals seals = halves_.seals(slot);
  next.add(is_told ? socket_lane::told : socket_lane::data, halves_.take(slot), seals);
}

/// Returns the process at the other end, if this machine's kernel identifies it. A peer's claims only say
/// where to look: a process that does not hold the connection is not watched, and never killed.
inline descriptor socket_joining::process_of(const wire_hello& theirs, std::uint32_t slot) const noexcept {
  if (halves_.is_unix(mine_.from)) return open_peer_process(halves_.socket(slot));
  if (!is_on_this_machine(theirs)) return {};
  descriptor process = open_process(theirs.pid);
  // Opened before it is checked: its number cannot belong to another process now, unless it has exited.
  if (!holds_other_end(theirs.pid, halves_.socket(slot)) || has_exited(process)) return {};
  return process;
}

inline void socket_joining::look_at_candidate(seat_id seat, handler_call& call) {
  if (!at(seat).next.is_watched()) return;
  const seat_candidate::word said = at(seat).next.look();
  if (said == seat_candidate::word::some) return promote(seat, call);
  if (said == seat_candidate::word::ended) drop_candidate(seat);
}

inline void socket_joining::drop_candidate(seat_id seat) noexcept {
  seat_candidate& next = at(seat).next;
  if (next.is_watched()) poller_.remove(next.told_socket());
  next = {};
}

/// Seats the candidate.
inline void socket_joining::promote(seat_id seat, handler_call& call) {
  peers_.reserve(seat);
  seat_record& of = at(seat);
  seat_candidate taken = std::exchange(of.next, {});
  if (taken.is_watched()) poller_.remove(taken.told_socket());
  of.absence = seat_absence::no_contact;
  calls_.connected(seat);
  descriptor data = taken.take(socket_lane::data);
  descriptor told = taken.take(socket_lane::told);
  peers_.connect(seat, std::move(data), std::move(told), taken.take_process(), taken.incarnation(),
                 taken.is_own(), call, taken.seals());
}

inline void socket_joining::add_to(socket_stats& all) const noexcept {
  halves_.add_to(all);
  all.busy += busy_;
  all.unwanted += unwanted_;
  all.mismatched += mismatched_;
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
