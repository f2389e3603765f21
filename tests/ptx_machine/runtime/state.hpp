/// @file
/// The CUDA runtime whose device is the machine of machine.hpp. A program links it in the place of libcudart;
/// it takes the PTX out of the program itself. What it does not offer does not link, or returns
/// cudaErrorNotSupported and prints a line. This header has what its parts share: its state, and how a call
/// and an operation are made.
///
/// Variables of the environment (docs/device_tests.md lists them all):
/// - `PTX_MACHINE_SEED=n`: a seed decides when operations run, at any time that CUDA allows (`scheduler`).
/// - `PTX_MACHINE_LATE=1`: they run only when a call waits for them. Without either: before a call returns.
/// - `PTX_MACHINE_ARCHITECTURE=80`: the device's architecture; it takes the newest PTX up to that in the
/// program.
#pragma once

#include "ptx_machine/machine.hpp"
#include "ptx_machine/runtime/scheduler.hpp"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace ptx_machine {

struct stream_state;

/// An operation of a graph, and the nodes that it comes behind.
struct graph_node {
  task what{};
  std::vector<std::size_t> behind{};
};
/// A capture that goes on, of one stream and of those that joined it.
struct capture {
  u64 id = 0;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::thread::id by{};
  stream_state* origin = nullptr;
  bool is_valid = true;
  std::vector<graph_node> nodes{};
};
struct stream_state {
  u32 number = 0;
  bool is_blocking = true;  // the legacy default stream waits for it, and it for that
  operation_pointer last{};
  std::shared_ptr<capture> into{};
  std::vector<std::size_t> tips{};  // nodes of `into` that its next operation comes behind
};
struct event_state {
  bool has_time = true;
  bool was_recorded = false;
  operation_pointer last{};
  std::shared_ptr<std::chrono::steady_clock::time_point> at{};
  std::shared_ptr<capture> into{};  // where it was recorded last, if that was a capture
  std::vector<std::size_t> tips{};
};
struct pool_state {
  u64 used = 0, most_used = 0;
  u64 reserved = 0, most_reserved = 0;
  u64 threshold = 0;
};
/// Memory that a pool gave out, from the call that asked for it to the end of the operation that frees it.
struct pool_memory {
  u64 bytes = 0;
  std::shared_ptr<pool_state> pool{};
  bool is_freed = false;  // the operation that frees it is on its way, or done
  bool is_there = false;  // the operation that allocates it is done
};
/// What nvcc put into the program, and what of it was bound. Known to kernels.cpp alone.
struct loaded_module;
struct known_function {
  loaded_module* in = nullptr;
  std::string name{};
};

struct runtime {
  runtime();

  scheduler operations;
  machine device{};
  std::map<const void*, known_function> functions{};
  std::map<const void*, std::pair<loaded_module*, std::string>> symbols{};
  std::map<void*, std::unique_ptr<stream_state>> streams{};
  std::map<void*, std::unique_ptr<event_state>> events{};
  std::map<void*, std::shared_ptr<pool_state>> pools{};
  stream_state default_stream{};
  std::shared_ptr<pool_state> default_pool = std::make_shared<pool_state>();
  std::map<u64, pool_memory> from_pools{};
  std::set<u64> host_memory{};  // that cudaMallocHost gave out
  std::map<u64, std::shared_ptr<backing>> handles{};
  std::map<u64, u64> reserved{};  // addresses
  u64 next_handle = 1;
  u64 next_capture = 1;
  u32 next_stream = 1;
  std::atomic<cudaError_t> sticky = cudaSuccess;  // read without the lock as well
  std::string last_fault{};
  int arch = 0;
  int wanted_arch = 0;  // 0: the newest that the program has
};
runtime& now();
inline thread_local cudaError_t last_error = cudaSuccess;
inline thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

/// The status that a call returns: an error of the device stays, and `cudaGetLastError` returns the last one.
cudaError_t told(cudaError_t status);
/// A line for the person who runs the program.
void say(const std::string& text);
/// For calls that the machine does not offer.
cudaError_t not_offered(const std::string& what);
/// The device is lost to the program, as by a wrong access.
void lose(cudaError_t status, const std::string& why);
/// Calls `act`. A fault in it loses the device.
void attempt(const std::function<void()>& act);
[[nodiscard]] std::string hex(u64 at);

/// Whether captures that go on allow the calling thread a call that may be unsafe. Those that do not are
/// invalid from then on.
[[nodiscard]] bool captures_allow_unsafe();
/// Captures of streams for which the legacy default stream would have to wait.
[[nodiscard]] bool blocks_capture();

/// What a call may do to captures of other streams.
enum class effect { safe, unsafe };
/// Makes a call while no other thread makes one. The device may go on before it and after it.
template <class Act>
cudaError_t call(const Act& act, effect on_captures = effect::safe) {
  if (scheduler::is_in_host_function()) return told(cudaErrorNotPermitted);
  const std::lock_guard alone(now().operations.lock);
  if (on_captures == effect::unsafe && !captures_allow_unsafe())
    return told(cudaErrorStreamCaptureUnsupported);
  now().operations.proceed();
  const cudaError_t status = act();
  now().operations.proceed();
  return told(status);
}

/// The stream of a handle; null where the handle names none.
[[nodiscard]] stream_state* stream_of(cudaStream_t stream);
[[nodiscard]] event_state* event_of(cudaEvent_t event);
/// Calls `act(stream)` for each stream.
template <class Act>
void each_stream(const Act& act) {
  act(now().default_stream);
  for (const auto& [handle, each] : now().streams)
    act(*each);
}
/// The operations that the next one of a stream is ordered behind.
[[nodiscard]] std::vector<operation_pointer> before_next(const stream_state& of);
/// Gives a stream an operation, or the graph that it is captured into a node. @param made  where not null:
/// the operation, or null for a node.
cudaError_t submit(stream_state& of, task what, operation_pointer* made = nullptr);
/// The error of an operation that the legacy default stream may not be given while others are captured.
[[nodiscard]] cudaError_t check_implicit(const stream_state& of);

/// The allocation, registration or mapping that an address is of, also where a stream has not allocated it
/// yet.
[[nodiscard]] std::optional<named_bytes> memory_at(u64 at);
/// Memory is about to be gone, by `call`. Loses the device where an operation that is not done may use it and
/// does not come before `behind`. @return whether there was none.
bool nothing_uses(named_bytes gone, const std::string& call, const std::vector<operation_pointer>& behind);

/// The driver's call of that name, or null.
void* driver_call(const std::string& name);

template <class Handle, class State>
cudaError_t made(Handle* handle, State* state) {
  *handle = reinterpret_cast<Handle>(state);
  return cudaSuccess;
}

}  // namespace ptx_machine
