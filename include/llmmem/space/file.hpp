/// @file
/// `io_file`: an open file, with the means to bypass the page cache where possible, and the reason where it
/// is not.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/write_signals.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/errors.hpp>

#if !defined(__linux__)
#error "llmmem/space/file.hpp needs Linux: O_DIRECT, statx and fallocate."
#endif

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// How a file is opened.
enum class open_mode : std::uint8_t {
  read,        ///< it must exist
  update,      ///< it must exist, and may be written
  create,      ///< created if it does not exist; existing contents stay
  create_new,  ///< it must not exist yet
};

/// Whether bytes should bypass the page cache (O_DIRECT).
enum class direct_io : std::uint8_t {
  preferred,  ///< if file system and device allow it
  required,   ///< otherwise it is an error
  never,
};

/// Why the bytes of a file go through the page cache.
enum class fallback_reason : std::uint8_t {
  none,         ///< they do not
  not_asked,    ///< `direct_io::never`
  refused,      ///< the file system refused to open it for direct I/O
  unsupported,  ///< it opens so, but reports that it cannot do it
  rejected,     ///< it opens so, but refused a transfer within its limits
};

/// Returns the reason as a clause.
[[nodiscard]] constexpr std::string_view to_string(fallback_reason why) noexcept {
  switch (why) {
    case fallback_reason::none:
      return "direct";
    case fallback_reason::not_asked:
      return "direct I/O was not requested";
    case fallback_reason::refused:
      return "the file system does not open files for direct I/O";
    case fallback_reason::unsupported:
      return "the file system reports that it has no direct I/O for this file";
    case fallback_reason::rejected:
      return "the file system refused a direct transfer with the required alignment";
  }
  return "unknown";
}

/// A file's requirements for direct transfers.
struct direct_limits {
  std::uint64_t offset_alignment = 4096;  ///< of offset and length
  std::uint64_t memory_alignment = 4096;  ///< of the address
};

/// What prevents two processes, or two objects in one, from writing to the same file.
enum class file_locks : std::uint8_t {
  system,      ///< flock; a lease file (`file_lock`) if the file system has no flock
  lease_file,  ///< a lease file, also where there is flock: for a folder that other machines mount without it
  caller       ///< the caller does. No lock is taken
};

/// The options for opening a file.
struct file_options {
  open_mode mode = open_mode::create;
  direct_io direct = direct_io::preferred;
  std::uint32_t permissions = 0600;       ///< of a new file, before the umask
  file_locks locks = file_locks::system;  ///< for users of the file that lock it
  /// How long a lease file stays valid after its last renewal, 1 ms to 10 minutes. When a process of another
  /// machine was killed, the next one waits for this time and an eighth; while it lives, for a quarter of it,
  /// 2 s at most. A process that is stopped for this time loses the lock.
  std::uint64_t lease_ns = 30'000'000'000;
};

/// A file that the system does not open, or not as requested.
class file_error : public io_error {
 public:
  file_error(const std::string& text, int number) : io_error(text), number_(number) {}

  /// The system's error number, as in `errno`.
  [[nodiscard]] int number() const noexcept { return number_; }

 private:
  int number_;
};

namespace detail {

/// fdatasync: the system's error number, or 0.
[[nodiscard]] inline int sync_data(int file) noexcept {
  while (::fdatasync(file) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

}  // namespace detail

/// An open file, block device or character device. Transfers refer to it by address: it does not move, and
/// must outlive them and the failures recorded about them.
///
/// If direct I/O is possible it holds two descriptors, one for whole aligned blocks past the page cache and
/// one for the rest at either end, like KvikIO's "opportunistic direct I/O". File systems in memory (tmpfs)
/// also open files this way, but have nothing to bypass.
///
/// @par Thread safety   any threads may call everything `const` concurrently; the system orders the rest.
/// @par Errors          the constructor throws `file_error` with path and errno, `io_error` if the system
///   would open it but this class does not; the rest are values.
class io_file {
 public:
  explicit io_file(std::string path, const file_options& options = {});
  io_file(const io_file&) = delete;
  io_file& operator=(const io_file&) = delete;
  ~io_file() {
    if (unlocks_ && locked_by_ == ::getpid()) ::flock(buffered_, LOCK_UN);
    if (direct_ >= 0) ::close(direct_);
    if (buffered_ >= 0) ::close(buffered_);
  }

  [[nodiscard]] const std::string& path() const noexcept LLMMEM_LIFETIMEBOUND { return path_; }
  [[nodiscard]] bool is_writable() const noexcept { return writable_; }

  /// The descriptors: through the page cache, and past it (-1 if that is not possible).
  [[nodiscard]] int buffered() const noexcept { return buffered_; }
  [[nodiscard]] int direct() const noexcept {
    return rejected_.load(std::memory_order_relaxed) ? -1 : direct_;
  }

  /// The direct descriptor as opened, whether or not transfers still use it.
  [[nodiscard]] int opened_direct() const noexcept { return direct_; }

  /// The requirements for direct transfers; meaningful only if `direct()` is not -1. Offsets are aligned to
  /// whole pages at least, so that no page is written both through the cache and past it.
  [[nodiscard]] const direct_limits& limits() const noexcept { return limits_; }

  /// Why there is no direct I/O, and the system's error number if there is one.
  [[nodiscard]] fallback_reason fallback() const noexcept {
    return rejected_.load(std::memory_order_relaxed) ? fallback_reason::rejected : fallback_;
  }
  [[nodiscard]] int fallback_errno() const noexcept { return fallback_errno_; }

  /// Reports EINVAL for a direct transfer within the limits: from here on none is made.
  void reject_direct() const noexcept { rejected_.store(true, std::memory_order_relaxed); }

  /// Returns the bytes of the file or device.
  [[nodiscard]] result<std::uint64_t> size() const noexcept {
    struct stat status{};
    if (::fstat(buffered_, &status) != 0) return failed(errc::read_failed, errno, 0, 0);
    if (!S_ISBLK(status.st_mode)) return static_cast<std::uint64_t>(status.st_size);
    const off_t end = ::lseek(buffered_, 0, SEEK_END);  // nothing else uses the position
    if (end < 0) return failed(errc::read_failed, errno, 0, 0);
    return static_cast<std::uint64_t>(end);
  }

  /// Sets the length; added bytes read as zero.
  result<void> resize(std::uint64_t bytes) noexcept {
    return grown([&] { return ::ftruncate(buffered_, static_cast<off_t>(bytes)); }, bytes, 0);
  }

  /// Allocates space on the device for `[offset, offset + bytes)` now, so that writing there cannot fail for
  /// lack of it. A file system that cannot do so only extends the file. After a refusal some space may have
  /// been allocated: `punch` releases it. 0 bytes have no effect, here and below.
  result<void> reserve(std::uint64_t offset, std::uint64_t bytes) noexcept;

  /// Releases the space there; it reads as zero from then on. `errc::grow_failed` if that is not possible.
  result<void> punch(std::uint64_t offset, std::uint64_t bytes) noexcept {
    if (bytes == 0) return {};
    return grown(
        [&] {
          return ::fallocate(buffered_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                             static_cast<off_t>(offset), static_cast<off_t>(bytes));
        },
        bytes, offset);
  }

  /// Copies bytes within the file, on the calling thread. @pre the two runs do not overlap.
  result<void> copy(std::uint64_t to, std::uint64_t from, std::uint64_t bytes) noexcept;

  /// Returns once all written data, and what is needed to read it, is on the device (fdatasync). After a
  /// failure nothing is known of the data written since the last success: the system may have dropped it, and
  /// would report success for the next sync (Rebello et al., "Can Applications Recover from fsync Failures?",
  /// 2020). So every later sync fails too: write data that must last to another file. The name of a new file
  /// is part of its folder, which must be synced separately.
  result<void> sync() noexcept {
    if (sync_error_.load(std::memory_order_relaxed) == 0) {
      const int error = detail::sync_data(buffered_);
      if (error == 0) return {};
      sync_error_.store(error, std::memory_order_relaxed);
    }
    return failed(errc::sync_failed, sync_error_.load(std::memory_order_relaxed), 0, 0);
  }

  /// Replaces the open file by another one that took its name, and closes the old one. This object owns the
  /// descriptor from here on; earlier sync failures concerned the old file.
  /// @pre nothing is in flight, and direct I/O was not requested.
  void replace(int descriptor) noexcept {
    ::close(std::exchange(buffered_, descriptor));
    sync_error_.store(0, std::memory_order_relaxed);
  }

  /// Locks the file for this object alone, against other processes and objects that also lock it (flock).
  /// Released when the object or the process ends; a forked child shares it.
  result<void> lock() noexcept {
    while (::flock(buffered_, LOCK_EX | LOCK_NB) != 0) {
      if (errno == EINTR) continue;
      return failed(errno == EWOULDBLOCK ? errc::file_locked : errc::not_opened, errno, 0, 0);
    }
    locked_by_ = ::getpid();
    return {};
  }
  /// Ends the lock now.
  void release_lock() noexcept {
    ::flock(buffered_, LOCK_UN);
    locked_by_ = -1;
  }
  /// Makes the lock end with the object, even if others still have the open file: a kernel releases the files
  /// of an I/O ring some time after the ring. Not for a file to which a device may still write. No effect in
  /// a forked child.
  void unlock_at_end() noexcept { unlocks_ = true; }

 private:
  [[nodiscard]] failure failed(error_code code, int error, std::uint64_t bytes,
                               std::uint64_t offset) const noexcept {
    return {code, static_cast<std::uint32_t>(error), bytes, offset, path_.c_str()};
  }

  template <class Call>
  result<void> grown(Call call, std::uint64_t bytes, std::uint64_t offset) noexcept {
    if (!writable_) return failed(errc::not_opened, 0, bytes, offset);
    static_assert(sizeof(off_t) == sizeof(std::uint64_t), "files past 2 GiB");
    if (bytes > max_bytes || offset > max_bytes - bytes) {
      return failed(errc::grow_failed, EFBIG, bytes, offset);
    }
    while (detail::without_write_signals(call) != 0) {
      if (errno != EINTR) return failed(errc::grow_failed, errno, bytes, offset);
    }
    return {};
  }

  [[nodiscard]] result<std::uint64_t> copy_some(std::uint64_t to, std::uint64_t from,
                                                std::uint64_t bytes) noexcept;
  void open_buffered(int flags, std::uint32_t permissions);
  void open_direct(int flags);
  void read_limits();

  std::string path_;
  int buffered_ = -1;
  int direct_ = -1;
  bool writable_ = false;
  bool unlocks_ = false;
  ::pid_t locked_by_ = -1;
  fallback_reason fallback_ = fallback_reason::none;
  int fallback_errno_ = 0;
  mutable std::atomic<bool> rejected_{false};
  std::atomic<int> sync_error_{0};  // of the first failed sync
  direct_limits limits_;
};

namespace detail {

[[noreturn]] LLMMEM_COLD inline void cannot_open(const std::string& path, const char* what, int error) {
  throw file_error(path + ": " + what + ": " + std::generic_category().message(error) + " (errno " +
                       std::to_string(error) + ")",
                   error);
}

[[nodiscard]] inline int open_again(const char* path, int flags, std::uint32_t permissions) noexcept {
  int file = -1;
  do {
    file = ::open(path, flags | O_CLOEXEC | O_NOCTTY, static_cast<mode_t>(permissions));
  } while (file < 0 && errno == EINTR);
  return file;
}

}  // namespace detail

inline io_file::io_file(std::string path, const file_options& options)
    : path_(std::move(path)), writable_(options.mode != open_mode::read) {
  int flags = writable_ ? O_RDWR : O_RDONLY;
  if (options.mode == open_mode::create) flags |= O_CREAT;
  if (options.mode == open_mode::create_new) flags |= O_CREAT | O_EXCL;
  try {
    open_buffered(flags, options.permissions);
    // Reads of a few bytes at either end must not bring in pages that direct transfers own.
    ::posix_fadvise(buffered_, 0, 0, POSIX_FADV_RANDOM);
    if (options.direct == direct_io::never) {
      fallback_ = fallback_reason::not_asked;
      return;
    }
    open_direct(writable_ ? O_RDWR : O_RDONLY);
    if (direct_ < 0 && options.direct == direct_io::required) {
      throw io_error(path_ + ": direct I/O is required, but " + std::string(to_string(fallback_)) +
                     "; use another file system, or direct_io::preferred");
    }
  } catch (...) {
    if (direct_ >= 0) ::close(direct_);
    if (buffered_ >= 0) ::close(buffered_);
    throw;
  }
}

/// Does not wait for a writer of a pipe of that name.
inline void io_file::open_buffered(int flags, std::uint32_t permissions) {
  if (path_.find('\0') != std::string::npos) {
    throw io_error(std::string(path_.c_str()) + ": cannot be opened: the path contains a zero byte");
  }
  buffered_ = detail::open_again(path_.c_str(), flags | O_NONBLOCK, permissions);
  if (buffered_ < 0) detail::cannot_open(path_, "cannot be opened", errno);
  struct stat status{};
  if (::fstat(buffered_, &status) != 0) detail::cannot_open(path_, "cannot be examined", errno);
  if (S_ISDIR(status.st_mode)) detail::cannot_open(path_, "cannot be opened", EISDIR);
  if (!S_ISREG(status.st_mode) && !S_ISBLK(status.st_mode) && !S_ISCHR(status.st_mode)) {
    throw io_error(path_ + ": cannot be opened: it is a pipe or a socket, which has no offsets");
  }
  const int now = ::fcntl(buffered_, F_GETFL);
  if (now < 0 || ::fcntl(buffered_, F_SETFL, now & ~O_NONBLOCK) < 0) {
    detail::cannot_open(path_, "cannot be set up", errno);
  }
}

inline void io_file::open_direct(int flags) {
  // By descriptor, not by path: the name may lead elsewhere by now.
  const std::string same = "/proc/self/fd/" + std::to_string(buffered_);
  direct_ = detail::open_again(same.c_str(), flags | O_DIRECT, 0);
  if (direct_ < 0 && errno == ENOENT) direct_ = detail::open_again(path_.c_str(), flags | O_DIRECT, 0);
  if (direct_ < 0) {
    fallback_ = fallback_reason::refused;
    fallback_errno_ = errno;
    return;
  }
  read_limits();
}

inline void io_file::read_limits() {
  const long page = ::sysconf(_SC_PAGESIZE);
  const std::uint64_t page_bytes = page > 0 ? static_cast<std::uint64_t>(page) : 65536;
  limits_ = {page_bytes, page_bytes};
#if defined(STATX_DIOALIGN)
  struct statx status{};
  if (::statx(direct_, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) == 0 &&
      (status.stx_mask & STATX_DIOALIGN) != 0) {
    if (status.stx_dio_offset_align == 0 || status.stx_dio_mem_align == 0) {
      fallback_ = fallback_reason::unsupported;
      ::close(std::exchange(direct_, -1));
      return;
    }
    limits_.offset_alignment =
        status.stx_dio_offset_align > page_bytes ? status.stx_dio_offset_align : page_bytes;
    limits_.memory_alignment = status.stx_dio_mem_align;
  }
#endif
}

inline result<void> io_file::reserve(std::uint64_t offset, std::uint64_t bytes) noexcept {
  if (bytes == 0) return {};
  const result<void> reserved =
      grown([&] { return ::fallocate(buffered_, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes)); },
            bytes, offset);
  if (reserved || (reserved.error().index != EOPNOTSUPP && reserved.error().index != ENOSYS)) return reserved;
  const result<std::uint64_t> now = size();
  if (!now) return now.error();
  return *now >= offset + bytes ? result<void>{} : resize(offset + bytes);
}

/// Returns the bytes that one call moved; 0 at the end of the file.
inline result<std::uint64_t> io_file::copy_some(std::uint64_t to, std::uint64_t from,
                                                std::uint64_t bytes) noexcept {
  auto source = static_cast<off_t>(from);
  auto destination = static_cast<off_t>(to);
  detail::write_signals_held held;
  ssize_t moved = ::copy_file_range(buffered_, &source, buffered_, &destination, bytes, 0);
  if (moved < 0) held.raised(errno);
  if (moved >= 0) return static_cast<std::uint64_t>(moved);
  if (errno == EINTR) return copy_some(to, from, bytes);
  if (errno != ENOSYS && errno != EOPNOTSUPP && errno != EXDEV && errno != EINVAL) {
    return failed(errc::write_failed, errno, bytes, to);
  }
  // Not every file system or device has the call.
  std::byte part[16384];
  const std::size_t once = bytes < sizeof part ? static_cast<std::size_t>(bytes) : sizeof part;
  do {
    moved = ::pread(buffered_, part, once, source);
  } while (moved < 0 && errno == EINTR);
  if (moved < 0) return failed(errc::read_failed, errno, bytes, from);
  const auto count = static_cast<std::size_t>(moved);
  if (count == 0) return std::uint64_t{0};
  do {
    moved = ::pwrite(buffered_, part, count, destination);
  } while (moved < 0 && errno == EINTR);
  if (moved < 0) held.raised(errno);
  if (moved <= 0) return failed(errc::write_failed, moved < 0 ? errno : 0, bytes, to);
  return static_cast<std::uint64_t>(moved);
}

inline result<void> io_file::copy(std::uint64_t to, std::uint64_t from, std::uint64_t bytes) noexcept {
  if (!writable_) return failed(errc::not_opened, 0, bytes, to);
  if (bytes > max_bytes || from > max_bytes - bytes || to > max_bytes - bytes) {
    return failed(errc::write_failed, EFBIG, bytes, to);
  }
  while (bytes != 0) {
    const result<std::uint64_t> moved = copy_some(to, from, bytes);
    if (!moved) return moved.error();
    if (*moved == 0) return failure{errc::file_ends, 0, from + bytes, from, path_.c_str()};
    to += *moved;
    from += *moved;
    bytes -= *moved;
  }
  return {};
}

namespace detail {

/// Whether a refusal with this number means that the file system has no locks.
[[nodiscard]] constexpr bool has_no_locks(int number) noexcept {
  return number == ENOLCK || number == ENOSYS || number == EOPNOTSUPP || number == EINVAL;
}

}  // namespace detail

}  // namespace v0
}  // namespace llmmem
