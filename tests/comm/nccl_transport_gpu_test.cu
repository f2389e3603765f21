// One rank on one device: NCCL itself sets up, adds up, sends to itself, stops and leaves as nccl_transport
// expects.
#include <llmmem/comm/collectives.hpp>
#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/nccl_memory.hpp>
#include <llmmem/comm/nccl_transport.hpp>
#include <llmmem/comm/thread_network.hpp>
#include <llmmem/device/cuda.hpp>
#include <llmmem/kernels/device_executor.cuh>
#include <llmmem/kernels/kernel_space.hpp>
#include <llmmem/sharded_state.hpp>
#include <llmmem/sharding/replicated.hpp>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <vector>

#include "support/device.cuh"

namespace {

using namespace llmmem;
constexpr std::uint64_t minute = 60'000'000'000;

void expect(const result<void>& done, const char* what) {
  if (done) return;
  std::fprintf(stderr, "FAILED: %s: %s\n", what, done.error().message().c_str());
  std::exit(1);
}

void expect(bool is_true, const char* what) {
  if (is_true) return;
  std::fprintf(stderr, "FAILED: %s\n", what);
  std::exit(1);
}

/// A sum within a window; NCCL may make none on a machine of one device.
template <class Ranks>
void check_window(Ranks& ranks, const std::vector<float>& host) {
  const std::size_t bytes = host.size() * sizeof(float);
  nccl_memory<> memory(bytes);
  const auto made = ranks.register_window(memory.bytes(), ranks.after(minute));
  if (!made.has_value()) expect(made.error(), "register_window");
  std::printf("a window of %zu bytes was %s\n", bytes, made.value() ? "made" : "not made");
  llmmem_tests::check(cudaMemcpy(memory.bytes().data(), host.data(), bytes, cudaMemcpyHostToDevice),
                      "copy up");
  llmmem_tests::check(cudaDeviceSynchronize(), "copy up");  // before streams that do not wait for it
  expect(ranks.all_reduce(memory.bytes(), memory.bytes(), ncclFloat, ncclSum, ranks.after(minute)),
         "all_reduce in a window");
  std::vector<float> back(host.size());
  llmmem_tests::check(cudaMemcpy(back.data(), memory.bytes().data(), bytes, cudaMemcpyDeviceToHost),
                      "copy down");
  expect(back == host, "a sum of one rank in a window is not what it was");
  expect(ranks.deregister_window(memory.bytes()), "deregister_window");
  expect(ranks.windows() == 0, "a window is left");
}

using worked_memory = kernel_space<device_space, device_queue, device_executor>;
using nccl_ranks = nccl_transport<communicator<thread_endpoint>>;
static_assert(messages_after_work_of<nccl_ranks, worked_memory>);
static_assert(messages_after_work_of<rank_group<nccl_ranks>, worked_memory>);

/// A state in the device's memory over NCCL: of one rank, so that kernels alone move bytes.
void check_state(nccl_ranks& ranks, const std::vector<float>& host) {
  device_space memory(device_pool_source<cuda_runtime>(device_id{0}), {.budget = std::uint64_t{1} << 24});
  device_queue queue(memory, device_id{0});
  worked_memory space(memory, queue, device_executor(queue.stream()));
  const std::vector<tensor_facts> tensors{{"a", tensor_shape::vector(host.size()), 4}};
  const sharding::replicated all(tensors, rank_count{1});
  sharded_state state(all, tensors, ranks, space);
  const float* const from = host.data();
  const std::span<const std::byte> bytes = std::as_bytes(std::span(from, host.size()));
  const auto there = memory.try_allocate(bytes.size(), 256).value();
  static_cast<void>(queue.copy_in_async(there, bytes, {}).value());
  const std::vector<std::span<std::byte>> contribution{there.addresses()};
  const std::vector scope{tensor_id{0}};
  expect(state.reduce_scatter(scope, contribution, sum_f32), "a sum on the device");
  memory.deallocate(there);
  std::vector<float> back(host.size());
  const auto whole = state.gather(scope);
  expect(whole.has_value(), "a gather on the device");
  llmmem_tests::check(cudaMemcpy(back.data(), whole->tensor(0).data(), bytes.size(), cudaMemcpyDeviceToHost),
                      "copy down");
  expect(back == host, "a state of one rank is not what it was");
}

}  // namespace

int main() {
  using namespace llmmem_tests;
  describe(require_device());

  constexpr std::size_t count = 100'003;
  constexpr std::size_t bytes = count * sizeof(float);
  std::vector<float> host(count);
  for (std::size_t i = 0; i < count; ++i)
    host[i] = static_cast<float>(i % 1000);
  float* from = nullptr;
  float* into = nullptr;
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  check(cudaMalloc(&from, bytes), "cudaMalloc");
  check(cudaMalloc(&into, bytes), "cudaMalloc");
  check(cudaMemcpy(from, host.data(), bytes, cudaMemcpyHostToDevice), "copy to the device");
  check(cudaDeviceSynchronize(), "copy to the device");
  const std::span<const std::byte> out(reinterpret_cast<const std::byte*>(from), bytes);
  const std::span<std::byte> in(reinterpret_cast<std::byte*>(into), bytes);
  const auto came_whole = [&](const char* what) {
    std::vector<float> back(count);
    check(cudaMemcpy(back.data(), into, bytes, cudaMemcpyDeviceToHost), "copy from the device");
    expect(back == host, what);
    check(cudaMemset(into, 0, bytes), "cudaMemset");
    check(cudaDeviceSynchronize(), "cudaMemset");
  };

  thread_network net(1);
  thread_endpoint end(net, seat_id{0});
  communicator<thread_endpoint> side(end);
  side.join(side.after(minute)).value();
  {
    nccl_transport ranks(side, stream);
    expect(ranks.join(ranks.after(minute)), "join");
    expect(ranks.all_reduce(out, in, ncclFloat, ncclSum, ranks.after(minute)), "all_reduce");
    came_whole("a sum of one rank is not what it was");
    expect(ranks.reduce_scatter(out, in, ncclFloat, ncclSum, ranks.after(minute)), "reduce_scatter");
    came_whole("a scattered sum of one rank is not what it was");
    expect(ranks.all_gather(out, in, ranks.after(minute)), "all_gather");
    came_whole("what was gathered of one rank is not what it was");
    expect(ranks.exchange(out, rank_id{0}, in, rank_id{0}, 0, ranks.after(minute)), "exchange with itself");
    came_whole("a message to itself is not what was sent");
    expect(ranks.broadcast(in, rank_id{0}, ranks.after(minute)), "broadcast");
    expect(barrier(ranks, {.by = ranks.after(minute)}), "barrier");
    check_window(ranks, host);
    check_state(ranks, host);

    // The end of an epoch without a death: what NCCL does is revoked, and a fresh communicator follows.
    ranks.revoke();
    expect(ranks.all_gather(out, in, ranks.after(minute)).code() == errc::epoch_revoked,
           "a revoked epoch goes on");
    expect(ranks.shrink(ranks.agree(1, ranks.after(minute)).value(), ranks.after(minute)), "shrink");
    expect(ranks.all_reduce(out, in, ncclFloat, ncclSum, ranks.after(minute)),
           "all_reduce in the next epoch");
    came_whole("a sum in the next epoch is not what it was");
    expect(ranks.leave(ranks.after(minute)), "leave");
    expect(ranks.stats().fresh == 2 && ranks.stats().revoked == 1 && ranks.stats().aborted == 1, "stats");
  }
  {
    nccl_transport ranks(side, stream);  // and one that is only dropped
    expect(ranks.join(ranks.after(minute)), "join anew");
  }
  check(cudaFree(from), "cudaFree");
  check(cudaFree(into), "cudaFree");
  check(cudaStreamDestroy(stream), "cudaStreamDestroy");
  std::printf("NCCL moved %zu floats each way, in two epochs\n", count);
}
