// The kernels on keys and values, each against the host's run of the same map: every byte of the cache, of
// the rows and of the flag, over all layouts, elements and strides, also replayed from a graph.
#include <llmmem/kernels/batched_copy.hpp>
#include <llmmem/kernels/device_executor.cuh>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/kv_append.hpp>
#include <llmmem/kernels/kv_blocks.hpp>
#include <llmmem/kernels/kv_gather.hpp>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "support/cache_world.hpp"
#include "support/device.cuh"

namespace {

using namespace llmmem;
using namespace llmmem_tests;

/// What an append and a gather of one seed run on, in the host's memory.
struct kernel_world {
  kv_layout layout{};
  std::uint64_t blocks = 0;
  dtype element = dtype::bf16;
  std::vector<std::int64_t> slots{};
  plane_of_batch planes[2];
  kv_scales scales{};
  std::vector<std::byte> cache{};

  explicit kernel_world(std::mt19937_64& random) : layout(any_layout(random)) {
    const auto [comes, stays] = any_elements(random);
    element = comes;
    layout.element = stays;
    blocks = 1 + random() % 40;
    if (random() % 3 == 0) {  // rows so long that a lane takes packets four at a time
      layout.layers = layout.heads = 1;
      layout.head_dim =
          static_cast<std::uint32_t>(random() % 2 == 0 ? 8 * (128 + random() % 128) : 600 + random() % 601);
      layout.value_dim = 0;
      blocks = 1 + random() % 3;
    }
    cache.assign(layout.total_bytes(blocks), poison);
    const std::uint64_t capacity = blocks * layout.block_tokens;
    // Every place once, from a random one on, some padding and some beyond.
    const std::uint64_t tokens = random() % (capacity + 1);
    const std::uint64_t first = random() % capacity;
    for (std::uint64_t i = 0; i < tokens; ++i) {
      const std::uint64_t what = random() % 8;
      const auto slot = static_cast<std::int64_t>((first + i) % capacity);
      slots.push_back(what == 0 ? -1 : what == 1 ? static_cast<std::int64_t>(capacity + i) : slot);
    }
    for (std::uint32_t p = 0; p < layout.planes(); ++p) {
      planes[p] = plane_of_batch(layout, p, element, tokens + 1, random);
      fill_with(planes[p].bytes, element, random);
      if (random() % 4 == 0) {  // infinities, subnormals and what is no number among them
        for (std::size_t i = 0; i < planes[p].bytes.size(); i += random() % 64)
          planes[p].bytes[i++] = static_cast<std::byte>(random());
      }
    }
    scales.is_by_head = random() % 2 == 0;
  }
};

/// The same, where a run can reach it: pointers of the host or of the device.
struct reachable {
  std::int64_t* slots;
  std::byte* planes[2];
  const float* scales[2];
  std::byte* cache;
  std::uint32_t* flag;
  std::byte* const* plane_table = nullptr;  // null: planes are where the layout has them
};

/// Where the planes of a cache begin.
std::vector<std::byte*> planes_in(std::byte* memory, const kernel_world& world) {
  std::vector<std::byte*> table;
  for (std::uint32_t p = 0; p < world.layout.planes(); ++p)
    for (std::uint32_t l = 0; l < world.layout.layers; ++l)
      table.push_back(memory + world.layout.strides(p, world.blocks).offset(l, 0, 0, 0));
  return table;
}

/// Appends all, gathers all of it into the batch again, and copies blocks.
template <class Run>
result<void> run_all(const Run& run, const kernel_world& world, const reachable& at) {
  // Addresses in a table are multiples of an element, and no more is known of them.
  const kv_memory cache = at.plane_table == nullptr
                              ? kv_memory{at.cache, world.blocks, world.layout}
                              : kv_memory{nullptr, world.blocks, world.layout, at.plane_table,
                                          static_cast<std::uint32_t>(element_bytes(world.layout.element))};
  const slot_front front({at.slots, world.slots.size()}, world.layout.block_tokens, world.blocks);
  kv_scales scales = world.scales;
  scales.keys = at.scales[0];
  scales.values = at.scales[1];
  const auto in = [&](int p) {
    return batch_vectors{at.planes[p], world.planes[p].token_stride, world.planes[p].head_stride};
  };
  const auto out = [&](int p) {
    return batch_output{at.planes[p], world.planes[p].token_stride, world.planes[p].head_stride};
  };
  const token_options options{.element = world.element, .scales = scales, .out_of_range = at.flag};
  if (auto done = append_kv(run, front, in(0), in(1), cache, 0, options); !done) return done;
  return gather_kv(run, front, out(0), out(1), cache, 0, options);
}

void check_world(std::uint64_t seed, cudaStream_t stream) {
  std::mt19937_64 random(seed);
  kernel_world world(random);
  const device_array<std::int64_t> slots(world.slots);
  const device_array<float> scales[2] = {device_array<float>(world.planes[0].scales),
                                         device_array<float>(world.planes[1].scales)};
  const device_array<std::byte> planes[2] = {device_array<std::byte>(world.planes[0].bytes),
                                             device_array<std::byte>(world.planes[1].bytes)};
  const device_array<std::byte> cache(world.cache);
  const device_array<std::uint32_t> flag(std::vector<std::uint32_t>{0});
  const bool has_table = seed % 4 == 0;
  const device_array<std::byte*> table_there(planes_in(cache.data(), world));
  const std::vector<std::byte*> table_here = planes_in(world.cache.data(), world);
  const reachable on_device{slots.data(),
                            {planes[0].data(), planes[1].data()},
                            {scales[0].data(), scales[1].data()},
                            cache.data(),
                            flag.data(),
                            has_table ? table_there.data() : nullptr};
  const device_executor device(stream);
  launch_or_replay(seed, stream, "a launch", [&] { return run_all(device, world, on_device).has_value(); });
  std::uint32_t host_flag = 0;
  const reachable on_host{world.slots.data(),
                          {world.planes[0].bytes.data(), world.planes[1].bytes.data()},
                          {world.planes[0].scales.data(), world.planes[1].scales.data()},
                          world.cache.data(),
                          &host_flag,
                          has_table ? table_here.data() : nullptr};
  require(run_all(host_executor{}, world, on_host).has_value(), "the host's run", seed);
  require(cache.host() == world.cache, "the cache differs from the host's", seed);
  for (int p = 0; p < 2; ++p)
    require(planes[p].host() == world.planes[p].bytes, "the rows differ from the host's", seed);
  require(flag.host()[0] == host_flag, "the flag differs from the host's", seed);
}

void check_blocks(std::uint64_t seed, cudaStream_t stream) {
  std::mt19937_64 random(seed);
  kv_layout layout = any_layout(random);
  if (random() % 3 == 0) layout.block_tokens *= 32;
  kv_layout other = layout;
  if (random() % 2 == 0)
    other.heads_in_block = random() % 2 == 0 ? paging::head_order::nhd : paging::head_order::hnd;
  if (random() % 2 == 0) other.order = static_cast<block_order>(random() % block_order_count);
  constexpr std::uint64_t blocks = 7;
  std::vector<std::byte> source(layout.total_bytes(blocks));
  fill_with(source, dtype::bf16, random);
  const std::vector<block_pair> pairs{{3, 0}, {-1, 1}, {0, 6}, {blocks, 2}, {5, 3}};
  std::vector<std::byte> expected(other.total_bytes(blocks), poison);
  const device_array<std::byte> from(source);
  const device_array<std::byte> to(expected);
  const device_array<block_pair> on_device(pairs);
  const auto copy = [&](const auto& run, std::byte* there, std::byte* here, const block_pair* list) {
    return copy_kv_blocks(run, {there, blocks, other}, {here, blocks, layout}, {list, pairs.size()})
        .has_value();
  };
  require(copy(device_executor(stream), to.data(), from.data(), on_device.data()), "block copy", seed);
  require(copy(host_executor{}, expected.data(), source.data(), pairs.data()), "block copy on the host",
          seed);
  check(cudaStreamSynchronize(stream), "block copy");
  require(to.host() == expected, "copied blocks differ from the host's", seed);
}

void check_batches(std::uint64_t seed, cudaStream_t stream) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> source(300'000);
  fill_with(source, dtype::fp8_e4m3, random);
  std::vector<std::byte> expected(source.size(), poison);
  const device_array<std::byte> from(source);
  const device_array<std::byte> to(expected);
  const std::uint64_t multiple = std::uint64_t{1} << seed % 5;
  std::vector<copy_task> tasks;
  std::uint64_t longest = 0;
  for (std::uint64_t at = 0; at + 40'000 < source.size() && tasks.size() < 200;) {
    const std::uint64_t bytes = random() % (random() % 9 == 0 ? 40'000 : 500);
    const std::uint64_t first = random() % (source.size() - bytes) / multiple * multiple;
    tasks.push_back({from.data() + first, to.data() + at, bytes});
    for (std::uint64_t i = 0; i < bytes; ++i)
      expected[at + i] = source[first + i];
    longest = std::max(longest, bytes);
    at = (at + bytes + multiple - 1) / multiple * multiple;
  }
  const device_array<copy_task> on_device(tasks);
  const auto aligned = static_cast<std::uint32_t>(multiple);
  const device_executor run(stream);
  const bool is_well =
      seed % 2 == 0
          ? copy_few(run, tasks).has_value()
          : copy_batch(run, {on_device.data(), tasks.size()}, longest, {aligned, aligned}).has_value();
  require(is_well, "batched copy", seed);
  check(cudaStreamSynchronize(stream), "batched copy");
  require(to.host() == expected, "a batched copy differs", seed);
}

}  // namespace

int main() {
  check_worlds(400, [](std::uint64_t seed, cudaStream_t stream) {
    check_world(seed, stream);
    check_blocks(seed, stream);
    check_batches(seed, stream);
  });
}
