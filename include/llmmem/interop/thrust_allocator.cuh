/// @file
/// `thrust_allocator`: containers and algorithms of Thrust in memory of a llmmem space. For code that nvcc
/// compiles.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/device/device_runtime.hpp>
#include <llmmem/interop/resource_refusal.hpp>
#include <llmmem/space/concepts.hpp>

#include <thrust/device_ptr.h>
#include <thrust/device_reference.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// An allocator of Thrust over a `stream_ordered` space of device memory, for `thrust::device_vector` and for
/// the temporary storage of algorithms. Copyable; two are equal if they have the same space. The space
/// outlives every container.
///
///     stream_ordered memory(device, device_id{0}, cuda_runtime{});
///     thrust_allocator<float, decltype(memory)> of(memory, stream);
///     thrust::device_vector<float, decltype(of)> values(1024, 0.0f, of);
///     thrust::sort(thrust::cuda::par_nosync(thrust_allocator<char, decltype(memory)>(memory,
///     stream)).on(stream),
///                  values.begin(), values.end());
///
/// With a stream, memory returns to the space after the stream's work, so that `par_nosync` frees its
/// temporary storage without waiting. Thrust frees it while kernels may still run (cccl#4117), and an
/// allocator that frees at once would hand it out again. Without a stream, memory returns at once: for
/// containers that end after a synchronisation.
///
/// @tparam T      the element type; memory is aligned to 256 bytes or `alignof(T)`
/// @tparam Owner  `stream_ordered<Space, Runtime>` of memory that devices access
/// @par Thread safety   that of `Owner`: any number of threads.
/// @par Errors          `allocate` throws `resource_refusal`, a `std::bad_alloc` with the failure's message.
template <class T, class Owner>
class thrust_allocator {
 public:
  using value_type = T;
  using pointer = thrust::device_ptr<T>;
  using const_pointer = thrust::device_ptr<const T>;
  using reference = thrust::device_reference<T>;
  using const_reference = thrust::device_reference<const T>;
  using size_type = std::size_t;
  using difference_type = std::ptrdiff_t;
  template <class Other>
  struct rebind {
    using other = thrust_allocator<Other, Owner>;
  };

  explicit thrust_allocator(Owner& owner) noexcept : owner_(&owner) {}
  thrust_allocator(Owner& owner, stream_argument<typename Owner::stream> after) noexcept
      : owner_(&owner), after_(after.get()), is_ordered_(true) {}
  template <class Other>
  thrust_allocator(
      const thrust_allocator<Other, Owner>& other) noexcept  // NOLINT(google-explicit-constructor)
      : owner_(&other.owner()), after_(other.after()), is_ordered_(other.is_ordered()) {}

  [[nodiscard]] pointer allocate(size_type count) const {
    if (count == 0) return pointer{};
    if (count > max_bytes / sizeof(T))
      throw resource_refusal({.code = errc::out_of_bytes, .wanted = max_bytes, .where = "thrust_allocator"});
    const auto range =
        owner_->try_allocate(std::uint64_t{count} * sizeof(T), std::max<std::uint64_t>(256, alignof(T)));
    if (!range) throw resource_refusal(range.error());
    return pointer(reinterpret_cast<T*>(range->data));
  }
  void deallocate(pointer data, size_type count) const noexcept {
    if (count == 0) return;
    const typename Owner::range_type range{reinterpret_cast<std::byte*>(data.get()),
                                           std::uint64_t{count} * sizeof(T)};
    if (is_ordered_) return owner_->deallocate(range, after_);
    owner_->deallocate(range);
  }

  [[nodiscard]] Owner& owner() const noexcept { return *owner_; }
  [[nodiscard]] typename Owner::stream after() const noexcept { return after_; }
  [[nodiscard]] bool is_ordered() const noexcept { return is_ordered_; }
  template <class Other>
  [[nodiscard]] friend bool operator==(const thrust_allocator& a,
                                       const thrust_allocator<Other, Owner>& b) noexcept {
    return &a.owner() == &b.owner();
  }

 private:
  Owner* owner_;
  typename Owner::stream after_{};
  bool is_ordered_ = false;
};

}  // namespace v0
}  // namespace llmmem
