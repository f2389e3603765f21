// Every kernel of the library on one device, beside what bounds it: copies of the device by its own engine
// and by a kernel with 16-byte accesses, of which the faster is the ceiling; a sum by CUB, which is that of
// kernels that only read; copies to and from pinned memory, of which no share is told; the least that a
// launch takes. Launches rotate over four sets of buffers, which pass any cache where a set has 16 MiB and
// more; each figure is the median of 15 replays of a graph, with the least and the most.
//
// LLMMEM_BENCH_GPU_MIB  the largest buffers (1024), of which eight must fit
// LLMMEM_BENCH_ROWS     a file for the rows as lines of JSON
#include <llmmem/device/cuda.hpp>
#include <llmmem/kernels/batched_copy.hpp>
#include <llmmem/kernels/block_checksum.hpp>
#include <llmmem/kernels/device_executor.cuh>
#include <llmmem/kernels/fill_verify.hpp>
#include <llmmem/kernels/kv_append.hpp>
#include <llmmem/kernels/kv_blocks.hpp>
#include <llmmem/kernels/kv_gather.hpp>
#include <llmmem/kernels/measured_copy_plan.cuh>
#include <llmmem/kernels/plane_split.hpp>
#include <llmmem/kernels/quantize_groups.hpp>
#include <llmmem/kernels/xor_blocks.hpp>

#include <cub/device/device_memcpy.cuh>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "support/device.cuh"
#include "support/device_bench.cuh"

namespace {

using namespace llmmem;
using namespace llmmem_bench;
using llmmem_tests::device_array;

constexpr std::uint64_t kib = 1024;
constexpr std::uint64_t mib = 1024 * kib;
constexpr int sets = 4;
constexpr int launches = 20;

[[nodiscard]] std::string size_text(std::uint64_t bytes) {
  return bytes >= mib ? std::to_string(bytes / mib) + " MiB" : std::to_string(bytes / kib) + " KiB";
}

/// Four buffers to read and four to write, of random bytes.
struct buffers {
  std::vector<device_bytes> from{};
  std::vector<device_bytes> to{};

  buffers(std::uint64_t bytes, cudaStream_t stream) {
    for (int i = 0; i < sets; ++i) {
      from.emplace_back(bytes);
      to.emplace_back(bytes);
      fill_memory(device_executor(stream), {from.back().data(), bytes},
                  seeded_pattern{.seed = static_cast<std::uint64_t>(i)})
          .value();
    }
    check(cudaStreamSynchronize(stream), "random bytes");
  }
  [[nodiscard]] std::byte* in(int i) const { return from[static_cast<std::size_t>(i % sets)].data(); }
  [[nodiscard]] std::byte* out(int i) const { return to[static_cast<std::size_t>(i % sets)].data(); }
};

void measure_ceilings(stopwatch& watch, device_table& table, const buffers& all, std::uint64_t bytes) {
  const device_executor run(watch.stream());
  const auto engine = watch.replayed(launches, [&](int i) {
    check(cudaMemcpyAsync(all.out(i), all.in(i), bytes, cudaMemcpyDeviceToDevice, watch.stream()), "copy");
  });
  const auto kernel = watch.replayed(launches, [&](int i) {
    const std::array task{copy_task{all.in(i), all.out(i), bytes}};
    copy_few(run, task).value();
  });
  const double moved = 2.0 * static_cast<double>(bytes);
  table.set(ceiling::copy, moved / std::min(engine.us, kernel.us) / 1000);
  table.add("cudaMemcpyAsync", "D2D " + size_text(bytes), moved, engine);
  table.add("copy_few", "one task of " + size_text(bytes), moved, kernel);
  measure_read_ceiling(watch, table, launches, bytes, [&](int i) { return all.in(i); });
  const auto floor =
      watch.replayed(launches, [&](int i) { fill_memory(run, {all.out(i), 16}, poison_pattern{}).value(); });
  table.add("launch floor", "16 bytes filled", 0, floor);
}

void measure_host_copies(stopwatch& watch, device_table& table, const buffers& all, std::uint64_t room) {
  const std::uint64_t bytes = std::min(room, 256 * mib);
  pinned_space pinned(pinned_source<cuda_runtime>(), {.budget = 2 * bytes});
  const auto host = pinned.try_allocate(2 * bytes, 4096).value();
  stopwatch other;
  const auto up = watch.called(2, [&](int i) {
    check(cudaMemcpyAsync(all.out(i), host.data, bytes, cudaMemcpyHostToDevice, watch.stream()), "up");
  });
  table.add("pinned to device", size_text(bytes), static_cast<double>(bytes), up, ceiling::none);
  const auto down = watch.called(2, [&](int i) {
    check(cudaMemcpyAsync(host.data, all.in(i), bytes, cudaMemcpyDeviceToHost, watch.stream()), "down");
  });
  table.add("device to pinned", size_text(bytes), static_cast<double>(bytes), down, ceiling::none);
  cudaEvent_t forked{};
  cudaEvent_t joined{};
  check(cudaEventCreateWithFlags(&forked, cudaEventDisableTiming), "an event");
  check(cudaEventCreateWithFlags(&joined, cudaEventDisableTiming), "an event");
  const auto both = watch.called(1, [&](int i) {
    check(cudaEventRecord(forked, watch.stream()), "fork");
    check(cudaStreamWaitEvent(other.stream(), forked, 0), "fork");
    check(cudaMemcpyAsync(all.out(i), host.data, bytes, cudaMemcpyHostToDevice, watch.stream()), "up");
    check(cudaMemcpyAsync(host.data + bytes, all.in(i), bytes, cudaMemcpyDeviceToHost, other.stream()),
          "down");
    check(cudaEventRecord(joined, other.stream()), "join");
    check(cudaStreamWaitEvent(watch.stream(), joined, 0), "join");
  });
  table.add("both ways", size_text(bytes) + " each", 2.0 * static_cast<double>(bytes), both, ceiling::none);
  check(cudaEventDestroy(joined), "destroy");
  check(cudaEventDestroy(forked), "destroy");
}

/// K1, K2: tokens into a paged cache at random places, and out of it.
void measure_tokens(stopwatch& watch, device_table& table, const buffers& all, std::uint64_t room) {
  const device_executor run(watch.stream());
  const device_array<float> scale(std::vector<float>{1.5F});
  std::mt19937_64 random(1);
  struct form {
    const char* name;
    dtype stored;
    paging::head_order order;
  };
  for (const form& each : {form{"bf16 NHD", dtype::bf16, paging::head_order::nhd},
                           form{"bf16 HND", dtype::bf16, paging::head_order::hnd},
                           form{"bf16 to e4m3 NHD", dtype::fp8_e4m3, paging::head_order::nhd}}) {
    for (const std::uint64_t tokens : {1ULL, 16ULL, 256ULL, 8192ULL, 65536ULL}) {
      kv_layout layout{
          .layers = 1, .heads = 8, .head_dim = 128, .element = each.stored, .heads_in_block = each.order};
      const std::uint64_t blocks = std::max<std::uint64_t>(2 * tokens / layout.block_tokens, 64);
      if (layout.total_bytes(blocks) > room || tokens * 4096 > room) continue;
      std::vector<std::int64_t> slots(blocks * layout.block_tokens);
      std::iota(slots.begin(), slots.end(), 0);
      std::shuffle(slots.begin(), slots.end(), random);
      slots.resize(tokens);
      const device_array<std::int64_t> on_device(slots);
      const slot_front front({on_device.data(), tokens}, layout.block_tokens, blocks);
      const token_options options{.element = dtype::bf16,
                                  .scales = {.keys = scale.data(), .values = scale.data()}};
      const auto vectors = [&]<class Vectors>(std::byte* data, Vectors) {
        return Vectors{data, 8 * 128 * 2, 128 * 2};
      };
      const double bytes =
          static_cast<double>(tokens * (8 * 128 * 2 * 2 + layout.layer_bytes() / layout.block_tokens + 8));
      const std::string shape = std::string(each.name) + ", T " + std::to_string(tokens);
      const auto append = watch.replayed(launches, [&](int i) {
        const auto keys = vectors(all.in(i), batch_vectors{});
        const auto values = vectors(all.in(i) + tokens * 2048, batch_vectors{});
        append_kv(run, front, keys, values, {all.out(i), blocks, layout}, 0, options).value();
      });
      table.add("append_kv", shape, bytes, append);
      const auto gather = watch.replayed(launches, [&](int i) {
        const auto keys = vectors(all.out(i), batch_output{});
        const auto values = vectors(all.out(i) + tokens * 2048, batch_output{});
        gather_kv(run, front, keys, values, {all.in(i), blocks, layout}, 0, options).value();
      });
      table.add("gather_kv", shape, bytes, gather);
    }
  }
}

/// K3: random pairs of blocks; K5: a list of copies, beside CUB's.
void measure_copies(stopwatch& watch, device_table& table, const buffers& all, std::uint64_t room) {
  const device_executor run(watch.stream());
  std::mt19937_64 random(2);
  for (const std::uint64_t block_bytes : {4 * kib, 16 * kib, 64 * kib, 256 * kib, 2 * mib}) {
    const std::uint64_t blocks = room / block_bytes;
    const std::uint64_t count = std::min<std::uint64_t>(blocks, 256 * mib / block_bytes);
    std::vector<std::uint64_t> order(blocks);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    std::vector<block_pair> pairs;
    std::vector<copy_task> tasks[sets];
    std::vector<void*> starts[sets][2];
    for (std::uint64_t i = 0; i < count; ++i) {
      pairs.push_back({static_cast<std::int64_t>(order[i]), static_cast<std::int64_t>(order[count - 1 - i])});
      for (int s = 0; s < sets; ++s) {
        std::byte* const from = all.in(s) + order[i] * block_bytes;
        std::byte* const to = all.out(s) + order[count - 1 - i] * block_bytes;
        tasks[s].push_back({from, to, block_bytes});
        starts[s][0].push_back(from);
        starts[s][1].push_back(to);
      }
    }
    const device_array<block_pair> on_device(pairs);
    std::vector<device_array<copy_task>> lists;
    std::vector<device_array<void*>> sources;
    std::vector<device_array<void*>> targets;
    for (int s = 0; s < sets; ++s) {
      lists.emplace_back(tasks[s]);
      sources.emplace_back(starts[s][0]);
      targets.emplace_back(starts[s][1]);
    }
    const device_array<std::uint64_t> sizes(std::vector<std::uint64_t>(count, block_bytes));
    // One plane of one layer: a block is one run.
    const kv_layout layout{.layers = 1,
                           .heads = 1,
                           .head_dim = static_cast<std::uint32_t>(block_bytes / 32),
                           .has_values = false,
                           .element = dtype::bf16};
    const double bytes = 2.0 * static_cast<double>(count * block_bytes);
    const std::string shape = std::to_string(count) + " x " + size_text(block_bytes);
    table.add("copy_kv_blocks", shape, bytes, watch.replayed(launches, [&](int i) {
      copy_kv_blocks(run, {all.out(i), blocks, layout}, {all.in(i), blocks, layout},
                     {on_device.data(), count})
          .value();
    }));
    table.add("copy_batch", shape, bytes, watch.replayed(launches, [&](int i) {
      copy_batch(run, {lists[static_cast<std::size_t>(i % sets)].data(), count}, block_bytes).value();
    }));
    std::size_t scratch = 0;
    const auto batched = [&](void* memory, int i) {
      const auto s = static_cast<std::size_t>(i % sets);
      check(cub::DeviceMemcpy::Batched(memory, scratch, sources[s].data(), targets[s].data(), sizes.data(),
                                       static_cast<std::uint32_t>(count), watch.stream()),
            "cub::DeviceMemcpy::Batched");
    };
    batched(nullptr, 0);
    const device_bytes memory(scratch);
    table.add("cub DeviceMemcpy::Batched", shape, bytes,
              watch.replayed(launches, [&](int i) { batched(memory.data(), i); }));
  }
}

/// K7, K8: checks and protection.
void measure_checks(stopwatch& watch, device_table& table, const buffers& all, std::uint64_t room) {
  const device_executor run(watch.stream());
  for (const std::uint64_t block_bytes : {16 * kib, 256 * kib, 2 * mib}) {
    const std::uint64_t blocks = std::min(room, 512 * mib) / block_bytes;
    const device_bytes sums(blocks * 8);
    const std::span crcs(reinterpret_cast<std::uint32_t*>(sums.data()), blocks);
    const std::span digests(reinterpret_cast<std::uint64_t*>(sums.data()), blocks);
    const auto list = [&](int i, bool copies) {
      const block_pool_output to{copies ? all.out(i) : nullptr, block_bytes, blocks};
      return strided_blocks({all.in(i), block_bytes, blocks}, block_bytes, to);
    };
    const double bytes = static_cast<double>(blocks * block_bytes);
    const std::string shape = std::to_string(blocks) + " x " + size_text(block_bytes);
    table.add("crc32c_blocks", shape, bytes,
              watch.replayed(launches, [&](int i) { crc32c_blocks(run, list(i, false), crcs).value(); }),
              ceiling::read);
    table.add("digest_blocks", shape, bytes,
              watch.replayed(launches, [&](int i) { digest_blocks(run, list(i, false), digests).value(); }),
              ceiling::read);
    table.add("copy_and_crc32c", shape, 2 * bytes,
              watch.replayed(launches, [&](int i) { copy_and_crc32c(run, list(i, true), crcs).value(); }));
    table.add("copy_and_digest", shape, 2 * bytes,
              watch.replayed(launches, [&](int i) { copy_and_digest(run, list(i, true), digests).value(); }));
  }
  const std::uint64_t bytes = std::min(room, 256 * mib);
  table.add("xor_parity", "3 shards of " + size_text(bytes), 4.0 * static_cast<double>(bytes),
            watch.replayed(launches, [&](int i) {
              const std::array<const std::byte*, 3> shards{all.in(i), all.in(i + 1), all.in(i + 2)};
              xor_parity(run, shards, all.out(i), bytes).value();
            }));
  const device_bytes bits(dirty_words(bytes) * 4);
  const std::span words(reinterpret_cast<std::uint32_t*>(bits.data()), dirty_words(bytes));
  table.add("xor_delta", size_text(bytes), 3.0 * static_cast<double>(bytes),
            watch.replayed(launches, [&](int i) {
              xor_delta(run, all.in(i), all.in(i + 1), all.out(i), bytes, words).value();
            }));
  table.add("compare_dirty", size_text(bytes), 2.0 * static_cast<double>(bytes),
            watch.replayed(
                launches, [&](int i) { compare_dirty(run, all.in(i), all.in(i + 1), bytes, words).value(); }),
            ceiling::read);
  // Verifies the fill of the buffers: nothing differs, and nothing is reported.
  const device_array<mismatch_report> report(std::vector<mismatch_report>(1));
  table.add("verify_memory", size_text(bytes), static_cast<double>(bytes),
            watch.replayed(launches,
                           [&](int i) {
                             verify_memory(run, {all.in(i), bytes},
                                           seeded_pattern{.seed = static_cast<std::uint64_t>(i % sets)},
                                           report.data())
                                 .value();
                           }),
            ceiling::read);
  if (report.host().front() != mismatch_report{}) {
    std::fprintf(stderr, "FAILED: verify_memory: the buffers are not what they were filled with\n");
    std::exit(1);
  }
}

/// K6, K9: numbers in other forms. Draws numbers where random bytes were to be read: as bf16 these would be
/// of any size, so that hardly a code were other than 0, and some none at all, so that groups became NaNs.
void measure_numbers(stopwatch& watch, device_table& table, const buffers& all, std::uint64_t room) {
  const device_executor run(watch.stream());
  constexpr std::uint64_t row_values = 4096;
  const std::uint64_t rows = std::min(room / 2, 512 * mib) / 2 / row_values;
  const std::uint64_t values = rows * row_values;
  for (int i = 0; i < sets; ++i)
    fill_memory(run, {all.in(i), values * 2}, near_one(static_cast<std::uint64_t>(i))).value();
  // Each set has its own, because a cache would keep shared ones.
  const std::uint64_t scale_bytes = values / 32 * 4;
  const device_bytes scales(sets * scale_bytes);
  struct form {
    const char* name;
    dtype code;
    std::uint64_t bits;
    std::uint32_t elements;
  };
  for (const form& each :
       {form{"int8", dtype::int8, 8, 128}, form{"int8", dtype::int8, 8, 64}, form{"int8", dtype::int8, 8, 32},
        form{"e4m3", dtype::fp8_e4m3, 8, 128}, form{"int4", dtype::int4, 4, 128}}) {
    const auto groups = static_cast<std::uint32_t>(row_values / each.elements);
    const group_shape shape{.rows = rows, .groups = groups, .elements = each.elements};
    const std::uint64_t code_stride = row_values * each.bits / 8;
    const double bytes = static_cast<double>(values * 2 + values * each.bits / 8 + rows * groups * 4);
    const auto scales_of = [&](int i) {
      return scales.data() + static_cast<std::uint64_t>(i % sets) * scale_bytes;
    };
    const std::string by = " by " + std::to_string(each.elements);
    table.add("quantize_groups", std::string("bf16 to ") + each.name + by, bytes,
              watch.replayed(launches, [&](int i) {
                quantize_groups(run, shape, {all.in(i), dtype::bf16, row_values * 2},
                                {all.out(i), each.code, code_stride}, {scales_of(i), groups * 4})
                    .value();
              }));
    // The results from above, with each set's numbers.
    table.add("dequantize_groups", std::string(each.name) + " to bf16" + by, bytes,
              watch.replayed(launches, [&](int i) {
                dequantize_groups(run, shape, {all.out(i), each.code, code_stride},
                                  {scales_of(i), groups * 4},
                                  {all.out(i) + values * 2, dtype::bf16, row_values * 2})
                    .value();
              }));
  }
  const double both = 4.0 * static_cast<double>(values);
  table.add("split_planes", "bf16, " + size_text(values * 2), both, watch.replayed(launches, [&](int i) {
    split_planes(run, all.in(i), values, {all.out(i), all.out(i) + values}).value();
  }));
  table.add("merge_planes", "bf16, " + size_text(values * 2), both, watch.replayed(launches, [&](int i) {
    merge_planes(run, {all.in(i), all.in(i) + values}, values, all.out(i)).value();
  }));
}

/// The cost of allocations and frees, on the host's clock.
void measure_memory(device_table& table) {
  const auto microseconds = [](auto run) {
    std::vector<double> all;
    for (int round = 0; round < 20; ++round) {
      const auto began = std::chrono::steady_clock::now();
      run();
      all.push_back(
          std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - began).count());
    }
    return time_of(std::move(all));
  };
  stopwatch watch;
  device_space space(device_pool_source<cuda_runtime>(device_id{0}), {.budget = 256 * mib});
  device_virtual_memory memory(device_mapper<cuda_paging>(), {.budget = 256 * mib});
  // As in device_space: freed memory stays in the pool.
  cudaMemPool_t pool{};
  std::uint64_t most = ~std::uint64_t{0};
  check(cudaDeviceGetDefaultMemPool(&pool, 0), "the default pool");
  check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &most), "its threshold");
  for (const std::uint64_t bytes : {2 * mib, 64 * mib}) {
    table.add("device_space", size_text(bytes) + " and back", 0,
              microseconds([&] { space.deallocate(space.try_allocate(bytes, 256).value()); }));
    table.add("cudaMallocAsync", size_text(bytes) + " and back", 0, microseconds([&] {
                void* data = nullptr;
                check(cudaMallocAsync(&data, bytes, watch.stream()), "cudaMallocAsync");
                check(cudaFreeAsync(data, watch.stream()), "cudaFreeAsync");
                check(cudaStreamSynchronize(watch.stream()), "wait");
              }));
    const virtual_range range = memory.try_reserve(bytes).value();
    table.add("device_virtual_memory", size_text(bytes) + " commit, decommit", 0, microseconds([&] {
                commit(memory, range, 0, bytes).value();
                memory.decommit(range, 0, bytes).value();
              }));
    memory.release(range).value();
  }
}

}  // namespace

int main() {
  llmmem_tests::describe(llmmem_tests::require_device());
  stopwatch watch;
  device_table table;
  const std::uint64_t room = largest_buffer(1024);
  {
    const buffers all(room, watch.stream());
    measure_ceilings(watch, table, all, room);
    measure_host_copies(watch, table, all, room);
    measure_tokens(watch, table, all, room);
    measure_copies(watch, table, all, room);
    measure_checks(watch, table, all, room);
    measure_numbers(watch, table, all, room);
  }
  measure_memory(table);
  std::printf("%s", measured_copy_plan(device_id{0}).text().c_str());
}
