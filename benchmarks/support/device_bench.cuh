/// @file
/// Timing of what a device does: a table of rows beside a ceiling, and the same as lines of JSON.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iomanip>
#include <ostream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "support/device.cuh"

namespace llmmem_bench {

using llmmem_tests::check;

/// Microseconds of one run: the median of several replays, and the least and the most.
struct device_time {
  double us = 0;
  double least = 0;
  double most = 0;
};

[[nodiscard]] inline device_time time_of(std::vector<double> all) {
  std::sort(all.begin(), all.end());
  return {all[all.size() / 2], all.front(), all.back()};
}

/// A stream, and two events around what is timed on it.
class stopwatch {
 public:
  stopwatch() {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a stream");
    check(cudaEventCreate(&began_), "an event");
    check(cudaEventCreate(&ended_), "an event");
  }
  stopwatch(const stopwatch&) = delete;
  stopwatch& operator=(const stopwatch&) = delete;
  ~stopwatch() {
    cudaEventDestroy(ended_);
    cudaEventDestroy(began_);
    cudaStreamDestroy(stream_);
  }
  [[nodiscard]] cudaStream_t stream() const noexcept { return stream_; }

  /// `launch(i)` on the stream for i from 0 to `launches` - 1, as one graph that is replayed: the host's
  /// calls cost nothing. Data rotate by i, so that no cache keeps them.
  template <class Launch>
  [[nodiscard]] device_time replayed(int launches, Launch launch) {
    cudaGraph_t graph{};
    cudaGraphExec_t replay{};
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), "begin capture");
    for (int i = 0; i < launches; ++i)
      launch(i);
    check(cudaStreamEndCapture(stream_, &graph), "end capture");
    check(cudaGraphInstantiate(&replay, graph, 0), "instantiate");
    const device_time all = timed(launches, [&] { check(cudaGraphLaunch(replay, stream_), "replay"); });
    check(cudaGraphExecDestroy(replay), "destroy");
    check(cudaGraphDestroy(graph), "destroy");
    return all;
  }
  /// `launch(i)` as it is, for what no graph can hold.
  template <class Launch>
  [[nodiscard]] device_time called(int launches, Launch launch) {
    return timed(launches, [&] {
      for (int i = 0; i < launches; ++i)
        launch(i);
    });
  }

 private:
  template <class Run>
  [[nodiscard]] device_time timed(int launches, Run run) {
    constexpr int warm = 2;
    constexpr int rounds = 15;
    std::vector<double> all;
    for (int round = 0; round < warm + rounds; ++round) {
      run();  // so that the device is busy when it is given what is timed
      check(cudaEventRecord(began_, stream_), "record");
      run();
      check(cudaEventRecord(ended_, stream_), "record");
      check(cudaEventSynchronize(ended_), "what is timed");
      float ms = 0;
      check(cudaEventElapsedTime(&ms, began_, ended_), "elapsed");
      if (round >= warm) all.push_back(static_cast<double>(ms) * 1000 / launches);
    }
    return time_of(std::move(all));
  }

  cudaStream_t stream_{};
  cudaEvent_t began_{};
  cudaEvent_t ended_{};
};

/// Where the bytes of a row go.
enum class bytes_move : std::uint8_t { within_device, over_link };

/// Rows of figures. Bytes are those read and written; the share is of the ceiling, bytes a second within the
/// device. They are printed, and written to the file that LLMMEM_BENCH_ROWS names, each as a line of JSON as
/// soon as it is measured: a program that is cut short loses none.
class device_table {
 public:
  device_table() {
    const char* const path = std::getenv("LLMMEM_BENCH_ROWS");
    if (path == nullptr) return;
    file_.open(path);
    if (!file_) throw std::runtime_error(std::string("LLMMEM_BENCH_ROWS: cannot write to ") + path);
  }

  void ceiling(double gb_per_second) {
    ceiling_ = gb_per_second;
    file_ << "{\"ceiling_gb_per_s\": " << gb_per_second << '}' << std::endl;
  }

  void add(const std::string& name, const std::string& shape, double bytes, const device_time& took,
           bytes_move where = bytes_move::within_device) {
    if (!std::exchange(has_rows_, true))
      std::printf("%-26s %-34s %12s %10s %19s %9s %7s\n", "what", "shape", "bytes", "us", "least to most",
                  "GB/s", "share");
    const double rate = bytes / took.us / 1000;
    std::printf("%-26s %-34s %12.0f %10.2f %9.2f %9.2f", name.c_str(), shape.c_str(), bytes, took.us,
                took.least, took.most);
    if (bytes != 0) std::printf(" %9.1f", rate);
    const bool is_within = where == bytes_move::within_device;
    if (bytes != 0 && ceiling_ != 0 && is_within) std::printf(" %7.3f", rate / ceiling_);
    std::printf("\n");
    std::fflush(stdout);
    file_ << R"({"what": ")" << name << R"(", "shape": ")" << shape << R"(", "bytes": )" << std::fixed
          << std::setprecision(0) << bytes << std::setprecision(3) << R"(, "us": )" << took.us
          << R"(, "least_us": )" << took.least << R"(, "most_us": )" << took.most << R"(, "within_device": )"
          << (is_within ? "true" : "false") << '}' << std::endl;
  }

 private:
  double ceiling_ = 0;
  bool has_rows_ = false;
  std::ofstream file_{};
};

/// Memory of the device that nothing initialises.
class device_bytes {
 public:
  explicit device_bytes(std::uint64_t bytes) : bytes_(bytes) {
    check(cudaMalloc(&data_, static_cast<std::size_t>(bytes)), "cudaMalloc");
  }
  device_bytes(device_bytes&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  device_bytes& operator=(device_bytes&&) = delete;
  ~device_bytes() { cudaFree(data_); }
  [[nodiscard]] std::byte* data() const noexcept { return static_cast<std::byte*>(data_); }
  [[nodiscard]] std::uint64_t size() const noexcept { return bytes_; }

 private:
  void* data_ = nullptr;
  std::uint64_t bytes_;
};

}  // namespace llmmem_bench
