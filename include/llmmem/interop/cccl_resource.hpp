/// @file
/// `space_resource`: a space as a memory resource of CCCL (`cuda::mr`), which CUB, Thrust, `cuda::buffer`,
/// RMM and cuDF take. Needs CCCL 3.2 or newer and the CUDA Toolkit, and no nvcc. Apart from all other
/// headers, because `<cuda/memory_resource>` is 84,000 lines.
#pragma once

#if __has_include(<cuda/version>)
#include <cuda/version>
#endif
#if !defined(CCCL_VERSION) || CCCL_VERSION < 3'002'000
#error \
    "llmmem/interop/cccl_resource.hpp needs CCCL 3.2 or newer: link llmmem::cccl, or put https://github.com/NVIDIA/cccl before the toolkit's own on the include path"
#endif

#include <llmmem/config.hpp>
#include <llmmem/device/device.hpp>
#include <llmmem/device/stream_ordered.hpp>
#include <llmmem/interop/resource_refusal.hpp>
#include <llmmem/space/host.hpp>

#include <cuda/memory_resource>
#include <cuda/stream_ref>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace llmmem {
inline namespace v0 {

/// Which processors can dereference the addresses of a space, for the properties of a resource. A space of
/// your own specialises `memory_access_of`; a file's addresses are not memory, so a file space cannot become
/// a resource.
enum class memory_access : std::uint8_t { host, device, both };

/// @tparam Space  `host_space` and other `basic_host_space`s: `host`, those over pinned memory: `both`;
///                `basic_device_space`: `device`; `stream_ordered`: that of the space beneath.
template <class Space>
struct memory_access_of;
template <class Source>
struct memory_access_of<basic_host_space<Source>> {
  /// Pinned memory has an address for devices (`device_address`).
  static constexpr memory_access value = requires(const Source& source) {
    source.device_address(nullptr, 0);
  } ? memory_access::both : memory_access::host;
};
template <class Source>
struct memory_access_of<basic_device_space<Source>> {
  static constexpr memory_access value = memory_access::device;
};
template <class Space, class Runtime>
struct memory_access_of<stream_ordered<Space, Runtime>> : memory_access_of<Space> {};

/// A handle to a `stream_ordered` space that models `cuda::mr::resource`: copyable, as CCCL demands, and
/// equal to another handle of the same space. The space stays where it is and outlives every handle and every
/// container that keeps a copy of one.
///
///     device_space device(device_id{0}, {.budget = bytes});
///     stream_ordered memory(device, device_id{0}, cuda_runtime{});
///     auto buffer = cuda::make_buffer<float>(stream, space_resource(memory), 1024, cuda::no_init);
///     cub::DeviceReduce::Sum(in, out, n, space_resource(memory));     // temporary storage, CCCL 3.4
///
/// - `allocate(stream, bytes, alignment)` returns memory that may be used on every stream at once: stronger
///   than the concept demands. 0 bytes are the null pointer, which may be deallocated.
/// - `deallocate(stream, ...)` does not wait: the memory returns to the space when `stream` has passed this
///   point; during a capture it stays until `stream_ordered::release_captured`.
/// - `deallocate_sync` returns the memory at once.
/// - A length other than the allocated one is a misuse, reported as in `basic_host_space`. The alignment of a
///   deallocation is not checked.
///
/// @tparam Owner  a `stream_ordered` space whose `Runtime::stream` is `cudaStream_t`
/// @par Thread safety   that of `Owner`: any number of threads.
/// @par Errors          the allocating functions throw `resource_refusal`; deallocation does not throw.
template <class Owner>
class space_resource {
  static_assert(
      memory_space<Owner> && requires { typename Owner::runtime_type; },
      "space_resource takes a stream_ordered space, which frees memory behind a stream: "
      "stream_ordered memory(space, device_id{0}, cuda_runtime{}); space_resource(memory)");
  static_assert(
      requires { memory_access_of<Owner>::value; },
      "llmmem::memory_access_of does not say which processors can dereference the addresses of this "
      "space: specialise it; a file's addresses are no memory");

 public:
  static constexpr memory_access access = memory_access_of<Owner>::value;
  static constexpr bool is_host_accessible = access != memory_access::device;
  static constexpr bool is_device_accessible = access != memory_access::host;

  /// What containers of CCCL deduce their properties from.
  using default_queries = std::conditional_t<
      access == memory_access::both,
      cuda::mr::properties_list<cuda::mr::device_accessible, cuda::mr::host_accessible>,
      std::conditional_t<access == memory_access::host, cuda::mr::properties_list<cuda::mr::host_accessible>,
                         cuda::mr::properties_list<cuda::mr::device_accessible>>>;

  explicit space_resource(Owner& owner) noexcept : owner_(&owner) {}

  /// @name cuda::mr::resource
  /// @{
  [[nodiscard]] void* allocate_sync(std::size_t bytes,
                                    std::size_t alignment = cuda::mr::default_cuda_malloc_alignment) const {
    if (bytes == 0) return nullptr;
    const auto range = owner_->try_allocate(bytes, alignment);
    if (!range) throw resource_refusal(range.error());
    return range->data;
  }
  void deallocate_sync(void* data, std::size_t bytes, std::size_t /*alignment*/ = 0) const noexcept {
    if (data != nullptr) owner_->deallocate(range_of(data, bytes));
  }
  [[nodiscard]] void* allocate(cuda::stream_ref /*stream*/, std::size_t bytes,
                               std::size_t alignment = cuda::mr::default_cuda_malloc_alignment) const {
    return allocate_sync(bytes, alignment);
  }
  void deallocate(cuda::stream_ref stream, void* data, std::size_t bytes,
                  std::size_t /*alignment*/ = 0) const noexcept {
    if (data != nullptr) owner_->deallocate(range_of(data, bytes), stream);
  }
  [[nodiscard]] friend bool operator==(const space_resource& a, const space_resource& b) noexcept {
    return a.owner_ == b.owner_;
  }
  friend void get_property(const space_resource&, cuda::mr::host_accessible) noexcept
    requires(is_host_accessible)
  {}
  friend void get_property(const space_resource&, cuda::mr::device_accessible) noexcept
    requires(is_device_accessible)
  {}
  /// The handle by itself is an environment, from which algorithms of CUB take their temporary storage.
  [[nodiscard]] const space_resource& query(const decltype(cuda::mr::get_memory_resource)&) const noexcept {
    return *this;
  }
  /// @}

  [[nodiscard]] Owner& owner() const noexcept { return *owner_; }

 private:
  [[nodiscard]] static typename Owner::range_type range_of(void* data, std::size_t bytes) noexcept {
    return {static_cast<std::byte*>(data), bytes};
  }

  Owner* owner_;
};

}  // namespace v0
}  // namespace llmmem
