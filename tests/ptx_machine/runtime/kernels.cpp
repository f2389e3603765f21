/// @file
/// The program's PTX, its kernels and variables, and their launches.
#include "ptx_machine/bind.hpp"
#include "ptx_machine/profile.hpp"
#include "ptx_machine/runtime/state.hpp"

struct ptx_machine::loaded_module {
  std::unique_ptr<module> of{};
  std::vector<u64> variables{};
  std::map<std::string, code> codes{};
};

using namespace ptx_machine;

namespace {

code* code_of(const void* function) {
  const auto found = now().functions.find(function);
  if (found == now().functions.end()) return nullptr;
  loaded_module& in = *found->second.in;
  const auto known = in.codes.find(found->second.name);
  if (known != in.codes.end()) return &known->second;
  kernel* const of = in.of->find(found->second.name);
  return of == nullptr ? nullptr : &(in.codes[found->second.name] = binder(*of, in.variables).take());
}
/// The memory that a kernel's parameters point into. It may use more, by pointers that lie there.
std::vector<named_bytes> memory_of(const std::vector<u8>& params) {
  std::vector<named_bytes> all;
  for (std::size_t at = 0; at + sizeof(u64) <= params.size(); at += sizeof(u64)) {
    u64 value = 0;
    std::memcpy(&value, params.data() + at, sizeof value);
    if (const auto found = memory_at(value); found) all.push_back(*found);
  }
  return all;
}
cudaError_t launch(const void* function, dim3 grid, dim3 block, void** arguments, u64 shared,
                   cudaStream_t stream) {
  stream_state* const on = stream_of(stream);
  if (on == nullptr) return cudaErrorInvalidResourceHandle;
  code* of = nullptr;
  attempt([&] { of = code_of(function); });
  if (of == nullptr) return cudaErrorInvalidDeviceFunction;
  const triple g{grid.x, grid.y, grid.z}, b{block.x, block.y, block.z};
  if (b.count() == 0 || b.count() > of->of->most_threads || b.z > 64) return cudaErrorInvalidConfiguration;
  if (g.count() == 0 || g.x > 0x7FFF'FFFF || g.y > 65535 || g.z > 65535) return cudaErrorInvalidConfiguration;
  std::vector<u8> params(of->of->param_bytes);
  for (std::size_t n = 0; n < of->of->params.size(); ++n)
    std::memcpy(params.data() + of->of->params[n].offset, arguments[n], of->of->params[n].size);
  task what{.call = "kernel " + now().functions.at(function).name, .names = memory_of(params)};
  what.act = [=, params = std::move(params)] { now().device.run(*of, g, b, shared, params); };
  return submit(*on, std::move(what));
}

void report_numbers() {
  const machine& of = now().device;
  if (std::getenv("PTX_MACHINE_STATISTICS") != nullptr && of.launches != 0)
    std::fprintf(stderr,
                 "ptx machine: %llu launches, %llu instructions of lanes (%llu of warps), %.2f s, %.0f "
                 "million a second\n",
                 static_cast<unsigned long long>(of.launches),
                 static_cast<unsigned long long>(of.lane_instructions),
                 static_cast<unsigned long long>(of.warp_instructions), of.seconds,
                 static_cast<double>(of.lane_instructions) / of.seconds / 1e6);
  const char* const path = std::getenv("PTX_MACHINE_PROFILE_FILE");
  std::FILE* const to = path == nullptr ? nullptr : std::fopen(path, "a");
  if (to == nullptr) return;
  std::set<const loaded_module*> seen;
  for (const auto& [function, known] : now().functions) {
    if (!seen.insert(known.in).second) continue;
    for (const auto& [name, each] : known.in->codes)
      write_profile(to, each);
  }
  std::fclose(to);
}

/// At the end of the program. One that leaves a fault behind has failed, whatever it returned.
void report() {
  report_numbers();
  if (now().sticky == cudaSuccess) return;
  std::fflush(nullptr);
  say("the program ends with the device lost");
  std::_Exit(1);
}

}  // namespace

extern "C" {

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
  int newest = 0;
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
    } else if (kind == 1 && newest < static_cast<int>(arch) &&
               (now().wanted_arch == 0 || static_cast<int>(arch) <= now().wanted_arch)) {
      newest = static_cast<int>(arch);
      attempt([&] {
        in->of = std::make_unique<module>(std::string(text.substr(0, text.find('\0'))), now().wanted_arch);
      });
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
/// Of managed variables: programs that are not optimised name it.
char __cudaInitModule(void**) {
  static_cast<void>(not_offered("managed variables"));
  return 0;
}
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
  // A kernel that may begin before the one ahead of it has ended may also begin behind it.
  for (unsigned i = 0; i < how->numAttrs; ++i) {
    const auto which = how->attrs[i].id;
    if (which != cudaLaunchAttributeIgnore && which != cudaLaunchAttributeProgrammaticStreamSerialization)
      return told(not_offered("cudaLaunchKernelExC: attribute " + std::to_string(which)));
  }
  return call([&] {
    return launch(function, how->gridDim, how->blockDim, arguments, how->dynamicSmemBytes, how->stream);
  });
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* to, const void* function) {
  return call([&] {
    code* of = nullptr;
    attempt([&] { of = code_of(function); });
    if (of == nullptr) return cudaErrorInvalidDeviceFunction;
    *to = {};
    to->ptxVersion = to->binaryVersion = now().arch;
    to->maxThreadsPerBlock = static_cast<int>(of->of->most_threads);
    to->sharedSizeBytes = of->of->shared_bytes;
    to->localSizeBytes = of->of->local_bytes;
    return cudaSuccess;
  });
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute which, int) {
  const bool is_known = which == cudaFuncAttributeMaxDynamicSharedMemorySize ||
                        which == cudaFuncAttributePreferredSharedMemoryCarveout;
  return told(is_known ? cudaSuccess
                       : not_offered("cudaFuncSetAttribute: attribute " + std::to_string(which)));
}
/// As many as the threads of a multiprocessor allow; registers and shared memory are not counted.
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int threads, size_t) {
  *blocks = 2048 / std::max(threads, 1);
  return told(cudaSuccess);
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* function,
                                                                   int threads, size_t shared, unsigned) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
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

}  // extern "C"
