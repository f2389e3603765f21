// The library's queues, fences, rings, pools and tiers over streams that do their work in any order a seed
// chooses. Nothing here waits but where the library's contracts say that a wait is needed, places are few and
// used again at once, and every byte is held to what was sent: a wait that is missing, here or in the
// library, becomes a wrong byte or a fault with some seed.
#include <llmmem/device/cuda.hpp>
#include <llmmem/kernels/batched_copy.hpp>
#include <llmmem/kernels/device_executor.cuh>
#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/block_storage.hpp>
#include <llmmem/paging/upload_ring.hpp>
#include <llmmem/tiered_buffer.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <new>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "ptx_machine/hooks.hpp"
#include "support/device.cuh"

namespace {

using namespace llmmem;
using llmmem_tests::require;
using device_point = device_fence<cuda_runtime>;

constexpr device_id first{0};
constexpr std::uint64_t bytes = 2048;
constexpr std::align_val_t line{256};

struct cache_traits : paged_traits {
  using fence = device_point;
};

/// The engine's own stream.
struct compute_stream {
  cudaStream_t stream{};
  compute_stream() {
    llmmem_tests::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
  }
  compute_stream(const compute_stream&) = delete;
  ~compute_stream() { static_cast<void>(cudaStreamDestroy(stream)); }
};

void draw(std::span<std::byte> to, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  for (std::byte& each : to)
    each = static_cast<std::byte>(random());
}
[[nodiscard]] bool is_drawn(std::span<const std::byte> what, std::uint64_t seed) {
  std::vector<std::byte> wanted(what.size());
  draw(wanted, seed);
  return std::ranges::equal(what, wanted);
}
[[nodiscard]] result<void> move(const device_executor& run, std::byte* to, const std::byte* from) {
  const copy_task task{from, to, bytes};
  return copy_few(run, std::span(&task, 1));
}

/// Steps of an engine: a table goes up through a ring of two slots and a batch beside it, kernels take them
/// to a block of the cache and to memory that is allocated for the step, and a queue brings both down.
/// Blocks, slots and, for most seeds, places for events are fewer than steps.
void check_steps(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  device_space gpu(first, {.budget = 8 << 20});
  pinned_space host({.budget = 8 << 20});
  const compute_stream stream;
  const auto depth = [&] {
    return device_queue_options{.depth = static_cast<std::uint32_t>(1 + random() % 6)};
  };
  device_queue copies(gpu, first, depth());
  device_queue copies_too(gpu, first, depth());
  device_queue compute(gpu, first, stream.stream, depth());
  device_queue down(gpu, first, depth());
  const device_executor run(stream.stream);
  paged_allocator<cache_traits> pool({.blocks = 3, .block_tokens = 16});
  const std::uint64_t blocks = pool.physical_blocks();
  block_storage<device_space> storage(gpu, blocks, bytes);
  upload_ring<pinned_space, device_space, device_point> ring(host, gpu, {.slot_bytes = bytes, .slots = 2});
  constexpr std::uint64_t steps = 12;
  space_buffer<pinned_space> batches(host, steps, bytes, line);
  space_buffer<device_space> batch(gpu, steps, bytes, line);
  space_buffer<pinned_space> came(host, 2 * steps, bytes, line);
  const auto place = [&](std::uint64_t number) { return came.range().span().subspan(number * bytes, bytes); };
  const auto sent = [&](std::uint64_t number) { return seed + number / 2 + (number % 2 == 0 ? 0 : 1000); };
  const std::vector<token_id> tokens(16, token_id{7});

  std::deque<std::pair<device_space::range_type, device_point>> temporary;
  std::vector<device_point> all;
  for (std::uint64_t step = 0; step < steps; ++step) {
    const auto slot = ring.acquire_wait().value();
    draw(slot.staging.span(), seed + step);
    const device_point there = ring.upload(copies, slot, bytes).value();
    const auto staged = batches.range().span().subspan(step * bytes, bytes);
    const auto here = batch.range().subrange(step * bytes, bytes).value();
    draw(staged, seed + 1000 + step);
    const device_point there_too = copies_too.copy_in_async(here, staged, {}).value();
    compute.follow(std::array{there, there_too}).value();

    const sequence_id sequence = pool.create().value();
    std::size_t oldest = all.size() < 6 ? 0 : all.size() - 6;
    while (!pool.append(sequence, tokens)) {
      pool.collect();
      if (oldest < all.size()) all[oldest++].wait();
    }
    const std::uint64_t number = to_index(pool.blocks(sequence)[0]);
    const auto block = storage.range().subrange(number * bytes, bytes).value();
    if (temporary.size() == 3) {
      temporary.front().second.wait();
      gpu.deallocate(temporary.front().first);
      temporary.pop_front();
    }
    const auto room = gpu.try_allocate(bytes, 256).value();

    require(move(run, block.data, slot.target.data).has_value(), "a kernel", seed);
    require(move(run, room.data, here.data).has_value(), "a kernel", seed);
    const std::array done{compute.mark().value()};
    ring.release_after(slot, done[0]).value();
    all.push_back(down.copy_out_async(place(2 * step), block, done).value());
    pool.release_after(sequence, all.back()).value();
    all.push_back(down.copy_out_async(place(2 * step + 1), room, done).value());
    temporary.emplace_back(room, all.back());
    // Asked now and then: what has passed is there.
    const std::uint64_t some = random() % all.size();
    if (random() % 2 == 0 && all[some].ready())
      require(is_drawn(place(some), sent(some)), "what is ready is there", seed);
  }
  all.back().wait();
  for (std::uint64_t n = 0; n < 2 * steps; ++n)
    require(is_drawn(place(n), sent(n)), "what came is what was sent", seed);
  for (const auto& [range, point] : temporary)
    gpu.deallocate(range);
  pool.collect();
  require(pool.stats().free_blocks == 3, "every block came back", seed);
}

/// Chunks of a buffer whose first tier is a device with two places: kernels read and write leases, which end
/// while the kernels may still run.
void check_tiers(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  streamed_device_space gpu(first, {.budget = 2 * bytes + 4 * bytes}, {.depth = 2});
  device_space beside(first, {.budget = 1 << 20});
  pinned_space host({.budget = 1 << 20});
  const compute_stream stream;
  device_queue compute(beside, first, stream.stream, {.depth = 3});
  const device_executor run(stream.stream);
  space_buffer<device_space> values(beside, 6, bytes, line);
  space_buffer<device_space> seen(beside, 16, bytes, line);
  space_buffer<pinned_space> staged(host, 6, bytes, line);
  space_buffer<pinned_space> came(host, 16, bytes, line);
  draw(staged.range().span(), seed);
  compute.copy_in_async(values.range(), staged.range().span(), {}).value().wait();
  const auto value_of = [&](std::size_t n) { return staged.range().span().subspan(n * bytes, bytes); };

  tiered_buffer<streamed_device_space, pinned_space> buffer({}, {gpu, 2 * bytes}, {host, 16 * bytes});
  std::vector<chunk_handle> chunks;
  std::vector<std::size_t> wanted;
  const auto before_kernel = [&] {
    const device_point there = gpu.queue().mark().value();
    compute.follow(std::span(&there, 1)).value();
  };
  const auto behind_kernel = [&] {
    const device_point used = compute.mark().value();
    gpu.queue().follow(std::span(&used, 1)).value();
  };
  for (std::size_t n = 0; n < 4; ++n) {
    chunks.push_back(buffer.create(bytes).value());
    const auto lease = buffer.write(chunks.back()).value();
    before_kernel();
    require(move(run, lease.range().data, values.range().data + n * bytes).has_value(), "a kernel", seed);
    behind_kernel();
    wanted.push_back(n);
  }
  std::vector<std::size_t> read;
  for (std::size_t step = 0; step < 16; ++step) {
    const std::size_t at = random() % chunks.size();
    if (random() % 3 == 0) {
      const auto lease = buffer.write(chunks[at]).value();
      wanted[at] = random() % 6;
      before_kernel();
      require(move(run, lease.range().data, values.range().data + wanted[at] * bytes).has_value(), "a kernel",
              seed);
      behind_kernel();
    }
    const auto lease = buffer.read(chunks[at]).value();
    before_kernel();
    require(move(run, seen.range().data + step * bytes, lease.range().data).has_value(), "a kernel", seed);
    behind_kernel();
    read.push_back(wanted[at]);
  }
  compute.copy_out_async(came.range().span(), seen.range(), {}).value().wait();
  for (std::size_t step = 0; step < 16; ++step)
    require(std::ranges::equal(came.range().span().subspan(step * bytes, bytes), value_of(read[step])),
            "a kernel sees the chunk that it leased", seed);
}

}  // namespace

int main() {
  const std::uint64_t seeds = llmmem_tests::wanted_worlds(500);
  const auto check = [](std::uint64_t seed) {
    check_steps(seed);
    check_tiers(seed);
  };
  check(1);
  ptx_machine_be_late(1);
  check(1);
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    ptx_machine_use_seed(seed);
    check(seed);
  }
  ptx_machine_use_seed(0);
  std::printf("%llu seeds: every byte is where its fences say\n", static_cast<unsigned long long>(seeds));
}
