#include <llmmem/paging/deferred_frees.hpp>

#include <doctest/doctest.h>

#include <array>
#include <span>
#include <vector>

#include "support/counting_metadata.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

std::vector<block_id> ids(std::initializer_list<std::uint32_t> numbers) {
  std::vector<block_id> out;
  for (const std::uint32_t n : numbers)
    out.push_back(block_id{n});
  return out;
}

struct collected {
  std::vector<block_id> blocks;
  std::uint64_t count = 0;
};

collected collect(deferred_frees<host_fence>& queue) {
  collected out;
  out.blocks.reserve(queue.held());
  out.count = queue.collect([&](block_id block) noexcept { out.blocks.push_back(block); });
  return out;
}

}  // namespace

TEST_CASE("blocks return after their fence, each group tail first") {
  host_timeline stream;
  const host_fence first = stream.issue();
  const host_fence second = stream.issue();
  deferred_frees<host_fence> queue(8, 4, {});
  REQUIRE(queue.push(ids({1, 2, 3}), first));
  REQUIRE(queue.push(ids({4, 5}), second));
  CHECK(collect(queue).count == 0);
  CHECK(queue.held() == 5);
  REQUIRE(stream.pass(first));
  CHECK(collect(queue).blocks == ids({3, 2, 1}));
  REQUIRE(stream.pass(second));
  CHECK(collect(queue).blocks == ids({5, 4}));
  CHECK(queue.held() == 0);
}

TEST_CASE("a group behind an unpassed fence delays those after it") {
  host_timeline slow;
  host_timeline quick;
  const host_fence waiting = slow.issue();
  const host_fence passed = quick.issue();
  REQUIRE(quick.pass(passed));
  deferred_frees<host_fence> queue(8, 4, {});
  REQUIRE(queue.push(ids({1}), waiting));
  REQUIRE(queue.push(ids({2}), passed));
  CHECK(collect(queue).count == 0);
  REQUIRE(slow.pass(waiting));
  CHECK(collect(queue).blocks == ids({1, 2}));
}

TEST_CASE("a full queue refuses the whole group and reports its free space") {
  host_timeline stream;
  const host_fence fence = stream.issue();
  deferred_frees<host_fence> queue(4, 2, {});
  REQUIRE(queue.push(ids({1, 2, 3}), fence));
  CHECK(queue.push(ids({4, 5}), fence).error() == failure{errc::deferred_full, 0, 2, 1});
  CHECK(queue.held() == 3);
  REQUIRE(queue.push(ids({4}), fence));
  CHECK(queue.push(ids({}), fence).error() == failure{errc::deferred_full, 0, 0, 0});  // no group left
  REQUIRE(stream.pass(fence));
  CHECK(collect(queue).count == 4);
  CHECK(queue.push(ids({6, 7, 8, 9}), {}));
}

TEST_CASE("the blocks of several spans wait as one group, or none does") {
  deferred_frees<host_fence> queue(6, 3, {});
  const auto one = ids({1, 2});
  const auto two = ids({3});
  const std::array<std::span<const block_id>, 3> parts{one, {}, two};
  REQUIRE(queue.push_parts(parts, {}));
  CHECK(queue.fits(3, 2));
  CHECK(!queue.fits(4, 1));
  CHECK(!queue.fits(0, 3));
  REQUIRE(queue.push(ids({4}), {}));
  CHECK(queue.push_parts(parts, {}).error() == failure{errc::deferred_full, 0, 3, 2});
  CHECK(queue.held() == 4);
  CHECK(collect(queue).blocks == ids({3, 2, 1, 4}));
}

TEST_CASE("the rings wrap around any number of times") {
  deferred_frees<host_fence> queue(5, 3, {});
  for (std::uint32_t i = 1; i < 50; ++i) {
    REQUIRE(queue.push(ids({i, i + 1}), {}));
    REQUIRE(queue.push(ids({i + 2}), {}));
    std::vector<block_id> held;
    queue.for_each([&](block_id block) { held.push_back(block); });
    CHECK(held == ids({i, i + 1, i + 2}));
    CHECK(collect(queue).blocks == ids({i + 1, i, i + 2}));
  }
}

TEST_CASE("null blocks are skipped, and take no space") {
  deferred_frees<host_fence> queue(2, 2, {});
  REQUIRE(queue.push(ids({0, 7, 0, 8, 0}), {}));
  CHECK(queue.held() == 2);
  CHECK(collect(queue).blocks == ids({8, 7}));
}

TEST_CASE("a queue whose metadata cannot be allocated says so and leaks nothing") {
  CHECK(fail_each_allocation(
            [](const metadata_source& source) { deferred_frees<host_fence>(4, 4, source); }) == 2);
}
