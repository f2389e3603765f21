/// @file
/// The job as processes joined by sockets: started, killed, watched and started again.
#pragma once

#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/socket_endpoint.hpp>
#include <llmmem/detail/monotonic.hpp>
#include <llmmem/error.hpp>

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "common/socket_folder.hpp"
#include "common/standard_streams.hpp"
#include "survive_failures/events.hpp"
#include "survive_failures/fault_plan.hpp"
#include "survive_failures/job_log.hpp"
#include "survive_failures/plan.hpp"
#include "survive_failures/survivor.hpp"
#include "train_gpt/corpus.hpp"

namespace survive_failures {

namespace detail {

/// A descriptor that is closed at the end.
class owned_descriptor {
 public:
  explicit owned_descriptor(int number, const char* what) : number_(number) {
    if (number < 0) example::throw_errno(what);
  }
  owned_descriptor(const owned_descriptor&) = delete;
  owned_descriptor& operator=(const owned_descriptor&) = delete;
  ~owned_descriptor() { ::close(number_); }
  [[nodiscard]] int get() const noexcept { return number_; }

 private:
  int number_;
};

/// SIGCHLD, and the signals that ask the program to end, as a pollable descriptor while this lives.
class awaited_signals {
 public:
  awaited_signals() : descriptor_(begin(before_), "a signalfd") {}
  awaited_signals(const awaited_signals&) = delete;
  awaited_signals& operator=(const awaited_signals&) = delete;
  ~awaited_signals() { ::sigprocmask(SIG_SETMASK, &before_, nullptr); }

  [[nodiscard]] int get() const noexcept { return descriptor_.get(); }
  /// Called in a child, which must get its own signals.
  void give_back() const noexcept { ::sigprocmask(SIG_SETMASK, &before_, nullptr); }
  /// Takes the pending signals. @return a signal that asks the program to end, or 0
  [[nodiscard]] int drain() const noexcept {
    int asked = 0;
    signalfd_siginfo told{};
    while (::read(descriptor_.get(), &told, sizeof told) > 0) {
      const auto signal = static_cast<int>(told.ssi_signo);
      if (signal != SIGCHLD) asked = signal;
    }
    return asked;
  }

 private:
  [[nodiscard]] static int begin(sigset_t& before) noexcept {
    sigset_t wanted;
    ::sigemptyset(&wanted);
    ::sigaddset(&wanted, SIGCHLD);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
      struct sigaction now{};
      // A program started in the background, or with nohup, must ignore them.
      if (::sigaction(signal, nullptr, &now) == 0 && now.sa_handler != SIG_IGN) ::sigaddset(&wanted, signal);
    }
    ::sigprocmask(SIG_BLOCK, &wanted, &before);
    return ::signalfd(-1, &wanted, SFD_NONBLOCK | SFD_CLOEXEC);
  }

  sigset_t before_{};
  owned_descriptor descriptor_;
};

}  // namespace detail

/// Starts a process for each seat, applies the planned faults, and starts a fresh process for each that dies,
/// until all steps are done. Children end with it.
///
/// @par Thread safety   one thread, in a program that has no other.
/// @par Errors          `llmmem::error` if more was lost than the redundancy tolerates and nothing is saved,
///                      if a rank fails for another reason than a death, if nothing happens for a minute, and
///                      on SIGINT, SIGTERM or SIGHUP, so that nothing is left.
class process_job {
 public:
  /// All arguments outlive it.
  process_job(const job_plan& plan, const train_gpt::corpus& text, job_log& log)
      : plan_(plan), text_(&text), log_(&log), faults_(plan_faults(plan)), children_(plan.ranks) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) example::throw_errno("a pipe");
    events_.emplace(ends[0], "a pipe");
    into_events_.emplace(ends[1], "a pipe");
    ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
  }
  process_job(const process_job&) = delete;
  process_job& operator=(const process_job&) = delete;
  ~process_job() {
    for (const child& each : children_) {
      if (each.pid > 0) ::kill(each.pid, SIGKILL);
    }
    for (const child& each : children_) {
      if (each.pid > 0) static_cast<void>(::waitpid(each.pid, nullptr, 0));
    }
  }

  void run() {
    for (std::uint32_t seat = 0; seat < plan_.ranks; ++seat)
      start(seat);
    heard_ = now();
    while (!is_over()) {
      wait();
      hear();
      reap();
      if (log_->is_lost()) throw_lost(lost_text);
      run_timers();
      plan_next_fault();
      watch_progress();
    }
  }

 private:
  static constexpr std::uint64_t never = ~std::uint64_t{0};
  static constexpr std::uint64_t second = 1'000'000'000;
  // The meanings of a child's exit status.
  static constexpr int has_finished = 0;
  static constexpr int is_out = 10;
  static constexpr int has_lost = 11;
  static constexpr int has_failed = 12;
  static constexpr const char* lost_text = "the state of ranks that died is on none that lives";

  struct child {
    pid_t pid = -1;
    std::uint64_t starts_at = never;     // of a fresh process
    std::uint64_t continues_at = never;  // of a stopped process
  };

  [[nodiscard]] static std::uint64_t now() noexcept { return llmmem::detail::monotonic_ns(); }

  void start(std::uint32_t seat) {
    std::fflush(nullptr);
    const pid_t supervisor = ::getpid();
    const pid_t pid = ::fork();
    if (pid < 0) example::throw_errno("a process for a rank");
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != supervisor) ::_exit(has_failed);
      signals_.give_back();
      ::_exit(live(seat));
    }
    children_[seat] = {.pid = pid};
    log_->started(seat, pid);
  }

  /// The work of a child.
  [[nodiscard]] int live(std::uint32_t seat) const noexcept {
    try {
      llmmem::socket_endpoint end({.seat = llmmem::seat_id{seat},
                                   .seats = plan_.ranks,
                                   .folder = folder_.path(),
                                   .silence = llmmem::on_silence::kill_local,
                                   .beat_ns = plan_.silence_ms * 1'000'000 / 10,
                                   .soft_silence_ns = plan_.silence_ms * 500'000,
                                   .hard_silence_ns = plan_.silence_ms * 1'000'000});
      llmmem::communicator ranks(end);
      ranks.join(ranks.after(60 * second)).value();
      survivor training(ranks, plan_, *text_, [this](job_event event) {
        event.pid = ::getpid();
        static_cast<void>(!::write(into_events_->get(), &event, sizeof event));
      });
      switch (training.run()) {
        case ending::finished:
          return has_finished;
        case ending::out:
          return is_out;
        case ending::lost:
          return has_lost;
      }
    } catch (const std::exception& failed) {
      example::tell(stderr, "rank {}: {}\n", seat, failed.what());
    }
    return has_failed;
  }

  void wait() const {
    std::uint64_t until = now() + second;
    if (fault_at_ != never) until = std::min(until, fault_at_);
    for (const child& each : children_)
      until = std::min({until, each.starts_at, each.continues_at});
    pollfd of[2] = {{events_->get(), POLLIN, 0}, {signals_.get(), POLLIN, 0}};
    // The clock is read once: if `until` passed between two readings, the difference would be 584 years.
    const std::uint64_t time = now();
    const std::uint64_t left = until > time ? until - time : 0;
    const timespec timeout{static_cast<time_t>(left / second), static_cast<long>(left % second)};
    static_cast<void>(::ppoll(of, 2, &timeout, nullptr));
  }

  void hear() {
    job_event event;
    while (::read(events_->get(), &event, sizeof event) == static_cast<ssize_t>(sizeof event)) {
      log_->hear(event);
      heard_ = now();
    }
  }

  void reap() {
    if (const int asked = signals_.drain(); asked != 0)
      throw llmmem::error(fmt::format("{} ended it at step {}", signal_name(asked), log_->step()));
    int status = 0;
    for (pid_t pid = 0; (pid = ::waitpid(-1, &status, WNOHANG | WUNTRACED | WCONTINUED)) > 0;) {
      const auto who = std::ranges::find(children_, pid, &child::pid);
      if (who == children_.end()) continue;
      const auto seat = static_cast<std::uint32_t>(who - children_.begin());
      if (WIFSTOPPED(status)) {
        log_->stopped(seat);
      } else if (WIFCONTINUED(status)) {
        log_->continued(seat);
      } else {
        ended(seat, status);
      }
    }
  }

  void ended(std::uint32_t seat, int status) {
    hear();  // its earlier reports
    child& who = children_[seat];
    who = {};
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    if (code == has_finished) return;
    log_->died(seat, WIFSIGNALED(status) ? WTERMSIG(status) : 0);
    if (code == has_failed) throw llmmem::error(fmt::format("rank {} failed; it said why above", seat));
    if (log_->is_lost() || code == has_lost) throw_lost(lost_text);
    if (log_->finished() != 0) return;
    if (log_->alive() == 0 && log_->step() != 0 && !plan_.is_saved()) throw_lost("no rank was left");
    who.starts_at = now() + plan_.restart_ms * 1'000'000;
  }

  [[noreturn]] void throw_lost(const char* why) const {
    throw llmmem::error(fmt::format(
        "step {} is lost: {}; {} bears the loss of any {} of a group at once. Take a redundancy that bears "
        "more, or --checkpoint-dir, or start again",
        log_->step(), why, llmmem::to_text(plan_.redundancy), plan_.redundancy.tolerates()));
  }

  void run_timers() {
    const std::uint64_t time = now();
    for (std::uint32_t seat = 0; seat < plan_.ranks; ++seat) {
      child& each = children_[seat];
      if (each.starts_at <= time && log_->finished() == 0) start(seat);
      if (each.continues_at <= time) {
        each.continues_at = never;
        if (each.pid > 0) ::kill(each.pid, SIGCONT);
      }
    }
    if (fault_at_ <= time) commit_fault(time);
  }

  void plan_next_fault() {
    if (fault_at_ != never || next_fault_ == faults_.size() || log_->finished() != 0) return;
    const planned_fault& next = faults_[next_fault_];
    if (log_->is_complete() && log_->step() >= next.after_step) fault_at_ = now() + next.delay_ns;
  }

  void commit_fault(std::uint64_t time) {
    fault_at_ = never;
    if (log_->finished() != 0) return;
    const planned_fault& fault = faults_[next_fault_];
    hear();
    if (!log_->is_complete()) return;  // another fault came first, so this one is planned again
    ++next_fault_;
    const int signal = fault.kind == fault_kind::kill ? SIGKILL : SIGSTOP;
    log_->fault(fault.seats, signal, time);
    for (const std::uint32_t seat : fault.seats) {
      if (children_[seat].pid > 0) ::kill(children_[seat].pid, signal);
      if (fault.kind == fault_kind::pause) {
        children_[seat].continues_at = time + plan_.silence_ms * 1'000'000 / 4;
        log_->note(fmt::format("rank {} stands still for a while", seat));
      }
    }
  }

  /// Waits neither for dead ranks nor for a rank that came too late to finish.
  [[nodiscard]] bool is_over() const {
    if (log_->finished() == 0) return false;
    if (now() - heard_ > 5 * second) return true;
    for (std::uint32_t seat = 0; seat < plan_.ranks; ++seat) {
      if (log_->is_finisher(seat) && children_[seat].pid > 0) return false;
    }
    return true;
  }

  void watch_progress() const {
    if (now() - heard_ < 60 * second) return;
    throw llmmem::error("nothing has happened for a minute: " + log_->last_words());
  }

  job_plan plan_;
  const train_gpt::corpus* text_;
  job_log* log_;
  example::socket_folder folder_{};
  detail::awaited_signals signals_{};
  std::optional<detail::owned_descriptor> events_{};
  std::optional<detail::owned_descriptor> into_events_{};
  std::vector<planned_fault> faults_;
  std::size_t next_fault_ = 0;
  std::uint64_t fault_at_ = never;
  std::uint64_t heard_ = 0;
  std::vector<child> children_;
};

}  // namespace survive_failures
