#include <llmmem/paging/sharded_free_list.hpp>

#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <thread>
#include <vector>

#include "support/giving_way.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using llmmem_tests::giving_way;
using llmmem_tests::random_numbers;
using llmmem_tests::seeds;

using yielding_free_list = basic_sharded_free_list<giving_way>;

TEST_CASE("no block has two owners, and none is lost") {
  for (const auto seed : seeds(40)) {
    CAPTURE(seed);
    const auto blocks = static_cast<std::uint32_t>(4 + seed % 40);
    yielding_free_list list(blocks, 1 + static_cast<std::uint32_t>(seed % 4));
    for (std::uint32_t i = 1; i <= blocks; ++i)
      list.push(std::array{block_id{i}}, shard_id{i});
    // Written and read like any memory: the thread sanitizer sees two hands, and a hand-over out of order.
    std::vector<std::uint64_t> mark(blocks + 1);
    std::atomic<std::uint64_t> wrong{0};
    std::vector<std::thread> threads;
    for (std::uint32_t t = 0; t < 3; ++t) {
      threads.emplace_back([&, t] {
        random_numbers random(seed * 4 + t);
        giving_way::seed(random.next());
        std::vector<block_id> held;
        for (std::uint64_t step = 0; step < 800; ++step) {
          std::vector<block_id> out(random.below(std::uint64_t{blocks / 2 + 1}));
          if (list.try_take(out, shard_id{t})) {
            for (const block_id block : out)
              mark[to_index(block)] = t;
            held.insert(held.end(), out.begin(), out.end());
          }
          for (const block_id block : held)
            wrong += mark[to_index(block)] != t ? 1 : 0;
          const std::size_t keep = random.below(held.size() + 1);
          list.push(std::span(held).subspan(keep), shard_id{random.once_in(4) ? t + 1 : t});
          held.resize(keep);
        }
        list.push(held, shard_id{t});
      });
    }
    for (std::thread& each : threads)
      each.join();
    CHECK(wrong == 0);
    CHECK(list.size() == blocks);
    std::set<block_id> all;
    list.for_each([&](block_id block) { all.insert(block); });
    CHECK(all.size() == blocks);
  }
}

TEST_CASE("a batch that fits always succeeds, regardless of what other threads do meanwhile") {
  // Three threads that hold four blocks at most each, of twelve: there are always four for whoever holds
  // none.
  for (const auto seed : seeds(20)) {
    CAPTURE(seed);
    yielding_free_list list(12, 3);
    for (std::uint32_t i = 1; i <= 12; ++i)
      list.push(std::array{block_id{i}}, shard_id{0});
    std::atomic<std::uint64_t> refused{0};
    std::vector<std::thread> threads;
    for (std::uint32_t t = 0; t < 3; ++t) {
      threads.emplace_back([&, t] {
        random_numbers random(seed * 4 + t);
        giving_way::seed(random.next());
        for (int step = 0; step < 1000; ++step) {
          std::array<block_id, 4> out{};
          if (!list.try_take(out, shard_id{t})) {
            ++refused;
          } else {
            list.push(out, shard_id{random.below(std::uint32_t{3})});
          }
        }
      });
    }
    for (std::thread& each : threads)
      each.join();
    CHECK(refused == 0);
    CHECK(list.size() == 12);
  }
}
