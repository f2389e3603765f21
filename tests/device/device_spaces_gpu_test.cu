// The spaces and queues over CUDA. Without a driver or a device they must say so, and memory of the host must
// go on: that is tested where there is none. Where there is one, bytes go up, within and down, behind fences,
// between spaces, and virtual memory is put behind addresses.
#include <llmmem/device/batch_copier.hpp>
#include <llmmem/device/cuda.hpp>
#include <llmmem/kernels/batched_copy.hpp>
#include <llmmem/kernels/device_executor.cuh>
#include <llmmem/kernels/measured_copy_plan.cuh>
#include <llmmem/refit/refit_device.hpp>
#include <llmmem/refit/refit_plan.hpp>
#include <llmmem/sharding/replicated.hpp>
#include <llmmem/space/virtual_range.hpp>
#include <llmmem/version/double_buffer.hpp>
#include <llmmem/version/versioned.hpp>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "support/device.cuh"

namespace {

using namespace llmmem;
using llmmem_tests::require;

constexpr std::uint64_t mib = std::uint64_t{1} << 20;
constexpr device_id first{0};

template <class Make>
[[nodiscard]] bool refuses(Make make, const char* why) {
  try {
    make();
  } catch (const system_error& error) {
    std::printf("%s\n", error.what());
    return std::string(error.what()).find(why) != std::string::npos;
  }
  return false;
}

void check_without_device(const char* why) {
  std::printf("no device: %s\n", why);
  require(refuses([] { return device_pool_source<cuda_runtime>(first); }, why), "device_space refuses", 0);
  require(refuses([] { return device_mapper<cuda_paging>(); }, why), "device_mapper refuses", 0);
  pinned_space staging(pinned_source<cuda_runtime>(), {.budget = 8 * mib});
  require(staging.source().why_no_device() != nullptr, "pinned memory knows", 0);
  const auto range = staging.try_allocate(mib, 4096).value();
  std::memset(range.data, 1, mib);
  staging.deallocate(range);
}

void check_copies(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  device_space space(device_pool_source<cuda_runtime>(first), {.budget = 64 * mib});
  pinned_space staging(pinned_source<cuda_runtime>({.chunk_bytes = 16 * mib}), {.budget = 64 * mib});
  device_queue up(space, first, {.depth = 4});
  device_queue down(space, first, {.depth = 4});
  const std::uint64_t bytes = 1 + random() % (4 * mib);
  const auto room = space.try_allocate(2 * bytes, 1024).value();
  const auto host = staging.try_allocate(2 * bytes, 4096).value();
  for (std::uint64_t i = 0; i < bytes; ++i)
    host.data[i] = static_cast<std::byte>(random());
  const auto source = host.span().first(bytes);
  const auto target = host.span().subspan(bytes);
  const auto low = room.subrange(0, bytes).value();
  const auto high = room.subrange(bytes, bytes).value();
  const std::array in{up.copy_in_async(low, source, {}).value()};
  const std::array within{down.copy_within_async(high, low, in).value()};
  const std::array out{up.copy_out_async(target, high, within).value()};
  out[0].wait();
  require(out[0].ready() && in[0].ready(), "fences pass in order", seed);
  require(std::memcmp(source.data(), target.data(), bytes) == 0, "what went round is what was sent", seed);
  require(staging.source().device_address(host.data, host.bytes).has_value(), "kernels see pinned memory",
          seed);
  for (int i = 0; i < 20; ++i)  // more than the queue's depth
    static_cast<void>(up.copy_in_async(low, source, {}).value());
  up.mark().value().wait();
  space.deallocate(room);
  staging.deallocate(host);
  require(space.used() == 0 && space.audit().empty(), "all is given back", seed);
}

/// Images of refits in device memory: each version whole, also while copies out of the slot's former one run.
void check_uploads(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const std::vector<refit_tensor> tensors{
      {.name = "a", .shape = tensor_shape::matrix(1 + random() % 40, 64)}};
  const std::array one{rank_id{0}};
  const sharding::replicated all(facts_of(tensors), rank_count{1});
  const refit_plan plan = make_refit(refit_side<sharding::replicated>{tensors, all, one},
                                     refit_side<sharding::replicated>{tensors, all, one});
  const refit_layout layout(plan, rank_id{0});
  const std::uint64_t bytes = layout.bytes();
  device_space space(device_pool_source<cuda_runtime>(first), {.budget = 64 * mib});
  pinned_space staging(pinned_source<cuda_runtime>({.chunk_bytes = 16 * mib}), {.budget = 64 * mib});
  device_queue copies(space, first, {.depth = 4});
  device_queue readers(space, first, {.depth = 8});
  versioned<refit_device_image<device_space>, double_buffer> weights(
      {}, [&](std::size_t) { return refit_device_image(layout, space); });
  refit_upload upload(copies, staging, 64 + random() % bytes);
  std::vector<std::byte> memory(bytes);
  refit_image image(layout, memory);
  // Of version n, in the slot that version n + 2 overwrites.
  std::array<device_fence<cuda_runtime>, 2> read{};
  std::array<std::vector<std::byte>, 2> expected{};
  const auto seen = staging.try_allocate(2 * bytes, 4096).value();
  const auto check_read = [&](std::uint64_t of) {
    require(std::memcmp(seen.data + of * bytes, expected[of].data(), expected[of].size()) == 0,
            "a version is read whole before another one overwrites it", seed);
  };
  for (std::uint64_t number = 1; number <= 5; ++number) {
    const std::uint64_t slot = number % 2;
    for (std::byte& each : memory)
      each = static_cast<std::byte>(random());
    image.set_number(number);
    const std::span<const device_fence<cuda_runtime>> after(&read[slot], 1);
    require(upload.publish(image, weights, after).has_value(), "an upload", seed);
    check_read(slot);
    // The reader gives up its version while the copy out of it still runs.
    const auto now = weights.snapshot().value();
    read[slot] = readers.copy_out_async(seen.span().subspan(slot * bytes, bytes), now->memory(), {}).value();
    expected[slot] = memory;
  }
  for (const std::uint64_t slot : {0U, 1U}) {
    read[slot].wait();
    check_read(slot);
  }
  staging.deallocate(seen);
}

void check_refusals() {
  device_space space(device_pool_source<cuda_runtime>(first), {.budget = std::uint64_t{1} << 50});
  const auto refused = space.try_allocate(std::uint64_t{1} << 49, 256);
  require(refused.code() == errc::system_refused &&
              refused.error().index == static_cast<std::uint32_t>(cudaErrorMemoryAllocation),
          "more than the device has is refused", 0);
  require(cudaPeekAtLastError() == cudaSuccess, "no error is left behind", 0);
  require(space.try_allocate(mib, 2 * mib).has_value(), "and what it has is not", 0);
}

/// In the mode in which a capture forbids the most: what another thread does must not end it.
void check_captures() {
  device_space space(device_pool_source<cuda_runtime>(first), {.budget = 64 * mib});
  pinned_space staging(pinned_source<cuda_runtime>({.device = first}), {.budget = 64 * mib});
  device_queue copies(space, first);
  const auto before = space.try_allocate(mib, 256).value();
  const auto host = staging.try_allocate(mib, 4096).value();
  const auto asked = copies.copy_in_async(before, host.span(), {}).value();
  cudaStream_t stream{};
  llmmem_tests::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
  llmmem_tests::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "begin a capture");
  std::thread other([&] {
    const auto range = space.try_allocate(mib, 256);
    require(range.has_value(), "memory while another thread captures", 0);
    space.deallocate(*range);
    require(space.stats().kept_bytes == 0, "it goes back while another thread captures", 0);
    require(space.trim().has_value(), "a pool is trimmed while another thread captures", 0);
    const auto locked = staging.try_allocate(mib, 4096);
    require(locked.has_value(), "pages are locked while another thread captures", 0);
    staging.deallocate(*locked);
    static_cast<void>(asked.ready());
    asked.wait();
    require(asked.ready(), "a fence is asked while another thread captures", 0);
    space.deallocate(before);
    require(space.trim().has_value(), "what was copied to goes back while another thread captures", 0);
    device_space second(device_pool_source<cuda_runtime>(first), {.budget = mib});
    device_queue more(second, first, {.depth = 2});
    more.mark().value().wait();
  });
  other.join();
  cudaGraph_t graph{};
  llmmem_tests::check(cudaStreamEndCapture(stream, &graph), "end the capture");
  llmmem_tests::check(cudaGraphDestroy(graph), "destroy the graph");
  llmmem_tests::check(cudaStreamDestroy(stream), "destroy the stream");
  require(cudaPeekAtLastError() == cudaSuccess, "no error is left behind by a capture", 0);
}

void check_virtual_memory() {
  device_virtual_memory memory(device_mapper<cuda_paging>(), {.budget = 64 * mib});
  const std::uint64_t unit = memory.granularity();
  const virtual_range range = memory.try_reserve(8 * unit).value();
  const auto handle = commit(memory, range, unit, 2 * unit).value();
  std::vector<std::byte> bytes(static_cast<std::size_t>(2 * unit), std::byte{5});
  llmmem_tests::check(cudaMemcpy(range.data + unit, bytes.data(), bytes.size(), cudaMemcpyDefault),
                      "copy up");
  const virtual_range alias = stitch(memory, std::span(&handle, 1)).value();
  std::vector<std::byte> back(bytes.size());
  llmmem_tests::check(cudaMemcpy(back.data(), alias.data, back.size(), cudaMemcpyDefault), "copy down");
  require(back == bytes, "two addresses of the same memory", 0);
  memory.unmap(alias, 0, 2 * unit).value();
  memory.decommit(range, unit, 2 * unit).value();
  require(memory.used() == 0, "decommitted memory is given back", 0);
}

void check_batches() {
  const copy_plan plan =
      measured_copy_plan(first, {.bytes = {4096, 65536}, .counts = {1, 64}, .most_bytes = 4 * mib});
  require(plan.is_measured() && copy_plan::parsed(plan.text()).text() == plan.text(), "a plan is measured",
          0);
  device_space space(device_pool_source<cuda_runtime>(first), {.budget = 64 * mib});
  pinned_space staging(pinned_source<cuda_runtime>(), {.budget = 64 * mib});
  const auto room = space.try_allocate(mib, 256).value();
  const auto host = staging.try_allocate(2 * mib, 4096).value();
  for (std::uint64_t i = 0; i < mib; ++i)
    host.data[i] = static_cast<std::byte>(i * 2654435761U >> 13U);
  cudaStream_t stream{};
  llmmem_tests::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
  int sees_host = 0;
  llmmem_tests::check(cudaDeviceGetAttribute(&sees_host, cudaDevAttrCanUseHostPointerForRegisteredMem, 0),
                      "whether the device sees the host's addresses");
  for (const copy_way wanted : {copy_way::loop, copy_way::batch, copy_way::strided, copy_way::kernel}) {
    if (sees_host == 0 && follows_host_addresses(wanted, copy_direction::up)) continue;
    batch_copier<cuda_runtime> copies(copy_plan::measured(
        {}, [&](copy_way way, const copy_shape&) { return std::optional(way == wanted ? 1.0 : 1000.0); }));
    const auto kernel = [&](std::span<const copy_task> all) {
      return copy_few(device_executor(stream), all);
    };
    const auto move = [&](std::byte* to, const std::byte* from, copy_direction direction) {
      std::vector<copy_task> pieces;
      for (std::uint64_t i = 0; i < 64; ++i)
        pieces.push_back({from + i * 8192, to + i * 16384, 8192});
      const copy_route route{direction, {from, mib}, {to, mib}};
      const auto done = copies.copy(pieces, route, stream, kernel).value();
      require(done.way == wanted, "the way that was asked for", static_cast<std::uint64_t>(wanted));
    };
    std::memset(host.data + mib, 0, mib);
    llmmem_tests::check(cudaMemsetAsync(room.data, 0, mib, stream), "clear");
    move(room.data, host.data, copy_direction::up);
    llmmem_tests::check(cudaMemcpyAsync(host.data + mib, room.data, mib, cudaMemcpyDefault, stream), "down");
    llmmem_tests::check(cudaStreamSynchronize(stream), "wait");
    for (std::uint64_t i = 0; i < 64; ++i) {
      require(std::memcmp(host.data + mib + i * 16384, host.data + i * 8192, 8192) == 0,
              "pieces are in place", static_cast<std::uint64_t>(wanted));
    }
  }
  llmmem_tests::check(cudaStreamDestroy(stream), "destroy");
}

}  // namespace

int main() {
  if (const char* const why = cuda_runtime{}.why_no_device(first); why != nullptr) {
    check_without_device(why);
    std::printf("without a device: all said so, and the host's memory went on\n");
    return 0;
  }
  for (std::uint64_t seed = 1; seed <= 50; ++seed)
    check_copies(seed);
  for (std::uint64_t seed = 1; seed <= 6; ++seed)
    check_uploads(seed);
  check_refusals();
  check_captures();
  check_virtual_memory();
  check_batches();
  std::printf("device and pinned memory, queues, fences, virtual memory: as they say\n");
}
