/// @file
/// What every call of the CUDA runtime has to heed, whoever makes it.
#pragma once

#include <llmmem/config.hpp>

#include <cuda_runtime_api.h>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// While it lives, calls that wait or ask do not end the graph that another thread may be capturing.
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

/// A status that the caller is told is not left for whoever asks for the last error next.
[[nodiscard]] inline cudaError_t taken(cudaError_t status) noexcept {
  if (status != cudaSuccess) static_cast<void>(cudaGetLastError());
  return status;
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
