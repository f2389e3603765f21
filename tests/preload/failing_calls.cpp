/// @file
/// Preloaded into a program: calls on files below a folder fail at random, move fewer bytes than they were
/// given, or end the process.
///
/// - `FAILING_PATH`      a part of the paths that are meant
/// - `FAILING_SEED`, `FAILING_PERMILLE`, `FAILING_FROM`   which calls fail: so many of a thousand, from that
/// one on
/// - `FAILING_KILL_AT`   the call at which the process ends, as after SIGKILL
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

struct failing {
  const char* path = nullptr;
  std::uint64_t permille = 0;
  std::uint64_t from = 0;
  std::uint64_t kill_at = 0;
  std::atomic<std::uint64_t> state{0};
  std::atomic<std::uint64_t> calls{0};
};
failing how;

std::uint64_t number_of(const char* name) {
  const char* const text = std::getenv(name);
  return text == nullptr ? 0 : std::strtoull(text, nullptr, 10);
}

[[gnu::constructor]] void begin() {
  how.permille = number_of("FAILING_PERMILLE");
  how.from = number_of("FAILING_FROM");
  how.kill_at = number_of("FAILING_KILL_AT");
  how.state = number_of("FAILING_SEED") * 0x9E37'79B9'7F4A'7C15U + 1;
  how.path = std::getenv("FAILING_PATH");
}

std::uint64_t drawn() {
  std::uint64_t x = how.state.fetch_add(0x9E37'79B9'7F4A'7C15U);
  x = (x ^ x >> 30) * 0xBF58'476D'1CE4'E5B9U;
  x = (x ^ x >> 27) * 0x94D0'49BB'1331'11EBU;
  return x ^ x >> 31;
}

bool is_meant(const char* path) {
  return how.path != nullptr && path != nullptr && std::strstr(path, how.path) != nullptr;
}
bool is_meant(int file) {
  if (how.path == nullptr || file <= STDERR_FILENO) return false;
  char link[64];
  char target[4096];
  ::snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  const ssize_t bytes = ::readlink(link, target, sizeof target - 1);
  if (bytes <= 0) return false;
  target[bytes] = '\0';
  return is_meant(target);
}

/// 0: the call is made. Otherwise its error number.
int error_of_next() {
  const std::uint64_t call = ++how.calls;
  if (call == how.kill_at) ::_exit(137);
  if (call < how.from || drawn() % 1000 >= how.permille) return 0;
  constexpr int errors[] = {EIO, ENOSPC, EINTR, EDQUOT};
  return errors[drawn() % 4];
}

template <class Call>
Call* real(const char* name) {
  return reinterpret_cast<Call*>(::dlsym(RTLD_NEXT, name));
}

template <class Call, class... Args>
int tried(bool meant, const char* name, Args... args) {
  if (meant) {
    if (const int error = error_of_next(); error != 0) {
      errno = error;
      return -1;
    }
  }
  return real<Call>(name)(args...);
}

/// Of a transfer that fails, every fourth moves some of the bytes.
template <class Call, class Bytes>
ssize_t moved(const char* name, int file, Bytes* bytes, std::size_t count, off_t offset) {
  if (is_meant(file)) {
    if (const int error = error_of_next(); error != 0) {
      if (drawn() % 4 != 0 || count < 2) {
        errno = error;
        return -1;
      }
      count = 1 + static_cast<std::size_t>(drawn() % (count - 1));
    }
  }
  return real<Call>(name)(file, bytes, count, offset);
}

using write_at = ssize_t(int, const void*, std::size_t, off_t);
using read_at = ssize_t(int, void*, std::size_t, off_t);
using of_file = int(int);
using of_path = int(const char*);
using of_paths = int(const char*, const char*);

}  // namespace

#pragma GCC diagnostic ignored "-Wmissing-declarations"
#pragma GCC diagnostic ignored "-Wredundant-decls"

extern "C" {

ssize_t pwrite(int file, const void* bytes, std::size_t count, off_t offset) {
  return moved<write_at>("pwrite", file, bytes, count, offset);
}
ssize_t pwrite64(int file, const void* bytes, std::size_t count, off64_t offset) {
  return moved<write_at>("pwrite", file, bytes, count, offset);
}
ssize_t pread(int file, void* bytes, std::size_t count, off_t offset) {
  return moved<read_at>("pread", file, bytes, count, offset);
}
ssize_t pread64(int file, void* bytes, std::size_t count, off64_t offset) {
  return moved<read_at>("pread", file, bytes, count, offset);
}
int fsync(int file) {
  return tried<of_file>(is_meant(file), "fsync", file);
}
int fdatasync(int file) {
  return tried<of_file>(is_meant(file), "fdatasync", file);
}
int rename(const char* from, const char* to) noexcept {
  return tried<of_paths>(is_meant(from), "rename", from, to);
}
int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned int flags) noexcept {
  return tried<int(int, const char*, int, const char*, unsigned int)>(
      is_meant(from), "renameat2", from_folder, from, to_folder, to, flags);
}
int mkdir(const char* path, mode_t mode) noexcept {
  return tried<int(const char*, mode_t)>(is_meant(path), "mkdir", path, mode);
}
int unlink(const char* path) noexcept {
  return tried<of_path>(is_meant(path), "unlink", path);
}
int rmdir(const char* path) noexcept {
  return tried<of_path>(is_meant(path), "rmdir", path);
}
int link(const char* from, const char* to) noexcept {
  return tried<of_paths>(is_meant(from), "link", from, to);
}
int ftruncate(int file, off_t bytes) noexcept {
  return tried<int(int, off_t)>(is_meant(file), "ftruncate", file, bytes);
}
int fallocate(int file, int mode, off_t offset, off_t bytes) {
  return tried<int(int, int, off_t, off_t)>(is_meant(file), "fallocate", file, mode, offset, bytes);
}
int open(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(more, mode_t) : 0;
  va_end(more);
  return tried<int(const char*, int, ...)>(is_meant(path), "open", path, flags, mode);
}
DIR* opendir(const char* path) {
  if (is_meant(path)) {
    if (const int error = error_of_next(); error != 0) {
      errno = error;
      return nullptr;
    }
  }
  return real<DIR*(const char*)>("opendir")(path);
}
}
