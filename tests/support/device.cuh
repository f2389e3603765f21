/// @file
/// What a device test starts with: a device, or exit status 77 and the reason.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>

namespace llmmem_tests {

/// ctest shows a test that exits so as skipped.
inline constexpr int skipped = 77;

[[noreturn]] inline void skip(const char* why) {
  std::printf("SKIPPED: %s\n", why);
  std::exit(skipped);
}

/// Ends the test as failed unless `status` is success.
inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "FAILED: %s: %s (%s)\n", what, cudaGetErrorString(status), cudaGetErrorName(status));
  std::exit(1);
}

/// Device 0. With no driver or no device there is nothing to test: skips.
inline int require_device() {
  // Without a driver cudaGetDeviceCount fails and leaves its argument unwritten; asking for the version does
  // not fail.
  int driver = 0;
  check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  if (driver == 0) skip("no CUDA driver on this machine");
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaErrorNoDevice || (status == cudaSuccess && count == 0))
    skip("a CUDA driver, but no device");
  check(status, "cudaGetDeviceCount");
  check(cudaSetDevice(0), "cudaSetDevice");
  return 0;
}

/// Prints what `device` is, so that a log tells where it was made.
inline void describe(int device) {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  int driver = 0;
  int runtime = 0;
  check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
  std::printf("%s, sm_%d%d, %d multiprocessors, %.1f GiB, driver for CUDA %d.%d, runtime %d.%d\n",
              properties.name, properties.major, properties.minor, properties.multiProcessorCount,
              static_cast<double>(properties.totalGlobalMem) / (1024.0 * 1024.0 * 1024.0), driver / 1000,
              driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
}

}  // namespace llmmem_tests
