/// @file
/// `basic_device_space`: memory of a device under a hard budget, from its own pool or from any memory
/// resource. Needs no CUDA; `device_space` of device/cuda.hpp is the one over CUDA.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/device/device_runtime.hpp>
#include <llmmem/device/errors.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/concepts.hpp>
#include <llmmem/space/live_ranges.hpp>
#include <llmmem/space/pages.hpp>
#include <llmmem/space/space_ledger.hpp>
#include <llmmem/space/space_stats.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Options of a device space.
struct device_options {
  std::uint64_t budget = 0;           ///< the most bytes it may hold; there is no default, 0 is refused
  std::string name = "device_space";  ///< the name in error texts
  misuse_handler on_misuse = &abort_on_misuse;  ///< called instead of taking back a wrong range
  void* misuse_context = nullptr;               ///< passed to the handler
};

/// A `byte_source` of device memory with its own pool and stream. Returned memory stays in the pool until the
/// source ends, so a space in its steady state makes no request to the driver.
///
/// `take` waits for its own stream alone, so the memory is valid on every stream at once. The caller returns
/// a range after its last fence.
///
/// The source keeps memory that the driver refuses to take back, and counts it in `kept_bytes()`; it tries
/// again in the next `take`, `give_back` and `trim`, and at the end.
///
/// A pool can refuse a request although it has the bytes, because it remaps pages only after their return is
/// complete (rmm#1245). So `take` waits for its stream and requests once more before it refuses.
///
/// @par Complexity      a request costs as much as one of a driver's pool: microseconds if it has the bytes.
///      O(ranges) in addition while the source keeps any.
/// @par Thread safety   none; the space holds its lock.
/// @par Errors          the constructor throws `system_error` if there is no such device, with the reason, or
///      if the driver refuses a pool or a stream.
template <device_runtime Runtime>
class device_pool_source {
 public:
  /// Pools align to that; a larger alignment takes a larger request.
  static constexpr std::uint64_t pool_alignment = 256;

  explicit device_pool_source(device_id device)
    requires(std::default_initializable<Runtime>)
      : device_pool_source(device, Runtime{}) {}
  /// @param seen_by  other devices that may read and write its memory, as peers of `device`.
  device_pool_source(device_id device, Runtime runtime, std::span<const device_id> seen_by = {})
      : runtime_(runtime), device_(device) {
    const std::string who = "device_pool_source: device " + std::to_string(to_index(device)) + ": ";
    if (const char* const why = runtime_.why_no_device(device); why != nullptr)
      throw system_error(who + "no device: " + why + "; use host_space or pinned memory there");
    const auto check = [&](device_status status, const char* what) {
      if (status == 0) return;
      const std::string text = runtime_.text(status);
      end();
      throw system_error(who + "cannot create " + what + ": " + text + " (" + std::to_string(status) + ")");
    };
    check(runtime_.make_pool(&pool_, device), "a memory pool");
    has_pool_ = true;
    for (const device_id each : seen_by) {
      const std::string what = "memory that device " + std::to_string(to_index(each)) + " can access";
      check(runtime_.share_pool(pool_, each), what.c_str());
    }
    check(runtime_.make_stream(&stream_, device), "a stream");
    has_stream_ = true;
  }
  device_pool_source(device_pool_source&& other) noexcept
      : runtime_(other.runtime_),
        device_(other.device_),
        pool_(other.pool_),
        stream_(other.stream_),
        has_pool_(std::exchange(other.has_pool_, false)),
        has_stream_(std::exchange(other.has_stream_, false)),
        last_error_(other.last_error_),
        kept_bytes_(std::exchange(other.kept_bytes_, 0)),
        starts_(std::move(other.starts_)) {}
  device_pool_source& operator=(device_pool_source&& other) noexcept {
    std::swap(runtime_, other.runtime_);
    std::swap(device_, other.device_);
    std::swap(pool_, other.pool_);
    std::swap(stream_, other.stream_);
    std::swap(has_pool_, other.has_pool_);
    std::swap(has_stream_, other.has_stream_);
    std::swap(last_error_, other.last_error_);
    std::swap(kept_bytes_, other.kept_bytes_);
    std::swap(starts_, other.starts_);
    return *this;
  }
  ~device_pool_source() { end(); }

  [[nodiscard]] std::uint64_t footprint(std::uint64_t bytes, std::uint64_t alignment) const noexcept {
    const std::uint64_t more = alignment > pool_alignment ? alignment - pool_alignment : 0;
    const std::uint64_t most = max_bytes - pool_alignment;
    if (bytes > most || more > most - bytes) return max_bytes;
    return (bytes + more + pool_alignment - 1) / pool_alignment * pool_alignment;
  }

  [[nodiscard]] std::byte* take(std::uint64_t bytes, std::uint64_t alignment) noexcept {
    const std::uint64_t count = footprint(bytes, alignment);
    give_back_kept();
    last_error_ = 0;
    if (!starts_.reserve_one()) return nullptr;
    void* data = nullptr;
    last_error_ = runtime_.allocate(&data, static_cast<std::size_t>(count), pool_, stream_);
    if (last_error_ != 0) {
      if (runtime_.wait_stream(stream_) != 0) return nullptr;
      last_error_ = runtime_.allocate(&data, static_cast<std::size_t>(count), pool_, stream_);
      if (last_error_ != 0) return nullptr;
    }
    auto* const first = static_cast<std::byte*>(data);
    const std::uint64_t over = reinterpret_cast<std::uintptr_t>(first) & (alignment - 1);
    std::byte* const aligned = first + (over == 0 ? 0 : alignment - over);
    starts_.insert(aligned, bytes, {first, count});
    last_error_ = runtime_.wait_stream(stream_);
    if (last_error_ == 0) return aligned;
    static_cast<void>(release(aligned));
    return nullptr;
  }

  void give_back(std::byte* data, std::uint64_t, std::uint64_t) noexcept {
    last_error_ = release(data);
    if (last_error_ == 0) give_back_kept();
  }

  /// Bytes that were returned, and that the driver has not taken back.
  [[nodiscard]] std::uint64_t kept_bytes() const noexcept { return kept_bytes_; }
  /// Tries to return these bytes.
  void give_back_kept() noexcept {
    while (kept_bytes_ != 0) {
      const std::byte* data = nullptr;
      for (const auto& each : starts_) {
        if (!each.payload.is_kept) continue;
        data = each.data;
        kept_bytes_ -= each.payload.bytes;
        break;
      }
      if (data == nullptr || release(data) != 0) return;
    }
  }

  /// Returns to the system the unused bytes of its pool, all except `keep`. Waits for its own stream, and the
  /// driver may wait for the device.
  device_status trim(std::uint64_t keep) noexcept {
    give_back_kept();
    // Only memory that has returned to the pool can be trimmed.
    last_error_ = runtime_.wait_stream(stream_);
    if (last_error_ == 0) last_error_ = runtime_.trim_pool(pool_, static_cast<std::size_t>(keep));
    return last_error_;
  }

  [[nodiscard]] device_id device() const noexcept { return device_; }
  [[nodiscard]] const Runtime& runtime() const noexcept { return runtime_; }
  /// Returns the error of its last call.
  [[nodiscard]] device_status last_error() const noexcept { return last_error_; }

 private:
  /// The pool's memory of a range.
  struct beneath {
    std::byte* first = nullptr;  // where the pool's own range begins
    std::uint64_t bytes = 0;     // its bytes
    bool is_kept = false;        // returned, and refused by the driver
  };

  /// A refused range keeps its place in the table, so nothing must be allocated for it.
  device_status release(const std::byte* data) noexcept {
    const auto range = starts_.remove(data);
    const device_status status = give_to_pool(range.payload);
    if (status != 0) {
      starts_.insert(range.data, range.bytes, {range.payload.first, range.payload.bytes, true});
      kept_bytes_ += range.payload.bytes;
    }
    return status;
  }
  /// A runtime over an engine's resource needs the number of bytes, too.
  device_status give_to_pool(const beneath& range) noexcept {
    if constexpr (requires { runtime_.release(range.first, std::size_t{}, stream_); }) {
      return runtime_.release(range.first, static_cast<std::size_t>(range.bytes), stream_);
    } else {
      return runtime_.release(range.first, stream_);
    }
  }
  void end() noexcept {
    if (std::exchange(has_stream_, false)) {
      give_back_kept();
      // Freed memory is on its way through the stream.
      static_cast<void>(runtime_.wait_stream(stream_));
      static_cast<void>(runtime_.end_stream(stream_));
    }
    if (std::exchange(has_pool_, false)) static_cast<void>(runtime_.end_pool(pool_));
  }

  Runtime runtime_;
  device_id device_;
  typename Runtime::pool pool_{};
  typename Runtime::stream stream_{};
  bool has_pool_ = false;
  bool has_stream_ = false;
  device_status last_error_ = 0;
  std::uint64_t kept_bytes_ = 0;
  live_ranges<beneath> starts_;
};

/// The interface of a memory resource, by its shape: `allocate_sync` of CCCL 3.1 and newer and of RMM, or
/// `allocate` of CCCL before and of `std::pmr`.
template <class R>
concept resource_with_sync = requires(R& from, void* data, std::size_t n) {
  { from.allocate_sync(n, n) } -> std::same_as<void*>;
  from.deallocate_sync(data, n, n);
};
template <class R>
concept resource_with_allocate = requires(R& from, void* data, std::size_t n) {
  { from.allocate(n, n) } -> std::same_as<void*>;
  from.deallocate(data, n, n);
};

/// A `byte_source` over an engine's own memory resource: `cuda::mr`, RMM, or another. It does not own the
/// resource, which outlives it. A resource that throws has refused; no exception passes. It takes any
/// resource of that shape, and passes the alignment on: for the pools of CCCL, which refuse more than 256 and
/// use a stream of device 0, `cccl_source` (interop/cccl_source.hpp) is better.
///
/// @par Thread safety   the space holds its lock around every call; a resource that other code uses at the
///                      same time must be synchronised itself.
template <class Resource>
  requires(resource_with_sync<Resource> || resource_with_allocate<Resource>)
class resource_source {
 public:
  explicit resource_source(Resource& upstream) noexcept : upstream_(&upstream) {}

  [[nodiscard]] std::uint64_t footprint(std::uint64_t bytes, std::uint64_t) const noexcept { return bytes; }
  [[nodiscard]] std::byte* take(std::uint64_t bytes, std::uint64_t alignment) noexcept {
    const auto count = static_cast<std::size_t>(bytes);
    const auto multiple = static_cast<std::size_t>(alignment);
    try {
      if constexpr (resource_with_sync<Resource>) {
        return static_cast<std::byte*>(upstream_->allocate_sync(count, multiple));
      } else {
        return static_cast<std::byte*>(upstream_->allocate(count, multiple));
      }
    } catch (...) {
      return nullptr;
    }
  }
  void give_back(std::byte* data, std::uint64_t bytes, std::uint64_t alignment) noexcept {
    const auto count = static_cast<std::size_t>(bytes);
    const auto multiple = static_cast<std::size_t>(alignment);
    try {
      if constexpr (resource_with_sync<Resource>) {
        upstream_->deallocate_sync(data, count, multiple);
      } else {
        upstream_->deallocate(data, count, multiple);
      }
    } catch (...) {
      // A resource that fails to take its memory back keeps it, because no caller here can handle it.
    }
  }

 private:
  Resource* upstream_;
};

/// Memory of one device, under a hard budget, with misuse of its ranges caught as in `basic_host_space`. The
/// host must not access it: a `basic_device_queue` or the kernels copy it.
///
/// @par Complexity      O(log n) look-up and O(n) bookkeeping in the number of live ranges, plus the source.
/// @par Thread safety   any number of threads; one mutex.
/// @par Errors          the constructor throws `length_error`, and what its source throws; a refusal by the
///                      driver is `errc::system_refused`, index its `device_status`.
/// @tparam Source  `device_pool_source`, or `resource_source` of device memory.
template <byte_source Source>
class basic_device_space {
 public:
  using range_type = memory_range<basic_device_space>;
  using source_type = Source;
  static constexpr bool is_host_accessible = false;

  basic_device_space(Source source, device_options options)
      : ledger_(std::move(source), std::move(options)) {}
  /// Takes memory from its own pool on that device.
  basic_device_space(device_id device, device_options options)
    requires(std::constructible_from<Source, device_id>)
      : basic_device_space(Source(device), std::move(options)) {}

  /// Returns at least `bytes` bytes at a multiple of `alignment`, with undefined contents. Waits for no work
  /// of the caller's.
  [[nodiscard]] result<range_type> try_allocate(std::uint64_t bytes, std::uint64_t alignment) noexcept {
    const result<std::byte*> data = ledger_.take(bytes, alignment);
    if (!data) return data.error();
    return range_type{*data, bytes};
  }
  /// Takes back a range as `try_allocate` returned it; does nothing for an empty one. Memory that the source
  /// cannot return yet stays charged, `stats().kept_bytes`, until it can.
  void deallocate(range_type range) noexcept { ledger_.give_back(range.data, range.bytes); }

  /// After a peak: frees for other users the source's bytes that are in no range, all except `keep`.
  /// `errc::device_failed` if the driver refuses, index its status.
  result<void> trim(std::uint64_t keep = 0) noexcept
    requires requires(Source& source) {
      { source.trim(keep) } noexcept -> std::same_as<device_status>;
    }
  {
    const device_status status = ledger_.with_source([keep](Source& source) { return source.trim(keep); });
    if (status == 0) return {};
    return failure{errc::device_failed, status, 0, 0, ledger_.name()};
  }

  [[nodiscard]] std::uint64_t capacity() const noexcept { return ledger_.options().budget; }
  [[nodiscard]] std::uint64_t used() const noexcept { return ledger_.used(); }
  [[nodiscard]] std::string_view name() const noexcept LLMMEM_LIFETIMEBOUND { return ledger_.options().name; }

  /// Whether all of `range` is inside one live range.
  [[nodiscard]] bool holds(range_type range) const noexcept { return ledger_.holds(range.data, range.bytes); }
  [[nodiscard]] space_stats stats() const noexcept { return ledger_.stats(); }
  /// Returns one sentence for each broken invariant of its bookkeeping; none means proven. O(ranges);
  /// allocates.
  [[nodiscard]] std::vector<std::string> audit() { return ledger_.audit(); }
  /// Returns the source. Not while another thread allocates.
  [[nodiscard]] const Source& source() const noexcept { return ledger_.source(); }

 private:
  detail::space_ledger<Source, device_options> ledger_;
};

}  // namespace v0
}  // namespace llmmem
