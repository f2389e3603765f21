/// @file
/// What a device test starts with: a device, or exit status 77 and the reason.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <utility>
#include <vector>

#include "support/seeds.hpp"

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

/// An array on the device, made of one on the host.
template <class T>
class device_array {
 public:
  device_array() = default;
  explicit device_array(const std::vector<T>& host) : size_(host.size()) {
    if (size_ == 0) return;
    check(cudaMalloc(&data_, size_ * sizeof(T)), "cudaMalloc");
    check(cudaMemcpy(data_, host.data(), size_ * sizeof(T), cudaMemcpyHostToDevice), "copy to the device");
    // From pageable memory it may return before the device has all, and streams of ours do not wait for it.
    check(cudaDeviceSynchronize(), "copy to the device");
  }
  device_array(device_array&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  device_array& operator=(device_array&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~device_array() { static_cast<void>(cudaFree(data_)); }

  [[nodiscard]] T* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return size_; }
  /// Waits for the device first.
  [[nodiscard]] std::vector<T> host() const {
    std::vector<T> out(size_);
    check(cudaDeviceSynchronize(), "what ran before");
    if (size_ != 0)
      check(cudaMemcpy(out.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost), "copy from the device");
    return out;
  }

 private:
  T* data_ = nullptr;
  std::size_t size_ = 0;
};

/// Ends the test as failed unless `is` holds.
inline void require(bool is, const char* what, std::uint64_t seed) {
  if (is) return;
  std::fprintf(stderr, "FAILED: %s, seed %llu\n", what, static_cast<unsigned long long>(seed));
  std::exit(1);
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

/// Has a stream do what `launch()` gives it, which tells whether all of it was taken: for even seeds at once,
/// else from a graph that is replayed, and waits for it.
template <class Launch>
void launch_or_replay(std::uint64_t seed, cudaStream_t stream, const char* what, const Launch& launch,
                      int replays = 1) {
  if (seed % 2 == 0) {
    require(launch(), what, seed);
  } else {
    cudaGraph_t graph{};
    cudaGraphExec_t replay{};
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "begin capture");
    const bool is_well = launch();
    check(cudaStreamEndCapture(stream, &graph), "end capture");
    require(is_well, what, seed);
    check(cudaGraphInstantiate(&replay, graph, 0), "instantiate");
    for (int i = 0; i < replays; ++i)
      check(cudaGraphLaunch(replay, stream), "replay");
    check(cudaStreamSynchronize(stream), what);
    check(cudaGraphExecDestroy(replay), "destroy");
    check(cudaGraphDestroy(graph), "destroy");
  }
  check(cudaStreamSynchronize(stream), what);
}

/// LLMMEM_TEST_WORLDS, a whole number from 1 on, where it is set: a tool that watches every access takes many
/// times longer, and learns no more from the last worlds than from the first. Else `otherwise`.
[[nodiscard]] inline std::uint64_t wanted_worlds(std::uint64_t otherwise) {
  try {
    const std::uint64_t worlds = number_from_environment("LLMMEM_TEST_WORLDS", otherwise);
    // A test of no worlds would pass whatever the kernels do.
    if (worlds == 0) throw std::invalid_argument("LLMMEM_TEST_WORLDS: wanted a whole number from 1 on");
    return worlds;
  } catch (const std::invalid_argument& wrong) {
    std::fprintf(stderr, "FAILED: %s\n", wrong.what());
    std::exit(1);
  }
}

/// A program's whole test: `check_one(seed, stream)` for as many seeds, or as many as are wanted, on a
/// device, if there is one.
template <class Check>
void check_worlds(std::uint64_t usual, const Check& check_one) {
  const std::uint64_t worlds = wanted_worlds(usual);
  describe(require_device());
  cudaStream_t stream{};
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  for (std::uint64_t seed = 1; seed <= worlds; ++seed)
    check_one(seed, stream);
  check(cudaStreamDestroy(stream), "cudaStreamDestroy");
  std::printf("%llu worlds: every byte as the host has it\n", static_cast<unsigned long long>(worlds));
}

}  // namespace llmmem_tests
