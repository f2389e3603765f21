/// @file
/// `job_log`: the events of a job, as reported by its ranks and the process that runs them; the live table,
/// and the resulting figures.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "common/standard_streams.hpp"
#include "survive_failures/events.hpp"
#include "survive_failures/job_figures.hpp"
#include "survive_failures/plan.hpp"

namespace survive_failures {

/// @par Thread safety   one thread at a time.
class job_log {
 public:
  /// @param notes  gets the table; outlives it.
  job_log(const job_plan& plan, std::FILE* notes) : plan_(plan), notes_(notes), seats_(plan.ranks) {
    example::tell(notes_, "{:>7}  {:>8}  {:>6}  {:>9}  {}\n", "step", "loss", "alive", "recovery", "event");
  }

  /// @name Reports of the code that runs the ranks
  /// @{
  void started(std::uint32_t seat, std::int64_t pid) {
    seats_[seat].is_alive = true;
    seats_[seat].has_begun = false;
    seats_[seat].pid = pid;
    example::tell(notes_, "rank {} pid {}\n", seat, pid);
  }
  /// @param signals  whether several ranks were hit at the same moment.
  void fault(const std::vector<std::uint32_t>& seats, int signal, std::uint64_t at_ns) {
    ++figures_.faults;
    for (const std::uint32_t seat : seats) {
      seats_[seat].sent = signal;
      faults_.push_back(at_ns);
    }
  }
  /// Notes that a rank stands still without a planned fault.
  void stopped(std::uint32_t seat) { seats_[seat].sent = SIGSTOP; }
  void continued(std::uint32_t seat) { seats_[seat].sent = 0; }
  void died(std::uint32_t seat, int signal) {
    seat_status& who = seats_[seat];
    who.is_alive = false;
    const int cause = who.sent != 0 ? who.sent : signal;
    who.sent = 0;
    figures_.deaths.push_back({seat, who.pid, cause, step_});
    last_death_ = epoch_;
    row(fmt::format("rank {} died of {}", seat, signal_name(cause)));
  }
  void note(const std::string& text) { row(text); }
  /// @}

  void hear(job_event event) {
    if (event.kind == event_kind::began && event.epoch == 1) begin_world(event.seat);
    if (event.kind == event_kind::began) seats_[event.seat].has_begun = true;
    event.epoch += epochs_before_;
    seats_[event.seat].last = event;
    epoch_times& in = epochs_[event.epoch];
    const auto latest = [&](std::uint64_t& time) { time = std::max(time, event.at_ns); };
    switch (event.kind) {
      case event_kind::began:
        if (event.epoch > epoch_) {
          epoch_ = event.epoch;
          in.members = event.members;
        }
        break;
      case event_kind::failed:
        latest(in.failed);
        break;
      case event_kind::agreed:
        latest(in.agreed);
        break;
      case event_kind::fetched:
        latest(in.fetched);
        break;
      case event_kind::verified:
        latest(in.verified);
        break;
      case event_kind::committed:
        committed(event, in);
        break;
      case event_kind::repeats:
        in.is_repeated = true;
        break;
      case event_kind::differs:
        row(fmt::format("rank {} computed part {} otherwise than its owner", event.seat, event.value));
        break;
      case event_kind::finished:
        figures_.digests.push_back(event.value);
        finished_ |= std::uint64_t{1} << event.seat;
        finishers_ = event.members;
        break;
      case event_kind::out:
        row(fmt::format("rank {} was gone too long, and is not heard any more", event.seat));
        break;
      case event_kind::lost:
        is_lost_ = true;
        break;
      case event_kind::restored:
        restored(event, in);
        break;
      case event_kind::saved:
        if (!event.said().empty()) row(fmt::format("rank {}: {}", event.seat, event.said()));
        break;
      case event_kind::unsaved:
        row(fmt::format("rank {}: step {} is not saved: {}", event.seat, event.step, event.said()));
        break;
    }
  }

  /// Steps that are committed.
  [[nodiscard]] std::uint64_t step() const noexcept { return step_; }
  [[nodiscard]] std::uint64_t epoch() const noexcept { return epoch_; }
  /// Returns whether all ranks live, are in one epoch that began after the last death, and have kept a
  /// version in it, so that a fault may follow.
  [[nodiscard]] bool is_complete() const {
    const auto all = plan_.ranks == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << plan_.ranks) - 1;
    const auto now = epochs_.find(epoch_);
    if (now == epochs_.end() || epoch_ <= last_death_ || now->second.members != all ||
        now->second.committed != all)
      return false;
    return std::ranges::all_of(seats_,
                               [](const seat_status& seat) { return seat.is_alive && seat.sent == 0; });
  }
  [[nodiscard]] bool is_lost() const noexcept { return is_lost_; }
  /// Ranks that have done all steps, one bit each.
  [[nodiscard]] std::uint64_t finished() const noexcept { return finished_; }
  /// Returns whether the present rank of a seat was in the epoch that finished, and so finishes as well. A
  /// fresh one in the seat of a rank that died in that epoch was not: it waits for ranks that have ended.
  [[nodiscard]] bool is_finisher(std::uint32_t seat) const {
    return (finishers_ >> seat & 1) != 0 && seats_[seat].has_begun;
  }
  [[nodiscard]] std::uint32_t alive() const {
    return static_cast<std::uint32_t>(
        std::ranges::count_if(seats_, [](const seat_status& seat) { return seat.is_alive; }));
  }
  /// The last report of each rank, for an error text.
  [[nodiscard]] std::string last_words() const {
    std::string text;
    for (std::size_t seat = 0; seat < seats_.size(); ++seat) {
      const job_event& last = seats_[seat].last;
      text += fmt::format("{}rank {} {} at step {} of epoch {}", text.empty() ? "" : ", ", seat,
                          seats_[seat].is_alive ? "lives, last heard" : "is dead, last heard", last.step,
                          last.epoch);
    }
    return text;
  }

  [[nodiscard]] job_figures figures() const {
    job_figures all = figures_;
    for (auto at = epochs_.begin(); at != epochs_.end(); ++at) {
      if (at->second.is_repeated) ++all.steps_repeated;
      if (at == epochs_.begin()) continue;
      const epoch_times& before = std::prev(at)->second;
      all.joined += static_cast<std::uint64_t>(std::popcount(at->second.members & ~before.members));
      if (before.failed != 0 && at->second.resumed != 0) {
        all.recoveries.push_back(recovery(before, at->second));
      }
    }
    return all;
  }

 private:
  struct seat_status {
    bool is_alive = false;
    bool has_begun = false;  // an epoch
    std::int64_t pid = 0;
    int sent = 0;  // a signal that has not yet ended it
    job_event last{};
  };
  /// When the last of an epoch's members reached each point.
  struct epoch_times {
    std::uint64_t members = 0;
    std::uint64_t committed = 0;  // ranks that committed a step in this epoch
    std::uint64_t failed = 0, agreed = 0, fetched = 0, verified = 0, resumed = 0;
    bool is_told = false;
    bool is_repeated = false;
    bool is_restored = false;
  };

  /// Epochs begin at 1 again after all ranks have died and fresh ones meet; this count continues. Without
  /// saves, the committed steps are lost, even if a fresh rank lived at each moment.
  void begin_world(std::uint32_t seat) {
    const std::uint64_t bit = std::uint64_t{1} << seat;
    if ((world_ & bit) != 0) {
      epochs_before_ = epoch_;
      world_ = 0;
      is_lost_ = is_lost_ || (step_ != 0 && !plan_.is_saved());
    }
    world_ |= bit;
  }

  void restored(const job_event& event, epoch_times& in) {
    if (in.is_restored) return;
    in.is_restored = true;
    const std::uint64_t lost = step_ > event.step ? step_ - event.step : 0;
    figures_.steps_lost += lost;
    step_ = event.step;
    if (event.value != 0) figures_.restored_from.push_back(event.step);
    const char* const how = event.value != 0 ? "loaded" : "started again, no checkpoint";
    if (event.value != 0 || lost != 0) row(fmt::format("step {} {}: {} steps lost", event.step, how, lost));
    if (!event.said().empty()) row(fmt::format("rank {}: {}", event.seat, event.said()));
  }

  void committed(const job_event& event, epoch_times& in) {
    const std::uint64_t bit = std::uint64_t{1} << event.seat;
    if ((in.committed & bit) == 0) in.resumed = std::max(in.resumed, event.at_ns);
    in.committed |= bit;
    if (in.committed == in.members && !in.is_told && event.epoch > 1) {
      in.is_told = true;
      tell_epoch(event.epoch);
    }
    if (event.step <= step_) return;
    step_ = event.step;
    loss_ = event.loss;
    const std::uint64_t every = std::max<std::uint64_t>(plan_.steps / 20, 1);
    if (step_ % every == 0 || step_ == plan_.steps) row("");
  }

  /// Notes that all members of an epoch work again.
  void tell_epoch(std::uint64_t epoch) {
    const auto at = epochs_.find(epoch);
    if (at == epochs_.begin()) return;
    const epoch_times& before = std::prev(at)->second;
    const std::uint64_t came = at->second.members & ~before.members;
    if (before.failed != 0) recovered_ms_ = recovery(before, at->second).total_ms();
    row(fmt::format("epoch {}: {} ranks{}", epoch, std::popcount(at->second.members),
                    came != 0 ? fmt::format(", {} of them fresh", std::popcount(came)) : ""));
    recovered_ms_.reset();
  }

  [[nodiscard]] job_recovery recovery(const epoch_times& before, const epoch_times& after) const {
    const auto ms = [](std::uint64_t from, std::uint64_t to) {
      return to > from ? static_cast<double>(to - from) * 1e-6 : 0.0;
    };
    job_recovery found;
    // The last fault before the death was noticed; none if the death came from outside.
    std::uint64_t cause = 0;
    for (const std::uint64_t fault : faults_) {
      if (fault <= before.failed) cause = std::max(cause, fault);
    }
    if (cause > before.resumed) found.detect_ms = ms(cause, before.failed);
    found.agree_ms = ms(before.failed, before.agreed);
    found.fetch_ms = ms(before.agreed, after.fetched);
    found.verify_ms = ms(after.fetched, after.verified);
    found.resume_ms = ms(after.verified, after.resumed);
    return found;
  }

  void row(const std::string& text) {
    example::tell(notes_, "{:>7}  {:>8.4f}  {:>6}  {:>9}  {}\n", step_, loss_,
                  fmt::format("{}/{}", alive(), plan_.ranks),
                  recovered_ms_ ? fmt::format("{:.1f} ms", *recovered_ms_) : "", text);
  }

  job_plan plan_;
  std::FILE* notes_;
  std::vector<seat_status> seats_;
  std::map<std::uint64_t, epoch_times> epochs_{};
  std::vector<std::uint64_t> faults_{};  // when
  job_figures figures_{};
  std::optional<double> recovered_ms_{};
  std::uint64_t epoch_ = 0;
  std::uint64_t epochs_before_ = 0;  // epochs of earlier worlds
  std::uint64_t world_ = 0;          // seats that have begun the first epoch of this one
  std::uint64_t last_death_ = 0;     // the epoch of the last death
  std::uint64_t step_ = 0;
  double loss_ = 0;
  std::uint64_t finished_ = 0;
  std::uint64_t finishers_ = 0;
  bool is_lost_ = false;
};

}  // namespace survive_failures
