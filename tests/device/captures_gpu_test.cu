// What each call does while a graph is captured: in the captured stream, beside it, and in the legacy stream.
// Whatever a call answers, the capture goes on and the graph can be launched. docs/device.md has the same
// table.
#include <llmmem/device/batch_copier.hpp>
#include <llmmem/device/cuda.hpp>
#include <llmmem/device/stream_ordered.hpp>
#include <llmmem/kernels/batched_copy.hpp>
#include <llmmem/kernels/device_executor.cuh>
#include <llmmem/space/buffer.hpp>

#include <cuda_runtime.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "support/device.cuh"

namespace {

using namespace llmmem;
using llmmem_tests::check;
using llmmem_tests::require;

constexpr std::uint64_t mib = std::uint64_t{1} << 20;
constexpr std::uint64_t bytes = 4096;
constexpr device_id first{0};

/// What a call answers.
enum class answer : std::uint8_t {
  does,      // it did what it does without a capture
  in_graph,  // the graph does it
  refuses,   // a failure, and nothing was done
  keeps      // memory stays until the graph is gone
};
const char* text_of(answer of) {
  constexpr std::array texts{"does it", "becomes part of the graph", "refuses", "keeps the memory"};
  return texts[static_cast<std::size_t>(of)];
}

/// What the calls of a cell use. `stream` is captured, or another one is.
struct parts {
  explicit parts(cudaStream_t of)
      : stream(of),
        queue(space, first, of, {.depth = 4}),
        other(space, first, {.depth = 4}),
        memory(space, first),
        to(space, bytes, std::align_val_t{256}),
        from(space, bytes, std::align_val_t{256}) {
    passed = other.mark().value();
    passed.wait();
  }
  device_space space{first, {.budget = mib}};
  pinned_space host{{.budget = mib}};
  cudaStream_t stream;
  device_queue queue;
  device_queue other;
  stream_ordered<device_space, cuda_runtime> memory;
  space_buffer<device_space> to;
  space_buffer<device_space> from;
  device_fence<cuda_runtime> passed;
  std::array<std::byte, bytes> input{};
};

struct row {
  const char* call;
  std::function<answer(parts&)> act;
  std::array<answer, 3> wanted;  // in the captured stream, beside it, in the legacy stream
};

answer answer_of(bool is_done) {
  return is_done ? answer::does : answer::refuses;
}

std::vector<row> rows() {
  using enum answer;
  return {
      {"`device_space::try_allocate`, `deallocate`, `trim`",
       [](parts& of) {
         const auto range = of.space.try_allocate(bytes, 256);
         if (!range) return answer::refuses;
         of.space.deallocate(*range);
         return answer_of(of.space.trim().has_value());
       },
       {does, does, does}},
      {"`pinned_space::try_allocate`, `deallocate`",
       [](parts& of) {
         const auto range = of.host.try_allocate(bytes, 4096);
         if (!range) return answer::refuses;
         of.host.deallocate(*range);
         return answer::does;
       },
       {does, does, does}},
      {"`device_queue::copy_in_async`",
       [](parts& of) { return answer_of(of.queue.copy_in_async(of.to.range(), of.input, {}).has_value()); },
       {refuses, does, refuses}},
      {"`device_queue::mark`",
       [](parts& of) { return answer_of(of.queue.mark().has_value()); },
       {refuses, does, refuses}},
      {"`device_fence::ready`", [](parts& of) { return answer_of(of.passed.ready()); }, {does, does, does}},
      {"`device_fence::hold`, of a point that has passed",
       [](parts& of) { return answer_of(of.passed.hold(of.stream).has_value()); },
       {does, does, does}},
      {"`stream_ordered::deallocate` after work of the stream",
       [](parts& of) {
         const auto range = of.memory.try_allocate(bytes, 256).value();
         of.memory.deallocate(range, of.stream);
         if (of.memory.stats().captured_ranges == 0) return answer::does;
         return answer::keeps;
       },
       {keeps, does, keeps}},
  };
}

/// Kernels and copies by them; the legacy stream must not be used during a capture, by CUDA's rules.
std::vector<row> rows_of_kernels() {
  using enum answer;
  return {
      {"`device_executor`: kernels",
       [](parts& of) {
         const std::array pieces{copy_task{of.from.range().data, of.to.range().data, bytes}};
         return copy_few(device_executor(of.stream), pieces) ? in_graph : refuses;
       },
       {in_graph, does, refuses}},
      {"`batch_copier::copy`",
       [](parts& of) {
         std::vector<copy_task> pieces;
         for (std::uint64_t i = 0; i < 8; ++i)
           pieces.push_back({of.from.range().data + 512 * i, of.to.range().data + 512 * i, 256});
         batch_copier<cuda_runtime> copier;
         return copier.copy(pieces, {}, of.stream) ? in_graph : refuses;
       },
       {in_graph, does, refuses}},
  };
}

/// In which stream the call is made.
enum class where : std::uint8_t { captured, beside, legacy };

void check_cell(const row& of, where at) {
  // A stream that the legacy stream waits for: beside one that it does not, nothing is implicit.
  cudaStream_t captured{};
  check(cudaStreamCreateWithFlags(&captured, cudaStreamDefault), "a stream");
  cudaStream_t other{};
  check(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), "a stream");
  {
    parts its(at == where::captured ? captured : at == where::beside ? other : cudaStreamLegacy);
    check(cudaMemsetAsync(its.from.range().data, 7, bytes, captured), "memset");
    check(cudaStreamSynchronize(captured), "a wait");
    // The mode in which a capture forbids the most.
    check(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal), "begin a capture");
    answer got = of.act(its);
    if (got == answer::in_graph && at != where::captured) got = answer::does;
    const std::string cell =
        std::string(of.call) + ", column " + std::to_string(static_cast<int>(at)) + ": " + text_of(got);
    require(got == of.wanted[static_cast<std::size_t>(at)], cell.c_str(), 0);
    cudaGraph_t graph{};
    require(cudaStreamEndCapture(captured, &graph) == cudaSuccess, ("the capture goes on: " + cell).c_str(),
            0);
    cudaGraphExec_t exec{};
    check(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
    check(cudaGraphLaunch(exec, captured), "launch");
    check(cudaDeviceSynchronize(), "the graph");
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    its.memory.release_captured();
    require(cudaPeekAtLastError() == cudaSuccess, ("no error is left behind: " + cell).c_str(), 0);
  }
  cudaStreamDestroy(captured);
  cudaStreamDestroy(other);
}

}  // namespace

int main() {
  if (const char* const why = cuda_runtime{}.why_no_device(first); why != nullptr) {
    std::printf("skipped, no device: %s\n", why);
    return 77;
  }
  for (const row& each : rows()) {
    for (const where at : {where::captured, where::beside, where::legacy})
      check_cell(each, at);
    std::printf("| %s | %s | %s | %s |\n", each.call, text_of(each.wanted[0]), text_of(each.wanted[1]),
                text_of(each.wanted[2]));
  }
  for (const row& each : rows_of_kernels()) {
    for (const where at : {where::captured, where::beside})
      check_cell(each, at);
    std::printf("| %s | %s | %s | CUDA forbids it |\n", each.call, text_of(each.wanted[0]),
                text_of(each.wanted[1]));
  }
  return 0;
}
