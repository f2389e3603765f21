// Is there a device, and does a kernel of ours run on it? Everything else labelled `gpu` rests on this.
#include <cuda_runtime.h>

#include <cstdio>
#include <vector>

#include "support/device.cuh"

namespace {

__global__ void multiply_add(const unsigned* in, unsigned* out, unsigned count) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = in[i] * 2654435761u + i;
}

}  // namespace

int main() {
  using namespace llmmem_tests;
  describe(require_device());

  constexpr unsigned count = 100'003;  // not a multiple of a block, so that the last one is partly idle
  constexpr auto bytes = count * sizeof(unsigned);
  std::vector<unsigned> host(count);
  for (unsigned i = 0; i < count; ++i)
    host[i] = i ^ 0x5bd1e995u;

  unsigned* in = nullptr;
  unsigned* out = nullptr;
  check(cudaMalloc(&in, bytes), "cudaMalloc");
  check(cudaMalloc(&out, bytes), "cudaMalloc");
  check(cudaMemcpy(in, host.data(), bytes, cudaMemcpyHostToDevice), "copy to the device");
  multiply_add<<<(count + 255) / 256, 256>>>(in, out, count);
  check(cudaGetLastError(), "launch");
  std::vector<unsigned> back(count);
  check(cudaMemcpy(back.data(), out, bytes, cudaMemcpyDeviceToHost), "copy from the device");
  check(cudaFree(in), "cudaFree");
  check(cudaFree(out), "cudaFree");

  for (unsigned i = 0; i < count; ++i) {
    const unsigned expected = host[i] * 2654435761u + i;
    if (back[i] != expected) {
      std::fprintf(stderr, "FAILED: element %u is %u, expected %u\n", i, back[i], expected);
      return 1;
    }
  }
  std::printf("a kernel computed %u elements, all as the host does\n", count);
}
