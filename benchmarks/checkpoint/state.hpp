/// @file
/// The saved state in huge pages if the system has them, and a folder that is removed at the end.
///
/// LLMMEM_BENCH_CHECKPOINT_MIB   bytes of the state (256)
/// LLMMEM_BENCH_IO_DIR           the folder of all files (the system's for temporary files)
#pragma once

#include <llmmem/checkpoint/file_plan.hpp>
#include <llmmem/space/buffer.hpp>
#include <llmmem/space/host.hpp>

#include <unistd.h>

#include <fcntl.h>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "checkpoint/experiment.hpp"

namespace llmmem_benchmarks {

[[nodiscard]] inline std::uint64_t state_bytes() {
  return number_from_environment("LLMMEM_BENCH_CHECKPOINT_MIB", 256) << 20;
}

template <class Work>
[[nodiscard]] double seconds_of(Work&& work) {
  const auto began = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

/// Memory of `host_space` with present pages.
class host_memory {
 public:
  explicit host_memory(std::uint64_t bytes, int filled_with = 0)
      : space_({.budget = bytes + (std::uint64_t{4} << 20), .name = "benchmark memory"}),
        buffer_(space_, bytes, std::align_val_t{4096}) {
    std::memset(data(), filled_with, static_cast<std::size_t>(bytes));
  }

  [[nodiscard]] std::byte* data() const noexcept { return buffer_.range().data; }
  [[nodiscard]] std::span<std::byte> span() const noexcept {
    return {data(), static_cast<std::size_t>(buffer_.bytes())};
  }

 private:
  llmmem::host_space space_;
  llmmem::space_buffer<llmmem::host_space> buffer_;
};

/// Sixteen tensors of different sizes in one piece of memory.
class saved_state {
 public:
  explicit saved_state(std::uint64_t bytes = state_bytes()) : memory_(bytes) {
    std::uint64_t random = 1;
    for (std::size_t i = 0; i + 8 <= bytes; i += 8) {
      random = random * 6364136223846793005ULL + 1442695040888963407ULL;
      std::memcpy(memory_.data() + i, &random, 8);
    }
    constexpr std::uint64_t tensors_of_it = 16;
    constexpr std::uint64_t row = 4096;  // bytes
    std::uint64_t begin = 0;
    for (std::uint64_t i = 0; i < tensors_of_it; ++i) {
      const std::uint64_t end =
          i + 1 == tensors_of_it
              ? bytes
              : bytes * (i + 1) * (i + 2) / (tensors_of_it * (tensors_of_it + 1)) / row * row;
      tensors.push_back({.name = "layers." + std::to_string(i) + ".weight",
                         .type = llmmem::safetensors_type::f32,
                         .shape = {(end - begin) / row, row / 4},
                         .group = "model",
                         .part = {}});
      spans.push_back(
          memory_.span().subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin)));
      begin = end;
    }
  }

  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return memory_.span(); }

  std::vector<llmmem::state_tensor> tensors{};
  std::vector<std::span<const std::byte>> spans{};

 private:
  host_memory memory_;
};

/// A separate folder for files.
class bench_folder {
 public:
  bench_folder() {
    const char* const named = std::getenv("LLMMEM_BENCH_IO_DIR");
    const std::filesystem::path where =
        named != nullptr ? std::filesystem::path(named) : std::filesystem::temp_directory_path();
    std::string pattern =
        (where / "llmmem-bench-").string() + std::string(6, 'X');  // letters of its own come there
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error(pattern + ": no folder of that name");
    path = pattern;
  }
  bench_folder(const bench_folder&) = delete;
  bench_folder& operator=(const bench_folder&) = delete;
  ~bench_folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }

  /// Writes out the pending data of others before a turn begins.
  void settle() const {
    const int folder = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0) return;
    static_cast<void>(::syncfs(folder));
    ::close(folder);
  }

  std::string path{};
};

}  // namespace llmmem_benchmarks
