/// @file
/// Spaces and queues over CUDA: `device_space`, `pinned_space`, `device_queue`, `device_virtual_memory`.
/// Needs `llmmem::cuda`, and no nvcc. A program that includes it starts without a driver as well; calls that
/// need a driver report its absence.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/device/batch_copier.hpp>
#include <llmmem/device/cuda_calls.hpp>
#include <llmmem/device/device.hpp>
#include <llmmem/device/device_fence.hpp>
#include <llmmem/device/device_mapper.hpp>
#include <llmmem/device/device_queue.hpp>
#include <llmmem/device/device_runtime.hpp>
#include <llmmem/device/pinned.hpp>
#include <llmmem/device/streamed_space.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/space/virtual_memory.hpp>

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// Makes a device current, and restores the one before it. From CUDA 12 on that initialises both: an engine
/// that wants no context on device 0 makes its own device current first, in each thread that calls these
/// functions.
class current_device {
 public:
  explicit current_device(device_id device) noexcept {
    const auto wanted = static_cast<int>(to_index(device));
    if (taken(cudaGetDevice(&before_)) != cudaSuccess) before_ = -1;
    if (before_ == wanted) before_ = -1;  // no change needed
    status_ = taken(cudaSetDevice(wanted));
  }
  current_device(const current_device&) = delete;
  current_device& operator=(const current_device&) = delete;
  ~current_device() {
    // This can fail if that device is exclusive to another process, or is lost.
    if (before_ >= 0) static_cast<void>(taken(cudaSetDevice(before_)));
  }
  [[nodiscard]] cudaError_t status() const noexcept { return status_; }

 private:
  int before_ = -1;
  cudaError_t status_ = cudaSuccess;
};

/// Returns a status in the form of `device_runtime`.
[[nodiscard]] inline device_status told(cudaError_t status) noexcept {
  return static_cast<device_status>(taken(status));
}

}  // namespace detail

/// The CUDA runtime as a `device_runtime`.
///
/// @par Thread safety   any number of threads.
struct cuda_runtime {
  using pool = cudaMemPool_t;
  using stream = cudaStream_t;
  using event = cudaEvent_t;
  static constexpr device_status not_ready = static_cast<device_status>(cudaErrorNotReady);

  [[nodiscard]] const char* why_no_device(device_id device) const noexcept {
    // Without a driver cudaGetDeviceCount leaves its argument unchanged; asking for the version never fails.
    int driver = 0;
    if (detail::taken(cudaDriverGetVersion(&driver)) != cudaSuccess || driver == 0)
      return "there is no CUDA driver";
    int count = 0;
    const cudaError_t status = detail::taken(cudaGetDeviceCount(&count));
    if (status != cudaSuccess) return cudaGetErrorString(status);
    if (count == 0) return "there is a CUDA driver, but no device";
    return to_index(device) < static_cast<std::uint32_t>(count) ? nullptr : "there are fewer devices";
  }
  [[nodiscard]] const char* text(device_status status) const noexcept {
    return cudaGetErrorString(static_cast<cudaError_t>(status));
  }

  device_status make_pool(pool* made, device_id device) const noexcept {
    const detail::beside_captures others;
    cudaMemPoolProps properties{};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location.type = cudaMemLocationTypeDevice;
    properties.location.id = static_cast<int>(to_index(device));
    if (const cudaError_t status = cudaMemPoolCreate(made, &properties); status != cudaSuccess)
      return detail::told(status);
    // With the default of 0 the pool returns all free memory to the system at each wait for a stream.
    std::uint64_t all = ~std::uint64_t{0};
    const cudaError_t status = cudaMemPoolSetAttribute(*made, cudaMemPoolAttrReleaseThreshold, &all);
    if (status != cudaSuccess) static_cast<void>(cudaMemPoolDestroy(*made));
    return detail::told(status);
  }
  device_status share_pool(pool of, device_id device) const noexcept {
    const detail::beside_captures others;
    cudaMemAccessDesc how{};
    how.location.type = cudaMemLocationTypeDevice;
    how.location.id = static_cast<int>(to_index(device));
    how.flags = cudaMemAccessFlagsProtReadWrite;
    return detail::told(cudaMemPoolSetAccess(of, &how, 1));
  }
  device_status trim_pool(pool of, std::size_t keep) const noexcept {
    const detail::beside_captures others;
    // CUDA counts all memory that the pool holds, not its free part.
    std::uint64_t held = 0;
    if (const cudaError_t status = cudaMemPoolGetAttribute(of, cudaMemPoolAttrUsedMemCurrent, &held);
        status != cudaSuccess)
      return detail::told(status);
    const std::uint64_t most = ~std::size_t{0};
    return detail::told(
        cudaMemPoolTrimTo(of, static_cast<std::size_t>(keep < most - held ? held + keep : most)));
  }
  device_status end_pool(pool of) const noexcept {
    const detail::beside_captures others;
    return detail::told(cudaMemPoolDestroy(of));
  }
  device_status allocate(void** bytes, std::size_t count, pool from, stream on) const noexcept {
    const detail::beside_captures others;
    return detail::told(cudaMallocFromPoolAsync(bytes, count, from, on));
  }
  device_status release(void* bytes, stream on) const noexcept {
    const detail::beside_captures others;
    return detail::told(cudaFreeAsync(bytes, on));
  }

  device_status make_stream(stream* made, device_id device) const noexcept {
    const detail::beside_captures others;
    const detail::current_device now(device);
    if (now.status() != cudaSuccess) return detail::told(now.status());
    return detail::told(cudaStreamCreateWithFlags(made, cudaStreamNonBlocking));
  }
  device_status end_stream(stream of) const noexcept {
    const detail::beside_captures others;
    return detail::told(cudaStreamDestroy(of));
  }
  device_status wait_stream(stream of) const noexcept {
    const detail::beside_captures others;
    return detail::told(cudaStreamSynchronize(of));
  }

  device_status make_event(event* made, device_id device) const noexcept {
    const detail::beside_captures others;
    const detail::current_device now(device);
    if (now.status() != cudaSuccess) return detail::told(now.status());
    return detail::told(cudaEventCreateWithFlags(made, cudaEventDisableTiming));
  }
  device_status end_event(event of) const noexcept {
    const detail::beside_captures others;
    return detail::told(cudaEventDestroy(of));
  }
  device_status record(event of, stream on) const noexcept { return detail::told(cudaEventRecord(of, on)); }
  /// Another thread may be capturing a graph: this call does not end the capture. An event that cannot be
  /// queried then counts as not ready.
  device_status query(event of) const noexcept {
    const detail::beside_captures others;
    const cudaError_t status = cudaEventQuery(of);
    const bool is_untold = status == cudaErrorStreamCaptureUnsupported || status == cudaErrorCapturedEvent;
    return detail::told(is_untold ? cudaErrorNotReady : status);
  }
  device_status wait_event(event of) const noexcept {
    const detail::beside_captures others;
    return detail::told(cudaEventSynchronize(of));
  }
  device_status stream_waits(stream on, event of) const noexcept {
    return detail::told(cudaStreamWaitEvent(on, of, 0));
  }

  device_status copy(void* to, const void* from, std::size_t count, stream on) const noexcept {
    return detail::told(cudaMemcpyAsync(to, from, count, cudaMemcpyDefault, on));
  }
  /// Reads sources in the order of the stream, so it copies what earlier work there wrote. Needs CUDA 12.8;
  /// from 13.0 on with another signature.
  device_status copy_many(void* const* to, const void* const* from, const std::size_t* bytes,
                          std::size_t count, stream on) const noexcept {
    cudaMemcpyAttributes how{};
    how.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    std::size_t first = 0;
#if CUDART_VERSION >= 13000
    return detail::told(cudaMemcpyBatchAsync(to, from, bytes, count, &how, &first, 1, on));
#else
    std::size_t failed = 0;
    return detail::told(cudaMemcpyBatchAsync(const_cast<void**>(to), const_cast<void**>(from),
                                             const_cast<std::size_t*>(bytes), count, &how, &first, 1, &failed,
                                             on));
#endif
  }
  device_status copy_evenly(void* to, std::size_t to_stride, const void* from, std::size_t from_stride,
                            std::size_t bytes, std::size_t count, stream on) const noexcept {
    return detail::told(
        cudaMemcpy2DAsync(to, to_stride, from, from_stride, bytes, count, cudaMemcpyDefault, on));
  }
  [[nodiscard]] bool takes_many(stream on) const noexcept {
    return on != nullptr && on != cudaStreamLegacy && !is_capturing(on);
  }
  /// The legacy stream cannot be queried while a stream that waits for it is captured
  /// (cudaErrorStreamCaptureImplicit): work submitted to it then would end that capture.
  [[nodiscard]] bool is_capturing(stream on) const noexcept {
    cudaStreamCaptureStatus now = cudaStreamCaptureStatusNone;
    return detail::told(cudaStreamIsCapturing(on, &now)) != 0 || now != cudaStreamCaptureStatusNone;
  }
  /// For all devices of the process.
  device_status lock_pages(void* bytes, std::size_t count, std::optional<device_id> by) const noexcept {
    const detail::beside_captures others;
    std::optional<detail::current_device> now;
    if (by) now.emplace(*by);
    if (now && now->status() != cudaSuccess) return detail::told(now->status());
    return detail::told(cudaHostRegister(bytes, count, cudaHostRegisterPortable | cudaHostRegisterMapped));
  }
  device_status unlock_pages(void* bytes) const noexcept {
    const detail::beside_captures others;
    return detail::told(cudaHostUnregister(bytes));
  }
  device_status device_address(void** there, void* bytes) const noexcept {
    return detail::told(cudaHostGetDevicePointer(there, bytes, 0));
  }
};
static_assert(batching_runtime<cuda_runtime>);

/// CUDA's virtual memory management as `device_paging`: the driver's calls, looked up at construction, so a
/// program needs no libcuda to link or to start.
///
/// @par Thread safety   any number of threads.
class cuda_paging {
 public:
  cuda_paging() noexcept {
    why_missing_ = cuda_runtime{}.why_no_device(device_id{0});
    if (why_missing_ != nullptr) return;
    const bool has_all = find("cuMemGetAllocationGranularity", granularity_) &&
                         find("cuMemAddressReserve", reserve_) && find("cuMemAddressFree", release_) &&
                         find("cuMemCreate", create_) && find("cuMemRelease", destroy_) &&
                         find("cuMemMap", map_) && find("cuMemSetAccess", allow_) &&
                         find("cuMemUnmap", unmap_) && find("cuGetErrorString", text_);
    if (!has_all) why_missing_ = "the driver is older than CUDA 10.2";
  }

  [[nodiscard]] const char* why_missing() const noexcept { return why_missing_; }
  [[nodiscard]] const char* text(device_status status) const noexcept {
    const char* says = nullptr;
    if (text_(static_cast<CUresult>(status), &says) != CUDA_SUCCESS || says == nullptr)
      return "unknown error";
    return says;
  }
  device_status granularity(std::uint64_t* bytes, device_id device) const noexcept {
    // The driver answers about devices only after one is initialised.
    if (const cudaError_t status = cudaInitDevice(static_cast<int>(to_index(device)), 0, 0);
        status != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
      return static_cast<device_status>(CUDA_ERROR_INVALID_DEVICE);
    }
    const CUmemAllocationProp what = properties(device);
    std::size_t unit = 0;
    const CUresult status = granularity_(&unit, &what, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    *bytes = unit;
    return static_cast<device_status>(status);
  }
  device_status reserve(std::uint64_t* address, std::uint64_t bytes, std::uint64_t alignment) const noexcept {
    CUdeviceptr at = 0;
    const CUresult status =
        reserve_(&at, static_cast<std::size_t>(bytes), static_cast<std::size_t>(alignment), 0, 0);
    *address = at;
    return static_cast<device_status>(status);
  }
  device_status release(std::uint64_t address, std::uint64_t bytes) const noexcept {
    return static_cast<device_status>(release_(address, static_cast<std::size_t>(bytes)));
  }
  device_status create(std::uint64_t* token, std::uint64_t bytes, device_id device) const noexcept {
    const CUmemAllocationProp what = properties(device);
    CUmemGenericAllocationHandle made = 0;
    const CUresult status = create_(&made, static_cast<std::size_t>(bytes), &what, 0);
    *token = made;
    return static_cast<device_status>(status);
  }
  device_status destroy(std::uint64_t token) const noexcept {
    return static_cast<device_status>(destroy_(token));
  }
  device_status map(std::uint64_t address, std::uint64_t bytes, std::uint64_t token) const noexcept {
    return static_cast<device_status>(map_(address, static_cast<std::size_t>(bytes), 0, token, 0));
  }
  device_status allow(std::uint64_t address, std::uint64_t bytes, device_id device) const noexcept {
    CUmemAccessDesc how{};
    how.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    how.location.id = static_cast<int>(to_index(device));
    how.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return static_cast<device_status>(allow_(address, static_cast<std::size_t>(bytes), &how, 1));
  }
  device_status unmap(std::uint64_t address, std::uint64_t bytes) const noexcept {
    return static_cast<device_status>(unmap_(address, static_cast<std::size_t>(bytes)));
  }

 private:
  [[nodiscard]] static CUmemAllocationProp properties(device_id device) noexcept {
    CUmemAllocationProp what{};
    what.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    what.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    what.location.id = static_cast<int>(to_index(device));
    return what;
  }
  template <class Function>
  [[nodiscard]] static bool find(const char* name, Function*& found) noexcept {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult how{};
    constexpr unsigned version = 10020;
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion(name, &entry, version, cudaEnableDefault, &how);
    if (detail::told(status) != 0 || how != cudaDriverEntryPointSuccess) return false;
    found = reinterpret_cast<Function*>(entry);
    return found != nullptr;
  }

  const char* why_missing_ = nullptr;
  PFN_cuMemGetAllocationGranularity_v10020 granularity_ = nullptr;
  PFN_cuMemAddressReserve_v10020 reserve_ = nullptr;
  PFN_cuMemAddressFree_v10020 release_ = nullptr;
  PFN_cuMemCreate_v10020 create_ = nullptr;
  PFN_cuMemRelease_v10020 destroy_ = nullptr;
  PFN_cuMemMap_v10020 map_ = nullptr;
  PFN_cuMemSetAccess_v10020 allow_ = nullptr;
  PFN_cuMemUnmap_v10020 unmap_ = nullptr;
  PFN_cuGetErrorString_v6000 text_ = nullptr;
};
static_assert(device_paging<cuda_paging>);

/// Memory of a device: `device_space space(device_pool_source<cuda_runtime>(device_id{0}), {.budget =
/// bytes});`
using device_space = basic_device_space<device_pool_source<cuda_runtime>>;
/// Host memory that devices access by themselves.
using pinned_space = basic_host_space<pinned_source<cuda_runtime>>;
/// A CUDA stream that copies.
using device_queue = basic_device_queue<device_space, cuda_runtime>;
/// A device's memory with a stream of its own, as a tier.
using streamed_device_space = basic_streamed_space<device_pool_source<cuda_runtime>, cuda_runtime>;
/// Addresses and memory of a device, separately, for `growable_range` and `stitched_arena`.
using device_virtual_memory = basic_virtual_memory<device_mapper<cuda_paging>>;

static_assert(memory_space<device_space> && memory_space<pinned_space>);
static_assert(fence<device_fence<cuda_runtime>> && copy_queue<device_queue, device_space>);
static_assert(copy_queue<streamed_device_space, streamed_device_space>);
static_assert(virtual_memory<device_virtual_memory>);

}  // namespace v0
}  // namespace llmmem
