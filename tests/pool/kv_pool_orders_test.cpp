/// Orders of events that seldom happen: chains that grow, caches and pools that begin again, late requests.
#include <llmmem/pool/kv_pool.hpp>

#include <doctest/doctest.h>
#include <llmmem/comm/endpoint.hpp>
#include <llmmem/comm/thread_network.hpp>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/pool/detail/pool_wire.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <new>
#include <span>
#include <utility>
#include <vector>

#include "pool/pool_cluster.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

using pool_type = node_type::pool_type;

void answer_asks(cluster& nodes, pool_type::request& of) {
  for (int i = 0; i < 16 && of.where().next == offload::answer::pending; ++i)
    nodes.settle();
}

/// An endpoint whose other seats say what a test says.
struct spoken_endpoint {
  /// The pool, whatever its type.
  struct listener {
    std::function<frame_buffer(seat_id, const frame_header&)> buffer_for;
    std::function<void(seat_id, const frame_header&)> on_frame;
    std::function<void(seat_id, const frame_header&, std::span<const std::byte>)> on_message;
  };

  [[nodiscard]] seat_id self() const noexcept { return seat_id{0}; }
  [[nodiscard]] std::uint32_t seats() const noexcept { return count; }
  [[nodiscard]] std::uint64_t nonce() const noexcept { return 5; }
  [[nodiscard]] std::uint64_t now_ns() const noexcept { return now; }
  [[nodiscard]] std::uint32_t frame_bytes() const noexcept { return 4096; }
  [[nodiscard]] bool is_connected(seat_id) const noexcept { return true; }
  result<void> send(seat_id to, const frame_header& header, std::span<const std::byte> bytes, deadline by,
                    auto&) {
    result<void> out;
    if (sending_to) {
      out = sending_to(to, by);
    } else if (sending) {
      out = sending();
    }
    if (out) sent.emplace_back(header, std::vector<std::byte>(bytes.begin(), bytes.end()));
    return out;
  }
  void post(seat_id, const frame_header& header, std::span<const std::byte> bytes) noexcept {
    told.emplace_back(header.kind, std::vector<std::byte>(bytes.begin(), bytes.end()));
  }
  bool poll(deadline, auto& handler) {
    if (coming.empty()) return false;
    listener to{.buffer_for = [&](seat_id a, const frame_header& b) { return handler.buffer_for(a, b); },
                .on_frame = [&](seat_id a, const frame_header& b) { handler.on_frame(a, b); },
                .on_message = [&](seat_id a, const frame_header& b,
                                  std::span<const std::byte> c) { handler.on_message(a, b, c); }};
    const auto next = coming.front();
    coming.pop_front();
    next(to);
    return true;
  }
  void withdraw(seat_id) noexcept {}
  void give_up(seat_id) noexcept {}
  void wake() noexcept {}

  std::uint32_t count = 2;
  std::uint64_t now = 100'000'000'000;
  std::function<result<void>()> sending{};
  std::function<result<void>(seat_id, deadline)> sending_to{};
  std::deque<std::function<void(listener&)>> coming{};
  std::vector<std::pair<std::uint16_t, std::vector<std::byte>>> told{};
  std::vector<std::pair<frame_header, std::vector<std::byte>>> sent{};
};

/// A node with one prompt, of which each other node has asked for every block.
struct asked_node {
  explicit asked_node(const node_form& form, std::size_t blocks, const kv_pool_options& options = {},
                      std::uint32_t seats = 2)
      : end{.count = seats}, node(end, form, options) {
    const std::size_t tokens = form.groups[0].block_tokens;
    const auto prompt = prompt_of(1, blocks * tokens + 1);
    const kv_chain chain(node.cache(), prompt);
    for (std::size_t some = 1; some <= blocks; ++some) {  // a first tier takes few blocks at once
      node.serve(std::span(prompt).first(some * tokens + 1), [](auto&) {});
      for (int i = 0; i < 4; ++i)
        node.step();
    }
    detail::pool_writer get;
    get.put(std::uint64_t{7});
    get.put(chain.keys()[0]);
    for (std::uint32_t i = 0; i < blocks; ++i) {
      get.put(i);
      get.put(std::uint32_t{0});
      get.put(i);
      get.put(chain.keys()[i]);
    }
    for (std::uint32_t seat = 1; seat < seats; ++seat) {
      std::vector<std::byte> hello = end.told.front().second;
      hello.back() ^= static_cast<std::byte>(seat);
      end.coming.emplace_back([=](auto& to) { to.on_message(seat_id{seat}, {.kind = 1}, hello); });
      end.coming.emplace_back([=](auto& to) {
        to.on_message(seat_id{seat}, {.kind = static_cast<std::uint16_t>(detail::pool_frame::get)},
                      get.bytes());
      });
    }
  }

  spoken_endpoint end;
  pool_node<cache_type, spoken_endpoint> node;
};

}  // namespace

TEST_SUITE("kv_pool orders") {
  TEST_CASE("a chain that grows during its request is looked up to its length at the request") {
    cluster nodes(2, {.groups = paged_group, .blocks = 200, .slots = 200, .lower_slots = 200});
    const auto prompt = prompt_of(1, 400);
    nodes.serve(0, std::span(prompt).first(257));
    kv_chain chain(nodes.all[1]->cache(), std::span(prompt).first(256));
    auto request = nodes.all[1]->pool().ask(chain, 0).value();
    answer_asks(nodes, request);
    chain.append(nodes.all[1]->cache(), std::span(prompt).subspan(256));
    CHECK(request.where().tokens == 256);
    CHECK(request.where().elsewhere == 64);
    request.fetch();
    for (int i = 0; i < 64 && !request.has_arrived(); ++i)
      nodes.settle();
    CHECK(request.end().tokens == 256);
  }

  TEST_CASE("the first publication after a reset is announced") {
    cluster nodes(2);
    nodes.all[0]->cache().reset();
    nodes.all[1]->cache().reset();
    auto& node = *nodes.all[0];
    const auto prompt = prompt_of(1, 17);
    const kv_chain chain(node.cache(), prompt);
    const auto held = node.tiers().begin_arrival(0, chain.keys()[0], 0);
    REQUIRE(held);
    REQUIRE(node.tiers().end_arrival(*held, true));
    node.pool().publish(chain, 4);
    nodes.settle();
    const kv_chain same(nodes.all[1]->cache(), prompt);
    auto request = nodes.all[1]->pool().ask(same, 0).value();
    answer_asks(nodes, request);
    CHECK(request.where().elsewhere == 1);
    node.tiers().release(*held);
  }

  TEST_CASE("a request whose patience has ended asks no node") {
    node_and_stranger two;
    std::uint32_t found = 0;
    // Which of the two looks after a chain depends on numbers drawn at random.
    for (std::uint32_t i = 0; i < 32; ++i) {
      const kv_chain each(two.node->cache(), prompt_of(40 + i, 16));
      two.other.publish(each, 4);
      two.node->step();
      auto request = two.node->pool().ask(each, 0, 0).value();
      two.node->step();
      if (request.where().elsewhere == 0) continue;  // the stranger, who says nothing, looks after it
      ++found;
      request.fetch();
      CHECK(request.has_arrived());
      CHECK(request.end().late_blocks == 4);
      CHECK(two.asked_id() == 0);
    }
    CHECK(found > 0);
  }

  TEST_CASE("a request does not wait for blocks that another load of this node brings") {
    cluster nodes(1);
    auto& node = *nodes.all[0];
    const auto prompt = prompt_of(1, 17);
    nodes.serve(0, prompt);
    const kv_chain chain(node.cache(), std::span(prompt).first(16));
    const auto id = node.cache().create().value();
    auto load = node.tiers().prepare_load(id, chain).value();
    REQUIRE(static_cast<bool>(load));
    const std::uint64_t patience_ns = 4'000'000'000;
    const std::uint64_t begun = nodes.ends[0]->now_ns();
    auto request = node.pool().ask(chain, 0, patience_ns).value();
    request.wait_for_answers();
    request.fetch();
    request.wait();
    CHECK(nodes.ends[0]->now_ns() - begun < patience_ns);
    CHECK(request.end().late_blocks == 0);
    load.cancel();
    node.cache().release(id).value();
  }

  TEST_CASE("a directory that restarts in its seat learns its entries again") {
    cluster nodes(2);
    for (std::uint32_t i = 0; i < 10; ++i)
      nodes.serve(0, prompt_of(30 + i, 17));
    const std::uint64_t kept = nodes.all[1]->pool().stats().directory_spans;
    REQUIRE(kept > 0);
    // Before the other node looks again.
    nodes.all[1].reset();
    nodes.ends[1].reset();
    nodes.ends[1] = std::make_unique<thread_endpoint>(nodes.net, seat_id{1});
    nodes.all[1] =
        std::make_unique<node_type>(*nodes.ends[1], node_form{.groups = paged_group}, kv_pool_options{});
    nodes.all[1]->step();  // it greets
    nodes.settle();
    for (std::uint32_t i = 0; i < 10; ++i)
      CHECK(nodes.serve(1, prompt_of(30 + i, 17)).loaded == 16);
  }

  TEST_CASE("peers accept a new pool over the same endpoint") {
    cluster nodes(2);
    nodes.serve(0, prompt_of(1, 17));
    nodes.all[1].reset();
    nodes.all[1] =
        std::make_unique<node_type>(*nodes.ends[1], node_form{.groups = paged_group}, kv_pool_options{});
    nodes.settle();
    CHECK(nodes.all[1]->pool().peers() == 1);
    CHECK(nodes.serve(1, prompt_of(1, 17)).loaded == 16);
  }

  TEST_CASE("frames for a request of an earlier pool match none of the next pool's") {
    node_and_stranger two;
    const kv_chain chain(two.node->cache(), prompt_of(1, 16));
    const auto first_id = [&] {
      auto request = two.ask(chain, 4);
      request.fetch();
      return two.asked_id();
    };
    const std::uint64_t earlier = first_id();
    two.node = nullptr;
    two.node = std::make_unique<node_type>(two.end, node_form{.groups = paged_group}, kv_pool_options{});
    two.node->step();
    two.other.join();
    two.node->step();
    const std::uint64_t later = first_id();
    CHECK(earlier != 0);
    CHECK(later != 0);
    CHECK(later != earlier);
  }

  TEST_CASE("a node that may send 0 bytes per step still sends a block") {
    cluster nodes(2, {.groups = paged_group}, {.serve_bytes = 0});
    const auto prompt = prompt_of(1, 17);
    nodes.serve(0, prompt);
    CHECK(nodes.serve(1, prompt).loaded == 16);
  }

  TEST_CASE("a hint is corrected even if its holder has forgotten that it published the block") {
    cluster nodes(3, {.groups = paged_group, .blocks = 40, .slots = 24, .lower_slots = 1},
                  {.directory_spans = 4});
    // The directory of the chain is the third node, of which the table is large.
    nodes.all[2].reset();
    nodes.ends[2].reset();
    nodes.ends[2] = std::make_unique<thread_endpoint>(nodes.net, seat_id{2});
    nodes.all[2] =
        std::make_unique<node_type>(*nodes.ends[2], node_form{.groups = paged_group}, kv_pool_options{});
    nodes.settle();
    for (std::uint32_t i = 0; i < 16; ++i)
      nodes.serve(0, prompt_of(20 + i, 81));
    const auto failed = [&] {
      std::uint64_t out = 0;
      for (std::uint32_t i = 0; i < 11; ++i) {
        const kv_chain chain(nodes.all[1]->cache(), prompt_of(20 + i, 80));
        auto request = nodes.all[1]->pool().ask(chain, 0).value();
        answer_asks(nodes, request);
        request.fetch();
        for (int k = 0; k < 64 && !request.has_arrived(); ++k)
          nodes.settle();
        out += request.end().failed_blocks;
      }
      return out;
    };
    CHECK(failed() > 0);
    CHECK(failed() == 0);
  }

  TEST_CASE("a request that ends after its load reports its arrivals, and its node becomes a holder") {
    cluster nodes(2);
    const auto prompt = prompt_of(1, 17);
    nodes.serve(0, prompt);
    const served_request came = nodes.serve(1, prompt);
    CHECK(came.loaded == 16);
    CHECK(came.fetched.tokens == 16);
  }

  TEST_CASE("a greeting during a block's frame frees no slot that the transport writes") {
    spoken_endpoint end;
    pool_node<cache_type, spoken_endpoint> node(end, {.groups = paged_group}, {});
    const kv_chain chain(node.cache(), prompt_of(1, 16));
    std::vector<std::byte> hello = end.told.at(0).second;
    const std::uint64_t nonce = 77;
    std::memcpy(hello.data() + hello.size() - sizeof(nonce), &nonce, sizeof(nonce));
    const auto say = [&](detail::pool_frame kind, std::span<const std::byte> bytes) {
      const frame_header header{.bytes = static_cast<std::uint32_t>(bytes.size()),
                                .kind = static_cast<std::uint16_t>(kind)};
      end.coming.emplace_back(
          [=](spoken_endpoint::listener& to) { to.on_message(seat_id{1}, header, bytes); });
      node.step();
    };
    say(detail::pool_frame::hello, hello);
    REQUIRE(node.pool().peers() == 1);
    detail::pool_writer holds;
    holds.put(chain.keys()[0]);
    holds.put(std::uint32_t{1});
    holds.put(detail::hint_digest(chain.keys()[0]));
    holds.put(std::uint64_t{1});
    holds.put(std::uint64_t{1});
    say(detail::pool_frame::publish, holds.bytes());
    auto request = node.pool().ask(chain, 0, ~std::uint64_t{0}).value();
    const auto last = [&](detail::pool_frame kind) {
      std::vector<std::byte> out;
      for (const auto& [told, what] : end.told)
        out = told == static_cast<std::uint16_t>(kind) ? what : out;
      return out;
    };
    if (const auto asked = last(detail::pool_frame::ask); !asked.empty()) {
      detail::pool_reader in(asked);
      detail::pool_writer answer;
      answer.put(in.take<std::uint64_t>());
      answer.put(in.take<std::uint32_t>());
      answer.put(std::uint32_t{1});
      answer.put(seat_id{1});
      answer.put(nonce);
      answer.put(std::uint64_t{1});
      say(detail::pool_frame::answer, answer.bytes());
    }
    request.fetch();
    REQUIRE(!request.has_arrived());
    frame_header half{.epoch = detail::pool_reader(last(detail::pool_frame::get)).take<std::uint64_t>(),
                      .message = 64,
                      .bytes = 32,
                      .kind = static_cast<std::uint16_t>(detail::pool_frame::data),
                      .is_checked = 1};
    std::span<std::byte> given;
    end.coming.emplace_back(
        [&](spoken_endpoint::listener& to) { given = to.buffer_for(seat_id{1}, half).bytes; });
    node.step();
    REQUIRE(given.size() == 32);
    // The greeting overtakes the bytes.
    SUBCASE("of another process, it says") {
      hello.back() ^= std::byte{1};
    }
    SUBCASE("of a node that has begun another epoch") {
      hello[8] ^= std::byte{1};
    }
    say(detail::pool_frame::hello, hello);
    CHECK(node.tiers().stats().tiers[0].in_use == 1);  // the transport still has it
    std::fill(given.begin(), given.end(), std::byte{9});
    half.crc = crc32c(0, given);
    end.coming.emplace_back([&](spoken_endpoint::listener& to) { to.on_frame(seat_id{1}, half); });
    node.step();
    CHECK(request.has_arrived());  // nobody sends the rest
    CHECK(node.tiers().stats().tiers[0].in_use == 0);
    CHECK(request.end().failed_blocks == 1);
    CHECK(node.tiers().audit().empty());
  }

  TEST_CASE("no block comes up for a node that takes nothing") {
    asked_node all({.groups = paged_group, .slots = 8}, 32);
    all.end.sending = [] { return result<void>(failure{.code = errc::peer_timed_out}); };
    const std::uint64_t before = all.node.tiers().stats().tiers[0].evictions;
    for (int i = 0; i < 100; ++i)
      all.node.step();
    CHECK(all.node.tiers().stats().tiers[0].evictions - before <= 16);
    all.end.sending = {};
    for (int i = 0; i < 100; ++i)
      all.node.step();
    CHECK(all.node.pool().stats().served_blocks == 32);
  }

  TEST_CASE(
      "many receivers that take nothing together delay one step as one does, and all get their blocks") {
    constexpr std::uint64_t most = 50'000'000;
    asked_node asked({.groups = paged_group}, 2, {.send_ns = most, .slow_ns = 1'000'000'000}, 17);
    std::uint64_t frames = 0;
    asked.end.sending_to = [&](seat_id to, deadline by) -> result<void> {
      if (to_index(to) == 16) {  // the only one that reads
        ++frames;
        return {};
      }
      asked.end.now = std::max(asked.end.now, by.ns);
      return failure{.code = errc::peer_timed_out};
    };
    std::uint64_t waited = 0;
    for (int i = 0; i < 40; ++i) {
      const std::uint64_t before = asked.end.now;
      asked.node.step();
      CHECK(asked.end.now - before <= most);
      waited += asked.end.now - before;
    }
    CHECK(frames == 2);
    CHECK(waited >= 16 * most / 2);  // each was given time once
    CHECK(asked.node.pool().stats().served_blocks == 2);
    asked.end.now += 1;
    asked.end.sending_to = [](seat_id, deadline) { return result<void>{}; };
    asked.node.step();
    CHECK(asked.node.pool().stats().served_blocks == 2 * 16);
    CHECK(asked.node.tiers().stats().tiers[0].in_use == 0);
  }

  TEST_CASE("a send may wait without limit, and a receiver may stay slow for ever") {
    constexpr std::uint64_t no_limit = ~std::uint64_t{0};
    asked_node asked({.groups = paged_group}, 1, {.send_ns = no_limit, .slow_ns = no_limit});
    REQUIRE(asked.end.now_ns() != 0);
    std::vector<deadline> given;
    asked.end.sending_to = [&](seat_id, deadline by) {
      given.push_back(by);
      return result<void>(failure{.code = errc::peer_timed_out});
    };
    asked.node.step();
    asked.node.step();
    REQUIRE(given.size() == 2);
    CHECK(given[0] == no_deadline);
    CHECK(given[1].ns == asked.end.now_ns());
  }

  TEST_CASE("a receiver that reads a little at a time pins a block for a while, and not for ever") {
    static const std::array large{full_attention({"kv", 1, 16, 2048})};  // blocks of eight frames
    const auto trickle = [](std::uint64_t pin_ns) {
      asked_node asked({.groups = large, .blocks = 4, .slots = 4, .lower_slots = 4, .tokens = 8192}, 1,
                       {.pin_ns = pin_ns});
      bool may_take = false;
      asked.end.sending_to = [&](seat_id, deadline) -> result<void> {
        if (std::exchange(may_take, false)) return {};
        return failure{.code = errc::peer_timed_out};
      };
      std::uint64_t pinned = 0;
      for (int i = 0; i < 20; ++i) {
        may_take = true;
        asked.node.step();
        pinned += asked.node.tiers().stats().tiers[0].in_use;
        asked.end.now += 500'000'000;  // within the patience
      }
      CHECK(asked.node.tiers().stats().tiers[0].in_use == 0);
      std::uint64_t missing = 0;
      for (const auto& [kind, bytes] : asked.end.told)
        missing += kind == static_cast<std::uint16_t>(detail::pool_frame::missing) ? 1U : 0U;
      CHECK(missing + asked.node.pool().stats().served_blocks == 1);
      return std::pair(missing, pinned);
    };
    CHECK(trickle(10'000'000'000) == std::pair(std::uint64_t{0}, std::uint64_t{7}));
    CHECK(trickle(1'500'000'000) == std::pair(std::uint64_t{1}, std::uint64_t{3}));
  }

  TEST_CASE(
      "a send of which a part has gone starts again with the lower tier's copy, if the first is damaged") {
    static const std::array large{full_attention({"kv", 1, 16, 2048})};  // blocks of eight frames
    asked_node asked({.groups = large, .blocks = 4, .slots = 4, .lower_slots = 4, .tokens = 8192}, 1);
    auto& tiers = asked.node.tiers();
    int may_take = 3;
    asked.end.sending_to = [&](seat_id, deadline) -> result<void> {
      if (may_take-- > 0) return {};
      return failure{.code = errc::peer_timed_out};
    };
    asked.node.step();
    REQUIRE(asked.end.sent.size() == 3);
    const block_key key = kv_chain(asked.node.cache(), prompt_of(1, 2049)).keys()[0];
    const auto held = tiers.hold(0, key);
    REQUIRE(held);
    const std::vector<std::byte> right(tiers.bytes_of(*held).begin(), tiers.bytes_of(*held).end());
    tiers.bytes_of(*held)[5 * 4096] ^= std::byte{1};  // in a frame that has not gone
    tiers.release(*held);
    REQUIRE(tiers.verify_copy(0, key) == offload::copy_state::damaged);
    asked.end.sent.clear();
    may_take = 1000;
    for (int i = 0; i < 4; ++i)
      asked.node.step();
    REQUIRE(asked.end.sent.size() == 8);
    std::vector<std::byte> came;
    for (const auto& [header, bytes] : asked.end.sent) {
      CHECK(header.offset == came.size());
      came.insert(came.end(), bytes.begin(), bytes.end());
    }
    CHECK(came == right);
    CHECK(asked.end.sent.back().first.crc == crc32c(0, right));
    CHECK(asked.node.pool().stats().served_blocks == 1);
    for (const auto& [kind, bytes] : asked.end.told)
      CHECK(kind != static_cast<std::uint16_t>(detail::pool_frame::missing));
    CHECK(tiers.stats().tiers[0].in_use == 0);
    CHECK(tiers.audit().empty());
  }

  TEST_CASE("a block whose send throws keeps no pin, and goes in a later step") {
    asked_node all({.groups = paged_group}, 1);
    all.end.sending = []() -> result<void> { throw std::bad_alloc(); };
    CHECK_THROWS_AS(all.node.step(), std::bad_alloc);
    CHECK(all.node.tiers().stats().tiers[0].in_use == 0);
    all.end.sending = {};
    all.node.step();
    CHECK(all.node.pool().stats().served_blocks == 1);
  }
}
