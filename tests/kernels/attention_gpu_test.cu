// Attention over a paged cache, against the host's run of the same lanes: every bit of outputs, logarithms
// and flags, over all shapes, elements and tables, also replayed from a graph.
#include <cstdint>
#include <random>

#include "support/attention_on_device.cuh"
#include "support/attention_world.hpp"
#include "support/device.cuh"

namespace {

using namespace llmmem_tests;

void check_world(std::uint64_t seed, cudaStream_t stream) {
  std::mt19937_64 random(seed);
  attention_world world(random);
  if (seed % 5 == 0) {
    world.share_rows(random, 3);
    world.shared = 3;
  }
  if (seed % 7 == 0) world.name_no_block(random);
  if (seed % 7 == 3 && world.shared == 1 && !world.sequences.empty())
    world.sequences.back() = static_cast<std::int32_t>(world.tables.size());  // one past the last
  const attention_results here = attend_on_device(world, seed, stream);
  const attention_results host = attend_on_host(world, seed);
  require(here.out == host.out, "outputs differ from the host's", seed);
  require(here.log_sum_exp == host.log_sum_exp, "logarithms differ from the host's", seed);
  require(here.flag == host.flag, "the flag differs from the host's", seed);
}

}  // namespace

int main() {
  check_worlds(300, check_world);
}
