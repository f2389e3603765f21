/// Pools whose directory is in Redis: they find what pools with a directory of their own find.
#include <doctest/doctest.h>

#ifndef LLMMEM_TESTS_REDIS

TEST_CASE("pools with a directory in Redis") {
  MESSAGE("skipped: no hiredis (Debian: libhiredis-dev)");
}

#else

#include <llmmem/pool/redis_directory.hpp>
#include <llmmem/pool/shared_memory_mover.hpp>

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "pool/killed_nodes.hpp"
#include "pool/pool_cluster.hpp"
#include "support/random.hpp"
#include "support/redis_server.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

using redis_node = pool_node<cache_type, thread_endpoint, redis_directory&>;

/// Nodes of one thread, and a server.
struct redis_cluster {
  explicit redis_cluster(std::uint32_t nodes, std::uint64_t blocks = 300, const kv_pool_options& how = {},
                         std::span<const std::uint32_t> racks = {})
      : slots(blocks),
        options(how),
        domains(racks.begin(), racks.end()),
        net(nodes, {.copied_bytes = 65536, .lane_bytes = 1 << 20}) {
    all.resize(nodes);
    ends.resize(nodes);
    directories.resize(nodes);
    for (std::uint32_t i = 0; i < nodes; ++i)
      ends[i] = std::make_unique<thread_endpoint>(net, seat_id{i});
    for (std::uint32_t i = 0; i < nodes; ++i)
      make(i);
    settle();
  }
  void make(std::uint32_t i) {
    if (!ends[i]) ends[i] = std::make_unique<thread_endpoint>(net, seat_id{i});
    directories[i] = std::make_unique<redis_directory>(
        redis_options{.unix_socket = server.socket(), .answer_ns = answer_ns, .retry_ns = 1'000'000});
    kv_pool_options own = options;
    own.patience_ns = 20'000'000'000;
    if (!domains.empty()) own.domain = domains[i];
    all[i] = std::make_unique<redis_node>(
        *ends[i], node_form{.groups = paged_group, .blocks = slots, .slots = slots, .lower_slots = slots},
        own, *directories[i]);
  }
  void end(std::size_t i) {
    all[i].reset();
    directories[i].reset();
    ends[i].reset();
  }
  void step() {
    for (auto& each : all) {
      if (each) each->step();
    }
  }
  /// Makes steps until something is so.
  template <class F>
  void until(F&& is_so) {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!is_so()) {
      REQUIRE(std::chrono::steady_clock::now() < limit);
      step();
    }
  }
  /// Makes steps until what was announced is in the server.
  void settle() {
    for (int i = 0; i < 8; ++i)
      step();
    until([&] {
      for (auto& each : directories) {
        if (each && (each->state() != pool::redis_state::up || each->stats().open_commands != 0))
          return false;
      }
      return true;
    });
    for (int i = 0; i < 8; ++i)
      step();
  }
  served_request serve(std::size_t node, std::span<const token_id> prompt) {
    const auto out = all[node]->serve(prompt, [&](auto& request) {
      until([&] { return request.where().next != offload::answer::pending; });
      next = request.where().next;
      request.fetch();
      until([&] { return request.has_arrived(); });
    });
    CHECK(all[node]->wrong() == "");
    return out;
  }

  static constexpr std::uint64_t answer_ns = 2'000'000'000;
  std::uint64_t slots;
  kv_pool_options options;
  std::vector<std::uint32_t> domains;
  redis_server server;
  thread_network net;
  std::vector<std::unique_ptr<thread_endpoint> > ends;
  std::vector<std::unique_ptr<redis_directory> > directories;
  std::vector<std::unique_ptr<redis_node> > all;
  offload::answer next = offload::answer::miss;  // of the last request
};

bool has_redis() {
  if (!redis_program().empty()) return true;
  MESSAGE("skipped: no redis-server on PATH (Debian: redis-server)");
  return false;
}

}  // namespace

TEST_SUITE("kv_pool with redis_directory") {
  TEST_CASE("nodes find the same blocks through Redis as by a directory of their own") {
    if (!has_redis()) return;
    redis_cluster shared(3, 4000);  // enough for all: the choice of a holder changes what is evicted
    cluster own(3, {.groups = paged_group, .blocks = 4000, .slots = 4000, .lower_slots = 4000});
    random_numbers random(5);
    std::uint64_t loaded = 0;
    for (int i = 0; i < 40; ++i) {
      const std::uint32_t node = random.below(std::uint32_t{3});
      // Up to 5 spans; each second prompt parts from its family within a span.
      auto prompt = prompt_of(random.below(std::uint32_t{3}), 9 + random.below(std::uint64_t{500}));
      if (random.below(std::uint32_t{2}) == 0) prompt[prompt.size() / 2] = 7;
      const served_request one = shared.serve(node, prompt);
      shared.settle();
      const served_request other = own.serve(node, prompt);
      CAPTURE(i);
      CHECK(one.loaded == other.loaded);
      CHECK(one.matched == other.matched);
      CHECK(one.fetched.failed_blocks == 0);
      loaded += one.loaded;
    }
    CHECK(loaded > 1000);
  }

  TEST_CASE("a server that is down costs the blocks of others and no wait; back, it is told of all") {
    if (!has_redis()) return;
    redis_cluster nodes(2);
    const auto prompt = prompt_of(1, 201);
    nodes.serve(0, prompt);
    nodes.settle();
    nodes.server.kill();
    nodes.until([&] {
      return nodes.directories[0]->state() == pool::redis_state::down &&
             nodes.directories[1]->state() == pool::redis_state::down;
    });
    const std::uint64_t questions = nodes.directories[1]->stats().unknown;
    CHECK(nodes.serve(1, prompt_of(2, 41)).loaded == 0);
    CHECK(nodes.next == offload::answer::unknown);  // and no miss: the first look says so
    CHECK(nodes.directories[1]->stats().unknown > questions);
    CHECK(nodes.serve(1, prompt_of(2, 41)).matched == 40);
    // A new server knows nothing: both nodes announce all that they hold.
    nodes.server.start();
    nodes.settle();
    nodes.settle();
    CHECK(nodes.serve(1, prompt).loaded == 200);
    CHECK(nodes.serve(0, prompt_of(2, 41)).loaded == 40);
    CHECK(nodes.all[1]->tiers().audit().empty());
  }

  TEST_CASE("a node that ends takes its entries with it, and its seat's next process is another") {
    if (!has_redis()) return;
    redis_cluster nodes(3);
    const auto prompt = prompt_of(1, 81);
    nodes.serve(0, prompt);
    nodes.settle();
    CHECK(nodes.serve(1, prompt).loaded == 80);
    nodes.settle();
    nodes.end(0);
    nodes.make(0);
    nodes.settle();
    nodes.until([&] { return nodes.all[2]->pool().peers() == 2; });
    const served_request came = nodes.serve(2, prompt);
    CHECK(came.loaded == 80);  // of the second
    CHECK(came.fetched.failed_blocks == 0);
    CHECK(nodes.all[0]->pool().stats().served_blocks == 0);
    CHECK(nodes.all[0]->pool().stats().missing_blocks == 0);
    nodes.settle();
    CHECK(nodes.serve(0, prompt).loaded == 80);
    // A reset of all caches begins with no entries.
    for (auto& each : nodes.all)
      each->cache().reset();
    nodes.settle();
    nodes.until([&] { return nodes.all[1]->pool().peers() == 2; });
    CHECK(nodes.serve(1, prompt).loaded == 0);
    CHECK(nodes.next == offload::answer::miss);
    nodes.settle();
    nodes.until([&] { return nodes.all[2]->pool().peers() == 2; });
    CHECK(nodes.serve(2, prompt).loaded == 80);
  }

  TEST_CASE("a whole domain may end, and every hot prompt is found in another one") {
    if (!has_redis()) return;
    constexpr std::array<std::uint32_t, 4> racks{7, 7, 9, 9};
    redis_cluster nodes(4, 900, {.copies = 1, .hot_uses = 2}, racks);
    constexpr std::uint32_t prompts = 12;
    // As with the embedded directory: each is used once, every second one again.
    const auto prompt = [](std::uint32_t i) { return prompt_of(100 + i, 41 + i * 40); };
    for (std::uint32_t i = 0; i < prompts; ++i) {
      nodes.serve(i % 4 / 2, prompt(i));
      if (i % 2 == 0) nodes.serve(i % 4 / 2, prompt(i));
    }
    const auto copied = [&] {
      return nodes.all[2]->pool().stats().copied_spans + nodes.all[3]->pool().stats().copied_spans;
    };
    nodes.until([&] { return copied() == 6 + 3; });  // three of the hot prompts have two spans
    CHECK(nodes.all[0]->pool().stats().ordered_copies + nodes.all[1]->pool().stats().ordered_copies == 6 + 3);
    nodes.settle();
    nodes.end(0);
    nodes.end(1);
    nodes.settle();
    for (std::uint32_t i = 0; i < prompts; ++i) {
      CAPTURE(i);
      const auto tokens = prompt(i);
      CHECK(nodes.serve(2 + i % 2, tokens).loaded == (i % 2 == 0 ? tokens.size() - 1 : 0));
    }
  }

  TEST_CASE(
      "the next use of a hot prompt replaces a copy whose node has ended, and a new process keeps copies") {
    if (!has_redis()) return;
    constexpr std::array<std::uint32_t, 3> hosts{0, 1, 2};
    redis_cluster nodes(3, 300, {.copies = 1, .hot_uses = 1}, hosts);
    const auto prompt = prompt_of(1, 81);
    const auto has_copied = [&](std::size_t node) {
      return nodes.all[node] ? nodes.all[node]->pool().stats().copied_spans : 0;
    };
    nodes.serve(0, prompt);
    nodes.until([&] { return has_copied(1) + has_copied(2) == 1; });
    const std::size_t keeper = has_copied(1) == 1 ? 1 : 2;
    nodes.settle();
    nodes.end(keeper);
    nodes.settle();
    nodes.serve(0, prompt);
    nodes.until([&] { return has_copied(3 - keeper) == 1; });
    nodes.settle();
    nodes.end(0);
    nodes.make(static_cast<std::uint32_t>(keeper));
    nodes.settle();
    nodes.until([&] { return nodes.all[keeper]->pool().peers() == 1; });
    CHECK(nodes.serve(keeper, prompt).loaded == 80);  // of the copy alone
  }

  TEST_CASE("a block that a node no longer has is corrected in the server") {
    if (!has_redis()) return;
    redis_cluster nodes(2);
    const auto prompt = prompt_of(1, 41);
    nodes.serve(0, prompt);
    nodes.settle();
    REQUIRE(nodes.server.ask({"KEYS", "*:span:*"}) != "");
    for (int i = 0; i < 4; ++i)
      nodes.serve(0, prompt_of(10 + static_cast<std::uint32_t>(i), 801));  // pushes it out
    nodes.settle();
    const served_request came = nodes.serve(1, prompt);
    nodes.settle();
    CHECK(came.fetched.failed_blocks > 0);
    const std::uint64_t missing = nodes.all[0]->pool().stats().missing_blocks;
    CHECK(missing > 0);
    // What node 1 has computed since is all that the server says of the span.
    const std::string names = nodes.server.ask({"KEYS", "*:span:*"});
    const kv_chain chain(nodes.all[1]->cache(), prompt);
    std::string key;
    for (std::size_t at = 0; at < names.size(); at = names.find('\n', at) + 1) {
      const std::string each = names.substr(at, names.find('\n', at) - at);
      const detail::redis_field end = detail::redis_field().put_hex(chain.keys()[0].low, 16);
      if (each.ends_with(end.view())) key = each;
    }
    REQUIRE_FALSE(key.empty());
    CHECK(nodes.server.ask({"HLEN", key}) == "1");
    CHECK(nodes.server.ask({"HKEYS", key}).starts_with("0001:"));
    // Nodes of other kinds of directories exchange nothing.
    thread_network net(2);
    thread_endpoint one(net, seat_id{0});
    thread_endpoint other(net, seat_id{1});
    redis_directory directory({.unix_socket = nodes.server.socket()});
    redis_node by_redis(one, {.groups = paged_group}, {}, directory);
    node_type by_itself(other, {.groups = paged_group}, {});
    for (int i = 0; i < 6; ++i) {
      by_redis.step();
      by_itself.step();
    }
    CHECK(by_redis.pool().state_of(seat_id{1}) == pool::peer_state::different);
  }

  TEST_CASE("nodes with a directory in Redis read each other's memory") {
    if (!has_redis()) return;
    using node = pool_node<cache_type, thread_endpoint, redis_directory&, shared_memory_mover&>;
    const redis_server server;
    thread_network net(2, {.copied_bytes = 65536, .lane_bytes = 1 << 20});
    thread_endpoint first(net, seat_id{0});
    thread_endpoint second(net, seat_id{1});
    const shared_memory_options memory{.bytes = std::uint64_t{1} << 20, .blocks = 64};
    shared_memory_mover mover(memory);
    shared_memory_mover other(memory);
    const redis_options at{.unix_socket = server.socket(), .retry_ns = 1'000'000};
    redis_directory directory(at);
    redis_directory same(at);
    const kv_pool_options options{.patience_ns = 20'000'000'000};
    node has(first, {.groups = paged_group}, options, directory, mover);
    node asks(second, {.groups = paged_group}, options, same, other);
    const auto until = [&](auto&& is_so) {
      const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(5);
      while (!is_so() && std::chrono::steady_clock::now() < limit) {
        has.step();
        asks.step();
      }
    };
    const auto prompt = prompt_of(1, 100);
    until([&] { return asks.pool().peers() == 1 && has.pool().peers() == 1; });
    has.serve(prompt, [](auto&) {});
    const kv_chain chain(asks.cache(), prompt);
    std::uint64_t known = 0;
    until([&] {
      auto request = asks.pool().ask(chain, 0).value();
      until([&] { return request.where().next != offload::answer::pending; });
      known = request.where().tokens;
      return known == 100;
    });
    CHECK(known == 100);
    auto request = asks.pool().ask(chain, 0).value();
    until([&] { return request.where().next != offload::answer::pending; });
    request.fetch();
    CHECK(request.has_arrived());
    CHECK(request.end().blocks == 25);
    CHECK(asks.pool().stats().read_blocks == 25);
  }

  TEST_CASE("a node may be killed at any moment, by messages and by memory, with a directory in Redis") {
    if (!has_redis()) return;
    const redis_server server;
    const redis_options at{.unix_socket = server.socket(), .retry_ns = 1'000'000};
    kill_many(2, [&](kill_board& board, socket_endpoint& end, std::uint64_t seed) {
      redis_directory directory(at);
      live_until_killed<pool_node<cache_type, socket_endpoint, redis_directory&> >(board, end, seed,
                                                                                   directory);
    });
    kill_many(2, [&](kill_board& board, socket_endpoint& end, std::uint64_t seed) {
      redis_directory directory(at);
      shared_memory_mover mover(kill_memory());
      live_until_killed<pool_node<cache_type, socket_endpoint, redis_directory&, shared_memory_mover&> >(
          board, end, seed, directory, mover);
    });
  }
}

#endif
