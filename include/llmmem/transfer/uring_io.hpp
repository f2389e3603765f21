/// @file
/// `uring_io`: file I/O by io_uring, many requests in flight per system call. Needs liburing.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>
#include <llmmem/transfer/errors.hpp>
#include <llmmem/transfer/io_engine.hpp>

#include <liburing.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <system_error>

namespace llmmem {
inline namespace v0 {

/// Which threads call a `uring_io`.
enum class uring_issuer : std::uint8_t {
  any_thread,  ///< any, one at a time
  one_thread,  ///< always the one that calls `reap` first; the kernel then avoids interrupts
};

/// The construction parameters of a ring.
struct uring_options {
  std::uint32_t depth = 32;  ///< requests in flight at once, 1 to 4096
  uring_issuer issuer = uring_issuer::any_thread;
  std::uint32_t files = 32;  ///< entries of the table of files, 0 (none) to 64; an `io_file` uses up to two
};

/// An io_uring. Requests continue in the kernel without calls.
///
/// Containers often forbid io_uring, and old kernels lack it: the constructor then throws, and says which. A
/// program that must run there too catches that exception and uses `posix_io`.
///
/// Registered files and memory (`register_file`, `register_memory`) cost the kernel less per request. Without
/// free entries, or with a kernel without tables (before Linux 5.5), files use their descriptors:
/// `caps().files_reason` says why.
///
/// @par Complexity      one system call for each `reap` that submits or waits. Two tags are reserved:
///   requests may have any except 2^64 - 2 and 2^64 - 1. A process that forks leaves the ring to its parent:
///   the child must not use or destroy it.
///
/// @par Thread safety   one thread at a time, always the same one if `issuer` says so (a `reap` on another
///   fails with EEXIST); `wake` from any.
/// @par Errors          the constructor throws `argument_error` for a depth or a table out of range and
///   `system_error` if the kernel refuses the ring.
class uring_io {
 public:
  static constexpr std::uint32_t max_depth = 4096;
  static constexpr std::size_t max_ranges = 16;  ///< ranges of registered memory
  static constexpr std::uint32_t max_files = 64;

  explicit uring_io(const uring_options& options = {});
  uring_io(const uring_io&) = delete;
  uring_io& operator=(const uring_io&) = delete;

  /// Waits for requests in flight.
  ~uring_io();

  [[nodiscard]] io_caps caps() const noexcept {
    return {.name = "io_uring",
            .depth = depth_,
            .overlaps = true,
            .registers_memory = true,
            .registers_files = files_reason_.empty(),
            .files_reason = files_reason_,
            .fallback_reason = fallback_};
  }
  [[nodiscard]] std::uint32_t in_flight() const noexcept { return in_flight_; }

  [[nodiscard]] bool try_queue(const io_request& request) noexcept;
  [[nodiscard]] result<std::size_t> reap(std::span<io_completion> out, const io_wait& wait) noexcept;
  void wake() noexcept;

  /// Pins `ranges`, so that requests inside one need not pin their pages each time. Once, before the first
  /// request. The kernel accepts ranges of at most 1 GiB each; the pinned bytes count against RLIMIT_MEMLOCK.
  /// @return `errc::engine_failed` with the kernel's error number, `errc::out_of_range` past `max_ranges`.
  result<void> register_memory(std::span<const std::span<std::byte>> ranges) noexcept;

  /// @name Files   see `registers_files`. One system call each; a search of the table for each request.
  /// @{
  [[nodiscard]] bool register_file(int descriptor) noexcept;
  void forget_file(int descriptor) noexcept;
  void forget_files() noexcept;
  /// @}

 private:
  static constexpr int no_file = -1;  // an empty entry, as in the kernel's interface

  static constexpr std::uint64_t wake_tag = ~std::uint64_t{1};  // liburing's own tag is the one above

  [[nodiscard]] static io_uring open_ring(const uring_options& options);
  void open_table(std::uint32_t entries) noexcept;
  [[nodiscard]] bool update_entry(std::uint32_t entry, int descriptor) noexcept;
  [[nodiscard]] std::uint32_t entry_of(int descriptor) const noexcept;
  [[nodiscard]] int registered_range(const io_request& request) const noexcept;
  void arm_wake() noexcept;
  void enable() noexcept;
  [[nodiscard]] int hand_over(const io_wait& wait, bool has_some) noexcept;
  [[nodiscard]] std::size_t collect(std::span<io_completion> out) noexcept;

  std::uint32_t depth_;
  io_uring ring_;
  std::string_view fallback_{};
  int wake_file_ = -1;
  std::uint64_t wake_count_ = 0;
  std::uint32_t in_flight_ = 0;
  bool wake_armed_ = false;
  bool enabled_ = true;
  std::array<std::span<std::byte>, max_ranges> ranges_{};
  std::size_t range_count_ = 0;
  std::array<int, max_files> files_{};
  std::uint32_t file_entries_ = 0;  // entries of the kernel's table
  std::uint32_t files_end_ = 0;     // no entry from there on was ever used
  std::string_view files_reason_{};
};

static_assert(io_engine<uring_io>);
static_assert(registers_memory<uring_io>);
static_assert(registers_files<uring_io>);

inline io_uring uring_io::open_ring(const uring_options& options) {
  if (options.depth == 0 || options.depth > max_depth) {
    throw argument_error("uring_io: a depth of " + std::to_string(options.depth) + "; it must be 1 to " +
                         std::to_string(max_depth));
  }
  if (options.files > max_files) {
    throw argument_error("uring_io: a table of " + std::to_string(options.files) +
                         " files; it must be 0 to " + std::to_string(max_files));
  }
  // Newest first, because a kernel that does not know a flag refuses them all.
  constexpr unsigned single = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;
  const std::array<unsigned, 3> attempts{options.issuer == uring_issuer::one_thread
                                             ? single | IORING_SETUP_R_DISABLED
                                             : IORING_SETUP_COOP_TASKRUN,
                                         IORING_SETUP_COOP_TASKRUN, 0U};
  int error = 0;
  for (const unsigned flags : attempts) {
    io_uring ring{};
    // One more than the depth: the entry for the wake-up read.
    error = ::io_uring_queue_init(options.depth + 1, &ring, flags);
    if (error == 0) return ring;
    if (error != -EINVAL) break;
  }
  const char* const mend =
      error == -ENOMEM ? "the memory that the process may lock is used up: raise the limit (ulimit -l, "
                         "RLIMIT_MEMLOCK), use a smaller depth, or use posix_io"
      : error == -EMFILE || error == -ENFILE
          ? "the process has too many open files: raise the limit (ulimit -n), or use posix_io"
          : "a container's seccomp profile or kernel.io_uring_disabled may forbid it: use posix_io";
  throw system_error("uring_io: the kernel refused a ring of " + std::to_string(options.depth) +
                     " requests: " + std::generic_category().message(-error) + " (errno " +
                     std::to_string(-error) + "); " + mend);
}

inline uring_io::uring_io(const uring_options& options) : depth_(options.depth), ring_(open_ring(options)) {
  enabled_ = (ring_.flags & IORING_SETUP_R_DISABLED) == 0;
  if (options.issuer == uring_issuer::one_thread && enabled_) {
    fallback_ = "the kernel has no rings for a single issuer: it needs Linux 6.1";
  }
  wake_file_ = ::eventfd(0, EFD_CLOEXEC);
  if (wake_file_ < 0) {
    const int error = errno;
    ::io_uring_queue_exit(&ring_);
    throw system_error(
        "uring_io: cannot open the descriptor that wakes it: " + std::generic_category().message(error) +
        " (errno " + std::to_string(error) + "); raise the limit (ulimit -n)");
  }
  open_table(options.files);
}

inline uring_io::~uring_io() {
  std::array<io_completion, 16> ignored{};
  while (in_flight_ != 0) {
    if (!reap(ignored, {.least = 1})) break;
  }
  // The wake-up read writes to this object.
  if (wake_armed_) wake();
  while (wake_armed_) {
    const int got = ::io_uring_submit_and_wait(&ring_, 1);
    if (got < 0 && got != -EINTR) break;
    static_cast<void>(collect(ignored));
  }
  forget_files();
  ::io_uring_queue_exit(&ring_);
  ::close(wake_file_);
}

/// Makes a table without files, or none if the kernel has none.
inline void uring_io::open_table(std::uint32_t entries) noexcept {
  files_.fill(no_file);
  if (entries == 0) {
    files_reason_ = "no table of files was requested";
    return;
  }
  int error = ::io_uring_register_files_sparse(&ring_, entries);
  // Before Linux 5.19 an empty table was a list of no files.
  if (error == -EINVAL) error = ::io_uring_register_files(&ring_, files_.data(), entries);
  if (error == 0) {
    file_entries_ = entries;
  } else if (error == -EMFILE) {
    files_reason_ = "the limit on descriptors (ulimit -n) is below the table's entries";
  } else if (error == -EINVAL) {
    files_reason_ = "the kernel has no tables of files with free entries: it needs Linux 5.5";
  } else {
    files_reason_ = "the kernel refused a table of files";
  }
}

inline bool uring_io::update_entry(std::uint32_t entry, int descriptor) noexcept {
  return ::io_uring_register_files_update(&ring_, entry, &descriptor, 1) == 1;
}

/// Returns `files_end_` if there is none.
inline std::uint32_t uring_io::entry_of(int descriptor) const noexcept {
  std::uint32_t entry = 0;
  while (entry != files_end_ && files_[entry] != descriptor)
    ++entry;
  return entry;
}

inline bool uring_io::register_file(int descriptor) noexcept {
  if (descriptor < 0) return false;
  if (entry_of(descriptor) != files_end_) return true;
  const std::uint32_t entry = entry_of(no_file);
  if (entry == file_entries_ || !update_entry(entry, descriptor)) return false;
  files_[entry] = descriptor;
  if (entry == files_end_) ++files_end_;
  return true;
}

inline void uring_io::forget_file(int descriptor) noexcept {
  const std::uint32_t entry = descriptor < 0 ? files_end_ : entry_of(descriptor);
  if (entry == files_end_) return;
  // If that is refused, for example on a wrong thread, the kernel keeps the file until the entry's next use.
  static_cast<void>(update_entry(entry, no_file));
  files_[entry] = no_file;
}

inline void uring_io::forget_files() noexcept {
  if (file_entries_ == 0) return;
  // Destroying a ring releases them too, but later, without a notification.
  ::io_uring_unregister_files(&ring_);
  file_entries_ = files_end_ = 0;
  files_reason_ = "the table of files was given up";
}

inline int uring_io::registered_range(const io_request& request) const noexcept {
  for (std::size_t i = 0; i < range_count_; ++i) {
    const auto& range = ranges_[i];
    if (request.data >= range.data() && request.bytes <= range.size() &&
        request.data <= range.data() + (range.size() - request.bytes)) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

inline bool uring_io::try_queue(const io_request& request) noexcept {
  if (in_flight_ == depth_) return false;
  io_uring_sqe* const entry = ::io_uring_get_sqe(&ring_);
  if (entry == nullptr) return false;
  const int range = registered_range(request);
  const bool reads = request.way == io_direction::read;
  if (range >= 0 && reads) {
    ::io_uring_prep_read_fixed(entry, request.file, request.data, request.bytes, request.offset, range);
  } else if (range >= 0) {
    ::io_uring_prep_write_fixed(entry, request.file, request.data, request.bytes, request.offset, range);
  } else if (reads) {
    ::io_uring_prep_read(entry, request.file, request.data, request.bytes, request.offset);
  } else {
    ::io_uring_prep_write(entry, request.file, request.data, request.bytes, request.offset);
  }
  const std::uint32_t file = request.file < 0 ? files_end_ : entry_of(request.file);
  if (file != files_end_) {
    entry->fd = static_cast<int>(file);
    entry->flags |= IOSQE_FIXED_FILE;
  }
  ::io_uring_sqe_set_data64(entry, request.tag);
  ++in_flight_;
  return true;
}

inline void uring_io::arm_wake() noexcept {
  if (wake_armed_) return;
  io_uring_sqe* const entry = ::io_uring_get_sqe(&ring_);
  if (entry == nullptr) return;
  ::io_uring_prep_read(entry, wake_file_, &wake_count_, sizeof wake_count_, 0);
  ::io_uring_sqe_set_data64(entry, wake_tag);
  wake_armed_ = true;
}

inline void uring_io::enable() noexcept {
  if (enabled_) return;
  // By number, because liburing 2.3 declares the function but does not define it.
  enabled_ = ::syscall(__NR_io_uring_register, ring_.ring_fd, IORING_REGISTER_ENABLE_RINGS, nullptr, 0) >= 0;
}

/// Submits, and waits as requested. Returns minus an error number when the kernel took nothing.
inline int uring_io::hand_over(const io_wait& wait, bool has_some) noexcept {
  const auto least = wait.least < in_flight_ ? wait.least : in_flight_;
  if (least == 0) {
    if (::io_uring_sq_ready(&ring_) != 0) return ::io_uring_submit_and_get_events(&ring_);
    return in_flight_ == 0 || has_some ? 0 : ::io_uring_get_events(&ring_);
  }
  arm_wake();
  if (wait.timeout_ns == io_wait::forever) return ::io_uring_submit_and_wait(&ring_, least);
  __kernel_timespec limit{.tv_sec = static_cast<long long>(wait.timeout_ns / 1'000'000'000),
                          .tv_nsec = static_cast<long long>(wait.timeout_ns % 1'000'000'000)};
  io_uring_cqe* first = nullptr;
  return ::io_uring_submit_and_wait_timeout(&ring_, &first, least, &limit, nullptr);
}

inline std::size_t uring_io::collect(std::span<io_completion> out) noexcept {
  std::size_t count = 0;
  io_uring_cqe* entry = nullptr;
  while (count < out.size() && ::io_uring_peek_cqe(&ring_, &entry) == 0) {
    const std::uint64_t tag = ::io_uring_cqe_get_data64(entry);
    if (tag == wake_tag) {
      wake_armed_ = false;
    } else {
      out[count++] = {tag, entry->res};
      --in_flight_;
    }
    ::io_uring_cqe_seen(&ring_, entry);
  }
  return count;
}

inline result<std::size_t> uring_io::reap(std::span<io_completion> out, const io_wait& wait) noexcept {
  enable();
  if (out.empty()) return std::size_t{0};
  std::size_t count = collect(out);
  const io_wait rest{wait.least > count ? wait.least - static_cast<std::uint32_t>(count) : 0,
                     wait.timeout_ns};
  const int error = hand_over(rest, count != 0);
  count += collect(out.subspan(count));
  const bool passes = error >= 0 || error == -ETIME || error == -EINTR || error == -EAGAIN || error == -EBUSY;
  if (!passes && count == 0) {
    return failure{
        .code = errc::engine_failed, .index = static_cast<std::uint32_t>(-error), .where = "uring_io"};
  }
  return count;
}

inline void uring_io::wake() noexcept {
  const std::uint64_t one = 1;
  // It can fail only when the counter is full: then the ring is already being woken.
  [[maybe_unused]] const ssize_t written = ::write(wake_file_, &one, sizeof one);
}

inline result<void> uring_io::register_memory(std::span<const std::span<std::byte>> ranges) noexcept {
  if (ranges.size() > max_ranges) {
    return failure{
        .code = errc::out_of_range, .wanted = ranges.size(), .found = max_ranges, .where = "uring_io"};
  }
  if (ranges.empty()) return {};
  std::array<iovec, max_ranges> vectors{};
  for (std::size_t i = 0; i < ranges.size(); ++i)
    vectors[i] = {ranges[i].data(), ranges[i].size()};
  const int error = ::io_uring_register_buffers(&ring_, vectors.data(), static_cast<unsigned>(ranges.size()));
  if (error != 0) {
    return failure{.code = errc::engine_failed,
                   .index = static_cast<std::uint32_t>(-error),
                   .where = "uring_io: register_memory"};
  }
  for (std::size_t i = 0; i < ranges.size(); ++i)
    ranges_[i] = ranges[i];
  range_count_ = ranges.size();
  return {};
}

}  // namespace v0
}  // namespace llmmem
