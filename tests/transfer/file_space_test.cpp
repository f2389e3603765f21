#include <llmmem/testing/faulty_io.hpp>
#include <llmmem/transfer/file_space.hpp>

#include <doctest/doctest.h>
#include <sys/stat.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem;
using llmmem::testing::faulty_io;
using llmmem::testing::io_fault;
using llmmem::testing::planned_fault;
using llmmem_tests::random_numbers;
using llmmem_tests::seeds;
using llmmem_tests::temporary_folder;

namespace {

using range = file_space<>::range_type;

constexpr std::uint64_t kib = 1024;
constexpr std::span<const transfer_fence> at_once{};

[[nodiscard]] file_space_options with_budget(std::uint64_t budget) {
  file_space_options options;
  options.budget = budget;
  options.queue.driver = llmmem::transfer::driven_by::waiters;
  return options;
}

[[nodiscard]] std::vector<std::byte> random_bytes(random_numbers& random, std::size_t count) {
  std::vector<std::byte> made(count);
  for (std::byte& each : made)
    each = static_cast<std::byte>(random.next());
  return made;
}

template <class Space>
[[nodiscard]] std::uint64_t bytes_on_device(const Space& space) {
  struct stat status{};
  REQUIRE(::fstat(space.file().buffered(), &status) == 0);
  return static_cast<std::uint64_t>(status.st_blocks) * 512;
}

}  // namespace

TEST_CASE("a file space without a budget, or with one past the limit, is refused by its path") {
  const temporary_folder folder;
  const std::string path = folder.file("data");
  CHECK_THROWS_WITH_AS(file_space<>(path, {}),
                       (path + ": the budget is 0 bytes; set the bytes that it may hold").c_str(),
                       length_error);
  CHECK_THROWS_WITH_AS(file_space<>(path, with_budget(max_bytes + 1)),
                       (path + ": the budget is 9223372036854775808 bytes; the most is 2^63 - 1").c_str(),
                       length_error);
  CHECK(::access(path.c_str(), F_OK) != 0);  // nothing was made
}

TEST_CASE("ranges never overlap, keep their alignment and their contents, and stay within the budget") {
  for (const auto seed : seeds(6)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const temporary_folder folder;
    file_space<> space(folder.file("data"), with_budget(512 * kib));
    std::map<std::uint64_t, std::pair<range, std::vector<std::byte>>> live;  // by offset
    std::uint64_t used = 0;
    for (int turn = 0; turn < 120; ++turn) {
      const std::uint64_t bytes = 1 + random.below(random.once_in(3) ? 90'000U : 6000U);
      const std::uint64_t alignment = std::uint64_t{1} << random.below(18U);
      const auto got = space.try_allocate(bytes, alignment);
      REQUIRE(static_cast<bool>(got) == (used + bytes <= space.capacity()));
      if (got) {
        const std::uint64_t at = space.offset_of(got->data);
        REQUIRE(at >= 4096);
        REQUIRE(at % 4096 == 0);
        REQUIRE(at % alignment == 0);
        const auto next = live.upper_bound(at);
        REQUIRE((next == live.end() || at + bytes <= next->first));
        REQUIRE((next == live.begin() || std::prev(next)->first + std::prev(next)->second.first.bytes <= at));
        live[at] = {*got, random_bytes(random, bytes)};
        used += bytes;
        REQUIRE(space.copy_in_async(*got, live[at].second, at_once).value().settled());
      } else {
        REQUIRE(got.error() ==
                failure{.code = errc::out_of_bytes, .wanted = bytes, .found = space.capacity() - used});
      }
      while (!live.empty() && (!got || random.once_in(3))) {
        const auto victim = std::next(live.begin(), static_cast<std::ptrdiff_t>(random.below(live.size())));
        const auto& [held, contents] = victim->second;
        std::vector<std::byte> back(held.bytes);
        REQUIRE(space.copy_out_async(back, held, at_once).value().settled());
        REQUIRE(back == contents);
        used -= held.bytes;
        space.deallocate(held);
        live.erase(victim);
        if (got) break;
        if (used < space.capacity() / 2) break;
      }
      REQUIRE(space.used() == used);
    }
    for (const auto& [at, each] : live)
      space.deallocate(each.first);
    CHECK(space.used() == 0);
  }
}

TEST_CASE("the lowest gap that is long enough is taken") {
  const temporary_folder folder;
  file_space<> space(folder.file("data"), with_budget(1 << 20));
  std::array<range, 4> ranges{};
  for (range& each : ranges)
    each = space.try_allocate(8 * kib, 1).value();
  CHECK(space.offset_of(ranges[0].data) == 4 * kib);
  CHECK(space.offset_of(ranges[3].data) == 28 * kib);
  space.deallocate(ranges[1]);
  CHECK(space.offset_of(space.try_allocate(8 * kib + 1, 1).value().data) ==
        36 * kib);  // too long for the gap
  CHECK(space.offset_of(space.try_allocate(8 * kib, 1).value().data) == 12 * kib);
  CHECK(space.offset_of(space.try_allocate(1, 64 * kib).value().data) == 64 * kib);
}

TEST_CASE("a range takes and returns space on the device, to the last page") {
  const temporary_folder folder;
  file_space<> space(folder.file("data"), with_budget(1 << 20));
  const std::uint64_t before = bytes_on_device(space);
  const range odd = space.try_allocate(100'001, 1).value();
  CHECK(bytes_on_device(space) >= before + 100'001);
  space.deallocate(odd);
  CHECK(bytes_on_device(space) == before);
}

TEST_CASE("an impossible allocation is refused with the number, and changes nothing") {
  const temporary_folder folder;
  const std::string path = folder.file("data");
  file_space<> space(path, with_budget(64 * kib));
  CHECK(space.name() == path);
  CHECK(space.try_allocate(0, 1).error().message() ==
        path + ": an allocation of 0 bytes; request at least 1");
  CHECK(space.try_allocate(1, 3).error().message() == path + ": alignment 3 is not a power of two");
  CHECK(space.try_allocate(1, 0).error().message() == path + ": alignment 0 is not a power of two");
  CHECK(space.try_allocate(64 * kib + 1, 1).error().message() ==
        path + ": 65537 bytes needed, but 65536 left in its budget; release ranges, or raise the budget");
  CHECK(space.try_allocate(1, std::uint64_t{1} << 63).error() ==
        failure{errc::grow_failed, EFBIG, 1, std::uint64_t{1} << 63});
  CHECK(space.used() == 0);
  CHECK(bytes_on_device(space) == 0);
  CHECK(space.try_allocate(64 * kib, 1));
}

TEST_CASE("a device without space refuses the range, and the budget is as it was") {
  file_space_options options = with_budget(1 << 20);
  options.file.mode = open_mode::update;
  file_space<> full("/dev/full", options);
  CHECK(full.try_allocate(4096, 1).error().message() ==
        "/dev/full: allocation of 4096 bytes at offset 4096 failed: No such device (errno 19)");
  CHECK(full.used() == 0);
}

TEST_CASE("copies of deallocated ranges and wrong lengths are refused, and start nothing") {
  const temporary_folder folder;
  const std::string path = folder.file("data");
  file_space<> space(path, with_budget(1 << 20));
  const range here = space.try_allocate(8 * kib, 1).value();
  const range there = space.try_allocate(8 * kib, 1).value();
  std::vector<std::byte> bytes(8 * kib);
  const auto dead = failure{.code = errc::dead_range, .wanted = 8 * kib};
  const range beyond{there.data + 4 * kib, 8 * kib};
  CHECK(space.copy_in_async(beyond, bytes, at_once).error() == dead);
  CHECK(space.copy_out_async(bytes, beyond, at_once).error() == dead);
  CHECK(space.copy_within_async(here, beyond, at_once).error() == dead);
  CHECK(space.copy_within_async(beyond, here, at_once).error() == dead);
  const auto shorter = failure{.code = errc::size_mismatch, .wanted = 8 * kib, .found = 4 * kib};
  CHECK(space.copy_in_async(here, std::span(bytes).first(4 * kib), at_once).error() == shorter);
  CHECK(space.copy_out_async(std::span(bytes).first(4 * kib), here, at_once).error() == shorter);
  CHECK(space.copy_within_async(here, there.subrange(0, 4 * kib).value(), at_once).error() == shorter);
  CHECK(space.copy_within_async(here, {here.data, 8 * kib}, at_once).error() ==
        failure{.code = errc::overlapping_ranges, .wanted = 8 * kib, .found = 8 * kib});
  CHECK(space.queue().stats().operations == 0);
  CHECK(space.copy_in_async({}, {}, at_once).value().settled());
}

TEST_CASE("a copy within the file runs after its predecessors, and not if one failed") {
  const temporary_folder folder;
  using faulty_space = file_space<faulty_io<posix_io>>;
  faulty_space space(folder.file("data"), with_budget(1 << 20),
                     std::vector<planned_fault>{{.what = io_fault::error, .first = 2}});
  const auto from = space.try_allocate(8 * kib, 1).value();
  const auto to = space.try_allocate(8 * kib, 1).value();
  const std::vector<std::byte> bytes(8 * kib, std::byte{9});
  const auto written = space.copy_in_async(from, bytes, at_once).value();
  REQUIRE(space.copy_within_async(to, from, std::span(&written, 1)).value().settled());
  std::vector<std::byte> back(8 * kib);
  const auto failing = space.copy_out_async(back, to, at_once).value();
  CHECK(space.copy_within_async(to, from, std::span(&failing, 1)).code() == errc::read_failed);
  space.queue().clear_failures();
  REQUIRE(space.copy_out_async(back, to, at_once).value().settled());
  CHECK(back == bytes);
}

TEST_CASE("a range deallocated twice, in part or in the wrong space is reported to the handler, and stays") {
  const temporary_folder folder;
  std::vector<misuse> told;
  file_space_options options = with_budget(1 << 20);
  options.on_misuse = [](const misuse& what, void* context) noexcept {
    static_cast<std::vector<misuse>*>(context)->push_back(what);
  };
  options.misuse_context = &told;
  file_space<> space(folder.file("data"), options);
  const range held = space.try_allocate(8 * kib, 1).value();
  space.deallocate({held.data, 4 * kib});
  space.deallocate({held.data + 4 * kib, 4 * kib});
  space.deallocate({held.data + 64 * kib, 4 * kib});
  CHECK(space.used() == 8 * kib);
  space.deallocate(held);
  space.deallocate(held);
  space.deallocate({});
  REQUIRE(told.size() == 4);
  CHECK(told[0].what == misuse::kind::wrong_size);
  CHECK(told[1].what == misuse::kind::inside);
  CHECK(told[2].what == misuse::kind::not_live);
  CHECK(told[3].what == misuse::kind::not_live);
  CHECK(told[0].message().find(folder.file("data") + ": deallocate of 4096 bytes") == 0);
  CHECK(space.used() == 0);
}
