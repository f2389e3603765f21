/// @file
/// Values in a range of a space.
#pragma once

#include <llmmem/space/buffer.hpp>
#include <llmmem/space/concepts.hpp>

#include <cstddef>
#include <new>
#include <span>

namespace train_gpt {

/// A range of a host-accessible space as values, at a multiple of 64 bytes.
template <class T, llmmem::memory_space Space>
  requires(Space::is_host_accessible)
class host_values {
 public:
  /// @throws out_of_memory  if the space lacks the memory.
  host_values(Space& space, std::size_t count)
      : buffer_(space, count, sizeof(T), std::align_val_t{64}), count_(count) {}

  [[nodiscard]] std::span<T> values() const noexcept {
    return {reinterpret_cast<T*>(buffer_.range().data), count_};
  }

 private:
  llmmem::space_buffer<Space> buffer_;
  std::size_t count_;
};

}  // namespace train_gpt
