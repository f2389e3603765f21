// What `cuda_runtime` keeps to around each call of CUDA, over a double of CUDA: needs no device. A call that
// CUDA forbids while another thread captures ends that thread's capture; an error stays for whoever asks for
// the last one next; a device that was made current stays so.
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "support/device.cuh"

namespace cuda_double {

/// Of one thread, beside one that has begun a capture in the global mode.
struct state {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  bool others_capture = true;
  int current = 0;
  std::set<int> contexts{};
  cudaError_t last = cudaSuccess;
  std::string refuses{};             // the call that fails
  int refuses_device = -1;           // to be made current
  std::vector<std::string> ended{};  // calls that ended the capture
  int registered_on = -1;
  std::size_t kept = 0;
};
state now;

cudaError_t told(cudaError_t status) {
  if (status != cudaSuccess) now.last = status;
  return status;
}
cudaError_t call(const char* name) {
  return told(now.refuses == name ? cudaErrorUnknown : cudaSuccess);
}
/// One that is forbidden while others capture.
cudaError_t unsafe(const char* name) {
  if (now.others_capture && now.mode != cudaStreamCaptureModeRelaxed) {
    now.ended.emplace_back(name);
    return told(cudaErrorStreamCaptureUnsupported);
  }
  return call(name);
}

cudaError_t exchange_mode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, now.mode);
  return cudaSuccess;
}
cudaError_t last_error() {
  const cudaError_t status = now.last;
  now.last = cudaSuccess;
  return status;
}
cudaError_t get_device(int* device) {
  *device = now.current;
  return call("get_device");
}
cudaError_t set_device(int device) {
  if (device == now.refuses_device) return told(cudaErrorDevicesUnavailable);
  now.current = device;
  now.contexts.insert(device);
  return cudaSuccess;
}
cudaError_t pool_create(cudaMemPool_t*, const cudaMemPoolProps*) {
  return unsafe("pool_create");
}
cudaError_t pool_set(cudaMemPool_t, cudaMemPoolAttr, void*) {
  return unsafe("pool_set");
}
cudaError_t pool_get(cudaMemPool_t, cudaMemPoolAttr, void* value) {
  *static_cast<std::uint64_t*>(value) = 1000;
  return unsafe("pool_get");
}
cudaError_t pool_share(cudaMemPool_t, const cudaMemAccessDesc*, std::size_t) {
  return unsafe("pool_share");
}
cudaError_t pool_trim(cudaMemPool_t, std::size_t keep) {
  now.kept = keep;
  return unsafe("pool_trim");
}
cudaError_t pool_destroy(cudaMemPool_t) {
  return unsafe("pool_destroy");
}
cudaError_t allocate(void**, std::size_t, cudaMemPool_t, cudaStream_t) {
  return unsafe("allocate");
}
cudaError_t release(void*, cudaStream_t) {
  return unsafe("release");
}
cudaError_t stream_create(cudaStream_t*, unsigned) {
  return unsafe("stream_create");
}
cudaError_t stream_destroy(cudaStream_t) {
  return unsafe("stream_destroy");
}
cudaError_t stream_wait(cudaStream_t) {
  return unsafe("stream_wait");
}
cudaError_t event_create(cudaEvent_t*, unsigned) {
  return unsafe("event_create");
}
cudaError_t event_destroy(cudaEvent_t) {
  return unsafe("event_destroy");
}
cudaError_t event_query(cudaEvent_t) {
  return unsafe("event_query");
}
cudaError_t event_wait(cudaEvent_t) {
  return unsafe("event_wait");
}
cudaError_t host_register(void*, std::size_t, unsigned) {
  now.registered_on = now.current;
  return unsafe("host_register");
}
cudaError_t host_unregister(void*) {
  return unsafe("host_unregister");
}
cudaError_t is_capturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  // Asked of the legacy stream, while others capture, it answers with an error and ends nothing.
  if (stream == cudaStreamLegacy && now.others_capture) return told(cudaErrorStreamCaptureImplicit);
  *status = cudaStreamCaptureStatusNone;
  return call("is_capturing");
}

}  // namespace cuda_double

#define cudaThreadExchangeStreamCaptureMode ::cuda_double::exchange_mode
#define cudaGetLastError ::cuda_double::last_error
#define cudaGetDevice ::cuda_double::get_device
#define cudaSetDevice ::cuda_double::set_device
#define cudaMemPoolCreate ::cuda_double::pool_create
#define cudaMemPoolSetAttribute ::cuda_double::pool_set
#define cudaMemPoolGetAttribute ::cuda_double::pool_get
#define cudaMemPoolSetAccess ::cuda_double::pool_share
#define cudaMemPoolTrimTo ::cuda_double::pool_trim
#define cudaMemPoolDestroy ::cuda_double::pool_destroy
#define cudaMallocFromPoolAsync ::cuda_double::allocate
#define cudaFreeAsync ::cuda_double::release
#define cudaStreamCreateWithFlags ::cuda_double::stream_create
#define cudaStreamDestroy ::cuda_double::stream_destroy
#define cudaStreamSynchronize ::cuda_double::stream_wait
#define cudaEventCreateWithFlags ::cuda_double::event_create
#define cudaEventDestroy ::cuda_double::event_destroy
#define cudaEventQuery ::cuda_double::event_query
#define cudaEventSynchronize ::cuda_double::event_wait
#define cudaHostRegister ::cuda_double::host_register
#define cudaHostUnregister ::cuda_double::host_unregister
#define cudaStreamIsCapturing ::cuda_double::is_capturing
#include <llmmem/device/cuda.hpp>

namespace {

using namespace llmmem;
using cuda_double::now;
using llmmem_tests::require;

constexpr device_id other{3};

struct named_call {
  const char* name;
  device_status (*make)();
};

/// All that may be called while another thread captures.
const named_call calls[] = {
    {"pool_create",
     [] {
       cudaMemPool_t pool{};
       return cuda_runtime{}.make_pool(&pool, other);
     }},
    {"pool_share", [] { return cuda_runtime{}.share_pool({}, other); }},
    {"pool_get", [] { return cuda_runtime{}.trim_pool({}, 1); }},
    {"pool_trim", [] { return cuda_runtime{}.trim_pool({}, 1); }},
    {"pool_destroy", [] { return cuda_runtime{}.end_pool({}); }},
    {"allocate",
     [] {
       void* bytes = nullptr;
       return cuda_runtime{}.allocate(&bytes, 1, {}, {});
     }},
    {"release", [] { return cuda_runtime{}.release(nullptr, {}); }},
    {"stream_create",
     [] {
       cudaStream_t stream{};
       return cuda_runtime{}.make_stream(&stream, other);
     }},
    {"stream_destroy", [] { return cuda_runtime{}.end_stream({}); }},
    {"stream_wait", [] { return cuda_runtime{}.wait_stream({}); }},
    {"event_create",
     [] {
       cudaEvent_t event{};
       return cuda_runtime{}.make_event(&event, other);
     }},
    {"event_destroy", [] { return cuda_runtime{}.end_event({}); }},
    {"event_query", [] { return cuda_runtime{}.query({}); }},
    {"event_wait", [] { return cuda_runtime{}.wait_event({}); }},
    {"host_register", [] { return cuda_runtime{}.lock_pages(nullptr, 1, other); }},
    {"host_unregister", [] { return cuda_runtime{}.unlock_pages(nullptr); }},
};

void check_calls() {
  for (const named_call& each : calls) {
    now = {};
    require(each.make() == 0 && now.ended.empty(), each.name, 0);
    require(now.mode == cudaStreamCaptureModeGlobal, "the thread's mode is as it was", 0);
    require(now.current == 0, "the device that was current is again", 0);
    now = {};
    now.refuses = each.name;
    require(each.make() != 0, each.name, 1);
    require(now.last == cudaSuccess, "a refusal is told, and not left behind", 1);
    require(now.mode == cudaStreamCaptureModeGlobal && now.current == 0, "all is as it was", 1);
    // Nobody is told that the device before is lost, and nobody else may be in our stead.
    now = {};
    now.refuses_device = 0;
    static_cast<void>(each.make());
    require(now.last == cudaSuccess, "nor is what restoring the device told", 2);
    now = {};
    now.refuses = "get_device";
    static_cast<void>(each.make());
    require(now.last == cudaSuccess, "nor that it was not known", 3);
  }
}

void check_devices() {
  now = {};
  require(cuda_runtime{}.lock_pages(nullptr, 1, std::nullopt) == 0 && now.registered_on == 0 &&
              now.contexts.empty(),
          "pages are registered by whoever is current, and no device is initialised for it", 0);
  require(cuda_runtime{}.lock_pages(nullptr, 1, other) == 0 && now.registered_on == 3, "or by who is named",
          0);
  now = {};
  now.current = 3;
  require(cuda_runtime{}.lock_pages(nullptr, 1, other) == 0 && now.contexts == std::set<int>{3},
          "where that is current, no other is initialised", 0);
  now = {};
  now.refuses_device = 3;
  require(
      cuda_runtime{}.lock_pages(nullptr, 1, other) == cudaErrorDevicesUnavailable && now.registered_on == -1,
      "one that cannot be made current registers nothing", 0);
  require(now.last == cudaSuccess, "and that is told once", 0);
}

void check_captures() {
  now = {};
  const auto some = reinterpret_cast<cudaStream_t>(std::uintptr_t{4096});
  const cuda_runtime run;
  require(!run.is_capturing(some) && run.takes_many(some), "a stream of its own", 0);
  require(run.is_capturing(cudaStreamLegacy), "the legacy stream, while others capture: it must not be used",
          0);
  require(now.last == cudaSuccess, "and nothing is left behind", 0);
  now.refuses = "is_capturing";
  require(run.is_capturing(some) && !run.takes_many(some), "what cannot be told", 0);
}

void check_trim() {
  now = {};
  require(cuda_runtime{}.trim_pool({}, 24) == 0 && now.kept == 1024, "what is in use is kept besides", 0);
  require(cuda_runtime{}.trim_pool({}, ~std::size_t{0}) == 0 && now.kept == ~std::size_t{0},
          "it does not wrap", 0);
}

}  // namespace

int main() {
  check_calls();
  check_devices();
  check_captures();
  check_trim();
  std::printf("%zu calls beside a capture, with every error taken and every device current again\n",
              sizeof calls / sizeof calls[0]);
}
