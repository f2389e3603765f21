/// @file
/// A program that is started, watched, and killed.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace llmmem_tests {

/// How a program ended.
struct ending {
  int status = -1;  ///< its exit status, -1 when a signal ended it
  int signal = 0;   ///< which
};

/// A child with its output in two files; killed when this goes.
class child_process {
 public:
  child_process(const std::string& program, const std::vector<std::string>& arguments, const std::string& out,
                const std::string& notes) {
    std::vector<char*> all{const_cast<char*>(program.c_str())};
    for (const std::string& each : arguments)
      all.push_back(const_cast<char*>(each.c_str()));
    all.push_back(nullptr);
    child_ = ::fork();
    if (child_ < 0) throw std::runtime_error("cannot fork");
    if (child_ == 0) {
      redirect(out, STDOUT_FILENO);
      redirect(notes, STDERR_FILENO);
      ::execv(program.c_str(), all.data());
      ::_exit(127);
    }
  }
  child_process(const child_process&) = delete;
  child_process& operator=(const child_process&) = delete;
  ~child_process() {
    if (child_ <= 0) return;
    ::kill(child_, SIGKILL);
    static_cast<void>(wait());
  }

  void send(int signal) const { ::kill(child_, signal); }
  /// Returns when it has ended.
  ending wait() {
    int told = 0;
    while (::waitpid(child_, &told, 0) < 0 && errno == EINTR) {
    }
    child_ = -1;
    if (WIFEXITED(told)) return {WEXITSTATUS(told), 0};
    return {-1, WTERMSIG(told)};
  }

 private:
  static void redirect(const std::string& path, int to) {
    const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (file < 0 || ::dup2(file, to) < 0) ::_exit(126);
  }

  ::pid_t child_ = -1;
};

inline std::string contents_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = text.find('\n', at);
    lines.push_back(text.substr(at, end - at));
    if (end == std::string::npos) break;
    at = end + 1;
  }
  return lines;
}

}  // namespace llmmem_tests
