/// @file
/// Streams, events and host functions.
#include "ptx_machine/runtime/state.hpp"

using namespace ptx_machine;

namespace {

/// A stream that cudaStreamPerThread stands for.
thread_local cudaStream_t of_this_thread = nullptr;

cudaStream_t make_stream(unsigned flags) {
  auto made = std::make_unique<stream_state>();
  made->number = now().next_stream++;
  made->is_blocking = (flags & cudaStreamNonBlocking) == 0;
  void* const handle = made.get();
  now().streams[handle] = std::move(made);
  return static_cast<cudaStream_t>(handle);
}
cudaError_t create_stream(cudaStream_t* stream, unsigned flags) {
  return call([&] { return *stream = make_stream(flags), cudaSuccess; }, effect::unsafe);
}

/// For calls that wait for a stream, or ask it: neither can be told of one that is captured.
cudaError_t check_not_captured(stream_state& of) {
  if (of.into) {
    of.into->is_valid = false;
    return cudaErrorStreamCaptureUnsupported;
  }
  return check_implicit(of);
}
/// A stream that is captured ends. Without its first stream a capture is over.
void abandon(stream_state& of) {
  const std::shared_ptr<capture> left = of.into;
  left->is_valid = false;
  if (left->origin != &of) return;
  left->origin = nullptr;
  each_stream([&](stream_state& each) {
    if (each.into != left) return;
    each.into = nullptr;
    each.tips.clear();
  });
}
/// All that a stream was given, and what it comes behind.
std::vector<operation_pointer> all_of(const stream_state& of) {
  return &of == &now().default_stream ? before_next(of) : std::vector<operation_pointer>{of.last};
}

cudaError_t record(cudaEvent_t event, cudaStream_t stream) {
  return call([&] {
    event_state* const what = event_of(event);
    stream_state* const on = stream_of(stream);
    if (what == nullptr || on == nullptr) return cudaErrorInvalidResourceHandle;
    if (on->into) {
      if (!on->into->is_valid) return cudaErrorStreamCaptureInvalidated;
      what->into = on->into;
      what->tips = on->tips;
      return cudaSuccess;
    }
    const auto at = std::make_shared<std::chrono::steady_clock::time_point>();
    operation_pointer point;
    const cudaError_t status = submit(
        *on, {.call = "cudaEventRecord", .act = [at] { *at = std::chrono::steady_clock::now(); }}, &point);
    if (status != cudaSuccess) return status;
    what->into = nullptr;
    what->was_recorded = true;
    what->last = point;
    what->at = at;
    return cudaSuccess;
  });
}

/// Has the stream join the capture, if it is not of it, and come behind what the event was recorded behind.
cudaError_t join(stream_state& on, const event_state& event) {
  if (!event.into->origin) return cudaErrorCapturedEvent;  // the capture has ended
  if (on.into && on.into != event.into) {
    on.into->is_valid = event.into->is_valid = false;
    return cudaErrorStreamCaptureMerge;
  }
  if (&on == &now().default_stream) {
    event.into->is_valid = false;
    return cudaErrorStreamCaptureImplicit;
  }
  on.into = event.into;
  on.tips.insert(on.tips.end(), event.tips.begin(), event.tips.end());
  return cudaSuccess;
}

cudaError_t add_host_function(cudaStream_t stream, std::string name, std::function<void()> act) {
  return call([&] {
    stream_state* const on = stream_of(stream);
    if (on == nullptr) return cudaErrorInvalidResourceHandle;
    return submit(*on, {.call = std::move(name), .act = std::move(act), .is_host_function = true});
  });
}

}  // namespace

stream_state* ptx_machine::stream_of(cudaStream_t stream) {
  if (stream == nullptr || stream == cudaStreamLegacy) return &now().default_stream;
  if (stream == cudaStreamPerThread) {
    if (of_this_thread == nullptr) of_this_thread = make_stream(cudaStreamDefault);
    stream = of_this_thread;
  }
  const auto found = now().streams.find(stream);
  return found == now().streams.end() ? nullptr : found->second.get();
}
event_state* ptx_machine::event_of(cudaEvent_t event) {
  const auto found = now().events.find(event);
  return found == now().events.end() ? nullptr : found->second.get();
}

extern "C" {

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return create_stream(stream, cudaStreamDefault);
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return create_stream(stream, flags);
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return create_stream(stream, flags);
}
/// What it was given is done all the same, whenever.
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return call(
      [&] {
        const auto found = now().streams.find(stream);
        if (found == now().streams.end()) return cudaErrorInvalidResourceHandle;
        stream_state& of = *found->second;
        if (of.into) abandon(of);
        // The legacy default stream waits for what a blocking stream was given.
        if (of.is_blocking && of.last && !of.last->is_done) {
          stream_state& legacy = now().default_stream;
          legacy.last =
              now().operations.add({.call = "cudaStreamDestroy"}, legacy.number, {legacy.last, of.last});
        }
        return now().streams.erase(found), cudaSuccess;
      },
      effect::unsafe);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return call(
      [&] {
        stream_state* const of = stream_of(stream);
        if (of == nullptr) return cudaErrorInvalidResourceHandle;
        if (const cudaError_t status = check_not_captured(*of); status != cudaSuccess) return status;
        return now().operations.settle(all_of(*of)), cudaSuccess;
      },
      effect::unsafe);
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return call(
      [&] {
        stream_state* const of = stream_of(stream);
        if (of == nullptr) return cudaErrorInvalidResourceHandle;
        if (const cudaError_t status = check_not_captured(*of); status != cudaSuccess) return status;
        for (const operation_pointer& each : all_of(*of))
          if (each && !now().operations.ask(*each)) return cudaErrorNotReady;
        return cudaSuccess;
      },
      effect::unsafe);
}
cudaError_t cudaDeviceSynchronize() {
  return call([] { return now().operations.settle_all(), cudaSuccess; }, effect::unsafe);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return call(
      [&] {
        auto state = std::make_unique<event_state>();
        state->has_time = (flags & cudaEventDisableTiming) == 0;
        void* const handle = state.get();
        now().events[handle] = std::move(state);
        return *event = static_cast<cudaEvent_t>(handle), cudaSuccess;
      },
      effect::unsafe);
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}
/// What waits for it still does.
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return call([&] { return now().events.erase(event) == 1 ? cudaSuccess : cudaErrorInvalidResourceHandle; },
              effect::unsafe);
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return record(event, stream);
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  if (flags != cudaEventRecordDefault) return told(not_offered("cudaEventRecordWithFlags: external events"));
  return record(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return call(
      [&] {
        event_state* const of = event_of(event);
        if (of == nullptr) return cudaErrorInvalidResourceHandle;
        if (of->into) return cudaErrorCapturedEvent;
        return !of->last || now().operations.ask(*of->last) ? cudaSuccess : cudaErrorNotReady;
      },
      effect::unsafe);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return call(
      [&] {
        event_state* const of = event_of(event);
        if (of == nullptr) return cudaErrorInvalidResourceHandle;
        if (of->into) return cudaErrorCapturedEvent;
        return now().operations.settle({of->last}), cudaSuccess;
      },
      effect::unsafe);
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t first, cudaEvent_t last) {
  return call([&] {
    const event_state* const began = event_of(first);
    const event_state* const ended = event_of(last);
    for (const event_state* each : {began, ended})
      if (each == nullptr || !each->has_time || !each->was_recorded) return cudaErrorInvalidResourceHandle;
    if (!began->last->is_done || !ended->last->is_done) return cudaErrorNotReady;
    *ms = std::chrono::duration<float, std::milli>(*ended->at - *began->at).count();
    return cudaSuccess;
  });
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  if (flags != cudaEventWaitDefault) return told(not_offered("cudaStreamWaitEvent: external events"));
  return call([&] {
    stream_state* const on = stream_of(stream);
    const event_state* const what = event_of(event);
    if (what == nullptr || on == nullptr) return cudaErrorInvalidResourceHandle;
    if (on->into && !on->into->is_valid) return cudaErrorStreamCaptureInvalidated;
    if (what->into) return join(*on, *what);
    if (!what->was_recorded) return cudaSuccess;
    if (on->into) {
      on->into->is_valid = false;
      return cudaErrorStreamCaptureIsolation;
    }
    if (const cudaError_t status = check_implicit(*on); status != cudaSuccess) return status;
    if (what->last->is_done) return cudaSuccess;
    std::vector<operation_pointer> behind = before_next(*on);
    behind.push_back(what->last);
    on->last = now().operations.add({.call = "cudaStreamWaitEvent"}, on->number, behind);
    return cudaSuccess;
  });
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* context) {
  return add_host_function(stream, "cudaLaunchHostFunc", [=] { function(context); });
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* context,
                                  unsigned) {
  {
    const std::lock_guard alone(now().operations.lock);
    if (stream_state* const of = stream_of(stream); of != nullptr && of->into) {
      of->into->is_valid = false;
      return told(cudaErrorStreamCaptureUnsupported);
    }
  }
  return add_host_function(stream, "cudaStreamAddCallback", [=] { function(stream, now().sticky, context); });
}

}  // extern "C"
