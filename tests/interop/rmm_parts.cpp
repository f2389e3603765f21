// RMM's own headers and library: its adaptors over spaces, and spaces, a tier, a cache's blocks and a
// checkpoint's staging over its resources. RMM links its own CUDA runtime, which finds no device here: what
// is executed are its adaptors, over memory that the tests' runtime gives.
#include <llmmem/async_checkpointer.hpp>
#include <llmmem/checkpoint/load.hpp>
#include <llmmem/device/cuda.hpp>
#include <llmmem/interop/cccl_host_source.hpp>
#include <llmmem/interop/cccl_resource.hpp>
#include <llmmem/interop/cccl_source.hpp>
#include <llmmem/interop/cccl_views.hpp>
#include <llmmem/space/buffer.hpp>
#include <llmmem/testing/simulated_storage.hpp>
#include <llmmem/tiered_buffer.hpp>

#include <cuda_runtime_api.h>
#include <cuda/memory_resource>
#include <cuda/std/mdspan>
#include <cuda/std/span>
#include <cuda/stream_ref>
#include <rmm/mr/aligned_resource_adaptor.hpp>
#include <rmm/mr/callback_memory_resource.hpp>
#include <rmm/mr/cuda_async_memory_resource.hpp>
#include <rmm/mr/limiting_resource_adaptor.hpp>
#include <rmm/mr/pinned_host_memory_resource.hpp>
#include <rmm/mr/pool_memory_resource.hpp>
#include <rmm/mr/statistics_resource_adaptor.hpp>
#include <rmm/mr/tracking_resource_adaptor.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace llmmem;
using testing::simulated_storage;

constexpr std::uint64_t mib = std::uint64_t{1} << 20;
constexpr device_id first{0};

void require(bool is_so, const char* what) {
  if (is_so) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::exit(1);
}

// What cannot be executed without a device is at least accepted.
using pinned_of_rmm = cccl_host_source<rmm::mr::pinned_host_memory_resource>;
static_assert(byte_source<pinned_of_rmm>);
static_assert(memory_access_of<basic_host_space<pinned_of_rmm>>::value == memory_access::both);
static_assert(
    memory_space<basic_device_space<cccl_source<rmm::mr::cuda_async_memory_resource, cuda_runtime>>>);
static_assert(memory_space<basic_device_space<cccl_source<rmm::mr::pool_memory_resource, cuda_runtime>>>);

/// A resource of RMM whose memory the tests' runtime gives.
struct backed {
  std::set<void*> live{};
  [[nodiscard]] rmm::mr::callback_memory_resource resource() {
    return {[this](std::size_t bytes, cuda::stream_ref on, void*) -> void* {
              void* data = nullptr;
              if (cudaMallocAsync(&data, bytes, on.get()) != cudaSuccess) throw std::bad_alloc();
              live.insert(data);
              return data;
            },
            [this](void* data, std::size_t, cuda::stream_ref on, void*) {
              live.erase(data);
              cudaFreeAsync(data, on.get());
            }};
  }
};

/// RMM's adaptors stacked over a space under a budget, and back into a space.
void check_adaptors_over_a_space() {
  device_space device(first, {.budget = 4 * mib, .name = "engine"});
  stream_ordered memory(device, first, cuda_runtime{});
  {
    rmm::mr::statistics_resource_adaptor counted{space_resource(memory)};
    rmm::mr::limiting_resource_adaptor limited(counted, mib);
    rmm::mr::tracking_resource_adaptor tracked(limited);
    cudaStream_t stream{};
    require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess, "a stream");
    const cuda::stream_ref on(stream);
    void* const data = tracked.allocate(on, 1000, 256);
    require(device.used() >= 1000 && counted.get_bytes_counter().value == 1000,
            "an allocation through RMM's adaptors is charged to the space");
    tracked.deallocate(on, data, 1000, 256);
    require(tracked.get_outstanding_allocations().empty(), "it is returned");
    bool is_refused = false;
    try {
      static_cast<void>(tracked.allocate(on, 2 * mib, 256));
    } catch (const std::bad_alloc&) {
      is_refused = true;
    }
    require(is_refused, "RMM's limit refuses");
    {
      basic_device_space inner(cccl_source(first, limited, cuda_runtime{}),
                               {.budget = mib / 2, .name = "kv"});
      const space_buffer blocks(inner, std::uint64_t{64}, 4096, std::align_val_t{4096});
      require(reinterpret_cast<std::uintptr_t>(blocks.range().data) % 4096 == 0,
              "an alignment that RMM refuses is made");
      require(inner.try_allocate(mib, 256).error().code == errc::out_of_bytes, "the inner budget holds");
    }
    require(cudaStreamSynchronize(stream) == cudaSuccess && cudaStreamDestroy(stream) == cudaSuccess,
            "a wait");
  }
  memory.collect();
  require(memory.used() == 0, "all memory is back");
}

/// A tier over a resource of RMM: chunks leave it and come back.
void check_tier() {
  using pool_source = cccl_source<rmm::mr::aligned_resource_adaptor, cuda_runtime>;
  using pool_tier = basic_streamed_space<pool_source, cuda_runtime>;
  constexpr std::uint64_t bytes = 4096;
  backed pool;
  {
    pool_tier gpu(pool_source(first, rmm::mr::aligned_resource_adaptor(pool.resource(), 512)), first,
                  {.budget = 4 * bytes, .name = "weights"});
    pinned_space host({.budget = mib});
    tiered_buffer<pool_tier, pinned_space> buffer({}, {gpu, 2 * bytes}, {host, 16 * bytes});
    std::vector<chunk_handle> chunks;
    for (int n = 0; n < 6; ++n) {
      chunks.push_back(buffer.create(bytes).value());
      const auto lease = buffer.write(chunks.back()).value();
      require(cudaMemset(lease.range().data, n + 1, bytes) == cudaSuccess, "a write");
      require(cudaDeviceSynchronize() == cudaSuccess, "a wait");
    }
    for (int n = 0; n < 6; ++n) {
      const auto lease = buffer.read(chunks[static_cast<std::size_t>(n)]).value();
      gpu.queue().mark().value().wait();
      std::array<unsigned char, bytes> seen{};
      require(cudaMemcpy(seen.data(), lease.range().data, bytes, cudaMemcpyDefault) == cudaSuccess, "a copy");
      require(std::all_of(seen.begin(), seen.end(), [n](unsigned char each) { return each == n + 1; }),
              "a chunk that was evicted comes back");
    }
    require(!pool.live.empty(), "the tier's memory is of the pool");
  }
  require(pool.live.empty(), "all memory is back");
}

/// A pool of pinned memory as RMM has it: aligned to 256 and no more.
class pinned_pool {
 public:
  explicit pinned_pool(std::set<void*>& live) : live_(&live) {}
  void* allocate_sync(std::size_t bytes, std::size_t alignment) {
    if (alignment > 256) throw std::bad_alloc();
    void* data = nullptr;
    if (cudaMallocHost(&data, bytes) != cudaSuccess) throw std::bad_alloc();
    live_->insert(data);
    return data;
  }
  void deallocate_sync(void* data, std::size_t, std::size_t) noexcept {
    live_->erase(data);
    cudaFreeHost(data);
  }
  bool operator==(const pinned_pool&) const = default;
  [[maybe_unused]] friend void get_property(const pinned_pool&, cuda::mr::host_accessible) noexcept {}
  [[maybe_unused]] friend void get_property(const pinned_pool&, cuda::mr::device_accessible) noexcept {}

 private:
  std::set<void*>* live_;
};

/// The staging of checkpoints in a pool of pinned memory, erased as RMM and CCCL hand pools on.
using erased_pool =
    cuda::mr::any_synchronous_resource<cuda::mr::host_accessible, cuda::mr::device_accessible>;
struct staged_traits : checkpointer_traits {
  using storage_type = simulated_storage;
  using coordinator_type = solo_coordinator<simulated_storage>;
  using staging_space = basic_host_space<cccl_host_source<erased_pool>>;
};

void check_staging() {
  std::set<void*> live;
  {
    staged_traits::staging_space staging(cccl_host_source{erased_pool{pinned_pool(live)}},
                                         {.budget = mib, .name = "staging"});
    std::vector<std::byte> state(100'000);
    for (std::size_t i = 0; i < state.size(); ++i)
      state[i] = static_cast<std::byte>(i % 251);
    const std::vector<state_tensor> tensors(
        1, state_tensor{.name = "w", .type = safetensors_type::u8, .shape = {state.size()}});
    simulated_storage storage;
    solo_coordinator coordinator(storage);
    {
      async_checkpointer<staged_traits> saves(coordinator, tensors, staging,
                                              {.ring_bytes = 64 << 10, .chunk_bytes = 16 << 10});
      require(staging.used() == (64 << 10) + 4096, "the ring is in the pool, at a page, under the budget");
      const std::vector<std::span<const std::byte>> spans{state};
      require(saves.begin_snapshot(1, host_state_view(spans)).ticket().wait() == commit_status::committed,
              "a checkpoint through it is committed");
    }
    const checkpoint_search search = find_checkpoint(storage);
    require(search.found.has_value(), "it is found");
    std::vector<std::byte> loaded(state.size());
    const std::vector<wanted_tensor> wanted(1, wanted_tensor{.name = "w"});
    load_checkpoint(storage, *search.found, wanted,
                    [&](std::uint32_t, std::uint64_t offset, std::span<const std::byte> part) {
                      std::memcpy(loaded.data() + offset, part.data(), part.size());
                    });
    require(loaded == state, "with the state's bytes");
    require(staging.used() == 0 && live.empty(), "all memory is back");
    require(!staging.try_allocate(2 * mib, 4096).has_value() && live.empty(), "a refusal takes nothing");
  }
}

/// Views of libcu++ where views are taken.
void check_views() {
  namespace theirs = cuda::std;
  std::array<float, 24> values{};
  const theirs::span<float> named(values.data(), values.size());
  const std::span<float> ours = named;
  require(ours.data() == values.data() && ours.size() == 24, "a span is a span");
  require(std_span(theirs::span<float>(values.data(), 3)).size() == 3, "so is a temporary one");
  using matrix = theirs::mdspan<float, theirs::dextents<std::size_t, 2>>;
  require(bytes_of(matrix(values.data(), 4, 6)).value().size() == 96, "rows next to each other are bytes");
  using turned = theirs::mdspan<const float, theirs::dextents<std::size_t, 2>, theirs::layout_left>;
  require(bytes_of(turned(values.data(), 4, 6)).value().size() == 96, "columns are, too");
  using strided = theirs::mdspan<float, theirs::dextents<std::size_t, 2>, theirs::layout_stride>;
  const theirs::array<std::size_t, 2> strides{6, 1};
  const strided part(values.data(), strided::mapping_type(theirs::dextents<std::size_t, 2>(4, 5), strides));
  require(bytes_of(part).error() == failure{errc::size_mismatch, 0, 80, 92, "bytes_of: elements with gaps"},
          "a part of each row is not, and the error says so");
  require(bytes_of(matrix(values.data(), 0, 6)).value().empty(), "no rows are no bytes");
}

}  // namespace

int main() {
  check_views();
  check_adaptors_over_a_space();
  check_tier();
  check_staging();
  std::printf("llmmem and RMM: all is as it should be\n");
  return 0;
}
