/// @file
/// Where a paged cache lies, and what runs its kernels: the host.
#pragma once

#include <llmmem/kernels/host_executor.hpp>

#include <cstddef>
#include <cstring>
#include <memory>
#include <span>

namespace paged_decode {

/// Memory of the host. `device_place` is the same for a device; a cache asks for nothing else of either.
class host_place {
 public:
  /// Bytes, aligned to 16 at least, that grow as they are put.
  class memory {
   public:
    [[nodiscard]] std::byte* data() const noexcept { return data_.get(); }

   private:
    friend host_place;
    std::unique_ptr<std::byte[]> data_{};
    std::size_t size_ = 0;
  };

  [[nodiscard]] static llmmem::host_executor run() noexcept { return {}; }

  /// Room for so many bytes; what was there is lost where it has to grow.
  static std::byte* make_room(memory& in, std::size_t bytes) {
    if (bytes > in.size_) {
      in.data_ = std::make_unique<std::byte[]>(bytes);
      in.size_ = bytes;
    }
    return in.data();
  }
  /// Takes a copy of `from`, which may change as soon as this returns.
  template <class T>
  static T* put(memory& to, std::span<const T> from) {
    std::byte* const there = make_room(to, from.size_bytes());
    if (!from.empty()) std::memcpy(there, from.data(), from.size_bytes());
    return reinterpret_cast<T*>(there);
  }
  /// Copies the beginning of a memory, once what was run has ended.
  template <class T>
  static void get(std::span<T> to, const memory& from) {
    if (!to.empty()) std::memcpy(to.data(), from.data(), to.size_bytes());
  }
};

}  // namespace paged_decode
