/// Pools whose nodes read each other's memory: what a reader may believe, what becomes of blocks that are
/// rewritten, and which way the blocks came.
#include <llmmem/pool/detail/block_export.hpp>
#include <llmmem/pool/shared_memory_mover.hpp>

#include <doctest/doctest.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "pool/memory_nodes.hpp"
#include "pool/pool_cluster.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

using reading_node = memory_node<shared_memory_mover, thread_endpoint>;

shared_memory_options memory_of(std::uint64_t slots) {
  return {.bytes = std::uint64_t{1} << 20, .blocks = slots};
}

struct reading_cluster : memory_cluster<shared_memory_mover> {
  explicit reading_cluster(std::uint32_t nodes, std::uint64_t slots = 64)
      : memory_cluster(nodes, slots, memory_of(slots)) {}
};

/// Exported memory with one block of 1,000 bytes, in this process.
struct exported_block {
  exported_block() {
    std::memset(block().data(), 7, block().size());
    index.put(name, block(), crc32c(0, block()));
  }
  [[nodiscard]] std::span<std::byte> block() { return std::span(memory).subspan(shape.first + 64, 1000); }
  [[nodiscard]] detail::export_entry& entry() {
    return *reinterpret_cast<detail::export_entry*>(memory.data() + shape.bucket_at(name, 0));
  }
  template <class F>
  pool::moved copy(F&& after) {
    into.assign(1000, std::byte{0});
    return detail::copy_exported(memory.data(), shape, name, into, after);
  }
  pool::moved copy() {
    return copy([] {});
  }

  detail::export_shape shape = detail::export_shape::of(8, 65536);
  std::vector<std::byte> memory = std::vector<std::byte>(shape.bytes);
  detail::export_index index = detail::export_index(memory.data(), shape, 1, 2);
  block_key name{.low = 5, .high = 6};
  std::vector<std::byte> into;
};

/// A mover that may be busy, and counts how often it is asked.
struct busy_mover : shared_memory_mover {
  using shared_memory_mover::shared_memory_mover;

  pool::moved fetch(seat_id seat, const block_key& name, std::span<std::byte> into,
                    const pool::move_ticket& ticket) noexcept {
    ++asked;
    return is_busy ? pool::moved::busy : shared_memory_mover::fetch(seat, name, into, ticket);
  }
  bool is_busy = false;
  std::uint64_t asked = 0;
};

}  // namespace

TEST_CASE("a busy mover is asked for one block in a step, and no slot is taken for others") {
  memory_cluster<busy_mover> nodes(2, 64, memory_of(64));
  const auto prompt = prompt_of(1, 100);
  nodes.serve(0, prompt);
  auto& reader = *nodes.all[1];
  const kv_chain chain(reader.cache(), prompt);
  auto request = reader.pool().ask(chain, 0).value();
  nodes.settle();
  nodes.movers[1]->is_busy = true;
  request.fetch();
  CHECK(nodes.movers[1]->asked == 1);
  reader.step();
  CHECK(nodes.movers[1]->asked == 2);
  CHECK(reader.tiers().stats().tiers[0].in_use == 0);
  nodes.movers[1]->is_busy = false;
  reader.step();
  CHECK(request.has_arrived());
  CHECK(nodes.movers[1]->asked == 2 + 25);
  CHECK(request.end().blocks == 25);
  CHECK(reader.pool().stats().read_blocks == 25);
}

TEST_CASE("a node reads the blocks of another from its memory, and the owner sends none") {
  reading_cluster nodes(2);
  const auto prompt = prompt_of(1, 100);
  nodes.serve(0, prompt);
  CHECK(nodes.all[0]->pool().stats().offered_blocks == 25);
  const served_request came = nodes.serve(1, prompt);
  CHECK(came.loaded == 96);
  CHECK(came.fetched.blocks == 25);
  const pool::stats reader = nodes.all[1]->pool().stats();
  CHECK(reader.read_blocks == 25);
  CHECK(reader.fetched_blocks == 25);
  CHECK(reader.failed_reads == 0);
  CHECK(nodes.all[0]->pool().stats().served_blocks == 0);
  CHECK(nodes.all[0]->pool().mover_limits() ==
        pool::mover_limits{.one_sided = true, .needs_owner_progress = false, .max_piece = max_bytes});
}

TEST_CASE("the owner makes no step while its blocks are read") {
  reading_cluster nodes(2);
  const auto prompt = prompt_of(1, 100);
  nodes.serve(0, prompt);
  const kv_chain chain(nodes.all[1]->cache(), prompt);
  auto request = nodes.all[1]->pool().ask(chain, 0).value();
  nodes.settle();
  request.fetch();
  CHECK(request.has_arrived());
  CHECK(request.end().blocks == 25);
  CHECK(nodes.all[0]->pool().stats().served_blocks == 0);
}

TEST_CASE("blocks that left the first tier leave the index, and come from lower tiers by message") {
  reading_cluster nodes(2, 32);
  const auto first = prompt_of(1, 64);
  nodes.serve(0, first);
  const kv_chain chain(nodes.all[0]->cache(), first);
  const block_key name = reading_node::tiers_type::name_of(0, chain.keys()[0]);
  CHECK(nodes.movers[0]->is_offered(name));
  for (std::uint32_t family = 2; family < 5; ++family)
    nodes.serve(0, prompt_of(family, 64));
  CHECK_FALSE(nodes.movers[0]->is_offered(name));
  const served_request came = nodes.serve(1, first);
  CHECK(came.loaded == 60);
  CHECK(nodes.all[1]->pool().stats().failed_reads != 0);
  CHECK(nodes.all[0]->pool().stats().served_blocks != 0);
}

TEST_CASE("a node that lost another's introduction is told again when it asks by message") {
  memory_cluster<shared_memory_mover> nodes(2, 64, memory_of(64), {.ask_again_ns = 1});
  nodes.movers[1]->detach(seat_id{0});
  const auto read = [&] { return nodes.all[1]->pool().stats().read_blocks; };
  for (std::uint32_t i = 0; i < 4; ++i) {
    const auto prompt = prompt_of(i, 41);
    nodes.serve(0, prompt);
    CHECK(nodes.serve(1, prompt).loaded == 40);
    if (i == 0) CHECK(read() == 0);
  }
  CHECK(nodes.movers[1]->reaches(seat_id{0}));
  CHECK(read() >= 10);
  CHECK(nodes.all[1]->pool().stats().refused_introductions == 0);
}

TEST_CASE("blocks that arrive after the tiers were emptied ascend in memory") {
  reading_cluster nodes(1);
  auto& tiers = nodes.all[0]->tiers();
  const auto prompt = prompt_of(1, 100);
  const kv_chain chain(nodes.all[0]->cache(), prompt);
  for (int round = 0; round < 2; ++round) {
    nodes.serve(0, prompt_of(2, 241));
    nodes.settle();
    tiers.clear();
    std::vector<offload::held_block> arrivals;
    for (const block_key& key : chain.keys())
      arrivals.push_back(tiers.begin_arrival(0, key, 0).value());
    for (std::size_t i = 1; i < arrivals.size(); ++i)
      CHECK(tiers.bytes_of(arrivals[i - 1]).data() < tiers.bytes_of(arrivals[i]).data());
    for (const offload::held_block& each : arrivals)
      tiers.end_arrival(each, false);
  }
}

TEST_CASE("a withdrawn block is not read again") {
  reading_cluster nodes(2);
  const auto prompt = prompt_of(1, 40);
  nodes.serve(0, prompt);
  const kv_chain chain(nodes.all[0]->cache(), prompt);
  const block_key name = reading_node::tiers_type::name_of(0, chain.keys()[3]);
  CHECK(nodes.movers[0]->is_offered(name));
  nodes.all[0]->tiers().clear();
  CHECK_FALSE(nodes.movers[0]->is_offered(name));
  CHECK(nodes.serve(1, prompt).loaded == 0);
}

TEST_CASE("a node without a mover and one that has it pass blocks by message") {
  thread_network net(2, {.copied_bytes = 65536, .lane_bytes = 1 << 20});
  thread_endpoint first(net, seat_id{0});
  thread_endpoint second(net, seat_id{1});
  shared_memory_mover mover({.bytes = std::uint64_t{1} << 20, .blocks = 64});
  reading_node reads(first, form_of(64), {}, mover);
  node_type asks(second, form_of(64), {});
  const auto settle = [&] {
    for (int i = 0; i < 8; ++i) {
      reads.step();
      asks.step();
    }
  };
  const auto fetch = [&](auto& request) {
    settle();
    request.fetch();
    settle();
  };
  settle();
  CHECK(asks.pool().peers() == 1);
  reads.serve(prompt_of(1, 40), fetch);
  settle();
  CHECK(asks.serve(prompt_of(1, 40), fetch).loaded == 36);
  asks.serve(prompt_of(2, 40), fetch);
  settle();
  CHECK(reads.serve(prompt_of(2, 40), fetch).loaded == 36);
  CHECK(reads.pool().stats().read_blocks == 0);
  CHECK(asks.pool().stats().refused_frames == 0);
  CHECK(reads.wrong() + asks.wrong() == "");
}

TEST_CASE("a first tier in other memory is refused") {
  thread_network net(1, {.copied_bytes = 65536, .lane_bytes = 1 << 20});
  thread_endpoint end(net, seat_id{0});
  shared_memory_mover mover({.bytes = std::uint64_t{1} << 20, .blocks = 64});
  node_type node(end, form_of(64), {});
  CHECK_THROWS_WITH_AS(
      kv_pool(node.tiers(), end, mover),
      "kv_pool: the first tier is not in the mover's memory, so no other node could read it; "
      "make it with kv_tier(mover.space(), ...)",
      argument_error);
}

TEST_CASE("a copy is right, absent, changed or damaged, and never anything else") {
  exported_block of;
  CHECK(of.copy() == pool::moved::here);
  CHECK(of.into == std::vector<std::byte>(1000, std::byte{7}));

  // The owner withdraws it, or puts another one there, between the copy and the second look.
  CHECK(of.copy([&] { of.index.remove(of.name); }) == pool::moved::changed);
  CHECK(of.copy() == pool::moved::absent);
  of.index.put(of.name, of.block(), crc32c(0, of.block()));
  // The same bytes in a new generation: the reader cannot know that none of them was another's meanwhile.
  CHECK(of.copy([&] {
    of.index.remove(of.name);
    of.index.put(of.name, of.block(), crc32c(0, of.block()));
  }) == pool::moved::changed);
  CHECK(of.copy() == pool::moved::here);

  // Bytes that changed while the index says nothing: a device wrote there.
  of.block()[999] = std::byte{8};
  CHECK(of.copy() == pool::moved::damaged);
  CHECK(of.copy([&] { of.index.remove(of.name); }) == pool::moved::changed);
  of.index.put(of.name, of.block(), 0);
  CHECK(of.copy() == pool::moved::damaged);
  of.block()[999] = std::byte{7};
  of.index.put(of.name, of.block(), crc32c(0, of.block()));
  CHECK(of.copy() == pool::moved::here);

  // The owner is about to change the entry, and stopped there.
  ++of.entry().sequence;
  CHECK(of.copy() == pool::moved::absent);
}

TEST_CASE("no length and no offset of another node leads out of its memory") {
  exported_block of;
  const detail::export_entry right = of.entry();
  const auto with = [&](auto change) {
    of.entry() = right;
    change(of.entry());
    return of.copy();
  };
  using entry = detail::export_entry;
  constexpr std::uint64_t most = std::numeric_limits<std::uint64_t>::max();
  for (const std::uint64_t bad : {std::uint64_t{0}, of.shape.first - 1, of.shape.bytes - 999, of.shape.bytes,
                                  of.shape.bytes + 1, most - 999, most}) {
    CAPTURE(bad);
    CHECK(with([&](entry& each) { each.at = bad; }) == pool::moved::changed);
    CHECK_FALSE(of.shape.is_right(of.entry(), 1000));
  }
  for (const std::uint64_t bad : {std::uint64_t{1}, std::uint64_t{999}, std::uint64_t{1001}, most})
    CHECK(with([&](entry& each) { each.bytes = bad; }) == pool::moved::changed);
  CHECK(with([](entry& each) { each.low = 6; }) == pool::moved::absent);
  CHECK(with([](entry& each) { each.high = 7; }) == pool::moved::absent);
  CHECK(with([](entry&) {}) == pool::moved::here);

  detail::export_header header;
  std::memcpy(&header, of.memory.data(), sizeof(header));
  const auto accepts = [&](auto change) {
    detail::export_header other = header;
    change(other);
    return detail::export_shape::is_right(other, of.shape.bytes);
  };
  using head = detail::export_header;
  CHECK(accepts([](head&) {}));
  CHECK_FALSE(accepts([](head& each) { ++each.magic; }));
  CHECK_FALSE(accepts([](head& each) { ++each.bytes; }));
  CHECK_FALSE(accepts([](head& each) { each.buckets = 0; }));
  CHECK_FALSE(accepts([](head& each) { each.buckets = 3; }));
  CHECK_FALSE(accepts([](head& each) { each.buckets = std::uint64_t{1} << 63; }));
  CHECK_FALSE(accepts([](head& each) { each.buckets *= 1024; }));
  CHECK_FALSE(accepts([](head& each) { each.first = 4096; }));
  CHECK_FALSE(accepts([](head& each) { ++each.first += each.bytes; }));
}

TEST_CASE("an index has all blocks that it was made for") {
  for (const std::uint64_t blocks : {1U, 3U, 64U, 4096U}) {
    const detail::export_shape shape = detail::export_shape::of(blocks, 65536);
    std::vector<std::byte> memory(shape.bytes);
    detail::export_index index(memory.data(), shape, 1, 2);
    const auto name = [](std::uint64_t i) {
      return block_key{.low = detail::mix_pair(i, 1), .high = detail::mix_pair(i, 2)};
    };
    for (std::uint64_t i = 0; i < blocks; ++i)
      index.put(name(i), std::span(memory).subspan(shape.first, 8), 0);
    std::uint64_t missing = 0;
    for (std::uint64_t i = 0; i < blocks; ++i)
      missing += index.has(name(i)) ? 0U : 1U;
    CHECK(missing == 0);
  }
}

TEST_CASE("a full bucket forgets a block, which then comes by message") {
  exported_block of;
  for (std::uint64_t i = 0; i < 17; ++i)
    of.index.put({.low = 5, .high = 100 + i}, of.block(), 0);
  CHECK_FALSE(of.index.has(of.name));
  CHECK(of.index.has({.low = 5, .high = 116}));
  of.index.clear();
  CHECK_FALSE(of.index.has({.low = 5, .high = 116}));
}

TEST_CASE("an introduction that is forged opens nothing") {
  shared_memory_mover mine({.bytes = 65536, .blocks = 4});
  shared_memory_mover other({.bytes = 65536, .blocks = 4});
  const std::vector<std::byte> right(other.introduction().begin(), other.introduction().end());
  CHECK(mine.attach(seat_id{3}, right).has_value());
  CHECK(mine.reaches(seat_id{3}));
  CHECK_FALSE(mine.reaches(seat_id{2}));
  const auto refused = [&](const std::vector<std::byte>& bytes) {
    mine.detach(seat_id{3});
    const auto out = mine.attach(seat_id{3}, bytes);
    return !out && out.error().code == errc::mover_unreached && !mine.reaches(seat_id{3});
  };
  for (std::size_t i = 0; i < right.size(); ++i) {
    std::vector<std::byte> bad = right;
    bad[i] ^= std::byte{0x41};
    CAPTURE(i);
    CHECK(refused(bad));
  }
  CHECK(refused(std::vector<std::byte>(right.begin(), right.end() - 1)));
  CHECK(refused({}));

  // Files of this process that are no mover's memory, with a header that says they are.
  const auto names = [&](int file, std::uint64_t bytes) {
    std::vector<std::byte> out = right;
    const auto process = static_cast<std::uint32_t>(::getpid());
    const auto number = static_cast<std::uint32_t>(file);
    std::memcpy(out.data() + 24, &bytes, sizeof(bytes));
    std::memcpy(out.data() + 32, &process, sizeof(process));
    std::memcpy(out.data() + 36, &number, sizeof(number));
    return out;
  };
  std::array<int, 2> pipe{};
  REQUIRE(::pipe(pipe.data()) == 0);
  CHECK(refused(names(pipe[0], 0)));
  ::close(pipe[0]);
  ::close(pipe[1]);
  const auto pretend = [&](bool is_sealed) {
    std::uint64_t bytes = 0;
    std::memcpy(&bytes, right.data() + 24, sizeof(bytes));
    memory_file file("forged");
    static_cast<void>(file.resize(bytes));
    if (is_sealed) static_cast<void>(file.seal_length());
    std::byte* const at = file.map(nullptr, 0, bytes, PROT_READ | PROT_WRITE);
    detail::export_header header{
        .magic = detail::export_header::right_magic, .buckets = 4, .first = 65536, .bytes = bytes};
    std::memcpy(&header.nonce_low, right.data() + 8, 8);
    std::memcpy(&header.nonce_high, right.data() + 16, 8);
    std::memcpy(at, &header, sizeof(header));
    ::munmap(at, bytes);
    return refused(names(file.descriptor(), bytes));
  };
  CHECK_FALSE(pretend(true));  // right in everything that can be seen
  CHECK(pretend(false));       // its owner could cut it, and a reader would fault
  CHECK(mine.why().code == errc::mover_unreached);
}

TEST_CASE("sizes of zero are refused") {
  CHECK_THROWS_WITH_AS(
      shared_memory_mover({.bytes = 0, .blocks = 4}),
      "shared_memory_mover: 0 bytes for 4 blocks; both must be at least 1, and below 2^48 bytes "
      "and 2^40 blocks",
      length_error);
  CHECK_THROWS_AS(shared_memory_mover({.bytes = 4096, .blocks = 0}), length_error);
}

TEST_CASE("a process that is stopped, then killed, is read all the same") {
  const temporary_folder folder;
  const auto prompt = prompt_of(1, 400);
  owner_process<shared_memory_mover> owner(folder.path(), prompt, memory_of(128));
  {
    shared_memory_mover mover(memory_of(128));
    socket_endpoint end(socket_of(folder.path(), 1));
    memory_node<shared_memory_mover, socket_endpoint> node(end, form_of(128), {.patience_ns = 20'000'000'000},
                                                           mover);
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    const kv_chain chain(node.cache(), prompt);
    REQUIRE(owner.is_known_to(node, chain));
    auto first = node.pool().ask(chain, 0).value();
    auto rest = node.pool().ask(chain, 200).value();
    first.wait_for_answers();
    rest.wait_for_answers();
    owner.send(SIGSTOP);
    first.fetch(200);
    CHECK(first.has_arrived());
    CHECK(first.end().blocks == 50);
    owner.kill();
    rest.fetch();
    CHECK(rest.has_arrived());
    CHECK(rest.end().blocks == 50);
    CHECK(node.pool().stats().failed_reads == 0);
    CHECK(node.pool().stats().read_blocks == 100);
    // Once the death is known, nothing is read there.
    while (node.pool().peers() != 0 && std::chrono::steady_clock::now() < limit)
      node.pool().progress(1'000'000);
    CHECK_FALSE(mover.reaches(seat_id{0}));
  }
}
