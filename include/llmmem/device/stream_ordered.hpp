/// @file
/// `stream_ordered`: a space whose ranges may be returned while a stream still uses them.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/device/device_fence.hpp>
#include <llmmem/device/device_runtime.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/concepts.hpp>
#include <llmmem/space/errors.hpp>
#include <llmmem/space/live_ranges.hpp>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <new>
#include <string_view>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Options of a `stream_ordered` space.
struct stream_ordered_options {
  std::uint32_t depth = 256;  ///< ranges behind a stream at once; one more waits for the oldest
  misuse_handler on_misuse = &abort_on_misuse;  ///< called instead of taking back a wrong range
  void* misuse_context = nullptr;               ///< passed to the handler
};

/// The counters of a `stream_ordered` space. A plain value.
struct stream_ordered_stats {
  std::uint64_t live_ranges = 0;     ///< ranges that callers have
  std::uint64_t pending_ranges = 0;  ///< ranges returned that a stream still uses
  std::uint64_t pending_bytes = 0;
  /// Returned during a capture, or to a device that then failed; see `release_captured`.
  std::uint64_t captured_ranges = 0;
  std::uint64_t captured_bytes = 0;
  std::uint64_t waits = 0;    ///< allocations that waited for a stream, because the budget was short
  std::uint64_t misuses = 0;  ///< ranges that were refused
};

/// A space over another one, for engines and libraries that return memory as soon as the work that uses it is
/// *submitted*: temporary storage of CUB, buffers of `cuda::mr`, per-step workspaces. The space beneath gets
/// the range when the stream has passed that point. The memory is charged to the budget until then.
///
///     device_space device(device_id{0}, {.budget = bytes});
///     stream_ordered memory(device, device_id{0}, cuda_runtime{});
///     const auto range = memory.try_allocate(4096, 256).value();     // usable on every stream at once
///     kernel<<<1, 1, 0, stream>>>(range.data);
///     memory.deallocate(range, stream);                              // does not wait for the kernel
///
/// A range that is returned during a capture of its stream belongs to the graph, which may be launched any
/// number of times: it stays allocated until `release_captured`, or until this object ends.
///
/// @tparam Space    the space beneath. It outlives this object.
/// @par Complexity      `deallocate(range, stream)` records one event. `try_allocate` queries the oldest
///                      event of each stream, and one more for each range that it takes back. O(ranges) moves
///                      of a table entry.
/// @par Thread safety   any number of threads; one mutex, not held while this object waits for a stream.
/// @par What waits      `try_allocate`, only if the space beneath refuses while streams still use ranges: for
///      the oldest of those, then it tries again. `deallocate(range, stream)`, if `depth` ranges are pending.
///      The destructor waits for all streams that use ranges.
/// @par Errors          the constructor throws what `device_events` does. `try_allocate` returns the errors
///      of the space beneath. Nothing else fails: if the driver refuses to record a point, the call waits for
///      the stream.
/// @par Source          RMM and `cuda::mr` have the interface. Their pools keep freed ranges by stream inside
///      the pool; here the space beneath needs no knowledge of streams.
template <memory_space Space, device_runtime Runtime>
class stream_ordered {
 public:
  using space_type = Space;
  using runtime_type = Runtime;
  using range_type = typename Space::range_type;
  using stream = typename Runtime::stream;
  static constexpr bool is_host_accessible = Space::is_host_accessible;

  /// @param device  of the events; streams of other devices cannot use them.
  stream_ordered(Space& beneath, device_id device, Runtime runtime = {}, stream_ordered_options options = {})
      : beneath_(&beneath), runtime_(runtime), options_(options), events_(device, options.depth, runtime) {}
  stream_ordered(const stream_ordered&) = delete;
  stream_ordered& operator=(const stream_ordered&) = delete;
  /// Returns all ranges that callers have returned. Ranges that callers still have stay allocated in the
  /// space beneath.
  ~stream_ordered() {
    for (const entry& each : returned_) {
      wait_for(each.passed);
      beneath_->deallocate(each.range);
    }
  }

  /// @name The space   see `memory_space`
  /// @{
  [[nodiscard]] result<range_type> try_allocate(std::uint64_t bytes, std::uint64_t alignment) noexcept {
    std::unique_lock lock(mutex_);
    take_back_passed();
    if (!reserve_one())
      return failure{.code = errc::system_refused, .wanted = bytes, .where = "stream_ordered"};
    result<range_type> made = beneath_->try_allocate(bytes, alignment);
    while (!made && is_shortage(made.code()) && wait_for_oldest(lock)) {
      take_back_passed();
      // Another thread may have taken the place in the table.
      if (!reserve_one()) return made;
      made = beneath_->try_allocate(bytes, alignment);
    }
    if (made) live_.insert(made->data, made->bytes, {});
    return made;
  }
  /// Takes back a range at once: no stream uses it any longer.
  void deallocate(range_type range) noexcept {
    if (range.empty()) return;
    misuse wrong;
    {
      const std::lock_guard lock(mutex_);
      wrong = live_.check("stream_ordered", range.data, range.bytes);
      if (wrong.what == misuse::kind::none) {
        live_.remove(range.data);
        beneath_->deallocate(range);
        return;
      }
      ++misuses_;
    }
    options_.on_misuse(wrong, options_.misuse_context);
  }
  [[nodiscard]] std::uint64_t capacity() const noexcept { return beneath_->capacity(); }
  /// Returns the bytes that the space beneath has charged: live, pending and captured ranges.
  [[nodiscard]] std::uint64_t used() const noexcept { return beneath_->used(); }
  [[nodiscard]] std::string_view name() const noexcept { return beneath_->name(); }
  /// Whether all of `range` is inside one live range.
  [[nodiscard]] bool holds(range_type range) const noexcept {
    const std::lock_guard lock(mutex_);
    return live_.holding(range.data, range.bytes) != nullptr;
  }
  /// @}

  /// Takes back a range that the work in `after` still uses.
  void deallocate(range_type range, stream_argument<stream> after) noexcept {
    if (range.empty()) return;
    misuse wrong;
    {
      std::unique_lock lock(mutex_);
      wrong = live_.check("stream_ordered", range.data, range.bytes);
      if (wrong.what == misuse::kind::none) {
        live_.remove(range.data);
        keep(lock, range, after.get());
        return;
      }
      ++misuses_;
    }
    options_.on_misuse(wrong, options_.misuse_context);
  }

  /// Returns to the space beneath the ranges that no stream uses any longer. `try_allocate` does it too.
  void collect() noexcept {
    const std::lock_guard lock(mutex_);
    take_back_passed();
  }
  /// Returns the ranges that were deallocated during captures. @pre no graph of those captures will be
  /// launched again, and none runs.
  void release_captured() noexcept {
    const std::lock_guard lock(mutex_);
    take_back([](const entry& each) { return each.is_captured; });
  }

  [[nodiscard]] stream_ordered_stats stats() const noexcept {
    const std::lock_guard lock(mutex_);
    stream_ordered_stats out{.live_ranges = live_.size(), .waits = waits_, .misuses = misuses_};
    for (const entry& each : returned_) {
      (each.is_captured ? out.captured_ranges : out.pending_ranges) += 1;
      (each.is_captured ? out.captured_bytes : out.pending_bytes) += each.range.bytes;
    }
    return out;
  }
  [[nodiscard]] Space& beneath() noexcept { return *beneath_; }

 private:
  struct nothing {};
  /// A range that its caller has returned.
  struct entry {
    range_type range{};
    stream after{};
    device_fence<Runtime> passed{};
    bool is_captured = false;
  };

  [[nodiscard]] static bool is_shortage(error_code code) noexcept {
    return code == errc::out_of_bytes || code == errc::system_refused;
  }
  /// Makes space in both tables, so that no return can fail.
  [[nodiscard]] bool reserve_one() noexcept {
    if (!live_.reserve_one()) return false;
    const std::size_t ranges = static_cast<std::size_t>(live_.size()) + returned_.size() + leaving_ + 1;
    if (ranges <= returned_.capacity()) return true;
    try {
      returned_.reserve(std::max<std::size_t>(16, 2 * ranges));
    } catch (const std::bad_alloc&) {
      return false;
    }
    return true;
  }
  /// Notes a range behind a stream's work.
  void keep(std::unique_lock<std::mutex>& lock, range_type range, stream after) noexcept {
    if (runtime_.is_capturing(after)) {
      returned_.push_back({range, after, {}, true});
      return;
    }
    ++leaving_;
    lock.unlock();
    const auto mark = events_.mark(after);  // may wait for the oldest
    const bool has_passed = !mark && runtime_.wait_stream(after) == 0;
    lock.lock();
    --leaving_;
    ++left_;
    has_left_.notify_all();
    if (has_passed) {
      beneath_->deallocate(range);
    } else if (mark) {
      returned_.push_back({range, after, *mark, false});
    } else {
      // Neither a point nor a wait: the device is lost, or the work cannot be known. Nothing is freed.
      returned_.push_back({range, after, {}, true});
    }
  }
  /// Takes back the ranges whose points have passed. Points of one stream pass in order, so this object stops
  /// asking a stream at the first point that has not passed.
  void take_back_passed() noexcept {
    std::array<stream, 16> busy{};
    std::size_t count = 0;
    take_back([&](const entry& each) {
      if (each.is_captured) return false;
      const auto end = busy.begin() + static_cast<std::ptrdiff_t>(count);
      if (std::find(busy.begin(), end, each.after) != end) return false;
      if (each.passed.ready()) return true;
      if (count < busy.size()) busy[count++] = each.after;
      return false;
    });
  }
  template <class Is>
  void take_back(Is&& is_over) noexcept {
    std::size_t kept = 0;
    for (const entry& each : returned_) {
      if (is_over(each)) {
        beneath_->deallocate(each.range);
      } else {
        returned_[kept++] = each;
      }
    }
    returned_.resize(kept);
  }
  /// False when no stream uses a range.
  [[nodiscard]] bool wait_for_oldest(std::unique_lock<std::mutex>& lock) noexcept {
    const auto oldest =
        std::find_if(returned_.begin(), returned_.end(), [](const entry& each) { return !each.is_captured; });
    if (oldest == returned_.end()) {
      if (leaving_ == 0) return false;
      // Another thread is just returning one.
      ++waits_;
      has_left_.wait(lock, [this, before = left_] { return left_ != before; });
      return true;
    }
    ++waits_;
    const device_fence<Runtime> passed = oldest->passed;
    lock.unlock();
    wait_for(passed);
    lock.lock();
    return true;
  }
  /// A lost device uses no memory.
  static void wait_for(const device_fence<Runtime>& passed) noexcept {
    try {
      passed.wait();
    } catch (const std::exception&) {
    }
  }

  Space* beneath_;
  Runtime runtime_;
  stream_ordered_options options_;
  mutable std::mutex mutex_;
  live_ranges<nothing> live_;
  std::vector<entry> returned_;  // in the order of their return
  std::size_t leaving_ = 0;      // ranges whose point is being recorded, in neither table
  std::uint64_t left_ = 0;       // ranges that were counted in `leaving_` and are no longer
  std::condition_variable has_left_;
  device_events<Runtime> events_;
  std::uint64_t waits_ = 0;
  std::uint64_t misuses_ = 0;
};

}  // namespace v0
}  // namespace llmmem
