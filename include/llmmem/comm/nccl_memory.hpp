/// @file
/// `nccl_memory`: memory of the current device that NCCL can register as a window. Needs NCCL 2.28 or newer.
#pragma once

#include <llmmem/config.hpp>

#if !__has_include(<nccl.h>)
#error \
    "llmmem/comm/nccl_memory.hpp needs NCCL and the CUDA Toolkit: install libnccl-dev and link llmmem::nccl."
#endif

#include <llmmem/comm/detail/nccl_library.hpp>
#include <llmmem/error.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// The owner of memory from NCCL's own allocator, which maps it so that other devices, and switches, can
/// reach it: `nccl_transport::register_window` takes it. NCCL rounds its size up to its own granularity (2
/// MiB and more), so use one for many tensors.
///
///     nccl_memory<> gradients(bytes);
///     ranks.register_window(gradients.bytes(), ranks.after(...)).value();      // again in each epoch
///     ranks.all_reduce(gradients.bytes(), gradients.bytes(), ncclBfloat16, ncclSum, ranks.after(...));
///
/// It outlives the windows on it: end them with `deregister_window`, or let the transport leave or end first.
/// After a failed call the next epoch ends them. NCCL before 2.29.7 does not free the memory of a window that
/// ended with an aborted communicator until the process ends (its source, `ncclDevrFinalize`). So keep the
/// memory across epochs and register it again, rather than allocate other memory for each.
///
/// @par Waits           construction and destruction wait for the device.
/// @par Thread safety   as a plain value.
/// @par Errors          the constructor throws `length_error` for 0 bytes, and `system_error` if there is no
///   device and for refusals by NCCL, with its text; a refusal to release memory is not reported.
template <class Api = nccl_library>
class nccl_memory {
 public:
  /// Constructs an empty owner.
  nccl_memory() noexcept = default;
  explicit nccl_memory(std::uint64_t bytes, Api api = {}) : api_(std::move(api)), size_(bytes) {
    if (bytes == 0) throw length_error("nccl_memory: 0 bytes; at least 1 is needed");
    if (const char* const why = api_.why_no_device())
      throw system_error(std::string("nccl_memory: no device: ") + why);
    void* made = nullptr;
    if (const ncclResult_t status = api_.take_memory(&made, static_cast<std::size_t>(bytes));
        status != ncclSuccess)
      throw system_error("nccl_memory: ncclMemAlloc of " + std::to_string(bytes) +
                         " bytes: " + api_.text(status));
    data_ = static_cast<std::byte*>(made);
  }
  nccl_memory(nccl_memory&& other) noexcept
      : api_(other.api_), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  nccl_memory& operator=(nccl_memory&& other) noexcept {
    std::swap(api_, other.api_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~nccl_memory() {
    if (data_ != nullptr) static_cast<void>(api_.give_memory_back(data_));
  }

  [[nodiscard]] std::span<std::byte> bytes() const noexcept LLMMEM_LIFETIMEBOUND {
    return {data_, static_cast<std::size_t>(size_)};
  }

 private:
  Api api_{};
  std::byte* data_ = nullptr;
  std::uint64_t size_ = 0;
};

}  // namespace v0
}  // namespace llmmem
