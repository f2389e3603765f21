/// @file
/// A folder for the Unix sockets of a job's processes.
#pragma once

#include <llmmem/error.hpp>

#include <fmt/format.h>
#include <stdlib.h>

#include <cerrno>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>

namespace example {

/// @throws llmmem::system_error  with `what` and the reason of `errno`.
[[noreturn]] inline void throw_errno(std::string_view what) {
  throw llmmem::system_error(fmt::format("{}: {}", what, std::generic_category().message(errno)));
}

/// Creates the folder, and removes it with its contents at the end. A forked child's destructor would, too,
/// so children end by `_exit`.
class socket_folder {
 public:
  /// @throws llmmem::system_error
  socket_folder() {
    std::error_code none;
    const std::filesystem::path where = std::filesystem::temp_directory_path(none);
    if (none) {
      throw llmmem::system_error("a folder for the ranks' sockets: TMPDIR: " + none.message() +
                                 "; set it to one that can be written to");
    }
    std::string name = (where / "llmmem-ranks-").string() + std::string(6, 'X');
    if (::mkdtemp(name.data()) == nullptr) throw_errno("a folder " + name);
    path_ = name;
  }
  socket_folder(const socket_folder&) = delete;
  socket_folder& operator=(const socket_folder&) = delete;
  ~socket_folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  [[nodiscard]] const std::string& path() const noexcept { return path_; }

 private:
  std::string path_;
};

}  // namespace example
