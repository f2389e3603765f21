/// @file
/// Streams, events, captures and graphs.
#include "ptx_machine/runtime/state.hpp"

using namespace ptx_machine;

namespace {

cudaError_t make_stream(cudaStream_t* stream, unsigned flags) {
  auto* const state = new stream_state;
  state->is_blocking = (flags & cudaStreamNonBlocking) == 0;
  now().streams.insert(state);
  return made(stream, state);
}

}  // namespace

extern "C" {

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

}  // extern "C"
