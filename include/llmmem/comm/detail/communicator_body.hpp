/// @file
/// `communicator`: membership, deaths and agreements.
#pragma once

#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/errors.hpp>

#include <algorithm>
#include <array>
#include <utility>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// Returns a 64-bit number, not 0, computed from the numbers of processes.
[[nodiscard]] inline std::uint64_t founding_of(const std::vector<std::uint64_t>& nonces) noexcept {
  std::uint64_t mixed = nonces.size();
  for (const std::uint64_t nonce : nonces) {
    mixed = (mixed ^ nonce) * 0x9E37'79B9'7F4A'7C15U;
    mixed ^= mixed >> 32U;
  }
  return mixed | 1U;
}

}  // namespace detail

template <endpoint E>
communicator<E>::communicator(E& end, const communicator_options& options)
    : end_(&end),
      options_(options),
      nonces_(end.seats(), 0),
      member_nonces_(end.seats(), 0),
      foundings_(end.seats(), 0),
      welcome_nonces_(end.seats(), 0),
      inbox_(end.seats(), options.early_bytes),
      traffic_(end.seats()) {
  nonces_[to_index(end.self())] = end.nonce();
  // Callbacks fill it and must not fail: a member may be one epoch ahead, and report deaths in it.
  early_words_.reserve(std::size_t{4} * end.seats());
}

template <endpoint E>
deadline communicator<E>::after(std::uint64_t ns) const noexcept {
  const std::uint64_t now = end_->now_ns();
  return {ns > no_deadline.ns - now ? no_deadline.ns : now + ns};
}

template <endpoint E>
std::optional<rank_id> communicator<E>::rank_of(seat_id seat) const noexcept {
  const auto at = std::ranges::lower_bound(seats_, to_index(seat), {}, [](seat_id s) { return to_index(s); });
  if (at == seats_.end() || *at != seat) return std::nullopt;
  return rank_id{static_cast<std::uint32_t>(at - seats_.begin())};
}

template <endpoint E>
communicator_stats communicator<E>::stats() const noexcept {
  communicator_stats now = stats_;
  now.torn_frames = inbox_.torn_frames();
  now.early_bytes = inbox_.early_bytes();
  return now;
}

template <endpoint E>
void communicator<E>::wait_once(deadline by) {
  hearing handler{this};
  static_cast<void>(end_->poll(by, handler));
}

template <endpoint E>
void communicator<E>::poll() {
  hearing handler{this};
  while (end_->poll({0}, handler)) {
  }
}

// Presence
// -------------------------------------------------------------------------------------------------

template <endpoint E>
void communicator<E>::on_death(seat_id seat, comm::death how) noexcept {
  gone_.insert(seat);
  if (how == comm::death::certain) certain_.insert(seat);
  fresh_.erase(seat);
  waiting_.erase(seat);
  anew_.erase(seat);
  inbox_.forget(seat);
  // The dead process may have had the seat before the member that this process has yet to meet.
  if (was_member(seat)) part_.on_death(seat, death_of_member(seat, how), poster{this, epoch_});
}

template <endpoint E>
void communicator<E>::on_joined(seat_id seat) noexcept {
  anew_.insert(seat);
  given_up_.erase(seat);
  gone_.erase(seat);
  certain_.erase(seat);
  nonces_[to_index(seat)] = 0;
  foundings_[to_index(seat)] = 0;
  tell_hello(seat);
}

/// Sends this process's number and epoch.
template <endpoint E>
void communicator<E>::tell_hello(seat_id seat) noexcept {
  std::array<std::byte, 8> room;  // NOLINT(cppcoreguidelines-pro-type-member-init)
  detail::wire_writer out(room);
  out.put(end_->nonce());
  post(seat, post_kind::hello, epoch_, out.written());
}

template <endpoint E>
void communicator<E>::hear_hello(seat_id from, const frame_header& frame,
                                 std::span<const std::byte> bytes) noexcept {
  detail::wire_reader in(bytes);
  const auto nonce = in.take<std::uint64_t>();
  if (!in.is_all_read()) {
    ++stats_.bad_frames;
    return;
  }
  nonces_[to_index(from)] = nonce;
  // It was admitted before it had identified itself.
  std::uint64_t& member = member_nonces_[to_index(from)];
  if (member == 0 && part_.members().contains(from) && !part_.failed().contains(from)) member = nonce;
  // A late member is neither a new occupant of its seat nor fresh, regardless of what it reported on its way.
  if (is_member(from)) {
    anew_.erase(from);
    return;
  }
  // A process that reported itself as fresh may have begun an epoch since, without this process.
  if (frame.epoch != 0) {
    fresh_.erase(from);
    return;
  }
  fresh_.insert(from);
  if (epoch_ != 0) waiting_.insert(from);
}

template <endpoint E>
void communicator<E>::hear_welcome(seat_id from, const frame_header& frame,
                                   std::span<const std::byte> bytes) noexcept {
  if (epoch_ != 0 && frame.epoch <= epoch_) {
    // Each member reports it. Another process began an epoch from an outdated state.
    if (!was_member(from)) fence(from, frame.epoch);
    return;
  }
  if (epoch_ == 0 && welcomed_) return;
  detail::wire_reader in(bytes);
  const seat_set members = in.take_seats(end_->seats());
  for (const seat_id seat : members)
    welcome_nonces_[to_index(seat)] = in.take<std::uint64_t>();
  // A welcome for the former occupant of this seat does not concern this process.
  if (!in.is_all_read() || !members.contains(end_->self()) ||
      welcome_nonces_[to_index(end_->self())] != end_->nonce()) {
    ++stats_.bad_frames;
    return;
  }
  // Others considered this process fresh and continued without its epoch.
  if (epoch_ != 0) {
    is_fenced_ = true;
    return;
  }
  welcomed_ = members;
  welcome_epoch_ = frame.epoch;
  welcome_founding_ = frame.offset;
}

template <endpoint E>
void communicator<E>::tell_welcome(const seat_set& to) noexcept {
  using welcome_bytes = std::array<std::byte, sizeof(seat_set) + sizeof(std::uint64_t) * max_seats>;
  welcome_bytes room;  // NOLINT(cppcoreguidelines-pro-type-member-init)
  static_assert(sizeof(room) <= max_post_bytes);
  detail::wire_writer out(room);
  out.put_seats(part_.members(), end_->seats());
  for (const seat_id seat : part_.members())
    out.put(member_nonces_[to_index(seat)]);
  for (const seat_id seat : to) {
    if (seat != end_->self()) post(seat, post_kind::welcome, epoch_, out.written());
  }
}

/// Returns the needed seats that are neither taken nor known to be dead.
template <endpoint E>
seat_set communicator<E>::missing() const noexcept {
  seat_set there = fresh_;
  seat_set needed = seat_set::first(rank_count{end_->seats()});
  if (welcomed_) {
    needed = *welcomed_;
    there = part_.failed();
    for (const seat_id seat : needed) {
      if (is_member(seat) && end_->is_connected(seat)) there.insert(seat);
    }
  }
  needed -= there;
  needed.erase(end_->self());
  return needed;
}

template <endpoint E>
seat_absence communicator<E>::why_missing(seat_id seat) const noexcept {
  if (end_->is_connected(seat)) {
    if (nonces_[to_index(seat)] == 0) return seat_absence::no_answer;
    return welcomed_ ? seat_absence::ended : seat_absence::in_epoch;
  }
  seat_absence known = seat_absence::no_contact;
  if constexpr (detail::reports_absence<E>) known = end_->why_missing(seat);
  const bool is_nobody = known == seat_absence::no_contact || known == seat_absence::no_listener;
  return is_nobody && gone_.contains(seat) ? seat_absence::ended : known;
}

template <endpoint E>
result<void> communicator<E>::join(deadline by) {
  if (epoch_ != 0 && !welcomed_) return {};
  for (;;) {
    if (epoch_ == 0 && welcomed_) {
      founding_ = welcome_founding_;
      begin_epoch(welcome_epoch_, *welcomed_, *welcomed_, welcome_nonces_);
    }
    const seat_set lacks = missing();
    // A missing process may have died before they met; others know, and wait for this one to agree.
    if (lacks.empty() || (epoch_ != 0 && is_revoked_)) break;
    if (end_->now_ns() >= by.ns) {
      const seat_id first = lacks.lowest().value_or(end_->self());
      return failure{.code = errc::seat_missing,
                     .index = to_index(first),
                     .wanted = static_cast<std::uint64_t>(why_missing(first)),
                     .found = lacks.size(),
                     .where = options_.name};
    }
    wait_once(by);
  }
  if (epoch_ == 0) {
    const seat_set all = seat_set::first(rank_count{end_->seats()});
    founding_ = detail::founding_of(nonces_);
    begin_epoch(1, all, all, nonces_);
    tell_welcome(part_.members());  // a process that has heard all others informs those that have not
  }
  welcomed_.reset();
  return {};
}

template <endpoint E>
void communicator<E>::begin_epoch(std::uint64_t epoch, const seat_set& members, const seat_set& newcomers,
                                  const std::vector<std::uint64_t>& nonces) {
  std::vector<seat_id> seats;
  seats.reserve(members.size());
  for (const seat_id seat : members)
    seats.push_back(seat);
  std::vector<early_word> early_words;
  early_words.reserve(early_words_.capacity());
  early_words.swap(early_words_);
  for (const seat_id seat : newcomers)
    member_nonces_[to_index(seat)] = nonces[to_index(seat)];
  const bool was_fresh = epoch_ == 0;
  seats_ = std::move(seats);  // no exceptions from here on
  part_before_ = std::exchange(part_, agreement(end_->self(), members));
  newcomers_ = newcomers;
  epoch_ = epoch;
  ++stats_.epochs;
  rank_ = *rank_of(end_->self());
  // Part of an unrequested message may have arrived: there is no space for the rest now.
  for (std::uint32_t seat = 0; seat < end_->seats(); ++seat)
    end_->withdraw(seat_id{seat});
  inbox_.clear();
  // Another process may be in the seat by now, instead of the one with the newcomer's nonce.
  seat_set came_as_named;
  for (const seat_id seat : newcomers) {
    if (is_member(seat)) came_as_named.insert(seat);
  }
  if (was_fresh) tell_begun(came_as_named);
  fresh_ -= came_as_named;
  waiting_ -= came_as_named;
  anew_ -= came_as_named;
  // Fresh processes that this one met while it was fresh itself, and that were not admitted with it.
  for (const seat_id seat : fresh_) {
    if (!is_member(seat)) waiting_.insert(seat);
  }
  is_revoked_ = false;
  const poster post{this, epoch_};
  // Remaining members that have failed count as failed in this epoch as well: a fresh process may have the
  // seat by now.
  const seat_set stay = members - newcomers;
  for (const seat_id seat : part_before_.suspected() & stay)
    part_.on_death(seat, comm::death::suspected, post);
  for (const seat_id seat : part_before_.certain() & stay)
    part_.on_death(seat, comm::death::certain, post);
  for (const seat_id seat : members) {
    if (!gone_.contains(seat) || !was_member(seat)) continue;
    const comm::death how = certain_.contains(seat) ? comm::death::certain : comm::death::suspected;
    part_.on_death(seat, death_of_member(seat, how), post);
  }
  // The endpoint ignores a process that was given up, even if it has been admitted.
  for (const seat_id seat : came_as_named& given_up_)
    part_.on_death(seat, comm::death::suspected, post);
  for (const seat_id seat : members) {
    if (is_member(seat) && has_other_founders(seat)) part_.on_death(seat, comm::death::suspected, post);
  }
  for (const early_word& each : early_words) {
    if (each.epoch == epoch && was_member(each.from)) part_.on_message(each.from, each.message, post);
  }
  if (std::exchange(is_next_revoked_, false)) revoke();
}

/// Informs processes that considered this one fresh, and are not in its first epoch, that it is not fresh.
template <endpoint E>
void communicator<E>::tell_begun(const seat_set& members) noexcept {
  for (std::uint32_t i = 0; i < end_->seats(); ++i) {
    const seat_id seat{i};
    if (seat != end_->self() && !members.contains(seat) && end_->is_connected(seat)) tell_hello(seat);
  }
}

// Control messages
// -------------------------------------------------------------------------------------------------

template <endpoint E>
void communicator<E>::post(seat_id to, post_kind kind, std::uint64_t epoch,
                           std::span<const std::byte> bytes) noexcept {
  const auto size = static_cast<std::uint32_t>(bytes.size());
  // A control message has no offset in a message: that field carries the founders of its epoch.
  end_->post(to,
             {.epoch = epoch,
              .message = size,
              .offset = founding_,
              .bytes = size,
              .kind = static_cast<std::uint16_t>(kind)},
             bytes);
}

template <endpoint E>
void communicator<E>::tell_agree(seat_id to, const agree_message& message, std::uint64_t epoch) noexcept {
  detail::told_bytes room;
  post(to, post_kind::agree, epoch, detail::encode(message, end_->seats(), room));
}

template <endpoint E>
void communicator<E>::on_message(seat_id from, const frame_header& frame,
                                 std::span<const std::byte> bytes) noexcept {
  note_founding(from, frame.offset);
  switch (static_cast<post_kind>(frame.kind)) {
    case post_kind::hello:
      return hear_hello(from, frame, bytes);
    case post_kind::welcome:
      return hear_welcome(from, frame, bytes);
    case post_kind::revoke:
      if (epoch_ == 0 ? welcomed_ && welcomed_->contains(from) : was_member(from)) hear_revoke(frame);
      return;
    case post_kind::fenced:
      if (epoch_ != 0 && frame.epoch > epoch_) is_fenced_ = true;
      return;
    case post_kind::agree:
      return hear_agree(from, frame, bytes);
  }
  ++stats_.bad_frames;
}

/// Two fresh processes may each begin a first epoch, with processes that had one seat one after the other,
/// and both name a third process. That process is in one of the epochs. For the members of the other epoch it
/// lives, and may agree on something else, like a suspected process.
template <endpoint E>
void communicator<E>::note_founding(seat_id from, std::uint64_t founding) noexcept {
  if (founding != 0) foundings_[to_index(from)] = founding;
  if (epoch_ != 0 && is_member(from) && has_other_founders(from))
    part_.on_death(from, comm::death::suspected, poster{this, epoch_});
}

template <endpoint E>
void communicator<E>::hear_revoke(const frame_header& frame) noexcept {
  if (epoch_ != 0 && frame.epoch == epoch_) revoke();
  if (frame.epoch == (epoch_ == 0 && welcomed_ ? welcome_epoch_ : epoch_ + 1)) is_next_revoked_ = true;
}

template <endpoint E>
void communicator<E>::revoke() noexcept {
  if (std::exchange(is_revoked_, true) || epoch_ == 0) return;
  // Every rank passes it on once, because the first one may die before it has informed all.
  for (const seat_id seat : (part_.members() - part_.failed())) {
    if (seat != end_->self()) post(seat, post_kind::revoke, epoch_, {});
  }
}

template <endpoint E>
void communicator<E>::hear_agree(seat_id from, const frame_header& frame,
                                 std::span<const std::byte> bytes) noexcept {
  const std::optional<agree_message> message = detail::decode_agree(bytes, end_->seats());
  if (!message) {
    ++stats_.bad_frames;
    return;
  }
  if (frame.epoch == epoch_ && epoch_ != 0) {
    if (!was_member(from)) return fence(from, frame.epoch);
    return part_.on_message(from, *message, poster{this, epoch_});
  }
  if (frame.epoch > epoch_) {
    const bool is_next = frame.epoch == epoch_ + 1 || epoch_ == 0;
    if (is_next && early_words_.size() < early_words_.capacity())
      early_words_.push_back({from, frame.epoch, *message});
    return;
  }
  ++stats_.stale_frames;
  if (frame.epoch + 1 == epoch_ && was_member_before(from)) {
    part_before_.on_message(from, *message, poster{this, frame.epoch});
  }
  if (epoch_ != 0 && !was_member(from)) fence(from, frame.epoch);
}

/// Informs a process that this one's members have continued without it, or were never with it.
template <endpoint E>
void communicator<E>::fence(seat_id process, std::uint64_t its_epoch) noexcept {
  post(process, post_kind::fenced, std::max(epoch_, its_epoch + 1), {});
}

// Agreements
// --------------------------------------------------------------------------------------------

template <endpoint E>
result<comm::agreed> communicator<E>::agree(std::uint64_t bits, deadline by) {
  if (epoch_ == 0) return refuse(errc::not_joined, rank_, 0, 0);
  const poster post{this, epoch_};
  // A rank that is left alone awaits no message, so only here does it hear of fresh processes.
  if (part_.members().size() == 1) poll();
  if (!part_.is_begun()) part_.begin(bits, waiting_, post);
  // Only the coordinator knows for which ranks it waits: this rank asks it early, so that its answer arrives
  // in time, and again as the remaining time passes.
  constexpr std::uint64_t answer_ns = 1'000'000;
  const auto halfway = [&](std::uint64_t now) {
    const bool is_asked = by != no_deadline && by.ns > now && by.ns - now > answer_ns;
    return is_asked ? now + (by.ns - now) / 2 : by.ns;
  };
  std::uint64_t ask_at = halfway(end_->now_ns());
  for (;;) {
    if (std::optional<comm::agreed> outcome = part_.take_outcome()) {
      ++stats_.agreements;
      return *outcome;
    }
    const std::uint32_t heard = (part_.members() - part_.failed()).size();
    if (is_fenced_ || !part_.has_quorum()) {
      return failure{
          .code = errc::no_quorum, .wanted = part_.quorum(), .found = heard, .where = options_.name};
    }
    const std::uint64_t now = end_->now_ns();
    if (now >= by.ns) {
      const std::optional<rank_id> late = rank_of(part_.waits_for());
      return refuse(errc::peer_timed_out, late.value_or(rank_), 0, 0);
    }
    if (now >= ask_at) {
      part_.ask(post);
      ask_at = halfway(now);
    }
    wait_once({ask_at});
  }
}

template <endpoint E>
void communicator<E>::leave_behind(const seat_set& failed) noexcept {
  for (const seat_id seat : failed) {
    if (anew_.contains(seat)) continue;
    given_up_.insert(seat);
    end_->give_up(seat);
  }
}

template <endpoint E>
void communicator<E>::shrink(const comm::agreed& outcome) {
  const seat_set members = part_.members() - outcome.failed;
  begin_epoch(epoch_ + 1, members, {}, nonces_);
  leave_behind(outcome.failed);
}

template <endpoint E>
void communicator<E>::admit(const comm::agreed& outcome) {
  const seat_set members = (part_.members() - outcome.failed) | outcome.joining;
  begin_epoch(epoch_ + 1, members, outcome.joining, nonces_);
  leave_behind(outcome.failed - outcome.joining);
  tell_welcome(outcome.joining);
}

}  // namespace v0
}  // namespace llmmem
