#include <llmmem/space/host.hpp>
#include <llmmem/testing/failing_source.hpp>

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
#include <new>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

using namespace llmmem;
using llmmem_tests::seeds;

namespace {

/// Remembers what it was told instead of aborting.
struct recorder {
  std::vector<misuse> seen;
  static void record(const misuse& what, void* self) noexcept {
    static_cast<recorder*>(self)->seen.push_back(what);
  }
};

/// A source that gives out addresses which are not aligned as asked.
struct crooked_source {
  std::uint64_t footprint(std::uint64_t bytes, std::uint64_t) const noexcept { return bytes; }
  std::byte* take(std::uint64_t bytes, std::uint64_t) noexcept {
    ++live;
    return static_cast<std::byte*>(::operator new(bytes + 1)) + 1;
  }
  void give_back(std::byte* data, std::uint64_t, std::uint64_t) noexcept {
    --live;
    ::operator delete(data - 1);
  }
  int live = 0;
};

constexpr std::uint64_t mib = 1024 * 1024;

std::vector<std::byte> bytes_of_text(const char* text) {
  std::vector<std::byte> bytes(std::strlen(text));
  std::memcpy(bytes.data(), text, bytes.size());
  return bytes;
}

}  // namespace

TEST_CASE("allocations are aligned, writable, disjoint and within the budget") {
  for (const auto seed : seeds(50)) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    const std::uint64_t budget = 1 + random() % (4 * mib);
    host_space space{host_options{.budget = budget}};
    std::vector<std::pair<host_space::range_type, std::byte>> live;
    for (int step = 0; step < 60; ++step) {
      if (live.empty() || random() % 3 != 0) {
        const std::uint64_t bytes = 1 + random() % (std::uint64_t{1} << (random() % 22));
        const std::uint64_t alignment = std::uint64_t{1} << (random() % 18);
        const std::uint64_t before = space.used();
        const auto range = space.try_allocate(bytes, alignment);
        if (!range) {
          REQUIRE(range.code() == errc::out_of_bytes);
          REQUIRE(range.error().wanted > budget - before);
          REQUIRE(range.error().found == budget - before);
          REQUIRE(space.used() == before);
          continue;
        }
        REQUIRE(range->bytes == bytes);
        REQUIRE(reinterpret_cast<std::uintptr_t>(range->data) % alignment == 0);
        const auto mark = static_cast<std::byte>(random());
        std::memset(range->data, static_cast<int>(mark), bytes);
        live.emplace_back(*range, mark);
      } else {
        const std::size_t i = random() % live.size();
        const auto held = live[i].first.span();
        REQUIRE(std::count(held.begin(), held.end(), live[i].second) ==
                static_cast<std::ptrdiff_t>(held.size()));
        space.deallocate(live[i].first);
        live.erase(live.begin() + static_cast<std::ptrdiff_t>(i));
      }
      REQUIRE(space.used() <= budget);
      REQUIRE(space.stats().ranges == live.size());
      REQUIRE(space.audit().empty());
    }
    for (const auto& [range, mark] : live)
      space.deallocate(range);
    REQUIRE(space.used() == 0);
  }
}

TEST_CASE("the budget is charged whole pages for mapped ranges and the requested bytes for small ones") {
  host_space space{host_options{.budget = 64 * mib}};
  const std::uint64_t page = space.source().report().page_bytes;
  const auto small = space.try_allocate(100, 64).value();
  CHECK(space.used() == 100);
  const auto large = space.try_allocate(mib + 1, 64).value();
  CHECK(space.used() == 100 + mib + page);
  space.deallocate(small);
  space.deallocate(large);
  CHECK(space.used() == 0);
  CHECK(space.stats().peak == 100 + mib + page);
}

TEST_CASE("a budget of 0 or past 2^63 - 1 is refused") {
  CHECK_THROWS_WITH_AS(host_space(host_options{}),
                       "host_space: the budget is 0 bytes; set the bytes that it may hold", length_error);
  CHECK_THROWS_WITH_AS(host_space(host_options{.budget = max_bytes + 1, .name = "staging"}),
                       "staging: a budget of 9223372036854775808 bytes exceeds the limit of 2^63 - 1",
                       length_error);
}

TEST_CASE("an allocation that cannot be is refused with its reason, and changes nothing") {
  host_space space{host_options{.budget = 1000, .name = "staging"}};
  const auto kept = space.try_allocate(600, 8).value();
  const auto refused = [&](std::uint64_t bytes, std::uint64_t alignment, const char* text) {
    const auto range = space.try_allocate(bytes, alignment);
    REQUIRE_FALSE(range);
    CHECK(range.error().message() == text);
    CHECK(space.used() == 600);
    CHECK(space.stats().ranges == 1);
  };
  refused(0, 8, "staging: an allocation of 0 bytes; request at least 1");
  refused(8, 0, "staging: alignment 0 is not a power of two");
  refused(8, 24, "staging: alignment 24 is not a power of two");
  refused(401, 8,
          "staging: 401 bytes needed, but 400 left in its budget; release ranges, or raise the budget");
  refused(max_bytes, 8,
          "staging: 9223372036854775807 bytes needed, but 400 left in its budget; release ranges, or raise "
          "the budget");
  refused(~std::uint64_t{0}, 8,
          "staging: 18446744073709551615 bytes needed, but 400 left in its budget; release ranges, or raise "
          "the budget");
  CHECK_THROWS_AS(static_cast<void>(space.try_allocate(0, 8).value()), length_error);
  CHECK_THROWS_AS(static_cast<void>(space.try_allocate(8, 3).value()), argument_error);
  CHECK_THROWS_AS(static_cast<void>(space.try_allocate(401, 8).value()), out_of_memory);
  CHECK(space.stats().refusals == 9);
  space.deallocate(kept);
}

TEST_CASE("a refusal of the operating system is also a value") {
  host_space space{host_options{.budget = max_bytes, .name = "greedy"}};
  const auto range = space.try_allocate(std::uint64_t{1} << 60, 8);
  REQUIRE_FALSE(range);
  CHECK(range.error().message() ==
        "greedy: the underlying memory refused 1152921504606846976 bytes, although the budget has "
        "9223372036854775807 left; free memory elsewhere, or lower the budget");
  CHECK_THROWS_AS(static_cast<void>(range.value()), out_of_memory);
  CHECK(space.try_allocate(8, std::uint64_t{1} << 63).code() == errc::system_refused);
  CHECK(space.try_allocate(max_bytes, 1).error().message() ==  // whole pages, one byte too many
        "greedy: 9223372036854775808 bytes needed, but 9223372036854775807 left in its budget; release "
        "ranges, or raise the budget");
  CHECK(space.used() == 0);
}

TEST_CASE("a source that ignores the alignment is detected, and gets its bytes back") {
  basic_host_space<crooked_source> space{host_options{.budget = 1000, .name = "arena"}};
  CHECK(space.try_allocate(10, 8).error().message() ==
        "arena: the underlying memory refused 10 bytes, although the budget has 1000 left; free memory "
        "elsewhere, or lower the budget");
  CHECK(space.used() == 0);
  CHECK(space.source().live == 0);
}

TEST_CASE("if any request fails, the space is as it was") {
  using space_type = basic_host_space<testing::failing_source<>>;
  for (std::uint64_t n = 1; n <= 20; ++n) {
    CAPTURE(n);
    space_type space{testing::failing_source<>{n}, host_options{.budget = mib}};
    std::vector<space_type::range_type> live;
    for (std::uint64_t call = 1; call <= 20; ++call) {
      const std::uint64_t before = space.used();
      const auto range = space.try_allocate(call, 16);
      REQUIRE(range.has_value() == (call != n));
      if (range) {
        live.push_back(*range);
      } else {
        REQUIRE(range.code() == errc::system_refused);
        REQUIRE(space.used() == before);
      }
      REQUIRE(space.audit().empty());
    }
    for (const auto& range : live)
      space.deallocate(range);
    REQUIRE(space.used() == 0);
  }
}

TEST_CASE("a wrong deallocation is reported to the handler, and changes nothing") {
  recorder told;
  host_space space{
      host_options{.budget = mib, .name = "pool", .on_misuse = &recorder::record, .misuse_context = &told}};
  host_space other{host_options{.budget = mib}};
  const auto range = space.try_allocate(256, 64).value();
  const auto foreign = other.try_allocate(256, 64).value();

  space.deallocate({});  // an empty range is no change
  CHECK(told.seen.empty());
  space.deallocate({foreign.data, foreign.bytes});
  space.deallocate({nullptr, 256});
  space.deallocate({range.data + 64, 64});
  space.deallocate({range.data, 255});
  CHECK(space.used() == 256);
  space.deallocate(range);
  space.deallocate(range);
  using kind = misuse::kind;
  const std::array expected{kind::not_live, kind::not_live, kind::inside, kind::wrong_size, kind::not_live};
  REQUIRE(told.seen.size() == expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i)
    CHECK(told.seen[i].what == expected[i]);
  CHECK(space.stats().misuses == 5);
  CHECK(space.used() == 0);
  other.deallocate(foreign);
}

TEST_CASE("without a handler a double free aborts the process with the message") {
  int out[2];
  REQUIRE(pipe(out) == 0);
  const pid_t child = fork();
  if (child == 0) {
    dup2(out[1], STDERR_FILENO);
    std::signal(SIGABRT, SIG_DFL);
    host_space space{host_options{.budget = mib, .name = "pool"}};
    const auto range = space.try_allocate(256, 64).value();
    space.deallocate(range);
    space.deallocate(range);
    _exit(0);
  }
  close(out[1]);
  std::string text;
  char part[256];
  for (auto n = read(out[0], part, sizeof part); n > 0; n = read(out[0], part, sizeof part)) {
    text.append(part, static_cast<std::size_t>(n));
  }
  close(out[0]);
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFSIGNALED(status));
  CHECK(WTERMSIG(status) == SIGABRT);
  CHECK(text.starts_with("pool: deallocate of 256 bytes at 0x"));
  CHECK(
      text.ends_with(": no live range is there; it was already deallocated, or belongs to another space\n"));
}

TEST_CASE("copies in, within and out move the bytes after their fences") {
  host_space space{host_options{.budget = mib}};
  const auto a = space.try_allocate(5, 1).value();
  const auto b = space.try_allocate(5, 1).value();
  const auto text = bytes_of_text("hello");
  std::vector<std::byte> back(5);
  host_timeline timeline;
  const std::array after{timeline.issue()};
  timeline.pass(after[0]).value();
  CHECK(space.copy_in_async(a, text, after).value().ready());
  CHECK(space.copy_within_async(b, a, {}).value().ready());
  CHECK(space.copy_out_async(back, b, {}).value().ready());
  CHECK(back == text);
  CHECK(space.copy_in_async({a.data, 0}, {}, {}));
}

TEST_CASE("a copy that cannot be is refused with its reason") {
  host_space space{host_options{.budget = mib, .name = "pool"}};
  const auto a = space.try_allocate(16, 16).value();
  const auto gone = space.try_allocate(16, 16).value();
  space.deallocate(gone);
  std::vector<std::byte> host(17);
  CHECK(space.copy_in_async(a, host, {}).error().message() ==
        "pool: two lengths must be equal, but are 16 and 17");
  CHECK(space.copy_out_async(host, a, {}).error().message() ==
        "pool: two lengths must be equal, but are 17 and 16");
  host.resize(16);
  const char* dead =
      "pool: the range of 16 bytes is not inside a live one; it was already deallocated, or belongs to "
      "another space";
  CHECK(space.copy_in_async(gone, host, {}).error().message() == dead);
  CHECK(space.copy_out_async(host, gone, {}).error().message() == dead);
  CHECK(space.copy_within_async(gone, a, {}).error().message() == dead);
  CHECK(space.copy_within_async(a, gone, {}).error().message() == dead);
  CHECK_THROWS_AS(static_cast<void>(space.copy_within_async(a, gone, {}).value()), handle_error);
  CHECK(space.copy_within_async(a.subrange(0, 10).value(), a.subrange(4, 10).value(), {}).error().message() ==
        "pool: source and destination of 10 bytes share 6; copy in parts");
  CHECK(space.copy_within_async(a.subrange(0, 8).value(), a.subrange(8, 8).value(), {}));
}

TEST_CASE("a subrange past the end is refused, also if the sum wraps") {
  host_space space{host_options{.budget = mib}};
  const auto a = space.try_allocate(16, 16).value();
  CHECK(a.subrange(4, 12).value().data == a.data + 4);
  CHECK(a.subrange(16, 0).value().empty());
  CHECK(a.subrange(8, 9).error().message() ==
        "memory_range: bytes up to 17 requested, but it has 16; request fewer, or make it larger");
  CHECK(a.subrange(17, 0).code() == errc::past_the_bytes);
  CHECK(a.subrange(~std::uint64_t{0}, 2).error().message() ==
        "memory_range: bytes up to 9223372036854775807 requested, but it has 16; request fewer, or make it "
        "larger");
}
