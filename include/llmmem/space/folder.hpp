/// @file
/// Names of files that outlast a crash: what a folder says is durable only once the folder itself is synced.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/result.hpp>

#if !defined(__linux__)
#error "llmmem/space/folder.hpp needs Linux: folders that can be synced."
#endif

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <string>

namespace llmmem::inline v0 {

/// Returns once the names in the folder of `path` are on the device: files made, renamed and removed there.
///
/// @par Errors   `errc::sync_failed` with the system's error number; `where` is `path`.
inline result<void> sync_folder_of(const std::string& path) {
  const auto slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
  const auto failed = [&](int error) {
    return failure{errc::sync_failed, static_cast<std::uint32_t>(error), 0, 0, path.c_str()};
  };
  int opened = -1;
  do {
    opened = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  } while (opened < 0 && errno == EINTR);
  if (opened < 0) return failed(errno);
  int error = 0;
  while (error == 0 && ::fsync(opened) != 0) {
    if (errno != EINTR) error = errno;
  }
  ::close(opened);
  return error == 0 ? result<void>{} : result<void>(failed(error));
}

/// Gives the file `from` the name `to`, in place of a file that has it, and returns once that is on the
/// device. Whoever opens `to`, at any time and after any crash, finds one file or the other, whole; of `from`
/// only what was synced before.
///
/// @par Errors   `errc::write_failed` when the name was not given, `errc::sync_failed` when it was and
///      may not outlast a crash; `where` is `to`.
inline result<void> replace_file(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0)
    return failure{errc::write_failed, static_cast<std::uint32_t>(errno), 0, 0, to.c_str()};
  return sync_folder_of(to);
}

}  // namespace llmmem::inline v0
