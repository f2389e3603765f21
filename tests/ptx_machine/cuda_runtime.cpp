// fakecudart.cpp: a CUDA runtime whose device is the machine of ptx_exec.hpp. It is linked in the place of
// libcudart
// (`nvcc -cudart none`), takes the PTX out of the program itself, and offers what a library of memory calls:
// memory, pools, streams, events, captures, launches, and the driver's virtual memory. Work of a stream is
// done at once or, with PTX_MACHINE_LATE=1, no sooner than somebody waits for it, so that a host that forgets
// to wait is found out.
#include "ptx_machine/bind.hpp"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <deque>
#include <functional>
#include <mutex>
#include <set>

namespace {

using namespace ptx_machine;
using work = std::function<void()>;

struct capture {
  std::vector<work> steps{};
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  bool is_valid = true;
};
struct stream_state {
  std::deque<work> waiting{};
  std::unique_ptr<capture> into{};
  bool is_blocking = false;
};
struct event_state {
  stream_state* on = nullptr;
  u64 recorded = 0, passed = 0;
  std::chrono::steady_clock::time_point at{};
  [[nodiscard]] bool is_done() const { return passed >= recorded; }
};
struct pool_state {
  std::map<u64, u64> held{};
};
struct loaded_module {
  std::unique_ptr<module> of{};
  std::vector<u64> variables{};
  std::map<std::string, code> codes{};
};
struct known_function {
  loaded_module* in = nullptr;
  std::string name{};
};

struct runtime {
  std::recursive_mutex lock{};
  machine device{};
  std::map<const void*, known_function> functions{};
  std::map<const void*, std::pair<loaded_module*, std::string>> symbols{};
  std::set<stream_state*> streams{};
  stream_state default_stream{};
  std::map<u64, std::shared_ptr<backing>> handles{};
  std::map<u64, u64> reserved{}, in_pool{};
  u64 next_handle = 1;
  cudaError_t sticky = cudaSuccess;
  std::string last_fault{};
  bool is_late = false;
  int arch = 0;
  int wanted_arch = 0;  // 0: the newest that the program has

  runtime() {
    const auto is_set = [](const char* name) {
      return std::getenv(name) != nullptr && *std::getenv(name) != '0';
    };
    device.options.checks_races = !is_set("PTX_MACHINE_NO_RACES");
    device.options.checks_uninitialised = !is_set("PTX_MACHINE_NO_UNINITIALISED");
    device.options.profiles = is_set("PTX_MACHINE_PROFILE");
    device.options.keeps_apart = is_set("PTX_MACHINE_APART");
    is_late = is_set("PTX_MACHINE_LATE");
    if (is_set("PTX_MACHINE_ARCHITECTURE")) wanted_arch = std::atoi(std::getenv("PTX_MACHINE_ARCHITECTURE"));
    streams.insert(&default_stream);
  }
};
/// Never ended: programs free memory while they end.
runtime& now() {
  static runtime* const made = new runtime;
  return *made;
}
thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

cudaError_t told(cudaError_t status) {
  if (status == cudaSuccess && now().sticky != cudaSuccess) status = now().sticky;
  if (status != cudaSuccess) last_error = status;
  return status;
}
/// What a call does, alone. One that is `unsafe` ends the captures that other threads forbid it.
template <class Act>
cudaError_t call(const Act& act, bool is_unsafe = false) {
  const std::lock_guard alone(now().lock);
  if (is_unsafe && capture_mode != cudaStreamCaptureModeRelaxed) {
    for (stream_state* each : now().streams) {
      if (!each->into || each->into->mode != cudaStreamCaptureModeGlobal) continue;
      each->into->is_valid = false;
      return told(cudaErrorStreamCaptureUnsupported);
    }
  }
  return told(act());
}

void run(const work& step) {
  if (now().sticky != cudaSuccess) return;
  try {
    step();
  } catch (const fault& wrong) {
    constexpr cudaError_t codes[] = {cudaErrorIllegalInstruction, cudaErrorIllegalAddress,
                                     cudaErrorMisalignedAddress,  cudaErrorLaunchFailure,
                                     cudaErrorLaunchFailure,      cudaErrorLaunchFailure,
                                     cudaErrorLaunchFailure};
    now().sticky = codes[static_cast<int>(wrong.kind)];
    now().last_fault = wrong.what();
    std::fprintf(stderr, "ptx machine: %s\n", wrong.what());
  }
}
stream_state& state_of(cudaStream_t stream) {
  const auto at = reinterpret_cast<u64>(stream);
  return at <= 2 ? now().default_stream : *reinterpret_cast<stream_state*>(stream);
}
bool step_of(stream_state& of) {
  if (of.waiting.empty()) return false;
  const work next = std::move(of.waiting.front());
  of.waiting.pop_front();
  run(next);
  return true;
}
void drain(stream_state& of) {
  while (step_of(of)) {
  }
}
void drain_all() {
  for (stream_state* each : now().streams)
    drain(*each);
}
cudaError_t submit(cudaStream_t stream, work step, bool at_once = false) {
  stream_state& of = state_of(stream);
  if (of.into) return of.into->steps.push_back(std::move(step)), cudaSuccess;
  if (&of == &now().default_stream || of.is_blocking) {
    for (stream_state* each : now().streams)
      if (each->is_blocking || each == &now().default_stream) drain(*each);
  }
  of.waiting.push_back(std::move(step));
  if (!now().is_late || at_once || &of == &now().default_stream) drain(of);
  return cudaSuccess;
}
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

code* code_of(const void* function) {
  const auto found = now().functions.find(function);
  if (found == now().functions.end()) return nullptr;
  loaded_module& in = *found->second.in;
  const auto known = in.codes.find(found->second.name);
  if (known != in.codes.end()) return &known->second;
  kernel* const of = in.of->find(found->second.name);
  return of == nullptr ? nullptr : &(in.codes[found->second.name] = binder(*of, in.variables).take());
}
cudaError_t launch(const void* function, dim3 grid, dim3 block, void** arguments, u64 shared,
                   cudaStream_t stream) {
  code* of = nullptr;
  run([&] { of = code_of(function); });
  if (of == nullptr) return cudaErrorInvalidDeviceFunction;
  const triple g{grid.x, grid.y, grid.z}, b{block.x, block.y, block.z};
  if (b.count() == 0 || b.count() > of->of->most_threads || b.z > 64) return cudaErrorInvalidConfiguration;
  if (g.count() == 0 || g.x > 0x7FFF'FFFF || g.y > 65535 || g.z > 65535) return cudaErrorInvalidConfiguration;
  std::vector<u8> params(of->of->param_bytes);
  for (std::size_t n = 0; n < of->of->params.size(); ++n)
    std::memcpy(params.data() + of->of->params[n].offset, arguments[n], of->of->params[n].size);
  return submit(stream, [=, params = std::move(params)] { now().device.run(*of, g, b, shared, params); });
}

void report() {
  const machine& of = now().device;
  if (std::getenv("PTX_MACHINE_STATISTICS") != nullptr && of.launches != 0)
    std::fprintf(stderr,
                 "ptx machine: %llu launches, %llu instructions of lanes (%llu of warps), %.2f s, %.0f "
                 "million a second\n",
                 static_cast<unsigned long long>(of.launches),
                 static_cast<unsigned long long>(of.lane_instructions),
                 static_cast<unsigned long long>(of.warp_instructions), of.seconds,
                 static_cast<double>(of.lane_instructions) / of.seconds / 1e6);
  if (!of.options.profiles) return;
  // What each access moves: sectors of 32 bytes beside the bytes that were asked for.
  std::set<const loaded_module*> seen;
  for (const auto& [function, known] : now().functions) {
    if (!seen.insert(known.in).second) continue;
    for (const auto& [name, each] : known.in->codes) {
      for (const inst& i : each.insts) {
        if (i.runs == 0) continue;
        std::fprintf(stderr, "profile\t%s\t%d\t%s\t%llu\t%.1f\t%llu\t%.2f\n", name.c_str(), i.from->line,
                     std::string(i.from->opcode).c_str(), static_cast<unsigned long long>(i.runs),
                     static_cast<double>(i.lanes) / static_cast<double>(i.runs),
                     static_cast<unsigned long long>(i.bytes),
                     static_cast<double>(i.bytes) / (32.0 * static_cast<double>(i.sectors)));
      }
    }
  }
}

CUresult driver(bool is_well) {
  return is_well ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult granularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = size_t{1} << 21;
  return CUDA_SUCCESS;
}
CUresult reserve(CUdeviceptr* at, size_t bytes, size_t align, CUdeviceptr, unsigned long long) {
  const std::lock_guard alone(now().lock);
  *at = now().device.memory.reserve(bytes, std::max<u64>(align, 1 << 21));
  if (*at != 0) now().reserved[*at] = bytes;
  return *at != 0 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult unreserve(CUdeviceptr at, size_t bytes) {
  const std::lock_guard alone(now().lock);
  const auto found = now().reserved.find(at);
  if (found == now().reserved.end() || found->second != bytes) return CUDA_ERROR_INVALID_VALUE;
  now().reserved.erase(found);
  return CUDA_SUCCESS;
}
CUresult create(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp*,
                unsigned long long) {
  const std::lock_guard alone(now().lock);
  if (bytes == 0 || bytes % (1 << 21) != 0) return CUDA_ERROR_INVALID_VALUE;
  if (bytes > device_memory::capacity - now().device.memory.used()) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = now().next_handle++;
  now().handles[*handle] = std::make_shared<backing>(bytes);
  return CUDA_SUCCESS;
}
CUresult release(CUmemGenericAllocationHandle handle) {
  const std::lock_guard alone(now().lock);
  return driver(now().handles.erase(handle) == 1);
}
CUresult map(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
             unsigned long long) {
  const std::lock_guard alone(now().lock);
  const auto found = now().handles.find(handle);
  auto range = now().reserved.upper_bound(at);
  if (found == now().handles.end() || offset != 0 || found->second->size != bytes ||
      range == now().reserved.begin())
    return CUDA_ERROR_INVALID_VALUE;
  --range;
  if (at - range->first > range->second || bytes > range->second - (at - range->first))
    return CUDA_ERROR_INVALID_VALUE;
  for (u64 b = 0; b < bytes; b += 1 << 21)
    if (now().device.memory.find(at + b) != nullptr) return CUDA_ERROR_ALREADY_MAPPED;
  region made(at, found->second);
  made.is_allowed = false;
  now().device.memory.put(std::move(made));
  return CUDA_SUCCESS;
}
/// Calls `act` for each mapping of a range, which must have nothing else.
template <class Act>
CUresult each_mapping(u64 at, u64 bytes, const Act& act) {
  const std::lock_guard alone(now().lock);
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
  return each_mapping(
      at, bytes, [&](region& each) { each.is_allowed = how->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE; });
}
CUresult unmap(CUdeviceptr at, size_t bytes) {
  drain_all();
  return each_mapping(at, bytes, [](region& each) { now().device.memory.take(each.base); });
}
CUresult driver_text(CUresult, const char** text) {
  return *text = "refused by the machine", CUDA_SUCCESS;
}

template <class Handle, class State>
cudaError_t made(Handle* handle, State* state) {
  *handle = reinterpret_cast<Handle>(state);
  return cudaSuccess;
}
cudaError_t make_stream(cudaStream_t* stream, unsigned flags) {
  auto* const state = new stream_state;
  state->is_blocking = (flags & cudaStreamNonBlocking) == 0;
  now().streams.insert(state);
  return made(stream, state);
}

}  // namespace

extern "C" {

// ---- of this machine alone: for tests of it ----

const char* ptx_machine_last_fault() {
  return now().last_fault.c_str();
}
void ptx_machine_forget_fault() {
  now().sticky = last_error = cudaSuccess;
  now().last_fault.clear();
}
/// How many lanes executed instructions that have no exact bits.
unsigned long long ptx_machine_approximate() {
  return now().device.approximate;
}
void ptx_machine_be_late(int is_late) {
  now().is_late = is_late != 0;
}
void ptx_machine_keep_apart(int is_apart) {
  now().device.options.keeps_apart = is_apart != 0;
}

// ---- what nvcc's code calls ----

void** __cudaRegisterFatBinary(void* wrapper) {
  struct wrapped {
    u32 magic, version;
    const u8* data;
    void* name;
  };
  const u8* const data = static_cast<const wrapped*>(wrapper)->data;
  u64 size = 0;
  u16 header = 0;
  std::memcpy(&header, data + 6, 2);
  std::memcpy(&size, data + 8, 8);
  auto* const in = new loaded_module;
  for (const u8* at = data + header; at < data + header + size;) {
    u16 kind = 0;
    u32 head = 0, packed = 0, arch = 0;
    u64 bytes = 0;
    std::memcpy(&kind, at, 2);
    std::memcpy(&head, at + 4, 4);
    std::memcpy(&bytes, at + 8, 8);
    std::memcpy(&packed, at + 16, 4);
    std::memcpy(&arch, at + 28, 4);
    const std::string_view text(reinterpret_cast<const char*>(at + head), bytes);
    if (kind == 1 && (packed != 0 || text.find(".version") == std::string_view::npos)) {
      std::fprintf(stderr, "ptx machine: the PTX is compressed; compile with nvcc --no-compress\n");
    } else if (kind == 1 && (!in->of || in->of->arch() < static_cast<int>(arch)) &&
               (now().wanted_arch == 0 || static_cast<int>(arch) <= now().wanted_arch)) {
      run([&] { in->of = std::make_unique<module>(std::string(text.substr(0, text.find('\0')))); });
    }
    at += head + bytes;
  }
  if (!in->of)
    std::fprintf(
        stderr,
        "ptx machine: no PTX in this program; compile with -gencode arch=compute_80,code=compute_80\n");
  if (!in->of) in->of = std::make_unique<module>("");
  if (const char* const file = std::getenv("PTX_MACHINE_DUMP"); file != nullptr) {
    if (std::FILE* const to = std::fopen(file, "a"); to != nullptr) {
      std::fwrite(in->of->text().data(), 1, in->of->text().size(), to);
      std::fclose(to);
    }
  }
  now().arch = std::max(now().arch, in->of->arch());
  for (const module_variable& each : in->of->variables()) {
    device_memory& memory = now().device.memory;
    in->variables.push_back(memory.allocate(each.bytes.size()));
    memory.copy(in->variables.back(), reinterpret_cast<u64>(each.bytes.data()), each.bytes.size());
  }
  static const int at_end = std::atexit(report);
  static_cast<void>(at_end);
  return reinterpret_cast<void**>(in);
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void** in, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*,
                            dim3*, int*) {
  now().functions[host] = {reinterpret_cast<loaded_module*>(in), name};
}
void __cudaRegisterVar(void** in, char* host, char*, const char* name, int, size_t, int, int) {
  now().symbols[host] = {reinterpret_cast<loaded_module*>(in), name};
}
thread_local struct {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
} configured;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st* stream) {
  configured = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = configured.grid, *block = configured.block, *shared = configured.shared;
  *static_cast<cudaStream_t*>(stream) = configured.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                               cudaStream_t stream) {
  return call([&] { return launch(kernel, grid, block, arguments, shared, stream); });
}
cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t shared,
                             cudaStream_t stream) {
  return call([&] { return launch(function, grid, block, arguments, shared, stream); });
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* how, const void* function, void** arguments) {
  if (how->numAttrs != 0) return told(cudaErrorNotSupported);
  return call([&] {
    return launch(function, how->gridDim, how->blockDim, arguments, how->dynamicSmemBytes, how->stream);
  });
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* to, const void* function) {
  return call([&] {
    code* of = nullptr;
    run([&] { of = code_of(function); });
    if (of == nullptr) return cudaErrorInvalidDeviceFunction;
    *to = {};
    to->ptxVersion = to->binaryVersion = now().arch;
    to->maxThreadsPerBlock = static_cast<int>(of->of->most_threads);
    to->sharedSizeBytes = of->of->shared_bytes;
    to->localSizeBytes = of->of->local_bytes;
    return cudaSuccess;
  });
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  return told(cudaSuccess);
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int threads,
                                                                   size_t, unsigned) {
  *blocks = 2048 / std::max(threads, 1);
  return told(cudaSuccess);
}

// ---- devices and errors ----

cudaError_t cudaDriverGetVersion(int* version) {
  return *version = CUDART_VERSION, cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  return *version = CUDART_VERSION, cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  return *count = 1, told(cudaSuccess);
}
cudaError_t cudaGetDevice(int* device) {
  return *device = 0, told(cudaSuccess);
}
cudaError_t cudaSetDevice(int device) {
  return told(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}
cudaError_t cudaInitDevice(int device, unsigned, unsigned) {
  return cudaSetDevice(device);
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  static const std::map<int, int> values{{cudaDevAttrMaxThreadsPerBlock, 1024},
                                         {cudaDevAttrWarpSize, 32},
                                         {cudaDevAttrMultiProcessorCount, 8},
                                         {cudaDevAttrUnifiedAddressing, 1},
                                         {cudaDevAttrCanUseHostPointerForRegisteredMem, 1},
                                         {cudaDevAttrMemoryPoolsSupported, 1},
                                         {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
                                         {cudaDevAttrMaxSharedMemoryPerBlockOptin, 166912}};
  const auto found = values.find(which);
  *value = which == cudaDevAttrComputeCapabilityMajor   ? now().arch / 10
           : which == cudaDevAttrComputeCapabilityMinor ? now().arch % 10
           : found == values.end()                      ? 0
                                                        : found->second;
  return told(cudaSuccess);
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* to, int device) {
  *to = {};
  std::strcpy(to->name, "PTX machine (no GPU)");
  to->major = now().arch / 10, to->minor = now().arch % 10;
  to->multiProcessorCount = 8, to->warpSize = 32, to->maxThreadsPerBlock = 1024;
  to->totalGlobalMem = device_memory::capacity;
  to->sharedMemPerBlock = 49152;
  to->unifiedAddressing = 1;
  return cudaSetDevice(device);
}
cudaError_t cudaGetLastError() {
  return now().sticky != cudaSuccess ? now().sticky : std::exchange(last_error, cudaSuccess);
}
cudaError_t cudaPeekAtLastError() {
  return now().sticky != cudaSuccess ? now().sticky : last_error;
}
const char* cudaGetErrorName(cudaError_t status) {
  switch (status) {
#define NAMED(name) \
  case name:        \
    return #name
    NAMED(cudaSuccess);
    NAMED(cudaErrorInvalidValue);
    NAMED(cudaErrorMemoryAllocation);
    NAMED(cudaErrorInvalidConfiguration);
    NAMED(cudaErrorInvalidDevice);
    NAMED(cudaErrorInvalidDeviceFunction);
    NAMED(cudaErrorNotReady);
    NAMED(cudaErrorIllegalAddress);
    NAMED(cudaErrorMisalignedAddress);
    NAMED(cudaErrorIllegalInstruction);
    NAMED(cudaErrorLaunchFailure);
    NAMED(cudaErrorNotSupported);
    NAMED(cudaErrorStreamCaptureUnsupported);
    NAMED(cudaErrorStreamCaptureInvalidated);
    NAMED(cudaErrorStreamCaptureImplicit);
    NAMED(cudaErrorHostMemoryAlreadyRegistered);
    NAMED(cudaErrorHostMemoryNotRegistered);
#undef NAMED
    default:
      return "an error that the machine has no name for";
  }
}
const char* cudaGetErrorString(cudaError_t status) {
  return cudaGetErrorName(status);
}

// ---- memory ----

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
cudaError_t cudaGetSymbolAddress(void** to, const void* symbol) {
  return call([&] {
    const auto found = now().symbols.find(symbol);
    if (found == now().symbols.end()) return cudaErrorInvalidSymbol;
    loaded_module& in = *found->second.first;
    for (std::size_t n = 0; n < in.variables.size(); ++n)
      if (in.of->variables()[n].name == found->second.second)
        return *to = reinterpret_cast<void*>(in.variables[n]), cudaSuccess;
    return cudaErrorInvalidSymbol;
  });
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

// ---- streams, events, captures ----

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return call([&] { return make_stream(stream, flags); }, true);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return call(
      [&] {
        stream_state* const of = &state_of(stream);
        drain(*of);
        now().streams.erase(of);
        return delete of, cudaSuccess;
      },
      true);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return call([&] { return drain(state_of(stream)), cudaSuccess; }, true);
}
cudaError_t cudaDeviceSynchronize() {
  return call([] { return drain_all(), cudaSuccess; }, true);
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return call([&] { return made(event, new event_state); }, true);
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, 0);
}
/// Its state stays: what waits for it may still look.
cudaError_t cudaEventDestroy(cudaEvent_t) {
  return call([] { return cudaSuccess; }, true);
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return call([&] {
    auto* const of = reinterpret_cast<event_state*>(event);
    of->on = &state_of(stream);
    const u64 which = ++of->recorded;
    return submit(stream, [=] { of->passed = which, of->at = std::chrono::steady_clock::now(); });
  });
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return call(
      [&] {
        auto* const of = reinterpret_cast<event_state*>(event);
        if (of->is_done()) return cudaSuccess;
        step_of(*of->on);  // who asks again and again gets on
        return of->is_done() ? cudaSuccess : cudaErrorNotReady;
      },
      true);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return call(
      [&] {
        auto* const of = reinterpret_cast<event_state*>(event);
        while (!of->is_done() && step_of(*of->on)) {
        }
        return cudaSuccess;
      },
      true);
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t first, cudaEvent_t last) {
  *ms = std::chrono::duration<float, std::milli>(reinterpret_cast<event_state*>(last)->at -
                                                 reinterpret_cast<event_state*>(first)->at)
            .count();
  return told(cudaSuccess);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  return call([&] {
    auto* const of = reinterpret_cast<event_state*>(event);
    if (of->is_done()) return cudaSuccess;
    return submit(stream, [=, which = of->recorded, on = of->on] {
      while (of->passed < which && step_of(*on)) {
      }
    });
  });
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return std::swap(*mode, capture_mode), cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  return call([&] {
    if (state_of(stream).into || reinterpret_cast<u64>(stream) <= 2) return cudaErrorStreamCaptureUnsupported;
    state_of(stream).into = std::make_unique<capture>();
    state_of(stream).into->mode = mode;
    return cudaSuccess;
  });
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  return call([&] {
    std::unique_ptr<capture> of = std::move(state_of(stream).into);
    if (!of) return cudaErrorInvalidValue;
    if (!of->is_valid) return *graph = nullptr, cudaErrorStreamCaptureInvalidated;
    return made(graph, of.release());
  });
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return call([&] {
    return *status = state_of(stream).into ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone,
           cudaSuccess;
  });
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* to, cudaGraph_t graph, unsigned long long) {
  return call([&] {
    auto* const copy = new capture;
    copy->steps = reinterpret_cast<capture*>(graph)->steps;
    return made(to, copy);
  });
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  return call([&] {
    for (const work& each : reinterpret_cast<capture*>(graph)->steps)
      submit(stream, each);
    return cudaSuccess;
  });
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  return call([&] { return delete reinterpret_cast<capture*>(graph), cudaSuccess; });
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return call([&] { return delete reinterpret_cast<capture*>(graph), cudaSuccess; });
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** to, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* how) {
  static const std::map<std::string, void*> known{
      {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(granularity)},
      {"cuMemAddressReserve", reinterpret_cast<void*>(reserve)},
      {"cuMemAddressFree", reinterpret_cast<void*>(unreserve)},
      {"cuMemCreate", reinterpret_cast<void*>(create)},
      {"cuMemRelease", reinterpret_cast<void*>(release)},
      {"cuMemMap", reinterpret_cast<void*>(map)},
      {"cuMemSetAccess", reinterpret_cast<void*>(allow)},
      {"cuMemUnmap", reinterpret_cast<void*>(unmap)},
      {"cuGetErrorString", reinterpret_cast<void*>(driver_text)}};
  const auto found = known.find(name);
  *to = found == known.end() ? nullptr : found->second;
  if (how != nullptr)
    *how = found == known.end() ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  return told(cudaSuccess);
}

}  // extern "C"
