/// @file
/// Names of files that survive a crash: a folder's names are durable only once the folder itself is synced.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/errors.hpp>
#include <llmmem/space/file.hpp>

#if !defined(__linux__)
#error "llmmem/space/folder.hpp needs Linux: folders that can be synced."
#endif

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <string>

namespace llmmem {
inline namespace v0 {

/// Returns once the names in the folder of `path` are on the device: files created, renamed and removed
/// there.
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

/// Renames the file `from` to `to`, replacing an existing file, and returns once that is on the device. At
/// any time and after any crash, a reader that opens `to` finds one file or the other, complete; of `from`,
/// only bytes that were synced before.
///
/// @par Errors   `errc::write_failed` when it was not renamed, `errc::sync_failed` when it was but may not
///   survive a crash; `where` is `to`.
inline result<void> replace_file(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0)
    return failure{errc::write_failed, static_cast<std::uint32_t>(errno), 0, 0, to.c_str()};
  return sync_folder_of(to);
}

/// The folder of a file, held open: the file's name in it stays valid wherever the process goes, and however
/// the folder is renamed.
///
/// @par Errors   the constructor throws `io_error`.
class open_folder {
 public:
  /// @param path  of a file in it, which need not exist.
  explicit open_folder(const std::string& path) : name_(path.substr(path.rfind('/') + 1)) {
    const std::string folder = path.substr(0, path.size() - name_.size());
    folder_ = detail::open_again(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY, 0);
    if (folder_ < 0) detail::cannot_open(path, "its folder cannot be opened", errno);
  }
  open_folder(const open_folder&) = delete;
  open_folder& operator=(const open_folder&) = delete;
  ~open_folder() { ::close(folder_); }

  [[nodiscard]] int descriptor() const noexcept { return folder_; }
  /// The name of the file in the folder.
  [[nodiscard]] const std::string& name() const noexcept LLMMEM_LIFETIMEBOUND { return name_; }
  /// As `sync_folder_of`: returns the system's error number, or 0.
  [[nodiscard]] int sync() const noexcept {
    while (::fsync(folder_) != 0) {
      if (errno != EINTR) return errno;
    }
    return 0;
  }

 private:
  std::string name_;
  int folder_ = -1;
};

}  // namespace v0
}  // namespace llmmem
