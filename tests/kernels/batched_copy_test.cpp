#include <llmmem/kernels/batched_copy.hpp>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/testing/grid_executor.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "support/cache_world.hpp"
#include "support/comm_job.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::grid_executor;

/// Stretches of one memory that are to come to other places in another, none over another.
struct copy_world {
  std::vector<std::byte> from{};
  std::vector<std::byte> expected{};
  std::vector<copy_task> tasks{};
  std::vector<std::uint64_t> targets{};
  std::uint64_t longest = 0;

  copy_world(std::mt19937_64& random, std::uint64_t multiple) {
    from = bytes_of_seed(200'000, random());
    const std::uint64_t count = random() % 300;
    std::uint64_t at = 0;
    for (std::uint64_t i = 0; i < count; ++i) {
      std::uint64_t bytes = random() % (random() % 20 == 0 ? 60'000 : 300);
      if (random() % 4 == 0) bytes = random() % 2 == 0 ? 0 : 16'384;
      const std::uint64_t source = random() % (from.size() - bytes + 1) / multiple * multiple;
      at = (at + random() % 40 + multiple - 1) / multiple * multiple;
      tasks.push_back({from.data() + source, nullptr, bytes});
      targets.push_back(at);
      at += bytes;
      longest = std::max(longest, bytes);
    }
    expected.assign(at + 1, poison);
    for (std::size_t i = 0; i < tasks.size(); ++i) {
      if (tasks[i].bytes != 0) std::memcpy(expected.data() + targets[i], tasks[i].from, tasks[i].bytes);
    }
  }
  void aim_at(std::vector<std::byte>& to) {
    to.assign(expected.size(), poison);
    for (std::size_t i = 0; i < tasks.size(); ++i)
      tasks[i].to = to.data() + targets[i];
  }
};

struct counted_rows {
  std::uint64_t rows = 0;
  std::uint32_t first_bytes = 1;
  std::uint32_t last_bytes = 1;
};

/// Counts the rows of a move instead of moving them: two billion take seconds.
struct row_counter {
  counted_rows* into;
  template <llmmem::cache_hint Read, llmmem::cache_hint Write, class Map, class Op>
  result<void> move(const Map& map, const Op& /*op*/) const noexcept {
    *into = {map.rows(), map.at(0, 0).elements, map.at(map.rows() - 1, 0).elements};
    return {};
  }
};

}  // namespace

TEST_SUITE("batched_copy") {
  TEST_CASE("every byte of every task arrives at its place, and no other byte is written") {
    for (const auto seed : llmmem_tests::seeds_within(60, 20)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const std::uint64_t multiple = std::uint64_t{1} << random() % 5;
      copy_world world(random, multiple);
      const auto aligned = static_cast<std::uint32_t>(multiple);
      const auto check = [&](const auto& run) {
        std::vector<std::byte> to;
        world.aim_at(to);
        copy_batch(run, world.tasks, world.longest, {aligned, aligned}).value();
        CHECK(to == world.expected);
        world.aim_at(to);
        copy_few(run, world.tasks).value();
        CHECK(to == world.expected);
      };
      check(host_executor{});
      check(grid_executor({.multiprocessors = 2, .blocks = static_cast<std::uint32_t>(random() % 4)}));
    }
  }

  TEST_CASE("the grid executor detects tasks with less than the promised alignment, unlike a device") {
    std::vector<std::byte> bytes(64, poison);
    const std::vector<copy_task> tasks{{bytes.data(), bytes.data() + 32, 8},
                                       {bytes.data() + 8, bytes.data() + 40, 8}};
    const auto done = copy_batch(grid_executor(), tasks, 8);
    CHECK(done.error() == failure{errc::misaligned, 0, 16, 1});
    CHECK(copy_batch(grid_executor(), tasks, 8, {8, 8}).has_value());
  }

  TEST_CASE("lengths that tiles cannot count, invalid alignments and missing lists are refused") {
    std::vector<std::byte> bytes(64, poison);
    const std::vector<copy_task> tasks{{bytes.data(), bytes.data() + 32, 8}};
    constexpr std::uint64_t past = std::uint64_t{1} << 45;
    const host_executor run;
    for (const std::uint64_t longest : {past, past * 2, ~std::uint64_t{0}}) {
      CHECK(copy_batch(run, tasks, longest).error() == failure{errc::past_the_bytes, 0, longest, past - 1});
      const std::vector<copy_task> few{tasks[0], {bytes.data(), bytes.data() + 32, longest}};
      CHECK(copy_few(run, few).error() == failure{errc::past_the_bytes, 1, longest, past - 1});
    }
    counted_rows counted;
    CHECK(copy_batch(row_counter{&counted}, tasks, past - 1, {1, 1}).has_value());
    CHECK(counted.rows == past / (16 * 1024));
    CHECK(counted.first_bytes == 8);
    CHECK(counted.last_bytes == 0);
    CHECK(copy_batch(run, tasks, 8, {3, 8}).error() == failure{errc::bad_alignment, 0, 3, 0});
    CHECK(copy_batch(run, tasks, 8, {8, 0}).error() == failure{errc::bad_alignment, 0, 0, 0});
    const copy_task* const none = nullptr;
    CHECK(copy_batch(run, std::span(none, 2), 8).error() == failure{errc::too_short, 0, 2, 0});
    CHECK(copy_batch(run, {}, past, {0, 0}).has_value());
  }
}
