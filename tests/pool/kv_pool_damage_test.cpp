/// What becomes of damaged blocks: a reader finds the damage and reports it, the holder verifies its own copy
/// and drops it if it is damaged, and a sound copy in a lower tier is sent.
#include <llmmem/pool/kv_pool.hpp>
#include <llmmem/pool/shared_memory_mover.hpp>

#include <doctest/doctest.h>
#include <llmmem/comm/errors.hpp>
#include <llmmem/comm/thread_network.hpp>
#include <llmmem/pool/detail/block_export.hpp>
#include <llmmem/pool/detail/pool_request.hpp>
#include <llmmem/pool/detail/pool_wire.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "pool/memory_nodes.hpp"
#include "pool/pool_cluster.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

/// Flips a bit of a block in a node's first tier. Returns false if it is not there.
template <class Node>
bool damage_first(Node& of, const block_key& key) {
  const auto held = of.tiers().hold(0, key);
  if (!held) return false;
  of.tiers().bytes_of(*held)[5] ^= std::byte{1};
  of.tiers().release(*held);
  return true;
}

/// Flips a bit of the copy of a block in a node's lower tier, which is found by its contents.
template <class Node>
bool damage_lower(Node& of, const block_key& key) {
  const auto held = of.tiers().hold(0, key);
  if (!held) return false;
  const std::span<std::byte> bytes = of.tiers().bytes_of(*held);
  const auto found = std::ranges::search(of.lower_bytes(), bytes);
  of.tiers().release(*held);
  if (found.empty()) return false;
  *found.begin() ^= std::byte{1};
  return true;
}

/// A report of damage to node 0.
detail::pool_writer report_of(std::uint64_t nonce, const kv_chain& chain, std::uint32_t place) {
  detail::pool_writer out;
  out.put(nonce);
  out.put(chain.keys()[0]);
  out.put(std::uint32_t{0});
  out.put(place);
  out.put(chain.keys()[place]);
  return out;
}

/// The number of the node's pool, from its greeting.
std::uint64_t nonce_of(const stranger& other) {
  std::uint64_t out = 0;
  for (const auto& [kind, what] : other.words) {
    if (kind == detail::pool_frame::hello)
      std::memcpy(&out, what.data() + what.size() - sizeof(out), sizeof(out));
  }
  return out;
}

const auto prompt = prompt_of(41, 41);  // ten blocks that can be loaded

}  // namespace

TEST_SUITE("damage in a pool") {
  TEST_CASE("a copy that was damaged in its holder's memory is dropped, and the lower tier's is sent") {
    cluster nodes(3);
    nodes.serve(0, prompt);
    const kv_chain chain(nodes.all[0]->cache(), prompt);
    // The first reader's fetch gives each block its checksum, and makes that node a holder: it is emptied.
    CHECK(nodes.serve(1, prompt).loaded == 40);
    nodes.end(1);
    for (const std::size_t which : {2U, 7U})
      REQUIRE(damage_first(*nodes.all[0], chain.keys()[which]));
    const served_request came = nodes.serve(2, prompt);
    CHECK(came.loaded == 40);
    CHECK(came.fetched.failed_blocks == 0);
    const pool::stats reader = nodes.all[2]->pool().stats();
    CHECK(reader.damaged_blocks == 2);
    CHECK(reader.reported_blocks == 2);
    const pool::stats holder = nodes.all[0]->pool().stats();
    CHECK(holder.checked_blocks == 2);
    CHECK(holder.dropped_blocks == 2);
    CHECK(holder.ignored_reports == 0);
    CHECK(nodes.all[0]->tiers().stats().tiers[0].damaged == 2);
    CHECK(nodes.all[0]->tiers().stats().tiers[1].damaged == 0);
    CHECK(nodes.all[0]->tiers().audit().empty());
  }

  TEST_CASE("a copy that was damaged, and was the only one, is dropped and leaves the directory") {
    cluster nodes(4, {.groups = paged_group, .lower_slots = 1});
    nodes.serve(0, prompt);
    const kv_chain chain(nodes.all[0]->cache(), prompt);
    CHECK(nodes.serve(1, prompt).loaded == 40);
    nodes.end(1);
    REQUIRE(damage_first(*nodes.all[0], chain.keys()[2]));
    const served_request first = nodes.serve(2, prompt);
    CHECK(first.loaded == 8);
    CHECK(first.fetched.failed_blocks == 1);
    CHECK(nodes.all[2]->pool().stats().damaged_blocks == 1);
    CHECK(nodes.all[0]->pool().stats().dropped_blocks == 1);
    CHECK(nodes.all[0]->tiers().lookup_block(0, chain.keys()[2]).first == offload::answer::miss);
    nodes.end(2);
    // The next reader asks for no more than the directory has.
    const served_request next = nodes.serve(3, prompt);
    CHECK(next.loaded == 8);
    CHECK(next.fetched.failed_blocks == 0);
    CHECK(nodes.all[3]->pool().stats().damaged_blocks == 0);
    CHECK(nodes.all[0]->tiers().audit().empty());
  }

  TEST_CASE("a report corrects the directory, so that no reader asks the holder for the block") {
    cluster nodes(3, {.groups = paged_group, .lower_slots = 1});
    nodes.serve(0, prompt);
    const kv_chain chain(nodes.all[0]->cache(), prompt);
    CHECK(nodes.serve(1, prompt).loaded == 40);
    nodes.end(1);
    nodes.end(2);
    REQUIRE(damage_first(*nodes.all[0], chain.keys()[2]));
    {
      stranger reporter(nodes.net, 1);  // it asks for nothing, which would correct the directory as well
      nodes.settle();
      reporter.join();
      nodes.settle();
      reporter.post(detail::pool_frame::damaged, report_of(nonce_of(reporter), chain, 2));
      nodes.settle();
    }
    nodes.ends[2] = std::make_unique<thread_endpoint>(nodes.net, seat_id{2});
    nodes.all[2] = std::make_unique<node_type>(
        *nodes.ends[2], node_form{.groups = paged_group, .lower_slots = 1}, kv_pool_options{});
    nodes.settle();
    REQUIRE(nodes.all[0]->pool().stats().dropped_blocks == 1);
    const served_request came = nodes.serve(2, prompt);
    CHECK(came.loaded == 8);
    CHECK(came.fetched.failed_blocks == 0);
    CHECK(nodes.all[0]->pool().stats().missing_blocks == 0);
  }

  TEST_CASE("a copy that was damaged in its holder's file is dropped when a reader's request brings it up") {
    cluster nodes(3, {.groups = paged_group, .blocks = 200, .slots = 30, .lower_slots = 200});
    nodes.serve(0, prompt);
    const kv_chain chain(nodes.all[0]->cache(), prompt);
    REQUIRE(damage_lower(*nodes.all[0], chain.keys()[4]));
    for (std::uint32_t family = 42; family < 44; ++family)
      nodes.serve(0, prompt_of(family, 101));  // pushes the prompt's blocks out of the first tier
    REQUIRE(nodes.all[0]->tiers().lookup_block(0, chain.keys()[4]) == std::pair(offload::answer::hit, 1UL));
    const served_request first = nodes.serve(1, prompt);
    CHECK(first.loaded == 16);
    CHECK(nodes.all[0]->tiers().stats().tiers[1].damaged == 1);
    CHECK(nodes.all[0]->tiers().lookup_block(0, chain.keys()[4]).first == offload::answer::miss);
    nodes.end(1);
    CHECK(nodes.serve(2, prompt).fetched.failed_blocks == 0);
    CHECK(nodes.all[2]->pool().stats().reported_blocks == 0);
  }

  TEST_CASE("a block whose copies are damaged in memory and in the file is a miss, and never wrong") {
    cluster nodes(3);
    nodes.serve(0, prompt);
    const kv_chain chain(nodes.all[0]->cache(), prompt);
    CHECK(nodes.serve(1, prompt).loaded == 40);
    nodes.end(1);
    REQUIRE(damage_lower(*nodes.all[0], chain.keys()[3]));
    REQUIRE(damage_first(*nodes.all[0], chain.keys()[3]));
    CHECK(nodes.serve(2, prompt).loaded == 12);
    CHECK(nodes.all[0]->tiers().stats().tiers[0].damaged == 1);
    CHECK(nodes.all[0]->tiers().stats().tiers[1].damaged == 1);
    CHECK(nodes.all[0]->tiers().lookup_block(0, chain.keys()[3]).first == offload::answer::miss);
    nodes.serve(0, prompt);  // its own cache has the prompt still, and it stores what its tiers lack
    CHECK(nodes.all[0]->wrong().empty());
  }

  TEST_CASE(
      "a block that was damaged on the way is reported, asked for once more, and taken when it is right") {
    node_and_stranger two;
    const kv_chain chain(two.node->cache(), prompt_of(1, 16));
    const std::vector<std::byte> bytes(64, std::byte{7});
    std::vector<std::byte> damaged = bytes;
    damaged[9] ^= std::byte{1};
    for (const bool is_healed : {false, true}) {
      auto request = two.ask(chain, 1);
      request.fetch();
      frame_header header = block_frame(two.asked_id(), 0, bytes);
      two.other.words.clear();
      two.send(header, damaged);
      CHECK_FALSE(request.has_arrived());
      two.node->step();
      two.other.hear();
      // The report goes before the second request, and names the block.
      std::vector<detail::pool_frame> kinds;
      for (const auto& [kind, what] : two.other.words) {
        if (kind == detail::pool_frame::damaged || kind == detail::pool_frame::get) kinds.push_back(kind);
        if (kind != detail::pool_frame::damaged) continue;
        detail::pool_reader in(what);
        CHECK(in.take<std::uint64_t>() == two.other.end.nonce());
        CHECK(in.take<block_key>() == chain.keys()[0]);
        CHECK(in.take<std::uint32_t>() == 0);
        CHECK(in.take<std::uint32_t>() == 0);
        CHECK(in.take<block_key>() == chain.keys()[0]);
        CHECK(in.is_over());
      }
      CHECK(kinds == std::vector{detail::pool_frame::damaged, detail::pool_frame::get});
      two.send(header, is_healed ? bytes : damaged);
      two.node->step();
      CHECK(request.has_arrived());  // or is given up: it is not asked for a third time
      CHECK(request.end().blocks == (is_healed ? 1 : 0));
    }
    CHECK(two.node->pool().stats().damaged_blocks == 3);
    CHECK(two.node->pool().stats().reported_blocks == 3);
    CHECK(two.node->tiers().audit().empty());
  }

  TEST_CASE("reports cost a holder max_checks checks a second for each node, and change no sound copy") {
    thread_network net(3, {.copied_bytes = 65536, .lane_bytes = 1 << 20});
    thread_endpoint end(net, seat_id{0});
    node_type node(end, {.groups = paged_group}, {.max_checks = 4});
    stranger hostile(net, 1);
    stranger honest(net, 2);
    for (stranger* each : {&hostile, &honest}) {
      node.step();
      each->join();
      node.step();
    }
    REQUIRE(node.pool().peers() == 2);
    node.serve(prompt, [](auto&) {});
    node.step();
    const kv_chain chain(node.cache(), prompt);
    const std::uint64_t nonce = nonce_of(hostile);
    const std::uint64_t since = end.now_ns();
    for (std::uint32_t i = 0; i < 4000; ++i) {
      hostile.post(detail::pool_frame::damaged, report_of(nonce, chain, i % 10));
      if (i % 100 == 99) node.step();
    }
    node.step();
    const std::uint64_t seconds = (end.now_ns() - since) / 1'000'000'000 + 1;
    const pool::stats after = node.pool().stats();
    CHECK(after.checked_blocks >= 4);
    CHECK(after.checked_blocks <= 4 * seconds);
    CHECK(after.checked_blocks + after.ignored_reports == 4000);
    CHECK(after.dropped_blocks == 0);
    for (std::uint32_t i = 0; i < 10; ++i)
      CHECK(node.tiers().lookup_block(0, chain.keys()[i]) == std::pair(offload::answer::hit, 0UL));
    // What one node reports too often is heard from another.
    REQUIRE(damage_first(node, chain.keys()[6]));
    honest.post(detail::pool_frame::damaged, report_of(nonce, chain, 6));
    node.step();
    CHECK(node.pool().stats().dropped_blocks == 1);
    CHECK(node.tiers().audit().empty());
  }

  TEST_CASE("reports that are malformed, late or about blocks of others are counted, and change nothing") {
    node_and_stranger two;
    two.other.hear();
    const std::uint64_t nonce = nonce_of(two.other);
    two.node->serve(prompt, [](auto&) {});
    two.node->step();
    const kv_chain chain(two.node->cache(), prompt);
    REQUIRE(damage_first(*two.node, chain.keys()[1]));
    const auto counts_as = [&](const detail::pool_writer& report, std::uint64_t refused,
                               std::uint64_t ignored) {
      const pool::stats before = two.node->pool().stats();
      two.other.post(detail::pool_frame::damaged, report);
      two.node->step();
      const pool::stats after = two.node->pool().stats();
      CHECK(after.refused_frames == before.refused_frames + refused);
      CHECK(after.ignored_reports == before.ignored_reports + ignored);
      CHECK(after.dropped_blocks == 0);
    };
    const kv_chain unknown(two.node->cache(), prompt_of(77, 16));
    counts_as(report_of(nonce + 1, chain, 1), 0, 1);  // of the process before this one
    counts_as(report_of(nonce, unknown, 1), 0, 1);
    detail::pool_writer cut;
    cut.put(nonce);
    counts_as(cut, 1, 0);
    detail::pool_writer longer = report_of(nonce, chain, 1);
    longer.put(std::uint8_t{0});
    counts_as(longer, 1, 0);
    constexpr std::size_t group_at = sizeof(std::uint64_t) + sizeof(block_key);
    detail::pool_writer group = report_of(nonce, chain, 1);
    group.put_at(group_at, std::uint32_t{1});
    counts_as(group, 1, 0);
    detail::pool_writer place = report_of(nonce, chain, 1);
    place.put_at(group_at + sizeof(std::uint32_t), pool::span_chunks);
    counts_as(place, 1, 0);
    two.other.post(detail::pool_frame::damaged, report_of(nonce, chain, 1));
    two.node->step();
    CHECK(two.node->pool().stats().dropped_blocks == 1);
  }

  TEST_CASE("a report with a wrong span or place drops no sound block, and no entry of the directory") {
    for (const bool is_damaged : {false, true}) {
      for (const int wrong : {0, 1, 2}) {
        CAPTURE(is_damaged);
        CAPTURE(wrong);
        cluster nodes(3, {.groups = paged_group, .lower_slots = 1});
        nodes.serve(0, prompt);
        const kv_chain chain(nodes.all[0]->cache(), prompt);
        CHECK(nodes.serve(1, prompt).loaded == 40);
        nodes.end(1);
        if (is_damaged) REQUIRE(damage_first(*nodes.all[0], chain.keys()[8]));
        nodes.end(2);
        {
          stranger other(nodes.net, 2);
          nodes.settle();
          other.join();
          nodes.settle();
          detail::pool_writer report = report_of(nonce_of(other), chain, 8);
          constexpr std::size_t span_at = sizeof(std::uint64_t);
          constexpr std::size_t place_at = span_at + sizeof(block_key) + sizeof(std::uint32_t);
          if (wrong == 0) report.put_at(span_at, chain.keys()[8]);
          if (wrong == 1) report.put_at(place_at, std::uint32_t{2});
          if (wrong == 2) report.put_at(place_at, std::uint32_t{63});
          other.post(detail::pool_frame::damaged, report);
          nodes.settle();
        }
        CHECK(nodes.all[0]->pool().stats().checked_blocks == 1);
        CHECK(nodes.all[0]->pool().stats().dropped_blocks == (is_damaged ? 1 : 0));
        for (std::size_t at = 0; at < 10; ++at) {
          const auto has = nodes.all[0]->tiers().lookup_block(0, chain.keys()[at]).first;
          CHECK((has == offload::answer::miss) == (is_damaged && at == 8));
        }
        // The directory still names the other blocks, and the next reader gets them.
        nodes.ends[2] = std::make_unique<thread_endpoint>(nodes.net, seat_id{2});
        nodes.all[2] =
            std::make_unique<node_type>(*nodes.ends[2], node_form{.groups = paged_group}, kv_pool_options{});
        nodes.settle();
        CHECK(nodes.serve(2, prompt).loaded == (is_damaged ? 32 : 40));
      }
    }
  }

  TEST_CASE("a second of checks begins with the first one after the last second, and no death begins one") {
    detail::pool_checks checks;
    CHECK_FALSE(detail::pool_checks{}.may_check(5, 0));
    CHECK(checks.may_check(5, 2));
    CHECK(checks.may_check(5, 2));
    CHECK_FALSE(checks.may_check(1'000'000'004, 2));
    CHECK(checks.may_check(1'000'000'005, 2));
    CHECK(checks.may_check(1'900'000'000, 2));
    CHECK_FALSE(checks.may_check(2'000'000'000, 2));

    cluster nodes(2, {.groups = paged_group}, {.max_checks = 1});
    nodes.serve(0, prompt);
    const kv_chain chain(nodes.all[0]->cache(), prompt);
    const auto report = [&] {
      CHECK(nodes.serve(1, prompt).loaded == 40);
      return nodes.all[0]->pool().stats().dropped_blocks;
    };
    report();
    for (const std::size_t which : {1U, 2U}) {
      nodes.end(1);
      nodes.ends[1] = std::make_unique<thread_endpoint>(nodes.net, seat_id{1});
      nodes.all[1] = std::make_unique<node_type>(*nodes.ends[1], node_form{.groups = paged_group},
                                                 kv_pool_options{.max_checks = 1});
      nodes.settle();
      REQUIRE(damage_first(*nodes.all[0], chain.keys()[which]));
      const std::uint64_t since = nodes.ends[0]->now_ns();
      nodes.serve(1, prompt);
      const bool is_slow = nodes.ends[0]->now_ns() - since > 500'000'000;
      if (!is_slow) CHECK(nodes.all[0]->pool().stats().dropped_blocks == 1);
    }
  }

  TEST_CASE(
      "a damaged copy that is in use keeps its slot until its users end, and a load counts it as failed") {
    cluster nodes(1);
    auto& node = *nodes.all[0];
    nodes.serve(0, prompt);
    auto& tiers = node.tiers();
    const kv_chain chain(node.cache(), prompt);
    const auto held = tiers.hold(0, chain.keys()[3]);
    REQUIRE(held);
    CHECK(tiers.verify_copy(0, chain.keys()[3]) == offload::copy_state::sound);
    const sequence_id id = node.cache().create().value();
    auto load = tiers.prepare_load(id, chain, 40).value();
    REQUIRE(load.wanted() == 40);
    tiers.bytes_of(*held)[0] ^= std::byte{1};
    const std::byte wrong = tiers.bytes_of(*held)[0];
    CHECK(tiers.verify_copy(0, chain.keys()[3]) == offload::copy_state::damaged);
    CHECK(tiers.verify_copy(0, chain.keys()[3]) == offload::copy_state::unknown);
    CHECK(tiers.lookup_block(0, chain.keys()[3]) == std::pair(offload::answer::hit, 1UL));
    for (std::uint32_t l = 0; l < kv_contents::layers; ++l)
      load.wait(l).value();
    const auto came = load.complete();
    CHECK(came.tokens == 12);
    CHECK(came.failed_blocks == 1);
    node.cache().release(id).value();
    // Other contents pass through the first tier, and none takes the held slot.
    for (std::uint32_t family = 1; family < 8; ++family)
      nodes.serve(0, prompt_of(family, 41));
    CHECK(tiers.bytes_of(*held)[0] == wrong);
    CHECK(tiers.audit().empty());
    tiers.release(*held);
    CHECK(tiers.audit().empty());
  }

  TEST_CASE("a load counts a damaged copy as failed also after it has let the copy's slot go") {
    // The load's ten blocks pass through six slots: it lets go of slots that it has copied.
    cluster nodes(1, {.groups = paged_group, .slots = 6});
    auto& node = *nodes.all[0];
    for (std::size_t tokens = 5; tokens <= prompt.size(); tokens += 4)
      nodes.serve(0, std::span(prompt).first(tokens));
    auto& tiers = node.tiers();
    const kv_chain chain(node.cache(), prompt);
    const sequence_id id = node.cache().create().value();
    auto load = tiers.prepare_load(id, chain, 40).value();
    REQUIRE(load.wanted() == 40);
    for (std::uint32_t l = 0; l < kv_contents::layers; ++l)
      load.wait(l).value();
    const std::uint64_t in_use = tiers.stats().tiers[0].in_use;
    std::uint64_t damaged = 0;
    for (const block_key& key : chain.keys()) {
      if (!damage_first(node, key)) continue;
      damaged += tiers.verify_copy(0, key) == offload::copy_state::damaged ? 1U : 0U;
    }
    REQUIRE(damaged > in_use);
    CHECK(load.complete().failed_blocks == damaged);
    node.cache().release(id).value();
    CHECK(tiers.audit().empty());
  }
}

TEST_SUITE("damage in memory that others read") {
  shared_memory_options memory_of(std::uint64_t slots) {
    return {.bytes = std::uint64_t{1} << 20, .blocks = slots};
  }

  TEST_CASE("a reader of another's memory reports damage there, and gets the lower tier's copy by message") {
    memory_cluster<shared_memory_mover> nodes(3, 64, memory_of(64));
    nodes.serve(0, prompt);
    const kv_chain chain(nodes.all[0]->cache(), prompt);
    REQUIRE(nodes.all[0]->pool().stats().offered_blocks == 10);
    REQUIRE(damage_first(*nodes.all[0], chain.keys()[2]));
    const served_request came = nodes.serve(1, prompt);
    CHECK(came.loaded == 40);
    CHECK(came.fetched.failed_blocks == 0);
    const pool::stats reader = nodes.all[1]->pool().stats();
    CHECK(reader.read_blocks == 9);
    CHECK(reader.failed_reads == 1);
    CHECK(reader.damaged_blocks == 1);
    CHECK(reader.reported_blocks == 1);
    CHECK(nodes.all[0]->pool().stats().dropped_blocks == 1);
    CHECK(nodes.all[0]->pool().stats().served_blocks == 1);
    // The sound copy is in the index now.
    CHECK(nodes.serve(2, prompt).loaded == 40);
    CHECK(nodes.all[2]->pool().stats().read_blocks == 10);
  }

  TEST_CASE("the owner writes a damaged index entry again, and its block stays") {
    memory_cluster<shared_memory_mover> nodes(3, 64, memory_of(64));
    nodes.serve(0, prompt);
    const kv_chain chain(nodes.all[0]->cache(), prompt);
    const block_key name =
        memory_node<shared_memory_mover, thread_endpoint>::tiers_type::name_of(0, chain.keys()[2]);
    const auto shape = detail::export_shape::of(64, std::uint64_t{1} << 20);
    std::byte* const base =
        nodes.all[0]->tiers().bytes_of({.group = 0, .slot = slot_id{0}}).data() - shape.first;
    detail::export_header header;
    std::memcpy(&header, base, sizeof(header));
    REQUIRE(header.magic == detail::export_header::right_magic);
    std::uint32_t changed = 0;
    for (std::uint64_t i = 0; i < shape.buckets * detail::bucket_entries; ++i) {
      auto& entry = reinterpret_cast<detail::export_entry*>(base + detail::export_index_at)[i];
      if (entry.bytes == 0 || entry.low != name.low || entry.high != name.high) continue;
      entry.crc ^= 1;
      ++changed;
    }
    REQUIRE(changed == 1);
    CHECK(nodes.serve(1, prompt).loaded == 40);
    CHECK(nodes.all[1]->pool().stats().failed_reads == 1);
    CHECK(nodes.all[0]->pool().stats().checked_blocks == 1);
    CHECK(nodes.all[0]->pool().stats().dropped_blocks == 0);
    CHECK(nodes.serve(2, prompt).loaded == 40);
    CHECK(nodes.all[2]->pool().stats().failed_reads == 0);
    CHECK(nodes.all[2]->pool().stats().read_blocks == 10);
  }
}
