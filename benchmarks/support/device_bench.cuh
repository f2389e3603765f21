/// @file
/// Timing of a device's work: a table of rows with their ceilings, and the same as lines of JSON.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/fill_verify.hpp>
#include <llmmem/kernels/packet.hpp>

#include <cuda_runtime_api.h>
#include <cub/device/device_reduce.cuh>

#include <algorithm>
#include <array>
#include <cstddef>
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
#include "support/seeds.hpp"

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

/// A stream, and two events around the timed work.
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
  /// `launch(i)` without a graph, for work that no graph can contain.
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
      run();  // so that the device is busy when it gets the timed work
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

/// The ceiling of a row: a copy within the device, read and written; a kernel that only reads, because a copy
/// would flatter other readers; or none, if the bytes leave the device.
enum class ceiling : std::uint8_t { copy, read, none };

[[nodiscard]] constexpr const char* name_of(ceiling of) noexcept {
  constexpr std::array names{"copy", "read", "none"};
  return names[static_cast<std::size_t>(of)];
}

/// Rows of figures, and their ceilings: bytes a second within the device. They are printed, and written to
/// the file that LLMMEM_BENCH_ROWS names, each as a line of JSON as soon as it is measured: a program that is
/// cut short loses none.
class device_table {
 public:
  device_table() {
    const char* const path = std::getenv("LLMMEM_BENCH_ROWS");
    if (path == nullptr) return;
    file_.open(path);
    if (!file_) {
      std::fprintf(stderr, "FAILED: LLMMEM_BENCH_ROWS: cannot write to %s\n", path);
      std::exit(1);
    }
  }

  void set(ceiling of, double gb_per_second) {
    ceilings_[static_cast<std::size_t>(of)] = gb_per_second;
    std::printf("ceiling of what is a share of %s: %.1f GB/s\n", name_of(of), gb_per_second);
    file_ << R"({"ceiling": ")" << name_of(of) << R"(", "gb_per_s": )" << std::fixed << std::setprecision(3)
          << gb_per_second << '}' << std::endl;
  }

  /// `bytes` are those that must be read and written.
  void add(const std::string& name, const std::string& shape, double bytes, const device_time& took,
           ceiling of = ceiling::copy) {
    if (!std::exchange(has_rows_, true))
      std::printf("%-30s %-34s %12s %10s %19s %9s %7s\n", "what", "shape", "bytes", "us", "least to most",
                  "GB/s", "share of");
    const double rate = bytes / took.us / 1000;
    std::printf("%-30s %-34s %12.0f %10.2f %9.2f %9.2f", name.c_str(), shape.c_str(), bytes, took.us,
                took.least, took.most);
    if (bytes != 0) std::printf(" %9.1f", rate);
    const double most = ceilings_[static_cast<std::size_t>(of)];
    if (bytes != 0 && most != 0) std::printf(" %7.3f %s", rate / most, name_of(of));
    std::printf("\n");
    std::fflush(stdout);
    file_ << R"({"what": ")" << name << R"(", "shape": ")" << shape << R"(", "bytes": )" << std::fixed
          << std::setprecision(0) << bytes << std::setprecision(3) << R"(, "us": )" << took.us
          << R"(, "least_us": )" << took.least << R"(, "most_us": )" << took.most << R"(, "share_of": ")"
          << name_of(of) << R"("})" << std::endl;
  }

 private:
  std::array<double, 3> ceilings_{};  // none has 0
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

/// The ceiling of kernels that only read: 64-bit words of `at(i)`, for i up to `launches`, summed by CUB,
/// whose loads are as wide as the device has them and which writes next to nothing.
template <class At>
void measure_read_ceiling(stopwatch& watch, device_table& table, int launches, std::uint64_t bytes, At at) {
  const device_bytes sum(sizeof(std::uint64_t));
  std::size_t scratch = 0;
  const auto reduce = [&](void* memory, int i) {
    check(cub::DeviceReduce::Sum(memory, scratch, reinterpret_cast<const std::uint64_t*>(at(i)),
                                 reinterpret_cast<std::uint64_t*>(sum.data()),
                                 static_cast<std::int64_t>(bytes / sizeof(std::uint64_t)), watch.stream()),
          "cub::DeviceReduce::Sum");
  };
  reduce(nullptr, 0);
  const device_bytes memory(scratch);
  const auto took = watch.replayed(launches, [&](int i) { reduce(memory.data(), i); });
  const auto read = static_cast<double>(bytes);
  table.set(ceiling::read, read / took.us / 1000);
  table.add("cub DeviceReduce::Sum", std::to_string(bytes >> 20) + " MiB of 64-bit words", read, took,
            ceiling::read);
}

/// Random bytes of which some bits are always, or never, set in each 16-bit word: a constant would have the
/// device take less power than real numbers do, and some of any bits are no numbers.
struct random_numbers {
  llmmem::seeded_pattern random{};
  std::uint32_t kept = 0;  ///< bits of two words
  std::uint32_t set = 0;

  [[nodiscard]] LLMMEM_HD constexpr llmmem::packet<16> at(std::uint64_t position) const noexcept {
    llmmem::packet<16> out = random.at(position);
    for (auto& word : out.words)
      word = (word & kept) | set;
    return out;
  }
};
static_assert(llmmem::memory_pattern<random_numbers>);

/// Numbers below 2 of any size, in bf16 and in e4m3: the first bit of an exponent is never set.
[[nodiscard]] constexpr random_numbers below_two(std::uint64_t seed) noexcept {
  return {{.seed = seed}, 0xBFBF'BFBFU, 0};
}
/// bf16 from half to two, of either sign.
[[nodiscard]] constexpr random_numbers near_one(std::uint64_t seed) noexcept {
  return {{.seed = seed}, 0x80FF'80FFU, 0x3F00'3F00U};
}

/// LLMMEM_BENCH_GPU_MIB in bytes, otherwise `usual` MiB.
[[nodiscard]] inline std::uint64_t largest_buffer(std::uint64_t usual) {
  try {
    const std::uint64_t mib = llmmem_tests::number_from_environment("LLMMEM_BENCH_GPU_MIB", usual);
    if (mib == 0 || mib > 1U << 24U)
      throw std::invalid_argument("LLMMEM_BENCH_GPU_MIB: wanted a number of MiB, from 1 to 16777216");
    return mib << 20U;
  } catch (const std::invalid_argument& wrong) {
    std::fprintf(stderr, "FAILED: %s\n", wrong.what());
    std::exit(1);
  }
}

}  // namespace llmmem_bench
