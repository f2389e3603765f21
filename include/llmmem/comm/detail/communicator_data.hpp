/// @file
/// `communicator`: the messages of its users.
#pragma once

#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/errors.hpp>
#include <llmmem/transfer/errors.hpp>

#include <algorithm>
#include <cstring>

namespace llmmem {
inline namespace v0 {

template <endpoint E>
failure communicator<E>::refuse(error_code code, rank_id rank, std::uint64_t wanted,
                                std::uint64_t found) const noexcept {
  return {.code = code, .index = to_index(rank), .wanted = wanted, .found = found, .where = options_.name};
}

template <endpoint E>
result<void> communicator<E>::may_talk(rank_id with) const noexcept {
  if (epoch_ == 0) return refuse(errc::not_joined, with, 0, 0);
  if (is_fenced_) return refuse(errc::no_quorum, with, part_.quorum(), 1);
  if (to_index(with) >= seats_.size())
    return refuse(errc::out_of_range, with, to_index(with), seats_.size() - 1);
  if (is_revoked_) return refuse(errc::epoch_revoked, with, 0, epoch_);
  return {};
}

template <endpoint E>
frame_buffer communicator<E>::buffer_for(seat_id from, const frame_header& frame) noexcept {
  if (frame.epoch > epoch_) return {.what = frame_buffer::answer::ask_again};
  if (frame.epoch < epoch_ || is_revoked_ || !was_member(from) || failed().contains(from)) {
    ++stats_.stale_frames;
    return {};
  }
  return inbox_.buffer_for(from, frame);
}

template <endpoint E>
void communicator<E>::on_frame(seat_id from, const frame_header& frame) noexcept {
  // Its epoch may have ended in between: then the buffer was withdrawn, and nothing is reported.
  inbox_.on_frame(from, frame);
  if (frame.offset + frame.bytes != frame.message) return;
  ++traffic_[to_index(from)].received_messages;
  traffic_[to_index(from)].received_bytes += frame.message;
}

template <endpoint E>
bool communicator<E>::keeps_waiting() const noexcept {
  return !is_revoked_ && !is_fenced_ && !failed().contains(sending_to_);
}

template <endpoint E>
result<void> communicator<E>::send_frames(std::span<const std::byte> bytes, rank_id to, std::uint32_t tag,
                                          deadline by) {
  hearing handler{this};
  sending_to_ = seat_of(to);
  std::uint64_t sent = 0;
  do {
    const std::uint64_t rest = bytes.size() - sent;
    const auto now = static_cast<std::uint32_t>(std::min<std::uint64_t>(rest, end_->frame_bytes()));
    const std::span<const std::byte> part = bytes.subspan(sent, now);
    frame_header frame{.epoch = epoch_, .message = bytes.size(), .offset = sent, .bytes = now, .tag = tag};
    if (options_.check == comm::payload_check::crc32c) {
      frame.is_checked = 1;
      frame.crc = crc32c(0, part);
    }
    if (failed().contains(sending_to_)) return why_failed(to, bytes.size(), sent);
    const result<void> done = end_->send(sending_to_, frame, part, by, handler);
    if (!done) {
      if (done.code() != errc::cancelled) return refuse(done.code(), to, bytes.size(), sent);
      if (const auto why = may_talk(to); !why) return why;
      return why_failed(to, bytes.size(), sent);
    }
    sent += now;
  } while (sent < bytes.size());
  ++traffic_[to_index(sending_to_)].sent_messages;
  traffic_[to_index(sending_to_)].sent_bytes += bytes.size();
  return {};
}

/// Puts the message into the store of early messages, because this process is also the receiver.
template <endpoint E>
result<void> communicator<E>::send_to_self(std::span<const std::byte> bytes, std::uint32_t tag) {
  const seat_id self = end_->self();
  std::uint64_t sent = 0;
  do {
    const auto now = static_cast<std::uint32_t>(std::min<std::uint64_t>(bytes.size() - sent, 1U << 30U));
    const frame_header frame{
        .epoch = epoch_, .message = bytes.size(), .offset = sent, .bytes = now, .tag = tag};
    const frame_buffer into = inbox_.buffer_for(self, frame);
    if (into.what != frame_buffer::answer::take) {
      return refuse(errc::out_of_bytes, rank_, bytes.size(), inbox_.room());
    }
    if (now != 0) std::memcpy(into.bytes.data(), bytes.data() + sent, now);
    on_frame(self, frame);
    sent += now;
  } while (sent < bytes.size());
  return {};
}

template <endpoint E>
result<void> communicator<E>::send(std::span<const std::byte> bytes, rank_id to, std::uint32_t tag,
                                   deadline by) {
  if (const auto may = may_talk(to); !may) return may;
  if (to == rank_) return send_to_self(bytes, tag);
  return send_frames(bytes, to, tag, by);
}

template <endpoint E>
void communicator<E>::end_await(rank_id from) noexcept {
  if (inbox_.end_await()) end_->withdraw(seat_of(from));
}

template <endpoint E>
result<void> communicator<E>::wait_for_awaited(std::uint64_t bytes, rank_id from, deadline by) {
  while (inbox_.is_awaiting()) {
    if (const auto may = may_talk(from); !may) return may;
    if (has_failed(from)) return why_failed(from, bytes, inbox_.awaited_bytes());
    if (from == rank_ || end_->now_ns() >= by.ns) {
      return refuse(errc::peer_timed_out, from, bytes, inbox_.awaited_bytes());
    }
    wait_once(by);
  }
  const detail::message_outcome& how = inbox_.outcome();
  switch (how.what) {
    case detail::message_outcome::kind::damaged:
      return refuse(errc::message_damaged, from, how.left_with, how.came_with);
    case detail::message_outcome::kind::other_size:
      return refuse(errc::size_mismatch, from, bytes, how.bytes);
    case detail::message_outcome::kind::whole:
    case detail::message_outcome::kind::none:
      break;
  }
  return {};
}

template <endpoint E>
result<void> communicator<E>::recv(std::span<std::byte> bytes, rank_id from, std::uint32_t tag, deadline by) {
  if (const auto may = may_talk(from); !may) return may;
  inbox_.await(seat_of(from), tag, bytes);
  struct ending {
    communicator* all;
    rank_id from;
    ~ending() { all->end_await(from); }
  } const ending{this, from};
  return wait_for_awaited(bytes.size(), from, by);
}

template <endpoint E>
result<void> communicator<E>::exchange(std::span<const std::byte> out, rank_id to, std::span<std::byte> into,
                                       rank_id from, std::uint32_t tag, deadline by) {
  if (const auto may = may_talk(to); !may) return may;
  if (const auto may = may_talk(from); !may) return may;
  inbox_.await(seat_of(from), tag, into);
  struct ending {
    communicator* all;
    rank_id from;
    ~ending() { all->end_await(from); }
  } const ending{this, from};
  const result<void> sent = to == rank_ ? send_to_self(out, tag) : send_frames(out, to, tag, by);
  if (!sent) return sent;
  return wait_for_awaited(into.size(), from, by);
}

template <endpoint E>
result<std::uint64_t> communicator<E>::probe(rank_id from, std::uint32_t tag, deadline by) {
  for (;;) {
    if (const auto may = may_talk(from); !may) return may.error();
    if (const auto bytes = inbox_.size_of_next(seat_of(from), tag)) return *bytes;
    if (has_failed(from)) return why_failed(from, 0, 0);
    if (from == rank_ || end_->now_ns() >= by.ns) return refuse(errc::peer_timed_out, from, 0, 0);
    wait_once(by);
  }
}

}  // namespace v0
}  // namespace llmmem
