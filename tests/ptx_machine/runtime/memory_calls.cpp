/// @file
/// Memory of the device and of the host, pools, copies and fills.
#include "ptx_machine/runtime/state.hpp"

using namespace ptx_machine;

namespace {

[[nodiscard]] bool is_reachable(u64 at, u64 bytes) {
  return now().device.memory.pieces(at, bytes, [](u8*, u8*, u64) {});
}
cudaError_t copy(void* to, const void* from, u64 bytes, cudaStream_t stream, bool waits) {
  const auto t = reinterpret_cast<u64>(to), f = reinterpret_cast<u64>(from);
  device_memory& memory = now().device.memory;
  if (!is_reachable(t, bytes) || !is_reachable(f, bytes)) {
    std::fprintf(
        stderr, "ptx machine: a copy of %llu bytes from %p to %p, of which some is no memory of the device\n",
        static_cast<unsigned long long>(bytes), from, to);
    return cudaErrorInvalidValue;
  }
  // Pageable memory is read or written before the call returns.
  const bool is_paged = (!memory.is_device(t) && memory.find(t) == nullptr) ||
                        (!memory.is_device(f) && memory.find(f) == nullptr);
  return submit(stream, [=, &memory] { memory.copy(t, f, bytes); }, waits || is_paged);
}
cudaError_t fill(void* to, int value, u64 bytes, cudaStream_t stream) {
  const auto t = reinterpret_cast<u64>(to);
  if (!is_reachable(t, bytes)) return cudaErrorInvalidValue;
  return submit(stream, [=] { now().device.memory.fill(t, value, bytes); });
}

}  // namespace

extern "C" {

cudaError_t cudaMalloc(void** to, size_t bytes) {
  return call(
      [&] {
        const u64 at = bytes == 0 ? 0 : now().device.memory.allocate(bytes);
        *to = reinterpret_cast<void*>(at);
        return at == 0 && bytes != 0 ? cudaErrorMemoryAllocation : cudaSuccess;
      },
      true);
}
cudaError_t cudaFree(void* bytes) {
  return call(
      [&] {
        drain_all();
        return bytes == nullptr || now().device.memory.take(reinterpret_cast<u64>(bytes))
                   ? cudaSuccess
                   : cudaErrorInvalidValue;
      },
      true);
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return call([&] { return copy(to, from, bytes, nullptr, true); }, true);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return call([&] { return copy(to, from, bytes, stream, false); });
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_stride, const void* from, size_t from_stride, size_t bytes,
                              size_t rows, cudaMemcpyKind, cudaStream_t stream) {
  return call([&] {
    cudaError_t status = cudaSuccess;
    for (size_t r = 0; r < rows && status == cudaSuccess; ++r)
      status = copy(static_cast<u8*>(to) + r * to_stride, static_cast<const u8*>(from) + r * from_stride,
                    bytes, stream, false);
    return status;
  });
}
#if CUDART_VERSION >= 13000
cudaError_t cudaMemcpyBatchAsync(void* const* to, const void* const* from, const size_t* bytes, size_t count,
                                 cudaMemcpyAttributes*, size_t*, size_t, cudaStream_t stream) {
#else
cudaError_t cudaMemcpyBatchAsync(void** to, void** from, size_t* bytes, size_t count, cudaMemcpyAttributes*,
                                 size_t*, size_t, size_t*, cudaStream_t stream) {
#endif
  return call([&] {
    cudaError_t status = cudaSuccess;
    for (size_t n = 0; n < count && status == cudaSuccess; ++n)
      status = copy(to[n], from[n], bytes[n], stream, false);
    return status;
  });
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  return call([&] { return fill(to, value, bytes, nullptr); }, true);
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return call([&] { return fill(to, value, bytes, stream); });
}
cudaError_t cudaHostRegister(void* bytes, size_t count, unsigned) {
  return call(
      [&] {
        device_memory& memory = now().device.memory;
        const auto at = reinterpret_cast<u64>(bytes);
        if (memory.find(at) != nullptr) return cudaErrorHostMemoryAlreadyRegistered;
        region made;
        made.base = at, made.size = count, made.host = static_cast<u8*>(bytes);
        memory.put(std::move(made));
        return cudaSuccess;
      },
      true);
}
cudaError_t cudaHostUnregister(void* bytes) {
  return call(
      [&] {
        drain_all();
        return now().device.memory.take(reinterpret_cast<u64>(bytes)) ? cudaSuccess
                                                                      : cudaErrorHostMemoryNotRegistered;
      },
      true);
}
cudaError_t cudaMallocHost(void** to, size_t bytes) {
  *to = std::malloc(bytes);
  return cudaHostRegister(*to, bytes, 0);
}
cudaError_t cudaFreeHost(void* bytes) {
  const cudaError_t status = cudaHostUnregister(bytes);
  if (status == cudaSuccess) std::free(bytes);
  return status;
}
cudaError_t cudaHostGetDevicePointer(void** to, void* bytes, unsigned) {
  return call([&] {
    return *to = bytes, now().device.memory.find(reinterpret_cast<u64>(bytes)) != nullptr
                            ? cudaSuccess
                            : cudaErrorInvalidValue;
  });
}
cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps*) {
  return call([&] { return made(pool, new pool_state); }, true);
}
cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) {
  return call([&] { return delete reinterpret_cast<pool_state*>(pool), cudaSuccess; }, true);
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  return call([] { return cudaSuccess; }, true);
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
  return call([&] { return *static_cast<u64*>(value) = 0, cudaSuccess; }, true);
}
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) {
  return call([] { return cudaSuccess; }, true);
}
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) {
  return call([] { return cudaSuccess; }, true);
}
cudaError_t cudaMallocFromPoolAsync(void** to, size_t bytes, cudaMemPool_t, cudaStream_t) {
  return cudaMalloc(to, bytes);
}
cudaError_t cudaMallocAsync(void** to, size_t bytes, cudaStream_t) {
  return cudaMalloc(to, bytes);
}
cudaError_t cudaFreeAsync(void* bytes, cudaStream_t stream) {
  return call([&] {
    const auto at = reinterpret_cast<u64>(bytes);
    if (now().device.memory.find(at) == nullptr) return cudaErrorInvalidValue;
    return submit(stream, [=] { now().device.memory.take(at); });
  });
}

}  // extern "C"
