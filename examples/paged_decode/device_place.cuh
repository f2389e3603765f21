/// @file
/// Where a paged cache lies, and what runs its kernels: a device. As `host_place`.
#pragma once

#include <llmmem/device/cuda.hpp>
#include <llmmem/kernels/device_executor.cuh>
#include <llmmem/space/buffer.hpp>

#include <cstddef>
#include <cstdint>
#include <new>
#include <span>

namespace paged_decode {

/// One device, one stream: kernels and copies come one behind the other. The model's matrices stay with the
/// host, so that every layer's vectors go up and what was attended to comes down: this shows a cache and its
/// kernels, and is no fast engine.
class device_place {
 public:
  /// Bytes of the device, that grow as they are put. The place outlives them.
  class memory {
   public:
    [[nodiscard]] std::byte* data() const noexcept { return buffer_.range().data; }

   private:
    friend device_place;
    llmmem::space_buffer<llmmem::device_space> buffer_{};
  };

  /// @param multiprocessors  of the device
  /// @throws llmmem::system_error  without a device, and says why.
  device_place(llmmem::device_id device, std::uint64_t budget, std::uint32_t multiprocessors)
      : space_(device, {.budget = budget}), queue_(space_, device, {}), multiprocessors_(multiprocessors) {}

  [[nodiscard]] llmmem::device_executor run() const noexcept {
    return llmmem::device_executor(queue_.stream(), {.multiprocessors = multiprocessors_});
  }

  std::byte* make_room(memory& in, std::size_t bytes) {
    if (in.buffer_.bytes() < bytes) {
      queue_.mark().value().wait();  // what was there may still be read
      in.buffer_ = llmmem::space_buffer<llmmem::device_space>(space_, bytes, std::align_val_t{256});
    }
    return in.data();
  }
  template <class T>
  T* put(memory& to, std::span<const T> from) {
    std::byte* const there = make_room(to, from.size_bytes());
    if (!from.empty()) {
      const auto whole = to.buffer_.range().subrange(0, from.size_bytes()).value();
      queue_.copy_in_async(whole, std::as_bytes(from), {}).value().wait();
    }
    return reinterpret_cast<T*>(there);
  }
  /// @param from  the beginning of a memory of this place.
  template <class T>
  void get(std::span<T> to, const memory& from) {
    if (to.empty()) return;
    const auto whole = from.buffer_.range().subrange(0, to.size_bytes()).value();
    queue_.copy_out_async(std::as_writable_bytes(to), whole, {}).value().wait();
  }

 private:
  llmmem::device_space space_;
  llmmem::device_queue queue_;
  std::uint32_t multiprocessors_;
};

}  // namespace paged_decode
