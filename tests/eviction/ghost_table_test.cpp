#include <llmmem/eviction/detail/ghost_table.hpp>

#include <doctest/doctest.h>

#include <array>
#include <deque>

#include "support/counting_metadata.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::detail::ghost_table;

TEST_CASE("a ghost table behaves as queues of contents that are searched linearly") {
  for (const auto seed : seeds(200)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::uint64_t capacity = 1 + seed % 40;
    ghost_table<2> table(capacity, {}, "ghosts");
    std::array<std::deque<std::uint64_t>, 2> queues;
    const auto find = [&](std::uint64_t content) -> std::optional<std::size_t> {
      for (std::size_t queue = 0; queue < 2; ++queue) {
        for (const std::uint64_t each : queues[queue]) {
          if (each == content) return queue;
        }
      }
      return std::nullopt;
    };
    for (int i = 0; i < 1000; ++i) {
      const std::uint64_t content = random.below(capacity * 3);
      const auto name = ghost_table<2>::name_of(content);
      const std::size_t queue = random.below(std::uint32_t{2});
      if (random.once_in(10)) {
        table.pop(queue);
        if (!queues[queue].empty()) queues[queue].pop_front();
      } else if (const auto in = find(content); in && random.once_in(2)) {
        REQUIRE(table.take(name) == in);
        std::erase(queues[*in], content);
      } else if (content == 0) {
        table.push(queue, name);
        REQUIRE_FALSE(table.take(name));
      } else {
        REQUIRE(table.take(name) == in);
        table.push(queue, name);
        if (in) {
          std::erase(queues[*in], content);
        } else if (queues[0].size() + queues[1].size() == capacity) {
          queues[queues[queue].empty() ? 1 - queue : queue].pop_front();
        }
        queues[queue].push_back(content);
      }
      REQUIRE(table.size(0) == queues[0].size());
      REQUIRE(table.size(1) == queues[1].size());
      bool agree = true;
      for (std::uint64_t each = 0; each < capacity * 3; ++each) {
        if (table.find(ghost_table<2>::name_of(each)) != find(each)) agree = false;
      }
      REQUIRE(agree);
    }
  }
}

TEST_CASE("a ghost table that cannot be allocated leaks nothing") {
  CHECK(fail_each_allocation([](const metadata_source& source) { ghost_table<1>(5, source, "ghosts"); }) ==
        4);
}
