/// @file
/// An `attention_world` in the memory of a device, and what its attention leaves there and on the host.
#pragma once

#include <llmmem/kernels/device_executor.cuh>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/paged_attention.hpp>
#include <llmmem/model/dtype.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "support/attention_world.hpp"
#include "support/device.cuh"

namespace llmmem_tests {

/// What attention leaves.
struct attention_results {
  std::vector<std::byte> out{};
  std::vector<float> log_sum_exp{};
  std::uint32_t flag = 0;

  static constexpr float unknown_tokens = 12345;
};

/// Runs it on the device; from seeds, whether from a graph, over which tables, and whether the cache lies
/// where a table of planes says.
[[nodiscard]] inline attention_results attend_on_device(const attention_world& world, std::uint64_t seed,
                                                        cudaStream_t stream) {
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
  const device_array<float> log_sum_exp(std::vector<float>(outputs, attention_results::unknown_tokens));
  const device_array<std::uint32_t> flag(std::vector<std::uint32_t>{0});
  // Every other cache lies where a table says.
  const bool has_table = seed % 2 == 1;
  const device_array<std::byte*> planes(world.planes_in(cache.data()));
  const attention_pointers at{
      .queries = queries.data(),
      .out = out.data(),
      .cache = has_table ? nullptr : cache.data(),
      .plane_table = has_table ? planes.data() : nullptr,
      .plane_alignment = world.layout.key_scales.group != llmmem::paging::scale_group::none ? 4U
                         : world.layout.element == llmmem::dtype::fp8_e4m3                  ? 8U
                                                                                            : 16U,
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
  launch_or_replay(seed, stream, "attention",
                   [&] { return world.attend(llmmem::device_executor(stream), at, form).has_value(); });
  return {out.host(), log_sum_exp.host(), flag.host()[0]};
}

/// And on the host.
[[nodiscard]] inline attention_results attend_on_host(const attention_world& world, std::uint64_t seed) {
  attention_results made{
      world.out, std::vector<float>(world.rows * world.query_heads(), attention_results::unknown_tokens)};
  std::vector<std::byte> workspace(world.workspace_bytes());
  std::vector<std::byte> cache = world.cache;
  const attention_pointers at{.queries = world.queries.data(),
                              .out = made.out.data(),
                              .cache = cache.data(),
                              .workspace = workspace.data(),
                              .indptr = world.indptr.data(),
                              .indices = world.indices.data(),
                              .last_page_len = world.last_page_len.data(),
                              .padded = world.padded.data(),
                              .seq_lens = world.tokens.data(),
                              .sequences = world.sequences.empty() ? nullptr : world.sequences.data(),
                              .lengths = world.lengths.empty() ? nullptr : world.lengths.data(),
                              .scales = {world.scales[0].data(), world.scales[1].data()},
                              .log_sum_exp = made.log_sum_exp.data(),
                              .flag = &made.flag};
  const table_form form = seed % 3 == 0 ? table_form::padded : table_form::csr;
  require(world.attend(llmmem::host_executor{}, at, form).has_value(), "attention on the host", seed);
  return made;
}

}  // namespace llmmem_tests
