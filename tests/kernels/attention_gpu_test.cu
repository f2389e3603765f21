// Attention over a paged cache, against the host's run of the same lanes: every bit of outputs, logarithms
// and flags, over all shapes, elements and tables, also replayed from a graph.
#include <llmmem/kernels/device_executor.cuh>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/paged_attention.hpp>

#include <cstdint>
#include <random>
#include <vector>

#include "support/attention_world.hpp"
#include "support/device.cuh"

namespace {

using namespace llmmem;
using namespace llmmem_tests;

constexpr float untold = 12345;

void check_world(std::uint64_t seed, cudaStream_t stream) {
  std::mt19937_64 random(seed);
  attention_world world(random);
  const std::uint64_t outputs = world.rows * world.query_heads();
  const device_array<std::byte> queries(world.queries);
  const device_array<std::byte> out(world.out);
  const device_array<std::byte> cache(world.cache);
  const device_array<std::byte> workspace(std::vector<std::byte>(world.workspace_bytes(), std::byte{0xFF}));
  const device_array<std::int32_t> indptr(world.indptr);
  const device_array<std::int32_t> indices(world.indices);
  const device_array<std::int32_t> last_page_len(world.last_page_len);
  const device_array<std::int32_t> padded(world.padded);
  const device_array<std::int32_t> tokens(world.tokens);
  const device_array<std::int32_t> sequences(world.sequences);
  const device_array<std::int32_t> lengths(world.lengths);
  const device_array<float> scales[2] = {device_array<float>(world.scales[0]),
                                         device_array<float>(world.scales[1])};
  const device_array<float> log_sum_exp(std::vector<float>(outputs, untold));
  const device_array<std::uint32_t> flag(std::vector<std::uint32_t>{0});
  // Every other cache lies where a table says.
  const bool has_table = seed % 2 == 1;
  const device_array<std::byte*> planes(world.planes_in(cache.data()));
  const attention_pointers on_device{.queries = queries.data(),
                                     .out = out.data(),
                                     .cache = has_table ? nullptr : cache.data(),
                                     .plane_table = has_table ? planes.data() : nullptr,
                                     .plane_alignment = world.layout.element == dtype::fp8_e4m3 ? 8U : 16U,
                                     .workspace = workspace.data(),
                                     .indptr = indptr.data(),
                                     .indices = indices.data(),
                                     .last_page_len = last_page_len.data(),
                                     .padded = padded.data(),
                                     .seq_lens = tokens.data(),
                                     .sequences = sequences.data(),
                                     .lengths = lengths.data(),
                                     .scales = {scales[0].data(), scales[1].data()},
                                     .log_sum_exp = log_sum_exp.data(),
                                     .flag = flag.data()};
  const table_form form = seed % 3 == 0 ? table_form::padded : table_form::csr;
  const device_executor device(stream);
  launch_or_replay(seed, stream, "attention",
                   [&] { return world.attend(device, on_device, form).has_value(); });

  std::vector<std::byte> host_out = world.out;
  std::vector<std::byte> host_workspace(world.workspace_bytes());
  std::vector<float> host_told(outputs, untold);
  std::uint32_t host_flag = 0;
  const attention_pointers on_host{.queries = world.queries.data(),
                                   .out = host_out.data(),
                                   .cache = world.cache.data(),
                                   .workspace = host_workspace.data(),
                                   .indptr = world.indptr.data(),
                                   .indices = world.indices.data(),
                                   .last_page_len = world.last_page_len.data(),
                                   .padded = world.padded.data(),
                                   .seq_lens = world.tokens.data(),
                                   .sequences = world.sequences.empty() ? nullptr : world.sequences.data(),
                                   .lengths = world.lengths.empty() ? nullptr : world.lengths.data(),
                                   .scales = {world.scales[0].data(), world.scales[1].data()},
                                   .log_sum_exp = host_told.data(),
                                   .flag = &host_flag};
  require(world.attend(host_executor{}, on_host, form).has_value(), "attention on the host", seed);
  require(out.host() == host_out, "outputs differ from the host's", seed);
  require(log_sum_exp.host() == host_told, "logarithms differ from the host's", seed);
  require(flag.host()[0] == host_flag, "the flag differs from the host's", seed);
}

}  // namespace

int main() {
  check_worlds(300, check_world);
}
