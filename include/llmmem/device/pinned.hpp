/// @file
/// Host memory that a device accesses by itself. Needs no CUDA; `pinned_space` of device/cuda.hpp is the one
/// over CUDA.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/device/device_runtime.hpp>
#include <llmmem/device/errors.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/errors.hpp>
#include <llmmem/space/live_ranges.hpp>
#include <llmmem/space/pages.hpp>

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// Options of a `pinned_source`.
struct pinned_options {
  /// The driver registers this much at a time, a multiple of 2 MiB; 0: each request as one. Chunks let it do
  /// other work in between, but a copy must not cross from one into the next (sglang#36798).
  ///
  /// One registration must stay below `pinned_source::registration_limit`, 2^39 bytes: drivers of R580 refuse
  /// more with "out of memory", regardless of the memory available (open-gpu-kernel-modules#1234,
  /// LMCache#5177). Larger requests need chunks.
  std::uint64_t chunk_bytes = 0;
  page_options pages{};  ///< `map_from` has no effect: every request gets its own pages
  /// The device whose context registers them; all devices see them. Empty: the current one. In CUDA that
  /// initialises the device: if each process has its own device, name it, or each process has a context on
  /// device 0.
  std::optional<device_id> device{};
};

/// What happened to pages.
struct pinned_report {
  std::uint64_t registered_bytes = 0;  ///< registered, so that a device copies them itself; live
  std::uint64_t locked_bytes = 0;      ///< without a device: held in memory by the system (`mlock`), live
  std::uint64_t unlocked_bytes = 0;    ///< without a device: not locked: the system refused (RLIMIT_MEMLOCK)
  int last_errno = 0;                  ///< the `errno` of the last `mlock` that was refused
};

/// A `byte_source` of pages that a driver has registered and the system keeps in memory. Without a device
/// they are locked, as far as the system allows, and all else works: `why_no_device()` returns the reason.
///
///     using source = pinned_source<cuda_runtime>;
///     basic_host_space<source> staging(source(), {.budget = bytes});
///
/// @par Complexity      a request: pages from the system, each touched and registered: milliseconds per GiB
///                      and more. Make few and large requests, once.
/// @par Thread safety   none; the space holds its lock.
/// @par Errors          the constructor throws `argument_error` for chunks that are not a multiple of 2 MiB.
///      A driver that refuses pages refuses the request: nothing stays registered. In a space on it,
///      `errc::out_of_bytes` with index 1 for a request with a registration of `registration_limit` bytes,
///      before anything is taken: found = the most that one may have, where = which option to set.
template <device_runtime Runtime>
class pinned_source {
 public:
  /// One registration by the driver stays below this.
  static constexpr std::uint64_t registration_limit = std::uint64_t{1} << 39;

  explicit pinned_source(const pinned_options& options = {})
    requires(std::default_initializable<Runtime>)
      : pinned_source(options, Runtime{}) {}
  pinned_source(const pinned_options& options, Runtime runtime)
      : runtime_(runtime),
        chunk_(options.chunk_bytes == 0 ? max_bytes : options.chunk_bytes),
        has_device_(options.device.has_value()),
        device_(options.device ? *options.device : device_id{0}),
        pages_(own_pages(options.pages)) {
    constexpr std::uint64_t unit = std::uint64_t{2} << 20;
    if (options.chunk_bytes % unit != 0) {
      throw argument_error("pinned_source: chunk_bytes is " + std::to_string(chunk_) +
                           "; it must be a multiple of 2 MiB");
    }
    why_no_device_ = runtime_.why_no_device(device_);
  }

  [[nodiscard]] std::uint64_t footprint(std::uint64_t bytes, std::uint64_t alignment) const noexcept {
    return pages_.footprint(bytes, alignment);
  }

  /// Returns why a request of this size cannot succeed, if so; the source then does not try it.
  [[nodiscard]] std::optional<failure> refusal(std::uint64_t bytes, std::uint64_t alignment) const noexcept {
    const std::uint64_t once = std::min(chunk_, footprint(bytes, alignment));
    if (why_no_device_ != nullptr || once < registration_limit) return std::nullopt;
    return failure{errc::out_of_bytes, 1, once, registration_limit - 1,
                   "pinned_source: a driver registers less than 512 GiB at once, set chunk_bytes"};
  }

  [[nodiscard]] std::byte* take(std::uint64_t bytes, std::uint64_t alignment) noexcept {
    last_error_ = 0;
    std::byte* const data = pages_.take(bytes, alignment);
    if (data == nullptr) return nullptr;
    const std::uint64_t all = footprint(bytes, alignment);
    if (why_no_device_ != nullptr) {
      lock(data, all);
      return data;
    }
    for (std::uint64_t at = 0; at < all; at += std::min(chunk_, all - at)) {
      const auto count = static_cast<std::size_t>(std::min(chunk_, all - at));
      last_error_ =
          runtime_.lock_pages(data + at, count, has_device_ ? std::optional(device_) : std::nullopt);
      if (last_error_ == 0) continue;
      unregister(data, at);
      pages_.give_back(data, bytes, alignment);
      return nullptr;
    }
    report_.registered_bytes += all;
    return data;
  }

  void give_back(std::byte* data, std::uint64_t bytes, std::uint64_t alignment) noexcept {
    const std::uint64_t all = footprint(bytes, alignment);
    if (why_no_device_ == nullptr) {
      unregister(data, all);
      report_.registered_bytes -= all;
    } else {
      const bool was_locked = locked_.holding(data, all) != nullptr;
      if (was_locked) locked_.remove(data);
      (was_locked ? report_.locked_bytes : report_.unlocked_bytes) -= all;
    }
    pages_.give_back(data, bytes, alignment);
  }

  /// Returns null if pages are registered with a device; else the reason.
  [[nodiscard]] const char* why_no_device() const noexcept { return why_no_device_; }
  [[nodiscard]] const pinned_report& report() const noexcept { return report_; }
  /// Returns the driver's error if it refused the last request.
  [[nodiscard]] device_status last_error() const noexcept { return last_error_; }

  /// Returns the address at which kernels see bytes of a live range; it may differ from the host's.
  /// `errc::device_failed` if the driver does not know the bytes, index its status; `errc::not_mapped` if it
  /// maps their chunks separately: then ask for parts.
  [[nodiscard]] result<std::byte*> device_address(std::byte* data, std::uint64_t bytes) const noexcept {
    constexpr const char* who = "pinned_source: device_address";
    void* first = nullptr;
    if (const device_status status = runtime_.device_address(&first, data); status != 0)
      return failure{errc::device_failed, status, bytes, 0, who};
    auto* const there = static_cast<std::byte*>(first);
    // At each possible beginning of a chunk, and at the end.
    constexpr std::uint64_t unit = std::uint64_t{2} << 20;
    const std::uint64_t step = chunk_ == max_bytes ? bytes : unit;
    for (std::uint64_t at = 0; at < bytes; at += std::min(step, bytes - at)) {
      const std::uint64_t last = std::min(step, bytes - at) + at - 1;
      void* seen = nullptr;
      if (const device_status status = runtime_.device_address(&seen, data + last); status != 0)
        return failure{errc::device_failed, status, bytes, 0, who};
      if (static_cast<std::byte*>(seen) != there + last)
        return failure{errc::not_mapped, 0, bytes, chunk_, who};
    }
    return there;
  }

 private:
  [[nodiscard]] static page_options own_pages(page_options options) noexcept {
    options.map_from = 0;
    return options;
  }
  void unregister(std::byte* data, std::uint64_t bytes) noexcept {
    for (std::uint64_t at = 0; at < bytes; at += std::min(chunk_, bytes - at))
      static_cast<void>(runtime_.unlock_pages(data + at));
  }
  void lock(std::byte* data, std::uint64_t bytes) noexcept {
    if (locked_.reserve_one() && ::mlock(data, static_cast<std::size_t>(bytes)) == 0) {
      locked_.insert(data, bytes, {});
      report_.locked_bytes += bytes;
    } else {
      report_.last_errno = errno;
      report_.unlocked_bytes += bytes;
    }
  }

  Runtime runtime_;
  std::uint64_t chunk_;
  // Not an optional, because g++ 12 warns that a moved empty one is read before it is written.
  bool has_device_;
  device_id device_;
  page_source pages_;
  const char* why_no_device_ = nullptr;
  struct nothing {};
  live_ranges<nothing> locked_;  // without a device
  pinned_report report_;
  device_status last_error_ = 0;
};

}  // namespace v0
}  // namespace llmmem
