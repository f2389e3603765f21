/// @file
/// `file_space`: a file as a space of memory, and the queue of its own copies.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/concepts.hpp>
#include <llmmem/space/errors.hpp>
#include <llmmem/space/file.hpp>
#include <llmmem/space/live_ranges.hpp>
#include <llmmem/transfer/file_lock.hpp>
#include <llmmem/transfer/file_queue.hpp>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// The construction parameters of a file space.
struct file_space_options {
  std::uint64_t budget = 0;  ///< most bytes of the file in use; 0 is refused
  file_options file{};
  file_queue_options queue{};
  misuse_handler on_misuse = &abort_on_misuse;
  void* misuse_context = nullptr;
};

/// The bytes of one file, allocated in ranges whose `data` is an offset into it: the host cannot dereference
/// it.
///
/// Space on the device is allocated with a range, so that a full disk shows there and not in the middle of a
/// transfer, and is released with the range. The first page of the file is never allocated. Ranges begin at
/// whole pages; the budget counts their bytes, the device whole pages.
///
/// Existing contents of a file are ignored; a caller that wants them back names their place. Nothing is
/// durable before `file().sync()`.
///
/// A space that writes owns its file exclusively: a second one on the same path, in this process or another,
/// is refused, because the two would overwrite each other. Give each rank and each tier its own path. The
/// lock is flock or a lease file (`file_lock`); with `file_locks::caller` the caller must ensure that;
/// devices are not locked. Once a lease has run out because this process was stopped, copies fail with
/// `errc::lease_lost`.
///
/// @par Complexity      O(live ranges) for allocation; a copy as in `file_queue`.
/// @par Thread safety   any number of threads; one mutex, not held while the file system allocates or
///   releases space.
/// @par Errors          the constructor throws `length_error` for a budget of 0 or past 2^63 - 1, `io_error`
///   for a file that another space owns, and what `io_file` and `file_queue` throw. `try_allocate` also
///   refuses with `errc::grow_failed`: the device is full, or its quota. A failed copy is reported by its
///   fence.
/// @tparam Engine  an `io_engine`.
template <io_engine Engine = posix_io>
class file_space {
 public:
  using range_type = memory_range<file_space>;
  using fence_type = transfer_fence;
  static constexpr bool is_host_accessible = false;
  /// Data kept here leaves the memory of this process: tiers keep a checksum of it.
  static constexpr bool leaves_memory = true;

  template <class... Args>
  file_space(std::string path, file_space_options options, Args&&... engine)
      : options_(checked(std::move(options), path)),
        file_(std::move(path), options_.file),
        page_(file_.limits().offset_alignment),
        queue_(options_.queue, std::forward<Args>(engine)...) {
    hold();
    queue_.register_file(file_);
  }
  file_space(const file_space&) = delete;
  file_space& operator=(const file_space&) = delete;
  /// The next space may have the file at once, unless a request was never answered.
  ~file_space() {
    if (queue_.stats().lost == 0) {
      file_.unlock_at_end();
    } else {
      lock_.hold_until_exit();
    }
  }

  [[nodiscard]] result<range_type> try_allocate(std::uint64_t bytes, std::uint64_t alignment) noexcept;
  void deallocate(range_type range) noexcept;

  [[nodiscard]] std::uint64_t capacity() const noexcept { return options_.budget; }
  [[nodiscard]] std::uint64_t used() const noexcept {
    const std::scoped_lock lock(mutex_);
    return used_;
  }
  [[nodiscard]] std::string_view name() const noexcept LLMMEM_LIFETIMEBOUND { return file_.path(); }

  /// @name Copies   see `copy_queue`. `how` is their urgency.
  /// @{
  [[nodiscard]] result<transfer_fence> copy_in_async(range_type to, std::span<const std::byte> from,
                                                     std::span<const transfer_fence> after,
                                                     transfer::urgency how = transfer::urgency::write_back) {
    if (const failure wrong = refusal(to, from.size()); wrong.code != errc::ok) return wrong;
    const file_copy copy = write_to(file_, offset_of(to.data), from);
    return queue_.start(std::span(&copy, 1), how, after);
  }
  [[nodiscard]] result<transfer_fence> copy_out_async(std::span<std::byte> to, range_type from,
                                                      std::span<const transfer_fence> after,
                                                      transfer::urgency how = transfer::urgency::demand) {
    if (const failure wrong = refusal(from, to.size()); wrong.code != errc::ok) return wrong;
    const file_copy copy = read_from(file_, offset_of(from.data), to);
    return queue_.start(std::span(&copy, 1), how, after);
  }
  /// Runs on the calling thread, which also waits for `after`.
  [[nodiscard]] result<transfer_fence> copy_within_async(range_type to, range_type from,
                                                         std::span<const transfer_fence> after);
  /// @}

  [[nodiscard]] io_file& file() noexcept { return file_; }
  [[nodiscard]] const io_file& file() const noexcept { return file_; }
  [[nodiscard]] file_queue<Engine>& queue() noexcept { return queue_; }

  [[nodiscard]] static std::uint64_t offset_of(const std::byte* data) noexcept {
    return static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(data));
  }
  [[nodiscard]] static std::byte* address_of(std::uint64_t offset) noexcept {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): an offset in the form of an address
    return reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(offset));
  }

 protected:
  /// Returns a range without allocating space on the device: existing contents stay.
  [[nodiscard]] result<range_type> take(std::uint64_t bytes, std::uint64_t alignment) noexcept;

 private:
  struct nothing {};

  void hold() {
    struct stat seen{};
    const bool is_file = ::fstat(file_.buffered(), &seen) == 0 && S_ISREG(seen.st_mode);
    if (!file_.is_writable() || !is_file) return;
    std::optional<file_lock> lock = file_lock::try_take(file_, options_.file);
    if (!lock) failure{errc::file_locked, 0, 0, 0, file_.path().c_str()}.raise();
    lock_ = std::move(*lock);
  }
  [[nodiscard]] static file_space_options checked(file_space_options options, const std::string& path) {
    if (options.budget == 0)
      throw length_error(path + ": the budget is 0 bytes; set the bytes that it may hold");
    if (options.budget > max_bytes) {
      throw length_error(path + ": the budget is " + std::to_string(options.budget) +
                         " bytes; the most is 2^63 - 1");
    }
    return options;
  }
  [[nodiscard]] failure refusal(range_type range, std::uint64_t bytes) const noexcept {
    const char* const where = file_.path().c_str();
    if (!lock_.is_current()) return {.code = errc::lease_lost, .where = where};
    if (range.bytes != bytes) {
      return {.code = errc::size_mismatch, .wanted = range.bytes, .found = bytes, .where = where};
    }
    const std::scoped_lock lock(mutex_);
    if (range.bytes != 0 && live_.holding(range.data, range.bytes) == nullptr) {
      return {.code = errc::dead_range, .wanted = range.bytes, .where = where};
    }
    return {};
  }
  void forget(range_type range) noexcept {
    const std::scoped_lock lock(mutex_);
    if (live_.check("", range.data, range.bytes).what != misuse::kind::none) return;
    static_cast<void>(live_.remove(range.data));
    used_ -= range.bytes;
  }
  /// Releases whole pages of it: no other range begins in its last one.
  void punch_pages(range_type range) noexcept {
    // If the file system cannot, the pages stay with the file.
    static_cast<void>(file_.punch(offset_of(range.data), (range.bytes + page_ - 1) / page_ * page_));
  }

  file_space_options options_;
  io_file file_;
  file_lock lock_;
  std::uint64_t page_;
  mutable std::mutex mutex_;
  live_ranges<nothing> live_;
  std::uint64_t used_ = 0;
  file_queue<Engine> queue_;  // destroyed before the file, which it may have registered
};

static_assert(memory_space<file_space<>>);
static_assert(copy_queue<file_space<>, file_space<>>);

template <io_engine Engine>
result<typename file_space<Engine>::range_type> file_space<Engine>::take(std::uint64_t bytes,
                                                                         std::uint64_t alignment) noexcept {
  const std::scoped_lock lock(mutex_);
  const char* const where = file_.path().c_str();
  if (bytes == 0) return failure{.code = errc::zero_bytes, .where = where};
  if (alignment == 0 || (alignment & (alignment - 1)) != 0) {
    return failure{.code = errc::bad_alignment, .wanted = alignment, .where = where};
  }
  if (bytes > options_.budget - used_) {
    return failure{
        .code = errc::out_of_bytes, .wanted = bytes, .found = options_.budget - used_, .where = where};
  }
  if (!live_.reserve_one()) {
    return failure{
        .code = errc::system_refused, .wanted = bytes, .found = options_.budget - used_, .where = where};
  }
  const std::uint64_t offset = live_.first_gap(page_, bytes, alignment < page_ ? page_ : alignment);
  if (offset > max_bytes - bytes) {
    return failure{errc::grow_failed, EFBIG, bytes, offset, where};
  }
  std::byte* const data = address_of(offset);
  live_.insert(data, bytes, {});
  used_ += bytes;
  return range_type{data, bytes};
}

template <io_engine Engine>
result<typename file_space<Engine>::range_type> file_space<Engine>::try_allocate(
    std::uint64_t bytes, std::uint64_t alignment) noexcept {
  const result<range_type> range = take(bytes, alignment);
  if (!range) return range;
  if (const result<void> had = file_.reserve(offset_of(range->data), bytes); !had) {
    punch_pages(*range);  // some of it may have been allocated
    forget(*range);
    return had.error();
  }
  return range;
}

template <io_engine Engine>
void file_space<Engine>::deallocate(range_type range) noexcept {
  if (range.bytes == 0) return;
  misuse wrong;
  {
    const std::scoped_lock lock(mutex_);
    wrong = live_.check(file_.path().c_str(), range.data, range.bytes);
  }
  if (wrong.what != misuse::kind::none) return options_.on_misuse(wrong, options_.misuse_context);
  punch_pages(range);  // before it can be allocated again
  forget(range);
}

template <io_engine Engine>
result<transfer_fence> file_space<Engine>::copy_within_async(range_type to, range_type from,
                                                             std::span<const transfer_fence> after) {
  if (const failure wrong = refusal(to, from.bytes); wrong.code != errc::ok) return wrong;
  if (const failure wrong = refusal(from, to.bytes); wrong.code != errc::ok) return wrong;
  const std::uint64_t begin = offset_of(to.data);
  const std::uint64_t source = offset_of(from.data);
  const std::uint64_t apart = begin < source ? source - begin : begin - source;
  if (apart < to.bytes) {
    return failure{.code = errc::overlapping_ranges,
                   .wanted = to.bytes,
                   .found = to.bytes - apart,
                   .where = file_.path().c_str()};
  }
  for (const transfer_fence& each : after) {
    if (const result<void> passed = each.settled(); !passed) return passed.error();
  }
  if (const result<void> done = file_.copy(begin, source, to.bytes); !done) return done.error();
  return transfer_fence{};
}

}  // namespace v0
}  // namespace llmmem
