#include <llmmem/testing/faulty_io.hpp>
#include <llmmem/transfer/striped_space.hpp>

#include <doctest/doctest.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
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

constexpr std::uint64_t unit = 4096;

/// A device that takes its time over each request, once it is told to.
class slow_io : public posix_io {
 public:
  explicit slow_io(const long& ns) : ns_(&ns) {}
  [[nodiscard]] result<std::size_t> reap(std::span<io_completion> out, const io_wait& wait) noexcept {
    if (in_flight() != 0 && *ns_ != 0) {
      const timespec span{0, *ns_};
      ::nanosleep(&span, nullptr);
    }
    return posix_io::reap(out, wait);
  }

 private:
  const long* ns_;
};

[[nodiscard]] file_space_options with_budget(std::uint64_t budget) {
  file_space_options options;
  options.budget = budget;
  options.queue.driver = llmmem::transfer::driven_by::waiters;
  return options;
}

/// Three files, and one space over them.
struct three_files {
  explicit three_files(std::array<std::uint64_t, 3> budgets = {1 << 22, 1 << 22, 1 << 22},
                       striped_options options = {.stripe_bytes = unit}) {
    for (std::size_t i = 0; i < 3; ++i) {
      files[i] = std::make_unique<file_space<slow_io>>(folder.file("data" + std::to_string(i)),
                                                       with_budget(budgets[i]), delays[i]);
      members[i] = files[i].get();
    }
    space = std::make_unique<striped_space<slow_io>>(members, options);
  }

  /// Lets the members look as unequal as `speeds`, by moving bytes at these delays.
  void measure(const std::array<long, 3>& ns) {
    delays = ns;
    const std::vector<std::byte> bytes(48 * unit);
    for (int i = 0; i < 2; ++i) {
      const auto range = space->try_allocate(bytes.size(), 1).value();
      REQUIRE(space->copy_in_async(range, bytes, {}).value().settled());
      space->deallocate(range);
    }
    delays = {};
  }

  temporary_folder folder;
  std::array<long, 3> delays{};
  std::array<std::unique_ptr<file_space<slow_io>>, 3> files;
  std::array<file_space<slow_io>*, 3> members{};
  std::unique_ptr<striped_space<slow_io>> space;
};

using striped_range = striped_space<slow_io>::range_type;

}  // namespace

TEST_CASE("a striped space behaves like flat memory, regardless of the shares of its members") {
  for (const auto seed : seeds(6)) {
    CAPTURE(seed);
    random_numbers random(seed);
    three_files three;
    if (seed % 2 == 0) three.measure({0, 300'000, 2'000'000});
    auto& space = *three.space;
    struct held {
      striped_range range;
      std::vector<std::byte> model;
    };
    std::vector<held> live;
    for (int turn = 0; turn < 60; ++turn) {
      if (live.size() < 3 || random.once_in(6)) {
        const std::uint64_t bytes = 1 + random.below(300'000U);
        const std::uint64_t alignment = std::uint64_t{1} << random.below(16U);
        const auto range = space.try_allocate(bytes, alignment).value();
        REQUIRE(reinterpret_cast<std::uintptr_t>(range.data) % alignment == 0);
        live.push_back({range, std::vector<std::byte>(bytes)});
        REQUIRE(space.copy_in_async(range, live.back().model, {}).value().settled());
      }
      held& one = live[random.below(live.size())];
      const std::uint64_t from = random.below(one.model.size());
      const std::uint64_t count = 1 + random.below(one.model.size() - from);
      const striped_range part = one.range.subrange(from, count).value();
      std::vector<std::byte> fresh(count);
      for (std::byte& each : fresh)
        each = static_cast<std::byte>(random.next());
      std::copy(fresh.begin(), fresh.end(), one.model.begin() + static_cast<std::ptrdiff_t>(from));
      const striped_fence written = space.copy_in_async(part, fresh, {}).value();
      std::vector<std::byte> back(one.model.size());
      REQUIRE(space.copy_out_async(back, one.range, std::span(&written, 1)).value().settled());
      REQUIRE(back == one.model);
      held& other = live[random.below(live.size())];
      if (&other != &one) {
        const std::uint64_t both = std::min(one.model.size(), other.model.size());
        REQUIRE(space
                    .copy_within_async(other.range.subrange(0, both).value(),
                                       one.range.subrange(0, both).value(), {})
                    .value()
                    .settled());
        std::copy_n(one.model.begin(), both, other.model.begin());
      }
      if (random.once_in(5)) {
        space.deallocate(live.front().range);
        live.erase(live.begin());
      }
    }
    std::uint64_t bytes = 0;
    for (const held& each : live)
      bytes += each.model.size();
    CHECK(space.used() == bytes);
    CHECK(three.files[0]->used() + three.files[1]->used() + three.files[2]->used() == bytes);
    for (const held& each : live)
      space.deallocate(each.range);
    CHECK(three.files[0]->used() + three.files[1]->used() + three.files[2]->used() == 0);
  }
}

TEST_CASE("new ranges take less of a member that was slow, and older ones stay as they are") {
  three_files three;
  auto& space = *three.space;
  const auto before = space.try_allocate(64 * unit, 1).value();
  CHECK(space.shares_of(before) == stripe_shares{11, 11, 10});
  three.measure({0, 0, 8'000'000});
  const auto after = space.try_allocate(64 * unit, 1).value();
  CHECK(space.shares_of(after)[2] < space.shares_of(after)[0]);
  CHECK(space.shares_of(after)[2] < space.shares_of(after)[1]);
  CHECK(space.shares_of(after)[2] < 5);
  CHECK(space.member_stats(2).last_share == space.shares_of(after)[2]);
  CHECK(space.member_stats(2).bytes_per_ns < space.member_stats(0).bytes_per_ns);
  CHECK(space.shares_of(before) == stripe_shares{11, 11, 10});
}

TEST_CASE("a range leaves out a member without space, and the others take its part") {
  three_files three({1 << 20, 3 * unit, 1 << 20});
  auto& space = *three.space;
  CHECK(space.capacity() == (2 << 20) + 3 * unit);
  const auto range = space.try_allocate(64 * unit, 1).value();
  CHECK(space.shares_of(range) == stripe_shares{16, 0, 16});
  CHECK(three.files[1]->used() == 0);
  const auto small = space.try_allocate(6 * unit, 1).value();
  CHECK(three.files[1]->used() == 2 * unit);
  space.deallocate(small);
  // More than all have together, and more than any two could be dealt.
  CHECK(space.try_allocate(space.capacity(), 1).error() == failure{.code = errc::out_of_bytes,
                                                                   .wanted = space.capacity(),
                                                                   .found = space.capacity() - 64 * unit});
  const result<striped_range> refused = space.try_allocate(space.capacity() - 64 * unit, 1);
  CHECK(refused.code() == errc::out_of_bytes);
  CHECK(space.used() == 64 * unit);
  CHECK(three.files[0]->used() + three.files[2]->used() == 64 * unit);
}

TEST_CASE("a failure names the member's path, and is reported at the end of the whole copy") {
  const temporary_folder folder;
  using engine = faulty_io<posix_io>;
  file_space<engine> good(folder.file("good"), with_budget(1 << 20), std::vector<planned_fault>{});
  file_space<engine> bad(folder.file("bad"), with_budget(1 << 20),
                         std::vector<planned_fault>{{.what = io_fault::error, .first = 2}});
  const std::array members{&good, &bad};
  striped_space<engine> space(members, {.stripe_bytes = unit});
  const auto range = space.try_allocate(8 * unit, 1).value();
  const std::vector<std::byte> bytes(8 * unit);
  const striped_fence fence = space.copy_in_async(range, bytes, {}).value();
  CHECK(fence.parts().size() == 2);
  CHECK(fence.settled().error().message() ==
        folder.file("bad") + ": write of 4096 bytes at offset 8192 failed: Input/output error (errno 5)");
  CHECK(fence.ready());
  CHECK(fence.outcome().code() == errc::write_failed);
  CHECK_THROWS_AS(fence.wait(), io_error);
  CHECK(space.copy_in_async(range, bytes, std::span(&fence, 1)).code() == errc::write_failed);
  space.clear_failures();
  CHECK(space.copy_in_async(range, bytes, {}).value().settled());
  CHECK(striped_fence{}.outcome());
}

TEST_CASE("impossible copies are refused, and start nothing") {
  three_files three({1 << 22, 1 << 22, 1 << 22}, {.stripe_bytes = unit, .max_pieces = 3, .name = "both"});
  auto& space = *three.space;
  const auto range = space.try_allocate(30 * unit, 1).value();
  std::vector<std::byte> bytes(30 * unit);
  CHECK(space.copy_in_async(range, std::span(bytes).first(5), {}).error() ==
        failure{.code = errc::size_mismatch, .wanted = 30 * unit, .found = 5});
  CHECK(space.copy_in_async({range.data + unit, range.bytes}, bytes, {}).error() ==
        failure{.code = errc::dead_range, .wanted = 30 * unit});
  CHECK(space.copy_within_async(range, range, {}).code() == errc::overlapping_ranges);
  const failure full = space.copy_in_async(range, bytes, {}).error();
  CHECK(full == failure{.code = errc::table_full, .wanted = 4, .found = 3});
  CHECK(full.message() ==
        "both: a table of fixed size is full: 4 entries needed, 3 free; raise its max_ option");
  CHECK(space.copy_in_async(range.subrange(0, 9 * unit).value(), std::span(bytes).first(9 * unit), {})
            .value()
            .settled());
  CHECK(space.try_allocate(0, 1).code() == errc::zero_bytes);
  CHECK(space.try_allocate(1, 3).code() == errc::bad_alignment);
}

TEST_CASE("a range deallocated twice is reported to the handler") {
  std::vector<misuse> told;
  striped_options options{.stripe_bytes = unit};
  options.on_misuse = [](const misuse& what, void* context) noexcept {
    static_cast<std::vector<misuse>*>(context)->push_back(what);
  };
  options.misuse_context = &told;
  three_files three({1 << 20, 1 << 20, 1 << 20}, options);
  const auto range = three.space->try_allocate(5 * unit, 1).value();
  three.space->deallocate(range);
  three.space->deallocate(range);
  REQUIRE(told.size() == 1);
  CHECK(told[0].what == misuse::kind::not_live);
  CHECK(three.space->used() == 0);
}

TEST_CASE("impossible members and stripes are refused by name") {
  const temporary_folder folder;
  file_space<> one(folder.file("one"), with_budget(1 << 20));
  const auto make = [](std::vector<file_space<>*> members, striped_options options) {
    striped_space<> made(members, options);
  };
  CHECK_THROWS_WITH_AS(make({}, {}), "striped_space: 0 members; use 1 to 8", argument_error);
  CHECK_THROWS_WITH_AS(make({&one, nullptr}, {}), "striped_space: member 1 is null", argument_error);
  CHECK_THROWS_WITH_AS(make({&one, &one}, {}), "striped_space: members 0 and 1 are the same object",
                       argument_error);
  CHECK_THROWS_WITH_AS(make({&one}, {.stripe_bytes = 5000}),
                       "striped_space: stripe_bytes is 5000; it must be a power of two from 4096 to 2^30",
                       argument_error);
  CHECK_THROWS_WITH_AS(make({&one}, {.max_pieces = 0, .name = "nvme"}),
                       "nvme: max_pieces is 0; it must be at least 1", argument_error);
}

TEST_CASE("a destroyed striped space returns its live ranges to its members") {
  const temporary_folder folder;
  file_space<> one(folder.file("one"), with_budget(1 << 20));
  const std::array members{&one};
  {
    striped_space<> space(members);
    REQUIRE(space.try_allocate(100'000, 1));
    CHECK(one.used() == 100'000);
  }
  CHECK(one.used() == 0);
}
