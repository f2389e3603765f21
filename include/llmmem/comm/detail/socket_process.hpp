/// @file
/// Identifies the process at the other end of a socket, according to the kernel.
#pragma once

#include <llmmem/comm/detail/socket_descriptor.hpp>
#include <llmmem/comm/detail/socket_wire.hpp>
#include <llmmem/config.hpp>

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string_view>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Returns the process that listens at a Unix address, or called from it, as far as this process may know it.
[[nodiscard]] inline ucred credentials_of(int socket) noexcept {
  ucred who{};
  socklen_t size = sizeof(who);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &who, &size) != 0) return {0, ~uid_t{0}, ~gid_t{0}};
  return who;
}

[[nodiscard]] inline descriptor open_process(std::uint32_t pid) noexcept {
  if (pid == 0) return {};
#if defined(SYS_pidfd_open)
  return descriptor(static_cast<int>(::syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0U)));
#else
  return {};
#endif
}

/// Returns the process at the other end of a connected Unix socket. Avoids the process number if the system
/// can (Linux 6.5), because a number may belong to another process by then.
[[nodiscard]] inline descriptor open_peer_process(int socket) noexcept {
  constexpr int so_peerpidfd = 77;
  int made = -1;
  socklen_t size = sizeof(made);
  if (::getsockopt(socket, SOL_SOCKET, so_peerpidfd, &made, &size) == 0 && made >= 0) return descriptor(made);
  return open_process(static_cast<std::uint32_t>(credentials_of(socket).pid));
}

[[nodiscard]] inline bool has_exited(const descriptor& process) noexcept {
  pollfd asked{process.get(), POLLIN, 0};
  return process.is_open() && ::poll(&asked, 1, 0) == 1 && (asked.revents & POLLIN) != 0;
}

inline void kill_process(const descriptor& process) noexcept {
#if defined(SYS_pidfd_send_signal)
  ::syscall(SYS_pidfd_send_signal, process.get(), SIGKILL, nullptr, 0U);
#endif
}

/// Returns a TCP address as the kernel lists it in /proc/net/tcp and tcp6: the words of the address as
/// numbers of this machine, then the port. Empty for other families.
[[nodiscard]] inline std::array<char, 48> listed_address(const sockaddr_storage& address) noexcept {
  std::array<char, 48> text{};
  std::array<std::uint32_t, 4> words{};
  std::size_t count = 0;
  unsigned port = 0;
  if (address.ss_family == AF_INET) {
    sockaddr_in of{};
    std::memcpy(&of, &address, sizeof(of));
    words[0] = of.sin_addr.s_addr;
    count = 1;
    port = ntohs(of.sin_port);
  } else if (address.ss_family == AF_INET6) {
    sockaddr_in6 of{};
    std::memcpy(&of, &address, sizeof(of));
    std::memcpy(words.data(), &of.sin6_addr, sizeof(words));
    count = words.size();
    port = ntohs(of.sin6_port);
  } else {
    return text;
  }
  for (std::size_t i = 0; i < count; ++i)
    std::snprintf(text.data() + 8 * i, 9, "%08X", words[i]);
  std::snprintf(text.data() + 8 * count, 6, ":%04X", port & 0xFFFFU);
  return text;
}

/// Returns the kernel's number of the socket at the other end of a TCP connection within this machine; 0 if
/// it lists none.
[[nodiscard]] inline unsigned long number_of_other_end(int socket) noexcept {
  sockaddr_storage here{};
  sockaddr_storage there{};
  socklen_t here_bytes = sizeof(here);
  socklen_t there_bytes = sizeof(there);
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&here), &here_bytes) != 0 ||
      ::getpeername(socket, reinterpret_cast<sockaddr*>(&there), &there_bytes) != 0)
    return 0;
  const std::array<char, 48> local = listed_address(there);
  const std::array<char, 48> remote = listed_address(here);
  std::FILE* const list = std::fopen(there.ss_family == AF_INET6 ? "/proc/net/tcp6" : "/proc/net/tcp", "re");
  if (list == nullptr) return 0;
  unsigned long found = 0;
  char line[512];
  while (found == 0 && std::fgets(line, sizeof(line), list) != nullptr) {
    char from[48]{};
    char to[48]{};
    unsigned long number = 0;
    if (std::sscanf(line, "%*s %47s %47s %*s %*s %*s %*s %*s %*s %lu", from, to, &number) == 3 &&
        std::strcmp(from, local.data()) == 0 && std::strcmp(to, remote.data()) == 0)
      found = number;
  }
  std::fclose(list);
  return found;
}

/// Whether a process of this machine holds the other end of a TCP connection, according to the kernel's list
/// of its descriptors. Takes as long as listing the connections of the machine and the descriptors of the
/// process.
[[nodiscard]] inline bool holds_other_end(std::uint32_t pid, int socket) noexcept {
  const unsigned long number = number_of_other_end(socket);
  if (number == 0 || pid == 0) return false;
  char wanted[48];
  std::snprintf(wanted, sizeof(wanted), "socket:[%lu]", number);
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%u/fd", pid);
  ::DIR* const folder = ::opendir(path);
  if (folder == nullptr) return false;
  bool is_held = false;
  while (const ::dirent* const each = is_held ? nullptr : ::readdir(folder)) {
    char target[48]{};
    const ssize_t bytes = ::readlinkat(::dirfd(folder), each->d_name, target, sizeof(target) - 1);
    is_held = bytes > 0 && std::strcmp(target, wanted) == 0;
  }
  ::closedir(folder);
  return is_held;
}

/// Returns the number of a pidfd's process in this process's name space; 0 if it has none there.
[[nodiscard]] inline std::uint32_t pid_of(const descriptor& process) noexcept {
  char path[48];
  std::snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", process.get());
  std::FILE* const file = process.is_open() ? std::fopen(path, "re") : nullptr;
  if (file == nullptr) return 0;
  int found = 0;
  char line[128];
  while (std::fgets(line, sizeof(line), file) != nullptr) {
    if (std::sscanf(line, "Pid: %d", &found) == 1) break;
  }
  std::fclose(file);
  return found > 0 ? static_cast<std::uint32_t>(found) : 0;
}

/// The name of the heartbeat thread, by which other processes look for it.
inline constexpr const char* beat_thread_name = "llmmem-beat";

/// Whether a process with a heartbeat thread runs, or would if it had a core, according to the kernel: false
/// if it is stopped, or all threads wait for something else. (The heartbeat thread may wait for a thread that
/// has no core.) False if the kernel does not report it.
[[nodiscard]] inline bool wants_core(const descriptor& process) noexcept {
  const std::uint32_t pid = pid_of(process);
  if (pid == 0) return false;
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%u/task", pid);
  ::DIR* const folder = ::opendir(path);
  if (folder == nullptr) return false;
  bool has_beats = false;
  bool is_runnable = false;
  while (const ::dirent* const each = has_beats && is_runnable ? nullptr : ::readdir(folder)) {
    if (each->d_name[0] == '.') continue;
    char stat[32];
    std::snprintf(stat, sizeof(stat), "%.20s/stat", each->d_name);
    const descriptor file(::openat(::dirfd(folder), stat, O_RDONLY | O_CLOEXEC));
    char text[256] = {};
    if (!file.is_open() || ::read(file.get(), text, sizeof(text) - 1) <= 0) continue;
    // As "1234 (name) R ...", with any characters in the name.
    const char* const name_at = std::strchr(text, '(');
    const char* const end = std::strrchr(text, ')');
    if (name_at == nullptr || end == nullptr) continue;
    has_beats = has_beats || std::string_view(name_at + 1, end) == beat_thread_name;
    is_runnable = is_runnable || (end[1] == ' ' && end[2] == 'R');
  }
  ::closedir(folder);
  return has_beats && is_runnable;
}

/// Returns an id of this run of this machine: all zero if unknown.
[[nodiscard]] inline incarnation_id boot_of_machine() noexcept {
  incarnation_id id{};
  char text[64] = {};
  const descriptor file(::open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));
  if (!file.is_open() || ::read(file.get(), text, sizeof(text) - 1) <= 0) return id;
  std::size_t digits = 0;
  for (const char* at = text; *at != '\0' && digits < 2 * id.size(); ++at) {
    const char c = *at;
    const int value = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
    if (value < 0) continue;
    id[digits / 2] |= static_cast<std::byte>(value << (digits % 2 == 0 ? 4 : 0));
    ++digits;
  }
  return id;
}

[[nodiscard]] inline std::uint64_t pid_space_of_process() noexcept {
  struct ::stat seen{};
  return ::stat("/proc/self/ns/pid", &seen) == 0 ? static_cast<std::uint64_t>(seen.st_ino) : 0;
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
