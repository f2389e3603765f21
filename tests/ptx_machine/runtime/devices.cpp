/// @file
/// Devices, their properties, and the last error.
#include "ptx_machine/runtime/state.hpp"

using namespace ptx_machine;

extern "C" {

cudaError_t cudaDriverGetVersion(int* version) {
  return *version = CUDART_VERSION, cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  return *version = CUDART_VERSION, cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  return *count = 1, told(cudaSuccess);
}
cudaError_t cudaGetDevice(int* device) {
  return *device = 0, told(cudaSuccess);
}
cudaError_t cudaSetDevice(int device) {
  return told(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}
cudaError_t cudaInitDevice(int device, unsigned, unsigned) {
  return cudaSetDevice(device);
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  static const std::map<int, int> values{{cudaDevAttrMaxThreadsPerBlock, 1024},
                                         {cudaDevAttrMaxGridDimX, 0x7FFF'FFFF},
                                         {cudaDevAttrMaxGridDimY, 65535},
                                         {cudaDevAttrMaxGridDimZ, 65535},
                                         {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
                                         {cudaDevAttrWarpSize, 32},
                                         {cudaDevAttrMultiProcessorCount, 8},
                                         {cudaDevAttrUnifiedAddressing, 1},
                                         {cudaDevAttrCanMapHostMemory, 1},
                                         {cudaDevAttrCanUseHostPointerForRegisteredMem, 1},
                                         {cudaDevAttrMemoryPoolsSupported, 1},
                                         {cudaDevAttrManagedMemory, 0},
                                         {cudaDevAttrConcurrentManagedAccess, 0},
                                         {cudaDevAttrCooperativeLaunch, 0},
                                         {cudaDevAttrL2CacheSize, 1 << 20},
                                         {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
                                         {cudaDevAttrMaxSharedMemoryPerBlockOptin, 166912},
                                         {cudaDevAttrReservedSharedMemoryPerBlock, 1024}};
  const auto found = values.find(which);
  *value = 0;
  if (which == cudaDevAttrComputeCapabilityMajor) {
    *value = now().arch / 10;
  } else if (which == cudaDevAttrComputeCapabilityMinor) {
    *value = now().arch % 10;
  } else if (found != values.end()) {
    *value = found->second;
  } else {
    return told(not_offered("cudaDeviceGetAttribute: attribute " + std::to_string(which)));
  }
  return told(cudaSuccess);
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* to, int device) {
  *to = {};
  std::strcpy(to->name, "PTX machine (no GPU)");
  to->major = now().arch / 10, to->minor = now().arch % 10;
  to->multiProcessorCount = 8, to->warpSize = 32, to->maxThreadsPerBlock = 1024;
  to->totalGlobalMem = device_memory::capacity;
  to->sharedMemPerBlock = 49152;
  to->unifiedAddressing = 1;
  return cudaSetDevice(device);
}
cudaError_t cudaGetLastError() {
  return now().sticky != cudaSuccess ? now().sticky.load() : std::exchange(last_error, cudaSuccess);
}
cudaError_t cudaPeekAtLastError() {
  return now().sticky != cudaSuccess ? now().sticky.load() : last_error;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** to, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* how) {
  *to = driver_call(name);
  if (*to == nullptr) static_cast<void>(not_offered(name));
  if (how != nullptr)
    *how = *to == nullptr ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  return told(cudaSuccess);
}

}  // extern "C"
