// Decode attention over a paged cache beside what bounds it, a device that only reads (a sum by CUB), and
// beside the same kernel over a cache whose sequences lie in one piece each: what reading through block
// tables costs; each by plain and by tensor cores. Layers of one cache take turns, as a model's do: as many
// as have twice the bytes of the device's L2 together, each as often as the others, so that none is found
// there. Each figure is the median of 15 replays of a graph, with the least and the most.
//
// LLMMEM_BENCH_GPU_MIB  the largest cache (4096), of which two must fit
// LLMMEM_BENCH_ROWS     a file for the rows as lines of JSON
#include <llmmem/kernels/batched_copy.hpp>
#include <llmmem/kernels/device_executor.cuh>
#include <llmmem/kernels/fill_verify.hpp>
#include <llmmem/kernels/paged_attention.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "support/device.cuh"
#include "support/device_bench.cuh"

namespace {

using namespace llmmem;
using namespace llmmem_bench;
using llmmem_tests::device_array;

constexpr std::uint64_t mib = 1024 * 1024;
constexpr std::uint32_t least_launches = 20;

/// A model's heads, and the sequences of a decode step.
struct decode_shape {
  std::string name;
  std::uint32_t query_heads;
  std::uint32_t heads;
  std::uint32_t head_dim;
  dtype element;
  std::uint64_t batch;
  std::uint64_t tokens;  // of each sequence
};

/// A cache's layout and the tables of all sequences, whose blocks are at random places or each in one piece.
struct decode_tables {
  kv_layout layout{};
  std::uint64_t blocks = 0;
  device_array<std::int32_t> table{};
  device_array<std::int32_t> lengths{};
  std::int32_t columns = 0;

  decode_tables(const decode_shape& of, std::uint32_t block_tokens, std::uint32_t layers) {
    layout = {.layers = layers,
              .heads = of.heads,
              .head_dim = of.head_dim,
              .block_tokens = block_tokens,
              .element = of.element};
    const std::uint64_t each = (of.tokens - 1) / block_tokens + 1;
    blocks = each * of.batch;
    columns = static_cast<std::int32_t>(each);
    std::vector<std::int32_t> order(blocks);
    std::iota(order.begin(), order.end(), 0);
    std::mt19937_64 random(1);
    std::shuffle(order.begin(), order.end(), random);
    table = device_array<std::int32_t>(order);
    lengths =
        device_array<std::int32_t>(std::vector<std::int32_t>(of.batch, static_cast<std::int32_t>(of.tokens)));
  }
  [[nodiscard]] padded_table_view view() const {
    return {.block_table = table.data(),
            .seq_lens = lengths.data(),
            .num_sequences = static_cast<std::int32_t>(lengths.size()),
            .max_blocks = columns,
            .block_tokens = static_cast<std::int32_t>(layout.block_tokens)};
  }
};

/// Queries of a step, and memory for the output.
struct decode_batch {
  device_bytes queries;
  device_bytes out;
  std::uint64_t head_bytes;
  std::uint64_t row_bytes;

  decode_batch(const decode_shape& of, cudaStream_t stream)
      : queries(of.batch * of.query_heads * of.head_dim * 2),
        out(of.batch * of.query_heads * of.head_dim * 2),
        head_bytes(std::uint64_t{of.head_dim} * 2),
        row_bytes(head_bytes * of.query_heads) {
    fill_memory(device_executor(stream), {queries.data(), static_cast<std::size_t>(queries.size())},
                below_two(1))
        .value();
  }
};

[[nodiscard]] device_time measure(stopwatch& watch, const decode_shape& of, const decode_tables& tables,
                                  const decode_batch& batch, std::byte* cache, const launch_limits& limits,
                                  attention_arithmetic arithmetic) {
  attention_options options{.query_heads = of.query_heads, .element = dtype::bf16, .arithmetic = arithmetic};
  options.split = plan_attention(of.batch, of.query_heads, tables.layout, of.tokens, limits, arithmetic);
  const device_bytes workspace(
      std::max<std::uint64_t>(attention_workspace_bytes(of.batch, tables.layout, options), 1));
  const device_executor run(watch.stream(), limits);
  const std::uint32_t layers = tables.layout.layers;
  const std::uint32_t launches = (least_launches + layers - 1) / layers * layers;
  return watch.replayed(static_cast<int>(launches), [&](int i) {
    paged_attention(run, tables.view(), {.rows = of.batch},
                    {batch.queries.data(), batch.row_bytes, batch.head_bytes},
                    {batch.out.data(), batch.row_bytes, batch.head_bytes},
                    {cache, tables.blocks, tables.layout}, static_cast<std::uint32_t>(i) % layers,
                    {workspace.data(), static_cast<std::size_t>(workspace.size())}, options)
        .value();
  });
}

/// The measured device.
struct measured_device {
  launch_limits limits{};
  std::uint64_t l2_bytes = 0;
};

void measure_shape(stopwatch& watch, device_table& table, const device_bytes& room, const decode_shape& of,
                   const measured_device& device) {
  const std::uint64_t token_bytes =
      std::uint64_t{2} * of.heads * of.head_dim * static_cast<std::uint64_t>(bits_of(of.element)) / 8;
  const std::uint64_t step = (of.tokens / 64 + 1) * 64 * of.batch * token_bytes;
  if (step > room.size()) return;
  const std::uint64_t wanted = std::max<std::uint64_t>(2 * device.l2_bytes / step + 1, 2);
  const auto layers = static_cast<std::uint32_t>(std::min(room.size() / step, wanted));
  const decode_batch batch(of, watch.stream());
  const double bytes = static_cast<double>(of.tokens * of.batch * token_bytes + 2 * batch.queries.size());
  const std::string shape = of.name + ", B " + std::to_string(of.batch) + " x " + std::to_string(of.tokens);
  const auto add = [&](const std::string& where, const decode_tables& tables) {
    for (const auto& [arithmetic, name] :
         {std::pair{attention_arithmetic::reproducible, "attention, "},
          std::pair{attention_arithmetic::tensor_cores, "by tensor cores, "}})
      table.add(name + where, shape, bytes,
                measure(watch, of, tables, batch, room.data(), device.limits, arithmetic), ceiling::read);
  };
  for (const std::uint32_t block_tokens : {16U, 64U})
    add("blocks of " + std::to_string(block_tokens), decode_tables(of, block_tokens, layers));
  // A multiple of eight, as the tokens per block above, so that the kernels use the same code.
  add("in one piece", decode_tables(of, static_cast<std::uint32_t>((of.tokens + 7) / 8 * 8), layers));
}

}  // namespace

int main() {
  const int device = llmmem_tests::require_device();
  llmmem_tests::describe(device);
  int multiprocessors = 0;
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "multiprocessors");
  int l2_bytes = 0;
  check(cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, device), "the size of L2");
  const measured_device measured{{.multiprocessors = static_cast<std::uint32_t>(multiprocessors)},
                                 static_cast<std::uint64_t>(l2_bytes)};
  const device_bytes room(largest_buffer(4096));
  const device_bytes other(room.size());
  stopwatch watch;
  device_table table;
  const device_executor run(watch.stream());
  fill_memory(run, {room.data(), static_cast<std::size_t>(room.size())}, below_two(0)).value();
  const auto copy = watch.replayed(4, [&](int /*i*/) {
    copy_few(run, std::array{copy_task{room.data(), other.data(), room.size()}}).value();
  });
  const double moved = 2.0 * static_cast<double>(room.size());
  table.set(ceiling::copy, moved / copy.us / 1000);
  table.add("copy_few", "one task of " + std::to_string(room.size() / mib) + " MiB", moved, copy);
  measure_read_ceiling(watch, table, 4, room.size(), [&](int /*i*/) { return room.data(); });
  for (const auto& [element, name] :
       {std::pair{dtype::bf16, std::string("bf16")}, std::pair{dtype::fp8_e4m3, std::string("e4m3")}}) {
    for (const auto& [batch, tokens] : std::initializer_list<std::pair<std::uint64_t, std::uint64_t>>{
             {1, 1024}, {1, 8192}, {1, 131'072}, {8, 4096}, {32, 4096}, {128, 1024}, {128, 4096}})
      measure_shape(watch, table, room, {name + ", 32 on 8 x 128", 32, 8, 128, element, batch, tokens},
                    measured);
    measure_shape(watch, table, room, {name + ", 64 on 8 x 128", 64, 8, 128, element, 32, 4096}, measured);
    measure_shape(watch, table, room, {name + ", 32 on 8 x 64", 32, 8, 64, element, 32, 4096}, measured);
  }
  measure_shape(watch, table, room, {"bf16, 32 on 32 x 128", 32, 32, 128, dtype::bf16, 32, 2048}, measured);
}
