/// @file
/// What the parts of the machine's CUDA runtime share: its state, and how a call and an operation are done.
#pragma once

#include "ptx_machine/exec.hpp"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace ptx_machine {

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
/// What nvcc put into the program, and what of it was bound. Known to kernels.cpp alone.
struct loaded_module;
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
runtime& now();
inline thread_local cudaError_t last_error = cudaSuccess;
inline thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

cudaError_t told(cudaError_t status);
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

void run(const work& step);
stream_state& state_of(cudaStream_t stream);
bool step_of(stream_state& of);
void drain(stream_state& of);
void drain_all();
cudaError_t submit(cudaStream_t stream, work step, bool at_once = false);

template <class Handle, class State>
cudaError_t made(Handle* handle, State* state) {
  *handle = reinterpret_cast<Handle>(state);
  return cudaSuccess;
}

/// The driver's call of that name, or null.
void* driver_call(const std::string& name);

}  // namespace ptx_machine
