/// @file
/// `cccl_host_source`: a memory resource of CCCL (`cuda::mr`), RMM or an engine whose memory hosts access, as
/// the source of a `basic_host_space`: pools of pinned memory, of which staging is made.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/interop/cccl_resource.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/host.hpp>

#include <cuda/memory_resource>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// A `byte_source` that takes host memory from a resource of CCCL: `cuda::pinned_memory_pool_ref`,
/// `cuda::mr::any_synchronous_resource<cuda::mr::host_accessible>`, a resource of RMM. The source keeps a
/// copy of it.
///
///     basic_host_space staging(cccl_host_source(pinned_pool), {.budget = bytes, .name = "staging"});
///     async_checkpointer<my_traits> checkpointer(coordinator, tensors, staging, options);
///
/// - Memory comes from `allocate_sync`, which is valid on every thread and stream at once.
/// - An alignment above 256 is made inside a larger request, because pools of CCCL and RMM refuse it; such a
///   request is charged as `bytes + alignment`.
/// - An exception of the resource counts as a refusal; none escapes.
/// - If devices can access the resource's memory, too, they see it at the host's addresses
///   (`device_address`), and the space counts as pinned memory where that matters (`memory_access::both`).
///
/// @tparam Resource  copyable; must have the property `cuda::mr::host_accessible`: the compiler rejects
///                   memory of a device in a space of host memory
/// @par Thread safety   the space holds its lock during calls; a resource that other code also uses must be
///   synchronised.
template <class Resource>
class cccl_host_source {
  static_assert(cuda::mr::synchronous_resource<Resource>,
                "cccl_host_source takes a resource with allocate_sync(bytes, alignment)");
  static_assert(cuda::has_property<Resource, cuda::mr::host_accessible>,
                "this resource does not say that hosts can access its memory; for device memory use "
                "cccl_source");
  static_assert(std::copyable<Resource>,
                "a pool of CCCL can be neither copied nor moved: pass its as_ref(), or an any_resource");

 public:
  explicit cccl_host_source(Resource resource) : resource_(std::move(resource)) {}

  [[nodiscard]] std::uint64_t footprint(std::uint64_t bytes, std::uint64_t alignment) const noexcept {
    const std::uint64_t more = alignment > most_aligned ? alignment : 0;
    return bytes > std::numeric_limits<std::uint64_t>::max() - more ? bytes : bytes + more;
  }

  [[nodiscard]] std::byte* take(std::uint64_t bytes, std::uint64_t alignment) noexcept {
    if (alignment <= most_aligned) return allocate(bytes, alignment);
    if (bytes > std::numeric_limits<std::uint64_t>::max() - alignment) return nullptr;
    std::byte* const first = allocate(bytes + alignment, most_aligned);
    if (first == nullptr) return nullptr;
    // Between the request's first byte and the aligned one there are at least 256 bytes, for its address.
    std::byte* const data = first + (alignment - reinterpret_cast<std::uintptr_t>(first) % alignment);
    std::memcpy(data - sizeof(first), &first, sizeof(first));
    return data;
  }

  void give_back(std::byte* data, std::uint64_t bytes, std::uint64_t alignment) noexcept {
    if (alignment <= most_aligned) return deallocate(data, bytes, alignment);
    std::byte* first = nullptr;
    std::memcpy(&first, data - sizeof(first), sizeof(first));
    deallocate(first, bytes + alignment, most_aligned);
  }

  /// The address at which devices see bytes of a live range: the host's.
  [[nodiscard]] result<std::byte*> device_address(std::byte* data, std::uint64_t /*bytes*/) const noexcept
    requires(cuda::has_property<Resource, cuda::mr::device_accessible>)
  {
    return data;
  }

 private:
  static constexpr std::uint64_t most_aligned = cuda::mr::default_cuda_malloc_alignment;

  [[nodiscard]] std::byte* allocate(std::uint64_t bytes, std::uint64_t alignment) noexcept {
    if (bytes > std::numeric_limits<std::size_t>::max()) return nullptr;
    try {
      return static_cast<std::byte*>(
          resource_.allocate_sync(static_cast<std::size_t>(bytes), static_cast<std::size_t>(alignment)));
    } catch (...) {
      return nullptr;
    }
  }
  /// A resource that throws here has broken its contract, and keeps the bytes.
  void deallocate(std::byte* data, std::uint64_t bytes, std::uint64_t alignment) noexcept {
    try {
      resource_.deallocate_sync(data, static_cast<std::size_t>(bytes), static_cast<std::size_t>(alignment));
    } catch (...) {
    }
  }

  Resource resource_;
};

}  // namespace v0
}  // namespace llmmem
