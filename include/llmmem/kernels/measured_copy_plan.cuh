/// @file
/// A `copy_plan` measured on a device of CUDA.
#pragma once

#if !defined(__CUDACC__)
#error "compile this with nvcc; <llmmem/device/cuda.hpp> needs none"
#endif

#include <llmmem/config.hpp>
#include <llmmem/device/cuda.hpp>
#include <llmmem/error.hpp>
#include <llmmem/kernels/batched_copy.hpp>
#include <llmmem/kernels/device_executor.cuh>
#include <llmmem/result.hpp>
#include <llmmem/transfer/copy_plan.hpp>

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// A stream and two events, as far as they were created.
struct timed_stream {
  cudaStream_t stream = nullptr;
  cudaEvent_t began = nullptr;
  cudaEvent_t ended = nullptr;

  timed_stream() = default;
  timed_stream(const timed_stream&) = delete;
  timed_stream& operator=(const timed_stream&) = delete;
  ~timed_stream() {
    if (stream != nullptr) static_cast<void>(cudaStreamSynchronize(stream));
    if (ended != nullptr) static_cast<void>(cudaEventDestroy(ended));
    if (began != nullptr) static_cast<void>(cudaEventDestroy(began));
    if (stream != nullptr) static_cast<void>(cudaStreamDestroy(stream));
  }
};

/// Memory, a stream and two events, for consecutive measurements.
class copy_stopwatch {
 public:
  copy_stopwatch(device_id device, std::uint64_t bytes)
      : current_(device),
        space_(device_pool_source<cuda_runtime>(device), {.budget = 3 * bytes + 512, .name = "copy plan"}),
        pinned_(pinned_source<cuda_runtime>({.device = device}),
                {.budget = 2 * bytes + 65536, .name = "copy plan"}),
        there_(space_.try_allocate(bytes, 256).value()),
        there_too_(space_.try_allocate(2 * bytes, 256).value()),
        here_(pinned_.try_allocate(2 * bytes, 4096).value()) {
    check(current_.status());
    check(cudaDeviceGetAttribute(&sees_host_, cudaDevAttrCanUseHostPointerForRegisteredMem,
                                 static_cast<int>(to_index(device))));
    check(cudaStreamCreateWithFlags(&on_.stream, cudaStreamNonBlocking));
    check(cudaEventCreate(&on_.began));
    check(cudaEventCreate(&on_.ended));
    // Memory tools complain about copies of bytes that were never written.
    check(cudaMemsetAsync(there_.data, 0, bytes, on_.stream));
    check(cudaMemsetAsync(there_too_.data, 0, 2 * bytes, on_.stream));
    std::memset(here_.data, 0, 2 * bytes);
  }
  copy_stopwatch(const copy_stopwatch&) = delete;
  copy_stopwatch& operator=(const copy_stopwatch&) = delete;

  /// Returns the least of three times, in nanoseconds.
  [[nodiscard]] std::optional<double> time(copy_way way, const copy_shape& shape) {
    if (sees_host_ == 0 && follows_host_addresses(way, shape.direction)) return std::nullopt;
    const std::vector<copy_task> pieces = pieces_of(way, shape);
    double least = 0;
    for (int round = 0; round < 4; ++round) {  // the first warms up
      check(cudaEventRecord(on_.began, on_.stream));
      if (!run(way, pieces)) return std::nullopt;
      check(cudaEventRecord(on_.ended, on_.stream));
      check(cudaEventSynchronize(on_.ended));
      float ms = 0;
      check(cudaEventElapsedTime(&ms, on_.began, on_.ended));
      const double ns = static_cast<double>(ms) * 1e6;
      if (round == 1 || (round > 1 && ns < least)) least = ns;
    }
    return least;
  }

 private:
  static void check(cudaError_t status) {
    if (status == cudaSuccess) return;
    throw system_error(std::string("measured_copy_plan: ") + cudaGetErrorString(status));
  }

  /// Returns pieces in an order without neighbours at both ends; for the strided call evenly spaced, with
  /// gaps at the destination.
  [[nodiscard]] std::vector<copy_task> pieces_of(copy_way way, const copy_shape& shape) const {
    const bool is_up = shape.direction == copy_direction::up;
    const std::byte* const from = is_up ? here_.data : there_.data;
    std::byte* const to = shape.direction == copy_direction::down ? here_.data : there_too_.data;
    std::vector<copy_task> pieces;
    for (std::uint64_t i = 0; i < shape.count; ++i) {
      const std::uint64_t place = way == copy_way::strided ? 2 * i : shape.count - 1 - i;
      pieces.push_back({from + i * shape.bytes, to + place * shape.bytes, shape.bytes});
    }
    return pieces;
  }
  /// Returns whether the driver accepts the copy.
  [[nodiscard]] bool run(copy_way way, const std::vector<copy_task>& pieces) {
    const cuda_runtime runtime;
    switch (way) {
      case copy_way::kernel:
        return copy_few(device_executor(on_.stream), pieces).has_value();
      case copy_way::strided:
        return runtime.copy_evenly(pieces[0].to, 2 * pieces[0].bytes, pieces[0].from, pieces[0].bytes,
                                   pieces[0].bytes, pieces.size(), on_.stream) == 0;
      case copy_way::batch: {
        // As the copier does: in existing lists.
        to_.clear();
        from_.clear();
        bytes_.clear();
        for (const copy_task& each : pieces) {
          to_.push_back(each.to);
          from_.push_back(each.from);
          bytes_.push_back(each.bytes);
        }
        return runtime.copy_many(to_.data(), from_.data(), bytes_.data(), pieces.size(), on_.stream) == 0;
      }
      case copy_way::loop:
        return std::all_of(pieces.begin(), pieces.end(), [&](const copy_task& each) {
          return runtime.copy(each.to, each.from, each.bytes, on_.stream) == 0;
        });
    }
    return false;
  }

  current_device current_;
  int sees_host_ = 0;  // whether pinned memory is at the host's addresses for the device
  device_space space_;
  pinned_space pinned_;
  device_space::range_type there_;
  device_space::range_type there_too_;
  pinned_space::range_type here_;
  timed_stream on_{};  // last: running work ends before its memory is freed
  std::vector<void*> to_{};
  std::vector<const void*> from_{};
  std::vector<std::size_t> bytes_{};
};

}  // namespace detail

/// Measures all ways to copy between pinned memory and a device, and inside the device: once when an engine
/// starts, or once per machine if its `text()` is kept. Call it on an idle device, because other work there
/// would be measured too. If the device does not see pinned memory at the host's addresses (WSL2), a batch or
/// kernel up or down would fault at these, so it is not measured: see `batch_copier`.
///
/// @param grid  takes its `most_bytes` three times on the device and twice in pinned memory.
/// @throws system_error, out_of_memory  without a device, or without that memory.
/// @par Complexity   four times the grid's bytes, for each way and direction.
/// @par Thread safety   makes its device current, and restores the one before.
[[nodiscard]] inline copy_plan measured_copy_plan(device_id device,
                                                  copy_grid grid = {.most_bytes = std::uint64_t{64} << 20}) {
  detail::copy_stopwatch watch(device, grid.most_bytes);
  return copy_plan::measured(std::move(grid),
                             [&](copy_way way, const copy_shape& shape) { return watch.time(way, shape); });
}

}  // namespace v0
}  // namespace llmmem
