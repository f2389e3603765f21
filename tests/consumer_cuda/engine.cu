// Fills a block on the device, copies it by kernels of the library that both translation units instantiate,
// and compares. Exit status: 0, 1 where bytes differ or something failed, 77 without a device (and the
// reason).
#include <llmmem/device/cuda.hpp>
#include <llmmem/paging/block_storage.hpp>

#include "blocks.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

namespace {

constexpr std::uint32_t block_bytes = 4096;

__global__ void fill(std::byte* block) {
  const std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < block_bytes) block[i] = std::byte{pattern_at(i)};
}

bool copies_blocks() {
  llmmem::device_space device(llmmem::device_id{0}, {.budget = 1 << 20});
  llmmem::block_storage<llmmem::device_space> blocks(device, 3, block_bytes);
  fill<<<block_bytes / 256, 256>>>(blocks.range().data);
  const auto at = [&](std::size_t i) { return blocks.range().data + i * block_bytes; };
  const std::array<llmmem::copy_task, 1> first{{{at(0), at(1), block_bytes}}};
  const std::array<llmmem::copy_task, 1> second{{{at(1), at(2), block_bytes}}};
  copy_pieces(first, nullptr).value();
  llmmem::copy_few(llmmem::device_executor(nullptr), second).value();
  std::vector<std::byte> back(block_bytes);
  bool same = cudaMemcpy(back.data(), at(2), block_bytes, cudaMemcpyDeviceToHost) == cudaSuccess;
  for (std::uint32_t i = 0; i < block_bytes; ++i)
    same = same && back[i] == std::byte{static_cast<std::uint8_t>(i * 31 + 7)};
  return same;
}

}  // namespace

int main() {
  if (const char* const why = llmmem::cuda_runtime{}.why_no_device(llmmem::device_id{0}); why != nullptr) {
    std::printf("SKIPPED: no device: %s\n", why);
    return 77;
  }
  try {
    const bool same = copies_blocks();
    std::puts(same ? "copied 2 blocks" : "the copied block differs");
    return same ? 0 : 1;
  } catch (const llmmem::error& failed) {
    std::printf("%s\n", failed.what());
    return 1;
  }
}
