/// @file
/// The driver's virtual memory: addresses, memory, and the one put behind the other. What is mapped is there,
/// and what is unmapped is gone, when the call returns: it does not wait for streams.
#include "ptx_machine/runtime/state.hpp"

using namespace ptx_machine;

namespace {

constexpr u64 unit = u64{1} << 21;

/// Makes a call, alone. The device may get on before.
template <class Act>
CUresult alone(const Act& act) {
  const std::lock_guard held(now().operations.lock);
  now().operations.proceed();
  return act();
}
CUresult driver(bool is_well) {
  return is_well ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult granularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = unit;
  return CUDA_SUCCESS;
}
CUresult reserve(CUdeviceptr* at, size_t bytes, size_t align, CUdeviceptr, unsigned long long) {
  return alone([&] {
    *at = now().device.memory.reserve(bytes, std::max<u64>(align, unit));
    if (*at != 0) now().reserved[*at] = bytes;
    return *at != 0 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
  });
}
/// Nothing may be mapped there.
CUresult unreserve(CUdeviceptr at, size_t bytes) {
  return alone([&] {
    const auto found = now().reserved.find(at);
    if (found == now().reserved.end() || found->second != bytes) return CUDA_ERROR_INVALID_VALUE;
    for (u64 b = 0; b < bytes; b += unit)
      if (now().device.memory.find(at + b) != nullptr) return CUDA_ERROR_INVALID_VALUE;
    now().reserved.erase(found);
    return CUDA_SUCCESS;
  });
}
CUresult create(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp*,
                unsigned long long) {
  return alone([&] {
    if (bytes == 0 || bytes % unit != 0) return CUDA_ERROR_INVALID_VALUE;
    if (bytes > device_memory::capacity - now().device.memory.used()) return CUDA_ERROR_OUT_OF_MEMORY;
    *handle = now().next_handle++;
    now().handles[*handle] = std::make_shared<backing>(bytes);
    return CUDA_SUCCESS;
  });
}
/// Memory that is mapped stays until it is unmapped, as CUDA has it.
CUresult release(CUmemGenericAllocationHandle handle) {
  return alone([&] { return driver(now().handles.erase(handle) == 1); });
}
CUresult map(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
             unsigned long long) {
  return alone([&] {
    const auto found = now().handles.find(handle);
    auto range = now().reserved.upper_bound(at);
    if (found == now().handles.end() || offset != 0 || found->second->size != bytes ||
        range == now().reserved.begin())
      return CUDA_ERROR_INVALID_VALUE;
    --range;
    if (at - range->first > range->second || bytes > range->second - (at - range->first))
      return CUDA_ERROR_INVALID_VALUE;
    for (u64 b = 0; b < bytes; b += unit)
      if (now().device.memory.find(at + b) != nullptr) return CUDA_ERROR_ALREADY_MAPPED;
    region made(at, found->second);
    made.is_allowed = false;
    now().device.memory.put(std::move(made));
    return CUDA_SUCCESS;
  });
}
/// Calls `act` for each mapping of a range, which must have nothing else.
template <class Act>
CUresult each_mapping(u64 at, u64 bytes, const Act& act) {
  std::vector<region*> all;
  for (const u64 end = at + bytes; at < end;) {
    region* const found = now().device.memory.find(at);
    if (found == nullptr || found->base != at || found->size > end - at) return CUDA_ERROR_INVALID_VALUE;
    all.push_back(found);
    at += found->size;
  }
  for (region* each : all)
    act(*each);
  return CUDA_SUCCESS;
}
CUresult allow(CUdeviceptr at, size_t bytes, const CUmemAccessDesc* how, size_t) {
  return alone([&] {
    return each_mapping(
        at, bytes, [&](region& each) { each.is_allowed = how->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE; });
  });
}
CUresult unmap(CUdeviceptr at, size_t bytes) {
  return alone([&] {
    if (!nothing_uses({at, bytes}, "cuMemUnmap", {})) return CUDA_ERROR_ILLEGAL_ADDRESS;
    return each_mapping(at, bytes, [](region& each) { now().device.memory.take(each.base); });
  });
}
CUresult export_handle(void*, CUmemGenericAllocationHandle, CUmemAllocationHandleType, unsigned long long) {
  static_cast<void>(not_offered("cuMemExportToShareableHandle"));
  return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult import_handle(CUmemGenericAllocationHandle*, void*, CUmemAllocationHandleType) {
  static_cast<void>(not_offered("cuMemImportFromShareableHandle"));
  return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult driver_text(CUresult, const char** text) {
  return *text = "refused by the machine", CUDA_SUCCESS;
}

}  // namespace

void* ptx_machine::driver_call(const std::string& name) {
  static const std::map<std::string, void*> known{
      {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(granularity)},
      {"cuMemAddressReserve", reinterpret_cast<void*>(reserve)},
      {"cuMemAddressFree", reinterpret_cast<void*>(unreserve)},
      {"cuMemCreate", reinterpret_cast<void*>(create)},
      {"cuMemRelease", reinterpret_cast<void*>(release)},
      {"cuMemMap", reinterpret_cast<void*>(map)},
      {"cuMemSetAccess", reinterpret_cast<void*>(allow)},
      {"cuMemUnmap", reinterpret_cast<void*>(unmap)},
      {"cuMemExportToShareableHandle", reinterpret_cast<void*>(export_handle)},
      {"cuMemImportFromShareableHandle", reinterpret_cast<void*>(import_handle)},
      {"cuGetErrorString", reinterpret_cast<void*>(driver_text)}};
  const auto found = known.find(name);
  return found == known.end() ? nullptr : found->second;
}
