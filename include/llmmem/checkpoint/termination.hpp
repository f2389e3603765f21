/// @file
/// `termination_request`: SIGTERM as something to ask for between two steps.
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

/// Holds a signal back from ending the process, and tells whether it came: schedulers send SIGTERM some time
/// before they kill, enough for one more checkpoint.
///
///     const termination_request termination;         // before any other thread is started
///     for (...) {
///       step();
///       if (termination.is_there()) {
///         const snapshot_guard guard = checkpointer.begin_snapshot(step, view);
///         checkpointer.flush(20'000'000'000);          // 20 s; what is not safe by then is not
///         break;
///       }
///     }
///
/// No handler runs, and no state of the program's is changed behind its back. Threads inherit what is held
/// back from the one that starts them: one that was there before still dies of the signal, and all with it.
/// Programs inherit it, too, across `exec`: one that is to die of the signal must be started with it let
/// through (`posix_spawnattr_setsigmask`, or `pthread_sigmask` between fork and exec). When this goes, the
/// signal does what it did before; one that came and was never asked for then ends the process.
///
/// The guard is kept past the flush: dropped at once, as by `begin_snapshot(...).ticket()`, it first waits
/// until the snapshot has been copied, whatever time the flush is given. It does so when it goes in any case,
/// for up to `max_stall_ns`, and the checkpointer waits until all is over: who cannot wait for that either
/// ends the process by `_exit`.
///
/// @par Thread safety   made and destroyed by one thread, asked by any.
/// @par Errors          the constructor throws `argument_error` for what is no signal, and `system_error`.
class termination_request {
 public:
  explicit termination_request(int signal = SIGTERM) {
    sigset_t wanted;
    ::sigemptyset(&wanted);
    if (signal == SIGKILL || signal == SIGSTOP || ::sigaddset(&wanted, signal) != 0) {
      throw argument_error("termination_request: " + std::to_string(signal) +
                           " is no signal that can be held back");
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

  /// Whether the signal came; it stays so. The process will not end of one that was told here.
  [[nodiscard]] bool is_there() const noexcept {
    signalfd_siginfo told{};
    while (::read(file_, &told, sizeof told) == static_cast<ssize_t>(sizeof told))
      came_.store(true, std::memory_order_relaxed);
    return came_.load(std::memory_order_relaxed);
  }

 private:
  [[noreturn]] static void refuse(int signal, int error) {
    throw system_error("termination_request: signal " + std::to_string(signal) +
                       " cannot be held back: " + std::generic_category().message(error));
  }

  sigset_t before_{};
  mutable std::atomic<bool> came_{false};
  int file_ = -1;
};

}  // namespace v0
}  // namespace llmmem
