/// @file
/// Processes and threads of a benchmark that find each other on this machine.
#pragma once

#include <llmmem/comm/socket_endpoint.hpp>

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "support/bench_folder.hpp"
#include "support/loopback.hpp"

namespace llmmem_bench {

/// An environment variable, or its default.
[[nodiscard]] inline std::uint32_t number(const char* name, std::uint32_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : static_cast<std::uint32_t>(std::strtoul(text, nullptr, 10));
}

enum class socket_kind : std::uint8_t { local, tcp };

/// Options of `seats` endpoints that differ only in `seat`.
[[nodiscard]] inline llmmem::socket_options job_options(socket_kind of, std::uint32_t seats,
                                                        const bench_folder& folder) {
  llmmem::socket_options options{.seats = seats, .secret = "of the benchmarks"};
  if (of == socket_kind::local) {
    options.folder = folder.path();
  } else {
    options.addresses = llmmem_tests::free_addresses(seats);
  }
  return options;
}

/// A forked process, which ends with the result of `live`; the destructor kills it if it still lives.
class bench_process {
 public:
  template <class Live>
  explicit bench_process(Live live) : pid_(::fork()) {
    if (pid_ < 0) throw std::runtime_error("fork");
    if (pid_ != 0) return;
    int how = 1;
    try {
      how = live();
    } catch (...) {
      how = 2;
    }
    ::_exit(how);
  }
  bench_process(bench_process&& other) noexcept : pid_(std::exchange(other.pid_, -1)) {}
  bench_process& operator=(bench_process&&) = delete;
  ~bench_process() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    static_cast<void>(wait());
  }

  [[nodiscard]] pid_t pid() const noexcept { return pid_; }
  /// How it ended.
  int wait() noexcept {
    int status = 0;
    ::waitpid(std::exchange(pid_, -1), &status, 0);
    return status;
  }

 private:
  pid_t pid_;
};

}  // namespace llmmem_bench
