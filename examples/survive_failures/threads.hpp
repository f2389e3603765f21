/// @file
/// The job as threads of this process.
#pragma once

#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/thread_network.hpp>
#include <llmmem/detail/monotonic.hpp>
#include <llmmem/error.hpp>

#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "survive_failures/events.hpp"
#include "survive_failures/fault_plan.hpp"
#include "survive_failures/job_log.hpp"
#include "survive_failures/plan.hpp"
#include "survive_failures/survivor.hpp"
#include "train_gpt/corpus.hpp"

namespace survive_failures {

/// A thread for each seat. A killed one ends in its next call of the transport, and a fresh one takes its
/// seat.
///
/// @par Thread safety   one thread.
/// @par Errors          exceptions of ranks; `llmmem::error` if more was lost than the redundancy tolerates
///                      and nothing is saved.
class thread_job {
 public:
  /// All arguments outlive it.
  thread_job(const job_plan& plan, const train_gpt::corpus& text, job_log& log)
      : thread_job(plan, text, log, plan_faults(plan)) {}
  /// With faults other than the plan's own: kills only.
  thread_job(const job_plan& plan, const train_gpt::corpus& text, job_log& log,
             std::vector<planned_fault> faults)
      : plan_(plan),
        text_(&text),
        log_(&log),
        faults_(std::move(faults)),
        net_(plan.ranks),
        seats_(plan.ranks) {}
  thread_job(const thread_job&) = delete;
  thread_job& operator=(const thread_job&) = delete;
  ~thread_job() {
    for (std::uint32_t seat = 0; seat < plan_.ranks; ++seat)
      net_.kill(llmmem::seat_id{seat});
    for (seat_thread& each : seats_) {
      if (each.thread.joinable()) each.thread.join();
    }
  }

  void run() {
    for (std::uint32_t seat = 0; seat < plan_.ranks; ++seat)
      start(seat);
    std::unique_lock held(mutex_);
    while ((running_ != 0 || is_to_restart()) && !thrown_ && !log_->is_lost()) {
      changed_.wait_for(held, std::chrono::milliseconds(1));
      do_next_fault();
      restart(held);
      // A rank that waits for admission no longer finds any rank.
      for (std::uint32_t seat = 0; seat < plan_.ranks && log_->finished() != 0; ++seat) {
        if (!log_->is_finisher(seat)) net_.kill(llmmem::seat_id{seat});
      }
    }
    if (thrown_) std::rethrow_exception(thrown_);
    if (log_->is_lost()) throw llmmem::error("more ranks were lost than the redundancy bears");
  }

 private:
  using clock = std::chrono::steady_clock;
  struct seat_thread {
    std::thread thread{};
    std::optional<clock::time_point> starts_at{};  // a fresh one
  };

  void start(std::uint32_t seat) {
    const std::lock_guard held(mutex_);
    ++running_;
    log_->started(seat, 0);
    seats_[seat].thread = std::thread([this, seat] { live(seat); });
  }

  void live(std::uint32_t seat) {
    bool is_dead = false;
    try {
      llmmem::thread_endpoint end(net_, llmmem::seat_id{seat});
      llmmem::communicator ranks(end);
      ranks.join(ranks.after(60'000'000'000)).value();
      survivor training(ranks, plan_, *text_, [this](const job_event& event) {
        const std::lock_guard held(mutex_);
        log_->hear(event);
      });
      is_dead = training.run() != ending::finished;
    } catch (const llmmem::rank_killed&) {
      is_dead = true;
    } catch (...) {
      const std::lock_guard held(mutex_);
      if (!thrown_) thrown_ = std::current_exception();
    }
    const std::lock_guard held(mutex_);
    --running_;
    if (is_dead && log_->finished() == 0) {
      log_->died(seat, 0);
      seats_[seat].starts_at = clock::now() + std::chrono::milliseconds(plan_.restart_ms);
    }
    changed_.notify_all();
  }

  /// All ranks died, and the job is in files.
  [[nodiscard]] bool is_to_restart() const { return plan_.is_saved() && log_->finished() == 0; }

  void restart(std::unique_lock<std::mutex>& held) {
    for (std::uint32_t seat = 0; seat < plan_.ranks; ++seat) {
      seat_thread& each = seats_[seat];
      if (!each.starts_at || *each.starts_at > clock::now() || log_->finished() != 0) continue;
      each.starts_at.reset();
      held.unlock();
      each.thread.join();
      start(seat);
      held.lock();
    }
  }

  void do_next_fault() {
    if (next_fault_ == faults_.size() || log_->finished() != 0 || !log_->is_complete()) return;
    const planned_fault& next = faults_[next_fault_];
    if (log_->step() < next.after_step) return;
    const auto time = clock::now();
    if (!fault_at_) fault_at_ = time + std::chrono::nanoseconds(next.delay_ns);
    if (*fault_at_ > time) return;
    fault_at_.reset();
    ++next_fault_;
    log_->fault(next.seats, SIGKILL, llmmem::detail::monotonic_ns());
    for (const std::uint32_t seat : next.seats)
      net_.kill(llmmem::seat_id{seat});
  }

  job_plan plan_;
  const train_gpt::corpus* text_;
  job_log* log_;
  std::vector<planned_fault> faults_;
  std::size_t next_fault_ = 0;
  std::optional<clock::time_point> fault_at_{};
  llmmem::thread_network net_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t running_ = 0;
  std::exception_ptr thrown_{};
  std::vector<seat_thread> seats_;
};

}  // namespace survive_failures
