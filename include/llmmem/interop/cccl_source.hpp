/// @file
/// `cccl_source`: a memory resource of CCCL (`cuda::mr`), RMM or an engine as the source of a
/// `basic_device_space`.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/device/device.hpp>
#include <llmmem/device/device_runtime.hpp>
#include <llmmem/interop/cccl_resource.hpp>

#include <cuda/memory_resource>
#include <cuda/stream_ref>

#include <concepts>
#include <cstddef>
#include <exception>
#include <utility>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// A runtime that allocates from a resource instead of a pool of the driver.
template <class Resource, device_runtime Runtime>
class resource_runtime : public Runtime {
 public:
  struct pool {};

  resource_runtime(Resource resource, Runtime runtime) : Runtime(runtime), resource_(std::move(resource)) {}

  device_status make_pool(pool*, device_id) const noexcept { return 0; }
  /// The resource decides which devices may access its memory.
  device_status share_pool(pool, device_id) const noexcept { return not_supported; }
  device_status trim_pool(pool, std::size_t) const noexcept { return 0; }
  device_status end_pool(pool) const noexcept { return 0; }
  device_status allocate(void** into, std::size_t count, pool, typename Runtime::stream in) const noexcept {
    try {
      *into = resource_.allocate(cuda::stream_ref(in), count, cuda::mr::default_cuda_malloc_alignment);
      return *into == nullptr ? out_of_memory_status : 0;
    } catch (const cuda::cuda_error& error) {
      return error.status() == 0 ? out_of_memory_status : static_cast<device_status>(error.status());
    } catch (...) {
      return out_of_memory_status;
    }
  }
  using Runtime::release;  // the concept requires this one, without a number of bytes; the source calls the
                           // one below
  /// A resource that throws here has broken its contract, and keeps the bytes.
  device_status release(void* data, std::size_t count, typename Runtime::stream in) const noexcept {
    try {
      resource_.deallocate(cuda::stream_ref(in), data, count, cuda::mr::default_cuda_malloc_alignment);
    } catch (...) {
    }
    return 0;
  }

 private:
  static constexpr device_status out_of_memory_status = 2;  // cudaErrorMemoryAllocation
  static constexpr device_status not_supported = 801;       // cudaErrorNotSupported

  mutable Resource resource_;  // mutable, because allocation does not change which resource this is
};

}  // namespace detail

/// A `byte_source` that takes memory of a device from a resource of CCCL: `cuda::device_memory_pool_ref`,
/// `cuda::mr::any_resource<cuda::mr::device_accessible>`, a resource of RMM. The source keeps a copy of it.
///
///     cuda::mr::any_resource<cuda::mr::device_accessible> theirs = ...;
///     basic_device_space space(cccl_source(device_id{0}, theirs, cuda_runtime{}), {.budget = bytes});
///
/// It is a `device_pool_source` with the resource instead of the driver's pool, and has the same guarantees:
/// - requests go to a stream of the right device, which the source makes and waits for, so that memory is
///   valid on every stream. `allocate_sync` of CCCL's pools runs on a stream of device 0 instead, which costs
///   a context there in each process;
/// - an alignment above 256 is made inside a larger request, because CCCL's pools refuse it;
/// - if the resource refuses while deallocated bytes have not yet returned, the source asks once more;
/// - a refusal's index is the status of the `cuda::cuda_error` that the resource threw, otherwise 2
///   (`cudaErrorMemoryAllocation`).
///
/// `resource_source` (device/device.hpp) does not need CCCL, and accepts any type with the functions of a
/// resource.
///
/// @tparam Resource  copyable; must have the property `cuda::mr::device_accessible`: the compiler rejects
///                   host memory in a space of device memory
/// @par Thread safety   the space holds its lock during calls; a resource that other code also uses must be
///   synchronised.
/// @par Errors          the constructor throws `system_error` if there is no such device, or no stream.
template <class Resource, device_runtime Runtime>
class cccl_source : public device_pool_source<detail::resource_runtime<Resource, Runtime>> {
  static_assert(cuda::mr::resource<Resource>,
                "cccl_source takes a resource with allocate(stream, bytes, alignment); wrap one that has "
                "allocate_sync alone in cuda::mr::synchronous_resource_adapter");
  static_assert(cuda::has_property<Resource, cuda::mr::device_accessible>,
                "this resource does not say that devices can access its memory; for host memory use "
                "basic_host_space");
  static_assert(std::copyable<Resource>,
                "a pool of CCCL can be neither copied nor moved: pass its as_ref(), or an any_resource");

 public:
  cccl_source(device_id device, Resource resource, Runtime runtime = {})
      : device_pool_source<detail::resource_runtime<Resource, Runtime>>(
            device, detail::resource_runtime<Resource, Runtime>(std::move(resource), runtime)) {}
};

}  // namespace v0
}  // namespace llmmem
