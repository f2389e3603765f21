/// The cost of a lease of a tensor compared with one of a chunk: whole, in parts, and of tensors that share a
/// chunk. Everything is in tier 0. `floor` leases chunks of the buffer itself.

#include <llmmem/space/host.hpp>
#include <llmmem/tiered_buffer.hpp>
#include <llmmem/tiering/chunk_mapping.hpp>
#include <llmmem/tiering/tiered_tensors.hpp>

#include <benchmark/benchmark.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace {

using namespace llmmem;
using buffer_type = tiered_buffer<host_space, host_space>;
using tensors_type = tiered_tensors<buffer_type>;

constexpr std::uint64_t chunk_bytes = 4096;
constexpr std::uint32_t sharers = 8;  // of a chunk, where they are grouped

/// The layout of tensors in chunks.
enum class lying : std::uint8_t { whole, split, grouped };

struct resident {
  host_space above{{.budget = 16 << 20}};
  host_space beneath{{.budget = 16 << 20}};
  buffer_type buffer{{}, {above, 8 << 20}, {beneath, 8 << 20}};
  tensors_type tensors;
  std::vector<chunk_handle> chunks;
  std::uint32_t parts;  // of a tensor

  resident(std::uint32_t leases, lying how)
      : tensors(buffer, mapping_of(leases, how)), parts(how == lying::split ? 8 : 1) {
    for (std::uint32_t i = 0; i < tensors.mapping().tensors(); ++i) {
      tensors
          .for_each_part<access_mode::write>(tensor_id{i},
                                             [](auto& lease, const tensor_part&) {
                                               std::memset(lease.span().data(), 1, lease.span().size());
                                             })
          .value();
      chunks.push_back(tensors.chunk(tensor_id{i}, 0).value());
    }
    buffer.flush().value();
  }

 private:
  /// With the same number of parts in total.
  [[nodiscard]] static chunk_mapping mapping_of(std::uint32_t leases, lying how) {
    std::vector<tensor_size> sizes;
    const std::uint64_t bytes = how == lying::split   ? 8 * chunk_bytes
                                : how == lying::whole ? chunk_bytes
                                                      : chunk_bytes / sharers;
    for (std::uint32_t i = 0; i < leases / (how == lying::split ? 8 : 1); ++i)
      sizes.push_back({.bytes = bytes});
    return map_to_chunks(sizes, {.group_bytes = how == lying::grouped ? chunk_bytes : 0,
                                 .split_bytes = chunk_bytes,
                                 .unit = chunk_bytes});
  }
};

[[nodiscard]] std::uint32_t leases_of(const benchmark::State& state) {
  return static_cast<std::uint32_t>(state.range(0));
}

void read_chunk(benchmark::State& state) {
  resident world(leases_of(state), lying::whole);
  std::size_t at = 0;
  for (auto _ : state) {
    const auto lease = world.buffer.read(world.chunks[at]);
    benchmark::DoNotOptimize(lease->span().data());
    if (++at == world.chunks.size()) at = 0;
  }
}

void update_chunk(benchmark::State& state) {
  resident world(leases_of(state), lying::whole);
  std::size_t at = 0;
  for (auto _ : state) {
    const auto lease = world.buffer.update(world.chunks[at], 64, 64);
    benchmark::DoNotOptimize(lease->span().data());
    if (++at == world.chunks.size()) at = 0;
  }
}

/// One part after another; if each tensor has one part, one tensor after another.
void read_tensor(benchmark::State& state, lying how) {
  resident world(leases_of(state), how);
  std::uint32_t at = 0;
  std::uint32_t part = 0;
  for (auto _ : state) {
    const auto lease = world.tensors.read(tensor_id{at}, part);
    benchmark::DoNotOptimize(lease->span().data());
    if (++part != world.parts) continue;
    part = 0;
    if (++at == world.tensors.mapping().tensors()) at = 0;
  }
}

void update_tensor(benchmark::State& state, lying how) {
  resident world(leases_of(state), how);
  std::uint32_t at = 0;
  std::uint32_t part = 0;
  for (auto _ : state) {
    const auto lease = world.tensors.update(tensor_id{at}, part, byte_interval{64, 128});
    benchmark::DoNotOptimize(lease->span().data());
    if (++part != world.parts) continue;
    part = 0;
    if (++at == world.tensors.mapping().tensors()) at = 0;
  }
}

/// All tensors of a chunk are held at once, as a layer does: per tensor.
template <class Lease, class Take>
void hold_together(benchmark::State& state, Take take) {
  resident world(leases_of(state), lying::grouped);
  std::uint32_t at = 0;
  for (auto _ : state) {
    Lease held[sharers];
    for (std::uint32_t i = 0; i < sharers; ++i)
      held[i] = std::move(*take(world.tensors, tensor_id{at + i}));
    benchmark::DoNotOptimize(held[0].span().data());
    at += sharers;
    if (at == world.tensors.mapping().tensors()) at = 0;
  }
  state.SetItemsProcessed(state.iterations() * sharers);
}

void read_together(benchmark::State& state) {
  hold_together<tensors_type::read_lease>(
      state, [](tensors_type& tensors, tensor_id tensor) { return tensors.read(tensor, 0); });
}

void update_together(benchmark::State& state) {
  hold_together<tensors_type::update_lease>(state, [](tensors_type& tensors, tensor_id tensor) {
    return tensors.update(tensor, 0, byte_interval{64, 128});
  });
}

BENCHMARK(read_chunk)->Name("tensor_read/floor")->Arg(64)->Arg(1024);
BENCHMARK_CAPTURE(read_tensor, whole, lying::whole)->Name("tensor_read/llmmem")->Arg(64)->Arg(1024);
BENCHMARK_CAPTURE(read_tensor, split, lying::split)->Name("tensor_read/in_parts")->Arg(64)->Arg(1024);
BENCHMARK_CAPTURE(read_tensor, grouped, lying::grouped)->Name("tensor_read/grouped")->Arg(64)->Arg(1024);
BENCHMARK(read_together)->Name("tensor_read/held_together")->Arg(64)->Arg(1024);
BENCHMARK(update_chunk)->Name("tensor_update/floor")->Arg(64)->Arg(1024);
BENCHMARK_CAPTURE(update_tensor, whole, lying::whole)->Name("tensor_update/llmmem")->Arg(64)->Arg(1024);
BENCHMARK_CAPTURE(update_tensor, split, lying::split)->Name("tensor_update/in_parts")->Arg(64)->Arg(1024);
BENCHMARK_CAPTURE(update_tensor, grouped, lying::grouped)->Name("tensor_update/grouped")->Arg(64)->Arg(1024);
BENCHMARK(update_together)->Name("tensor_update/held_together")->Arg(64)->Arg(1024);

}  // namespace
