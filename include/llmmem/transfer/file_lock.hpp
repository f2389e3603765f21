/// @file
/// `file_lock`: a file that one object has for itself, by flock or by a lease file.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/write_signals.hpp>
#include <llmmem/error.hpp>
#include <llmmem/space/errors.hpp>
#include <llmmem/space/file.hpp>
#include <llmmem/transfer/detail/lease.hpp>

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// A folder whose names are read. `get` is null, with `errno`, if it cannot be opened.
class open_folder {
 public:
  explicit open_folder(const std::string& path) noexcept : folder_(::opendir(path.c_str())) {}
  open_folder(const open_folder&) = delete;
  open_folder& operator=(const open_folder&) = delete;
  ~open_folder() {
    if (folder_ != nullptr) ::closedir(folder_);
  }

  [[nodiscard]] DIR* get() const noexcept { return folder_; }

 private:
  DIR* folder_;
};

/// Reads a short file as a whole, up to 4 KiB. Sets `errno` where there is none.
[[nodiscard]] inline std::optional<std::string> read_short(const char* path) {
  const int file = open_again(path, O_RDONLY | O_NONBLOCK | O_NOFOLLOW, 0);
  if (file < 0) return std::nullopt;
  char bytes[4096];
  std::size_t done = 0;
  while (done < sizeof bytes) {
    const ssize_t got = ::read(file, bytes + done, sizeof bytes - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      const int error = errno;
      ::close(file);
      errno = error;
      return std::nullopt;
    }
    if (got == 0) break;
    done += static_cast<std::size_t>(got);
  }
  ::close(file);
  return std::string(bytes, done);
}

[[nodiscard]] inline std::string link_target(const char* path) {
  char bytes[256];
  const ssize_t got = ::readlink(path, bytes, sizeof bytes);
  return got > 0 ? std::string(bytes, static_cast<std::size_t>(got)) : std::string();
}

/// The number of a process, its start, and whether it ended but was not waited for; nothing if that cannot be
/// read.
struct process_status {
  std::uint64_t start = 0;
  bool is_zombie = false;
};
[[nodiscard]] inline std::optional<process_status> status_of(::pid_t process) {
  const std::optional<std::string> text = read_short(("/proc/" + std::to_string(process) + "/stat").c_str());
  if (!text) return std::nullopt;
  // 4711 (any name) S ... : the third field follows the last bracket, the start is the 22nd
  std::size_t at = text->rfind(')');
  if (at == std::string::npos || at + 2 >= text->size()) return std::nullopt;
  const char state = (*text)[at + 2];
  ++at;
  for (int field = 3; field < 22; ++field) {
    at = text->find(' ', at + 1);
    if (at == std::string::npos) return std::nullopt;
  }
  return process_status{std::strtoull(text->c_str() + at + 1, nullptr, 10), state == 'Z' || state == 'X'};
}

/// Returns this process as the owner of a lease. Two processes with the same place have the same kernel, and
/// their process numbers and times since its start mean the same.
[[nodiscard]] inline lease_owner this_process() {
  lease_owner owner{.process = ::getpid()};
  ::utsname system{};
  if (::uname(&system) == 0) owner.host = system.nodename;
  for (char& each : owner.host) {
    if (each == '\n') each = ' ';
  }
  const std::optional<process_status> own = status_of(::getpid());
  const std::optional<std::string> boot = read_short("/proc/sys/kernel/random/boot_id");
  const std::string numbers = link_target("/proc/self/ns/pid");
  // /proc may be that of other process numbers.
  const bool is_own = link_target("/proc/self") == std::to_string(::getpid());
  if (!own || !boot || boot->size() < 36 || numbers.empty() || !is_own) return owner;
  owner.start = own->start;
  owner.place = boot->substr(0, 36) + " " + numbers + " " + link_target("/proc/self/ns/time");
  return owner;
}

/// Whether the kernel vouches that this owner, of the same place, has ended.
[[nodiscard]] inline bool has_ended(const lease_owner& owner, const lease_owner& self) {
  if (self.place.empty() || owner.place != self.place || owner.process <= 0) return false;
  const auto process = static_cast<::pid_t>(owner.process);
  if (::kill(process, 0) != 0 && errno == ESRCH) return true;
  const std::optional<process_status> now = status_of(process);
  if (!now) return false;  // of another user, whose processes are hidden
  if (now->start != owner.start) return true;
  if (!now->is_zombie) return false;
  // The first thread may have ended before the others.
  const std::string tasks = "/proc/" + std::to_string(process) + "/task";
  const open_folder folder(tasks);
  if (folder.get() == nullptr) return false;
  int count = 0;
  while (const dirent* const each = ::readdir(folder.get()))
    count += each->d_name[0] != '.' ? 1 : 0;
  return count == 1;
}

/// The leases of a file: `.leases/NAME.<number>` in the file's folder.
class lease_folder {
 public:
  /// @param path  of the file that is locked, without symbolic links.
  lease_folder(std::string path, std::uint32_t permissions)
      : path_(std::move(path)), permissions_(permissions), owner_(this_process()) {
    const std::size_t slash = path_.rfind('/');
    stem_ = slash == std::string::npos ? path_ : path_.substr(slash + 1);
    folder_ = (slash == std::string::npos ? std::string() : path_.substr(0, slash + 1)) + ".leases";
  }
  lease_folder(const lease_folder&) = delete;
  lease_folder& operator=(const lease_folder&) = delete;
  ~lease_folder() {
    if (own_ >= 0) ::close(own_);
  }

  [[nodiscard]] std::string name() const { return folder_ + "/" + stem_; }

  [[nodiscard]] std::vector<std::uint64_t> numbers() const {
    std::vector<std::uint64_t> found;
    const open_folder folder(folder_);
    if (folder.get() == nullptr) {
      if (errno == ENOENT) return found;
      cannot_open(folder_, "the folder of leases cannot be listed", errno);
    }
    for (;;) {
      errno = 0;
      const dirent* const each = ::readdir(folder.get());
      if (each == nullptr) break;
      if (const auto number = number_of(each->d_name)) found.push_back(*number);
    }
    if (errno != 0) cannot_open(folder_, "the folder of leases cannot be listed", errno);
    return found;
  }

  [[nodiscard]] std::optional<std::string> read(std::uint64_t number) const {
    const std::string file = file_of(number);
    std::optional<std::string> text = read_short(file.c_str());
    if (!text && errno != ENOENT && errno != ESTALE) cannot_open(file, "the lease cannot be read", errno);
    return text;
  }

  /// By a link to a complete file: then no other process sees a part of it, and old versions of NFS, where
  /// O_EXCL is no guarantee, are served as well. Where there are no links, by O_EXCL.
  [[nodiscard]] bool create(std::uint64_t number, const std::string& text) {
    if (::mkdir(folder_.c_str(), static_cast<mode_t>(permissions_ | ((permissions_ & 0444U) >> 2))) != 0 &&
        errno != EEXIST)
      cannot_open(folder_, "the folder of leases cannot be created", errno);
    const std::string file = file_of(number);
    const std::string draft = name() + ".new-" + token();
    if (!create_file(draft)) cannot_open(draft, "the lease cannot be created", EEXIST);
    try {
      write(text);
    } catch (...) {
      ::unlink(draft.c_str());
      throw;
    }
    const int error = ::link(draft.c_str(), file.c_str()) == 0 ? 0 : errno;
    struct ::stat own{};
    // The answer of a file server may be lost, and its repetition finds the name taken.
    const bool is_made = error == 0 || (::fstat(own_, &own) == 0 && own.st_nlink == 2);
    ::unlink(draft.c_str());
    if (is_made) return true;
    if (error == EEXIST || error == ENOENT) return false;  // a holder removed the draft
    if (error != EPERM && error != EOPNOTSUPP && error != ENOSYS && error != EMLINK && error != EINVAL)
      cannot_open(file, "the lease cannot be created", error);
    if (!create_file(file)) return false;
    try {
      write(text);
    } catch (...) {
      ::unlink(file.c_str());
      throw;
    }
    return true;
  }

  void write(const std::string& text) const {
    write_signals_held held;
    std::size_t done = 0;
    while (done < text.size()) {
      const ssize_t put = ::pwrite(own_, text.data() + done, text.size() - done, static_cast<off_t>(done));
      if (put < 0 && errno == EINTR) continue;
      if (put < 0) held.raised(errno);
      if (put <= 0) cannot_open(name(), "the lease cannot be written", put < 0 ? errno : EIO);
      done += static_cast<std::size_t>(put);
    }
    // So that other machines see it.
    if (const int error = sync_data(own_); error != 0 && error != EINVAL && error != ENOSYS)
      cannot_open(name(), "the lease cannot be written", error);
  }

  [[nodiscard]] bool is_named(std::uint64_t number) const noexcept {
    struct ::stat own{};
    struct ::stat named{};
    return own_ >= 0 && ::fstat(own_, &own) == 0 && ::lstat(file_of(number).c_str(), &named) == 0 &&
           own.st_dev == named.st_dev && own.st_ino == named.st_ino;
  }
  void remove(std::uint64_t number) const noexcept { ::unlink(file_of(number).c_str()); }

  /// Of any process: one that is creating a lease finds that another one has it.
  void remove_drafts() const noexcept {
    const open_folder folder(folder_);
    if (folder.get() == nullptr) return;
    while (const dirent* const each = ::readdir(folder.get())) {
      if (is_draft(each->d_name)) ::unlinkat(::dirfd(folder.get()), each->d_name, 0);
    }
  }

  /// Counts while the machine is suspended.
  [[nodiscard]] std::uint64_t now_ns() const noexcept {
    ::timespec now{};
    ::clock_gettime(CLOCK_BOOTTIME, &now);
    return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(now.tv_nsec);
  }
  void pause(std::uint64_t ns) const { std::this_thread::sleep_for(std::chrono::nanoseconds(ns)); }

  [[nodiscard]] const lease_owner& owner() const noexcept { return owner_; }
  [[nodiscard]] bool is_dead(const lease_owner& owner) const { return has_ended(owner, owner_); }

  [[nodiscard]] std::string token() const {
    unsigned char drawn[16];
    while (::getrandom(drawn, sizeof drawn, 0) != static_cast<ssize_t>(sizeof drawn)) {
      if (errno != EINTR) cannot_open(name(), "no random number for a lease", errno);
    }
    constexpr std::string_view digits = "0123456789abcdef";
    std::string text;
    for (const unsigned char each : drawn) {
      text += digits[each >> 4U];
      text += digits[each & 15U];
    }
    return text;
  }

  /// A file that was removed is not locked again, so its lease is not needed.
  [[nodiscard]] bool ends_with_name() const noexcept {
    struct ::stat seen{};
    return ::lstat(path_.c_str(), &seen) != 0 && errno == ENOENT;
  }

 private:
  [[nodiscard]] std::string file_of(std::uint64_t number) const {
    return folder_ + "/" + stem_ + "." + std::to_string(number);
  }

  /// A lease of a file whose name begins in the same way ends in a dot and its number.
  [[nodiscard]] bool is_draft(std::string_view entry) const noexcept {
    constexpr std::string_view mark = ".new-";
    if (!entry.starts_with(stem_) || !entry.substr(stem_.size()).starts_with(mark)) return false;
    return entry.find_first_not_of("0123456789abcdef", stem_.size() + mark.size()) == std::string_view::npos;
  }

  [[nodiscard]] std::optional<std::uint64_t> number_of(std::string_view entry) const {
    if (!entry.starts_with(stem_) || entry.size() < stem_.size() + 2 || entry[stem_.size()] != '.')
      return std::nullopt;
    entry.remove_prefix(stem_.size() + 1);
    if (entry.size() > 20 || entry[0] == '0') return std::nullopt;
    std::uint64_t value = 0;
    for (const char each : entry) {
      const auto digit = static_cast<std::uint64_t>(each - '0');
      if (each < '0' || each > '9' || value > (~std::uint64_t{0} - digit) / 10) return std::nullopt;
      value = value * 10 + digit;
    }
    return value;
  }

  /// @return false if the name is taken.
  [[nodiscard]] bool create_file(const std::string& path) {
    if (own_ >= 0) ::close(std::exchange(own_, -1));
    own_ = open_again(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW, permissions_);
    if (own_ < 0 && errno != EEXIST) cannot_open(path, "the lease cannot be created", errno);
    return own_ >= 0;
  }

  std::string path_;
  std::string folder_{};
  std::string stem_{};
  std::uint32_t permissions_;
  lease_owner owner_;
  int own_ = -1;
};

/// A lease that is taken, and the thread that renews it.
class kept_lease {
 public:
  /// @param seen  used by `try_take` alone; null for none.
  kept_lease(const std::string& path, std::uint32_t permissions, std::uint64_t length_ns,
             lease_sightings* seen)
      : folder_(path, permissions),
        lease_(folder_, length_ns, seen != nullptr ? *seen : own_seen_),
        length_ns_(length_ns) {}
  kept_lease(const kept_lease&) = delete;
  kept_lease& operator=(const kept_lease&) = delete;
  ~kept_lease() {
    {
      const std::scoped_lock lock(mutex_);
      stops_ = true;
    }
    wake_.notify_all();
    if (thread_.joinable()) thread_.join();
    lease_.release();
  }

  [[nodiscard]] bool exists() const { return lease_.exists(); }
  [[nodiscard]] bool try_take() {
    if (!lease_.try_take()) return false;
    try {
      // Signals are for the threads of the program.
      sigset_t all;
      sigset_t before;
      ::sigfillset(&all);
      ::pthread_sigmask(SIG_SETMASK, &all, &before);
      try {
        thread_ = std::thread([this] { run(); });
      } catch (...) {
        ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
        throw;
      }
      ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    } catch (const std::system_error& error) {
      lease_.release();
      cannot_open(folder_.name(), "no thread can be started that renews the lease", error.code().value());
    }
    return true;
  }
  [[nodiscard]] bool is_held() {
    const std::scoped_lock lock(mutex_);
    return lease_.is_held();
  }
  [[nodiscard]] bool is_current() const noexcept { return lease_.is_current(); }
  /// The process whose thread renews it; a forked child has no such thread.
  [[nodiscard]] ::pid_t process() const noexcept { return static_cast<::pid_t>(folder_.owner().process); }

 private:
  void run() noexcept {
    const std::chrono::nanoseconds every(length_ns_ / 4 < longest_renewal_ns ? length_ns_ / 4
                                                                             : longest_renewal_ns);
    std::unique_lock lock(mutex_);
    for (;;) {
      if (wake_.wait_for(lock, every, [this] { return stops_; })) return;
      try {
        if (!lease_.renew()) return;
      } catch (...) {  // again next time, until it runs out
      }
    }
  }

  lease_sightings own_seen_;
  lease_folder folder_;
  lease<lease_folder> lease_;
  std::uint64_t length_ns_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stops_ = false;
  std::thread thread_;
};

}  // namespace detail

/// A file that one object has for itself, against all other objects and processes that lock it too.
///
/// - `file_locks::system`: flock. If the file system says that it has none (ENOLCK, ENOSYS, EOPNOTSUPP), or
///   if leases of the file exist, a lease file.
/// - `file_locks::lease_file`: a lease file, and flock where there is one: a process of this machine that was
///   stopped keeps that.
/// - `file_locks::caller`: nothing is locked.
///
/// **Lease files** are `.leases/NAME.<number>` next to the file. A thread renews the lease four times in its
/// length, and every 2 s at least. A process that is killed on the same machine loses its lease at once (the
/// kernel vouches for that: boot, process number and start); on another machine when its lease was not
/// renewed for its length and an eighth, by the clock of the process that waits. No two clocks are compared.
/// What a lease excludes, and what it does not, is in docs/checkpoint_folder.md.
///
/// @par Thread safety   one thread at a time, but `is_current`: any.
/// @par Source   successors created exclusively, and the store-then-look of renewals and successors: E. W.
///   Dijkstra, "Solution of a Problem in Concurrent Programming Control", 1965; leases: Gray and Cheriton,
///   SOSP 1989.
class file_lock {
 public:
  file_lock() = default;
  file_lock(file_lock&& other) noexcept : lease_(std::exchange(other.lease_, nullptr)) {}
  file_lock& operator=(file_lock&& other) noexcept {
    std::swap(lease_, other.lease_);
    return *this;
  }
  ~file_lock() { end(); }

  /// Locks `file`, which outlives this object, or returns nothing if another object or process has it.
  /// May wait: see `file_options::lease_ns`.
  /// @param seen  what earlier calls saw in leases of other processes, to wait less; used in this call alone.
  /// @throws file_error  when the system refuses: flock for another reason than that it has none, or a lease
  ///   file. @throws io_error  for a file that is no lease in the place of one.
  /// @throws argument_error  for a lease shorter than 1 ms or longer than 10 minutes.
  [[nodiscard]] static std::optional<file_lock> try_take(io_file& file, const file_options& options,
                                                         detail::lease_sightings* seen = nullptr);

  /// Whether the lease is still this object's: looks at its folder. True for other locks. An error of the
  /// file system means no.
  [[nodiscard]] bool is_held() const noexcept {
    if (lease_ == nullptr) return true;
    if (lease_->process() != ::getpid()) return false;
    try {
      return lease_->is_held();
    } catch (...) {
      return false;
    }
  }
  /// Whether the lease has not run out, by this process's clock: without a look at the folder. A forked child
  /// does not have its parent's.
  [[nodiscard]] bool is_current() const noexcept {
    return lease_ == nullptr || (lease_->process() == ::getpid() && lease_->is_current());
  }
  [[nodiscard]] bool is_lease() const noexcept { return lease_ != nullptr; }

  /// Keeps a lease as long as the process lives, because a device may still write to the file.
  void hold_until_exit() noexcept { lease_ = nullptr; }

 private:
  void end() noexcept {
    // A forked child has no thread to wait for, and nothing to release.
    if (lease_ != nullptr && lease_->process() == ::getpid()) delete lease_;
    lease_ = nullptr;
  }

  detail::kept_lease* lease_ = nullptr;  // owned
};

inline std::optional<file_lock> file_lock::try_take(io_file& file, const file_options& options,
                                                    detail::lease_sightings* seen) {
  if (options.locks == file_locks::caller) return file_lock();
  if (options.lease_ns < detail::least_lease_ns || options.lease_ns > detail::longest_lease_ns) {
    throw argument_error(file.path() + ": a lease of " + std::to_string(options.lease_ns) +
                         " ns; set lease_ns to 1 ms at least and 10 minutes at most");
  }
  const result<void> locked = file.lock();
  if (!locked && locked.error().code == errc::file_locked) return std::nullopt;
  if (!locked && !detail::has_no_locks(static_cast<int>(locked.error().index))) {
    const int number = static_cast<int>(locked.error().index);
    throw file_error(file.path() + ": cannot be locked: " + std::generic_category().message(number) +
                         " (errno " + std::to_string(number) + ")",
                     number);
  }
  char* const whole = ::realpath(file.path().c_str(), nullptr);
  if (whole == nullptr) detail::cannot_open(file.path(), "cannot be locked", errno);
  const std::string path = whole;
  ::free(whole);
  file_lock made;
  made.lease_ = new detail::kept_lease(path, options.permissions, options.lease_ns, seen);
  if (locked && options.locks == file_locks::system && !made.lease_->exists()) {
    made.end();
    return made;
  }
  try {
    if (made.lease_->try_take()) return made;
  } catch (const file_error& error) {
    if (locked) file.release_lock();
    throw file_error(
        std::string(error.what()) + "; a lease file is needed" +
            (locked ? "" : " because the file system has no flock") +
            ": let processes write to that folder, or set `locks` to file_locks::caller and ensure "
            "that no other process has " +
            path,
        error.number());
  } catch (...) {
    if (locked) file.release_lock();
    throw;
  }
  if (locked) file.release_lock();
  return std::nullopt;
}

}  // namespace v0
}  // namespace llmmem
