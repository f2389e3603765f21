#include <llmmem/device/device.hpp>
#include <llmmem/device/streamed_space.hpp>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/testing/faulty_io.hpp>
#include <llmmem/testing/simulated_space.hpp>
#include <llmmem/testing/virtual_clock.hpp>
#include <llmmem/transfer/bounce_queue.hpp>
#include <llmmem/transfer/file_space.hpp>
#include <llmmem/transfer/posix_io.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/fake_device.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::faulty_io;
using llmmem::testing::io_fault;
using llmmem::testing::planned_fault;
using llmmem::testing::simulated_space;
using llmmem::testing::virtual_clock;

namespace {

using side = planned_fault::side;

constexpr std::uint64_t page = 4096;

using bytes = std::vector<std::byte>;

[[nodiscard]] bytes any_bytes(random_numbers& random, std::uint64_t count) {
  bytes all(static_cast<std::size_t>(count));
  for (std::byte& each : all)
    each = static_cast<std::byte>(random.next());
  return all;
}

/// Two devices that the host cannot touch, and a ring between them.
struct two_devices {
  explicit two_devices(bounce_options options, link_model above = {1'000'000'000, 1000},
                       link_model beneath = {1'000'000'000, 1000})
      : upper(clock, {.budget = 1 << 20, .name = "upper", .link = above}),
        lower(clock, {.budget = 1 << 20, .name = "lower", .link = beneath}),
        host({.budget = options.budget_bytes}),
        queue(upper, lower, host, std::move(options)) {}

  virtual_clock clock;
  simulated_space upper;
  simulated_space lower;
  host_space host;
  bounce_queue<simulated_space, simulated_space, host_space> queue;
};

void put(simulated_space& space, memory_range<simulated_space> range, const bytes& contents) {
  std::copy(contents.begin(), contents.end(), space.device_view(range).begin());
}
[[nodiscard]] bytes get(simulated_space& space, memory_range<simulated_space> range) {
  const std::span<std::byte> seen = space.device_view(range);
  return {seen.begin(), seen.end()};
}

/// A file above another whose device has a plan, and a ring of two pages between them.
struct two_files {
  using failing_space = file_space<faulty_io<posix_io>>;

  explicit two_files(const std::vector<planned_fault>& above, const std::vector<planned_fault>& beneath,
                     file_queue_options files = {}, std::uint64_t slots = 2)
      : upper(folder.file("upper"), {.budget = 1 << 20, .queue = files}, above),
        lower(folder.file("lower"), {.budget = 1 << 20, .queue = files}, beneath),
        host({.budget = 1 << 20}),
        queue(std::in_place, upper, lower, host,
              bounce_options{.budget_bytes = slots * page, .slot_bytes = page, .name = "ring"}) {
    from = upper.try_allocate(8 * page, page).value();
    to = lower.try_allocate(8 * page, page).value();
    random_numbers random(7);
    contents = any_bytes(random, 8 * page);
  }
  void fill(failing_space& space, memory_range<file_space<faulty_io<posix_io>>> range) {
    space.copy_in_async(range, contents, {}).value().wait();
  }
  [[nodiscard]] bytes seen(failing_space& space, memory_range<file_space<faulty_io<posix_io>>> range) {
    bytes all(static_cast<std::size_t>(range.bytes));
    space.copy_out_async(all, range, {}).value().wait();
    return all;
  }

  temporary_folder folder;
  failing_space upper;
  failing_space lower;
  host_space host;
  std::optional<bounce_queue<failing_space, failing_space, host_space>> queue;
  failing_space::range_type from{};
  failing_space::range_type to{};
  bytes contents;
};

}  // namespace

TEST_CASE("a poll does not wait for a place in a device's queue with fewer places than the ring has slots") {
  using device_space = basic_streamed_space<device_pool_source<fake_runtime>, fake_runtime>;
  for (const auto seed : seeds(20)) {
    CAPTURE(seed);
    fake_device device(seed);
    virtual_clock clock;
    random_numbers random(seed);
    device_space upper(device_pool_source<fake_runtime>(device_id{0}, device), device_id{0},
                       {.budget = 1 << 20}, {.depth = 1}, device);
    simulated_space lower(clock, {.budget = 1 << 20, .name = "lower", .link = {1'000'000'000, 1000}});
    host_space host({.budget = 1 << 20});
    bounce_queue queue(upper, lower, host, {.budget_bytes = 4 * page, .slot_bytes = page});
    const auto above = upper.try_allocate(9 * page, page).value();
    const auto beneath = lower.try_allocate(9 * page, page).value();
    const auto contents = any_bytes(random, 9 * page);
    put(lower, beneath, contents);
    const auto up = queue.copy_up_async(above, beneath).value();
    while (!up.ready()) {
      queue.poll();
      device.proceed(1);
      clock.advance(10'000);
    }
    up.wait();
    CHECK(device.waits == 0);
    put(lower, beneath, bytes(static_cast<std::size_t>(9 * page)));
    queue.copy_down_async(beneath, above).value().wait();
    CHECK(get(lower, beneath) == contents);
    CHECK(device.wrong.empty());
  }
}

TEST_CASE("bytes arrive unchanged through a ring, in both directions, with their checksum") {
  for (const auto seed : seeds(60)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::uint64_t slot = 256 * (1 + random.below(8U));
    two_devices world({.budget_bytes = slot * (1 + random.below(5U)), .slot_bytes = slot, .alignment = 256},
                      {1'000'000'000, 1000}, {100'000'000 * (1 + random.below(40U)), 5000});
    const std::uint64_t count = 1 + random.below(20'000U);
    const auto above = world.upper.try_allocate(count, 1).value();
    const auto beneath = world.lower.try_allocate(count, 1).value();
    const bytes contents = any_bytes(random, count);
    bounce_checksum sum{.bytes = random.below(std::uint64_t{count} + 1)};
    put(world.upper, above, contents);
    world.queue.copy_down_async(beneath, above, {}, llmmem::transfer::urgency::write_back, &sum)
        .value()
        .wait();
    CHECK(get(world.lower, beneath) == contents);
    CHECK(sum.crc == crc32c(0, std::span(contents).first(static_cast<std::size_t>(sum.bytes))));

    const bytes others = any_bytes(random, count);
    put(world.lower, beneath, others);
    world.queue.copy_up_async(above, beneath, {}, llmmem::transfer::urgency::demand, &sum).value().wait();
    CHECK(get(world.upper, above) == others);
    CHECK(sum.crc == crc32c(0, std::span(others).first(static_cast<std::size_t>(sum.bytes))));

    const bounce_stats stats = world.queue.stats();
    CHECK(stats.bytes_down == count);
    CHECK(stats.bytes_up == count);
    CHECK(stats.operations == 2);
    CHECK(stats.used_bytes == 0);
    CHECK(stats.peak_bytes <= stats.budget_bytes);
  }
}

TEST_CASE("random copies of all urgencies, begun and awaited in any order, move the right bytes") {
  for (const auto seed : seeds(40)) {
    CAPTURE(seed);
    random_numbers random(seed);
    two_devices world({.budget_bytes = 3 * 512, .slot_bytes = 512, .alignment = 256, .max_operations = 6});
    struct copy {
      memory_range<simulated_space> above;
      memory_range<simulated_space> beneath;
      bytes contents;
      bool down = false;
      std::optional<transfer_fence> begun;
    };
    std::vector<copy> copies;
    for (int i = 0; i < 12; ++i) {
      copy c;
      const std::uint64_t count = 1 + random.below(5'000U);
      c.above = world.upper.try_allocate(count, 1).value();
      c.beneath = world.lower.try_allocate(count, 1).value();
      c.contents = any_bytes(random, count);
      c.down = random.once_in(2);
      put(c.down ? world.upper : world.lower, c.down ? c.above : c.beneath, c.contents);
      copies.push_back(std::move(c));
    }
    std::size_t begun = 0;
    std::size_t open = 0;
    for (int step = 0; step < 400 && (begun < copies.size() || open != 0); ++step) {
      if (begun < copies.size() && open < 6 && random.once_in(2)) {
        copy& c = copies[begun++];
        const auto how = static_cast<llmmem::transfer::urgency>(random.below(3U));
        c.begun = c.down ? world.queue.copy_down_async(c.beneath, c.above, {}, how).value()
                         : world.queue.copy_up_async(c.above, c.beneath, {}, how).value();
        ++open;
        if (random.once_in(3)) world.queue.promote(*c.begun, llmmem::transfer::urgency::demand);
      } else if (open != 0 && random.once_in(3)) {
        copy& c = copies[random.below(begun)];
        if (!c.begun) continue;
        c.begun->wait();
        c.begun.reset();
        --open;
        CHECK(get(c.down ? world.lower : world.upper, c.down ? c.beneath : c.above) == c.contents);
      } else {
        world.clock.advance(random.below(2'000U));
        world.queue.poll();
      }
      REQUIRE(world.queue.stats().peak_bytes <= 3 * 512);
    }
  }
}

TEST_CASE("with two slots or more both links work at once, with one they alternate") {
  const auto taken = [](std::uint64_t slots) {
    two_devices world({.budget_bytes = slots * page, .slot_bytes = page}, {1'000'000'000, 0},
                      {1'000'000'000, 0});
    const auto above = world.upper.try_allocate(100 * page, page).value();
    const auto beneath = world.lower.try_allocate(100 * page, page).value();
    world.queue.copy_down_async(beneath, above).value().wait();
    return world.clock.now().ns;
  };
  // 100 pieces of 4096 ns each over each link.
  CHECK(taken(1) == 200 * page);
  CHECK(taken(2) == 101 * page);
  CHECK(taken(8) == 101 * page);
}

TEST_CASE("polls alone complete a copy") {
  two_devices world({.budget_bytes = 2 * page, .slot_bytes = page});
  const auto above = world.upper.try_allocate(10 * page, page).value();
  const auto beneath = world.lower.try_allocate(10 * page, page).value();
  random_numbers random(5);
  const bytes contents = any_bytes(random, 10 * page);
  put(world.upper, above, contents);
  const transfer_fence down = world.queue.copy_down_async(beneath, above).value();
  for (int i = 0; i < 100 && !down.ready(); ++i) {
    world.clock.advance(page);
    world.queue.poll();
  }
  REQUIRE(down.ready());
  CHECK(get(world.lower, beneath) == contents);
}

TEST_CASE("awaited copies go before the others") {
  two_devices world({.budget_bytes = 2 * page, .slot_bytes = page});
  const auto above = world.upper.try_allocate(64 * page, page).value();
  const auto beneath = world.lower.try_allocate(64 * page, page).value();
  const auto half = [](memory_range<simulated_space> range, std::uint64_t begin) {
    return range.subrange(begin * page, 16 * page).value();
  };
  const transfer_fence first = world.queue.copy_down_async(half(beneath, 0), half(above, 0)).value();
  const transfer_fence second = world.queue.copy_down_async(half(beneath, 16), half(above, 16)).value();
  const transfer_fence urgent = world.queue.copy_up_async(half(above, 32), half(beneath, 32)).value();
  urgent.wait();
  CHECK_FALSE(first.ready());
  world.queue.promote(second, llmmem::transfer::urgency::demand);
  second.wait();
  CHECK_FALSE(first.ready());
  first.wait();
  world.queue.promote(first, llmmem::transfer::urgency::demand);  // over: no change
}

TEST_CASE("a copy runs after its predecessors, and fails with them") {
  two_devices world({.budget_bytes = 2 * page, .slot_bytes = page});
  random_numbers random(1);
  const auto above = world.upper.try_allocate(8 * page, page).value();
  const auto beneath = world.lower.try_allocate(8 * page, page).value();
  const bytes contents = any_bytes(random, 8 * page);
  put(world.upper, above, contents);
  const transfer_fence down = world.queue.copy_down_async(beneath, above).value();
  // Of the same bytes: without its place behind the other it would bring up what lay there before.
  const transfer_fence up =
      world.queue.copy_up_async(above, beneath, std::span(&down, 1), llmmem::transfer::urgency::demand)
          .value();
  up.wait();
  CHECK(down.ready());
  CHECK(get(world.upper, above) == contents);

  const transfer_fence nothing =
      world.queue.copy_up_async({above.data, 0}, {beneath.data, 0}, std::span(&down, 1)).value();
  nothing.wait();
  const std::array<transfer_fence, 5> many{};
  const auto refused = world.queue.copy_up_async(above, beneath, many);
  CHECK(refused.code() == errc::out_of_range);

  two_files files({}, {{.what = io_fault::error, .first = 1, .number = EIO}});
  files.fill(files.upper, files.from);
  const transfer_fence bad = files.queue->copy_down_async(files.to, files.from).value();
  const transfer_fence behind = files.queue->copy_up_async(files.from, files.to, std::span(&bad, 1)).value();
  CHECK(behind.settled().code() == errc::dependency_failed);
  CHECK(bad.settled().code() == errc::write_failed);
}

TEST_CASE("a failure on either side is reported with its cause, and the ring continues") {
  two_files world({{.what = io_fault::error, .first = 3, .number = EIO, .way = side::reads}},
                  {{.what = io_fault::error, .first = 4, .number = ENOSPC, .way = side::writes}});
  world.fill(world.upper, world.from);
  const result<void> read = world.queue->copy_down_async(world.to, world.from).value().conclude();
  REQUIRE(read.code() == errc::read_failed);
  CHECK(read.error().index == EIO);
  CHECK(read.error().message().find("upper") != std::string::npos);
  const result<void> write = world.queue->copy_down_async(world.to, world.from).value().conclude();
  REQUIRE(write.code() == errc::write_failed);
  CHECK(write.error().index == ENOSPC);
  CHECK(write.error().message().find("lower") != std::string::npos);
  CHECK(world.queue->copy_down_async(world.to, world.from).value().conclude());
  CHECK(world.seen(world.lower, world.to) == world.contents);
  const bounce_stats stats = world.queue->stats();
  CHECK(stats.operations == 3);
  CHECK(stats.failures == 2);
  CHECK(stats.used_bytes == 0);
  CHECK(stats.lost_bytes == 0);
}

TEST_CASE("a slot that a device may still write to is never used again; without slots nothing is begun") {
  const file_queue_options impatient{.driver = llmmem::transfer::driven_by::waiters, .give_up_ns = 1'000'000};
  // An engine that has lost a request answers no other either: both slots go.
  const auto lose = [&](const std::vector<planned_fault>& above, const std::vector<planned_fault>& beneath,
                        error_code expected) {
    two_files world(above, beneath, impatient);
    world.fill(world.upper, world.from);
    CHECK(world.queue->copy_down_async(world.to, world.from).value().conclude().code() == expected);
    CHECK(world.queue->stats().lost_bytes == 2 * page);
    CHECK(world.queue->stats().used_bytes == 0);
    CHECK(world.queue->copy_down_async(world.to, world.from).code() == errc::out_of_bytes);
    // The ring stays on the space's account for good.
    CHECK(world.host.used() == 2 * page);
    world.queue.reset();
    CHECK(world.host.used() == 2 * page);
  };
  const std::vector<planned_fault> reads{{.what = io_fault::lost, .first = 1, .way = side::reads}};
  const std::vector<planned_fault> writes{{.what = io_fault::lost, .first = 1, .way = side::writes}};
  lose(reads, {}, errc::read_failed);  // on its way in: the destination is nobody's but its owner's
  lose({}, writes, errc::completion_lost);
}

TEST_CASE("a destination that may still be written to is reported before the first failure") {
  two_files world({{.what = io_fault::error, .first = 2, .number = EIO, .way = side::reads}},
                  {{.what = io_fault::lost, .first = 1, .way = side::writes}},
                  {.driver = llmmem::transfer::driven_by::waiters, .give_up_ns = 1'000'000});
  world.fill(world.upper, world.from);
  CHECK(world.queue->copy_down_async(world.to, world.from).value().conclude().code() ==
        errc::completion_lost);
  CHECK(world.queue->stats().lost_bytes == page);
}

TEST_CASE("when the last slot is lost, the copies that wait for one also fail") {
  const file_queue_options impatient{.driver = llmmem::transfer::driven_by::waiters, .give_up_ns = 1'000'000};
  two_files world({{.what = io_fault::lost, .first = 1, .way = side::reads}}, {}, impatient, 1);
  const transfer_fence first = world.queue->copy_down_async(world.to, world.from).value();
  const transfer_fence second = world.queue->copy_down_async(world.to, world.from).value();
  CHECK(second.settled().code() == errc::out_of_bytes);
  CHECK(first.settled().code() == errc::read_failed);
}

TEST_CASE("lengths that differ, full tables and too many unread failures are refused") {
  two_devices world({.budget_bytes = 2 * page,
                     .slot_bytes = page,
                     .max_operations = 1,
                     .max_failures = 1,
                     .name = "small"});
  const auto above = world.upper.try_allocate(8 * page, page).value();
  const auto beneath = world.lower.try_allocate(8 * page, page).value();
  const auto uneven = world.queue.copy_down_async(beneath, {above.data, page});
  CHECK(uneven.code() == errc::size_mismatch);
  CHECK(uneven.error().message().find("small") != std::string::npos);
  bounce_checksum too_long{.bytes = 8 * page + 1};
  CHECK(
      world.queue.copy_down_async(beneath, above, {}, llmmem::transfer::urgency::demand, &too_long).code() ==
      errc::past_the_bytes);
  {
    const transfer_fence one = world.queue.copy_down_async(beneath, above).value();
    CHECK(world.queue.copy_down_async(beneath, above).code() == errc::table_full);
    one.wait();
  }
  const auto dead = world.queue.copy_down_async({beneath.data + 64 * page, page}, {above.data, page}).value();
  CHECK(dead.settled().code() == errc::dead_range);
  CHECK(world.queue.copy_down_async(beneath, above).code() == errc::failures_kept);
  CHECK(dead.conclude().code() == errc::dead_range);
  CHECK(world.queue.copy_down_async(beneath, above));
}

TEST_CASE("a queue that is full of others' requests is tried again") {
  const temporary_folder folder;
  file_space<> upper(folder.file("upper"), {.budget = 1 << 20});
  file_space<> lower(
      folder.file("lower"),
      {.budget = 1 << 20, .queue = {.driver = llmmem::transfer::driven_by::waiters, .max_operations = 1}});
  host_space host({.budget = 1 << 20});
  bounce_queue between(upper, lower, host, {.budget_bytes = 4 * page, .slot_bytes = page});
  random_numbers random(3);
  const bytes contents = any_bytes(random, 32 * page);
  const auto above = upper.try_allocate(32 * page, page).value();
  const auto beneath = lower.try_allocate(32 * page, page).value();
  upper.copy_in_async(above, contents, {}).value().wait();
  between.copy_down_async(beneath, above).value().wait();
  bytes seen(contents.size());
  lower.copy_out_async(seen, beneath, {}).value().wait();
  CHECK(seen == contents);
}

TEST_CASE("a destroyed queue ends its copies in flight, and returns the ring") {
  virtual_clock clock;
  simulated_space upper(clock, {.budget = 1 << 20});
  simulated_space lower(clock, {.budget = 1 << 20});
  host_space host({.budget = 2 * page});
  const auto above = upper.try_allocate(64 * page, page).value();
  const auto beneath = lower.try_allocate(64 * page, page).value();
  {
    bounce_queue between(upper, lower, host, {.budget_bytes = 2 * page, .slot_bytes = page});
    CHECK(host.used() == 2 * page);
    CHECK(between.copy_down_async(beneath, above));
    CHECK(between.stats().used_bytes == 2 * page);
  }
  CHECK(host.used() == 0);
  CHECK(upper.stats().in_flight == 0);
  CHECK(lower.stats().in_flight == 0);
}

TEST_CASE("a ring smaller than a slot, or with an invalid alignment, is refused with a valid size") {
  const auto refused = [](bounce_options options) -> std::string {
    try {
      two_devices world(std::move(options));
    } catch (const argument_error& error) {
      return error.what();
    }
    return {};
  };
  const std::string small = refused({.budget_bytes = page - 1, .slot_bytes = page});
  CHECK(small.find("4095 bytes has no space for a slot of 4096") != std::string::npos);
  CHECK(refused({.budget_bytes = page, .slot_bytes = 0}).find("at least one slot") != std::string::npos);
  CHECK(refused({.budget_bytes = page, .slot_bytes = 1000}).find("power of two") != std::string::npos);
  CHECK(refused({.budget_bytes = page, .slot_bytes = page, .alignment = 24}).find("power of two") !=
        std::string::npos);
  CHECK(refused({.budget_bytes = page, .slot_bytes = page, .max_operations = 0}).find("max_operations") !=
        std::string::npos);
  virtual_clock clock;
  simulated_space device(clock, {.budget = 1 << 20});
  host_space host({.budget = page});
  CHECK_THROWS_AS((bounce_queue(device, device, host, {.budget_bytes = 2 * page, .slot_bytes = page})),
                  out_of_memory);
}
