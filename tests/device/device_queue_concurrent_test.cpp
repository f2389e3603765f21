#include <llmmem/device/device.hpp>
#include <llmmem/device/device_fence.hpp>
#include <llmmem/device/device_queue.hpp>

#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <thread>
#include <vector>

#include "support/comm_job.hpp"
#include "support/fake_device.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using llmmem_tests::bytes_of_seed;
using llmmem_tests::fake_device;
using llmmem_tests::fake_runtime;

using fake_space = basic_device_space<device_pool_source<fake_runtime>>;
using fake_queue = basic_device_queue<fake_space, fake_runtime>;
using fake_fence = device_fence<fake_runtime>;
using fake_events = device_events<fake_runtime>;
static_assert(fence<fake_fence>);
static_assert(copy_queue<fake_queue, fake_space>);
static_assert(sizeof(fake_fence) == 16 && std::is_trivially_copyable_v<fake_fence>);

constexpr std::uint64_t mib = std::uint64_t{1} << 20;
constexpr device_id here{0};

fake_space space_of(fake_device& device) {
  return fake_space(device_pool_source<fake_runtime>(here, device), {.budget = mib});
}

/// What a `refusing_runtime` does otherwise than its device.
struct refusals {
  std::atomic<device_status> record = 0;
  std::atomic<device_status> wait_stream = 0;
  std::atomic<bool> holds_waits = false;  // events are waited for, without an end
  std::atomic<bool> is_waiting = false;
};
struct refusing_runtime : fake_runtime {
  refusals* how;

  refusing_runtime(fake_device& device, refusals& of) : fake_runtime(device), how(&of) {}
  device_status record(event of, stream on) const noexcept {
    return how->record != 0 ? how->record.load() : fake_runtime::record(of, on);
  }
  device_status wait_stream(stream on) const noexcept {
    const device_status done = fake_runtime::wait_stream(on);
    return how->wait_stream != 0 ? how->wait_stream.load() : done;
  }
  device_status wait_event(event of) const noexcept {
    how->is_waiting = true;
    while (how->holds_waits)
      std::this_thread::yield();
    return fake_runtime::wait_event(of);
  }
};
static_assert(device_runtime<refusing_runtime>);

}  // namespace

TEST_SUITE("device_queue") {
  TEST_CASE("copies of two queues, each after its dependencies, give the result of copies in sequence") {
    for (const auto seed : llmmem_tests::seeds(60)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      fake_device device(seed);
      {
        fake_space space = space_of(device);
        const auto depth = static_cast<std::uint32_t>(1 + random() % 4);
        fake_queue first(space, here, {.depth = depth}, device);
        fake_queue second(space, here, {.depth = depth}, device);
        constexpr std::size_t pieces = 4;
        constexpr std::size_t bytes = 100;
        const auto room = space.try_allocate(pieces * bytes, 1).value();
        std::array<std::vector<std::byte>, pieces> model;
        std::array<fake_fence, pieces> last{};  // of what was done to a piece
        std::vector<std::vector<std::byte>> sources;
        std::vector<std::pair<std::vector<std::byte>, std::vector<std::byte>>> seen;
        seen.reserve(200);
        sources.reserve(200);
        for (auto& each : model)
          each.assign(bytes, std::byte{0xCD});
        const auto piece = [&](std::size_t i) { return room.subrange(i * bytes, bytes).value(); };
        for (int step = 0; step < 100; ++step) {
          fake_queue& on = random() % 2 == 0 ? first : second;
          const std::size_t a = random() % pieces;
          const std::size_t b = (a + 1 + random() % (pieces - 1)) % pieces;
          const std::array<fake_fence, 2> both{last[a], last[b]};
          switch (random() % 4) {
            case 0:
              sources.push_back(bytes_of_seed(bytes, random()));
              last[a] = on.copy_in_async(piece(a), sources.back(), std::span(both).first(1)).value();
              model[a] = sources.back();
              break;
            case 1:
              seen.emplace_back(std::vector<std::byte>(bytes), model[a]);
              last[a] = on.copy_out_async(seen.back().first, piece(a), std::span(both).first(1)).value();
              break;
            case 2:
              last[a] = last[b] = on.copy_within_async(piece(a), piece(b), both).value();
              model[a] = model[b];
              break;
            default:
              if (random() % 2 == 0) {
                on.follow(both).value();
                last[a] = on.mark().value();
              } else if (last[a].ready()) {
                last[a].wait();
              }
          }
        }
        wait_all(std::span<const fake_fence>(last));
        CHECK(all_ready(std::span<const fake_fence>(last)));
        for (const auto& [was, expected] : seen)
          if (was != expected) CHECK(was == expected);
        for (std::size_t i = 0; i < pieces; ++i)
          CHECK(std::memcmp(piece(i).data, model[i].data(), bytes) == 0);
        space.deallocate(room);
      }
      CHECK(device.objects() == 0);
      CHECK(device.wrong.empty());
    }
  }

  TEST_CASE("a fence passes with its own copy, not with an earlier or later one") {
    const auto bytes = bytes_of_seed(100, 1);
    fake_device device;
    fake_space space = space_of(device);
    fake_queue queue(space, here, {.depth = 3}, device);
    const auto room = space.try_allocate(300, 1).value();
    CHECK(fake_fence{}.ready());
    fake_fence{}.wait();
    const auto first = queue.copy_in_async(room.subrange(0, 100).value(), bytes, {}).value();
    const auto next = queue.copy_in_async(room.subrange(100, 100).value(), bytes, {}).value();
    CHECK(std::memcmp(room.data, bytes.data(), 100) != 0);  // nothing is done yet
    first.wait();
    CHECK(first.ready());
    CHECK(std::memcmp(room.data, bytes.data(), 100) == 0);
    next.wait();
    CHECK(std::memcmp(room.data + 100, bytes.data(), 100) == 0);
    // With all three marks on their way, a fourth waits for the oldest.
    std::array<fake_fence, 4> all;
    for (fake_fence& each : all)
      each = queue.mark().value();
    CHECK(all[0].ready());
    CHECK(first != next);
  }

  TEST_CASE("space is available once the oldest point has passed, even if no caller asked for it") {
    fake_device device(4);
    fake_space space = space_of(device);
    fake_queue queue(space, here, {.depth = 2}, device);
    CHECK(queue.has_capacity());
    static_cast<void>(queue.mark().value());
    CHECK(queue.has_capacity());
    static_cast<void>(queue.mark().value());
    int asked = 0;
    for (; !queue.has_capacity(); ++asked)
      REQUIRE(asked < 1000);
    CHECK(asked > 0);  // both were on their way
    CHECK(device.waits == 0);
    CHECK(queue.mark().has_value());
    CHECK(device.waits == 0);
  }

  TEST_CASE("an impossible copy is refused before any call of the driver") {
    fake_device device;
    fake_space space = space_of(device);
    fake_queue queue(space, here, {.name = "up"}, device);
    const auto room = space.try_allocate(300, 1).value();
    std::vector<std::byte> host(100);
    const std::uint64_t calls = device.calls;
    CHECK(queue.copy_in_async(room, host, {}).error() == failure{errc::size_mismatch, 0, 300, 100});
    CHECK(queue.copy_out_async(host, room, {}).error() == failure{errc::size_mismatch, 0, 100, 300});
    const fake_space::range_type beyond{room.data + 250, 100};
    CHECK(queue.copy_in_async(beyond, host, {}).error() == failure{errc::dead_range, 0, 100});
    CHECK(queue.copy_within_async(beyond, {room.data, 100}, {}).error() == failure{errc::dead_range, 0, 100});
    CHECK(queue.copy_within_async({room.data, 100}, beyond, {}).error() == failure{errc::dead_range, 0, 100});
    CHECK(queue.copy_within_async({room.data + 60, 100}, {room.data, 100}, {}).error() ==
          failure{errc::overlapping_ranges, 0, 100, 40});
    CHECK(device.calls == calls);
    CHECK(queue.copy_in_async({}, {}, {}).has_value());
    CHECK_THROWS_WITH_AS(fake_queue(space, here, {.depth = 0}, device),
                         "device_events: the number of events is 0; it must be at least 1", length_error);
  }

  TEST_CASE("if the driver refuses any call, that is reported, and nothing stays in flight") {
    bool was_well = false;
    for (std::uint64_t at = 0; !was_well; ++at) {
      CAPTURE(at);
      REQUIRE(at < 100);
      fake_device device;
      fake_space space = space_of(device);
      const auto room = space.try_allocate(100, 1).value();
      device.refuse_at = device.calls + at;
      const std::uint64_t refused_at = device.refuse_at;
      const auto bytes = bytes_of_seed(100, 1);
      std::vector<std::byte> back(100);
      try {
        fake_queue queue(space, here, {.depth = 2}, device);
        fake_queue other(space, here, {.depth = 2}, device);
        const auto in = queue.copy_in_async(room, bytes, {});
        const auto out = other.copy_out_async(back, room, std::span(&*in, in ? 1 : 0));
        if (!in || !out) {
          CHECK((in ? out : in).error().code == errc::device_failed);
          CHECK((in ? out : in).error().index == fake_device::refused);
          const std::vector<std::byte> there(room.data, room.data + room.bytes);
          const std::vector<std::byte> here_now = back;
          if (!in) device.proceed(100);
          CHECK(std::memcmp(there.data(), room.data, there.size()) == 0);
          if (!out) CHECK(here_now == back);
        } else {
          out->wait();
          CHECK(back == bytes);
        }
      } catch (const system_error& error) {
        CHECK(std::string(error.what()).find("refused by the test (2)") != std::string::npos);
      }
      was_well = device.calls <= refused_at;
      CHECK(device.wrong.empty());
      CHECK(device.objects() == 2);  // those of the space
    }
  }

  TEST_CASE("no point is marked inside a graph, and earlier points can be queried meanwhile") {
    fake_device device;
    fake_space space = space_of(device);
    fake_queue queue(space, here, {.depth = 4}, device);
    const fake_fence before = queue.mark().value();
    device.is_capturing = true;
    CHECK(queue.mark().error() == failure{errc::device_failed, fake_device::not_ready, 0, 0});
    // Nothing was put into the graph, and nothing that would end its capture.
    const auto bytes = bytes_of_seed(100, 1);
    const auto room = space.try_allocate(100, 1).value();
    const std::uint64_t calls = device.calls;
    CHECK(queue.copy_in_async(room, bytes, std::array{before}).error() ==
          failure{errc::device_failed, fake_device::not_ready, 100, 0});
    CHECK(before.hold(queue.stream()).error() == failure{errc::device_failed, fake_device::not_ready, 0, 0});
    CHECK(device.calls == calls);
    before.wait();
    CHECK(before.hold(queue.stream()));  // it has passed
    CHECK(before.ready());
    device.is_capturing = false;
    queue.mark().value().wait();
    device.why_none = "there is no driver";
    CHECK_THROWS_WITH_AS(fake_events(here, 2, device), "device_events: no device: there is no driver",
                         system_error);
  }

  TEST_CASE("a copy that the driver accepted without its marker is distinguished from a refused copy") {
    const auto bytes = bytes_of_seed(100, 1);
    fake_device device;
    fake_space space = space_of(device);
    refusals refused;
    basic_device_queue<fake_space, refusing_runtime> queue(space, here, {.depth = 2}, {device, refused});
    const auto room = space.try_allocate(100, 1).value();
    refused.record = 700;
    CHECK(queue.copy_in_async(room, bytes, {}).error() == failure{errc::device_failed, 700, 0, 0});
    CHECK(std::memcmp(room.data, bytes.data(), 100) == 0);
    refused.wait_stream = 719;
    CHECK(queue.copy_in_async(room, bytes, {}).error() == failure{errc::completion_lost, 0, 100, 0});
    refused.record = 0;
    refused.wait_stream = 0;
    queue.copy_in_async(room, bytes, {}).value().wait();
    space.deallocate(room);
  }

  TEST_CASE("a wait that fails is made again to end the work, and the first failure is returned") {
    fake_device device;
    fake_space space = space_of(device);
    fake_queue queue(space, here, {}, device);
    const auto range = space.try_allocate(4096, 256).value();
    const auto bytes = bytes_of_seed(4096, 1);
    static_cast<void>(queue.copy_in_async(range, bytes, {}).value());
    CHECK(std::memcmp(range.data, bytes.data(), 4096) != 0);
    device.refuse_at = device.calls;
    const failure refused{errc::device_failed, fake_device::refused, 0, 0, "device_queue"};
    CHECK(queue.finish().error() == refused);
    CHECK(std::memcmp(range.data, bytes.data(), 4096) == 0);
    queue.finish().value();
    device.refuse_at = device.calls;
    device.refusals = 2;
    CHECK(queue.finish().error() == refused);
    device.is_capturing = true;  // the wait would end the capture
    CHECK(queue.finish().error() ==
          failure{errc::device_failed, fake_device::not_ready, 0, 0, "device_queue"});
    device.is_capturing = false;
    space.deallocate(range);
  }

  TEST_CASE("fences can be queried while a thread waits for a place") {
    fake_device device;
    refusals held;
    const refusing_runtime run(device, held);
    refusing_runtime::stream stream{};
    REQUIRE(run.make_stream(&stream, here) == 0);
    {
      device_events<refusing_runtime> events(here, 1, run);
      const auto first = events.mark(stream).value();
      held.holds_waits = true;
      std::thread marks([&] { events.mark(stream).value().wait(); });
      while (!held.is_waiting)
        std::this_thread::yield();
      std::atomic<bool> is_told = false;
      std::thread asks([&] {
        static_cast<void>(first.ready());
        is_told = true;
      });
      for (int i = 0; i < 5000 && !is_told; ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      CHECK(is_told);  // while the other waits
      held.holds_waits = false;
      asks.join();
      marks.join();
      CHECK(first.ready());
    }
    REQUIRE(run.end_stream(stream) == 0);
  }

  TEST_CASE("of several errors of a device the first is reported") {
    fake_device device;
    fake_space space = space_of(device);
    fake_queue queue(space, here, {.depth = 4}, device);
    const auto first = queue.mark().value();
    const auto second = queue.mark().value();
    device.lost = 700;
    CHECK(first.ready());
    device.lost = 719;
    CHECK(second.ready());
    device.lost = 0;
    CHECK(queue.mark().error() == failure{errc::device_failed, 700, 0, 0});
  }

  TEST_CASE("every fence that has not passed reports a lost device, and no call waits for it") {
    const auto bytes = bytes_of_seed(100, 1);
    fake_device device;
    fake_space space = space_of(device);
    fake_queue queue(space, here, {.depth = 4}, device);
    const auto room = space.try_allocate(100, 1).value();
    const auto fine = queue.copy_in_async(room, bytes, {}).value();
    fine.wait();
    const auto first = queue.copy_in_async(room, bytes, {}).value();
    const auto second = queue.mark().value();
    device.lost = 700;
    CHECK(second.ready());
    CHECK_THROWS_WITH_AS(first.wait(),
                         "device_fence: the device reports refused by the test (700): do not use results "
                         "that it has computed since",
                         system_error);
    CHECK_THROWS_AS(second.wait(), system_error);
    CHECK(queue.copy_in_async(room, bytes, {}).error().code == errc::device_failed);
    CHECK(queue.mark().error() == failure{errc::device_failed, 700, 0, 0});
    CHECK(first.hold(queue.stream()).code() == errc::device_failed);
    device.lost = 0;
  }

  TEST_CASE("threads query and wait for the same fences while marks continue") {
    fake_device device(7);
    fake_space space = space_of(device);
    fake_queue queue(space, here, {.depth = 3}, device);
    const auto work = [&] {
      for (int i = 0; i < 200; ++i) {
        const fake_fence mine = queue.mark().value();
        static_cast<void>(mine.ready());
        mine.wait();
        CHECK(mine.ready());
      }
    };
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i)
      threads.emplace_back(work);
    for (std::thread& each : threads)
      each.join();
    CHECK(device.wrong.empty());
  }
}
