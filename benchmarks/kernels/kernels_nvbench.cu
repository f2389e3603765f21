// The movers and attention under NVBench, which clears the L2 cache before each launch and measures until the
// noise is small: rows to compare with those of kernels_gpu_bench.cu and attention_gpu_bench.cu, and with
// other libraries' NVBench rows. Shapes are axes: --axis tokens=4096, for example; --list names all.
#include <llmmem/kernels/batched_copy.hpp>
#include <llmmem/kernels/block_checksum.hpp>
#include <llmmem/kernels/device_executor.cuh>
#include <llmmem/kernels/fill_verify.hpp>
#include <llmmem/kernels/kv_append.hpp>
#include <llmmem/kernels/kv_blocks.hpp>
#include <llmmem/kernels/kv_gather.hpp>
#include <llmmem/kernels/paged_attention.hpp>

#include <nvbench/nvbench.cuh>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "support/device.cuh"
#include "support/device_bench.cuh"

namespace {

using namespace llmmem;
using llmmem_tests::check;
using llmmem_tests::device_array;

constexpr std::uint32_t block_tokens = 16;

[[nodiscard]] kv_layout layout_of(const std::string& element) {
  return {.layers = 1,
          .heads = 8,
          .head_dim = 128,
          .block_tokens = block_tokens,
          .element = element == "fp8" ? dtype::fp8_e4m3 : dtype::bf16};
}

/// Memory of a device, random numbers below two as bf16 and as fp8.
[[nodiscard]] device_array<std::byte> any_memory(std::uint64_t bytes) {
  device_array<std::byte> out(std::vector<std::byte>(bytes, std::byte{0}));
  fill_memory(device_executor(cudaStream_t{}), {out.data(), out.size()}, llmmem_bench::below_two(1)).value();
  check(cudaDeviceSynchronize(), "memory");
  return out;
}

[[nodiscard]] std::vector<std::int32_t> any_order(std::uint64_t count) {
  std::vector<std::int32_t> out(count);
  std::iota(out.begin(), out.end(), 0);
  std::mt19937_64 random(1);
  std::shuffle(out.begin(), out.end(), random);
  return out;
}

/// New tokens into a layer, or its tokens out of it, by slots in random order.
template <bool Appends>
void tokens(nvbench::state& state) {
  const auto count = static_cast<std::uint64_t>(state.get_int64("tokens"));
  const kv_layout layout = layout_of(state.get_string("element"));
  const std::uint64_t blocks = (count + block_tokens - 1) / block_tokens;
  const std::vector<std::int32_t> order = any_order(count);
  const device_array<std::int64_t> slots(std::vector<std::int64_t>(order.begin(), order.end()));
  const slot_front front({slots.data(), slots.size()}, block_tokens, blocks);
  const auto cache = any_memory(layout.total_bytes(blocks));
  const auto keys = any_memory(count * 2048);
  const auto values = any_memory(count * 2048);
  const device_array<float> scale(std::vector<float>{1.5F});
  const token_options options{.element = dtype::bf16,
                              .scales = {.keys = scale.data(), .values = scale.data()}};
  const kv_memory memory{cache.data(), blocks, layout};
  const std::uint64_t rows = count * 4096;
  const std::uint64_t stored = count * layout.layer_bytes() / block_tokens;
  state.add_global_memory_reads<std::byte>((Appends ? rows : stored) + count * 8);
  state.add_global_memory_writes<std::byte>(Appends ? stored : rows);
  state.exec([&](nvbench::launch& launch) {
    const device_executor run(launch.get_stream().get_stream());
    if constexpr (Appends) {
      append_kv(run, front, batch_vectors{keys.data(), 2048, 256}, batch_vectors{values.data(), 2048, 256},
                memory, 0, options)
          .value();
    } else {
      gather_kv(run, front, batch_output{keys.data(), 2048, 256}, batch_output{values.data(), 2048, 256},
                memory, 0, options)
          .value();
    }
  });
}
void append_tokens(nvbench::state& state) {
  tokens<true>(state);
}
void gather_tokens(nvbench::state& state) {
  tokens<false>(state);
}
NVBENCH_BENCH(append_tokens)
    .add_int64_axis("tokens", {256, 16384})
    .add_string_axis("element", {"bf16", "fp8"});
NVBENCH_BENCH(gather_tokens)
    .add_int64_axis("tokens", {256, 16384})
    .add_string_axis("element", {"bf16", "fp8"});

/// Blocks of a layout into one that orders heads and tokens otherwise, or the same.
void copy_blocks(nvbench::state& state) {
  const auto count = static_cast<std::uint64_t>(state.get_int64("blocks"));
  const kv_layout layout = layout_of("bf16");
  kv_layout other = layout;
  if (state.get_string("to") == "hnd") other.heads_in_block = paging::head_order::hnd;
  const auto from = any_memory(layout.total_bytes(count));
  const auto to = any_memory(layout.total_bytes(count));
  const std::vector<std::int32_t> order = any_order(count);
  std::vector<block_pair> list(count);
  for (std::uint64_t i = 0; i < count; ++i)
    list[i] = {order[i], static_cast<std::int32_t>(i)};
  const device_array<block_pair> pairs(list);
  state.add_global_memory_reads<std::byte>(from.size());
  state.add_global_memory_writes<std::byte>(to.size());
  state.exec([&](nvbench::launch& launch) {
    copy_kv_blocks(device_executor(launch.get_stream().get_stream()), {to.data(), count, other},
                   {from.data(), count, layout}, {pairs.data(), pairs.size()})
        .value();
  });
}
NVBENCH_BENCH(copy_blocks).add_int64_axis("blocks", {64, 4096}).add_string_axis("to", {"nhd", "hnd"});

/// Sums of 64 KiB each, from addresses that are multiples of `aligned`.
template <class Sum, class Act>
void sums(nvbench::state& state, const Act& act) {
  constexpr std::uint64_t bytes = 64 * 1024;
  const auto count = static_cast<std::uint64_t>(state.get_int64("blocks"));
  const auto skew = static_cast<std::uint64_t>(state.get_int64("aligned")) % 16;
  const auto memory = any_memory(count * bytes + 16);
  const device_array<Sum> out(std::vector<Sum>(count, Sum{}));
  const strided_blocks blocks({memory.data() + skew, bytes, count}, bytes);
  state.add_global_memory_reads<std::byte>(count * bytes);
  state.exec([&](nvbench::launch& launch) {
    act(device_executor(launch.get_stream().get_stream()), blocks, std::span<Sum>(out.data(), count)).value();
  });
}
void sum_crc32c(nvbench::state& state) {
  sums<std::uint32_t>(
      state, [](const auto& run, const auto& blocks, auto out) { return crc32c_blocks(run, blocks, out); });
}
void sum_digest(nvbench::state& state) {
  sums<std::uint64_t>(
      state, [](const auto& run, const auto& blocks, auto out) { return digest_blocks(run, blocks, out); });
}
NVBENCH_BENCH(sum_crc32c).add_int64_axis("blocks", {4, 4096}).add_int64_axis("aligned", {16, 4, 1});
NVBENCH_BENCH(sum_digest).add_int64_axis("blocks", {4, 4096}).add_int64_axis("aligned", {16, 4, 1});

/// A decode step of 8 sequences, with 32 query heads.
void attend(nvbench::state& state) {
  constexpr std::uint64_t sequences = 8;
  constexpr std::uint32_t query_heads = 32;
  const auto length = static_cast<std::uint64_t>(state.get_int64("tokens"));
  const kv_layout layout = layout_of(state.get_string("element"));
  const std::uint64_t each = (length + block_tokens - 1) / block_tokens;
  const std::uint64_t blocks = each * sequences;
  const device_array<std::int32_t> table(any_order(blocks));
  const device_array<std::int32_t> lengths(
      std::vector<std::int32_t>(sequences, static_cast<std::int32_t>(length)));
  const padded_table_view tables{.block_table = table.data(),
                                 .seq_lens = lengths.data(),
                                 .num_sequences = static_cast<std::int32_t>(sequences),
                                 .max_blocks = static_cast<std::int32_t>(each),
                                 .block_tokens = static_cast<std::int32_t>(block_tokens)};
  attention_options options{.query_heads = query_heads,
                            .element = dtype::bf16,
                            .arithmetic = state.get_string("arithmetic") == "tensor"
                                              ? attention_arithmetic::tensor_cores
                                              : attention_arithmetic::reproducible};
  options.split = plan_attention(sequences, query_heads, layout, length, {}, options.arithmetic);
  const auto cache = any_memory(layout.total_bytes(blocks));
  const auto queries = any_memory(sequences * query_heads * 256);
  const auto out = any_memory(sequences * query_heads * 256);
  const auto workspace =
      any_memory(std::max<std::uint64_t>(attention_workspace_bytes(sequences, layout, options), 1));
  state.add_global_memory_reads<std::byte>(sequences * length * layout.layer_bytes() / block_tokens +
                                           queries.size());
  state.add_global_memory_writes<std::byte>(out.size());
  state.exec([&](nvbench::launch& launch) {
    paged_attention(device_executor(launch.get_stream().get_stream()), tables, {.rows = sequences},
                    {queries.data(), query_heads * 256, 256}, {out.data(), query_heads * 256, 256},
                    {cache.data(), blocks, layout}, 0, {workspace.data(), workspace.size()}, options)
        .value();
  });
}
NVBENCH_BENCH(attend)
    .add_int64_axis("tokens", {1024, 16384})
    .add_string_axis("element", {"bf16", "fp8"})
    .add_string_axis("arithmetic", {"plain", "tensor"});

}  // namespace

NVBENCH_MAIN
