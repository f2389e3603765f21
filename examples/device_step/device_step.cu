// A sequence on a device, from its block table to blocks that rest in host memory and come back: what an
// engine does around the kernels of one step, in the order in which it does it. Every output is held to the
// same kernels on the host, bit by bit.
//
// Exit status: 0, 1 where bits differ or something failed, 77 without a device (and the reason).
#include <llmmem/device/cuda.hpp>
#include <llmmem/kernels/device_executor.cuh>
#include <llmmem/kernels/fill_verify.hpp>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/kv_append.hpp>
#include <llmmem/kernels/kv_blocks.hpp>
#include <llmmem/kernels/paged_attention.hpp>
#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/block_storage.hpp>
#include <llmmem/paging/block_table.hpp>
#include <llmmem/paging/upload_ring.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <span>
#include <vector>

namespace {

using namespace llmmem;
using device_point = device_fence<cuda_runtime>;

/// Blocks that kernels may still read come back to the pool behind a point of their stream.
struct cache_traits : paged_traits {
  using fence = device_point;
};

constexpr std::uint32_t query_heads = 32;
constexpr kv_layout layout{.layers = 2, .heads = 8, .head_dim = 128, .block_tokens = 16};
constexpr std::uint64_t head_bytes = layout.vector_bytes(0);
constexpr std::uint64_t key_bytes = layout.heads * head_bytes;               // of a token, in one layer
constexpr std::uint64_t query_bytes = query_heads * head_bytes;              // bf16, as the cache
constexpr std::uint64_t tokens = 100;                                        // of the prompt
constexpr std::uint32_t table_columns = 16;                                  // blocks of the longest sequence
constexpr std::uint64_t batch_bytes = 2 * tokens * key_bytes + query_bytes;  // keys, values, a query

/// What a step's kernels read beside the cache, as it lies in a slot of the ring: on the host, and on the
/// device.
struct step_tables {
  std::span<std::int64_t> slots;        ///< [tokens]: where each new token goes
  std::span<std::int32_t> block_table;  ///< [1][table_columns]
  std::span<std::int32_t> seq_lens;     ///< [1]
  static constexpr std::uint64_t bytes = tokens * 8 + (table_columns + 1) * 4;

  explicit step_tables(std::byte* at)
      : slots(reinterpret_cast<std::int64_t*>(at), tokens),
        block_table(reinterpret_cast<std::int32_t*>(at + tokens * 8), table_columns),
        seq_lens(block_table.data() + table_columns, 1) {}
  [[nodiscard]] padded_table_view view() const {
    return {.block_table = block_table.data(),
            .seq_lens = seq_lens.data(),
            .num_sequences = 1,
            .max_blocks = table_columns,
            .block_tokens = static_cast<std::int32_t>(layout.block_tokens)};
  }
};

/// The batch of a step: keys and values of its tokens, and one query; the same for both layers, which a
/// model's would not be.
struct step_batch {
  const std::byte* data;
  [[nodiscard]] batch_vectors keys() const { return {data, key_bytes, head_bytes}; }
  [[nodiscard]] batch_vectors values() const { return {data + tokens * key_bytes, key_bytes, head_bytes}; }
  [[nodiscard]] batch_vectors query() const {
    return {data + 2 * tokens * key_bytes, query_bytes, head_bytes};
  }
};

template <class Run>
void append(const Run& run, const step_tables& tables, const step_batch& batch, const kv_memory& cache,
            std::uint32_t* out_of_range) {
  const slot_front front(tables.slots, layout.block_tokens, cache.blocks);
  for (std::uint32_t layer = 0; layer < layout.layers; ++layer)
    append_kv(run, front, batch.keys(), batch.values(), cache, layer, {.out_of_range = out_of_range}).value();
}

/// `out` is [layers][query_heads][head_dim].
template <class Run>
void attend(const Run& run, const step_tables& tables, const step_batch& batch, const kv_memory& cache,
            std::byte* out, std::span<std::byte> workspace, const attention_options& options) {
  for (std::uint32_t layer = 0; layer < layout.layers; ++layer)
    paged_attention(run, tables.view(), {.rows = 1}, batch.query(),
                    {out + layer * query_bytes, query_bytes, head_bytes}, cache, layer, workspace, options)
        .value();
}

/// Numbers around 1, in bf16: a pattern whose exponents are all alike.
void draw(std::span<std::byte> batch) {
  for (std::size_t i = 0; i + 1 < batch.size(); i += 2) {
    batch[i] = static_cast<std::byte>(i * 2654435761U >> 11U);
    batch[i + 1] = std::byte{0x3F};
  }
}

/// The engine's own stream.
class compute_stream {
 public:
  compute_stream() {
    if (const cudaError_t status = cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking);
        status != cudaSuccess)
      throw system_error(std::string("a stream: ") + cudaGetErrorString(status));
  }
  compute_stream(const compute_stream&) = delete;
  compute_stream& operator=(const compute_stream&) = delete;
  ~compute_stream() { static_cast<void>(cudaStreamDestroy(stream_)); }
  [[nodiscard]] cudaStream_t get() const noexcept { return stream_; }

 private:
  cudaStream_t stream_{};
};

bool run_step(device_id device, std::uint32_t multiprocessors) {
  // Spaces first, then streams and queues, then what lies in the spaces: they end in the opposite order.
  device_space gpu(device, {.budget = 64 << 20});
  pinned_space host({.budget = 64 << 20});
  const compute_stream stream;
  device_queue copies(gpu, device);                 // a stream of its own
  device_queue compute(gpu, device, stream.get());  // the engine's: for the marks of its kernels
  const device_executor run(stream.get(), {.multiprocessors = multiprocessors});

  paged_allocator<cache_traits> pool({.blocks = 63, .block_tokens = layout.block_tokens});
  const std::uint64_t blocks = pool.physical_blocks();
  block_storage<device_space> storage(gpu, blocks, layout.block_bytes());
  const kv_memory cache{.data = storage.range().data, .blocks = blocks, .layout = layout};
  // A block moves whole, also where tokens of it have not come yet. An engine need not care what lies there,
  // which no kernel takes into account; it may fill it as here, in NaNs, so that a kernel that does shows at
  // once, and compute-sanitizer's initcheck finds nothing in the copies of such blocks.
  fill_memory(run, storage.range().addresses(), poison_pattern{}).value();
  upload_ring<pinned_space, device_space, device_point> ring(host, gpu, {.slot_bytes = 64 << 10});

  constexpr std::align_val_t line{256};
  space_buffer<pinned_space> staged(host, 1, batch_bytes,
                                    line);  // as the engine's projections would leave it
  space_buffer<device_space> batch(gpu, 1, batch_bytes, line);
  space_buffer<device_space> out(gpu, layout.layers, query_bytes, line);
  space_buffer<pinned_space> came(host, layout.layers, query_bytes, line);
  space_buffer<device_space> flag(gpu, 1, sizeof(std::uint32_t), line);
  attention_options options{.query_heads = query_heads};
  options.split = plan_attention(1, query_heads, layout, table_columns * layout.block_tokens,
                                 {.multiprocessors = multiprocessors});
  const std::uint64_t needed = attention_workspace_bytes(1, layout, options);
  space_buffer<device_space> workspace(gpu, 1, std::max<std::uint64_t>(needed, 16), line);
  auto* const out_of_range = reinterpret_cast<std::uint32_t*>(flag.range().data);

  // 1. Blocks for the prompt, and what the kernels have to know of them, written where the host can.
  const sequence_id sequence = pool.create().value();
  const std::vector<token_id> prompt(tokens, token_id{7});
  const auto room = pool.append(sequence, prompt).value();
  const auto slot = ring.acquire_wait().value();
  step_tables here(slot.staging.data);
  write_slot_mapping(pool, sequence, room.first, here.slots).value();
  write_padded(pool, std::span(&sequence, 1), {here.block_table, here.seq_lens, table_columns}).value();
  draw(staged.range().span());

  // 2. The same step on the host, to hold the device to.
  std::vector<std::byte> host_cache(layout.total_bytes(blocks));
  std::vector<std::byte> host_workspace(needed + 16);
  std::vector<std::byte> expected(layout.layers * query_bytes);
  const kv_memory host_memory{.data = host_cache.data(), .blocks = blocks, .layout = layout};
  std::uint32_t host_flag = 0;
  append(host_executor{}, here, {staged.range().data}, host_memory, &host_flag);
  attend(host_executor{}, here, {staged.range().data}, host_memory, expected.data(), host_workspace, options);

  // 3. Up they go, on the copies' stream; the kernels' stream holds for them, and the host for nothing.
  const device_point tables_there = ring.upload(copies, slot, step_tables::bytes).value();
  const device_point batch_there = copies.copy_in_async(batch.range(), staged.range().span(), {}).value();
  compute.follow(std::array{tables_there, batch_there}).value();
  const step_tables there(slot.target.data);
  fill_memory(run, flag.range().addresses(), poison_pattern{.value = std::byte{0}}).value();

  // 4. The kernels of the step.
  append(run, there, {batch.range().data}, cache, out_of_range);
  attend(run, there, {batch.range().data}, cache, out.range().data, workspace.range().addresses(), options);

  // 5. The sequence rests: its blocks go to pinned memory, packed, by one kernel that writes there itself ...
  constexpr kv_layout packed = layout.packed();
  space_buffer<pinned_space> tier(host, 16, packed.block_bytes(), std::align_val_t{4096});
  const kv_memory tier_memory{.data = host.source().device_address(tier.range().data, tier.bytes()).value(),
                              .blocks = 16,
                              .layout = packed};
  std::vector<block_pair> down;
  std::vector<block_pair> up;
  for (const block_id block : pool.blocks(sequence)) {
    const auto number = static_cast<std::int64_t>(to_index(block));
    const auto place = static_cast<std::int64_t>(down.size());
    down.push_back({number, place});
    up.push_back({place, number});
  }
  copy_few_kv_blocks(run, tier_memory, cache, down).value();
  // ... the device's memory is somebody else's for a while, and they come back before the next token.
  fill_memory(run, storage.range().addresses(), poison_pattern{}).value();
  copy_few_kv_blocks(run, cache, tier_memory, up).value();
  attend(run, there, {batch.range().data}, cache, out.range().data, workspace.range().addresses(), options);

  // 6. One mark behind all of it: the slot, the blocks and the outputs wait for the same point.
  const device_point step_done = compute.mark().value();
  ring.release_after(slot, step_done).value();
  pool.release_after(sequence, step_done).value();
  const device_point out_there =
      copies.copy_out_async(came.range().span(), out.range(), std::array{step_done}).value();
  std::uint32_t flagged = 1;
  const device_point flag_there =
      copies.copy_out_async(std::as_writable_bytes(std::span(&flagged, 1)), flag.range(), {}).value();
  out_there.wait();
  flag_there.wait();
  pool.collect();

  const std::span<const std::byte> bits = came.range().span();
  const bool is_same = std::ranges::equal(bits, expected);
  std::printf(
      "%llu tokens in %zu blocks, %u shares: outputs of %u layers %s the host's; %u out of range; %llu "
      "blocks free\n",
      static_cast<unsigned long long>(tokens), down.size(), options.split.count, layout.layers,
      is_same ? "are" : "are NOT", flagged, static_cast<unsigned long long>(pool.stats().free_blocks));
  return is_same && flagged == 0 && host_flag == 0;
}

}  // namespace

int main() {
  constexpr device_id first{0};
  if (const char* const why = cuda_runtime{}.why_no_device(first); why != nullptr) {
    std::printf("SKIPPED: no device: %s\n", why);
    return 77;
  }
  try {
    int multiprocessors = 0;
    static_cast<void>(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
    return run_step(first, static_cast<std::uint32_t>(multiprocessors)) ? 0 : 1;
  } catch (const llmmem::error& failed) {
    std::printf("%s\n", failed.what());
    return 1;
  }
}
