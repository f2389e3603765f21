#include <llmmem/sharding/flat_uneven.hpp>
#include <llmmem/sharding/live_reshard.hpp>
#include <llmmem/sharding/server.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "support/partition_checks.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using llmmem_tests::check_partition;
using llmmem_tests::random_numbers;
using llmmem_tests::seeds;

namespace {

std::vector<tensor_facts> catalogue_of(const key_servers& servers) {
  std::vector<tensor_facts> tensors;
  for (std::uint32_t i = 0; i < servers.tensors(); ++i)
    tensors.push_back({.name = "range", .shape = servers.shape(tensor_id{i}), .element_bytes = 4});
  return tensors;
}

std::vector<rank_id> ranks(std::initializer_list<std::uint32_t> numbers) {
  std::vector<rank_id> all;
  for (const std::uint32_t each : numbers)
    all.push_back(rank_id{each});
  return all;
}

/// Who has what, by following the plans.
struct cluster {
  std::vector<std::set<std::uint32_t>> has;  // ranges of each server

  explicit cluster(const key_servers& servers) : has(to_number(servers.world())) {
    for (std::uint32_t i = 0; i < servers.tensors(); ++i) {
      for (const rank_id server : servers.replicas(tensor_id{i}))
        has[to_index(server)].insert(i);
    }
  }

  void follow(const server_change& change) {
    for (const tensor_id range : change.lost_ranges) {
      for (const auto& each : has)
        REQUIRE(!each.contains(to_index(range)));
      const auto found =
          std::find_if(change.changes.begin(), change.changes.end(),
                       [&](const llmmem::sharding::range_change& each) { return each.range == range; });
      REQUIRE(found != change.changes.end());
      has[to_index(found->owner_after)].insert(to_index(range));  // from a checkpoint
    }
    for (const llmmem::sharding::range_change& each : change.changes) {
      const std::uint32_t range = to_index(each.range);
      REQUIRE(has[to_index(each.copy_from)].contains(range));
      for (const rank_id to : each.copy_to)
        REQUIRE(has[to_index(to)].insert(range).second);
      for (const rank_id from : each.drop_from)
        REQUIRE(has[to_index(from)].erase(range) == 1);
    }
  }
};

}  // namespace

TEST_CASE("every key has one owner and its followers, through losses and returns") {
  for (const auto seed : seeds(120)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::uint32_t n = 1 + random.below(7U);
    const std::uint32_t followers = random.below(n);
    const std::uint64_t keys = random.below(std::uint64_t{60});
    key_servers servers(keys, rank_count{n}, followers, 1 + random.below(4U));
    cluster model(servers);
    for (int round = 0; round < 8; ++round) {
      check_partition(servers, catalogue_of(servers), rank_count{n});
      for (std::uint32_t i = 0; i < servers.tensors(); ++i) {
        const std::vector<rank_id> chain = servers.replicas(tensor_id{i});
        REQUIRE(chain.size() == std::min(followers + 1, servers.live_servers()));
        REQUIRE(std::set<rank_id>(chain.begin(), chain.end()).size() == chain.size());
        REQUIRE(chain.front() == servers.owner(tensor_id{i}));
        for (std::uint32_t s = 0; s < n; ++s) {
          const bool in_chain = std::find(chain.begin(), chain.end(), rank_id{s}) != chain.end();
          REQUIRE(in_chain == model.has[s].contains(i));
          REQUIRE((!in_chain || servers.is_alive(rank_id{s})));
          REQUIRE(servers.local(tensor_id{i}, rank_id{s}).elements() ==
                  (in_chain ? servers.keys_of(tensor_id{i}).count : 0));
        }
      }
      for (std::uint64_t key = 0; key < keys; ++key) {
        const index_range range = servers.keys_of(servers.range_of(key));
        REQUIRE(key - range.first < range.count);
        REQUIRE(servers.replicas_of(key).front() == servers.owner(key));
      }
      // Lose one to three at once, or let one return.
      std::vector<rank_id> lost;
      for (std::uint32_t s = 0; s < n; ++s) {
        if (servers.is_alive(rank_id{s}) && random.once_in(3) && lost.size() + 1 < servers.live_servers())
          lost.push_back(rank_id{s});
      }
      const key_servers before = servers;
      server_change change;
      if (!lost.empty() && random.once_in(2)) {
        change = servers.lose(lost);
        for (const rank_id each : lost)
          model.has[to_index(each)].clear();
        for (const llmmem::sharding::range_change& each : change.changes) {
          // Whoever lives and has it first becomes the owner: it need not be sent what it answers for.
          const bool all_lost = std::find(change.lost_ranges.begin(), change.lost_ranges.end(), each.range) !=
                                change.lost_ranges.end();
          if (!all_lost) REQUIRE(model.has[to_index(each.owner_after)].contains(to_index(each.range)));
          REQUIRE(each.owner_before == before.owner(each.range));
          REQUIRE(each.owner_after == servers.owner(each.range));
        }
        if (lost.size() <= followers) REQUIRE(change.lost_ranges.empty());
      } else {
        std::uint32_t dead = 0;
        while (dead < n && servers.is_alive(rank_id{dead}))
          ++dead;
        if (dead == n) continue;
        change = servers.rejoin(rank_id{dead});
        REQUIRE(change.lost_ranges.empty());
      }
      std::uint64_t copied = 0;
      for (const llmmem::sharding::range_change& each : change.changes)
        copied += each.copy_to.size() * servers.keys_of(each.range).count;
      REQUIRE(change.copied_keys == copied);
      model.follow(change);
    }
  }
}

TEST_CASE("a lost server's range goes to its follower, and the chain gets another server at its end") {
  key_servers servers(100, rank_count{5}, 2);
  CHECK(servers.keys_of(tensor_id{1}) == index_range{20, 20});
  CHECK(servers.replicas_of(25) == ranks({1, 2, 3}));
  const server_change change = servers.lose(ranks({1}));
  CHECK(servers.replicas_of(25) == ranks({2, 3, 4}));
  CHECK(servers.owner(25) == rank_id{2});
  CHECK(servers.live_servers() == 4);
  // Ranges 4, 0 and 1 had a copy on server 1: each is sent once.
  REQUIRE(change.changes.size() == 3);
  CHECK(change.changes[1] == sharding::range_change{.range = tensor_id{1},
                                                    .owner_before = rank_id{1},
                                                    .owner_after = rank_id{2},
                                                    .copy_to = ranks({4}),
                                                    .drop_from = {},
                                                    .copy_from = rank_id{2}});
  CHECK(change.copied_keys == 60);
  const server_change back = servers.rejoin(rank_id{1});
  CHECK(servers.replicas_of(25) == ranks({1, 2, 3}));
  CHECK(back.changes[1].copy_to == ranks({1}));
  CHECK(back.changes[1].drop_from == ranks({4}));
}

TEST_CASE("the ranges of a lost server go to the same number of other servers") {
  key_servers servers(120, rank_count{6}, 1, 4);
  std::set<rank_id> heirs;
  for (const llmmem::sharding::range_change& each : servers.lose(ranks({2})).changes) {
    if (each.owner_before == rank_id{2}) heirs.insert(each.owner_after);
  }
  CHECK(heirs.size() == 4);
}

TEST_CASE("a chain that is lost at once is read from a checkpoint, a partial loss is not") {
  key_servers servers(40, rank_count{4}, 1);
  CHECK(servers.lose(ranks({1, 3})).lost_ranges.empty());
  key_servers again(40, rank_count{4}, 1);
  const server_change change = again.lose(ranks({1, 2}));
  REQUIRE(change.lost_ranges == std::vector{tensor_id{1}});
  CHECK(again.replicas(tensor_id{1}) == ranks({3, 0}));
}

TEST_CASE("servers' ranges reshard to another number of servers as any partition does") {
  const key_servers three(30, rank_count{3}, 1, 2);
  const auto tensors = catalogue_of(three);
  const flat_uneven flat = flat_uneven::even(tensors, rank_count{3});
  // Server r has ranges r and r + 3 of six, and copies; of its flat third, 2r and 2r + 1, the rest is sent.
  std::uint64_t lacking = 0;
  for (std::uint32_t t = 0; t < 6; ++t) {
    for (std::uint32_t r = 0; r < 3; ++r) {
      if (three.local(tensor_id{t}, rank_id{r}).empty())
        lacking += flat.local(tensor_id{t}, rank_id{r}).elements() * 4;
    }
  }
  CHECK(reshard(tensors, three, flat).moves.bytes == lacking);
}

TEST_CASE("impossible servers, and losses of absent ones, are refused and change nothing") {
  CHECK_THROWS_WITH_AS(key_servers(1, rank_count{0}, 0), "key_servers: 0 ranks; a world has at least one",
                       argument_error);
  CHECK_THROWS_WITH_AS(key_servers(1, rank_count{2}, 2),
                       "key_servers: 2 followers of each of 2 servers; a chain has no server twice",
                       argument_error);
  CHECK_THROWS_WITH_AS(key_servers(1, rank_count{2}, 0, 0),
                       "key_servers: 0 ranges per server; each has at least one", argument_error);
  CHECK_THROWS_WITH_AS(key_servers(1, rank_count{65536}, 0, 65536),
                       "key_servers: 65536 servers x 65536 ranges; their ids are 32 bits wide", length_error);
  CHECK_THROWS_AS(key_servers(max_bytes + 1, rank_count{1}, 0), length_error);
  key_servers servers(10, rank_count{2}, 1);
  CHECK_THROWS_WITH_AS(servers.lose(ranks({0, 2})), "key_servers::lose: server 2, and there are 2",
                       argument_error);
  CHECK_THROWS_WITH_AS(servers.lose(ranks({0, 0})), "key_servers::lose: server 0 is lost already",
                       argument_error);
  CHECK_THROWS_WITH_AS(servers.lose(ranks({0, 1})),
                       "key_servers::lose: server 1 is the last one alive; restart from a checkpoint",
                       argument_error);
  CHECK(servers.live_servers() == 2);
  CHECK_THROWS_WITH_AS(servers.rejoin(rank_id{0}), "key_servers::rejoin: server 0 is alive", argument_error);
  CHECK_THROWS_WITH_AS(servers.rejoin(rank_id{2}), "key_servers::rejoin: server 2, and there are 2",
                       argument_error);
  CHECK(servers.is_replicated(tensor_id{0}));
}
