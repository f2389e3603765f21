/// @file
/// `device_executor`: runs kernels on a device.
#pragma once

#if !defined(__CUDACC__)
#error "compile this with nvcc; <llmmem/device/cuda.hpp> needs none"
#endif

#include <llmmem/config.hpp>
#include <llmmem/device/device_runtime.hpp>
#include <llmmem/device/errors.hpp>
#include <llmmem/kernels/detail/tensor_tiles.hpp>
#include <llmmem/kernels/errors.hpp>
#include <llmmem/kernels/items.hpp>
#include <llmmem/kernels/launch.hpp>
#include <llmmem/kernels/rows.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/result.hpp>

#include <cuda_runtime.h>

#include <cstdint>

// Kernels have hidden visibility, even if their work has no linkage, as in an unnamed namespace.
#if defined(__NVCC__)
#pragma nv_diagnostic push
#pragma nv_diag_suppress 1407
#endif

// Parameters that kernels read where the launch put them. clang++ knows the attribute from version 20 on;
// before, a kernel copies a parameter whose address it takes.
#if defined(__clang__) && __clang_major__ < 20
#define LLMMEM_GRID_CONSTANT
#else
#define LLMMEM_GRID_CONSTANT __grid_constant__
#endif

namespace llmmem {
inline namespace v0 {

namespace detail {

template <unsigned N, cache_hint Read, cache_hint Write, row_map Map, row_op Op>
__global__ void __attribute__((visibility("hidden"))) __launch_bounds__(row_launch::threads)
    move_rows_kernel(const LLMMEM_GRID_CONSTANT Map map, const LLMMEM_GRID_CONSTANT Op op,
                     const LLMMEM_GRID_CONSTANT row_launch launch) {
  move_rows<N, Read, Write>(map, op, share_of(launch, blockIdx.y, blockIdx.x, threadIdx.x));
}

template <item_work Work>
__global__ void __attribute__((visibility("hidden"))) __launch_bounds__(item_launch::default_threads)
    run_items_kernel(const LLMMEM_GRID_CONSTANT Work work, const LLMMEM_GRID_CONSTANT item_launch launch) {
  run_items(work, share_of(launch, blockIdx.x, threadIdx.x));
}

/// All lanes of a warp: a constant, so that no code has to determine the participants.
inline constexpr unsigned whole_warp = 0xFFFF'FFFFU;

/// Returns the value of the lane whose number differs by `step`. All lanes of the warp call it.
template <class Partial>
[[nodiscard]] __device__ inline Partial of_other_lane(const Partial& known, std::uint32_t step) noexcept {
  constexpr unsigned words = sizeof(Partial) / 4;
  std::uint32_t word[words];
  memcpy(word, &known, sizeof(known));
  for (unsigned i = 0; i < words; ++i)
    word[i] = __shfl_xor_sync(whole_warp, word[i], static_cast<int>(step));
  Partial other;
  memcpy(&other, word, sizeof(other));
  return other;
}

template <group_work Work>
__global__ void __attribute__((visibility("hidden"))) __launch_bounds__(item_launch::default_threads)
    run_groups_kernel(const LLMMEM_GRID_CONSTANT Work work, const LLMMEM_GRID_CONSTANT item_launch launch) {
  run_groups(work, share_of(launch, blockIdx.x, threadIdx.x),
             [](const auto& known, std::uint32_t step) { return of_other_lane(known, step); });
}

/// Lanes of a device: a thread is one, and its group a part of its warp.
class warp_lanes {
 public:
  template <class T>
  class held {
   public:
    [[nodiscard]] __device__ T& operator[](std::uint32_t /*lane*/) noexcept { return of_; }
    [[nodiscard]] __device__ const T& operator[](std::uint32_t /*lane*/) const noexcept { return of_; }

   private:
    T of_;
  };

  __device__ explicit warp_lanes(const group_lane& lane) noexcept : lane_(lane) {}

  [[nodiscard]] __device__ std::uint32_t count() const noexcept { return lane_.lanes; }
  [[nodiscard]] __device__ std::uint32_t turns(std::uint32_t own) const noexcept {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(whole_warp, own);
#else
    for (int step = 16; step != 0; step /= 2)
      own = max(own, __shfl_xor_sync(whole_warp, own, step));
    return own;
#endif
  }
  __device__ void meet() const noexcept { __syncwarp(); }
  template <class Do>
  __device__ void each(const Do& act) const noexcept {
    act(lane_.lane);
  }
  template <class T>
    requires(sizeof(T) == 4)
  __device__ void swap(held<T>& values, std::uint32_t step) const noexcept {
    values[0] = __shfl_xor_sync(whole_warp, values[0], static_cast<int>(step));
  }
  template <class T, class From>
    requires(sizeof(T) == 4)
  __device__ void take_from(held<T>& out, const held<T>& values, const From& from) const noexcept {
    out[0] = __shfl_sync(whole_warp, values[0], static_cast<int>(from(lane_.lane)));
  }
  [[nodiscard]] __device__ std::uint32_t ballot(const held<bool>& values) const noexcept {
    return __ballot_sync(whole_warp, values[0]);
  }
  [[nodiscard]] __device__ float of_eight(const held<float>& values, std::uint32_t /*lane*/,
                                          std::uint32_t i) const noexcept {
    return __shfl_sync(whole_warp, values[0], static_cast<int>(i), 8);
  }

 private:
  group_lane lane_;
};

/// sum += left x right, by tensor cores. For compute capability 8.0 and newer.
template <dtype E>
  requires tensor_element<E>
__device__ inline void multiply_add(const warp_lanes& /*group*/,
                                    [[maybe_unused]] warp_lanes::held<tensor_sum>& sum,
                                    [[maybe_unused]] const warp_lanes::held<tensor_left>& left,
                                    [[maybe_unused]] const warp_lanes::held<tensor_right>& right) noexcept {
#if __CUDA_ARCH__ >= 800
  float* const of = sum[0].of;
  const std::uint32_t* const a = left[0].word;
  const std::uint32_t* const b = right[0].word;
  if constexpr (E == dtype::bf16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(of[0]), "+f"(of[1]), "+f"(of[2]), "+f"(of[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(of[0]), "+f"(of[1]), "+f"(of[2]), "+f"(of[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
#else
  __trap();
#endif
}
__device__ inline void transpose(const warp_lanes& /*group*/,
                                 [[maybe_unused]] warp_lanes::held<std::uint32_t>& words) noexcept {
#if __CUDA_ARCH__ >= 800
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(words[0]));
#else
  __trap();
#endif
}

template <lane_work Work>
__global__ void __attribute__((visibility("hidden"))) __launch_bounds__(Work::threads, Work::blocks)
    run_lanes_kernel(const LLMMEM_GRID_CONSTANT Work work, const LLMMEM_GRID_CONSTANT item_launch launch) {
  const item_share share = share_of(launch, blockIdx.x, threadIdx.x);
  run_lanes(work, share, warp_lanes(share.lane));
}

}  // namespace detail

/// Runs rows and items on the current device, in the order of a stream. May be captured in a graph: it
/// neither allocates nor waits, and a replay reads the tables and scales of that moment.
///
/// @par Thread safety   any number at once.
/// @par Errors          `errc::device_failed` if a launch was refused, index its `cudaError_t`;
///      `errc::no_device_code` for work that needs a newer compute capability than it was compiled for. The
///      stream reports errors of the run itself.
class device_executor {
 public:
  /// @param limits  `launch_limits{.multiprocessors = ...}` of the device.
  explicit device_executor(stream_argument<cudaStream_t> stream, const launch_limits& limits = {}) noexcept
      : stream_(stream.get()), limits_(limits) {}

  template <cache_hint Read = cache_hint::streaming, cache_hint Write = cache_hint::kept, row_map Map,
            row_op Op>
  result<void> move(const Map& map, const Op& op) const noexcept {
    const unsigned elements = packet_elements<Op>(map.alignment());
    const row_launch launch = plan_launch(row_work::of(map, shared_elements<Op>(map, elements)), limits_);
    if (launch.row_blocks == 0) return {};
    return told(start<widest_packet<Op>, Read, Write>(map, op, launch, elements));
  }

  template <item_work Work>
  result<void> each(const Work& work) const noexcept {
    return start_items(detail::run_items_kernel<Work>, work, 1);
  }
  template <group_work Work>
  result<void> each(const Work& work) const noexcept {
    return start_items(detail::run_groups_kernel<Work>, work, work.lanes());
  }
  template <lane_work Work>
  result<void> each(const Work& work) const noexcept {
    if constexpr (requires { Work::compute_capability; }) {
      // For a program without code for this device, the driver compiles its code for older devices.
      cudaFuncAttributes compiled{};
      if (auto known = told(cudaFuncGetAttributes(&compiled, detail::run_lanes_kernel<Work>)); !known)
        return known;
      if (compiled.ptxVersion < Work::compute_capability)
        return failure{errc::no_device_code, 0, Work::compute_capability,
                       static_cast<std::uint64_t>(compiled.ptxVersion), "device_executor"};
    }
    return start_items(detail::run_lanes_kernel<Work>, work, work.lanes(), Work::threads);
  }

 private:
  [[nodiscard]] static result<void> told(cudaError_t status) noexcept {
    if (status == cudaSuccess) return {};
    static_cast<void>(cudaGetLastError());  // reported here, not by the next call
    return failure{errc::device_failed, static_cast<std::uint32_t>(status), 0, 0, "device_executor: launch"};
  }

  template <class Work>
  result<void> start_items(void (*kernel)(Work, item_launch), const Work& work, std::uint32_t lanes,
                           std::uint32_t threads = item_launch::default_threads) const noexcept {
    const item_launch launch = plan_items(work.items(), lanes, limits_, threads);
    if (launch.blocks == 0) return {};
    cudaLaunchConfig_t how{};
    how.gridDim = dim3(launch.blocks);
    how.blockDim = dim3(launch.threads);
    how.stream = stream_;
    return told(cudaLaunchKernelEx(&how, kernel, work, launch));
  }

  /// One kernel for each possible width of an access.
  template <unsigned N, cache_hint Read, cache_hint Write, row_map Map, row_op Op>
  cudaError_t start(const Map& map, const Op& op, const row_launch& launch,
                    unsigned elements) const noexcept {
    if constexpr (N > 1) {
      if (elements < N) return start<N / 2, Read, Write>(map, op, launch, elements);
    }
    cudaLaunchConfig_t how{};
    how.gridDim = dim3(launch.part_blocks, launch.row_blocks);
    how.blockDim = dim3(row_launch::threads);
    how.stream = stream_;
    return cudaLaunchKernelEx(&how, detail::move_rows_kernel<N, Read, Write, Map, Op>, map, op, launch);
  }

  cudaStream_t stream_;
  launch_limits limits_;
};

}  // namespace v0
}  // namespace llmmem

#undef LLMMEM_GRID_CONSTANT
#if defined(__NVCC__)
#pragma nv_diagnostic pop
#endif
