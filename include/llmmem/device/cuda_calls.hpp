/// @file
/// The common precautions of all calls of the CUDA runtime.
#pragma once

#include <llmmem/config.hpp>

#include <cuda_runtime_api.h>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// While it lives, calls that wait or query do not end a graph that another thread may be capturing.
class beside_captures {
 public:
  beside_captures() noexcept { is_changed_ = cudaThreadExchangeStreamCaptureMode(&mode_) == cudaSuccess; }
  beside_captures(const beside_captures&) = delete;
  beside_captures& operator=(const beside_captures&) = delete;
  ~beside_captures() {
    if (is_changed_) static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_));
  }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
  bool is_changed_ = false;
};

/// Returns a status and clears it, because the next caller that asks for the last error must not see it.
[[nodiscard]] inline cudaError_t taken(cudaError_t status) noexcept {
  if (status != cudaSuccess) static_cast<void>(cudaGetLastError());
  return status;
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
