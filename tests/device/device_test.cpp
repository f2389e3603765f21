#include <llmmem/device/device.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <new>
#include <random>
#include <utility>
#include <vector>

#include "support/fake_device.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using llmmem_tests::fake_device;
using llmmem_tests::fake_runtime;

using fake_pool = device_pool_source<fake_runtime>;
using fake_space = basic_device_space<fake_pool>;
static_assert(memory_space<fake_space>);
static_assert(!fake_space::is_host_accessible);

constexpr std::uint64_t mib = std::uint64_t{1} << 20;
constexpr std::uint64_t page = 4096;

/// Resources by their shapes.
struct sync_resource {
  void* allocate_sync(std::size_t bytes, std::size_t alignment) {
    if (bytes > most) throw std::bad_alloc();
    ++taken;
    return ::operator new(bytes, std::align_val_t{alignment});
  }
  void deallocate_sync(void* data, std::size_t, std::size_t alignment) noexcept {
    --taken;
    ::operator delete(data, std::align_val_t{alignment});
  }
  std::size_t most = 1000;
  int taken = 0;
};
struct older_resource {
  void* allocate(std::size_t bytes, std::size_t alignment) { return all.allocate_sync(bytes, alignment); }
  void deallocate(void* data, std::size_t bytes, std::size_t alignment) noexcept {
    all.deallocate_sync(data, bytes, alignment);
  }
  sync_resource all{};
};
static_assert(resource_with_sync<sync_resource> && !resource_with_sync<older_resource>);

template <class Resource>
void check_resource(Resource& resource, const int& taken) {
  basic_device_space<resource_source<Resource>> space(resource_source<Resource>(resource), {.budget = mib});
  const auto range = space.try_allocate(900, 512).value();
  CHECK(reinterpret_cast<std::uintptr_t>(range.data) % 512 == 0);
  CHECK(taken == 1);
  CHECK(space.try_allocate(1001, 1).error() == failure{errc::system_refused, 0, 1001, mib - 900});
  space.deallocate(range);
  CHECK(taken == 0);
}

}  // namespace

TEST_SUITE("device") {
  TEST_CASE("ranges have the requested alignment, stay within the budget, and all return to the pool") {
    for (const auto seed : llmmem_tests::seeds(40)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      fake_device device(seed);
      {
        fake_space space(fake_pool(device_id{0}, device), {.budget = mib});
        std::vector<fake_space::range_type> live;
        for (int i = 0; i < 200; ++i) {
          if (!live.empty() && random() % 2 == 0) {
            const std::size_t which = random() % live.size();
            space.deallocate(live[which]);
            live.erase(live.begin() + static_cast<std::ptrdiff_t>(which));
            continue;
          }
          const std::uint64_t bytes = 1 + random() % 60'000;
          const std::uint64_t alignment = std::uint64_t{1} << random() % 13;
          const std::uint64_t left = space.capacity() - space.used();
          const auto range = space.try_allocate(bytes, alignment);
          if (!range) {
            CHECK(range.code() == errc::out_of_bytes);
            CHECK(range.error().wanted > left);
            continue;
          }
          if (reinterpret_cast<std::uintptr_t>(range->data) % alignment != 0) CHECK(false);
          CHECK(space.holds(*range));
          CHECK(space.used() <= space.capacity());
          live.push_back(*range);
        }
        CHECK(space.audit().empty());
        CHECK(device.live() >= live.size());
        for (std::size_t i = 0; i < live.size() / 2; ++i)
          space.deallocate(live[i]);
      }
      CHECK(device.live() == 0);
      CHECK(device.objects() == 0);
      CHECK(device.wrong.empty());
    }
  }

  TEST_CASE("a request charges the budget with the bytes that it takes of the pool") {
    fake_device device;
    fake_space space(fake_pool(device_id{0}, device), {.budget = 4096});
    CHECK(space.try_allocate(1, 256).has_value());
    CHECK(space.used() == 256);
    CHECK(space.try_allocate(257, 1).has_value());
    CHECK(space.used() == 768);
    CHECK(space.try_allocate(256, 1024).has_value());  // the pool aligns to 256: 768 bytes to choose from
    CHECK(space.used() == 1792);
    CHECK(space.try_allocate(2304, 512).error() == failure{errc::out_of_bytes, 0, 2560, 2304});
    CHECK(space.try_allocate(~std::uint64_t{0}, 1).code() == errc::out_of_bytes);
    CHECK(space.try_allocate(0, 1).code() == errc::zero_bytes);
    CHECK(space.try_allocate(1, 3).code() == errc::bad_alignment);
    CHECK(space.stats().refusals == 4);
    const fake_pool& pool = space.source();
    CHECK(pool.footprint(max_bytes, 1) == max_bytes);
    CHECK(pool.footprint(~std::uint64_t{0}, 1) == max_bytes);
    CHECK(pool.footprint(max_bytes / 2, std::uint64_t{1} << 63) == max_bytes);
  }

  TEST_CASE("if the driver refuses any call, that is reported, and nothing stays behind") {
    for (std::uint64_t at = 0; at < 8; ++at) {
      CAPTURE(at);
      fake_device device;
      device.refuse_at = at;
      // A pool that refuses is asked once more: then it refuses again.
      device.refusals = at == 2 || at == 4 ? 3 : 1;
      if (at < 2) {
        CHECK_THROWS_WITH_AS(
            fake_pool(device_id{3}, device),
            at == 0 ? "device_pool_source: device 3: cannot create a memory pool: refused by the test (2)"
                    : "device_pool_source: device 3: cannot create a stream: refused by the test (2)",
            system_error);
      } else {
        fake_space space(fake_pool(device_id{0}, device), {.budget = mib});
        const auto first = space.try_allocate(100, 1);
        if (at < 4) CHECK(first.error() == failure{errc::system_refused, fake_device::refused, 100, mib});
        const bool has_more = space.try_allocate(100, 1).has_value();
        CHECK(has_more == (at != 4 && at != 5));
        CHECK(space.used() == 256U * ((at < 4 ? 0U : 1U) + (has_more ? 1U : 0U)));
      }
      CHECK(device.live() == 0);
      CHECK(device.objects() == 0);
      CHECK(device.wrong.empty());
    }
  }

  TEST_CASE(
      "bytes that the driver refuses to take stay charged, and are returned as soon as it accepts them") {
    fake_device device;
    fake_space space(fake_pool(device_id{0}, device), {.budget = 4 * page});
    const auto first = space.try_allocate(page, 512).value();
    const auto second = space.try_allocate(2 * page - 256, 512).value();
    CHECK(space.used() == 3 * page + 256);
    device.no_release = 900;
    space.deallocate(first);
    space.deallocate(second);
    CHECK(space.source().last_error() == 900);
    CHECK(space.used() == 3 * page + 256);  // the pool has it still
    CHECK(space.stats().kept_bytes == 3 * page + 256);
    CHECK(space.stats().ranges == 0);
    CHECK(space.audit().empty());
    CHECK(space.try_allocate(page, 1).error() == failure{errc::out_of_bytes, 0, page, page - 256});
    const auto third = space.try_allocate(256, 1).value();
    CHECK(space.stats().kept_bytes == 3 * page + 256);
    device.proceed(1000);
    CHECK(device.live() == 3);
    device.no_release = 0;
    space.deallocate(third);  // and what was kept along with it
    CHECK(space.used() == 0);
    CHECK(space.stats().kept_bytes == 0);
    device.proceed(1000);
    CHECK(device.live() == 0);

    const auto fourth = space.try_allocate(4 * page, 1).value();
    device.no_release = 900;
    space.deallocate(fourth);
    device.no_release = 0;
    CHECK(space.try_allocate(4 * page, 1).has_value());
    CHECK(space.stats().peak == 4 * page);
    CHECK(device.wrong.empty());
  }

  TEST_CASE("kept memory is returned at the end, or by the object to which it was moved") {
    fake_device device;
    {
      fake_pool pool(device_id{0}, device);
      std::byte* const kept = pool.take(1000, 256);
      device.no_release = 900;
      pool.give_back(kept, 1000, 256);
      fake_pool other(std::move(pool));
      CHECK(other.kept_bytes() == 1024);
      fake_pool third(device_id{0}, device);
      third = std::move(other);
      CHECK(third.kept_bytes() == 1024);
      device.no_release = 0;
    }
    CHECK(device.live() == 0);
    CHECK(device.objects() == 0);
    CHECK(device.wrong.empty());
  }

  TEST_CASE("a range that can neither be handed out nor returned at once is kept") {
    fake_device device;
    fake_space space(fake_pool(device_id{0}, device), {.budget = mib});
    device.refuse_at = device.calls + 1;  // to wait for it
    device.no_release = 900;
    CHECK(space.try_allocate(1000, 512).error() ==
          failure{errc::system_refused, fake_device::refused, 1000, mib - 1280});
    CHECK(space.used() == 1280);
    device.no_release = 0;
    CHECK(space.try_allocate(mib, 1).has_value());
    CHECK(space.stats().kept_bytes == 0);
    CHECK(device.wrong.empty());
  }

  TEST_CASE("an allocation waits for memory on its way back to the pool before it refuses") {
    for (const auto seed : llmmem_tests::seeds(20)) {
      CAPTURE(seed);
      fake_device device(seed);
      device.pool_bytes = 8 * page;
      fake_space space(fake_pool(device_id{0}, device), {.budget = mib});
      const auto first = space.try_allocate(4 * page, 1).value();
      const auto second = space.try_allocate(4 * page, 1).value();
      space.deallocate(first);
      space.deallocate(second);
      CHECK(space.try_allocate(8 * page, 1).has_value());
      CHECK(space.try_allocate(256, 1).error() ==
            failure{errc::system_refused, fake_device::refused, 256, mib - 8 * page});
      CHECK(device.wrong.empty());
    }
  }

  TEST_CASE("trim returns a peak's memory to the system, except held and kept ranges") {
    fake_device device;
    fake_space space(fake_pool(device_id{0}, device), {.budget = mib});
    const auto low = space.try_allocate(page, 1).value();
    const auto peak = space.try_allocate(16 * page, 1).value();
    space.deallocate(peak);
    CHECK(device.held() == 17 * page);
    CHECK(space.trim(8 * page));
    CHECK(device.held() == 9 * page);
    CHECK(space.trim());
    CHECK(device.held() == page);
    CHECK(space.used() == page);
    device.refuse_at = device.calls + 1;  // the driver may refuse that as well
    CHECK(space.trim().error() == failure{errc::device_failed, fake_device::refused, 0, 0});
    space.deallocate(low);
  }

  TEST_CASE("peers can access all ranges of a pool, or the pool is not made") {
    fake_device device;
    const std::array peers{device_id{1}, device_id{5}};
    {
      const fake_pool pool(device_id{0}, device, peers);
      CHECK(device.shared_with == std::vector<std::uint32_t>{1, 5});
    }
    device.refuse_at = device.calls + 2;
    CHECK_THROWS_WITH_AS(fake_pool(device_id{0}, device, peers),
                         "device_pool_source: device 0: cannot create memory that device 5 can access: "
                         "refused by the test (2)",
                         system_error);
    CHECK(device.objects() == 0);
  }

  TEST_CASE("without a device the space says why, and what to do") {
    fake_device device;
    device.why_none = "there is no driver";
    CHECK_THROWS_WITH_AS(fake_pool(device_id{0}, device),
                         "device_pool_source: device 0: no device: there is no driver; use host_space or "
                         "pinned memory there",
                         system_error);
    CHECK(device.calls == 0);
    device.why_none = nullptr;
    CHECK_THROWS_WITH_AS(fake_space(fake_pool(device_id{0}, device), {.name = "weights"}),
                         "weights: the budget is 0 bytes; set the bytes that it may hold", length_error);
    CHECK(device.objects() == 0);
  }

  TEST_CASE("a range of another space is reported and stays allocated") {
    fake_device device;
    std::vector<misuse> told;
    const auto tell = [](const misuse& what, void* to) noexcept {
      static_cast<std::vector<misuse>*>(to)->push_back(what);
    };
    fake_space space(fake_pool(device_id{0}, device),
                     {.budget = mib, .on_misuse = tell, .misuse_context = &told});
    auto range = space.try_allocate(1000, 1).value();
    space.deallocate(range.subrange(1, 999).value());
    space.deallocate({range.data, 999});
    CHECK(told.size() == 2);
    device.proceed(100);
    CHECK(device.live() == 1);
    space.deallocate(range);
    space.deallocate(range);
    space.deallocate({});
    CHECK(told.size() == 3);
    CHECK(told.back().what == misuse::kind::not_live);
    CHECK(space.stats().misuses == 3);
  }

  TEST_CASE("any resource of either form is a source, and an exception of it counts as a refusal") {
    sync_resource newer;
    check_resource(newer, newer.taken);
    older_resource older;
    check_resource(older, older.all.taken);
  }
}
