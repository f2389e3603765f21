/// Nodes that pass blocks to each other, one promise a case.
#include <llmmem/pool/kv_pool.hpp>

#include <doctest/doctest.h>
#include <llmmem/comm/errors.hpp>
#include <llmmem/comm/thread_network.hpp>
#include <llmmem/pool/detail/pool_wire.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "pool/pool_cluster.hpp"
#include "support/random.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

/// Orders a node to keep a copy of all blocks of a chain, of at most one span.
void order_copy(node_and_stranger& two, const kv_chain& chain) {
  detail::pool_writer out;
  out.put(static_cast<std::uint32_t>(chain.keys().size()));
  out.put(std::uint64_t{0});
  for (const block_key& key : chain.keys())
    out.put(key);
  out.put(~std::uint64_t{0});
  two.other.post(detail::pool_frame::copy, out);
  two.node->step();
}

}  // namespace

TEST_SUITE("kv_pool") {
  TEST_CASE("a node loads what another node has stored") {
    cluster nodes(3);
    CHECK(nodes.all[0]->pool().peers() == 2);
    const auto prompt = prompt_of(1, 101);
    CHECK(nodes.serve(0, prompt).loaded == 0);
    const served_request second = nodes.serve(1, prompt);
    CHECK(second.matched == 0);
    CHECK(second.loaded == 100);
    CHECK(second.fetched.blocks == 25);
    CHECK(nodes.all[0]->pool().stats().served_blocks == 25);
    CHECK(nodes.all[1]->pool().stats().fetched_bytes == 25 * 64);
    // Its own cache has them now.
    CHECK(nodes.serve(1, prompt).matched == 100);
    // The third may ask either.
    const served_request third = nodes.serve(2, prompt);
    CHECK(third.loaded == 100);
  }

  TEST_CASE("a request fetches from several holders, and a chain of several spans arrives completely") {
    cluster nodes(4, {.groups = paged_group, .blocks = 300, .slots = 300, .lower_slots = 300});
    const auto prompt = prompt_of(2, 801);  // 200 blocks: 4 spans
    nodes.serve(0, prompt);
    CHECK(nodes.serve(1, prompt).loaded == 800);
    CHECK(nodes.serve(2, prompt).loaded == 800);
    CHECK(nodes.all[0]->pool().stats().served_blocks > 200);
    CHECK(nodes.all[1]->pool().stats().served_blocks > 0);
    std::uint64_t remembered = 0;
    for (auto& each : nodes.all)
      remembered += each->pool().stats().directory_spans;
    CHECK(remembered == 3 * 4);
  }

  TEST_CASE("a whole domain may end, and every hot prompt is found in another one") {
    constexpr std::array<std::uint32_t, 4> racks{7, 7, 9, 9};
    cluster nodes(4, {.groups = paged_group, .blocks = 900, .slots = 900, .lower_slots = 900},
                  {.copies = 1, .hot_uses = 2}, racks);
    constexpr std::uint32_t prompts = 12;
    // Of 41 to 481 tokens, up to two spans. Each is used once, every second one again.
    const auto prompt = [](std::uint32_t i) { return prompt_of(100 + i, 41 + i * 40); };
    for (std::uint32_t i = 0; i < prompts; ++i) {
      nodes.serve(i % 4 / 2, prompt(i));
      if (i % 2 == 0) nodes.serve(i % 4 / 2, prompt(i));
    }
    nodes.settle();
    std::uint64_t copied = 0;
    for (std::size_t node = 2; node < 4; ++node)
      copied += nodes.all[node]->pool().stats().copied_spans;
    CHECK(copied ==
          nodes.all[0]->pool().stats().ordered_copies + nodes.all[1]->pool().stats().ordered_copies);
    CHECK(copied == 6 + 3);  // three of the hot prompts have two spans
    nodes.end(0);
    nodes.end(1);
    for (std::uint32_t i = 0; i < prompts; ++i) {
      CAPTURE(i);
      const auto tokens = prompt(i);
      CHECK(nodes.serve(2 + i % 2, tokens).loaded == (i % 2 == 0 ? tokens.size() - 1 : 0));
    }
  }

  TEST_CASE("the next use of a hot prompt replaces a copy whose node has ended") {
    constexpr std::array<std::uint32_t, 3> hosts{0, 1, 2};
    cluster nodes(3, {.groups = paged_group}, {.copies = 1, .hot_uses = 1}, hosts);
    const auto prompt = prompt_of(1, 81);
    nodes.serve(0, prompt);
    const auto has_copied = [&](std::size_t node) { return nodes.all[node]->pool().stats().copied_spans; };
    REQUIRE(has_copied(1) + has_copied(2) == 1);
    const std::size_t keeper = has_copied(1) == 1 ? 1 : 2;
    nodes.serve(0, prompt);
    nodes.serve(0, prompt);
    CHECK(nodes.all[0]->pool().stats().ordered_copies == 1);  // nothing new to ask for
    nodes.serve(0, prompt);
    CHECK(nodes.all[0]->pool().stats().ordered_copies == 2);  // at four times the uses, in case it is gone
    nodes.end(keeper);
    nodes.serve(0, prompt);
    CHECK(has_copied(3 - keeper) == 1);
    nodes.end(0);
    CHECK(nodes.serve(3 - keeper, prompt).loaded == 80);
  }

  TEST_CASE("copies are one of each domain, and none of the own") {
    constexpr std::array<std::uint32_t, 6> racks{0, 0, 1, 1, 2, 2};
    cluster nodes(6, {.groups = paged_group}, {.copies = 3, .hot_uses = 1}, racks);
    nodes.serve(0, prompt_of(1, 41));
    const auto in = [&](std::size_t first) {
      return nodes.all[first]->pool().stats().copied_spans +
             nodes.all[first + 1]->pool().stats().copied_spans;
    };
    CHECK(in(0) == 0);
    CHECK(in(2) == 1);
    CHECK(in(4) == 1);
  }

  TEST_CASE("what a node withdraws leaves its tiers with all copied blocks that build on it") {
    constexpr std::array<std::uint32_t, 2> hosts{0, 1};
    cluster nodes(2, {.groups = paged_group, .blocks = 100, .slots = 100}, {.copies = 1, .hot_uses = 1},
                  hosts);
    const auto prompt = prompt_of(1, 281);  // 70 blocks in two spans
    nodes.serve(0, prompt);
    auto& cache = nodes.all[1]->cache();
    const kv_chain chain(cache, prompt);
    REQUIRE(nodes.all[1]->tiers().lookup(chain, 0).tokens == 280);
    const sequence_id same = cache.create().value();
    cache.append(same, std::span(prompt).first(4)).value();
    cache.commit(same).value();
    cache.invalidate(same, 0).value();
    for (std::uint64_t i = 0; i < 70; ++i)
      CHECK(nodes.all[1]->tiers().lookup_block(chain, 0, i).first == offload::answer::miss);
    cache.release(same).value();
  }

  TEST_CASE("chains that part within a span share the chunks before") {
    cluster nodes(2);
    auto one = prompt_of(3, 81);
    auto other = one;
    for (std::size_t i = 40; i < other.size(); ++i)
      other[i] += 5000;
    nodes.serve(0, one);
    const served_request shared = nodes.serve(1, other);
    CHECK(shared.loaded == 40);
    CHECK(shared.fetched.failed_blocks == 0);  // what only the other chain has is not asked for
    nodes.serve(0, other);
    CHECK(nodes.serve(1, one).loaded == 40);  // its own cache has the first 40
  }

  TEST_CASE("a block that only a lower tier of its node has is brought up and sent") {
    cluster nodes(2, {.groups = paged_group, .blocks = 200, .slots = 30, .lower_slots = 200});
    const auto old = prompt_of(4, 81);
    nodes.serve(0, old);
    nodes.serve(0, prompt_of(5, 101));  // pushes the first prompt's out of the first tier
    const served_request came = nodes.serve(1, old);
    CHECK(came.loaded == 80);
    CHECK(came.fetched.blocks == 20);
  }

  TEST_CASE("a node that no longer has a block says so, and the directory learns of it") {
    cluster nodes(3, {.groups = paged_group, .blocks = 40, .slots = 24, .lower_slots = 1});
    const auto prompt = prompt_of(6, 81);
    nodes.serve(0, prompt);
    for (std::uint32_t i = 0; i < 4; ++i)
      nodes.serve(0, prompt_of(20 + i, 81));
    const served_request first = nodes.serve(1, prompt);
    CHECK(first.loaded == 0);
    CHECK(first.fetched.failed_blocks > 0);
    CHECK(nodes.all[0]->pool().stats().missing_blocks > 0);
    // The others' spans stay; that of the prompt is gone.
    const std::uint64_t asked = nodes.all[0]->pool().stats().missing_blocks;
    CHECK(nodes.serve(2, prompt_of(6, 41)).fetched.failed_blocks == 0);
    CHECK(nodes.all[0]->pool().stats().missing_blocks == asked);
  }

  TEST_CASE("a node that starts later learns its share of the directory, and one that leaves is forgotten") {
    // Each node's place in the directory is drawn when it starts: with 100 spans over three nodes, one of
    // them looks after none once in 4 * 10^17 runs.
    constexpr std::uint32_t prompts = 100;
    cluster nodes(3, {.groups = paged_group, .blocks = 200, .slots = 200, .lower_slots = 200});
    nodes.all[2].reset();
    nodes.ends[2].reset();
    nodes.settle();
    CHECK(nodes.all[0]->pool().peers() == 1);
    for (std::uint32_t i = 0; i < prompts; ++i)
      nodes.serve(0, prompt_of(30 + i, 5));
    nodes.ends[2] = std::make_unique<thread_endpoint>(nodes.net, seat_id{2});
    nodes.all[2] = std::make_unique<node_type>(
        *nodes.ends[2], node_form{.groups = paged_group, .blocks = 200, .slots = 200}, kv_pool_options{});
    nodes.settle();
    CHECK(nodes.all[0]->pool().peers() == 2);
    CHECK(nodes.all[2]->pool().stats().directory_spans > 0);
    for (std::uint32_t i = 0; i < prompts; ++i)
      CHECK(nodes.serve(2, prompt_of(30 + i, 5)).loaded == 4);
    nodes.all[0].reset();
    nodes.ends[0].reset();
    nodes.settle();
    CHECK(nodes.all[1]->pool().state_of(seat_id{0}) == pool::peer_state::absent);
    for (std::uint32_t i = 0; i < prompts; ++i)
      CHECK(nodes.serve(1, prompt_of(30 + i, 5)).loaded == 4);  // of the third
  }

  TEST_CASE("nodes of different weights, block sizes or epochs pass no blocks") {
    thread_network net(2);
    thread_endpoint one(net, seat_id{0});
    thread_endpoint other(net, seat_id{1});
    const auto settle = [](node_type& a, node_type& b) {
      for (int i = 0; i < 6; ++i) {
        a.step();
        b.step();
      }
    };
    {
      node_type a(one, {.groups = paged_group}, {.model = 1});
      node_type b(other, {.groups = paged_group}, {.model = 2});
      settle(a, b);
      CHECK(a.pool().state_of(seat_id{1}) == pool::peer_state::different);
      CHECK(a.pool().peers() == 0);
    }
    node_type a(one, {.groups = paged_group}, {});
    node_type b(other, {.groups = paged_group}, {});
    settle(a, b);
    CHECK(a.pool().peers() == 1);
    a.cache().reset();
    settle(a, b);
    CHECK(a.pool().state_of(seat_id{1}) == pool::peer_state::different);
    CHECK(b.pool().state_of(seat_id{0}) == pool::peer_state::different);
    b.cache().reset();
    settle(a, b);
    CHECK(a.pool().state_of(seat_id{1}) == pool::peer_state::present);
    CHECK(b.pool().state_of(seat_id{0}) == pool::peer_state::present);
  }

  TEST_CASE("a first tier that is too small takes the blocks that fit") {
    cluster nodes(1 + 1);
    const auto prompt = prompt_of(7, 241);
    nodes.serve(0, prompt);
    // The second node's first tier has 10 slots.
    nodes.all[1] = nullptr;
    nodes.ends[1] = nullptr;
    nodes.ends[1] = std::make_unique<thread_endpoint>(nodes.net, seat_id{1});
    nodes.all[1] = std::make_unique<node_type>(
        *nodes.ends[1], node_form{.groups = paged_group, .blocks = 70, .slots = 10, .lower_slots = 1},
        kv_pool_options{});
    nodes.settle();
    const served_request came = nodes.serve(1, prompt);
    CHECK(came.fetched.blocks == 10);
    CHECK(came.fetched.without_slot == 50);
    CHECK(came.loaded == 40);
  }

  TEST_CASE("requests beyond the table, and chains of another epoch, are refused") {
    cluster nodes(1, {.groups = paged_group}, {.max_requests = 1, .name = "blocks of the pool"});
    auto& node = *nodes.all[0];
    const kv_chain chain(node.cache(), prompt_of(1, 16));
    const auto held = node.pool().ask(chain, 0).value();
    const auto refused = node.pool().ask(chain, 0);
    REQUIRE(!refused);
    CHECK(refused.error().code == errc::table_full);
    CHECK(std::string(refused.error().where).find("blocks of the pool") != std::string::npos);
    node.cache().reset();
    CHECK(node.pool().ask(chain, 0).error().code == errc::epoch_differs);
    CHECK_THROWS_AS(kv_pool(node.tiers(), *nodes.ends[0], {.max_gets = 0}), argument_error);
  }

  TEST_CASE("a block that the cache withdraws during its arrival is not kept") {
    node_and_stranger two;
    const kv_chain chain(two.node->cache(), prompt_of(1, 16));
    auto request = two.ask(chain, 4);
    CHECK(request.where().elsewhere == 4);
    request.fetch();
    two.node->cache().reset();
    const std::uint64_t id = two.asked_id();
    const std::vector<std::byte> bytes(64, std::byte{7});
    two.send(block_frame(id, 0, bytes), bytes);
    const auto came = request.end();
    CHECK(came.blocks == 0);
    CHECK(two.node->tiers().audit().empty());
    CHECK(two.node->tiers().stats().tiers[0].in_use == 0);
  }

  TEST_CASE("a pool verifies every claim of a node about a block") {
    node_and_stranger two;
    const kv_chain chain(two.node->cache(), prompt_of(1, 16));
    const std::vector<std::byte> bytes(64, std::byte{7});
    const std::vector<std::byte> more(128, std::byte{7});
    const auto attempt = [&](auto&& change, bool is_right) {
      auto request = two.ask(chain, 1);
      request.fetch();
      const std::uint64_t id = two.asked_id();
      REQUIRE(id != 0);
      frame_header header = block_frame(id, 0, bytes);
      std::span<const std::byte> sent(bytes);
      change(header, sent);
      two.send(header, sent);
      CHECK(request.has_arrived() == is_right);
      const auto came = request.end();
      CHECK(came.blocks == (is_right ? 1 : 0));
      two.node->step();
      CHECK(two.node->tiers().stats().tiers[0].in_use == 0);
    };
    using header_ref = frame_header&;
    using bytes_ref = std::span<const std::byte>&;
    attempt([](header_ref of, bytes_ref) { of.epoch += 1; }, false);                       // another request
    attempt([](header_ref of, bytes_ref) { of.epoch += std::uint64_t{1} << 32; }, false);  // or attempt
    attempt([](header_ref of, bytes_ref) { of.tag = 1; }, false);                          // another block
    attempt([](header_ref of, bytes_ref) { of.kind = 6; }, false);
    SUBCASE("of what it lacks or has too much") {
      const auto refuse = [&](auto&& change) {
        auto request = two.ask(chain, 1);
        request.fetch();
        frame_header header = block_frame(two.asked_id(), 0, bytes);
        std::span<const std::byte> sent(bytes);
        change(header, sent);
        two.send(header, sent);
        const bool is_asked_again = !request.has_arrived();
        if (is_asked_again) two.send(header, sent);
        CHECK(request.has_arrived());  // no other node has it
        const auto came = request.end();
        CHECK(came.blocks == 0);
        CHECK(came.failed_blocks == 1);
        CHECK(is_asked_again == (came.why.code == errc::message_damaged));
        return came.why.code;
      };
      CHECK(refuse([](header_ref of, bytes_ref) { of.message = 128; }) == errc::frame_forged);
      CHECK(refuse([](header_ref of, bytes_ref) { of.offset = 8; }) == errc::frame_forged);
      CHECK(refuse([&](header_ref, bytes_ref sent) { sent = more; }) == errc::frame_forged);
      CHECK(refuse([](header_ref of, bytes_ref) { of.is_checked = 0; }) == errc::frame_forged);
      CHECK(refuse([](header_ref of, bytes_ref) { of.crc ^= 1; }) == errc::message_damaged);
    }
    attempt([](header_ref, bytes_ref) {}, true);
    CHECK(two.node->tiers().audit().empty());
  }

  TEST_CASE(
      "a byte that changed in the only copy of every holder is a miss of its block, and of one holder none") {
    cluster nodes(4, {.groups = paged_group, .lower_slots = 1});
    const auto prompt = prompt_of(31, 17);
    nodes.serve(0, prompt);
    CHECK(nodes.serve(1, prompt).loaded == 16);
    const auto damage = [&](std::size_t node) {
      auto& of = *nodes.all[node];
      const kv_chain chain(of.cache(), prompt);
      const auto held = of.tiers().hold(0, chain.keys()[2]);
      REQUIRE(held);
      of.tiers().bytes_of(*held)[5] ^= std::byte{1};
      of.tiers().release(*held);
    };
    damage(0);
    CHECK(nodes.serve(2, prompt).loaded == 16);
    damage(1);
    damage(2);
    const served_request came = nodes.serve(3, prompt);
    CHECK(came.loaded == 8);
    CHECK(came.fetched.failed_blocks == 1);
    CHECK(came.fetched.why.code == errc::message_damaged);
    // The first holder may have dropped its copy already, because the third node asked it first.
    CHECK(nodes.all[3]->pool().stats().damaged_blocks >= 2);
    CHECK(nodes.all[3]->wrong().empty());
  }

  TEST_CASE("a checksum ends with its block: what takes the slot comes with its own") {
    cluster nodes(2, {.groups = paged_group, .blocks = 40, .slots = 24, .lower_slots = 1});
    nodes.serve(0, prompt_of(32, 81));
    CHECK(nodes.serve(1, prompt_of(32, 81)).loaded == 80);
    nodes.serve(0, prompt_of(33, 81));
    CHECK(nodes.serve(1, prompt_of(33, 81)).loaded == 80);
    CHECK(nodes.all[1]->pool().stats().damaged_blocks == 0);
  }

  TEST_CASE("a block of which only a part came is asked for again, and comes from its beginning") {
    node_and_stranger two({.ask_again_ns = 1});
    const kv_chain chain(two.node->cache(), prompt_of(1, 16));
    const std::vector<std::byte> bytes(64, std::byte{7});
    auto request = two.ask(chain, 1);
    request.fetch();
    const std::uint64_t id = two.asked_id();
    const auto half_of = std::span(bytes).first(32);
    frame_header half = block_frame(id, 0, half_of);
    half.message = bytes.size();
    two.send(half, half_of);
    two.other.hear();
    two.other.words.clear();
    for (int i = 0; i < 1000 && two.other.words.empty(); ++i) {
      two.node->step();
      two.other.hear();
    }
    REQUIRE(!two.other.words.empty());
    CHECK(two.other.words[0].first == detail::pool_frame::get_again);
    CHECK_FALSE(request.has_arrived());
    two.send(block_frame(id, 0, bytes), bytes);
    CHECK(request.has_arrived());
    const auto came = request.end();
    CHECK(came.blocks == 1);
    CHECK(came.why.code == errc::ok);
    CHECK(two.node->tiers().audit().empty());
  }

  TEST_CASE("a copy pins no block that has arrived, and the rest may never come") {
    node_and_stranger two({.max_gets = 8});
    const auto pinned = [&] { return two.node->tiers().stats().tiers[0].in_use; };
    const kv_chain chain(two.node->cache(), prompt_of(1, 64));
    order_copy(two, chain);
    CHECK(pinned() == 4);  // slots for half of the gets
    const std::uint64_t id = two.asked_id();
    const std::vector<std::byte> bytes(64, std::byte{7});
    for (std::uint32_t part = 0; part < 8; ++part) {
      two.send(block_frame(id, part, bytes), bytes);
      CHECK(pinned() <= 5);  // and the one on its way to the lower tier
    }
    two.node->pool().progress();
    CHECK(two.node->pool().stats().fetched_blocks == 8);
    CHECK(two.node->tiers().audit().empty());
  }

  TEST_CASE("a node that orders copies and sends nothing delays no other request, and nothing is announced") {
    node_and_stranger two({.max_gets = 8});
    const auto wanted = [&](detail::pool_frame kind) {
      return std::ranges::count(two.other.words, kind, [](const auto& each) { return each.first; });
    };
    const kv_chain cold(two.node->cache(), prompt_of(2, 64));
    order_copy(two, cold);
    const std::uint64_t cold_id = two.asked_id();
    REQUIRE(cold_id != 0);
    const kv_chain chain(two.node->cache(), prompt_of(1, 16));
    auto request = two.ask(chain, 4);
    request.fetch();
    const std::uint64_t id = two.asked_id();
    REQUIRE(id != 0);
    const std::vector<std::byte> bytes(64, std::byte{7});
    for (std::uint32_t part = 0; part < 4; ++part)
      two.send(block_frame(id, part, bytes), bytes);
    CHECK(request.has_arrived());
    CHECK(request.end().blocks == 4);
    // The stranger has none of the blocks after all. The node keeps nothing, and says so to no directory.
    two.node->step();
    two.other.words.clear();
    two.other.hear();
    two.other.words.clear();
    const std::uint64_t known = two.node->pool().stats().directory_spans;
    for (std::uint32_t round = 0; round < 8; ++round) {
      for (std::uint32_t part = 0; part < cold.keys().size(); ++part) {
        detail::pool_writer out;
        out.put(cold_id);
        out.put(part);
        two.other.post(detail::pool_frame::missing, out);
      }
      two.node->step();
      two.other.hear();
    }
    CHECK(wanted(detail::pool_frame::get) == 3);  // for the other blocks, four at a time
    CHECK(wanted(detail::pool_frame::publish) == 0);
    CHECK(two.node->pool().stats().directory_spans == known);
    CHECK(two.node->pool().stats().copied_spans == 0);
    CHECK(two.node->tiers().stats().tiers[0].in_use == 0);
    CHECK(two.node->tiers().audit().empty());
  }

  TEST_CASE("malformed messages are counted, and change nothing") {
    node_and_stranger two;
    const kv_chain chain(two.node->cache(), prompt_of(1, 16));
    random_numbers random(7);
    std::uint64_t refused = two.node->pool().stats().refused_frames;
    for (std::uint32_t i = 0; i < 4000; ++i) {
      detail::pool_writer out;
      const std::uint64_t words = random.below(std::uint64_t{40});
      for (std::uint64_t k = 0; k < words; ++k) {
        switch (random.below(std::uint32_t{4})) {
          case 0:
            out.put(random.next());
            break;
          case 1:
            out.put(random.below(std::uint32_t{80}));
            break;
          case 2:
            out.put(chain.keys()[random.below(std::uint32_t{4})]);
            break;
          default:
            out.put(std::uint64_t{1} << 32 | random.below(std::uint64_t{3}));
        }
      }
      two.other.end.post(
          seat_id{0}, {.kind = static_cast<std::uint16_t>(2 + random.below(std::uint32_t{13}))}, out.bytes());
      if (i % 64 == 0) two.node->step();
    }
    two.node->step();
    CHECK(two.node->pool().stats().refused_frames > refused);
    CHECK(two.node->tiers().audit().empty());
    CHECK(two.node->pool().state_of(seat_id{1}) == pool::peer_state::present);
    // The node serves as before.
    const auto prompt = prompt_of(1, 17);
    CHECK(two.node->serve(prompt, [](auto&) {}).matched == 0);
    CHECK(two.node->wrong() == "");
    // One that has not introduced itself is not heard at all.
    thread_network net(2);
    thread_endpoint end(net, seat_id{0});
    node_type alone(end, {.groups = paged_group}, {});
    stranger silent(net, 1);
    detail::pool_writer get;
    get.put(std::uint64_t{1});
    get.put(chain.keys()[0]);
    silent.hear();
    silent.post(detail::pool_frame::get, get);
    alone.step();
    CHECK(alone.pool().stats().refused_frames == 1);
  }

  TEST_CASE("a thread without work may wait without limit for the next message") {
    node_and_stranger two;
    const std::uint64_t refused = two.node->pool().stats().refused_frames;
    std::thread later([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      two.other.end.post(seat_id{0}, {.kind = 99}, {});
    });
    two.node->pool().progress(~std::uint64_t{0});
    CHECK(two.node->pool().stats().refused_frames == refused + 1);
    later.join();
  }

  TEST_CASE("blocks of a silent directory count as unknown when the patience ends, not as misses") {
    node_and_stranger two;
    // Of 32 prompts some lie with the stranger, who says nothing.
    std::uint32_t unknown = 0;
    for (std::uint32_t i = 0; i < 32; ++i) {
      const kv_chain chain(two.node->cache(), prompt_of(100 + i, 16));
      auto request = two.node->pool().ask(chain, 0, 0).value();
      if (request.where().next == offload::answer::miss) continue;
      CHECK(request.where().next == offload::answer::pending);
      two.node->step();
      CHECK(request.where().next == offload::answer::unknown);
      ++unknown;
    }
    CHECK(unknown > 4);
    CHECK(unknown < 28);
  }
}
