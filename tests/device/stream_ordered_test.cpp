#include <llmmem/device/device.hpp>
#include <llmmem/device/stream_ordered.hpp>

#include <doctest/doctest.h>
#include <llmmem/space/buffer.hpp>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "support/fake_device.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using llmmem_tests::fake_device;
using llmmem_tests::fake_runtime;

using fake_pool = device_pool_source<fake_runtime>;
using fake_space = basic_device_space<fake_pool>;
using ordered_space = stream_ordered<fake_space, fake_runtime>;
static_assert(memory_space<ordered_space>);

constexpr std::uint64_t kib = 1024;
constexpr device_id first{0};

/// A space under a budget, and two streams that get work.
struct world {
  explicit world(std::uint64_t seed = 1, std::uint64_t budget = 64 * kib)
      : device(seed), space(fake_pool(first, device), {.budget = budget}) {
    for (auto& each : streams)
      REQUIRE(fake_runtime(device).make_stream(&each, first) == 0);
  }
  ~world() {
    for (auto& each : streams)
      static_cast<void>(fake_runtime(device).end_stream(each));
  }
  world(const world&) = delete;
  world& operator=(const world&) = delete;

  fake_device device;
  fake_space space;
  std::uintptr_t streams[2]{};
};

/// Calls a function before each point is recorded, outside all locks of `stream_ordered`.
class interrupted_runtime : public fake_runtime {
 public:
  interrupted_runtime(fake_device& device, const std::function<void()>& before)
      : fake_runtime(device), before_(&before) {}
  device_status record(event of, stream on) const noexcept {
    if (*before_) (*before_)();
    return fake_runtime::record(of, on);
  }

 private:
  const std::function<void()>* before_;
};

void note_misuse(const misuse& what, void* into) noexcept {
  static_cast<std::vector<misuse::kind>*>(into)->push_back(what.what);
}

}  // namespace

TEST_SUITE("stream_ordered") {
  TEST_CASE(
      "a range returned behind a stream stays allocated until the stream has passed, while the caller "
      "continues") {
    world of;
    ordered_space memory(of.space, first, of.device);
    const auto range = memory.try_allocate(8 * kib, 256).value();
    std::vector<std::byte> up(8 * kib);
    REQUIRE(fake_runtime(of.device).copy(range.data, up.data(), up.size(), of.streams[0]) == 0);
    memory.deallocate(range, of.streams[0]);
    CHECK(of.device.waits == 0);
    CHECK(memory.used() == 8 * kib);
    CHECK(memory.stats().pending_ranges == 1);
    CHECK(memory.stats().pending_bytes == 8 * kib);
    CHECK(!memory.holds(range));
    REQUIRE(fake_runtime(of.device).wait_stream(of.streams[0]) == 0);
    memory.collect();
    CHECK(memory.used() == 0);
    CHECK(memory.stats().pending_ranges == 0);
    CHECK(of.device.wrong.empty());
  }

  TEST_CASE(
      "an allocation waits for streams only if the budget is short, and takes back the oldest range first") {
    world of;
    ordered_space memory(of.space, first, of.device);
    const auto a = memory.try_allocate(32 * kib, 256).value();
    const auto b = memory.try_allocate(32 * kib, 256).value();
    memory.deallocate(a, of.streams[0]);
    memory.deallocate(b, of.streams[1]);
    CHECK(memory.stats().waits == 0);
    const auto c = memory.try_allocate(48 * kib, 256);
    REQUIRE(c);
    CHECK(memory.stats().waits > 0);
    memory.deallocate(*c);
    // What nothing returns does not help, and is refused at once.
    const auto d = memory.try_allocate(60 * kib, 256).value();
    const auto waits = memory.stats().waits;
    CHECK(memory.try_allocate(8 * kib, 256).error().code == errc::out_of_bytes);
    CHECK(memory.stats().waits == waits);
    memory.deallocate(d);
    CHECK(memory.used() == 0);
  }

  TEST_CASE("a range returned during a capture stays until the graph is destroyed") {
    world of;
    {
      ordered_space memory(of.space, first, of.device);
      const auto range = memory.try_allocate(kib, 256).value();
      of.device.is_capturing = true;
      memory.deallocate(range, of.streams[0]);
      of.device.is_capturing = false;
      memory.collect();
      CHECK(memory.stats().captured_bytes == kib);
      CHECK(memory.used() == kib);
      memory.release_captured();
      CHECK(memory.used() == 0);
      const auto more = memory.try_allocate(kib, 256).value();
      of.device.is_capturing = true;
      memory.deallocate(more, of.streams[0]);
      of.device.is_capturing = false;
    }
    CHECK(of.space.used() == 0);  // its end returned it
  }

  TEST_CASE("returns beyond the depth wait for the oldest, and nothing is lost") {
    world of;
    ordered_space memory(of.space, first, of.device, {.depth = 2});
    for (int i = 0; i < 20; ++i)
      memory.deallocate(memory.try_allocate(kib, 256).value(), of.streams[i % 2]);
    CHECK(memory.stats().pending_ranges <= 20);
    REQUIRE(fake_runtime(of.device).wait_stream(of.streams[0]) == 0);
    REQUIRE(fake_runtime(of.device).wait_stream(of.streams[1]) == 0);
    memory.collect();
    CHECK(memory.used() == 0);
  }

  TEST_CASE("a range returned twice, in part or to the wrong space is reported, and changes nothing") {
    world of;
    std::vector<misuse::kind> seen;
    ordered_space memory(of.space, first, of.device, {.on_misuse = &note_misuse, .misuse_context = &seen});
    const auto range = memory.try_allocate(4 * kib, 256).value();
    memory.deallocate(range.subrange(0, kib).value(), of.streams[0]);
    memory.deallocate(range.subrange(kib, kib).value());
    memory.deallocate(range, of.streams[0]);
    memory.deallocate(range, of.streams[0]);  // pending
    memory.deallocate(range);
    const auto of_beneath = of.space.try_allocate(kib, 256).value();
    memory.deallocate(of_beneath);
    CHECK(seen == std::vector{misuse::kind::wrong_size, misuse::kind::inside, misuse::kind::not_live,
                              misuse::kind::not_live, misuse::kind::not_live});
    CHECK(memory.stats().misuses == 5);
    of.space.deallocate(of_beneath);
  }

  TEST_CASE("the space waits for the stream if a point is refused, and keeps the memory of a lost device") {
    world of;
    ordered_space memory(of.space, first, of.device);
    const auto a = memory.try_allocate(kib, 256).value();
    const auto b = memory.try_allocate(kib, 256).value();
    of.device.refuse_at = of.device.calls;  // the next call, which records
    memory.deallocate(a, of.streams[0]);
    CHECK(memory.used() == kib);
    of.device.refuse_at = ~std::uint64_t{0};
    of.device.lost = 719;
    memory.deallocate(b, of.streams[0]);
    CHECK(memory.used() >= kib);
    of.device.lost = 0;
    CHECK(memory.stats().captured_bytes == kib);
    memory.release_captured();
  }

  TEST_CASE("an allocation waits for a range that another thread is returning at that moment") {
    world of;
    std::function<void()> before;
    stream_ordered memory(of.space, first, interrupted_runtime(of.device, before));
    const auto range = memory.try_allocate(64 * kib, 256).value();
    std::atomic<bool> is_over{false};
    bool has_got = false;
    std::thread other;
    before = [&] {
      other = std::thread([&] {
        const auto got = memory.try_allocate(64 * kib, 256);
        has_got = got.has_value();
        is_over = true;
        if (got) memory.deallocate(*got);
      });
      // Time to be refused, for one that does not wait.
      for (int i = 0; i < 2000 && !is_over; ++i)
        std::this_thread::yield();
    };
    memory.deallocate(range, of.streams[0]);
    other.join();
    before = nullptr;
    CHECK(has_got);
    CHECK(memory.used() == 0);
  }

  TEST_CASE("no memory is reused before its stream has passed, in any order of two streams") {
    for (const auto seed : llmmem_tests::seeds(30)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const std::vector<std::byte> bytes(16 * kib, std::byte{1});  // copies read it until `memory` ends
      world of(seed);
      {
        ordered_space memory(of.space, first, of.device, {.depth = 4});
        std::vector<ordered_space::range_type> live;
        for (int i = 0; i < 200; ++i) {
          const std::uintptr_t stream = of.streams[random() % 2];
          if (!live.empty() && random() % 2 == 0) {
            const std::size_t which = random() % live.size();
            // A copy that is still to come would have written here.
            if (std::any_of(live[which].data, live[which].data + live[which].bytes,
                            [](std::byte each) { return each != std::byte{7}; }))
              CHECK(false);
            REQUIRE(fake_runtime(of.device).copy(live[which].data, bytes.data(), live[which].bytes, stream) ==
                    0);
            memory.deallocate(live[which], stream);
            live.erase(live.begin() + static_cast<std::ptrdiff_t>(which));
          } else if (const auto range = memory.try_allocate(1 + random() % (16 * kib), 256); range) {
            live.push_back(*range);
            std::fill_n(range->data, range->bytes, std::byte{7});
          } else {
            CHECK(range.error().code == errc::out_of_bytes);
            CHECK(memory.stats().pending_ranges == 0);  // it waited for all of them
          }
          of.device.proceed(random() % 3);
          CHECK(memory.used() <= memory.capacity());
        }
        for (const auto& each : live)
          memory.deallocate(each);
      }
      CHECK(of.space.used() == 0);
      CHECK(of.device.wrong.empty());
    }
  }

  TEST_CASE("a buffer over a stream-ordered space returns its memory when it ends") {
    world of;
    ordered_space memory(of.space, first, of.device);
    {
      const space_buffer<ordered_space> buffer(memory, kib, std::align_val_t{256});
      CHECK(memory.used() == kib);
    }
    CHECK(memory.used() == 0);
  }
}
