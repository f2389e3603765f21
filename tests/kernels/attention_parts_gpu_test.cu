// Parts of attention and their merge, against the host's run of the same bodies: every bit of sums, states,
// outputs and logarithms, over all shapes, elements and tables, ranges and context-parallel ranks.
#include <llmmem/kernels/device_executor.cuh>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/merge_attention.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "support/attention_parts_world.hpp"
#include "support/attention_world.hpp"
#include "support/device.cuh"

namespace {

using namespace llmmem;
using namespace llmmem_tests;

[[nodiscard]] bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

/// A part in a device's memory.
struct device_part {
  part_memory host;
  device_array<float> sums{host.sums};
  device_array<float> states{host.states};

  [[nodiscard]] attention_part_output output() const {
    return host.at(reinterpret_cast<std::byte*>(sums.data()), reinterpret_cast<std::byte*>(states.data()));
  }
};

/// Writes a part of a world on the device; from seeds, whether from a graph, and over which tables.
[[nodiscard]] device_part attend_on_device(const attention_world& world, const part_memory& like,
                                           const std::vector<std::int32_t>& begins,
                                           const std::vector<std::int32_t>& ends, std::uint64_t seed,
                                           cudaStream_t stream) {
  device_part made{like};
  const device_array<std::byte> queries(world.queries);
  const device_array<std::byte> cache(world.cache);
  const device_array<std::byte> workspace(std::vector<std::byte>(world.workspace_bytes(), std::byte{0xFF}));
  const device_array<std::int32_t> indptr(world.indptr);
  const device_array<std::int32_t> indices(world.indices);
  const device_array<std::int32_t> last_page_len(world.last_page_len);
  const device_array<std::int32_t> padded(world.padded);
  const device_array<std::int32_t> tokens(world.tokens);
  const device_array<std::int32_t> sequences(world.sequences);
  const device_array<std::int32_t> lengths(world.lengths);
  const device_array<std::int32_t> first(begins);
  const device_array<std::int32_t> last(ends);
  const device_array<float> scales[2] = {device_array<float>(world.scales[0]),
                                         device_array<float>(world.scales[1])};
  const device_array<std::uint32_t> flag(std::vector<std::uint32_t>{0});
  const attention_pointers at{.queries = queries.data(),
                              .cache = cache.data(),
                              .workspace = workspace.data(),
                              .indptr = indptr.data(),
                              .indices = indices.data(),
                              .last_page_len = last_page_len.data(),
                              .padded = padded.data(),
                              .seq_lens = tokens.data(),
                              .sequences = sequences.data(),
                              .lengths = lengths.data(),
                              .begins = first.data(),
                              .ends = last.data(),
                              .scales = {scales[0].data(), scales[1].data()},
                              .flag = flag.data()};
  const table_form form = seed % 3 == 0 ? table_form::padded : table_form::csr;
  launch_or_replay(seed, stream, "a part of attention", [&] {
    return world.attend_part(device_executor(stream), at, form, made.output()).has_value();
  });
  require(flag.host()[0] == 0, "a token has no place", seed);
  return made;
}

/// Outputs and logarithms, side by side.
struct merged_memory {
  std::vector<float> out;
  std::vector<float> logarithms;

  explicit merged_memory(const attention_part_shape& shape)
      : out(shape.rows * shape.query_heads * shape.value_dim, 12345.0F),
        logarithms(shape.rows * shape.query_heads, 12345.0F) {}
};
template <log_base Base>
[[nodiscard]] merged_attention<Base> merged_in(const attention_part_shape& shape, float* out,
                                               float* logarithms) {
  const std::uint64_t vector = std::uint64_t{shape.value_dim} * sizeof(float);
  merged_attention<Base> of;
  of.out = {reinterpret_cast<std::byte*>(out), vector * shape.query_heads, vector};
  of.log_sum_exp = {logarithms, shape.query_heads * sizeof(float), sizeof(float)};
  return of;
}

/// Merges on both, to a part and to outputs, imports these again, and compares.
template <log_base Base>
void check_merge(const attention_part_shape& shape, std::vector<part_memory>& here,
                 const std::vector<device_part>& there, std::uint64_t seed, cudaStream_t stream) {
  std::vector<attention_part> on_host;
  std::vector<attention_part> on_device;
  for (std::size_t i = 0; i < here.size(); ++i) {
    on_host.push_back(here[i].part());
    on_device.push_back(there[i].output());
  }
  const device_executor run(stream);
  std::vector<float> sinks(shape.query_heads);
  for (std::size_t i = 0; i < sinks.size(); ++i)
    sinks[i] = static_cast<float>(i % 5) - 2;
  const device_array<float> sinks_there(sinks);
  const bool has_sinks = seed % 2 == 0;

  merged_memory host(shape);
  merged_attention<Base> to = merged_in<Base>(shape, host.out.data(), host.logarithms.data());
  if (has_sinks) to.sinks = sinks.data();
  require(merge_attention(host_executor{}, shape, on_host, to).has_value(), "a merge on the host", seed);
  const device_array<float> out(std::vector<float>(host.out.size(), 12345.0F));
  const device_array<float> logarithms(std::vector<float>(host.logarithms.size(), 12345.0F));
  merged_attention<Base> to_there = merged_in<Base>(shape, out.data(), logarithms.data());
  if (has_sinks) to_there.sinks = sinks_there.data();
  launch_or_replay(seed, stream, "a merge",
                   [&] { return merge_attention(run, shape, on_device, to_there).has_value(); });
  require(same_bits(out.host(), host.out), "merged outputs differ from the host's", seed);
  require(same_bits(logarithms.host(), host.logarithms), "merged logarithms differ from the host's", seed);

  part_memory all(shape, seed);
  require(merge_attention(host_executor{}, shape, on_host, all.output()).has_value(), "a part on the host",
          seed);
  const device_part all_there{part_memory(shape, seed)};
  require(merge_attention(run, shape, on_device, all_there.output()).has_value(), "a merge to a part", seed);
  check(cudaStreamSynchronize(stream), "a merge to a part");
  require(same_bits(all_there.sums.host(), all.sums), "merged sums differ from the host's", seed);
  require(same_bits(all_there.states.host(), all.states), "merged states differ from the host's", seed);

  part_memory imported(shape, seed + 1);
  require(
      import_attention(host_executor{}, shape,
                       foreign_attention<Base>{.out = {to.out.data, to.out.token_stride, to.out.head_stride},
                                               .log_sum_exp = {to.log_sum_exp.data, to.log_sum_exp.row_stride,
                                                               to.log_sum_exp.head_stride}},
                       imported.output())
          .has_value(),
      "an import on the host", seed);
  const device_part imported_there{part_memory(shape, seed + 1)};
  require(
      import_attention(run, shape,
                       foreign_attention<Base>{
                           .out = {to_there.out.data, to_there.out.token_stride, to_there.out.head_stride},
                           .log_sum_exp = {to_there.log_sum_exp.data, to_there.log_sum_exp.row_stride,
                                           to_there.log_sum_exp.head_stride}},
                       imported_there.output())
          .has_value(),
      "an import", seed);
  check(cudaStreamSynchronize(stream), "an import");
  require(same_bits(imported_there.sums.host(), imported.sums), "imported sums differ from the host's", seed);
  require(same_bits(imported_there.states.host(), imported.states), "imported states differ", seed);
}

void check_world(std::uint64_t seed, cudaStream_t stream) {
  std::mt19937_64 random(seed);
  attention_world world(random);
  if (world.lengths.empty() && world.sequences.empty()) world.lengths = world.tokens;
  const bool is_dealt = !world.lengths.empty() && seed % 4 == 1;
  const attention_part_shape shape = part_shape_of(world);
  const auto count = static_cast<std::uint32_t>(1 + random() % 4);
  const row_cuts cuts(random, world.rows, count);
  std::vector<part_memory> here;
  std::vector<device_part> there;
  for (std::uint32_t i = 0; i < count; ++i) {
    const attention_world part =
        is_dealt ? dealt(world, {.cp_rank = i, .cp_size = count, .cp_interleave = 1 + 3 * (i % 2 + 1) % 4})
                 : world;
    const part_memory empty(shape, random());
    here.push_back(empty);
    require(attend_part(part, host_executor{}, seed % 3 == 0 ? table_form::padded : table_form::csr,
                        here.back(), cuts.begins[i].data(), cuts.ends[i].data()) == 0,
            "a token has no place on the host", seed);
    there.push_back(attend_on_device(part, empty, cuts.begins[i], cuts.ends[i], seed, stream));
    require(same_bits(there.back().sums.host(), here.back().sums), "sums differ from the host's", seed);
    require(same_bits(there.back().states.host(), here.back().states), "states differ from the host's", seed);
  }
  if (seed % 2 == 0) {
    check_merge<log_base::two>(shape, here, there, seed, stream);
  } else {
    check_merge<log_base::e>(shape, here, there, seed / 2, stream);
  }
}

}  // namespace

int main() {
  check_worlds(200, check_world);
}
