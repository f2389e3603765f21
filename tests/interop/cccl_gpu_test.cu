// Spaces as memory resources of CCCL, and its resources as spaces: CUB, Thrust and containers of libcu++ take
// their memory from a space under a budget, behind streams and in captures.
#include <llmmem/device/cuda.hpp>
#include <llmmem/device/stream_ordered.hpp>
#include <llmmem/interop/cccl_resource.hpp>
#include <llmmem/interop/cccl_source.hpp>
#include <llmmem/interop/thrust_allocator.cuh>
#include <llmmem/space/buffer.hpp>
#include <llmmem/tiered_buffer.hpp>

#include <cuda_runtime.h>
#include <thrust/copy.h>
#include <thrust/device_vector.h>
#include <thrust/execution_policy.h>
#include <thrust/reduce.h>
#include <thrust/transform.h>
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_reduce.cuh>
#include <cub/device/device_scan.cuh>
#include <cub/device/device_select.cuh>
#include <cuda/memory_resource>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <memory>
#include <new>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "support/device.cuh"

namespace {

using namespace llmmem;
using llmmem_tests::require;

constexpr std::uint64_t mib = std::uint64_t{1} << 20;
constexpr device_id first{0};
constexpr int count = 5000;

using memory_type = stream_ordered<device_space, cuda_runtime>;
using handle = space_resource<memory_type>;
using pinned_handle = space_resource<stream_ordered<pinned_space, cuda_runtime>>;

static_assert(cuda::mr::resource_with<handle, cuda::mr::device_accessible>);
static_assert(!cuda::has_property<handle, cuda::mr::host_accessible>);
static_assert(cuda::mr::resource_with<pinned_handle, cuda::mr::device_accessible, cuda::mr::host_accessible>);

/// A stream of its own.
struct own_stream {
  own_stream() {
    require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess, "a stream", 0);
  }
  ~own_stream() { cudaStreamDestroy(stream); }
  own_stream(const own_stream&) = delete;
  own_stream& operator=(const own_stream&) = delete;
  void wait() const { require(cudaStreamSynchronize(stream) == cudaSuccess, "a wait", 0); }
  cudaStream_t stream{};
};

std::vector<std::uint32_t> some_numbers() {
  std::vector<std::uint32_t> out(count);
  for (std::uint32_t i = 0; i < count; ++i)
    out[i] = i * 7919 % 1000;
  return out;
}

/// Input on the device, and a place for the result.
struct numbers_on_device {
  explicit numbers_on_device(memory_type& memory)
      : in(memory, count * 4, std::align_val_t{256}), out(memory, count * 4, std::align_val_t{256}) {
    require(cudaMemcpy(in.range().data, numbers.data(), count * 4, cudaMemcpyDefault) == cudaSuccess, "copy",
            0);
    require(cudaDeviceSynchronize() == cudaSuccess, "a wait", 0);  // the copy may end behind its call
  }
  const std::uint32_t* input() const { return reinterpret_cast<const std::uint32_t*>(in.range().data); }
  std::uint32_t* result() const { return reinterpret_cast<std::uint32_t*>(out.range().data); }
  std::vector<std::uint32_t> numbers = some_numbers();
  space_buffer<memory_type> in;
  space_buffer<memory_type> out;
};

struct is_even {
  __host__ __device__ bool operator()(std::uint32_t x) const { return x % 2 == 0; }
};

void check_cub() {
  device_space device(first, {.budget = 8 * mib});
  memory_type memory(device, first);
  const own_stream on;
  {
    const numbers_on_device data(memory);
    const auto before = device.stats().allocations;
    const handle resource(memory);
    const auto env = cuda::std::execution::env{cuda::stream_ref(on.stream), resource};
    require(cub::DeviceReduce::Sum(data.input(), data.result(), count, env) == cudaSuccess, "cub sums", 0);
    require(device.stats().allocations == before + 1, "its temporary storage is the space's",
            device.stats().allocations);
    on.wait();
    std::uint32_t sum = 0;
    require(cudaMemcpy(&sum, data.result(), 4, cudaMemcpyDefault) == cudaSuccess, "copy", 0);
    require(sum == std::accumulate(data.numbers.begin(), data.numbers.end(), 0U), "the sum is right", sum);
    require(cub::DeviceScan::ExclusiveSum(data.input(), data.result(), count, env) == cudaSuccess,
            "cub scans", 0);
    on.wait();
    std::vector<std::uint32_t> sums(count);
    require(cudaMemcpy(sums.data(), data.result(), count * 4, cudaMemcpyDefault) == cudaSuccess, "copy", 0);
    std::vector<std::uint32_t> wanted(count);
    std::exclusive_scan(data.numbers.begin(), data.numbers.end(), wanted.begin(), 0U);
    require(sums == wanted, "the sums are right", 0);

    require(cub::DeviceRadixSort::SortKeys(data.input(), data.result(), count, 0, 10, env) == cudaSuccess,
            "cub sorts", 0);
    on.wait();
    require(cudaMemcpy(sums.data(), data.result(), count * 4, cudaMemcpyDefault) == cudaSuccess, "copy", 0);
    wanted = data.numbers;
    std::sort(wanted.begin(), wanted.end());
    require(sums == wanted, "the order is right", 0);

    // The numbers that are even, in order: what a compaction list is.
    const space_buffer<memory_type> found(memory, 8, std::align_val_t{8});
    auto* const length = reinterpret_cast<int*>(found.range().data);
    require(cub::DeviceSelect::If(data.input(), data.result(), length, count, is_even{}, env) == cudaSuccess,
            "cub selects", 0);
    on.wait();
    int selected = 0;
    require(cudaMemcpy(&selected, length, 4, cudaMemcpyDefault) == cudaSuccess, "copy", 0);
    std::vector<std::uint32_t> even;
    std::copy_if(data.numbers.begin(), data.numbers.end(), std::back_inserter(even), is_even{});
    require(static_cast<std::size_t>(selected) == even.size(), "as many as there are",
            static_cast<std::uint64_t>(selected));
    std::vector<std::uint32_t> list(even.size());
    require(cudaMemcpy(list.data(), data.result(), list.size() * 4, cudaMemcpyDefault) == cudaSuccess, "copy",
            0);
    require(list == even, "the list is right", 0);
  }
  memory.collect();
  require(memory.used() == 0, "all memory is back", memory.used());
}

void check_refusal() {
  device_space device(first, {.budget = 64 * 1024, .name = "workspace"});
  memory_type memory(device, first);
  const handle resource(memory);
  const own_stream on;
  bool is_told = false;
  try {
    static_cast<void>(resource.allocate(cuda::stream_ref(on.stream), mib, 256));
  } catch (const std::bad_alloc& error) {
    is_told = std::string(error.what()).find("workspace: 1048576 bytes needed, but 65536 left") == 0;
    std::printf("%s\n", error.what());
  }
  require(is_told, "a refusal says what, where and how much", 0);
  require(resource.allocate_sync(0) == nullptr, "no bytes are no memory", 0);
  resource.deallocate_sync(nullptr, 0);
  {
    const numbers_on_device data(memory);
    const auto rest = memory.try_allocate(memory.capacity() - memory.used() - 1024, 256).value();
    const auto status = cub::DeviceReduce::Sum(data.input(), data.result(), count, resource);
    require(status == cudaErrorMemoryAllocation, "cub reports the budget", status);
    memory.deallocate(rest);
  }
  require(memory.used() == 0, "nothing is lost", memory.used());
}

void check_erased() {
  device_space device(first, {.budget = mib});
  memory_type memory(device, first);
  memory_type other(device, first);
  const own_stream on;
  const handle resource(memory);
  require(resource == handle(memory) && !(resource == handle(other)), "handles compare by space", 0);
  {
    cuda::mr::any_resource<cuda::mr::device_accessible> owned(resource);
    const cuda::mr::resource_ref<cuda::mr::device_accessible> seen(owned);
    void* const data = owned.allocate(cuda::stream_ref(on.stream), 1000, 4096);
    require(reinterpret_cast<std::uintptr_t>(data) % 4096 == 0, "a large alignment", 0);
    require(cudaMemsetAsync(data, 1, 1000, on.stream) == cudaSuccess, "memset", 0);
    owned.deallocate(cuda::stream_ref(on.stream), data, 1000, 4096);
    require(memory.stats().pending_ranges == 1, "freed behind the stream", memory.stats().pending_ranges);
    require(owned == seen, "a reference equals what it refers to", 0);
  }
  on.wait();
  memory.collect();
  require(memory.used() == 0, "all memory is back", memory.used());
}

/// Whatever has a stream is one, where a stream is asked for.
void check_streams() {
  device_space device(first, {.budget = mib});
  memory_type memory(device, first);
  const own_stream on;
  const cuda::stream_ref stream(on.stream);
  device_queue copies(device, first, stream);
  const auto range = memory.try_allocate(4096, 256).value();
  require(cudaMemsetAsync(range.data, 1, 4096, stream.get()) == cudaSuccess, "memset", 0);
  require(copies.mark().value().hold(stream).has_value(), "a stream waits", 0);
  memory.deallocate(range, stream);
  on.wait();
  memory.collect();
  require(memory.used() == 0, "all memory is back", memory.used());
}

void check_capture() {
  device_space device(first, {.budget = mib});
  memory_type memory(device, first);
  const handle resource(memory);
  const own_stream on;
  cudaGraph_t graph{};
  require(cudaStreamBeginCapture(on.stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess, "capture", 0);
  void* const data = resource.allocate(cuda::stream_ref(on.stream), 4096, 256);
  require(cudaMemsetAsync(data, 5, 4096, on.stream) == cudaSuccess, "memset", 0);
  resource.deallocate(cuda::stream_ref(on.stream), data, 4096, 256);
  require(cudaStreamEndCapture(on.stream, &graph) == cudaSuccess, "the capture is whole", 0);
  require(memory.stats().captured_bytes == 4096, "a graph's memory stays", memory.stats().captured_bytes);
  cudaGraphExec_t exec{};
  require(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess, "instantiate", 0);
  require(cudaGraphLaunch(exec, on.stream) == cudaSuccess, "launch", 0);
  on.wait();
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  memory.release_captured();
  require(memory.used() == 0, "then it is back", memory.used());
}

struct twice {
  __host__ __device__ std::uint32_t operator()(std::uint32_t x) const { return 2 * x; }
};

void check_thrust() {
  device_space device(first, {.budget = 8 * mib});
  memory_type memory(device, first);
  const own_stream on;
  {
    const thrust_allocator<std::uint32_t, memory_type> of(memory, on.stream);
    const auto numbers = some_numbers();
    thrust::device_vector<std::uint32_t, thrust_allocator<std::uint32_t, memory_type>> values(count, 0U, of);
    require(memory.used() >= count * 4, "the vector's memory is the space's", memory.used());
    thrust::copy(numbers.begin(), numbers.end(), values.begin());
    const auto before = device.stats().allocations;
    const auto policy =
        thrust::cuda::par(thrust_allocator<char, memory_type>(memory, on.stream)).on(on.stream);
    thrust::transform(policy, values.begin(), values.end(), values.begin(), twice{});
    const std::uint32_t sum = thrust::reduce(policy, values.begin(), values.end());
    require(sum == 2 * std::accumulate(numbers.begin(), numbers.end(), 0U), "the sum is right", sum);
    require(device.stats().allocations > before, "temporary storage is the space's", 0);
  }
  on.wait();
  memory.collect();
  require(memory.used() == 0, "all memory is back", memory.used());
}

/// An engine's pool as RMM and CCCL have them: aligned to 256 and no more, freed behind streams, shared by
/// its copies. Notes what it is asked for.
class engine_resource {
 public:
  struct log {
    std::set<void*> live{};
    std::uint64_t refused_alignments = 0;
    std::uint64_t default_streams = 0;
    int refuse = 0;  // allocations to refuse
    bool throws_at_free = false;
  };

  engine_resource() : log_(std::make_shared<log>()) {}

  void* allocate(cuda::stream_ref on, std::size_t bytes, std::size_t alignment) {
    if (alignment > 256) {
      ++log_->refused_alignments;
      throw std::invalid_argument("only 256");
    }
    if (on.get() == nullptr) ++log_->default_streams;
    if (log_->refuse > 0) {
      --log_->refuse;
      throw std::bad_alloc();
    }
    void* data = nullptr;
    if (cudaMallocAsync(&data, bytes, on.get()) != cudaSuccess) throw std::bad_alloc();
    log_->live.insert(data);
    return data;
  }
  void deallocate(cuda::stream_ref on, void* data, std::size_t, std::size_t) {
    log_->live.erase(data);
    cudaFreeAsync(data, on.get());
    if (log_->throws_at_free) throw std::runtime_error("a free that throws");
  }
  void* allocate_sync(std::size_t bytes, std::size_t alignment) {
    return allocate(cuda::stream_ref(cudaStream_t{}), bytes, alignment);
  }
  void deallocate_sync(void* data, std::size_t bytes, std::size_t alignment) {
    deallocate(cuda::stream_ref(cudaStream_t{}), data, bytes, alignment);
  }
  bool operator==(const engine_resource& other) const { return log_ == other.log_; }
  [[maybe_unused]] friend void get_property(const engine_resource&, cuda::mr::device_accessible) noexcept {}
  log& seen() const { return *log_; }

 private:
  std::shared_ptr<log> log_;
};
static_assert(cuda::mr::resource_with<engine_resource, cuda::mr::device_accessible>);

void check_source() {
  const engine_resource theirs;
  {
    basic_device_space space(cccl_source(first, theirs, cuda_runtime{}), {.budget = mib, .name = "theirs"});
    for (const std::uint64_t alignment : {1, 256, 512, 4096, 65536}) {
      const auto range = space.try_allocate(1000, alignment).value();
      require(reinterpret_cast<std::uintptr_t>(range.data) % alignment == 0, "aligned", alignment);
      require(cudaMemset(range.data, 3, 1000) == cudaSuccess, "usable at once", 0);
      require(cudaDeviceSynchronize() == cudaSuccess, "a wait", 0);
      space.deallocate(range);
    }
    require(theirs.seen().refused_alignments == 0, "no alignment that pools refuse", 0);
    require(theirs.seen().default_streams == 0, "no default stream", 0);
    theirs.seen().refuse = 1;  // its bytes are on their way back
    const auto range = space.try_allocate(1000, 256);
    require(range.has_value(), "asked once more", 0);
    theirs.seen().refuse = 2;
    require(
        space.try_allocate(1000, 256).error() == failure{errc::system_refused, 2, 1000, mib - 1024, "theirs"},
        "then refused, with the status", 0);
    theirs.seen().throws_at_free = true;
    space.deallocate(*range);  // does not terminate
    theirs.seen().throws_at_free = false;
    require(space.try_allocate(2 * mib, 256).error().code == errc::out_of_bytes, "under the budget", 0);
  }
  require(theirs.seen().live.empty(), "all memory is back", theirs.seen().live.size());
  require(theirs == engine_resource(theirs), "a copy is the same resource", 0);

  cuda::mr::any_resource<cuda::mr::device_accessible> erased(theirs);
  basic_device_space space(cccl_source(first, erased, cuda_runtime{}), {.budget = mib});
  space.deallocate(space.try_allocate(100, 16).value());
}

/// A tier of a `tiered_buffer`, and the blocks of a cache, in an engine's pool.
void check_parts() {
  using pool_source = cccl_source<engine_resource, cuda_runtime>;
  using pool_tier = basic_streamed_space<pool_source, cuda_runtime>;
  constexpr std::uint64_t bytes = 4096;
  const engine_resource theirs;
  {
    pool_tier gpu(pool_source(first, theirs), first, {.budget = 4 * bytes, .name = "weights"});
    pinned_space host({.budget = mib});
    tiered_buffer<pool_tier, pinned_space> buffer({}, {gpu, 2 * bytes}, {host, 16 * bytes});
    std::vector<chunk_handle> chunks;
    const own_stream on;
    for (int n = 0; n < 6; ++n) {
      chunks.push_back(buffer.create(bytes).value());
      const auto lease = buffer.write(chunks.back()).value();
      require(cudaMemsetAsync(lease.range().data, n + 1, bytes, on.stream) == cudaSuccess, "a kernel writes",
              0);
      on.wait();
    }
    for (int n = 0; n < 6; ++n) {
      const auto lease = buffer.read(chunks[static_cast<std::size_t>(n)]).value();
      gpu.queue().mark().value().wait();
      std::array<unsigned char, bytes> seen{};
      require(cudaMemcpy(seen.data(), lease.range().data, bytes, cudaMemcpyDefault) == cudaSuccess, "copy",
              0);
      require(std::all_of(seen.begin(), seen.end(), [n](unsigned char each) { return each == n + 1; }),
              "a chunk that was evicted comes back", static_cast<std::uint64_t>(n));
    }
    require(theirs.seen().live.size() != 0 && gpu.used() <= gpu.capacity(), "its places are of the pool", 0);
  }
  require(theirs.seen().live.empty(), "all memory is back", theirs.seen().live.size());
}

/// A space over an engine's resource over a space: both ways at once.
void check_round_trip() {
  device_space device(first, {.budget = mib});
  memory_type memory(device, first);
  {
    basic_device_space inner(cccl_source(first, handle(memory), cuda_runtime{}), {.budget = mib / 2});
    const auto range = inner.try_allocate(10'000, 1024).value();
    require(cudaMemset(range.data, 1, 10'000) == cudaSuccess, "usable", 0);
    require(cudaDeviceSynchronize() == cudaSuccess, "a wait", 0);
    require(device.used() >= 10'000, "charged beneath", device.used());
    inner.deallocate(range);
  }
  memory.collect();
  require(memory.used() == 0, "all memory is back", memory.used());
}

}  // namespace

int main() {
  if (const char* const why = cuda_runtime{}.why_no_device(first); why != nullptr) {
    std::printf("skipped, no device: %s\n", why);
    return 77;
  }
  check_cub();
  check_refusal();
  check_erased();
  check_streams();
  check_capture();
  check_thrust();
  check_source();
  check_parts();
  check_round_trip();
  std::printf("llmmem and CCCL %d.%d: all is as it should be\n", CCCL_MAJOR_VERSION, CCCL_MINOR_VERSION);
  return 0;
}
