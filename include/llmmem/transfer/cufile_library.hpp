/// @file
/// `cufile_library`: cuFile (GPUDirect Storage) for `device_file_io`. Needs cufile.h,
/// libcufile and the CUDA Toolkit (llmmem::cufile).
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/transfer/device_file_io.hpp>
#include <llmmem/transfer/io_engine.hpp>

#include <cuda_runtime_api.h>
#include <cufile.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <span>

namespace llmmem {
inline namespace v0 {

/// cuFile's batch interface. The driver is opened by the first object of a process and stays open, because
/// other code may use it too. Where a machine, file system or file allows no direct path, cuFile copies
/// through host memory itself, if its configuration says so (`allow_compat_mode`, on by default).
///
/// @par Thread safety   one thread at a time for each object; any number of objects.
/// @par Source          "cuFile API Reference Guide", NVIDIA, version 1.13 and newer.
class cufile_library {
 public:
  using file = CUfileHandle_t;
  using batch = CUfileBatchHandle_t;

  [[nodiscard]] const char* why_not() noexcept {
    // cuFile 1.20 searches for devices without end on a machine that has none.
    int devices = 0;
    const cudaError_t counted = ::cudaGetDeviceCount(&devices);
    static_cast<void>(::cudaGetLastError());
    if (counted != cudaSuccess) return ::cudaGetErrorString(counted);
    if (devices == 0) return "cuFile: this machine has no device";
    static const CUfileError_t opened = ::cuFileDriverOpen();
    if (opened.err == CU_FILE_SUCCESS || opened.err == CU_FILE_DRIVER_ALREADY_OPEN) return nullptr;
    if (opened.err == CU_FILE_CUDA_DRIVER_ERROR) return "cuFile: CUDA's driver refused; is there a device?";
    const char* const reason = ::cufileop_status_error(opened.err);
    return reason != nullptr ? reason : "cuFile: its driver could not be opened";
  }

  [[nodiscard]] int open(file& made, int descriptor) noexcept {
    CUfileDescr_t of{};
    of.type = CU_FILE_HANDLE_TYPE_OPAQUE_FD;
    of.handle.fd = descriptor;
    return number_of(::cuFileHandleRegister(&made, &of));
  }
  void close(file opened) noexcept { ::cuFileHandleDeregister(opened); }

  [[nodiscard]] int make(batch& made, std::uint32_t depth) noexcept {
    return number_of(::cuFileBatchIOSetUp(&made, depth));
  }
  void end(batch made) noexcept { ::cuFileBatchIODestroy(made); }

  [[nodiscard]] int submit(batch by, std::span<const device_file_request<file>> requests) noexcept {
    for (std::size_t i = 0; i < requests.size(); ++i) {
      const device_file_request<file>& from = requests[i];
      CUfileIOParams_t& to = parameters_[i];
      to = {};
      to.mode = CUFILE_BATCH;
      to.u.batch.devPtr_base = from.data;
      to.u.batch.file_offset = static_cast<off_t>(from.offset);
      to.u.batch.devPtr_offset = 0;
      to.u.batch.size = static_cast<std::size_t>(from.bytes);
      to.fh = from.file;
      to.opcode = from.way == io_direction::read ? CUFILE_READ : CUFILE_WRITE;
      // NOLINTNEXTLINE(performance-no-int-to-ptr): a number in the form of a cookie
      to.cookie = reinterpret_cast<void*>(static_cast<std::uintptr_t>(from.tag));
    }
    return number_of(
        ::cuFileBatchIOSubmit(by, static_cast<unsigned>(requests.size()), parameters_.data(), 0));
  }

  [[nodiscard]] int poll(batch by, std::span<io_completion> out, std::uint32_t least,
                         std::uint64_t timeout_ns, std::uint32_t& count) noexcept {
    constexpr std::uint64_t second = 1'000'000'000;
    std::timespec timeout{static_cast<std::time_t>(timeout_ns / second),
                          static_cast<long>(timeout_ns % second)};
    auto found = static_cast<unsigned>(out.size() < events_.size() ? out.size() : events_.size());
    const int error = number_of(::cuFileBatchIOGetStatus(by, least, &found, events_.data(), &timeout));
    count = 0;
    if (error != 0) return error;
    for (unsigned i = 0; i < found; ++i) {
      const CUfileIOEvents_t& each = events_[i];
      out[count++] = {reinterpret_cast<std::uintptr_t>(each.cookie), outcome_of(each)};
    }
    return 0;
  }

  [[nodiscard]] int keep_registered(std::byte* data, std::uint64_t bytes) noexcept {
    return number_of(::cuFileBufRegister(data, static_cast<std::size_t>(bytes), 0));
  }

 private:
  static constexpr std::size_t most = 128;  // cuFile's `io_batchsize`

  [[nodiscard]] static int number_of(const CUfileError_t& status) noexcept {
    if (status.err == CU_FILE_SUCCESS) return 0;
    if (status.err == CU_FILE_INVALID_FILE_TYPE || status.err == CU_FILE_INVALID_FILE_OPEN_FLAG)
      return EINVAL;
    if (status.err == CU_FILE_IO_NOT_SUPPORTED) return ENOTSUP;
    return EIO;
  }
  [[nodiscard]] static std::int32_t outcome_of(const CUfileIOEvents_t& of) noexcept {
    const auto moved = static_cast<std::int64_t>(of.ret);
    if (of.status == CUFILE_COMPLETE && moved >= 0) return static_cast<std::int32_t>(moved);
    if (of.status == CUFILE_TIMEOUT) return -ETIMEDOUT;
    if (of.status == CUFILE_CANCELED) return -ECANCELED;
    if (of.status == CUFILE_INVALID) return -EINVAL;
    constexpr std::int64_t last_number = 4095;  // of the system; beyond are cuFile's own
    return moved < 0 && moved >= -last_number ? static_cast<std::int32_t>(moved) : -EIO;
  }

  std::array<CUfileIOParams_t, most> parameters_{};
  std::array<CUfileIOEvents_t, most> events_{};
};

static_assert(device_file_library<cufile_library>);

/// An engine over cuFile.
using cufile_io = device_file_io<cufile_library>;

}  // namespace v0
}  // namespace llmmem
