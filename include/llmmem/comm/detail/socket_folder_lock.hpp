/// @file
/// The lock of a folder of sockets: two processes that start together take it one after the other.
#pragma once

#include <llmmem/comm/detail/socket_descriptor.hpp>
#include <llmmem/config.hpp>
#include <llmmem/detail/monotonic.hpp>
#include <llmmem/error.hpp>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Returns the process that holds the lock of an open file, as far as the system reports it; otherwise 0.
[[nodiscard]] inline pid_t lock_holder(const descriptor& file) {
  struct ::stat seen{};
  const descriptor locks(::open("/proc/locks", O_RDONLY | O_CLOEXEC));
  if (::fstat(file.get(), &seen) != 0 || !locks.is_open()) return 0;
  std::string text;
  char part[4096];
  for (ssize_t got = 0; (got = ::read(locks.get(), part, sizeof(part))) > 0;)
    text.append(part, static_cast<std::size_t>(got));
  // 12: FLOCK  ADVISORY  WRITE 4711 fd:01:1234 0 EOF
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = text.find('\n', at);
    const std::string line = text.substr(at, end - at);
    at = end == std::string::npos ? text.size() : end + 1;
    int holder = 0;
    unsigned major = 0;
    unsigned minor = 0;
    unsigned long long inode = 0;
    if (std::sscanf(line.c_str(), "%*s FLOCK %*s %*s %d %x:%x:%llu", &holder, &major, &minor, &inode) != 4)
      continue;
    if (inode == seen.st_ino && ::makedev(major, minor) == seen.st_dev && holder > 0) return holder;
  }
  return 0;
}

/// Locks a folder: closing the descriptor unlocks it.
/// @param path         ends with '/'
/// @param patience_ns  how long another process may hold it
/// @throws system_error
[[nodiscard]] inline descriptor lock_folder(const std::string& path, std::uint64_t patience_ns) {
  descriptor folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  const std::string which = "socket_endpoint: folder '" + path + "'";
  if (!folder.is_open()) throw system_error(which + because(errno) + "; create it first");
  const std::uint64_t began = monotonic_ns();
  while (::flock(folder.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) throw system_error(which + ": flock" + because(errno));
    if (monotonic_ns() - began >= patience_ns) {
      const pid_t holder = lock_holder(folder);
      throw system_error(which + " has been locked for " + std::to_string(patience_ns / 1'000'000) +
                         " ms by " + (holder == 0 ? "another process" : "process " + std::to_string(holder)) +
                         ", although the lock is needed only briefly to begin listening; end that process, "
                         "or use another folder");
    }
    const timespec moment{0, 1'000'000};
    ::nanosleep(&moment, nullptr);
  }
  return folder;
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
