/// @file
/// The signals that a write can raise and that would end the process: SIGXFSZ (past `ulimit -f`) and SIGPIPE.
/// While they are blocked, the write fails with EFBIG or EPIPE, an ordinary error.
#pragma once

#include <llmmem/config.hpp>

#include <signal.h>
#include <time.h>

#include <cerrno>
#include <initializer_list>

namespace llmmem {
inline namespace v0 {
namespace detail {

[[nodiscard]] inline sigset_t write_signals() noexcept {
  sigset_t set;
  ::sigemptyset(&set);
  ::sigaddset(&set, SIGXFSZ);
  ::sigaddset(&set, SIGPIPE);
  return set;
}

/// Blocks them permanently, for a thread that the library owns.
inline void block_write_signals() noexcept {
  const sigset_t set = write_signals();
  ::pthread_sigmask(SIG_BLOCK, &set, nullptr);
}

/// Blocks them for a caller's thread while this object lives. It discards signals raised in that time at the
/// end, if they were reported by `raised`. It restores the thread's mask and `errno`.
///
/// @par Complexity   two system calls; some more if a signal was raised.
class write_signals_held {
 public:
  write_signals_held() noexcept {
    const sigset_t set = write_signals();
    ::pthread_sigmask(SIG_BLOCK, &set, &before_);
  }
  write_signals_held(const write_signals_held&) = delete;
  write_signals_held& operator=(const write_signals_held&) = delete;
  ~write_signals_held() {
    const int error = errno;
    if (is_raised_) take_raised();
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    errno = error;
  }

  /// Reports that a call may have raised a signal: takes its error number, of which two come with a signal.
  void raised(int error = EFBIG) noexcept { is_raised_ = is_raised_ || error == EFBIG || error == EPIPE; }

 private:
  void take_raised() const noexcept {
    sigset_t pending;
    ::sigpending(&pending);
    for (const int each : {SIGXFSZ, SIGPIPE}) {
      // Signals that the thread itself had blocked are left alone.
      if (::sigismember(&pending, each) != 1 || ::sigismember(&before_, each) == 1) continue;
      sigset_t one;
      ::sigemptyset(&one);
      ::sigaddset(&one, each);
      const timespec at_once{};
      while (::sigtimedwait(&one, nullptr, &at_once) < 0 && errno == EINTR) {
      }
    }
  }

  sigset_t before_{};
  bool is_raised_ = false;
};

/// Returns the result of `call` with these signals blocked. @param call  returns less than 0 when it fails,
/// with `errno`.
template <class Call>
[[nodiscard]] auto without_write_signals(Call call) noexcept {
  write_signals_held held;
  const auto given = call();
  if (given < 0) held.raised(errno);
  return given;
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
