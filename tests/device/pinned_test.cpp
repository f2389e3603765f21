#include <llmmem/device/pinned.hpp>
#include <llmmem/space/host.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "support/fake_device.hpp"

namespace {

using namespace llmmem;
using llmmem_tests::fake_device;
using llmmem_tests::fake_runtime;

using fake_pinned = pinned_source<fake_runtime>;
using fake_space = basic_host_space<fake_pinned>;
static_assert(byte_source<fake_pinned> && memory_space<fake_space> && fake_space::is_host_accessible);

constexpr std::uint64_t mib = std::uint64_t{1} << 20;

}  // namespace

TEST_SUITE("pinned") {
  TEST_CASE("pages are registered chunk by chunk, and unregistered when they are returned") {
    fake_device device;
    {
      fake_space space(fake_pinned({.chunk_bytes = 2 * mib}, device), {.budget = 64 * mib});
      const auto large = space.try_allocate(5 * mib + 1, 4096).value();
      CHECK(device.registered() == 3);
      const auto one = space.try_allocate(1, 1).value();  // a page of its own: never one of the heap's
      CHECK(device.registered() == 4);
      CHECK(reinterpret_cast<std::uintptr_t>(one.data) % 4096 == 0);
      CHECK(space.source().report().registered_bytes == space.used());
      CHECK(space.source().why_no_device() == nullptr);
      std::memset(large.data, 1, large.bytes);
      space.deallocate(large);
      CHECK(device.registered() == 1);
    }
    CHECK(device.registered() == 0);
    CHECK(device.wrong.empty());
  }

  TEST_CASE("if the driver refuses a chunk, the request is refused, and no chunk stays registered") {
    for (std::uint64_t at = 0; at < 4; ++at) {
      CAPTURE(at);
      fake_device device;
      device.refuse_at = at;
      fake_space space(fake_pinned({.chunk_bytes = 2 * mib}, device), {.budget = 64 * mib});
      const auto range = space.try_allocate(6 * mib, 4096);
      CHECK(range.has_value() == (at == 3));
      if (!range)
        CHECK(range.error() == failure{errc::system_refused, fake_device::refused, 6 * mib, 64 * mib});
      CHECK(device.registered() == (at == 3 ? 3 : 0));
      CHECK(space.used() == (at == 3 ? 6 * mib : 0));
      CHECK(device.wrong.empty());
    }
  }

  TEST_CASE("without a device, memory comes from the system, locked as far as it allows, and all continues") {
    fake_device device;
    device.why_none = "there is no driver";
    fake_space space(fake_pinned({}, device), {.budget = 64 * mib});
    const auto range = space.try_allocate(3 * 4096, 4096).value();
    const auto other = space.try_allocate(4096, 4096).value();
    std::memset(range.data, 7, range.bytes);
    const pinned_report& report = space.source().report();
    CHECK(report.registered_bytes == 0);
    CHECK(report.locked_bytes + report.unlocked_bytes == space.used());
    CHECK((report.unlocked_bytes != 0) == (report.last_errno != 0));
    CHECK(device.registered() == 0);
    CHECK(space.source().why_no_device() == device.why_none);
    space.deallocate(range);
    CHECK(report.locked_bytes + report.unlocked_bytes == 4096);
    space.deallocate(other);
    CHECK(report.locked_bytes + report.unlocked_bytes == 0);
    CHECK(device.calls == 0);
  }

  TEST_CASE("kernels see the bytes at the driver's address, in one piece or not at all") {
    fake_device device;
    fake_space space(fake_pinned({.chunk_bytes = 2 * mib}, device), {.budget = 64 * mib});
    const auto range = space.try_allocate(4 * mib, 4096).value();
    const fake_pinned& source = space.source();
    CHECK(source.device_address(range.data + 5, 100).value() == range.data + 5 + fake_device::alias_shift);
    CHECK(source.device_address(range.data, range.bytes).has_value());
    device.aliased_apart = reinterpret_cast<std::uintptr_t>(range.data + 2 * mib);
    CHECK(source.device_address(range.data, 2 * mib).has_value());
    CHECK(source.device_address(range.data, 2 * mib + 1).error() ==
          failure{errc::not_mapped, 0, 2 * mib + 1, 2 * mib});
    CHECK(source.device_address(range.data, 1).has_value());
    device.lost = 77;
    CHECK(source.device_address(range.data, 1).error() == failure{errc::device_failed, 77, 1, 0});
  }

  TEST_CASE(
      "a registration that drivers always refuse is refused first, with a text that names the solution") {
    constexpr std::uint64_t limit = std::uint64_t{1} << 39;
    static_assert(fake_pinned::registration_limit == limit);
    fake_device device;
    fake_space space(fake_pinned({}, device), {.budget = 4 * limit});
    for (const std::uint64_t bytes : {limit - 1, limit, 2 * limit}) {  // in whole pages
      const auto refused = space.try_allocate(bytes, 4096);
      const std::uint64_t pages = (bytes + 4095) / 4096 * 4096;
      CHECK(refused.error() == failure{errc::out_of_bytes, 1, pages, limit - 1});
      CHECK(refused.error().message().find("chunk_bytes") != std::string::npos);
    }
    CHECK(space.stats().refusals == 3);
    CHECK(device.calls == 0);
    // What is below it is the system's to refuse, and so is the same in chunks.
    CHECK_FALSE(space.source().refusal(limit - 4096, 4096));
    CHECK_FALSE(fake_pinned({.chunk_bytes = limit / 2}, device).refusal(2 * limit, 4096));
    CHECK(fake_pinned({.chunk_bytes = limit}, device).refusal(2 * limit, 4096)->wanted == limit);
    device.why_none = "there is no driver";
    CHECK_FALSE(fake_pinned({}, device).refusal(2 * limit, 4096));
  }

  TEST_CASE("the named device registers pages, otherwise the current one") {
    fake_device device;
    device.current = 3;
    {
      fake_space space(fake_pinned({.device = device_id{5}}, device), {.budget = 64 * mib});
      const auto range = space.try_allocate(mib, 4096).value();
      CHECK(device.contexts == std::set<std::uint32_t>{5});
      space.deallocate(range);
    }
    fake_space space(fake_pinned({}, device), {.budget = 64 * mib});
    const auto range = space.try_allocate(mib, 4096).value();
    CHECK(device.contexts == std::set<std::uint32_t>{3, 5});
    space.deallocate(range);
  }

  TEST_CASE("a chunk that the driver cannot accept is refused") {
    fake_device device;
    CHECK_THROWS_WITH_AS(fake_pinned({.chunk_bytes = 3 * mib}, device),
                         "pinned_source: chunk_bytes is 3145728; it must be a multiple of 2 MiB",
                         argument_error);
    // Whole requests, unless chunks are asked for.
    fake_space space(fake_pinned({}, device), {.budget = 64 * mib});
    const auto range = space.try_allocate(9 * mib, 4096).value();
    CHECK(device.registered() == 1);
    space.deallocate(range);
    CHECK(device.registered() == 0);
  }
}
