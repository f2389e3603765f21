/// @file
/// The bodies of `sim_network`.
#pragma once

#include <llmmem/comm/errors.hpp>
#include <llmmem/testing/sim_network.hpp>
#include <llmmem/transfer/errors.hpp>

#include <llmmem/error.hpp>
#include <llmmem/transfer/link_model.hpp>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace llmmem {
inline namespace v0 {
namespace testing {

namespace detail {

inline constexpr std::uint32_t no_process = ~std::uint32_t{0};
inline constexpr std::uint64_t never = ~std::uint64_t{0};
inline constexpr std::size_t lane_told = 0;
inline constexpr std::size_t lane_data = 1;

}  // namespace detail

// The plan
// ---------------------------------------------------------------------------------------------------------

inline sim_network::sim_network(const sim_options& options) : options_(options), random_(options.seed) {
  if (options.seats == 0 || options.seats > max_seats) {
    throw argument_error("sim_network: " + std::to_string(options.seats) + " seats; 1 to " +
                         std::to_string(max_seats) + " are allowed");
  }
  if (options.min_delay_ns > options.max_delay_ns || options.min_notice_ns > options.max_notice_ns) {
    throw argument_error("sim_network: the least delay or notice is above the most; exchange them");
  }
  if (options.bytes_per_second != 0)
    check_link({.bytes_per_second = options.bytes_per_second}, "sim_network");
  for (std::uint32_t i = 0; i < options.seats; ++i) {
    add(seat_id{i}, 0);
    starts_.back().at = 0;
  }
}

inline sim_endpoint& sim_network::add(seat_id seat, std::uint64_t after) {
  std::uint32_t incarnation = 0;
  for (const auto& each : processes_)
    incarnation += each->self() == seat ? 1U : 0U;
  const auto number = static_cast<std::uint32_t>(processes_.size());
  processes_.push_back(std::unique_ptr<sim_endpoint>(new sim_endpoint(*this, seat, number, incarnation)));
  processes_.back()->connected_.assign(options_.seats, detail::no_process);
  processes_.back()->speaks_.assign(options_.seats, detail::no_process);
  starts_.push_back({.after = after});
  return *processes_.back();
}

inline sim_endpoint* sim_network::find(seat_id seat, std::uint32_t incarnation) const noexcept {
  for (const auto& each : processes_) {
    if (each->self() == seat && each->incarnation() == incarnation) return each.get();
  }
  return nullptr;
}

inline void sim_network::kill_in_call(seat_id seat, std::uint64_t call, std::uint32_t incarnation) {
  sim_endpoint* const process = find(seat, incarnation);
  if (process == nullptr) {
    throw argument_error("sim_network: seat " + std::to_string(to_index(seat)) + " has no process " +
                         std::to_string(incarnation) + "; plan its restart first");
  }
  process->dies_in_call_ = call;
}
inline void sim_network::kill_at(seat_id seat, std::uint64_t ns) {
  deaths_.push_back({seat, ns});
}
inline void sim_network::stop(seat_id seat, std::uint64_t from_ns, std::uint64_t until_ns) {
  pauses_.push_back({seat, from_ns, until_ns});
}
inline void sim_network::part(const seat_set& group, std::uint64_t from_ns, std::uint64_t until_ns) {
  partings_.push_back({group, from_ns, until_ns});
}
inline void sim_network::choose(seat_id seat, std::uint64_t from_ns, std::uint64_t until_ns,
                                order_choices& orders) {
  chosen_seat_ = seat;
  chosen_from_ = from_ns;
  chosen_until_ = until_ns;
  orders_ = &orders;
}
/// Chooses one of the `of` things that the seat can receive next.
inline std::size_t sim_network::choose_next(seat_id seat, std::size_t of) {
  const bool is_chosen =
      orders_ != nullptr && seat == chosen_seat_ && now_ >= chosen_from_ && now_ < chosen_until_;
  return is_chosen ? orders_->choose(static_cast<std::uint32_t>(of)) : random_() % of;
}
inline void sim_network::restart_after(seat_id seat, std::uint64_t ns) {
  add(seat, ns);
}

inline bool sim_network::was_killed(seat_id seat, std::uint32_t incarnation) const noexcept {
  const sim_endpoint* const process = find(seat, incarnation);
  return process != nullptr && process->is_dead_ && starts_[process->number_].at != detail::never;
}
inline std::uint64_t sim_network::calls(seat_id seat, std::uint32_t incarnation) const noexcept {
  const sim_endpoint* const process = find(seat, incarnation);
  return process == nullptr ? 0 : process->calls_;
}

/// Determines which process suspects which, and when: known in advance, for the first processes.
inline void sim_network::plan_silences() {
  const auto suspects = [this](std::uint32_t observer, std::uint32_t silent, std::uint64_t from,
                               std::uint64_t until) {
    if (observer == silent || until - from <= options_.hard_silence_ns) return;
    notify(*processes_[observer], from + options_.hard_silence_ns + draw(0, options_.max_notice_ns), silent,
           sim_endpoint::notice::kind::suspected);
  };
  for (std::uint32_t a = 0; a < options_.seats; ++a) {
    for (const pause& each : pauses_)
      suspects(a, to_index(each.seat), each.from, each.until);
    for (const parting& each : partings_) {
      for (std::uint32_t b = 0; b < options_.seats; ++b) {
        if (each.group.contains(seat_id{a}) != each.group.contains(seat_id{b}))
          suspects(a, b, each.from, each.until);
      }
    }
  }
}

// Turns
// ------------------------------------------------------------------------------------------------------------

template <class Body>
void sim_network::live(sim_endpoint& process, Body& body, std::exception_ptr& thrown) {
  try {
    {
      lock held(mutex_);
      process.turn_.wait(held, [&] { return turn_ == &process; });
    }
    if (!process.is_dead_ && !is_stuck_) {
      process.phase_ = sim_endpoint::phase::ready;
      connect(process);
      body(process);
    }
  } catch (const process_killed&) {
  } catch (...) {
    thrown = std::current_exception();
  }
  const lock held(mutex_);
  process.phase_ = sim_endpoint::phase::over;
  // Its end is a death to the others: nothing from it arrives later.
  if (!process.is_dead_) leave(process);
  pass_on();
}

template <class Body>
void sim_network::run(Body body) {
  wires_.resize(processes_.size() * processes_.size());
  plan_silences();
  std::vector<std::exception_ptr> thrown(processes_.size());
  std::vector<std::thread> threads;
  threads.reserve(processes_.size());
  for (std::size_t i = 0; i < processes_.size(); ++i)
    threads.emplace_back([this, i, &body, &thrown] { live(*processes_[i], body, thrown[i]); });
  {
    const lock held(mutex_);
    pass_on();
  }
  for (std::thread& each : threads)
    each.join();
  for (const std::exception_ptr& each : thrown) {
    if (each) std::rethrow_exception(each);
  }
}

inline std::uint64_t sim_network::past_pauses(seat_id seat, std::uint64_t time) const noexcept {
  for (const pause& each : pauses_) {
    if (each.seat == seat && time >= each.from && time < each.until) time = each.until;
  }
  return time;
}

inline std::uint64_t sim_network::past_partings(seat_id a, seat_id b, std::uint64_t time) const noexcept {
  for (const parting& each : partings_) {
    if (each.group.contains(a) != each.group.contains(b) && time >= each.from && time < each.until)
      time = each.until;
  }
  return time;
}

inline bool sim_network::fits_in_flight(std::uint32_t from, std::uint32_t to, std::uint64_t bytes) noexcept {
  const std::uint64_t under_way = wire_between(from, to).data_bytes;
  return under_way == 0 || under_way + bytes <= options_.lane_bytes;
}

/// Returns when the next thing that it can receive arrives.
inline std::uint64_t sim_network::next_due(sim_endpoint& process) noexcept {
  std::uint64_t due = detail::never;
  for (const sim_endpoint::notice& each : process.notices_)
    due = std::min(due, each.due);
  for (const std::uint32_t from : process.connected_) {
    if (from == detail::no_process) continue;
    const sim_endpoint::wire& wire = wire_between(from, process.number_);
    if (!wire.told.empty()) due = std::min(due, wire.told.front().due);
    if (!wire.data.empty() && !wire.is_held) due = std::min(due, wire.data.front().due);
  }
  return due;
}

inline std::uint64_t sim_network::resumes(sim_endpoint& process) noexcept {
  if (process.is_dead_ || is_stuck_) return now_;
  std::uint64_t time = now_;
  switch (process.phase_) {
    case sim_endpoint::phase::not_started:
      time = starts_[process.number_].at;
      break;
    case sim_endpoint::phase::ready:
      break;
    case sim_endpoint::phase::works:
      time = process.resumes_at_;
      break;
    case sim_endpoint::phase::waits:
      time = std::min(process.resumes_at_, next_due(process));
      if (process.is_woken_) time = now_;
      if (process.full_receiver_ != detail::no_process &&
          fits_in_flight(process.number_, process.full_receiver_, process.bytes_to_send_)) {
        time = now_;
      }
      break;
    case sim_endpoint::phase::over:
      return detail::never;
  }
  return past_pauses(process.self(), std::max(time, now_));
}

/// Chooses which process continues, of all that can continue first.
inline void sim_network::pass_on() {
  for (;;) {
    std::uint64_t first = detail::never;
    std::vector<sim_endpoint*> can;
    bool is_all_over = true;
    bool is_only_unborn = true;
    for (const auto& each : processes_) {
      if (each->phase_ == sim_endpoint::phase::over) continue;
      is_all_over = false;
      if (each->phase_ != sim_endpoint::phase::not_started) is_only_unborn = false;
      const std::uint64_t time = resumes(*each);
      if (time < first) can.clear();
      first = std::min(first, time);
      if (time == first) can.push_back(each.get());
    }
    turn_ = nullptr;
    if (is_all_over) return;
    if (first == detail::never) {
      if (is_only_unborn) {  // the processes before them never died
        for (const auto& each : processes_)
          each->is_dead_ = each->is_dead_ || each->phase_ == sim_endpoint::phase::not_started;
      } else {
        is_stuck_ = true;
        stuck_ = who_waits();
      }
      continue;
    }
    const auto due = std::ranges::min_element(deaths_, {}, &timed_death::at);
    if (due != deaths_.end() && due->at <= first && !is_stuck_) {
      now_ = std::max(now_, due->at);
      const seat_id seat = due->seat;
      deaths_.erase(due);
      for (const auto& each : processes_) {
        const bool lives = each->phase_ != sim_endpoint::phase::over &&
                           each->phase_ != sim_endpoint::phase::not_started && !each->is_dead_;
        if (each->self() == seat && lives) die(*each);
      }
      continue;
    }
    now_ = first;
    turn_ = can[random_() % can.size()];
    turn_->turn_.notify_one();
    return;
  }
}

inline void sim_network::give_way(sim_endpoint& process, lock& held) {
  pass_on();
  process.turn_.wait(held, [&] { return turn_ == &process; });
  process.phase_ = sim_endpoint::phase::ready;
  process.full_receiver_ = detail::no_process;
  if (process.is_dead_) throw process_killed{};
  if (is_stuck_) throw sim_stuck(stuck_);
}

inline void sim_network::begin_call(sim_endpoint& process) {
  if (process.is_dead_) throw process_killed{};
  lock held(mutex_);
  if (++calls_ > options_.max_calls && !is_stuck_) {
    is_stuck_ = true;
    stuck_ = "sim_network: more than " + std::to_string(options_.max_calls) + " calls; " + who_waits();
  }
  if (process.calls_++ == process.dies_in_call_) {
    die(process);
    throw process_killed{};
  }
  // A call takes a moment, so that others can act in between, and a process that polls lets time pass.
  process.phase_ = sim_endpoint::phase::works;
  process.resumes_at_ = now_ + draw(100, 3000);
  give_way(process, held);
}

inline std::string sim_network::who_waits() const {
  std::string text = "sim_network: at " + std::to_string(now_) + " ns no process can continue, seed " +
                     std::to_string(options_.seed) + ":";
  for (const auto& each : processes_) {
    text += " seat " + std::to_string(to_index(each->self())) + "." + std::to_string(each->incarnation());
    switch (each->phase_) {
      case sim_endpoint::phase::not_started:
        text += " not started";
        break;
      case sim_endpoint::phase::over:
        text += each->is_dead_ ? " dead" : " returned";
        break;
      default:
        text += each->full_receiver_ == detail::no_process ? " listens" : " wants to send";
    }
    text += " after " + std::to_string(each->calls_) + " calls;";
  }
  return text;
}

// Coming and dying
// -------------------------------------------------------------------------------------------------

inline void sim_network::notify(sim_endpoint& whom, std::uint64_t due, std::uint32_t of,
                                sim_endpoint::notice::kind what) {
  whom.notices_.push_back({due, of, what});
}

inline void sim_network::connect(sim_endpoint& process) {
  const auto hears_of = [this](sim_endpoint& whom, sim_endpoint& of) {
    std::uint64_t due = now_ + draw(options_.min_delay_ns, options_.max_delay_ns);
    // Not before it has noticed the death of the previous process.
    for (const sim_endpoint::notice& each : whom.notices_) {
      const bool is_death = each.what == sim_endpoint::notice::kind::died;
      if (is_death && processes_[each.process]->self() == of.self()) due = std::max(due, each.due + 1);
    }
    due = past_partings(whom.self(), of.self(), due);
    notify(whom, due, of.number_, sim_endpoint::notice::kind::came);
    sim_endpoint::wire& wire = wire_between(of.number_, whom.number_);
    wire.last_due[0] = wire.last_due[1] = due;
  };
  for (const auto& other : processes_) {
    const bool is_there = other->phase_ != sim_endpoint::phase::not_started &&
                          other->phase_ != sim_endpoint::phase::over && !other->is_dead_;
    if (!is_there || other->self() == process.self()) continue;
    hears_of(process, *other);
    hears_of(*other, process);
  }
}

inline void sim_network::die(sim_endpoint& process) {
  process.is_dead_ = true;
  if (const sim_endpoint* const next = find(process.self(), process.incarnation() + 1)) {
    start& of = starts_[next->number_];
    of.at = now_ + of.after;
  }
  leave(process);
}

/// Its connections end.
inline void sim_network::leave(sim_endpoint& process) {
  for (const auto& other : processes_) {
    if (other->self() == process.self()) continue;
    sim_endpoint::wire& wire = wire_between(process.number_, other->number_);
    for (auto* const lane : {&wire.told, &wire.data}) {
      // The last frames that it sent may never leave.
      if (lane->empty() || random_() % 2 == 0) continue;
      lane->resize(random_() % (lane->size() + 1));
    }
    wire.data_bytes = 0;
    for (const auto& each : wire.data)
      wire.data_bytes += each.header.bytes;
    const bool was_known =
        other->speaks_[to_index(process.self())] == process.number_ ||
        std::ranges::any_of(other->notices_, [&](const auto& n) { return n.process == process.number_; });
    if (!was_known) continue;
    const std::uint64_t due = past_partings(process.self(), other->self(),
                                            now_ + draw(options_.min_notice_ns, options_.max_notice_ns));
    notify(*other, std::max({due, wire.last_due[0], wire.last_due[1]}), process.number_,
           sim_endpoint::notice::kind::died);
  }
}

/// Returns when bytes that leave now have arrived. They leave one after another, and arrive one after
/// another: a process that takes from several at once takes from each more slowly.
inline std::uint64_t sim_network::past_links(sim_endpoint& from, sim_endpoint& to, std::uint64_t delay,
                                             std::uint64_t bytes) const {
  if (options_.bytes_per_second == 0 || bytes == 0) return now_ + delay;
  const std::uint64_t takes = transfer_ns({.bytes_per_second = options_.bytes_per_second}, bytes);
  const std::uint64_t leaves = std::max(now_, from.sends_until_);
  from.sends_until_ = leaves + takes;
  to.takes_until_ = std::max(leaves + delay, to.takes_until_) + takes;
  return to.takes_until_;
}

inline void sim_network::put(sim_endpoint& from, sim_endpoint& to, const frame_header& frame,
                             std::span<const std::byte> bytes, std::size_t lane) {
  sim_endpoint::wire& wire = wire_between(from.number_, to.number_);
  const std::uint64_t delay = draw(options_.min_delay_ns, options_.max_delay_ns);
  std::uint64_t due = past_links(from, to, delay, lane == detail::lane_data ? bytes.size() : 0);
  due = past_partings(from.self(), to.self(), due);
  due = std::max(due, wire.last_due[lane]);
  wire.last_due[lane] = due;
  auto& queue = lane == detail::lane_told ? wire.told : wire.data;
  queue.push_back({llmmem::detail::with_bytes(frame, bytes), {bytes.begin(), bytes.end()}, due});
  if (lane != detail::lane_data) return;
  wire.data_bytes += bytes.size();
  if (options_.corrupts_one_in != 0 && now_ < options_.corrupts_until_ns && !bytes.empty() &&
      random_() % options_.corrupts_one_in == 0) {
    std::byte& hit = queue.back().bytes[random_() % bytes.size()];
    hit ^= static_cast<std::byte>(1U << (random_() % 8));
    ++corrupted_;
  }
}

// The endpoint
// -----------------------------------------------------------------------------------------------------

inline std::uint32_t sim_endpoint::seats() const noexcept {
  return net_->options_.seats;
}
inline std::uint64_t sim_endpoint::now_ns() const noexcept {
  return net_->now_;
}
inline std::uint32_t sim_endpoint::frame_bytes() const noexcept {
  return net_->options_.frame_bytes;
}
inline bool sim_endpoint::is_connected(seat_id seat) const noexcept {
  return to_index(seat) < connected_.size() && connected_[to_index(seat)] != detail::no_process;
}
inline void sim_endpoint::wake() noexcept {
  is_woken_ = true;
}
inline void sim_endpoint::withdraw(seat_id /*from*/) noexcept {}  // frames arrive complete, or not at all

inline void sim_endpoint::post(seat_id to, const frame_header& frame,
                               std::span<const std::byte> bytes) noexcept {
  if (to_index(to) >= seats() || bytes.size() > max_post_bytes) return;
  const std::uint32_t process = speaks_[to_index(to)];
  if (is_dead_ || process == detail::no_process) return;
  net_->put(*this, *net_->processes_[process], frame, bytes, detail::lane_told);
}

inline void sim_endpoint::give_up(seat_id seat) noexcept {
  if (to_index(seat) >= seats()) return;
  const std::uint32_t process = std::exchange(speaks_[to_index(seat)], detail::no_process);
  connected_[to_index(seat)] = detail::no_process;
  if (is_dead_ || process == detail::no_process) return;
  // Before the notice of its end, as an endpoint reports it.
  wire& to = net_->wire_between(number_, process);
  to.last_due[0] = std::max(to.last_due[0], net_->now_) + 1;
  net_->notify(*net_->processes_[process], to.last_due[0], number_, notice::kind::suspected);
}

inline void sim_endpoint::work(std::uint64_t ns) {
  net_->begin_call(*this);
  sim_network::lock held(net_->mutex_);
  phase_ = phase::works;
  resumes_at_ = ns > detail::never - net_->now_ ? detail::never : net_->now_ + ns;
  net_->give_way(*this, held);
}

/// Offers again the frames that the handler answered by `ask_again`.
inline void sim_endpoint::ask_again() noexcept {
  for (std::uint32_t from = 0; from < net_->processes_.size(); ++from)
    net_->wire_between(from, number_).is_held = false;
}

inline bool sim_endpoint::is_next_of_its_seat(std::size_t at) const noexcept {
  const auto seat = [this](std::size_t i) { return net_->processes_[notices_[i].process]->self(); };
  for (std::size_t i = 0; i < notices_.size(); ++i) {
    if (i == at || seat(i) != seat(at)) continue;
    if (notices_[i].due < notices_[at].due || (notices_[i].due == notices_[at].due && i < at)) return false;
  }
  return true;
}

/// Receives one of the things that have arrived, drawn from all of them; returns whether there was any.
template <frame_handler Handler>
bool sim_endpoint::deliver_one(Handler& handler) {
  struct candidate {
    std::size_t at;  // notice, or process
    std::size_t lane;
    bool is_notice;
  };
  for (;;) {
    std::vector<candidate> can;
    for (std::uint32_t seat = 0; seat < seats(); ++seat) {
      const std::uint32_t from = connected_[seat];
      if (from == detail::no_process) continue;
      const wire& w = net_->wire_between(from, number_);
      if (!w.told.empty() && w.told.front().due <= net_->now_)
        can.push_back({from, detail::lane_told, false});
      if (!w.data.empty() && w.data.front().due <= net_->now_ && !w.is_held)
        can.push_back({from, detail::lane_data, false});
    }
    for (std::size_t i = 0; i < notices_.size(); ++i) {
      const notice& each = notices_[i];
      if (each.due > net_->now_ || !is_next_of_its_seat(i)) continue;
      // Earlier sends are received earlier, except for data that no process takes.
      const std::uint32_t there = connected_[to_index(net_->processes_[each.process]->self())];
      const wire& w = net_->wire_between(each.process, number_);
      const bool is_heard = there != each.process || (w.told.empty() && (w.data.empty() || w.is_held));
      if (each.what != notice::kind::died || is_heard) can.push_back({i, 0, true});
    }
    if (can.empty()) return false;
    const candidate next = can[net_->choose_next(self_, can.size())];
    if (next.is_notice) {
      const notice what = notices_[next.at];
      notices_.erase(notices_.begin() + static_cast<std::ptrdiff_t>(next.at));
      const seat_id seat = net_->processes_[what.process]->self();
      std::uint32_t& there = connected_[to_index(seat)];
      std::uint32_t& speaks = speaks_[to_index(seat)];
      if (what.what == notice::kind::came) {
        there = speaks = what.process;
        handler.on_joined(seat);
        return true;
      }
      const bool was_suspected = there == detail::no_process && speaks == what.process;
      const bool is_certain = what.what == notice::kind::died;
      if (there != what.process && !(was_suspected && is_certain)) continue;  // no process asks for it now
      there = detail::no_process;
      if (is_certain) speaks = detail::no_process;
      handler.on_death(seat, is_certain ? comm::death::certain : comm::death::suspected);
      return true;
    }
    const auto from = static_cast<std::uint32_t>(next.at);
    const seat_id seat = net_->processes_[from]->self();
    wire& w = net_->wire_between(from, number_);
    auto& queue = next.lane == detail::lane_told ? w.told : w.data;
    if (next.lane == detail::lane_told) {
      const frame_on_wire frame = std::move(queue.front());
      queue.pop_front();
      handler.on_message(seat, frame.header, frame.bytes);
      return true;
    }
    const frame_buffer into = handler.buffer_for(seat, queue.front().header);
    if (into.what == frame_buffer::answer::ask_again) {
      w.is_held = true;
      continue;
    }
    const frame_on_wire frame = std::move(queue.front());
    queue.pop_front();
    w.data_bytes -= frame.header.bytes;
    if (into.what == frame_buffer::answer::take) {
      if (into.bytes.size() != frame.bytes.size()) {
        throw std::logic_error("sim_network: a handler returned a buffer of " +
                               std::to_string(into.bytes.size()) + " bytes for a frame of " +
                               std::to_string(frame.bytes.size()));
      }
      if (!frame.bytes.empty()) std::memcpy(into.bytes.data(), frame.bytes.data(), frame.bytes.size());
      handler.on_frame(seat, frame.header);
    }
    return true;
  }
}

template <frame_handler Handler>
result<void> sim_endpoint::send(seat_id to, const frame_header& frame, std::span<const std::byte> bytes,
                                deadline by, Handler& handler) {
  net_->begin_call(*this);
  const auto refused = [&](error_code code) {
    return failure{.code = code, .index = to_index(to), .wanted = bytes.size(), .where = "sim_network"};
  };
  if (bytes.size() > frame_bytes())
    return failure{errc::out_of_range, to_index(to), bytes.size(), frame_bytes(), "sim_network"};
  if (!is_connected(to)) return refused(errc::peer_failed);
  const std::uint32_t process = connected_[to_index(to)];
  ask_again();
  for (;;) {
    if (connected_[to_index(to)] != process) return refused(errc::peer_failed);
    if (net_->fits_in_flight(number_, process, bytes.size())) {
      net_->put(*this, *net_->processes_[process], frame, bytes, detail::lane_data);
      return {};
    }
    if (net_->now_ >= by.ns) return refused(errc::peer_timed_out);
    if (!handler.keeps_waiting()) return refused(errc::cancelled);
    if (deliver_one(handler)) continue;
    sim_network::lock held(net_->mutex_);
    phase_ = phase::waits;
    full_receiver_ = process;
    bytes_to_send_ = bytes.size();
    resumes_at_ = by.ns;
    net_->give_way(*this, held);
  }
}

template <frame_handler Handler>
bool sim_endpoint::poll(deadline by, Handler& handler) {
  net_->begin_call(*this);
  ask_again();
  for (;;) {
    if (deliver_one(handler)) return true;
    if (std::exchange(is_woken_, false) || net_->now_ >= by.ns) return false;
    sim_network::lock held(net_->mutex_);
    phase_ = phase::waits;
    resumes_at_ = by.ns;
    net_->give_way(*this, held);
  }
}

}  // namespace testing
}  // namespace v0
}  // namespace llmmem
