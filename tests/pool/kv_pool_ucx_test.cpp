/// Pools whose nodes read each other's memory through UCX, and UCX's choice of a lane.
#include <doctest/doctest.h>

#ifndef LLMMEM_TESTS_UCX

TEST_CASE("pools over UCX") {
  MESSAGE("skipped: no UCX (Debian: libucx-dev)");
}

#else

#include <llmmem/pool/ucx_mover.hpp>

#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "pool/memory_nodes.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

ucx_options options_of(ucx_lane lane) {
  return {.bytes = std::uint64_t{1} << 20, .blocks = 128, .block_bytes = 65536, .lane = lane};
}

using socket_node = memory_node<ucx_mover, socket_endpoint>;

/// A node in seat 1 of two, and a process in seat 0 that has a prompt of 100 blocks.
struct beside_owner {
  explicit beside_owner(ucx_lane lane, std::uint64_t patience_ns = 20'000'000'000)
      : owner(folder.path(), prompt, options_of(lane)),
        mover(options_of(lane)),
        end(socket_of(folder.path(), 1)),
        node(end, form_of(128), {.patience_ns = patience_ns}, mover),
        chain(node.cache(), prompt) {
    REQUIRE(owner.is_known_to(node, chain));
  }
  temporary_folder folder;
  std::vector<token_id> prompt = prompt_of(1, 400);
  owner_process<ucx_mover> owner;  // forks before this process has a worker
  ucx_mover mover;
  socket_endpoint end;
  socket_node node;
  kv_chain chain;
};

}  // namespace

TEST_CASE("over the lane of shared memory a process that is stopped, then killed, is read") {
  beside_owner all(ucx_lane::shared_memory);
  CHECK(all.mover.lanes_of(seat_id{0}) == "posix");
  CHECK(all.node.pool().mover_limits() ==
        pool::mover_limits{.one_sided = true, .needs_owner_progress = false, .max_piece = max_bytes});
  auto first = all.node.pool().ask(all.chain, 0).value();
  auto rest = all.node.pool().ask(all.chain, 200).value();
  first.wait_for_answers();
  rest.wait_for_answers();
  all.owner.send(SIGSTOP);
  first.fetch(200);
  CHECK(first.has_arrived());
  CHECK(first.end().blocks == 50);
  all.owner.kill();
  rest.fetch();
  CHECK(rest.has_arrived());
  CHECK(rest.end().blocks == 50);
  CHECK(all.node.pool().stats().read_blocks == 100);
}

TEST_CASE(
    "over the lane of tcp the owner must step, and a stopped or killed one costs no more than the patience") {
  beside_owner all(ucx_lane::tcp, 2'000'000'000);
  CHECK(all.mover.lanes_of(seat_id{0}).find("tcp") == 0);
  CHECK(all.node.pool().mover_limits() ==
        pool::mover_limits{.one_sided = false, .needs_owner_progress = true, .max_piece = 65536});
  auto first = all.node.pool().ask(all.chain, 0).value();
  first.wait_for_answers();
  first.fetch(200);
  first.wait();
  CHECK(first.end().blocks == 50);
  CHECK(all.node.pool().stats().read_blocks == 50);
  auto stopped = all.node.pool().ask(all.chain, 200, 300'000'000).value();
  auto killed = all.node.pool().ask(all.chain, 300).value();
  stopped.wait_for_answers();
  killed.wait_for_answers();
  all.owner.send(SIGSTOP);
  stopped.fetch(300);
  CHECK_FALSE(stopped.has_arrived());
  stopped.wait();
  CHECK(stopped.end().late_blocks == 25);
  killed.fetch();
  all.owner.kill();
  killed.wait();
  const pool::fetch_result end = killed.end();
  CHECK(end.blocks == 0);
  CHECK(end.failed_blocks + end.late_blocks == 25);
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  while (all.mover.open_reads() != 0 && std::chrono::steady_clock::now() < limit)
    all.node.step();
  CHECK(all.mover.open_reads() == 0);  // given-up reads left their buffers when UCX had ended them
  CHECK(all.node.wrong() == "");
}

TEST_CASE("a lane that is not the claimed one is refused, and the blocks come by message") {
  ucx_options other = options_of(ucx_lane::shared_memory);
  other.transports = "tcp,self";
  memory_cluster<ucx_mover> nodes(2, 64, other);
  CHECK(nodes.all[0]->pool().stats().refused_introductions != 0);
  CHECK(nodes.movers[0]->why().code == errc::mover_lane_differs);
  CHECK(
      nodes.movers[0]->why().message() ==
      "ucx_mover: UCX uses tcp: this is not the lane to seat 1 that the mover claims, so its blocks come by "
      "message; set ucx_options::lane to what UCX can use between the two");
  const auto prompt = prompt_of(1, 100);
  nodes.serve(0, prompt);
  CHECK(nodes.serve(1, prompt).loaded == 96);
  CHECK(nodes.all[1]->pool().stats().read_blocks == 0);
  CHECK(nodes.all[0]->pool().stats().served_blocks == 25);
}

TEST_CASE("reads by get bring right blocks, more of them than landing buffers") {
  ucx_options options = options_of(ucx_lane::tcp);
  options.max_reads = 3;
  memory_cluster<ucx_mover> nodes(2, 64, options);
  const auto prompt = prompt_of(1, 100);
  nodes.serve(0, prompt);
  CHECK(nodes.serve(1, prompt).loaded == 96);
  CHECK(nodes.all[1]->pool().stats().read_blocks == 25);
  CHECK(nodes.all[0]->pool().stats().served_blocks == 0);

  // The owner withdraws blocks while they are on their way: right bytes, or a miss that a message mends.
  nodes.serve(0, prompt_of(2, 100));
  const kv_chain chain(nodes.all[1]->cache(), prompt_of(2, 100));
  auto request = nodes.all[1]->pool().ask(chain, 0).value();
  nodes.settle();
  request.fetch();
  for (int i = 0; i < 4; ++i) {
    nodes.all[1]->step();
    nodes.all[0]->step();
  }
  nodes.all[0]->tiers().clear();
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  while (!request.has_arrived() && std::chrono::steady_clock::now() < limit)
    nodes.settle();
  CHECK(request.has_arrived());
  const pool::fetch_result came = request.end();
  CHECK(came.failed_blocks > 0);
  CHECK(came.blocks + came.failed_blocks == 25);
  nodes.serve(1, prompt_of(2, 100));
}

TEST_CASE("damage that a read by UCX finds is reported, and the lower tier's copy comes by message") {
  for (const ucx_lane lane : {ucx_lane::tcp, ucx_lane::shared_memory}) {
    memory_cluster<ucx_mover> nodes(2, 64, options_of(lane));
    const auto prompt = prompt_of(1, 100);
    nodes.serve(0, prompt);
    const kv_chain chain(nodes.all[0]->cache(), prompt);
    const auto held = nodes.all[0]->tiers().hold(0, chain.keys()[7]);
    REQUIRE(held);
    nodes.all[0]->tiers().bytes_of(*held)[1] ^= std::byte{1};
    nodes.all[0]->tiers().release(*held);
    CHECK(nodes.serve(1, prompt).loaded == 96);
    CHECK(nodes.all[1]->pool().stats().read_blocks == 24);
    CHECK(nodes.all[1]->pool().stats().damaged_blocks == 1);
    CHECK(nodes.all[1]->pool().stats().reported_blocks == 1);
    CHECK(nodes.all[0]->pool().stats().dropped_blocks == 1);
    CHECK(nodes.all[0]->pool().stats().served_blocks == 1);
  }
}

TEST_CASE("a read that was given up writes nothing, and its buffer is free again") {
  ucx_options options = options_of(ucx_lane::tcp);
  options.max_reads = 1;
  ucx_mover owner(options);
  ucx_mover reader(options);
  const auto range = owner.space().try_allocate(1000, 64).value();
  std::fill_n(range.data, 1000, std::byte{7});
  const block_key name{.low = 1, .high = 2};
  CHECK(owner.offer(name, range.span(), crc32c(0, range.span())));
  REQUIRE(reader.attach(seat_id{0}, owner.introduction()).has_value());
  std::vector<std::byte> into(1000);
  const auto run = [&](bool is_dropped) {
    pool::moved out = reader.fetch(seat_id{0}, name, into, {.request = 1, .part = 2});
    CHECK(out == pool::moved::begun);
    CHECK(reader.fetch(seat_id{0}, name, into, {.request = 1, .part = 3}) == pool::moved::busy);
    if (is_dropped) reader.drop({.request = 1, .part = 2});
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    while (reader.open_reads() != 0 && std::chrono::steady_clock::now() < limit) {
      owner.progress([](const pool::move_ticket&, pool::moved) noexcept {});
      reader.progress([&](const pool::move_ticket&, pool::moved how) noexcept { out = how; });
    }
    CHECK(reader.open_reads() == 0);
    return out;
  };
  CHECK(run(true) == pool::moved::begun);  // nothing is reported
  CHECK(into == std::vector<std::byte>(1000));
  CHECK(run(false) == pool::moved::here);
  CHECK(into == std::vector<std::byte>(1000, std::byte{7}));
  range.data[3] = std::byte{8};  // the index does not know
  CHECK(run(false) == pool::moved::damaged);
  owner.withdraw(name);
  CHECK(run(false) == pool::moved::absent);
  owner.space().deallocate(range);
}

TEST_CASE("an introduction that is forged reaches no memory") {
  const ucx_options options = options_of(ucx_lane::shared_memory);
  ucx_mover mine(options);
  ucx_mover other(options);
  const std::vector<std::byte> right(other.introduction().begin(), other.introduction().end());
  CHECK(mine.attach(seat_id{1}, right).has_value());
  CHECK(mine.reaches(seat_id{1}));
  for (std::size_t i = 0; i < right.size(); ++i) {
    std::vector<std::byte> bad = right;
    bad[i] ^= std::byte{0x41};
    mine.detach(seat_id{1});
    CAPTURE(i);
    if (i >= 68 && i < 72) continue;  // padding
    CHECK_FALSE(mine.attach(seat_id{1}, bad).has_value());
    CHECK_FALSE(mine.reaches(seat_id{1}));
  }
  CHECK_FALSE(mine.attach(seat_id{1}, std::span(right).first(40)).has_value());
  CHECK_FALSE(mine.attach(seat_id{1}, std::span(right).first(right.size() - 1)).has_value());
  CHECK(mine.attach(seat_id{1}, right).has_value());
}

TEST_CASE("a pointer that another process's number led to is followed only where all of it can be read") {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  auto* const data =
      static_cast<std::byte*>(::mmap(nullptr, 4 * page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  REQUIRE(data != MAP_FAILED);
  CHECK(detail::is_readable(data, 4 * page));
  REQUIRE(::mprotect(data + 2 * page, page, PROT_NONE) == 0);
  CHECK(detail::is_readable(data, 2 * page));
  CHECK_FALSE(detail::is_readable(data, 2 * page + 1));
  CHECK_FALSE(detail::is_readable(data + 2 * page, 1));
  CHECK(detail::is_readable(data + 3 * page + 5, page - 5));
  REQUIRE(::munmap(data, 4 * page) == 0);
  CHECK_FALSE(detail::is_readable(data, 1));
  CHECK_FALSE(detail::is_readable(data, ~std::uint64_t{0}));
}

TEST_CASE("sizes of zero are refused") {
  CHECK_THROWS_WITH_AS(
      ucx_mover({.bytes = 0, .blocks = 4}),
      "ucx_mover: 0 bytes for 4 blocks of 0, 8 reads; all must be at least 1, and below 2^48 "
      "bytes and 2^39 blocks",
      length_error);
  CHECK_THROWS_AS(ucx_mover({.bytes = 4096, .blocks = 4, .lane = ucx_lane::tcp}), length_error);
}

#endif
