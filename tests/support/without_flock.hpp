/// @file
/// A process in which flock fails, as on a file system that has none.
#pragma once

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

namespace llmmem_tests {

/// Makes a system call fail with that number in this process and its children. @return whether the system
/// allows that.
inline bool refuse_call(long call, int number) {
  sock_filter program[] = {
      {BPF_LD | BPF_W | BPF_ABS, 0, 0, 0},  // the call's number
      {BPF_JMP | BPF_JEQ | BPF_K, 0, 1, static_cast<std::uint32_t>(call)},
      {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ERRNO | static_cast<std::uint32_t>(number)},
      {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW},
  };
  const sock_fprog filter{.len = 4, .filter = program};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

inline bool refuse_flock(int number) {
  return refuse_call(__NR_flock, number);
}

/// A forked child that does some work and tells one text at a time to its parent.
class told_child {
 public:
  /// @param work  called in the child with a function that tells a text, and one that waits for the parent.
  template <class Work>
  explicit told_child(Work work) {
    if (::pipe(up_) != 0 || ::pipe(down_) != 0) throw std::runtime_error("no pipe");
    child_ = ::fork();
    if (child_ < 0) throw std::runtime_error("cannot fork");
    if (child_ != 0) {
      ::close(std::exchange(up_[1], -1));
      ::close(std::exchange(down_[0], -1));
      return;
    }
    ::close(up_[0]);
    ::close(down_[1]);
    try {
      work([this](const std::string& text) { tell(text); },
           [this] {
             char got = 0;
             return ::read(down_[0], &got, 1) == 1;
           });
    } catch (const std::exception& error) {
      tell(std::string("thrown: ") + error.what());
    }
    ::_exit(0);
  }
  told_child(const told_child&) = delete;
  told_child& operator=(const told_child&) = delete;
  ~told_child() {
    if (child_ > 0) end();
    for (const int each : {up_[0], down_[1]})
      if (each >= 0) ::close(each);
  }

  /// The next text, or "ended".
  [[nodiscard]] std::string next() {
    std::string text;
    char got = 0;
    while (::read(up_[0], &got, 1) == 1) {
      if (got == '\n') return text;
      text += got;
    }
    return text.empty() ? "ended" : text;
  }
  [[nodiscard]] ::pid_t process() const noexcept { return child_; }
  void let_go_on() const { static_cast<void>(::write(down_[1], "!", 1) == 1); }
  void send(int signal) const { ::kill(child_, signal); }
  /// Kills it. @param waits  false: it stays a zombie.
  void end(bool waits = true) {
    ::kill(child_, SIGKILL);
    siginfo_t how{};
    ::waitid(P_PID, static_cast<id_t>(child_), &how, WEXITED | (waits ? 0 : WNOWAIT));
    if (waits) child_ = -1;
  }

 private:
  void tell(const std::string& text) const {
    const std::string line = text + "\n";
    static_cast<void>(::write(up_[1], line.data(), line.size()) > 0);
  }

  int up_[2] = {-1, -1};
  int down_[2] = {-1, -1};
  ::pid_t child_ = -1;
};

}  // namespace llmmem_tests
