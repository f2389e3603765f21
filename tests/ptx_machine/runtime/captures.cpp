/// @file
/// Captures of streams, and graphs.
#include "ptx_machine/runtime/state.hpp"

#include <algorithm>

using namespace ptx_machine;

namespace {

struct graph {
  std::vector<graph_node> nodes{};
  operation_pointer last{};  // of an executable graph: the end of its last launch
};

[[nodiscard]] graph& graph_of(void* handle) {
  return *static_cast<graph*>(handle);
}

/// Whether the last node of a stream comes behind every node.
[[nodiscard]] bool is_joined(const capture& of) {
  std::vector<bool> is_before(of.nodes.size());
  std::vector<std::size_t> open = of.origin->tips;
  while (!open.empty()) {
    const std::size_t next = open.back();
    open.pop_back();
    if (is_before[next]) continue;
    is_before[next] = true;
    open.insert(open.end(), of.nodes[next].behind.begin(), of.nodes[next].behind.end());
  }
  return std::find(is_before.begin(), is_before.end(), false) == is_before.end();
}

cudaStreamCaptureStatus status_of(const stream_state& of) {
  return !of.into            ? cudaStreamCaptureStatusNone
         : of.into->is_valid ? cudaStreamCaptureStatusActive
                             : cudaStreamCaptureStatusInvalidated;
}
/// Asking the legacy default stream while a stream that waits for it is captured is an error, and ends
/// nothing.
[[nodiscard]] bool is_implicit(const stream_state& of) {
  bool is = false;
  each_stream([&](const stream_state& each) { is = is || (each.into && each.is_blocking); });
  return is && &of == &now().default_stream;
}

cudaError_t capture_info(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                         bool asks_for_more) {
  if (asks_for_more) return told(not_offered("cudaStreamGetCaptureInfo: the graph and its nodes"));
  return call([&] {
    const stream_state* const of = stream_of(stream);
    if (of == nullptr) return cudaErrorInvalidResourceHandle;
    if (is_implicit(*of)) return cudaErrorStreamCaptureImplicit;
    *status = status_of(*of);
    if (id != nullptr && of->into) *id = of->into->id;
    return cudaSuccess;
  });
}

}  // namespace

bool ptx_machine::captures_allow_unsafe() {
  if (capture_mode == cudaStreamCaptureModeRelaxed) return true;
  bool is_well = true;
  each_stream([&](const stream_state& each) {
    if (!each.into || each.into->mode == cudaStreamCaptureModeRelaxed) return;
    const bool is_own = each.into->by == std::this_thread::get_id();
    const bool is_global =
        capture_mode == cudaStreamCaptureModeGlobal && each.into->mode == cudaStreamCaptureModeGlobal;
    if (!is_own && !is_global) return;
    each.into->is_valid = false;
    is_well = false;
  });
  return is_well;
}

extern "C" {

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return std::swap(*mode, capture_mode), cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  return call([&] {
    stream_state* const of = stream_of(stream);
    if (of == nullptr) return cudaErrorInvalidResourceHandle;
    if (of == &now().default_stream) return cudaErrorStreamCaptureUnsupported;
    if (of->into) return cudaErrorIllegalState;
    of->into = std::make_shared<capture>();
    of->into->id = now().next_capture++;
    of->into->mode = mode;
    of->into->by = std::this_thread::get_id();
    of->into->origin = of;
    of->tips.clear();
    return cudaSuccess;
  });
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* to) {
  return call([&] {
    stream_state* const of = stream_of(stream);
    *to = nullptr;
    if (of == nullptr) return cudaErrorInvalidResourceHandle;
    if (!of->into) return cudaErrorIllegalState;
    const std::shared_ptr<capture> ended = of->into;
    if (ended->origin != of) {
      ended->is_valid = false;
      return cudaErrorStreamCaptureUnmatched;
    }
    if (ended->mode != cudaStreamCaptureModeRelaxed && ended->by != std::this_thread::get_id()) {
      ended->is_valid = false;
      return cudaErrorStreamCaptureWrongThread;
    }
    const bool has_all = is_joined(*ended);
    each_stream([&](stream_state& each) {
      if (each.into != ended) return;
      each.into = nullptr;
      each.tips.clear();
    });
    ended->origin = nullptr;
    if (!ended->is_valid) return cudaErrorStreamCaptureInvalidated;
    if (!has_all) return cudaErrorStreamCaptureUnjoined;
    auto* const result = new graph;
    result->nodes = std::move(ended->nodes);
    return made(to, result);
  });
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return capture_info(stream, status, nullptr, false);
}
#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* to, const cudaGraphNode_t** nodes,
                                     const cudaGraphEdgeData** edges, size_t* count) {
  return capture_info(stream, status, id,
                      to != nullptr || nodes != nullptr || edges != nullptr || count != nullptr);
}
#else
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                        unsigned long long* id, cudaGraph_t* to,
                                        const cudaGraphNode_t** nodes, size_t* count) {
  return capture_info(stream, status, id, to != nullptr || nodes != nullptr || count != nullptr);
}
#endif

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* to, cudaGraph_t from, unsigned long long flags) {
  if (flags != 0) return told(not_offered("cudaGraphInstantiate: flags"));
  return call([&] {
    auto* const copy = new graph;
    copy->nodes = graph_of(from).nodes;
    return made(to, copy);
  });
}
/// Its nodes become operations, behind what the stream was given and behind its last launch.
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  return call([&] {
    stream_state* const on = stream_of(stream);
    if (on == nullptr) return cudaErrorInvalidResourceHandle;
    if (on->into) {
      on->into->is_valid = false;
      return not_offered("cudaGraphLaunch into a capture");
    }
    if (const cudaError_t status = check_implicit(*on); status != cudaSuccess) return status;
    graph& of = graph_of(executable);
    std::vector<operation_pointer> first = before_next(*on);
    first.push_back(of.last);
    std::vector<operation_pointer> all;
    for (const graph_node& each : of.nodes) {
      std::vector<operation_pointer> behind;
      for (const std::size_t before : each.behind)
        behind.push_back(all[before]);
      task what = each.what;
      what.call += " (in a graph)";
      all.push_back(now().operations.add(std::move(what), on->number, each.behind.empty() ? first : behind));
    }
    all.insert(all.end(), first.begin(), first.end());
    on->last = of.last = now().operations.add({.call = "cudaGraphLaunch"}, on->number, all);
    return cudaSuccess;
  });
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t of) {
  return call([&] { return delete &graph_of(of), cudaSuccess; });
}
cudaError_t cudaGraphDestroy(cudaGraph_t of) {
  return call([&] { return delete &graph_of(of), cudaSuccess; });
}

}  // extern "C"
