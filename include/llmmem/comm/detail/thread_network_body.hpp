/// @file
/// The bodies of `thread_network`.
#pragma once

#include <llmmem/comm/errors.hpp>
#include <llmmem/comm/thread_network.hpp>
#include <llmmem/transfer/errors.hpp>
#include <llmmem/transfer/meter.hpp>

#include <chrono>
#include <cstring>
#include <utility>

namespace llmmem {
inline namespace v0 {

inline thread_network::thread_network(std::uint32_t seats, const thread_network_options& options)
    : options_(options), places_(seats), lanes_(std::size_t{seats} * seats) {
  if (seats == 0 || seats > max_seats) {
    throw argument_error("thread_network: " + std::to_string(seats) + " seats; 1 to " +
                         std::to_string(max_seats) + " are allowed");
  }
  if (options.frame_bytes < max_post_bytes) {
    throw argument_error("thread_network: frames of " + std::to_string(options.frame_bytes) +
                         " bytes; at least " + std::to_string(max_post_bytes) + " are needed");
  }
}

inline std::uint64_t thread_network::sit(seat_id seat) {
  const std::lock_guard held(mutex_);
  place& its = places_[to_index(seat)];
  if (its.is_taken) {
    throw argument_error("thread_network: seat " + std::to_string(to_index(seat)) +
                         " is taken; end that endpoint first");
  }
  its.peers.assign(places_.size(), 0);
  const std::uint64_t incarnation = its.incarnation + 1;
  for (std::uint32_t i = 0; i < seats(); ++i) {
    place& other = places_[i];
    if (!other.is_taken || other.is_killed) continue;
    other.notices.push_back({seat, incarnation, false});
    its.notices.push_back({seat_id{i}, other.incarnation, false});
    other.tell_change();
  }
  its.incarnation = incarnation;
  its.is_taken = true;
  return ++sat_;
}

inline bool thread_network::reaches(seat_id from, seat_id to) const noexcept {
  if (to_index(to) >= places_.size()) return false;
  const place& there = places_[to_index(to)];
  return there.is_taken && there.incarnation == places_[to_index(from)].peers[to_index(to)];
}

/// @pre the caller holds the lock
inline void thread_network::tell_death(seat_id seat) noexcept {
  for (std::uint32_t i = 0; i < seats(); ++i) {
    place& other = places_[i];
    if (seat_id{i} == seat || !other.is_taken) continue;
    try {
      other.notices.push_back({seat, places_[to_index(seat)].incarnation, true});
    } catch (...) {
      other.peers[to_index(seat)] = 0;  // out of memory: it sends no more there, and does not learn why
    }
    other.tell_change();
  }
}

inline void thread_network::kill(seat_id seat) noexcept {
  const std::lock_guard held(mutex_);
  place& its = places_[to_index(seat)];
  if (!its.is_taken || std::exchange(its.is_killed, true)) return;
  tell_death(seat);
  its.tell_change();
}

inline void thread_network::leave(seat_id seat) noexcept {
  const std::lock_guard held(mutex_);
  place& its = places_[to_index(seat)];
  if (!its.is_killed) tell_death(seat);
  for (std::uint32_t i = 0; i < seats(); ++i) {
    lane& in = between(seat_id{i}, seat);
    in.told.clear();
    in.data.clear();
    in.copied = 0;
    in.taken = in.put;
    places_[i].tell_change();  // wakes ranks that wait for space here
  }
  its.notices.clear();
  its.is_taken = its.is_killed = its.is_woken = false;
}

inline thread_endpoint::thread_endpoint(thread_network& net, seat_id self) : net_(&net), self_(self) {
  if (to_index(self) >= net.seats()) {
    throw argument_error("thread_endpoint: seat " + std::to_string(to_index(self)) + " of " +
                         std::to_string(net.seats()) + "; seats are numbered from 0");
  }
  nonce_ = net.sit(self);
}

inline std::uint64_t thread_endpoint::now_ns() const noexcept {
  return steady_meter_clock{}.now_ns();
}

inline bool thread_endpoint::is_connected(seat_id seat) const noexcept {
  return to_index(seat) < seats() && here().peers[to_index(seat)] != 0;
}

inline void thread_endpoint::check_alive() const {
  if (here().is_killed) throw rank_killed{};
}

inline void thread_endpoint::wake() noexcept {
  const std::lock_guard held(net_->mutex_);
  here().is_woken = true;
  here().tell_change();
}

inline void thread_endpoint::give_up(seat_id seat) noexcept {
  if (to_index(seat) >= seats()) return;
  const std::lock_guard held(net_->mutex_);
  const bool is_told = !here().is_killed && net_->reaches(self_, seat);
  here().peers[to_index(seat)] = 0;
  if (!is_told) return;
  thread_network::place& there = net_->places_[to_index(seat)];
  try {
    there.notices.push_back({self_, here().incarnation, true, comm::death::suspected});
  } catch (...) {
    there.peers[to_index(self_)] = 0;  // out of memory: it sends no more here, and does not learn why
  }
  there.tell_change();
}

inline void thread_endpoint::post(seat_id to, const frame_header& frame,
                                  std::span<const std::byte> bytes) noexcept {
  const std::lock_guard held(net_->mutex_);
  if (here().is_killed || !net_->reaches(self_, to) || bytes.size() > max_post_bytes) return;
  try {
    net_->between(self_, to).told.push_back({.of = here().incarnation,
                                             .header = detail::with_bytes(frame, bytes),
                                             .copy = {bytes.begin(), bytes.end()}});
  } catch (...) {
    return;  // out of memory: like a message to a dead process
  }
  net_->places_[to_index(to)].tell_change();
}

inline void thread_endpoint::ask_again() noexcept {
  for (std::uint32_t i = 0; i < seats(); ++i)
    net_->between(seat_id{i}, self_).is_held = false;
}

inline void thread_endpoint::wait(lock& held, deadline by, std::uint64_t seen) {
  if (here().changes != seen) {
    // reported while a callback ran: it will not be reported again
  } else if (by == no_deadline) {
    here().changed.wait(held);
  } else if (const std::uint64_t now = now_ns(); now < by.ns) {
    constexpr std::uint64_t hour_ns = 3'600'000'000'000;  // longer times may not fit the system's clock
    const std::uint64_t left = by.ns - now;
    here().changed.wait_for(held, std::chrono::nanoseconds(left < hour_ns ? left : hour_ns));
  }
  check_alive();
}

/// Takes the first frame of data of a seat. Releases the lock while it is copied.
template <frame_handler Handler>
bool thread_endpoint::deliver_data(lock& held, seat_id from, Handler& handler) {
  thread_network::lane& in = net_->between(from, self_);
  const frame_header header = in.data.front().header;
  const std::byte* const bytes = in.data.front().bytes;
  in.is_being_read = true;
  held.unlock();
  frame_buffer into = handler.buffer_for(from, header);
  if (into.what == frame_buffer::answer::take && into.bytes.size() < header.bytes) into = {};
  if (into.what == frame_buffer::answer::take && header.bytes != 0)
    std::memcpy(into.bytes.data(), bytes, header.bytes);
  held.lock();
  in.is_being_read = false;
  const bool is_taken = into.what != frame_buffer::answer::ask_again;
  in.is_held = !is_taken;
  if (is_taken) {
    if (in.data.front().is_copy) in.copied -= header.bytes;
    in.data.pop_front();
    ++in.taken;
  }
  net_->places_[to_index(from)].tell_change();
  if (into.what == frame_buffer::answer::take) {
    held.unlock();
    handler.on_frame(from, header);
    held.lock();
  }
  return is_taken;
}

template <frame_handler Handler>
bool thread_endpoint::deliver_notice(lock& held, Handler& handler) {
  if (here().notices.empty()) return false;
  const thread_network::notice what = here().notices.front();
  std::uint64_t& heard = here().peers[to_index(what.seat)];
  if (what.is_death) {
    // A death comes after everything sent before it, except frames that are never taken.
    thread_network::lane& in = net_->between(what.seat, self_);
    const bool was_heard = heard == what.of;
    if (was_heard && !in.told.empty() && in.told.front().of == what.of) return false;
    if (was_heard && !in.data.empty() && in.data.front().of == what.of && !in.is_held) return false;
    while (!in.told.empty() && in.told.front().of == what.of)
      in.told.pop_front();
    while (!in.data.empty() && in.data.front().of == what.of) {
      if (in.data.front().is_copy) in.copied -= in.data.front().header.bytes;
      in.data.pop_front();
      ++in.taken;
    }
    here().notices.pop_front();
    if (!was_heard) return true;  // given up before
    heard = 0;
    held.unlock();
    handler.on_death(what.seat, what.how);
  } else {
    here().notices.pop_front();
    heard = what.of;
    held.unlock();
    handler.on_joined(what.seat);
  }
  held.lock();
  return true;
}

template <frame_handler Handler>
bool thread_endpoint::deliver_one(lock& held, Handler& handler) {
  if (deliver_notice(held, handler)) return true;
  for (std::uint32_t i = 0; i < seats(); ++i) {
    const seat_id from{(turn_ + i) % seats()};
    const std::uint64_t heard = here().peers[to_index(from)];
    if (heard == 0) continue;
    thread_network::lane& in = net_->between(from, self_);
    if (!in.told.empty() && in.told.front().of == heard) {
      const thread_network::parcel one = std::move(in.told.front());
      in.told.pop_front();
      held.unlock();
      handler.on_message(from, one.header, one.copy);
      held.lock();
      return true;
    }
    if (in.data.empty() || in.data.front().of != heard || in.is_held) continue;
    if (deliver_data(held, from, handler)) {
      turn_ = (to_index(from) + 1) % seats();
      return true;
    }
  }
  // A death waits for frames that were sent before it, unless one has just found no space.
  return deliver_notice(held, handler);
}

/// Takes back a frame in the sender's memory, unless it was taken.
inline void thread_endpoint::retract(seat_id to, std::uint64_t number, lock& held) noexcept {
  thread_network::lane& out = net_->between(self_, to);
  while (out.is_being_read)
    here().changed.wait(held);
  if (out.taken > number || out.data.empty()) return;
  out.data.pop_back();
  --out.put;
}

template <frame_handler Handler>
result<void> thread_endpoint::send(seat_id to, const frame_header& frame, std::span<const std::byte> bytes,
                                   deadline by, Handler& handler) {
  const auto refused = [&](error_code code) {
    return failure{.code = code, .index = to_index(to), .wanted = bytes.size(), .where = "thread_network"};
  };
  if (bytes.size() > frame_bytes())
    return failure{errc::out_of_range, to_index(to), bytes.size(), frame_bytes(), "thread_network"};
  const bool is_copied = bytes.size() <= net_->options_.copied_bytes;
  thread_network::parcel parcel{
      .header = detail::with_bytes(frame, bytes), .bytes = bytes.data(), .is_copy = is_copied};
  if (is_copied) {
    parcel.copy.assign(bytes.begin(), bytes.end());
    parcel.bytes = parcel.copy.data();
  }
  lock held(net_->mutex_);
  check_alive();
  ask_again();
  if (!net_->reaches(self_, to)) return refused(errc::peer_failed);
  thread_network::lane& out = net_->between(self_, to);
  std::optional<std::uint64_t> number;  // of the frame, once it is put
  parcel.of = here().incarnation;
  for (;;) {
    const std::uint64_t seen = here().changes;
    // Its receiver may have left, taking the sent frames with it.
    if (number && out.taken > *number) return {};
    if (!net_->reaches(self_, to)) {
      if (number) retract(to, *number, held);  // a killed rank may still read it
      return refused(errc::peer_failed);
    }
    if (!number && (out.copied == 0 || out.copied + bytes.size() <= net_->options_.lane_bytes)) {
      number = out.put++;
      if (is_copied) out.copied += bytes.size();
      out.data.push_back(std::move(parcel));  // NOLINT(bugprone-use-after-move): once, `number` is set then
      net_->places_[to_index(to)].tell_change();
      if (is_copied) return {};
    }
    const bool is_late = now_ns() >= by.ns;
    if (is_late || !handler.keeps_waiting()) {
      if (number) retract(to, *number, held);
      if (number && out.taken > *number) return {};
      return refused(is_late ? errc::peer_timed_out : errc::cancelled);
    }
    try {
      if (!deliver_one(held, handler)) wait(held, by, seen);
    } catch (...) {
      if (!held.owns_lock()) held.lock();
      if (number) retract(to, *number, held);
      throw;
    }
  }
}

template <frame_handler Handler>
bool thread_endpoint::poll(deadline by, Handler& handler) {
  lock held(net_->mutex_);
  check_alive();
  ask_again();
  for (;;) {
    const std::uint64_t seen = here().changes;
    if (deliver_one(held, handler)) return true;
    if (std::exchange(here().is_woken, false) || now_ns() >= by.ns) return false;
    wait(held, by, seen);
  }
}

}  // namespace v0
}  // namespace llmmem
