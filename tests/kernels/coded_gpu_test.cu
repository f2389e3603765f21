// Caches in codes with scales, against the host's run: attention, appends, gathers, whole blocks, and open
// blocks next to closed ones; every bit of outputs, caches and flags.
#include <llmmem/kernels/device_executor.cuh>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/kv_append.hpp>
#include <llmmem/kernels/kv_gather.hpp>
#include <llmmem/kernels/kv_quantize.hpp>
#include <llmmem/kernels/open_and_closed.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "support/attention_on_device.cuh"
#include "support/attention_world.hpp"
#include "support/coded_world.hpp"
#include "support/device.cuh"

namespace {

using namespace llmmem;
using namespace llmmem_tests;

void check_attention(std::uint64_t seed, cudaStream_t stream) {
  std::mt19937_64 random(seed);
  constexpr dtype types[] = {dtype::f32, dtype::bf16, dtype::f16};
  coded_world world(random, types[seed % 3]);
  if (seed % 7 == 0) world.codes.name_no_block(random);
  // Where a table says, if all planes are aligned to floats.
  alignas(16) static std::byte somewhere[16];
  std::uintptr_t all = 0;
  for (std::byte* const each : world.codes.planes_in(somewhere))
    all |= reinterpret_cast<std::uintptr_t>(each);
  const bool may_scatter = all % 4 == 0;
  const std::uint64_t how = may_scatter ? seed : 2 * seed;
  const attention_results here = attend_on_device(world.codes, how, stream);
  const attention_results host = attend_on_host(world.codes, how);
  require(here.out == host.out, "outputs differ from the host's", seed);
  require(here.log_sum_exp == host.log_sum_exp, "logarithms differ from the host's", seed);
  require(here.flag == host.flag, "the flag differs from the host's", seed);
}

void check_tokens(std::uint64_t seed, cudaStream_t stream) {
  std::mt19937_64 random(seed);
  constexpr std::uint32_t dims[] = {8, 40, 64, 80, 128, 256};
  const kv_layout shape{
      .layers = 2,
      .heads = static_cast<std::uint32_t>(1 + random() % 3),
      .head_dim = dims[random() % 6],
      .value_dim = random() % 2 == 0 ? dims[random() % 6] : 0,
      .block_tokens = static_cast<std::uint32_t>(1 + random() % 9),
      .heads_in_block = random() % 2 == 0 ? paging::head_order::hnd : paging::head_order::nhd,
      .order = static_cast<block_order>(random() % block_order_count)};
  kv_layout layout = any_coded_layout(random, shape, 4);
  while (!llmmem::detail::check_written_codes(layout, ""))
    layout = any_coded_layout(random, shape, 4);
  constexpr dtype types[] = {dtype::f32, dtype::bf16, dtype::f16};
  const dtype element = types[seed % 3];
  const std::size_t size = element_bytes(element);
  std::vector<std::int64_t> slots;
  for (std::int64_t i = 0; i < std::int64_t{4} * layout.block_tokens; ++i)
    if (random() % 3 != 0) slots.push_back(random() % 9 == 0 ? -1 : i);
  std::vector<std::byte> batch[2];
  std::uint64_t strides[2];
  for (std::uint32_t p = 0; p < 2; ++p) {
    strides[p] = layout.vector_elements(p) * size + seed % 3 * size;
    batch[p].resize(strides[p] * layout.heads * (slots.size() + 1));
    for (std::size_t i = 0; i + size <= batch[p].size(); i += size) {
      float value = static_cast<float>(random() % 20'001) / 10'000 - 1;
      if (seed % 4 == 0 && random() % 97 == 0) value = std::numeric_limits<float>::quiet_NaN();
      if (seed % 4 == 1 && random() % 97 == 0) value = std::numeric_limits<float>::infinity();
      if (seed % 4 == 2) value = value * 0x1p-130F;
      store_element(element, batch[p].data() + i, value);
    }
  }
  const std::vector<float> all{0.5F};
  const bool has_scale = seed % 2 == 0;
  const std::vector<std::byte> before(layout.total_bytes(4), std::byte{0xFF});
  std::vector<std::byte> host_cache = before;
  const kv_scales host_scales{has_scale ? all.data() : nullptr, has_scale ? all.data() : nullptr};
  const slot_front host_slots(slots, layout.block_tokens, 4);
  require(append_kv(host_executor{}, host_slots, {batch[0].data(), strides[0] * layout.heads, strides[0]},
                    {batch[1].data(), strides[1] * layout.heads, strides[1]}, {host_cache.data(), 4, layout},
                    1, {.element = element, .scales = host_scales})
              .has_value(),
          "an append on the host", seed);
  const device_array<std::int64_t> device_slots(slots);
  const device_array<std::byte> keys(batch[0]);
  const device_array<std::byte> values(batch[1]);
  const device_array<float> scale(all);
  const device_array<std::byte> cache(before);
  const kv_scales scales{has_scale ? scale.data() : nullptr, has_scale ? scale.data() : nullptr};
  const slot_front front(std::span<const std::int64_t>(device_slots.data(), slots.size()),
                         layout.block_tokens, 4);
  launch_or_replay(seed, stream, "an append", [&] {
    return append_kv(device_executor(stream), front, {keys.data(), strides[0] * layout.heads, strides[0]},
                     {values.data(), strides[1] * layout.heads, strides[1]}, {cache.data(), 4, layout}, 1,
                     {.element = element, .scales = scales})
        .has_value();
  });
  require(cache.host() == host_cache, "appended codes differ from the host's", seed);
  std::vector<std::byte> host_rows[2];
  for (std::uint32_t p = 0; p < 2; ++p)
    host_rows[p].assign(batch[p].size(), std::byte{0x5A});
  const device_array<std::byte> key_rows(host_rows[0]);
  const device_array<std::byte> value_rows(host_rows[1]);
  require(gather_kv(host_executor{}, host_slots, {host_rows[0].data(), strides[0] * layout.heads, strides[0]},
                    {host_rows[1].data(), strides[1] * layout.heads, strides[1]},
                    {host_cache.data(), 4, layout}, 1, {.element = element, .scales = host_scales})
              .has_value(),
          "a gather on the host", seed);
  launch_or_replay(seed, stream, "a gather", [&] {
    return gather_kv(device_executor(stream), front, {key_rows.data(), strides[0] * layout.heads, strides[0]},
                     {value_rows.data(), strides[1] * layout.heads, strides[1]}, {cache.data(), 4, layout}, 1,
                     {.element = element, .scales = scales})
        .has_value();
  });
  require(key_rows.host() == host_rows[0], "gathered keys differ from the host's", seed);
  require(value_rows.host() == host_rows[1], "gathered values differ from the host's", seed);

  // Whole blocks, back to floats.
  kv_layout floats = shape;
  floats.element = seed % 2 == 0 ? dtype::f32 : dtype::bf16;
  const std::vector<block_pair> pairs{{0, 3}, {-1, 0}, {2, 1}};
  std::vector<std::byte> host_floats(floats.total_bytes(4), std::byte{0});
  const device_array<block_pair> device_pairs(pairs);
  const device_array<std::byte> device_floats(host_floats);
  require(
      dequantize_kv_blocks(host_executor{}, {host_floats.data(), 4, floats}, {host_cache.data(), 4, layout},
                           std::span<const block_pair>(pairs), {}, host_scales)
          .has_value(),
      "blocks to floats on the host", seed);
  launch_or_replay(seed, stream, "blocks to floats", [&] {
    return dequantize_kv_blocks(device_executor(stream), {device_floats.data(), 4, floats},
                                {cache.data(), 4, layout},
                                std::span<const block_pair>(device_pairs.data(), pairs.size()), {}, scales)
        .has_value();
  });
  require(device_floats.host() == host_floats, "blocks of floats differ from the host's", seed);
  std::vector<std::byte> host_codes = before;
  const device_array<std::byte> device_codes(before);
  require(quantize_kv_blocks(host_executor{}, {host_codes.data(), 4, layout}, {host_floats.data(), 4, floats},
                             std::span<const block_pair>(pairs), {}, host_scales)
              .has_value(),
          "blocks to codes on the host", seed);
  launch_or_replay(seed, stream, "blocks to codes", [&] {
    return quantize_kv_blocks(device_executor(stream), {device_codes.data(), 4, layout},
                              {device_floats.data(), 4, floats},
                              std::span<const block_pair>(device_pairs.data(), pairs.size()), {}, scales)
        .has_value();
  });
  require(device_codes.host() == host_codes, "blocks of codes differ from the host's", seed);
}

/// The first blocks of each sequence in codes, the others in a pool of floats.
void check_open_and_closed(std::uint64_t seed, cudaStream_t stream) {
  std::mt19937_64 random(seed);
  coded_world of(random);
  const attention_world& world = of.codes;
  if (world.rows == 0 || world.tables.empty()) return;
  kv_layout pool = world.layout;
  pool.element = dtype::f32;
  pool.value_element = {};
  pool.key_scales = pool.value_scales = {};
  std::vector<std::byte> host_pool(pool.total_bytes(world.blocks));
  for (std::size_t i = 0; i + 4 <= host_pool.size(); i += 4)
    store_element(dtype::f32, host_pool.data() + i, static_cast<float>(random() % 401) / 200 - 1);
  std::vector<std::int32_t> closed;
  for (const auto& table : world.tables)
    closed.push_back(static_cast<std::int32_t>(random() % (table.size() + 1)));
  attention_options options = world.options;
  options.scales = {};
  const std::uint64_t outputs = world.rows * world.query_heads();
  const std::uint64_t bytes = open_and_closed_workspace_bytes(world.rows, world.layout, options);
  const auto attend = [&](const auto& run, std::byte* cache, std::byte* open, const std::int32_t* padded,
                          const std::int32_t* tokens, const std::int32_t* sequences,
                          const std::int32_t* count, const std::byte* queries, std::byte* out,
                          float* logarithms, std::byte* workspace) {
    const padded_table_view tables{.block_table = padded,
                                   .seq_lens = tokens,
                                   .num_sequences = static_cast<std::int32_t>(world.tables.size()),
                                   .max_blocks = world.columns,
                                   .block_tokens = static_cast<std::int32_t>(world.layout.block_tokens)};
    attention_options how = options;
    how.log_sum_exp = logarithms;
    // The open blocks have the same numbers in the pool, from the sequence's first one on: that is any block.
    return attend_open_and_closed(run, open_and_closed_tables(tables, tables, count),
                                  {.rows = world.rows, .sequences = sequences},
                                  {queries, world.query_strides[0], world.query_strides[1]},
                                  {out, world.out_strides[0], world.out_strides[1]},
                                  {cache, world.blocks, world.layout}, {open, world.blocks, pool},
                                  world.layer, {workspace, static_cast<std::size_t>(bytes)}, how)
        .has_value();
  };
  std::vector<std::byte> host_cache = world.cache;
  std::vector<std::byte> host_out = world.out;
  std::vector<float> host_logarithms(outputs, 1.0F);
  std::vector<std::byte> host_workspace(bytes);
  require(
      attend(host_executor{}, host_cache.data(), host_pool.data(), world.padded.data(), world.tokens.data(),
             world.sequences.empty() ? nullptr : world.sequences.data(), closed.data(), world.queries.data(),
             host_out.data(), host_logarithms.data(), host_workspace.data()),
      "open and closed blocks on the host", seed);
  const device_array<std::byte> cache(world.cache);
  const device_array<std::byte> open(host_pool);
  const device_array<std::int32_t> padded(world.padded);
  const device_array<std::int32_t> tokens(world.tokens);
  const device_array<std::int32_t> sequences(world.sequences);
  const device_array<std::int32_t> counts(closed);
  const device_array<std::byte> queries(world.queries);
  const device_array<std::byte> out(world.out);
  const device_array<float> logarithms(std::vector<float>(outputs, 1.0F));
  const device_array<std::byte> workspace(std::vector<std::byte>(bytes, std::byte{0xFF}));
  launch_or_replay(seed, stream, "open and closed blocks", [&] {
    return attend(device_executor(stream), cache.data(), open.data(), padded.data(), tokens.data(),
                  world.sequences.empty() ? nullptr : sequences.data(), counts.data(), queries.data(),
                  out.data(), logarithms.data(), workspace.data());
  });
  require(out.host() == host_out, "outputs over open and closed blocks differ from the host's", seed);
  require(logarithms.host() == host_logarithms, "logarithms over both differ from the host's", seed);
}

void check_all(std::uint64_t seed, cudaStream_t stream) {
  check_attention(seed, stream);
  check_tokens(seed, stream);
  if (seed % 4 == 0) check_open_and_closed(seed, stream);
}

}  // namespace

int main() {
  check_worlds(60, check_all);
}
