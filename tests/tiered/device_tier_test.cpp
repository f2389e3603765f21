#include <llmmem/space/device.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/space/pinned.hpp>
#include <llmmem/tiered_buffer.hpp>
#include <llmmem/transfer/streamed_space.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "support/comm_job.hpp"
#include "support/fake_device.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using llmmem_tests::bytes_of_seed;
using llmmem_tests::fake_device;
using llmmem_tests::fake_runtime;

using fake_pool = device_pool_source<fake_runtime>;
using fake_gpu = basic_streamed_space<fake_pool, fake_runtime>;
using fake_pinned = basic_host_space<pinned_source<fake_runtime>>;
static_assert(memory_space<fake_gpu> && copy_queue<fake_gpu, fake_gpu>);

constexpr std::uint64_t page = 4096;

}  // namespace

TEST_SUITE("device_tier") {
  TEST_CASE(
      "chunks on a device, pinned memory and the host beneath: whatever leaves and comes back is whole") {
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
      CHECK(device.live() == 0);
      CHECK(device.objects() == 0);
      CHECK(device.registered() == 0);
      CHECK(device.wrong.empty());
    }
  }
}
