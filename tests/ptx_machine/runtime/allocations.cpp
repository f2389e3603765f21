/// @file
/// Memory of the device, memory of the host that the device sees, and pools that give out memory in the order
/// of streams.
///
/// No address is given out twice. So memory that is used before the operation that allocates it, or behind
/// the one that frees it, is no memory, and the access is a fault.
#include "ptx_machine/runtime/state.hpp"

#include <algorithm>
#include <cstdlib>
#include <new>

using namespace ptx_machine;

namespace {

constexpr u64 pool_unit = u64{1} << 21;  // what a pool takes of the device at a time

/// What could be allocated now: what pools have given out counts before the device comes to it.
[[nodiscard]] u64 free_bytes() {
  u64 used = now().device.memory.used();
  for (const auto& [at, each] : now().from_pools)
    if (!each.is_there) used += each.bytes;
  return device_memory::capacity - std::min(device_memory::capacity, used);
}
[[nodiscard]] cudaError_t allocate(void** to, u64 bytes) {
  const u64 at = bytes == 0 || bytes > free_bytes() ? 0 : now().device.memory.allocate(bytes);
  *to = reinterpret_cast<void*>(at);
  return at == 0 && bytes != 0 ? cudaErrorMemoryAllocation : cudaSuccess;
}
[[nodiscard]] cudaError_t free_now(u64 at) {
  now().operations.settle_all();
  const region* const there = now().device.memory.find(at);
  if (there == nullptr || there->base != at || !there->keeps) return cudaErrorInvalidValue;
  const auto of_pool = now().from_pools.find(at);
  if (of_pool != now().from_pools.end()) {
    if (of_pool->second.is_freed) return cudaErrorInvalidValue;
    of_pool->second.pool->used -= of_pool->second.bytes;
    now().from_pools.erase(of_pool);
  }
  now().device.memory.take(at);
  return cudaSuccess;
}

void take_from(pool_state& pool, u64 bytes) {
  pool.used += bytes;
  pool.most_used = std::max(pool.most_used, pool.used);
  pool.reserved = std::max(pool.reserved, (pool.used + pool_unit - 1) / pool_unit * pool_unit);
  pool.most_reserved = std::max(pool.most_reserved, pool.reserved);
}
void trim(pool_state& pool, u64 keep) {
  const u64 least = (pool.used + pool_unit - 1) / pool_unit * pool_unit;
  pool.reserved = std::min(pool.reserved, std::max(least, keep));
}
[[nodiscard]] std::shared_ptr<pool_state> pool_of(cudaMemPool_t pool) {
  if (pool == reinterpret_cast<cudaMemPool_t>(now().default_pool.get())) return now().default_pool;
  const auto found = now().pools.find(pool);
  return found == now().pools.end() ? nullptr : found->second;
}
cudaError_t default_pool(cudaMemPool_t* pool, int device) {
  return call([&] {
    if (device != 0) return cudaErrorInvalidDevice;
    return made(pool, now().default_pool.get());
  });
}

cudaError_t allocate_in_order(void** to, u64 bytes, const std::shared_ptr<pool_state>& pool,
                              cudaStream_t stream) {
  *to = nullptr;
  stream_state* const on = stream_of(stream);
  if (on == nullptr) return cudaErrorInvalidResourceHandle;
  if (!pool) return cudaErrorInvalidValue;
  if (bytes == 0) return cudaSuccess;
  if (on->into) return not_offered("cudaMallocAsync in a capture");
  if (bytes > free_bytes()) return cudaErrorMemoryAllocation;
  const u64 at = now().device.memory.reserve(bytes, 512);
  if (at == 0) return cudaErrorMemoryAllocation;
  now().from_pools[at] = {.bytes = bytes, .pool = pool};
  take_from(*pool, bytes);
  *to = reinterpret_cast<void*>(at);
  return submit(*on, {.call = "cudaMallocAsync of " + std::to_string(bytes) + " bytes", .act = [at, bytes] {
                        now().device.memory.put(region(at, std::make_shared<backing>(bytes)));
                        now().from_pools[at].is_there = true;
                      }});
}
/// Memory of no pool goes the same way.
cudaError_t free_in_order(u64 at, cudaStream_t stream) {
  stream_state* const on = stream_of(stream);
  if (on == nullptr) return cudaErrorInvalidResourceHandle;
  if (at == 0) return cudaSuccess;
  if (on->into) return not_offered("cudaFreeAsync in a capture");
  const auto found = now().from_pools.find(at);
  const bool is_of_pool = found != now().from_pools.end();
  const region* const there = now().device.memory.find(at);
  if (!is_of_pool && (there == nullptr || there->base != at || !there->keeps)) return cudaErrorInvalidValue;
  if (is_of_pool && found->second.is_freed) return cudaErrorInvalidValue;
  const named_bytes gone{at, is_of_pool ? found->second.bytes : there->size};
  if (!nothing_uses(gone, "cudaFreeAsync in stream " + std::to_string(on->number), before_next(*on)))
    return cudaErrorIllegalAddress;
  if (is_of_pool) found->second.is_freed = true;
  return submit(*on, {.call = "cudaFreeAsync of " + hex(at), .act = [at] {
                        const auto of = now().from_pools.find(at);
                        if (of != now().from_pools.end()) {
                          of->second.pool->used -= of->second.bytes;
                          now().from_pools.erase(of);
                        }
                        if (!now().device.memory.take(at))
                          throw fault(fault_kind::bounds,
                                      "cudaFreeAsync of " + hex(at) +
                                          ", which is not allocated when the stream gets there");
                      }});
}

[[nodiscard]] cudaError_t register_pages(u64 at, u64 bytes) {
  device_memory& memory = now().device.memory;
  if (at == 0 || bytes == 0) return cudaErrorInvalidValue;
  region* const before = memory.find(at + bytes - 1);
  if (memory.find(at) != nullptr || (before != nullptr && before->base + before->size > at))
    return cudaErrorHostMemoryAlreadyRegistered;
  region made;
  made.base = at, made.size = bytes, made.host = reinterpret_cast<u8*>(at);
  memory.put(std::move(made));
  return cudaSuccess;
}
[[nodiscard]] cudaError_t unregister_pages(u64 at, const char* name) {
  const region* const of = now().device.memory.find(at);
  if (of == nullptr || of->base != at || of->keeps) return cudaErrorHostMemoryNotRegistered;
  if (!nothing_uses({at, of->size}, name, {})) return cudaErrorIllegalAddress;
  now().device.memory.take(at);
  return cudaSuccess;
}
cudaError_t allocate_host(void** to, size_t bytes) {
  return call(
      [&] {
        *to = bytes == 0 ? nullptr : std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
        if (bytes == 0) return cudaSuccess;
        if (*to == nullptr) return cudaErrorMemoryAllocation;
        now().host_memory.insert(reinterpret_cast<u64>(*to));
        return register_pages(reinterpret_cast<u64>(*to), bytes);
      },
      effect::unsafe);
}

}  // namespace

extern "C" {

// ---- of the device ----

cudaError_t cudaMalloc(void** to, size_t bytes) {
  return call([&] { return allocate(to, bytes); }, effect::unsafe);
}
/// Waits for the device, as CUDA's does.
cudaError_t cudaFree(void* bytes) {
  return call([&] { return bytes == nullptr ? cudaSuccess : free_now(reinterpret_cast<u64>(bytes)); },
              effect::unsafe);
}
cudaError_t cudaMallocManaged(void** to, size_t, unsigned) {
  *to = nullptr;
  return told(not_offered("cudaMallocManaged"));
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  return call([&] {
    *free = free_bytes(), *total = device_memory::capacity;
    return cudaSuccess;
  });
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* to, const void* bytes) {
  return call([&] {
    const auto at = reinterpret_cast<u64>(bytes);
    const bool is_device = now().device.memory.is_device(at);
    const bool is_there = now().device.memory.find(at) != nullptr;
    *to = {};
    to->type = !is_there ? cudaMemoryTypeUnregistered : is_device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    to->device = is_there ? 0 : -2;
    to->devicePointer = is_there ? const_cast<void*>(bytes) : nullptr;
    to->hostPointer = is_device ? nullptr : const_cast<void*>(bytes);
    return cudaSuccess;
  });
}

// ---- of the host ----

cudaError_t cudaHostRegister(void* bytes, size_t count, unsigned) {
  return call([&] { return register_pages(reinterpret_cast<u64>(bytes), count); }, effect::unsafe);
}
cudaError_t cudaHostUnregister(void* bytes) {
  return call([&] { return unregister_pages(reinterpret_cast<u64>(bytes), "cudaHostUnregister"); },
              effect::unsafe);
}
cudaError_t cudaMallocHost(void** to, size_t bytes) {
  return allocate_host(to, bytes);
}
cudaError_t cudaHostAlloc(void** to, size_t bytes, unsigned) {
  return allocate_host(to, bytes);
}
cudaError_t cudaFreeHost(void* bytes) {
  return call(
      [&] {
        if (bytes == nullptr) return cudaSuccess;
        const auto at = reinterpret_cast<u64>(bytes);
        if (!now().host_memory.contains(at)) return cudaErrorInvalidValue;
        const cudaError_t status = unregister_pages(at, "cudaFreeHost");
        if (status != cudaSuccess) return status;
        now().host_memory.erase(at);
        std::free(bytes);
        return cudaSuccess;
      },
      effect::unsafe);
}
cudaError_t cudaHostGetDevicePointer(void** to, void* bytes, unsigned) {
  return call([&] {
    *to = bytes;
    return now().device.memory.find(reinterpret_cast<u64>(bytes)) != nullptr ? cudaSuccess
                                                                             : cudaErrorInvalidValue;
  });
}

// ---- pools ----

cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps*) {
  return call(
      [&] {
        auto state = std::make_shared<pool_state>();
        void* const handle = state.get();
        now().pools[handle] = std::move(state);
        return *pool = static_cast<cudaMemPool_t>(handle), cudaSuccess;
      },
      effect::unsafe);
}
/// What it gave out stays good until that is freed.
cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) {
  return call([&] { return now().pools.erase(pool) == 1 ? cudaSuccess : cudaErrorInvalidValue; },
              effect::unsafe);
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr which, void* value) {
  return call(
      [&] {
        const std::shared_ptr<pool_state> of = pool_of(pool);
        if (!of) return cudaErrorInvalidValue;
        switch (which) {
          case cudaMemPoolAttrReleaseThreshold:
            of->threshold = *static_cast<u64*>(value);
            return cudaSuccess;
          case cudaMemPoolAttrUsedMemHigh:
            of->most_used = of->used;
            return cudaSuccess;
          case cudaMemPoolAttrReservedMemHigh:
            of->most_reserved = of->reserved;
            return cudaSuccess;
          case cudaMemPoolReuseFollowEventDependencies:
          case cudaMemPoolReuseAllowOpportunistic:
          case cudaMemPoolReuseAllowInternalDependencies:
            return cudaSuccess;  // nothing is given out twice
          default:
            return cudaErrorInvalidValue;
        }
      },
      effect::unsafe);
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr which, void* value) {
  return call(
      [&] {
        const std::shared_ptr<pool_state> of = pool_of(pool);
        if (!of) return cudaErrorInvalidValue;
        u64& to = *static_cast<u64*>(value);
        switch (which) {
          case cudaMemPoolAttrReleaseThreshold:
            return to = of->threshold, cudaSuccess;
          case cudaMemPoolAttrUsedMemCurrent:
            return to = of->used, cudaSuccess;
          case cudaMemPoolAttrUsedMemHigh:
            return to = of->most_used, cudaSuccess;
          case cudaMemPoolAttrReservedMemCurrent:
            return to = of->reserved, cudaSuccess;
          case cudaMemPoolAttrReservedMemHigh:
            return to = of->most_reserved, cudaSuccess;
          default:
            return not_offered("cudaMemPoolGetAttribute: attribute " + std::to_string(which));
        }
      },
      effect::unsafe);
}
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const cudaMemAccessDesc* how, size_t count) {
  return call(
      [&] {
        for (size_t n = 0; n < count; ++n)
          if (how[n].location.id != 0) return cudaErrorInvalidDevice;
        return pool_of(pool) ? cudaSuccess : cudaErrorInvalidValue;
      },
      effect::unsafe);
}
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t keep) {
  return call(
      [&] {
        const std::shared_ptr<pool_state> of = pool_of(pool);
        if (!of) return cudaErrorInvalidValue;
        return trim(*of, keep), cudaSuccess;
      },
      effect::unsafe);
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  return default_pool(pool, device);
}
cudaError_t cudaDeviceGetMemPool(cudaMemPool_t* pool, int device) {
  return default_pool(pool, device);
}
cudaError_t cudaMallocFromPoolAsync(void** to, size_t bytes, cudaMemPool_t pool, cudaStream_t stream) {
  return call([&] { return allocate_in_order(to, bytes, pool_of(pool), stream); }, effect::unsafe);
}
cudaError_t cudaMallocAsync(void** to, size_t bytes, cudaStream_t stream) {
  return call([&] { return allocate_in_order(to, bytes, now().default_pool, stream); }, effect::unsafe);
}
cudaError_t cudaFreeAsync(void* bytes, cudaStream_t stream) {
  return call([&] { return free_in_order(reinterpret_cast<u64>(bytes), stream); });
}

}  // extern "C"
