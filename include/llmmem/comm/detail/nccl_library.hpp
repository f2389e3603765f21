/// @file
/// `nccl_library`: the NCCL and CUDA runtime calls of a transport. Tests substitute another.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/device/cuda_calls.hpp>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>

#if NCCL_VERSION_CODE < 22800
#error "llmmem/comm/nccl_transport.hpp needs NCCL 2.28 or newer."
#endif

namespace llmmem {
inline namespace v0 {

/// The calls of NCCL and CUDA that an `nccl_transport` makes, one by one and unchanged.
struct nccl_library {
  static constexpr bool has_revoke = NCCL_VERSION_CODE >= 22807;
  static constexpr bool has_grow = NCCL_VERSION_CODE >= 22900;
  static constexpr bool has_windows = NCCL_VERSION_CODE >= 22700;

  /// Returns why there is no usable device; null if there is one.
  [[nodiscard]] const char* why_no_device() const noexcept {
    // Without a driver cudaGetDeviceCount leaves its argument unchanged; asking for the version never fails.
    int driver = 0;
    if (detail::taken(cudaDriverGetVersion(&driver)) != cudaSuccess || driver == 0)
      return "there is no CUDA driver";
    int count = 0;
    const cudaError_t status = detail::taken(cudaGetDeviceCount(&count));
    if (status != cudaSuccess) return cudaGetErrorString(status);
    return count == 0 ? "there is a CUDA driver, but no device" : nullptr;
  }
  ncclResult_t version(int* code) const noexcept { return ncclGetVersion(code); }
  ncclResult_t unique_id(ncclUniqueId* id) const noexcept { return ncclGetUniqueId(id); }
  ncclResult_t init(ncclComm_t* made, int ranks, const ncclUniqueId& id, int rank,
                    ncclConfig_t* config) const noexcept {
    return ncclCommInitRankConfig(made, ranks, id, rank, config);
  }
  ncclResult_t shrink(ncclComm_t comm, int* excluded, int count, ncclComm_t* made, ncclConfig_t* config,
                      int flags) const noexcept {
    return ncclCommShrink(comm, excluded, count, made, config, flags);
  }
#if NCCL_VERSION_CODE >= 22807
  ncclResult_t revoke(ncclComm_t comm) const noexcept { return ncclCommRevoke(comm, NCCL_REVOKE_DEFAULT); }
#endif
#if NCCL_VERSION_CODE >= 22900
  ncclResult_t grow_id(ncclComm_t comm, ncclUniqueId* id) const noexcept {
    return ncclCommGetUniqueId(comm, id);
  }
  ncclResult_t grow(ncclComm_t comm, int ranks, const ncclUniqueId* id, int rank, ncclComm_t* made,
                    ncclConfig_t* config) const noexcept {
    return ncclCommGrow(comm, ranks, id, rank, made, config);
  }
#endif
  ncclResult_t finalize(ncclComm_t comm) const noexcept { return ncclCommFinalize(comm); }
  ncclResult_t destroy(ncclComm_t comm) const noexcept { return ncclCommDestroy(comm); }
  ncclResult_t abort(ncclComm_t comm) const noexcept { return ncclCommAbort(comm); }
  ncclResult_t async_error(ncclComm_t comm, ncclResult_t* status) const noexcept {
    return ncclCommGetAsyncError(comm, status);
  }
  [[nodiscard]] const char* text(ncclResult_t status) const noexcept { return ncclGetErrorString(status); }

  ncclResult_t group_start() const noexcept { return ncclGroupStart(); }
  ncclResult_t group_end() const noexcept { return ncclGroupEnd(); }
  ncclResult_t send(const void* bytes, std::size_t count, int to, ncclComm_t comm,
                    cudaStream_t stream) const noexcept {
    return ncclSend(bytes, count, ncclUint8, to, comm, stream);
  }
  ncclResult_t recv(void* bytes, std::size_t count, int from, ncclComm_t comm,
                    cudaStream_t stream) const noexcept {
    return ncclRecv(bytes, count, ncclUint8, from, comm, stream);
  }
  ncclResult_t all_reduce(const void* from, void* into, std::size_t count, ncclDataType_t type,
                          ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) const noexcept {
    return ncclAllReduce(from, into, count, type, op, comm, stream);
  }
  ncclResult_t reduce_scatter(const void* from, void* into, std::size_t count, ncclDataType_t type,
                              ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) const noexcept {
    return ncclReduceScatter(from, into, count, type, op, comm, stream);
  }
  ncclResult_t all_gather(const void* from, void* into, std::size_t count, ncclComm_t comm,
                          cudaStream_t stream) const noexcept {
    return ncclAllGather(from, into, count, ncclUint8, comm, stream);
  }
  ncclResult_t broadcast(void* bytes, std::size_t count, int root, ncclComm_t comm,
                         cudaStream_t stream) const noexcept {
    return ncclBroadcast(bytes, bytes, count, ncclUint8, root, comm, stream);
  }

#if NCCL_VERSION_CODE >= 22700
  ncclResult_t register_window(ncclComm_t comm, void* memory, std::size_t bytes, ncclWindow_t* made,
                               int flags) const noexcept {
    return ncclCommWindowRegister(comm, memory, bytes, made, flags);
  }
  ncclResult_t deregister_window(ncclComm_t comm, ncclWindow_t window) const noexcept {
    return ncclCommWindowDeregister(comm, window);
  }
#endif
  ncclResult_t take_memory(void** made, std::size_t bytes) const noexcept {
    return ncclMemAlloc(made, bytes);
  }
  ncclResult_t give_memory_back(void* memory) const noexcept { return ncclMemFree(memory); }

  cudaError_t make_event(cudaEvent_t* event) const noexcept {
    return detail::taken(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
  }
  cudaError_t end_event(cudaEvent_t event) const noexcept {
    const detail::beside_captures others;
    return detail::taken(cudaEventDestroy(event));
  }
  cudaError_t record(cudaEvent_t event, cudaStream_t stream) const noexcept {
    return detail::taken(cudaEventRecord(event, stream));
  }
  cudaError_t query(cudaEvent_t event) const noexcept {
    const detail::beside_captures others;
    return detail::taken(cudaEventQuery(event));
  }
  cudaError_t allocate(void** bytes, std::size_t count, cudaStream_t stream) const noexcept {
    const detail::beside_captures others;
    return detail::taken(cudaMallocAsync(bytes, count, stream));
  }
  /// Does not wait for work on the device, as cudaFree would.
  cudaError_t release(void* bytes, cudaStream_t stream) const noexcept {
    const detail::beside_captures others;
    return detail::taken(cudaFreeAsync(bytes, stream));
  }
  [[nodiscard]] const char* text(cudaError_t status) const noexcept { return cudaGetErrorString(status); }

  /// Yields the processor between two checks.
  void pause(std::uint64_t ns) const noexcept {
    if (ns == 0) return std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::nanoseconds(ns));
  }
};

}  // namespace v0
}  // namespace llmmem
