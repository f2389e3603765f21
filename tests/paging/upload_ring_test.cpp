#include <llmmem/paging/upload_ring.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/testing/simulated_space.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <deque>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

using ring_type = upload_ring<host_space, host_space>;

[[nodiscard]] std::uint64_t word(const memory_range<host_space>& range) {
  std::uint64_t out = 0;
  std::memcpy(&out, range.data, sizeof(out));
  return out;
}

}  // namespace

TEST_CASE("no slot is handed out while a copy or a kernel may read it, in any order of completion") {
  for (const auto seed : seeds(200)) {
    CAPTURE(seed);
    random_numbers random(seed);
    host_space host({.budget = 1 << 16});
    ring_type ring(
        host, host,
        {.slot_bytes = 8 + random.below(std::uint64_t{100}), .slots = 2 + random.below(std::uint32_t{3})});
    struct flight {
      host_timeline* stream;
      host_fence after;
      memory_range<host_space> target;
      std::uint64_t value;
    };
    std::deque<host_timeline> streams(2);
    std::deque<flight> flying;
    std::uint64_t refused = 0;
    for (std::uint64_t step = 1; step < 200; ++step) {
      const auto slot = ring.acquire();
      if (!slot) {
        CHECK(slot.code() == errc::ring_busy);
        REQUIRE(flying.size() == ring.slots());
        ++refused;
      } else {
        std::memcpy(slot->staging.data, &step, sizeof(step));
        ring.upload(host, *slot, sizeof(step)).value().wait();
        host_timeline& stream = streams[random.below(std::uint64_t{streams.size()})];
        flying.push_back({&stream, stream.issue(), slot->target, step});
        ring.release_after(*slot, flying.back().after).value();
      }
      while (!flying.empty() && (flying.size() == ring.slots() || random.once_in(2))) {
        // The kernel reads until its fence passes; points of a stream pass in order, so the oldest goes
        // first.
        REQUIRE(word(flying.front().target) == flying.front().value);
        REQUIRE(flying.front().stream->pass(flying.front().after));
        flying.pop_front();
        if (random.once_in(3)) break;
      }
      for (const flight& each : flying)
        REQUIRE(word(each.target) == each.value);
    }
    static_cast<void>(refused);
  }
}

TEST_CASE("a ring with all slots in flight reports it, or waits") {
  host_space host({.budget = 1 << 16});
  ring_type ring(host, host, {.slot_bytes = 100, .slots = 2, .name = "tables"});
  host_timeline stream;
  const auto one = ring.acquire().value();
  const auto two = ring.acquire().value();
  CHECK(ring.acquire().error().message() ==
        "tables: slot 0 of 2 is still in use; release it after the fence of its last kernel, or build more "
        "slots");
  CHECK(ring.acquire_wait().code() == errc::ring_busy);
  const host_fence after = stream.issue();
  REQUIRE(ring.release_after(one, after));
  CHECK(ring.acquire().code() == errc::ring_busy);
  REQUIRE(stream.pass(after));
  const auto three = ring.acquire_wait().value();
  CHECK(three.target.data == one.target.data);
  CHECK(three.staging.data != two.staging.data);

  CHECK(ring.release_after(one, {}).code() == errc::stale_handle);
  CHECK(ring.upload(host, one, 1).code() == errc::stale_handle);
  CHECK(ring.upload(host, two, 101).error().message() ==
        "tables: bytes up to 101 requested, but it has 100; request fewer, or make it larger");
  CHECK(ring.release_after({}, {}).code() == errc::null_handle);
  ring_type other(host, host, {.slot_bytes = 100});
  CHECK(other.release_after(two, {}).code() == errc::foreign_handle);
  REQUIRE(ring.release_after(two, {}));
  CHECK(ring.release_after(two, {}).code() == errc::stale_handle);
}

TEST_CASE(
    "slots are aligned on both sides, and kernels read what was written, in a space that the host cannot "
    "access") {
  host_space host({.budget = 1 << 16});
  testing::virtual_clock clock;
  testing::simulated_space device(clock, {.budget = 1 << 16});
  upload_ring<host_space, testing::simulated_space, testing::virtual_fence> ring(
      host, device, {.slot_bytes = 300, .slots = 3, .alignment = 128});
  for (std::uint8_t step = 1; step < 7; ++step) {
    const auto slot = ring.acquire_wait().value();
    CHECK(reinterpret_cast<std::uintptr_t>(slot.staging.data) % 128 == 0);
    CHECK(reinterpret_cast<std::uintptr_t>(slot.target.data) % 128 == 0);
    std::memset(slot.staging.data, step, 300);
    const auto there = ring.upload(device, slot, 300).value();
    std::vector<std::byte> seen(300);
    const auto back = device.copy_out_async(seen, slot.target, {&there, 1}).value();
    REQUIRE(ring.release_after(slot, back));
    back.wait();
    CHECK(seen == std::vector<std::byte>(300, std::byte{step}));
  }
}

TEST_CASE("impossible numbers of a ring are refused") {
  host_space host({.budget = 1 << 10});
  CHECK_THROWS_WITH_AS(ring_type(host, host, {}), "upload_ring: slots of 0 bytes; at least 1 is needed",
                       length_error);
  CHECK_THROWS_WITH_AS(ring_type(host, host, {.slot_bytes = 1, .slots = 1}),
                       "upload_ring: 1 slots; at least 2 are needed, one to write while one is in flight",
                       length_error);
  CHECK_THROWS_WITH_AS(ring_type(host, host, {.slot_bytes = 1, .alignment = 3}),
                       "upload_ring: alignment 3 is not a power of two", argument_error);
  CHECK_THROWS_AS(ring_type(host, host, {.slot_bytes = 500}), out_of_memory);
  CHECK(host.used() == 0);
}
