/// @file
/// `device_mapper`: virtual memory of a device, for `basic_virtual_memory`. Needs no CUDA;
/// `device_virtual_memory` of device/cuda.hpp is the one over CUDA's driver.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/device/device_runtime.hpp>
#include <llmmem/error.hpp>
#include <llmmem/space/virtual_memory.hpp>

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The calls of a driver that handles addresses and memory separately: those of CUDA's virtual memory
/// management, with addresses and handles as numbers. 0 is success. `why_missing()`: null if the driver has
/// them.
template <class P>
concept device_paging = std::copyable<P> && requires(const P& run, device_id device, std::uint64_t n,
                                                     std::uint64_t* out, device_status status) {
  { run.why_missing() } noexcept -> std::same_as<const char*>;
  { run.text(status) } noexcept -> std::same_as<const char*>;
  { run.granularity(out, device) } noexcept -> std::same_as<device_status>;
  { run.reserve(out, n, n) } noexcept -> std::same_as<device_status>;
  { run.release(n, n) } noexcept -> std::same_as<device_status>;
  { run.create(out, n, device) } noexcept -> std::same_as<device_status>;
  { run.destroy(n) } noexcept -> std::same_as<device_status>;
  { run.map(n, n, n) } noexcept -> std::same_as<device_status>;
  { run.allow(n, n, device) } noexcept -> std::same_as<device_status>;
  { run.unmap(n, n) } noexcept -> std::same_as<device_status>;
};

/// Options of a `device_mapper`.
struct device_mapper_options {
  device_id device{};                ///< the device with the memory
  std::vector<device_id> seen_by{};  ///< others that may read and write it, as peers of `device`
  std::uint64_t granularity = 0;     ///< a power of two, a multiple of the driver's; 0: that, usually 2 MiB
};

/// A `page_mapper` over a device's driver. Work that uses a range must finish before the range is unmapped,
/// because the driver does not wait, and concurrent kernels fault on some devices.
///
/// @par Complexity      each call is one of the driver's, tens of microseconds and more.
/// @par Thread safety   none of its own.
/// @par Errors          the constructor throws `system_error` if the driver has no such calls, and
///      `argument_error` for a granularity that is not a multiple of the driver's; error numbers are the
///      driver's.
template <device_paging Paging>
class device_mapper {
 public:
  static constexpr bool is_host_accessible = false;

  explicit device_mapper(device_mapper_options options = {}, Paging paging = {})
      : paging_(paging), options_(std::move(options)) {
    if (const char* const why = paging_.why_missing(); why != nullptr)
      throw system_error("device_mapper: no virtual memory management: " + std::string(why) +
                         "; use host_virtual_memory where there is no device");
    std::uint64_t unit = 0;
    if (const device_status status = paging_.granularity(&unit, options_.device); status != 0) {
      throw system_error("device_mapper: device " + std::to_string(to_index(options_.device)) +
                         ": cannot read the granularity: " + paging_.text(status) + " (" +
                         std::to_string(status) + ")");
    }
    if (options_.granularity == 0) options_.granularity = unit;
    // Addresses are aligned to it as well.
    if (options_.granularity % unit != 0 || !std::has_single_bit(options_.granularity)) {
      throw argument_error("device_mapper: a granularity of " + std::to_string(options_.granularity) +
                           " bytes must be a multiple of the driver's, " + std::to_string(unit) +
                           ", and a power of two");
    }
  }

  [[nodiscard]] std::uint64_t granularity() const noexcept { return options_.granularity; }

  [[nodiscard]] mapper_answer reserve(std::uint64_t bytes) noexcept {
    mapper_answer answer;
    answer.error = paging_.reserve(&answer.value, bytes, options_.granularity);
    return answer;
  }
  void release(std::byte* at, std::uint64_t bytes) noexcept {
    static_cast<void>(paging_.release(address(at), bytes));
  }
  [[nodiscard]] mapper_answer create(std::uint64_t bytes) noexcept {
    mapper_answer answer;
    answer.error = paging_.create(&answer.value, bytes, options_.device);
    return answer;
  }
  void destroy(std::uint64_t token, std::uint64_t) noexcept { static_cast<void>(paging_.destroy(token)); }
  [[nodiscard]] std::uint32_t map(std::byte* at, std::uint64_t token, std::uint64_t bytes) noexcept {
    return paging_.map(address(at), bytes, token);
  }
  [[nodiscard]] std::uint32_t allow(std::byte* at, std::uint64_t bytes) noexcept {
    std::uint32_t status = paging_.allow(address(at), bytes, options_.device);
    for (const device_id each : options_.seen_by) {
      if (status == 0) status = paging_.allow(address(at), bytes, each);
    }
    return status;
  }
  [[nodiscard]] std::uint32_t unmap(std::byte* at, std::uint64_t bytes) noexcept {
    return paging_.unmap(address(at), bytes);
  }

 private:
  [[nodiscard]] static std::uint64_t address(const std::byte* at) noexcept {
    return static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(at));
  }

  Paging paging_;
  device_mapper_options options_;
};

}  // namespace v0
}  // namespace llmmem
