/// @file
/// `device_executor`: runs kernels on a device.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/launch.hpp>
#include <llmmem/kernels/rows.hpp>
#include <llmmem/result.hpp>

#include <cuda_runtime.h>

#include <cstdint>

namespace llmmem::inline v0 {

namespace detail {

template <unsigned N, access Read, access Write, row_map Map, row_op Op>
__global__ void __attribute__((visibility("hidden"))) __launch_bounds__(row_launch::threads)
    move_rows_kernel(const __grid_constant__ Map map, const __grid_constant__ Op op,
                     const __grid_constant__ row_launch launch) {
  move_rows<N, Read, Write>(map, op, share_of(launch, blockIdx.x, blockIdx.y, threadIdx.x));
}

}  // namespace detail

/// Runs rows on the device that is current, in the order of a stream. May be captured in a graph: it
/// allocates nothing, waits for nothing, and a replay reads tables and scales as they are then.
///
/// @par Thread safety   any number at once.
/// @par Errors          `errc::library_failed` when a launch was refused, index its `cudaError_t`. What goes
///      wrong while it runs, the stream tells.
class device_executor {
 public:
  /// @param limits  `launch_limits{.multiprocessors = ...}` of the device.
  explicit device_executor(cudaStream_t stream, const launch_limits& limits = {}) noexcept
      : stream_(stream), limits_(limits) {}

  template <access Read, access Write, row_map Map, row_op Op>
  result<void> move(const Map& map, const Op& op) const noexcept {
    const unsigned elements = packet_elements<Op>(map.alignment());
    const row_launch launch = plan_launch(row_work::of(map, elements), limits_);
    if (launch.row_blocks == 0) return {};
    const cudaError_t status = start<widest_packet<Op>, Read, Write>(map, op, launch, elements);
    if (status == cudaSuccess) return {};
    return failure{errc::library_failed, static_cast<std::uint32_t>(status), 0, 0, "device_executor: launch"};
  }

 private:
  /// One kernel for each width that an access may have.
  template <unsigned N, access Read, access Write, row_map Map, row_op Op>
  cudaError_t start(const Map& map, const Op& op, const row_launch& launch,
                    unsigned elements) const noexcept {
    if constexpr (N > 1) {
      if (elements < N) return start<N / 2, Read, Write>(map, op, launch, elements);
    }
    cudaLaunchConfig_t how{};
    how.gridDim = dim3(launch.row_blocks, launch.part_blocks);
    how.blockDim = dim3(row_launch::threads);
    how.stream = stream_;
    return cudaLaunchKernelEx(&how, detail::move_rows_kernel<N, Read, Write, Map, Op>, map, op, launch);
  }

  cudaStream_t stream_;
  launch_limits limits_;
};

}  // namespace llmmem::inline v0
