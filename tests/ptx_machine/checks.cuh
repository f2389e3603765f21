/// @file
/// What the machine's own tests share: checks that are counted, and statements that only some architectures
/// have.
#pragma once

#include <cstdio>
#include <string>

#include "ptx_machine/hooks.hpp"
#include "support/device.cuh"

/// In device code, `statement` where the architecture has it: for macros that make kernels of lists.
#define LLMMEM_FROM_80(statement) statement
#if __CUDA_ARCH__ >= 890
#define LLMMEM_FROM_89(statement) statement
#else
#define LLMMEM_FROM_89(statement)
#endif
#if __CUDA_ARCH__ >= 900
#define LLMMEM_FROM_90(statement) statement
#else
#define LLMMEM_FROM_90(statement)
#endif

namespace llmmem_tests {

/// Counts checks, and prints the first that fail.
class counted_checks {
 public:
  void require(bool is, const std::string& what) {
    ++made_;
    if (!is && ++failed_ <= 20) std::printf("FAILED: %s\n", what.c_str());
  }
  [[nodiscard]] unsigned long long made() const { return made_; }
  [[nodiscard]] int failed() const { return failed_; }
  /// What `main` returns.
  [[nodiscard]] int status() const { return failed_ == 0 ? 0 : 1; }

 private:
  unsigned long long made_ = 0;
  int failed_ = 0;
};

/// 80, 89, 90, ...: of device 0.
inline int architecture_of_device() {
  int major = 0, minor = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), "compute capability");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0), "compute capability");
  return 10 * major + minor;
}

}  // namespace llmmem_tests
