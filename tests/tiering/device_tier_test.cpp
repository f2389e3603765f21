#include <llmmem/device/device.hpp>
#include <llmmem/device/pinned.hpp>
#include <llmmem/device/streamed_space.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/tiered_buffer.hpp>
#include <llmmem/transfer/device_file_io.hpp>
#include <llmmem/transfer/device_file_space.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <string_view>
#include <vector>

#include "support/comm_job.hpp"
#include "support/fake_device.hpp"
#include "support/fake_file_library.hpp"
#include "support/seeds.hpp"
#include "support/temporary_folder.hpp"

namespace {

using namespace llmmem;
using llmmem_tests::bytes_of_seed;
using llmmem_tests::fake_device;
using llmmem_tests::fake_runtime;

using fake_pool = device_pool_source<fake_runtime>;
using fake_gpu = basic_streamed_space<fake_pool, fake_runtime>;
using fake_queue = fake_gpu::queue_type;
using fake_pinned = basic_host_space<pinned_source<fake_runtime>>;
static_assert(memory_space<fake_gpu> && copy_queue<fake_gpu, fake_gpu>);

constexpr std::uint64_t page = 4096;

/// Files that a device reads and writes by itself, as far as tiers see it: no host may touch them, and bytes
/// go straight between them and the device, along its queue or one of their own. The host's own ways are
/// there, as every queue's, and are counted.
class straight_files {
 public:
  using range_type = memory_range<straight_files>;
  using fence_type = fake_gpu::fence_type;
  static constexpr bool is_host_accessible = false;
  static constexpr bool leaves_memory = true;

  straight_files(fake_gpu& gpu, std::uint64_t budget) : straight_files(gpu.queue(), budget) {}
  straight_files(fake_queue& along, std::uint64_t budget) : along_(&along), bytes_({.budget = budget}) {}

  [[nodiscard]] result<range_type> try_allocate(std::uint64_t bytes, std::uint64_t alignment) noexcept {
    const auto made = bytes_.try_allocate(bytes, alignment);
    if (!made) return made.error();
    return range_type{made->data, made->bytes};
  }
  void deallocate(range_type range) noexcept { bytes_.deallocate({range.data, range.bytes}); }
  [[nodiscard]] std::uint64_t capacity() const noexcept { return bytes_.capacity(); }
  [[nodiscard]] std::uint64_t used() const noexcept { return bytes_.used(); }
  [[nodiscard]] std::string_view name() const noexcept { return "straight_files"; }

  [[nodiscard]] result<fence_type> copy_from_async(range_type to, fake_gpu::range_type from,
                                                   std::span<const fence_type> after) {
    ++straight;
    return along_->copy_out_async({to.data, static_cast<std::size_t>(to.bytes)}, from, after);
  }
  [[nodiscard]] result<fence_type> copy_to_async(fake_gpu::range_type to, range_type from,
                                                 std::span<const fence_type> after) {
    ++straight;
    return along_->copy_in_async(to, {from.data, static_cast<std::size_t>(from.bytes)}, after);
  }
  [[nodiscard]] result<fence_type> copy_in_async(range_type, std::span<const std::byte>,
                                                 std::span<const fence_type>) {
    ++by_host;
    return failure{errc::dead_range};
  }
  [[nodiscard]] result<fence_type> copy_out_async(std::span<std::byte>, range_type,
                                                  std::span<const fence_type>) {
    ++by_host;
    return failure{errc::dead_range};
  }
  [[nodiscard]] result<fence_type> copy_within_async(range_type, range_type, std::span<const fence_type>) {
    ++by_host;
    return failure{errc::dead_range};
  }

  int straight = 0;
  int by_host = 0;

 private:
  fake_queue* along_;
  host_space bytes_;
};
static_assert(straight_queue<straight_files, fake_gpu> && !straight_queue<fake_gpu, straight_files>);
static_assert(!straight_queue<host_space, fake_gpu>);

/// Writes, changes, moves and reads chunks of a buffer whose first tier is a device, and holds them to plain
/// memory.
template <class Buffer>
void use_chunks(Buffer& buffer, fake_gpu& gpu, std::mt19937_64& random) {
  std::vector<chunk_handle> chunks;
  std::vector<std::vector<std::byte>> values;
  for (int i = 0; i < 20; ++i) {
    chunks.push_back(buffer.create(page).value());
    values.push_back(bytes_of_seed(page, random()));
    const auto lease = buffer.write(chunks.back()).value();
    gpu.copy_in_async(lease.range(), values.back(), {}).value().wait();
  }
  for (int step = 0; step < 200; ++step) {
    const std::size_t at = random() % chunks.size();
    const std::uint64_t first = random() % 8 * (page / 8);
    if (random() % 3 == 0) static_cast<void>(buffer.prefetch(chunks[random() % chunks.size()]));
    if (random() % 3 == 0) {
      const auto lease = buffer.update(chunks[at], first, page / 8).value();
      const auto bytes = bytes_of_seed(page / 8, random());
      gpu.copy_in_async(lease.range().subrange(first, page / 8).value(), bytes, {}).value().wait();
      std::ranges::copy(bytes, values[at].begin() + static_cast<std::ptrdiff_t>(first));
      continue;
    }
    std::vector<std::byte> seen(page);
    const auto lease = buffer.read(chunks[at]).value();
    gpu.copy_out_async(seen, lease.range(), {}).value().wait();
    if (seen != values[at]) CHECK(seen == values[at]);
  }
  CHECK(buffer.audit().empty());
}

/// How a lease ends that a kernel has used.
enum class ends : std::uint8_t { at_once, followed, waited };

/// A kernel reads a lease, which ends; another chunk takes its place. Whether the kernel saw what it was to.
template <class Buffer>
bool reads_its_own(Buffer& buffer, fake_gpu& gpu, fake_queue& compute, ends how) {
  std::vector<chunk_handle> chunks;
  for (std::uint64_t i = 0; i < 2; ++i) {
    chunks.push_back(buffer.create(page).value());
    const auto lease = buffer.write(chunks.back()).value();
    gpu.copy_in_async(lease.range(), bytes_of_seed(page, i), {}).value().wait();
  }
  for (const std::size_t i : {1U, 0U})  // both are clean then, and the first is above
    static_cast<void>(buffer.read(chunks[i]).value());
  std::vector<std::byte> seen(page);
  {
    const auto lease = buffer.read(chunks[0]).value();
    gpu.queue().mark().value().hold(compute.stream()).value();
    static_cast<void>(compute.copy_out_async(seen, lease.range(), {}).value());  // the kernel
    const std::array used{compute.mark().value()};
    if (how == ends::followed) gpu.queue().follow(used).value();
    if (how == ends::waited) used[0].wait();
  }
  static_cast<void>(buffer.read(chunks[1]).value());
  compute.mark().value().wait();
  return seen == bytes_of_seed(page, 0);
}

}  // namespace

TEST_SUITE("device_tier") {
  TEST_CASE(
      "a lease that a kernel reads must end after it, or another chunk takes the place under the kernel") {
    for (const ends how : {ends::at_once, ends::followed, ends::waited}) {
      std::uint64_t wrong = 0;
      for (const auto seed : llmmem_tests::seeds(50)) {
        CAPTURE(seed);
        fake_device device(seed);
        fake_gpu gpu(fake_pool(device_id{0}, device), device_id{0}, {.budget = page}, {}, device);
        fake_queue compute(gpu, device_id{0}, {}, device);
        host_space host({.budget = 64 * page});
        tiered_buffer<fake_gpu, host_space> buffer({}, {gpu, page, 16}, {host, 64 * page, 16});
        wrong += reads_its_own(buffer, gpu, compute, how) ? 0U : 1U;
        CHECK(device.wrong.empty());
      }
      CHECK((wrong != 0) == (how == ends::at_once));
    }
  }

  TEST_CASE(
      "a copy that follows the kernel suffices if files use the device's queue directly, otherwise a wait "
      "does") {
    for (const bool is_along : {true, false}) {
      for (const ends how : {ends::followed, ends::waited}) {
        std::uint64_t wrong = 0;
        for (const auto seed : llmmem_tests::seeds(50)) {
          CAPTURE(seed);
          fake_device device(seed);
          fake_gpu gpu(fake_pool(device_id{0}, device), device_id{0}, {.budget = page}, {}, device);
          fake_queue compute(gpu, device_id{0}, {}, device);
          fake_queue own(gpu, device_id{0}, {}, device);
          straight_files files(is_along ? gpu.queue() : own, 64 * page);
          tiered_buffer<fake_gpu, straight_files> buffer({}, {gpu, page, 16}, {files, 64 * page, 16});
          wrong += reads_its_own(buffer, gpu, compute, how) ? 0U : 1U;
          CHECK(device.wrong.empty());
        }
        CHECK((wrong != 0) == (!is_along && how == ends::followed));
      }
    }
  }

  TEST_CASE("chunks that leave a device for pinned memory or the host come back complete") {
    for (const auto seed : llmmem_tests::seeds(20)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      fake_device device(seed);
      {
        fake_gpu gpu(fake_pool(device_id{0}, device), device_id{0}, {.budget = 6 * page},
                     {.depth = static_cast<std::uint32_t>(1 + random() % 4)}, device);
        fake_pinned pinned(pinned_source<fake_runtime>({}, device), {.budget = 16 * page});
        host_space host({.budget = 64 * page});
        tiered_buffer<fake_gpu, fake_pinned, host_space> buffer(
            {}, {gpu, 6 * page, 64}, {pinned, 16 * page, 64}, {host, 64 * page, 64});
        use_chunks(buffer, gpu, random);
      }
      CHECK(device.live() == 0);
      CHECK(device.objects() == 0);
      CHECK(device.registered() == 0);
      CHECK(device.wrong.empty());
    }
  }

  TEST_CASE(
      "chunks go between a device and a real file by a library's own path, in any order of completion") {
    using disk_space = device_file_space<fake_gpu, device_file_io<llmmem_tests::fake_library>>;
    static_assert(straight_queue<disk_space, fake_gpu>);
    for (const auto seed : llmmem_tests::seeds(10)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const llmmem_tests::temporary_folder folder;
      fake_device device(seed);
      llmmem_tests::library_state library;
      library.random.seed(seed);
      library.is_short = seed % 2 == 0;
      {
        fake_gpu gpu(fake_pool(device_id{0}, device), device_id{0}, {.budget = 6 * page}, {}, device);
        disk_space disk(folder.file("tier"), {.budget = 64 * page},
                        device_file_io_options{.depth = static_cast<std::uint32_t>(1 + random() % 4),
                                               .batches = static_cast<std::uint32_t>(1 + random() % 3)},
                        llmmem_tests::fake_library(library));
        tiered_buffer<fake_gpu, disk_space> buffer({}, {gpu, 6 * page, 64}, {disk, 64 * page, 64});
        use_chunks(buffer, gpu, random);
      }
      CHECK(library.requests != 0);
      CHECK(library.open_files == 0);
      CHECK(library.misuses.empty());
      CHECK(device.live() == 0);
      CHECK(device.wrong.empty());
    }
  }

  TEST_CASE("files that a device accesses directly use neither a ring nor a copy by the host") {
    for (const auto seed : llmmem_tests::seeds(20)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      fake_device device(seed);
      {
        fake_gpu gpu(fake_pool(device_id{0}, device), device_id{0}, {.budget = 6 * page},
                     {.depth = static_cast<std::uint32_t>(1 + random() % 4)}, device);
        straight_files files(gpu, 64 * page);
        tiered_buffer<fake_gpu, straight_files> buffer({}, {gpu, 6 * page, 64}, {files, 64 * page, 64});
        use_chunks(buffer, gpu, random);
        CHECK(files.straight > 40);
        CHECK(files.by_host == 0);
        CHECK(buffer.stats().bounce_bytes == 0);
      }
      CHECK(device.live() == 0);
      CHECK(device.objects() == 0);
      CHECK(device.wrong.empty());
    }
  }
}
