/// @file
/// `termination_request`: SIGTERM as a flag to check between two steps.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#if !defined(__linux__)
#error "llmmem/checkpoint/termination.hpp needs Linux: signals as files (signalfd)."
#endif

#include <pthread.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <string>
#include <system_error>

namespace llmmem {
inline namespace v0 {

/// Blocks a signal so that it does not end the process, and reports whether it arrived. Schedulers send
/// SIGTERM some time before they kill a process, enough for one more checkpoint.
///
///     const termination_request termination;         // before any other thread is started
///     for (...) {
///       step();
///       if (termination.is_requested()) {
///         const snapshot_guard guard = checkpointer.begin_snapshot(step, view);
///         checkpointer.flush(20'000'000'000);          // at most 20 s
///         break;
///       }
///     }
///
/// No handler runs, and no other state of the program changes. Threads inherit the blocked signal from the
/// thread that starts them. In an older thread the signal is not blocked, and ends the process. Programs also
/// inherit it across `exec`: if a program should end by the signal, start it with the signal unblocked
/// (`posix_spawnattr_setsigmask`, or `pthread_sigmask` between fork and exec). When this object is destroyed,
/// the signal has its former effect; a signal that arrived and that no call has reported then ends the
/// process.
///
/// Keep the guard past the flush: if it is dropped at once, as by `begin_snapshot(...).ticket()`, its
/// destructor first waits until the snapshot has been copied, regardless of the flush's time limit. Even so,
/// the guard's destructor waits for up to `max_stall_ns`, and the checkpointer's until all checkpoints are
/// complete. A process that cannot wait that long ends with `_exit`.
///
/// @par Thread safety   constructed and destroyed by one thread, checked by any.
/// @par Errors          the constructor throws `argument_error` for an invalid signal, and `system_error`.
class termination_request {
 public:
  explicit termination_request(int signal = SIGTERM) {
    sigset_t wanted;
    ::sigemptyset(&wanted);
    if (signal == SIGKILL || signal == SIGSTOP || ::sigaddset(&wanted, signal) != 0) {
      throw argument_error("termination_request: " + std::to_string(signal) +
                           " is not a signal that can be blocked");
    }
    if (const int error = ::pthread_sigmask(SIG_BLOCK, &wanted, &before_); error != 0) refuse(signal, error);
    file_ = ::signalfd(-1, &wanted, SFD_NONBLOCK | SFD_CLOEXEC);
    if (file_ >= 0) return;
    const int error = errno;
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    refuse(signal, error);
  }
  termination_request(const termination_request&) = delete;
  termination_request& operator=(const termination_request&) = delete;
  ~termination_request() {
    ::close(file_);
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

  /// Returns whether the signal arrived; once true, it stays true. A signal reported here no longer ends the
  /// process.
  [[nodiscard]] bool is_requested() const noexcept {
    signalfd_siginfo told{};
    while (::read(file_, &told, sizeof told) == static_cast<ssize_t>(sizeof told))
      came_.store(true, std::memory_order_relaxed);
    return came_.load(std::memory_order_relaxed);
  }
  [[nodiscard, deprecated("call is_requested()")]] bool is_there() const noexcept { return is_requested(); }

 private:
  [[noreturn]] static void refuse(int signal, int error) {
    throw system_error("termination_request: signal " + std::to_string(signal) +
                       " cannot be blocked: " + std::generic_category().message(error));
  }

  sigset_t before_{};
  mutable std::atomic<bool> came_{false};
  int file_ = -1;
};

}  // namespace v0
}  // namespace llmmem
