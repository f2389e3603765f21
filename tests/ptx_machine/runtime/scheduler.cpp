/// @file
/// When the work of streams is done, and the hooks that tests of the machine have.
#include "ptx_machine/runtime/state.hpp"

namespace ptx_machine {

/// Never ended: programs free memory while they end.
runtime& now() {
  static runtime* const made = new runtime;
  return *made;
}
cudaError_t told(cudaError_t status) {
  if (status == cudaSuccess && now().sticky != cudaSuccess) status = now().sticky;
  if (status != cudaSuccess) last_error = status;
  return status;
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
cudaError_t submit(cudaStream_t stream, work step, bool at_once) {
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

}  // namespace ptx_machine

using namespace ptx_machine;

extern "C" {

const char* ptx_machine_last_fault() {
  return now().last_fault.c_str();
}
void ptx_machine_forget_fault() {
  now().sticky = last_error = cudaSuccess;
  now().last_fault.clear();
}
void ptx_machine_be_late(int is_late) {
  now().is_late = is_late != 0;
}
void ptx_machine_keep_apart(int is_apart) {
  now().device.options.keeps_apart = is_apart != 0;
}

}  // extern "C"
