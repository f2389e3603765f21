#include <llmmem/testing/simulated_space.hpp>

#include <doctest/doctest.h>

#include "support/seeds.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

using namespace llmmem;
using llmmem_tests::seeds;
using namespace llmmem::testing;

namespace {

/// One byte a nanosecond and no latency: finish times are byte counts.
constexpr link_model byte_a_ns{.bytes_per_second = 1'000'000'000};

simulated_options options(std::uint64_t budget = 1 << 20) {
  return {.budget = budget, .name = "gpu0", .link = byte_a_ns, .internal = byte_a_ns};
}

std::vector<std::byte> filled(std::size_t bytes, int value) {
  return std::vector(bytes, static_cast<std::byte>(value));
}

bool all_are(std::span<const std::byte> bytes, std::byte value) {
  return std::all_of(bytes.begin(), bytes.end(), [=](std::byte b) { return b == value; });
}

/// The signal that `body` dies of in a child process, or 0.
template <class Body>
int signal_of(Body body) {
  const pid_t child = fork();
  if (child == 0) {
    std::signal(SIGSEGV, SIG_DFL);  // the test framework's and the sanitizers' handlers would report and exit
    std::signal(SIGBUS, SIG_DFL);
    body();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

}  // namespace

static_assert(std::is_trivially_copyable_v<simulated_space::range_type>);

template <class Range>
concept has_span = requires(Range r) { r.span(); };
static_assert(has_span<host_space::range_type>);
static_assert(!has_span<simulated_space::range_type>, "bytes of a device are no std::span on the host");
static_assert(!std::is_convertible_v<simulated_space::range_type, host_space::range_type>);

TEST_CASE("a host access to simulated device memory crashes, before, between and after copies") {
  virtual_clock clock;
  simulated_space gpu(clock, options());
  const auto range = gpu.try_allocate(10'000, 64).value();
  const auto read_at = [&](std::uint64_t offset) {
    return signal_of([&] { static_cast<void>(*static_cast<volatile std::byte*>(range.data + offset)); });
  };
  const auto write_at = [&](std::uint64_t offset) {
    return signal_of([&] { *static_cast<volatile std::byte*>(range.data + offset) = std::byte{1}; });
  };
  CHECK(signal_of([] {}) == 0);
  CHECK(read_at(0) == SIGSEGV);
  CHECK(write_at(9999) == SIGSEGV);
  const auto source = filled(10'000, 7);
  const auto in = gpu.copy_in_async(range, source, {}).value();
  CHECK(read_at(0) == SIGSEGV);
  in.wait();
  CHECK(read_at(5000) == SIGSEGV);
  CHECK(write_at(5000) == SIGSEGV);
}

TEST_CASE("bytes survive the way in and out, through a copy within") {
  virtual_clock clock;
  simulated_space gpu(clock, options());
  const auto a = gpu.try_allocate(100, 64).value();
  const auto b = gpu.try_allocate(100, 64).value();
  auto source = filled(100, 0);
  for (std::size_t i = 0; i < source.size(); ++i)
    source[i] = static_cast<std::byte>(i);
  auto back = filled(100, 0);
  const std::array in{gpu.copy_in_async(a, source, {}).value()};
  const std::array within{gpu.copy_within_async(b, a, in).value()};
  const auto out = gpu.copy_out_async(back, b, within).value();
  CHECK(out.time().ns == 300);
  CHECK(gpu.stats().in_flight == 3);
  out.wait();
  CHECK(back == source);
  const simulated_stats stats = gpu.stats();
  CHECK(stats.in_flight == 0);
  CHECK(stats.copies_in == 1);
  CHECK(stats.bytes_out == 100);
  CHECK(stats.bytes_within == 100);
  CHECK(gpu.link().busy_ns() == 200);
}

TEST_CASE("new memory holds the pattern, not zeros") {
  virtual_clock clock;
  simulated_space gpu(clock, options());
  auto back = filled(100, 0);
  gpu.copy_out_async(back, gpu.try_allocate(100, 64).value(), {}).value().wait();
  CHECK(all_are(back, std::byte{0xCD}));
}

TEST_CASE("a read of bytes before the copy that writes them has finished is detected, with range and times") {
  virtual_clock clock;
  simulated_space gpu(clock, options());
  const auto first = gpu.try_allocate(64, 64).value();
  const auto range = gpu.try_allocate(4096, 64).value();
  const auto source = filled(4096, 1);
  auto back = filled(96, 0);
  clock.advance(1000);
  const std::array in{gpu.copy_in_async(range, source, {}).value()};
  const auto part = range.subrange(32, 96).value();
  CHECK_THROWS_WITH_AS(
      static_cast<void>(gpu.copy_out_async(back, part, {})),
      "gpu0: copy out reads bytes [32, 128) of range 1 from 1000 ns on, but the copy in that writes "
      "bytes [0, 4096) of range 1 finishes at 5096 ns; wait for its fence, or pass it in `after`",
      fence_error);
  CHECK(gpu.stats().in_flight == 1);  // the refused copy was not queued
  CHECK(gpu.link().free_at().ns == 5096);

  SUBCASE("a passed fence is enough") {
    gpu.copy_out_async(back, part, in).value().wait();
    CHECK(all_are(back, std::byte{1}));
  }
  SUBCASE("a wait for the fence is enough") {
    in[0].wait();
    gpu.copy_out_async(back, part, {}).value().wait();
    CHECK(all_are(back, std::byte{1}));
  }
  SUBCASE("adjacent bytes do not conflict") {
    const auto whole = gpu.try_allocate(32, 64).value();
    const std::span<const std::byte> half(source.data(), 16);
    static_cast<void>(gpu.copy_in_async(whole.subrange(8, 16).value(), half, in).value());
    CHECK_NOTHROW(
        static_cast<void>(gpu.copy_in_async(whole.subrange(0, 8).value(), half.first(8), {}).value()));
    CHECK_NOTHROW(
        static_cast<void>(gpu.copy_in_async(whole.subrange(24, 8).value(), half.first(8), {}).value()));
  }
  SUBCASE("another range does not conflict") {
    back.resize(64);
    CHECK_NOTHROW(gpu.copy_out_async(back, first, {}).value().wait());
  }
}

TEST_CASE("a write to bytes of an unfinished copy is detected, in the space and on the host") {
  virtual_clock clock;
  simulated_space gpu(clock, options());
  const auto a = gpu.try_allocate(64, 64).value();
  const auto b = gpu.try_allocate(64, 64).value();
  auto x = filled(64, 1);
  auto y = filled(64, 2);
  SUBCASE("a second write to the same range") {
    static_cast<void>(gpu.copy_in_async(a, x, {}).value());
    CHECK_THROWS_WITH_AS(
        static_cast<void>(gpu.copy_in_async(a, y, {})),
        "gpu0: copy in writes bytes [0, 64) of range 0 from 0 ns on, but the copy in that writes bytes "
        "[0, 64) of range 0 finishes at 64 ns; wait for its fence, or pass it in `after`",
        fence_error);
  }
  SUBCASE("a write to a range being read") {
    static_cast<void>(gpu.copy_within_async(b, a, {}).value());
    CHECK_THROWS_WITH_AS(
        static_cast<void>(gpu.copy_in_async(a, x, {})),
        "gpu0: copy in writes bytes [0, 64) of range 0 from 0 ns on, but the copy within that reads "
        "bytes [0, 64) of range 0 finishes at 64 ns; wait for its fence, or pass it in `after`",
        fence_error);
  }
  SUBCASE("host bytes sent on before they have arrived") {
    static_cast<void>(gpu.copy_out_async(x, a, {}).value());
    CHECK_THROWS_WITH_AS(
        static_cast<void>(gpu.copy_in_async(b, x, {})),
        "gpu0: copy in reads 64 bytes of the host from 0 ns on, but the copy out that writes 64 bytes "
        "of the host finishes at 64 ns; wait for its fence, or pass it in `after`",
        fence_error);
  }
  SUBCASE("two copies that read the same bytes do not conflict") {
    static_cast<void>(gpu.copy_out_async(x, a, {}).value());
    CHECK_NOTHROW(static_cast<void>(gpu.copy_out_async(y, a, {}).value()));
  }
}

TEST_CASE("host code that accesses either end of a copy too early meets wrong bytes, every time") {
  virtual_clock clock;
  simulated_space gpu(clock, options());
  const auto range = gpu.try_allocate(64, 64).value();
  auto source = filled(64, 1);
  gpu.copy_in_async(range, source, {}).value().wait();

  auto back = filled(64, 9);
  const auto out = gpu.copy_out_async(back, range, {}).value();
  CHECK(all_are(back, simulated_space::in_flight_fill));  // read too early
  out.wait();
  CHECK(all_are(back, std::byte{1}));

  const std::array in{gpu.copy_in_async(range, source, {}).value()};
  std::fill(source.begin(), source.end(), std::byte{2});  // reused too early
  gpu.copy_out_async(back, range, in).value().wait();
  CHECK(all_are(back, std::byte{2}));
}

TEST_CASE("a copy after a fence leaves its destination unchanged until it starts") {
  virtual_clock clock;
  simulated_space gpu(clock, options());
  const auto range = gpu.try_allocate(64, 64).value();
  const auto ones = filled(64, 1);
  const auto twos = filled(64, 2);
  auto back = filled(64, 0);
  gpu.copy_in_async(range, ones, {}).value().wait();
  const std::array out{gpu.copy_out_async(back, range, {}).value()};
  const auto in = gpu.copy_in_async(range, twos, out).value();
  out[0].wait();
  CHECK(all_are(back, std::byte{1}));
  in.wait();
  gpu.copy_out_async(back, range, {}).value().wait();
  CHECK(all_are(back, std::byte{2}));
}

TEST_CASE("a chain over two spaces on one clock moves the bytes in order of time") {
  virtual_clock clock;
  auto slow = options();
  slow.name = "gpu1";
  slow.link = {.bytes_per_second = 100'000'000, .latency_ns = 50};
  simulated_space b(clock, slow);
  simulated_space a(clock, options());
  const auto from = a.try_allocate(100, 64).value();
  const auto to = b.try_allocate(100, 64).value();
  const auto source = filled(100, 5);
  auto bounce = filled(100, 0);
  auto back = filled(100, 0);
  const std::array in{a.copy_in_async(from, source, {}).value()};
  const std::array out{a.copy_out_async(bounce, from, in).value()};
  const std::array over{b.copy_in_async(to, bounce, out).value()};
  const auto home = b.copy_out_async(back, to, over).value();
  CHECK(home.time().ns == 200 + 2 * 1050);
  home.wait();
  CHECK(back == source);
}

TEST_CASE("a random program with its fences gives the result of the same program run one step at a time") {
  for (const auto seed : seeds(60)) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    virtual_clock clock;
    auto setup = options();
    setup.link = {.bytes_per_second = 1 + random() % 4'000'000'000, .latency_ns = random() % 100};
    setup.internal = {.bytes_per_second = 1 + random() % 4'000'000'000, .latency_ns = random() % 100};
    simulated_space gpu(clock, setup);
    constexpr std::size_t count = 4;
    constexpr std::size_t bytes = 16;
    // Cells 0 to 3 are ranges of the space, 4 to 7 host buffers; each has the fence of its last use.
    std::array<simulated_space::range_type, count> ranges;
    for (auto& r : ranges)
      r = gpu.try_allocate(bytes, 16).value();
    std::array<std::vector<std::byte>, count> host;
    for (std::size_t i = 0; i < count; ++i)
      host[i] = filled(bytes, static_cast<int>(i));
    std::array<std::byte, 2 * count> oracle;
    oracle.fill(std::byte{0xCD});
    for (std::size_t i = 0; i < count; ++i)
      oracle[count + i] = static_cast<std::byte>(i);
    std::array<virtual_fence, 2 * count> last;

    for (int step = 0; step < 60; ++step) {
      const std::size_t from = random() % (2 * count);
      const std::size_t to = random() % (from < count ? 2 * count : count);
      if (from == to) continue;
      const std::array after{last[from], last[to]};
      const auto fence = from >= count ? gpu.copy_in_async(ranges[to], host[from - count], after)
                         : to >= count ? gpu.copy_out_async(host[to - count], ranges[from], after)
                                       : gpu.copy_within_async(ranges[to], ranges[from], after);
      last[from] = last[to] = fence.value();
      oracle[to] = oracle[from];
      if (random() % 4 == 0) {
        const std::size_t i = random() % count;
        last[count + i].wait();
        REQUIRE(all_are(host[i], oracle[count + i]));
        std::fill(host[i].begin(), host[i].end(), static_cast<std::byte>(step));
        oracle[count + i] = static_cast<std::byte>(step);
      }
    }
    wait_all(std::span<const virtual_fence>(last));
    for (std::size_t i = 0; i < count; ++i) {
      REQUIRE(all_are(host[i], oracle[count + i]));
      auto back = filled(bytes, 0);
      gpu.copy_out_async(back, ranges[i], {}).value().wait();
      REQUIRE(all_are(back, oracle[i]));
    }
    REQUIRE(gpu.stats().in_flight == 0);
    REQUIRE(clock.pending() == 0);
  }
}

TEST_CASE("an allocation that cannot be is refused with its reason, and changes nothing") {
  virtual_clock clock;
  simulated_space gpu(clock, options(1000));
  const auto kept = gpu.try_allocate(600, 8).value();
  const auto refused = [&](std::uint64_t bytes, std::uint64_t alignment, const char* text) {
    const auto range = gpu.try_allocate(bytes, alignment);
    REQUIRE_FALSE(range);
    CHECK(range.error().message() == text);
    CHECK(gpu.used() == 600);
  };
  refused(0, 8, "gpu0: an allocation of 0 bytes; request at least 1");
  refused(8, 0, "gpu0: alignment 0 is not a power of two");
  refused(8, 48, "gpu0: alignment 48 is not a power of two");
  refused(401, 8, "gpu0: 401 bytes needed, but 400 left in its budget; release ranges, or raise the budget");
  refused(~std::uint64_t{0}, 8,
          "gpu0: 18446744073709551615 bytes needed, but 400 left in its budget; release ranges, or raise the "
          "budget");
  refused(1, std::uint64_t{1} << 63,
          "gpu0: the underlying memory refused 1 bytes, although the budget has 400 left; free memory "
          "elsewhere, or lower the budget");
  gpu.deallocate(kept);
  for (std::uint64_t alignment = 1; alignment <= (std::uint64_t{1} << 24); alignment *= 2) {
    const auto range = gpu.try_allocate(3, alignment).value();
    CHECK(reinterpret_cast<std::uintptr_t>(range.data) % alignment == 0);
    gpu.deallocate(range);
  }
  CHECK(gpu.used() == 0);
}

TEST_CASE("a budget or a bandwidth of 0 is refused") {
  virtual_clock clock;
  CHECK_THROWS_WITH_AS(simulated_space(clock, simulated_options{}),
                       "simulated_space: the budget is 0 bytes; set the bytes that it may hold",
                       length_error);
  CHECK_THROWS_WITH_AS(simulated_space(clock, simulated_options{.budget = max_bytes + 1, .name = "gpu0"}),
                       "gpu0: a budget of 9223372036854775808 bytes exceeds the limit of 2^63 - 1",
                       length_error);
  CHECK_THROWS_WITH_AS(simulated_space(clock, simulated_options{.budget = 1, .link = {}}),
                       "virtual link: a bandwidth of 0 bytes per second; it must be 1 to 2^60",
                       argument_error);
}

TEST_CASE("a copy that cannot be is refused with its reason") {
  virtual_clock clock;
  virtual_clock other_clock;
  simulated_space gpu(clock, options());
  const auto a = gpu.try_allocate(16, 16).value();
  const auto gone = gpu.try_allocate(16, 16).value();
  gpu.deallocate(gone);
  auto host = filled(17, 0);
  CHECK(gpu.copy_in_async(a, host, {}).error().message() ==
        "gpu0: two lengths must be equal, but are 16 and 17");
  host.resize(16);
  const char* dead =
      "gpu0: the range of 16 bytes is not inside a live one; it was already deallocated, or belongs to "
      "another space";
  CHECK(gpu.copy_in_async(gone, host, {}).error().message() == dead);
  CHECK(gpu.copy_out_async(host, gone, {}).error().message() == dead);
  CHECK(gpu.copy_within_async(gone, a, {}).error().message() == dead);
  CHECK(gpu.copy_within_async(a, gone, {}).error().message() == dead);
  CHECK(gpu.copy_in_async({a.data, 17}, filled(17, 0), {}).code() == errc::dead_range);
  CHECK(gpu.copy_within_async(a.subrange(0, 10).value(), a.subrange(4, 10).value(), {}).error().message() ==
        "gpu0: source and destination of 10 bytes share 6; copy in parts");
  const std::array foreign{virtual_fence{other_clock, {5}}};
  CHECK(gpu.copy_in_async(a, host, foreign).error().message() ==
        "gpu0: the handle (slot 0) belongs to another object; use it with the object that made it");
  CHECK(gpu.stats().in_flight == 0);
  const std::array nothing{virtual_fence{}};
  CHECK(gpu.copy_in_async(a.subrange(0, 0).value(), {}, nothing).value().ready());
}

TEST_CASE("memory returned twice, in part, or during a copy is reported to the handler and stays") {
  std::vector<misuse::kind> told;
  const auto record = [](const misuse& what, void* seen) noexcept {
    static_cast<std::vector<misuse::kind>*>(seen)->push_back(what.what);
  };
  virtual_clock clock;
  auto setup = options();
  setup.on_misuse = record;
  setup.misuse_context = &told;
  simulated_space gpu(clock, setup);
  const auto range = gpu.try_allocate(64, 64).value();
  const auto source = filled(64, 1);
  const auto in = gpu.copy_in_async(range, source, {}).value();
  gpu.deallocate(range);
  CHECK(gpu.used() == 64);
  in.wait();
  gpu.deallocate({range.data + 1, 63});
  gpu.deallocate({range.data, 63});
  gpu.deallocate({});
  gpu.deallocate(range);
  gpu.deallocate(range);
  using kind = misuse::kind;
  CHECK(told == std::vector{kind::in_flight, kind::inside, kind::wrong_size, kind::not_live});
  CHECK(gpu.stats().memory.misuses == 4);
  CHECK(gpu.used() == 0);
}

TEST_CASE("a destroyed space drops its copies, and the clock continues") {
  virtual_clock clock;
  const auto source = filled(64, 1);
  {
    simulated_space gpu(clock, options());
    static_cast<void>(gpu.copy_in_async(gpu.try_allocate(64, 64).value(), source, {}).value());
    CHECK(clock.pending() == 1);
  }
  CHECK(clock.pending() == 0);
  clock.advance(1000);
}
