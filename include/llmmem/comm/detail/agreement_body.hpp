/// @file
/// The bodies of `agreement`.
#pragma once

#include <llmmem/comm/agreement.hpp>

#include <utility>

namespace llmmem {
inline namespace v0 {

inline std::uint32_t agreement::quorum() const noexcept {
  if ((suspected_ | estranged_).empty()) return 1;
  const std::uint32_t all = members_.size();
  const bool halves_do = all % 2 == 0 && !failed().contains(members_.lowest().value_or(self_));
  return halves_do ? all / 2 : all / 2 + 1;
}

inline bool agreement::has_quorum() const noexcept {
  return !is_out_ && heard_members().size() >= quorum();
}

inline void agreement::note(seat_id seat, comm::death how) noexcept {
  if (seat == self_ || !members_.contains(seat)) return;
  (how == comm::death::certain ? certain_ : suspected_).insert(seat);
}

inline agree_message agreement::message(agree_kind kind) const noexcept {
  return {.kind = kind, .instance = instance_, .certain = certain_, .suspected = suspected_};
}

inline agree_message agreement::last_decision() const noexcept {
  agree_message told = message(agree_kind::decide);
  told.instance = instance_ - 1;
  told.value = last_;
  return told;
}

inline void agreement::merge(const agree_message& message) noexcept {
  for (const seat_id seat : message.certain)
    note(seat, comm::death::certain);
  for (const seat_id seat : message.suspected)
    note(seat, comm::death::suspected);
}

inline void agreement::gather(gathered& into, seat_id from, const agree_message& message) noexcept {
  into.heard.insert(from);
  if (message.accepted_by == no_seat) {
    into.said.bits &= message.value.bits;
    into.said.joining &= message.value.joining;
    return;
  }
  // The latest ballot: its proposal may have been decided; earlier ones decided the same, or nothing.
  if (into.accepted_by != no_seat && to_index(message.accepted_by) < to_index(into.accepted_by)) return;
  into.accepted_by = message.accepted_by;
  into.accepted = message.value;
}

template <agree_post Post>
void agreement::to_others(const agree_message& message, const Post& post) const noexcept {
  for (const seat_id seat : heard_members()) {
    if (seat != self_) post(seat, message);
  }
}

template <agree_post Post>
void agreement::begin(std::uint64_t bits, const seat_set& joining, const Post& post) noexcept {
  begun_ = true;
  say_ = {.bits = bits, .joining = joining};
  advance(post);
}

template <agree_post Post>
void agreement::on_death(seat_id seat, comm::death how, const Post& post) noexcept {
  note(seat, how);
  advance(post);
}

template <agree_post Post>
void agreement::on_message(seat_id from, const agree_message& message, const Post& post) noexcept {
  if (from == self_ || !members_.contains(from)) return;
  if (message.certain.contains(self_) || message.suspected.contains(self_)) {
    estranged_.insert(from);
    return advance(post);
  }
  if (failed().contains(from)) {
    if (message.kind != agree_kind::estranged) post(from, this->message(agree_kind::estranged));
    return;
  }
  merge(message);
  if (message.instance < instance_) {
    answer_late(from, message, post);
  } else if (message.instance > instance_) {
    if (message.kind == agree_kind::report && message.instance == instance_ + 1) gather(next_, from, message);
  } else if (message.kind == agree_kind::report) {
    gather(now_, from, message);
  } else if (message.kind == agree_kind::propose && from == reported_to_) {
    accepted_by_ = from;
    accepted_ = message.value;
    post(from, this->message(agree_kind::accept));
  } else if (message.kind == agree_kind::accept && proposed_) {
    agreeing_.insert(from);
  } else if (message.kind == agree_kind::ask) {
    agree_message answer = this->message(agree_kind::waits);
    answer.value.failed = awaited();
    post(from, answer);
  } else if (message.kind == agree_kind::waits && from == reported_to_) {
    awaited_there_ = message.value.failed;
  } else if (message.kind == agree_kind::decide) {
    // The members that have reported to this one wait for it to coordinate.
    const seat_set waiting = now_.heard & heard_members();
    finish(message.value);
    for (const seat_id seat : waiting) {
      if (seat != self_ && seat != from) post(seat, last_decision());
    }
  }
  advance(post);
}

/// Answers a member that asks for an earlier decision: the coordinator died before it informed all members.
template <agree_post Post>
void agreement::answer_late(seat_id from, const agree_message& message, const Post& post) const noexcept {
  if (message.instance + 1 != instance_) return;
  if (message.kind == agree_kind::report || message.kind == agree_kind::query) post(from, last_decision());
}

template <agree_post Post>
void agreement::advance(const Post& post) noexcept {
  const seat_set estranged = suspected_ - told_estranged_;
  told_estranged_ |= estranged;
  for (const seat_id seat : estranged)
    post(seat, message(agree_kind::estranged));
  if (!begun_) return;
  const seat_id leads = coordinator();
  if (leads == self_) return coordinate(post);
  if (reported_to_ == leads) return;
  awaited_there_ = {};
  reported_to_ = leads;
  agree_message report = message(agree_kind::report);
  report.accepted_by = accepted_by_;
  report.value = accepted_by_ == no_seat ? say_ : accepted_;
  post(leads, report);
}

template <agree_post Post>
void agreement::coordinate(const Post& post) noexcept {
  if (reported_to_ != self_) {  // this member's own report
    reported_to_ = self_;
    agree_message report = message(agree_kind::report);
    report.accepted_by = accepted_by_;
    report.value = accepted_by_ == no_seat ? say_ : accepted_;
    gather(now_, self_, report);
  }
  // No query is needed while no failure is known, because all members report to the first by themselves.
  if (!asked_ && !failed().empty()) {
    asked_ = true;
    to_others(message(agree_kind::query), post);
  }
  if (!proposed_ && (heard_members() - now_.heard).empty()) {
    proposed_ = true;
    if (now_.accepted_by == no_seat) {
      accepted_ = now_.said;
      accepted_.failed = failed();
    } else {
      accepted_ = now_.accepted;
    }
    accepted_by_ = self_;
    agreeing_.insert(self_);
    agree_message proposal = message(agree_kind::propose);
    proposal.value = accepted_;
    to_others(proposal, post);
  }
  if (!proposed_ || !(heard_members() - agreeing_).empty() || !has_quorum()) return;
  finish(accepted_);
  to_others(last_decision(), post);
}

/// The decision may exclude this member, although the sender did not know: an unreachable coordinator
/// suspected this member, or the decision was made before this member was reachable again.
inline void agreement::finish(const comm::agreed& value) noexcept {
  last_ = value;
  is_out_ = value.failed.contains(self_);
  if (!is_out_) outcome_ = value;
  ++instance_;
  begun_ = false;
  accepted_by_ = no_seat;
  reported_to_ = no_seat;
  awaited_there_ = {};
  asked_ = proposed_ = false;
  agreeing_ = {};
  now_ = std::exchange(next_, {});
}

/// The members that this one waits for.
inline seat_set agreement::awaited() const noexcept {
  const seat_id leads = coordinator();
  if (leads == self_) return heard_members() - (proposed_ ? agreeing_ : now_.heard);
  seat_set one;
  one.insert(leads);
  return one;
}

inline seat_id agreement::waits_for() const noexcept {
  const seat_id leads = coordinator();
  const seat_set awaited_by_it = leads == self_ ? awaited() : awaited_there_ & heard_members();
  for (const seat_id seat : awaited_by_it) {
    if (seat != self_) return seat;
  }
  return leads;
}

template <agree_post Post>
void agreement::ask(const Post& post) const noexcept {
  const seat_id leads = coordinator();
  if (begun_ && leads != self_) post(leads, message(agree_kind::ask));
}

inline std::optional<comm::agreed> agreement::take_outcome() noexcept {
  return std::exchange(outcome_, std::nullopt);
}

}  // namespace v0
}  // namespace llmmem
