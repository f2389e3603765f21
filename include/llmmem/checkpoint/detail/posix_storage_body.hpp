/// @file
/// The calls of `posix_storage`.
#pragma once

#include <llmmem/checkpoint/posix_storage.hpp>
#include <llmmem/space/errors.hpp>
#include <llmmem/space/folder.hpp>

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace llmmem {
inline namespace v0 {

namespace detail {

inline void check_storage_path(storage_call call, const std::string& path) {
  if (path.find('\0') != std::string::npos)
    throw storage_error(call, std::string(path.c_str()), 0, "the path contains a zero byte");
}

/// Opens and closes, to report a refusal with its error number. Does not wait for a writer of a pipe of that
/// name, and does not follow a link out of the folder.
inline void try_open(storage_call call, const std::string& path, int flags, std::uint32_t permissions,
                     symbolic_links links = symbolic_links::refuse) {
  const int no_link = links == symbolic_links::refuse ? O_NOFOLLOW : 0;
  const int file = open_again(path.c_str(), flags | O_NONBLOCK | no_link, permissions);
  struct ::stat seen{};
  if (file < 0) {
    const int number = errno;
    const bool is_link = number == ELOOP && ::lstat(path.c_str(), &seen) == 0 && S_ISLNK(seen.st_mode);
    throw storage_error(call, path, number,
                        is_link ? "it is a symbolic link, which is not followed; put the file itself there "
                                  "(the folder of a whole checkpoint may be a link, a file of it may not)"
                                : "");
  }
  const bool is_regular = ::fstat(file, &seen) == 0 && S_ISREG(seen.st_mode);
  ::close(file);
  if (!is_regular)
    throw storage_error(call, path, S_ISDIR(seen.st_mode) ? EISDIR : EINVAL, "it is not a regular file");
}

/// Returns the kind of a name in a folder; not every file system reports it when it lists. A name that the
/// system cannot examine is an error: a temporary problem must not hide a checkpoint from a list.
[[nodiscard]] inline storage_entry::kind kind_of(int folder, const dirent& entry, const std::string& path) {
  if (entry.d_type == DT_REG) return storage_entry::kind::file;
  if (entry.d_type == DT_DIR) return storage_entry::kind::folder;
  if (entry.d_type == DT_LNK) return storage_entry::kind::link;
  if (entry.d_type != DT_UNKNOWN) return storage_entry::kind::other;
  struct ::stat seen{};
  if (::fstatat(folder, entry.d_name, &seen, AT_SYMLINK_NOFOLLOW) != 0) {
    if (errno == ENOENT) return storage_entry::kind::other;  // it was removed in between
    throw storage_error(storage_call::list, path, errno, std::string("of ") + entry.d_name);
  }
  return S_ISREG(seen.st_mode)   ? storage_entry::kind::file
         : S_ISDIR(seen.st_mode) ? storage_entry::kind::folder
         : S_ISLNK(seen.st_mode) ? storage_entry::kind::link
                                 : storage_entry::kind::other;
}

/// Fills `into` from one descriptor, up to the end of the file.
[[nodiscard]] inline int read_through(int file, std::uint64_t offset, std::span<std::byte> into,
                                      std::size_t& done) noexcept {
  while (done < into.size()) {
    const ssize_t got =
        ::pread(file, into.data() + done, into.size() - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno;
    if (got == 0) return 0;
    done += static_cast<std::size_t>(got);
  }
  return 0;
}

}  // namespace detail

template <io_engine Engine>
posix_storage<Engine>::posix_storage(const std::string& root, posix_storage_options options)
    : options_(std::move(options)) {
  detail::check_storage_path(storage_call::make_folder, root);
  if (options_.missing == missing_root::make) make_root(root);
  char* const absolute = ::realpath(root.c_str(), nullptr);
  if (absolute == nullptr) throw storage_error(storage_call::open, root, errno);
  root_ = absolute;
  ::free(absolute);
  struct ::stat seen{};
  if (::stat(root_.c_str(), &seen) != 0) throw storage_error(storage_call::open, root_, errno);
  if (!S_ISDIR(seen.st_mode)) throw storage_error(storage_call::open, root_, ENOTDIR);
  queue_ = std::make_unique<file_queue<Engine>>(options_.queue);
}

/// Makes each folder's name durable before anything in it.
template <io_engine Engine>
void posix_storage<Engine>::make_root(const std::string& root) {
  for (std::size_t slash = 0; slash != std::string::npos && !root.empty();) {
    slash = root.find('/', slash + 1);
    const std::string part = root.substr(0, slash);
    if (::mkdir(part.c_str(), static_cast<mode_t>(options_.folder_permissions)) == 0) {
      if (const result<void> synced = sync_folder_of(part); !synced)
        throw storage_error(storage_call::sync_folder, part, static_cast<int>(synced.error().index));
    } else if (errno != EEXIST) {
      // No permission is needed above an existing folder.
      const int number = errno;
      struct ::stat seen{};
      if (::stat(part.c_str(), &seen) != 0) throw storage_error(storage_call::make_folder, part, number);
    }
  }
}

template <io_engine Engine>
std::string posix_storage<Engine>::checked_path(storage_call call, const std::string& below) const {
  std::string whole = path(below);
  detail::check_storage_path(call, whole);
  return whole;
}

template <io_engine Engine>
void posix_storage<Engine>::make_folder(const std::string& below) {
  const std::string whole = checked_path(storage_call::make_folder, below);
  if (::mkdir(whole.c_str(), static_cast<mode_t>(options_.folder_permissions)) != 0)
    throw storage_error(storage_call::make_folder, whole, errno);
}

template <io_engine Engine>
auto posix_storage<Engine>::create(const std::string& below, std::uint64_t bytes) -> output {
  const std::string whole = checked_path(storage_call::create, below);
  detail::try_open(storage_call::create, whole, O_RDWR | O_CREAT | O_EXCL, options_.file_permissions);
  std::unique_ptr<io_file> file;
  try {
    file = std::make_unique<io_file>(whole, file_options{open_mode::update, options_.direct});
  } catch (const file_error& error) {
    ::unlink(whole.c_str());
    throw storage_error(storage_call::create, whole, error.number());
  } catch (const io_error& error) {
    ::unlink(whole.c_str());
    throw storage_error(storage_call::create, whole, 0, error.what());
  }
  if (const result<void> reserved = file->reserve(0, bytes); !reserved) {
    file.reset();
    ::unlink(whole.c_str());
    throw storage_error(storage_call::reserve, whole, static_cast<int>(reserved.error().index),
                        std::to_string(bytes) + " bytes");
  }
  return output(*queue_, std::move(file));
}

template <io_engine Engine>
auto posix_storage<Engine>::open(const std::string& below) -> input {
  const std::string whole = checked_path(storage_call::open, below);
  detail::try_open(storage_call::open, whole, O_RDONLY, 0, options_.links);
  try {
    input opened(std::make_unique<io_file>(whole, file_options{open_mode::read, options_.direct}));
    const result<std::uint64_t> size = opened.file_->size();
    if (!size) throw storage_error(storage_call::open, whole, static_cast<int>(size.error().index));
    opened.bytes_ = *size;
    return opened;
  } catch (const storage_error&) {
    throw;
  } catch (const file_error& error) {  // it may have been removed in between
    throw storage_error(storage_call::open, whole, error.number());
  } catch (const io_error& error) {
    throw storage_error(storage_call::open, whole, 0, error.what());
  }
}

template <io_engine Engine>
void posix_storage<Engine>::rename(const std::string& from, const std::string& to) {
  const std::string old_name = checked_path(storage_call::rename, from);
  const std::string new_name = checked_path(storage_call::rename, to);
  if (::renameat2(AT_FDCWD, old_name.c_str(), AT_FDCWD, new_name.c_str(), RENAME_NOREPLACE) != 0)
    throw storage_error(storage_call::rename, new_name, errno, "its name is still " + old_name);
}

template <io_engine Engine>
void posix_storage<Engine>::replace(const std::string& from, const std::string& to) {
  const std::string whole = checked_path(storage_call::replace, to);
  if (::rename(checked_path(storage_call::replace, from).c_str(), whole.c_str()) != 0)
    throw storage_error(storage_call::replace, whole, errno);
}

template <io_engine Engine>
void posix_storage<Engine>::link(const std::string& from, const std::string& to) {
  const std::string whole = checked_path(storage_call::link, to);
  const std::string old_name = checked_path(storage_call::link, from);
  if (::link(old_name.c_str(), whole.c_str()) != 0)
    throw storage_error(storage_call::link, whole, errno, "to " + old_name);
}

template <io_engine Engine>
void posix_storage<Engine>::remove(const std::string& below) {
  const std::string whole = checked_path(storage_call::remove, below);
  if (::unlink(whole.c_str()) != 0) throw storage_error(storage_call::remove, whole, errno);
}

template <io_engine Engine>
void posix_storage<Engine>::remove_folder(const std::string& below) {
  const std::string whole = checked_path(storage_call::remove_folder, below);
  if (::rmdir(whole.c_str()) != 0) throw storage_error(storage_call::remove_folder, whole, errno);
}

template <io_engine Engine>
std::vector<storage_entry> posix_storage<Engine>::list(const std::string& below) {
  const std::string whole = checked_path(storage_call::list, below);
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir(whole.c_str()), &::closedir);
  if (folder == nullptr) throw storage_error(storage_call::list, whole, errno);
  std::vector<storage_entry> found;
  for (;;) {
    errno = 0;
    const dirent* const each = ::readdir(folder.get());
    if (each == nullptr) break;
    const std::string name = each->d_name;
    if (name == "." || name == "..") continue;
    found.push_back({name, detail::kind_of(::dirfd(folder.get()), *each, whole)});
  }
  if (errno != 0) throw storage_error(storage_call::list, whole, errno);
  return found;
}

template <io_engine Engine>
void posix_storage<Engine>::sync_folder(const std::string& below) {
  const std::string whole = checked_path(storage_call::sync_folder, below);
  if (const result<void> synced = sync_folder_of(whole + "/"); !synced)
    throw storage_error(storage_call::sync_folder, whole, static_cast<int>(synced.error().index));
}

template <io_engine Engine>
auto posix_storage<Engine>::try_lock(const std::string& below) -> std::optional<lock_type> {
  const std::string whole = checked_path(storage_call::lock, below);
  constexpr int most_tries = 16;
  for (int tries = 0; tries < most_tries; ++tries) {
    detail::try_open(storage_call::lock, whole, O_RDWR | O_CREAT, options_.file_permissions);
    const file_options how{.mode = open_mode::create,
                           .direct = direct_io::never,
                           .permissions = options_.file_permissions,
                           .locks = options_.locks,
                           .lease_ns = options_.lease_ns};
    auto file = std::make_unique<io_file>(whole, how);
    std::optional<file_lock> lock;
    try {
      lock = file_lock::try_take(*file, how, &leases_);
    } catch (const file_error& error) {
      throw storage_error(storage_call::lock, whole, error.number(), error.what());
    } catch (const io_error& error) {
      throw storage_error(storage_call::lock, whole, 0, error.what());
    }
    if (!lock) return std::nullopt;
    file->unlock_at_end();  // even if a forked child still has the open file
    // Between opening and locking it may have been removed: then the lock protects nothing.
    lock_type held(std::move(file), std::move(*lock));
    if (held.is_held()) return held;
  }
  throw storage_error(storage_call::lock, whole, 0,
                      std::to_string(most_tries) +
                          " times it was removed while it was locked, or its lease ran out before that was "
                          "over; a lease of " +
                          std::to_string(options_.lease_ns) +
                          " ns may be too short for this file system: set a longer lease_ns");
}

template <io_engine Engine>
std::uint64_t posix_storage<Engine>::nonce() {
  std::uint64_t drawn = 0;
  while (::getrandom(&drawn, sizeof drawn, 0) != static_cast<ssize_t>(sizeof drawn)) {
    if (errno != EINTR) throw system_error(root_ + ": no random number: " + std::strerror(errno));
  }
  return drawn;
}

template <io_engine Engine>
auto posix_storage<Engine>::output::begin_write(std::uint64_t offset, std::span<const std::byte> bytes)
    -> write_token {
  pending_.reserve(pending_.size() + 1);  // a write that was begun must be waited for
  const result<transfer_fence> begun =
      queue_->start(write_to(*file_, offset, bytes), transfer::urgency::write_back);
  if (!begun) told(begun.error());
  pending_.push_back(*begun);
  return *begun;
}

template <io_engine Engine>
void posix_storage<Engine>::output::finish_write(const write_token& token) {
  for (std::size_t i = 0; i < pending_.size(); ++i) {
    if (pending_[i] != token) continue;
    pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(i));
    return told(token.conclude());
  }
}

template <io_engine Engine>
void posix_storage<Engine>::output::sync() {
  while (!pending_.empty()) {
    const transfer_fence last = pending_.back();
    pending_.pop_back();
    told(last.conclude());
  }
  if (failed_) throw storage_error(storage_call::sync, file_->path(), 0, "a write to it failed before");
  if (const result<void> synced = file_->sync(); !synced)
    throw storage_error(storage_call::sync, file_->path(), static_cast<int>(synced.error().index));
}

template <io_engine Engine>
void posix_storage<Engine>::output::told(const result<void>& how) {
  if (how) return;
  failed_ = true;
  const failure& why = how.error();
  // Failures of the queue itself have no system error number.
  const bool of_file = why.code == errc::write_failed;
  throw storage_error(
      storage_call::write, file_->path(), of_file ? static_cast<int>(why.index) : 0,
      of_file ? std::to_string(why.wanted) + " bytes at offset " + std::to_string(why.found) : why.message());
}

template <io_engine Engine>
void posix_storage<Engine>::input::read(std::uint64_t offset, std::span<std::byte> into) const {
  const auto failed = [&](int number, std::string detail) {
    return storage_error(
        storage_call::read, file_->path(), number,
        std::to_string(into.size()) + " bytes at offset " + std::to_string(offset) + std::move(detail));
  };
  if (offset > bytes_ || into.size() > bytes_ - offset)
    throw failed(0, ", but the file ends at " + std::to_string(bytes_));
  std::size_t done = 0;
  const direct_limits& limits = file_->limits();
  const auto address = reinterpret_cast<std::uintptr_t>(into.data());
  if (file_->direct() >= 0 && offset % limits.offset_alignment == 0 &&
      address % limits.memory_alignment == 0) {
    const std::size_t whole = into.size() / limits.offset_alignment * limits.offset_alignment;
    const int number = detail::read_through(file_->direct(), offset, into.first(whole), done);
    if (number == EINVAL) {
      file_->reject_direct();
    } else if (number != 0) {
      throw failed(number, {});
    }
  }
  if (const int number = detail::read_through(file_->buffered(), offset, into, done); number != 0)
    throw failed(number, {});
  if (done < into.size()) throw failed(0, ", but the file was truncated while it was read");
}

template <io_engine Engine>
bool posix_storage<Engine>::lock_type::is_held() const noexcept {
  struct ::stat ours{};
  struct ::stat named{};
  return ::fstat(file_->buffered(), &ours) == 0 && ::lstat(file_->path().c_str(), &named) == 0 &&
         ours.st_dev == named.st_dev && ours.st_ino == named.st_ino && lock_.is_held();
}

}  // namespace v0
}  // namespace llmmem
