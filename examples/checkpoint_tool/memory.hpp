/// @file
/// Memory of a fixed size for reads and writes of files.
#pragma once

#include <llmmem/space/buffer.hpp>
#include <llmmem/space/host.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <span>

namespace checkpoint_tool {

/// Bytes aligned for direct I/O.
class file_memory {
 public:
  explicit file_memory(std::uint64_t bytes)
      : bytes_(bytes),
        space_({.budget = std::max<std::uint64_t>(bytes, 1) + slack, .name = "checkpoint_tool"}),
        buffer_(space_, std::max<std::uint64_t>(bytes, 1), std::align_val_t{4096}) {}
  file_memory(const file_memory&) = delete;
  file_memory& operator=(const file_memory&) = delete;

  [[nodiscard]] std::span<std::byte> span() noexcept {
    return {buffer_.range().data, static_cast<std::size_t>(bytes_)};
  }

 private:
  static constexpr std::uint64_t slack = std::uint64_t{1} << 16;  // whole pages are charged

  std::uint64_t bytes_;
  llmmem::host_space space_;
  llmmem::space_buffer<llmmem::host_space> buffer_;
};

}  // namespace checkpoint_tool
