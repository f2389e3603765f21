/// @file
/// Devices, their properties, and the names of errors.
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
                                         {cudaDevAttrWarpSize, 32},
                                         {cudaDevAttrMultiProcessorCount, 8},
                                         {cudaDevAttrUnifiedAddressing, 1},
                                         {cudaDevAttrCanUseHostPointerForRegisteredMem, 1},
                                         {cudaDevAttrMemoryPoolsSupported, 1},
                                         {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
                                         {cudaDevAttrMaxSharedMemoryPerBlockOptin, 166912}};
  const auto found = values.find(which);
  *value = which == cudaDevAttrComputeCapabilityMajor   ? now().arch / 10
           : which == cudaDevAttrComputeCapabilityMinor ? now().arch % 10
           : found == values.end()                      ? 0
                                                        : found->second;
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
  return now().sticky != cudaSuccess ? now().sticky : std::exchange(last_error, cudaSuccess);
}
cudaError_t cudaPeekAtLastError() {
  return now().sticky != cudaSuccess ? now().sticky : last_error;
}
const char* cudaGetErrorName(cudaError_t status) {
  switch (status) {
#define NAMED(name) \
  case name:        \
    return #name
    NAMED(cudaSuccess);
    NAMED(cudaErrorInvalidValue);
    NAMED(cudaErrorMemoryAllocation);
    NAMED(cudaErrorInvalidConfiguration);
    NAMED(cudaErrorInvalidDevice);
    NAMED(cudaErrorInvalidDeviceFunction);
    NAMED(cudaErrorNotReady);
    NAMED(cudaErrorIllegalAddress);
    NAMED(cudaErrorMisalignedAddress);
    NAMED(cudaErrorIllegalInstruction);
    NAMED(cudaErrorLaunchFailure);
    NAMED(cudaErrorNotSupported);
    NAMED(cudaErrorStreamCaptureUnsupported);
    NAMED(cudaErrorStreamCaptureInvalidated);
    NAMED(cudaErrorStreamCaptureImplicit);
    NAMED(cudaErrorHostMemoryAlreadyRegistered);
    NAMED(cudaErrorHostMemoryNotRegistered);
#undef NAMED
    default:
      return "an error that the machine has no name for";
  }
}
const char* cudaGetErrorString(cudaError_t status) {
  return cudaGetErrorName(status);
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** to, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* how) {
  *to = driver_call(name);
  if (how != nullptr)
    *how = *to == nullptr ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  return told(cudaSuccess);
}

}  // extern "C"
