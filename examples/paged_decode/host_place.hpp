/// @file
/// The host as the place of a paged cache and its kernels.
#pragma once

#include <llmmem/kernels/host_executor.hpp>

#include <cstddef>
#include <cstring>
#include <memory>
#include <span>

namespace paged_decode {

/// Memory of the host. `device_place` is its equivalent for a device; a cache needs nothing else of either.
class host_place {
 public:
  /// Bytes, aligned to at least 16, that grow as they are written.
  class memory {
   public:
    [[nodiscard]] std::byte* data() const noexcept { return data_.get(); }

   private:
    friend host_place;
    std::unique_ptr<std::byte[]> data_{};
    std::size_t size_ = 0;
  };

  [[nodiscard]] static llmmem::host_executor run() noexcept { return {}; }

  /// Makes space for that many bytes; growth loses the contents.
  static std::byte* make_room(memory& in, std::size_t bytes) {
    if (bytes > in.size_) {
      in.data_ = std::make_unique<std::byte[]>(bytes);
      in.size_ = bytes;
    }
    return in.data();
  }
  /// Copies `from`, which may change as soon as this returns.
  template <class T>
  static T* put(memory& to, std::span<const T> from) {
    std::byte* const there = make_room(to, from.size_bytes());
    if (!from.empty()) std::memcpy(there, from.data(), from.size_bytes());
    return reinterpret_cast<T*>(there);
  }
  /// Copies the beginning of a memory after all kernels have ended.
  template <class T>
  static void get(std::span<T> to, const memory& from) {
    if (!to.empty()) std::memcpy(to.data(), from.data(), to.size_bytes());
  }
};

}  // namespace paged_decode
