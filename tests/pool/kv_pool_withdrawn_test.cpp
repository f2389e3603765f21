/// Requests that end while a block is half here, over sockets.
#include <llmmem/pool/kv_pool.hpp>

#include <doctest/doctest.h>
#include <llmmem/comm/socket_endpoint.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "pool/pool_node.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

using node_type = pool_node<paged_allocator<pooled_traits>, socket_endpoint>;

// A block of 1 MiB, of which the sockets hold a part.
constexpr std::uint32_t block_tokens = 65536;
const std::array large_group{full_attention({"kv", 1, 16, block_tokens})};

std::vector<token_id> prompt_of(token_id first, std::size_t blocks = 1) {
  std::vector<token_id> out(blocks * block_tokens + 1);
  std::iota(out.begin(), out.end(), first);
  return out;
}

socket_options options_of(const std::string& folder, std::uint32_t seat) {
  return {.seat = seat_id{seat}, .seats = 2, .folder = folder, .socket_bytes = 65536};
}

}  // namespace

TEST_CASE(
    "bytes that arrive after a request has ended do not reach the slot, which then belongs to another "
    "block") {
  const temporary_folder folder;
  socket_endpoint one(options_of(folder.path(), 0));
  socket_endpoint other(options_of(folder.path(), 1));
  const node_form form{
      .groups = large_group, .blocks = 4, .slots = 1, .lower_slots = 1, .tokens = 2 * block_tokens};
  node_type holder(one, form, {.send_ns = 2'000'000, .slow_ns = 1});
  node_type asker(other, form, {});
  for (int i = 0; i < 2000 && (holder.pool().peers() == 0 || asker.pool().peers() == 0); ++i) {
    holder.step();
    asker.step();
  }
  REQUIRE(asker.pool().peers() == 1);
  const auto prompt = prompt_of(1);
  holder.serve(prompt, [](auto&) {});

  const kv_chain chain(asker.cache(), prompt);
  // What the holder publishes is on its way for a while.
  const auto ask = [&] {
    auto asked = asker.pool().ask(chain, 0, ~std::uint64_t{0}).value();
    for (int i = 0; i < 2000 && asked.where().elsewhere == 0; ++i) {
      asker.step();
      holder.step();
      if (asked.where().next != offload::answer::miss) continue;
      asked.end();
      asked = asker.pool().ask(chain, 0, ~std::uint64_t{0}).value();
    }
    REQUIRE(asked.where().elsewhere == 1);
    return asked;
  };
  auto request = ask();
  for (int attempt = 0; attempt < 100; ++attempt) {
    request.fetch();
    for (int i = 0; i < 20; ++i)
      holder.step();  // its send fills the sockets, and gives up waiting
    asker.pool().progress();
    if (!request.has_arrived()) break;
    request.end();  // the word that the send gave up has come already, before the request could end
    request = ask();
  }
  REQUIRE(!request.has_arrived());
  CHECK(request.end().late_blocks == 1);

  // The slot is the next block's: what is still on its way must not be written to it.
  const auto mine = asker.tiers().begin_arrival(0, block_key{.low = 1, .high = 2}, 0);
  REQUIRE(mine);
  const auto bytes = asker.tiers().bytes_of(*mine);
  std::fill(bytes.begin(), bytes.end(), std::byte{0xA5});
  for (int i = 0; i < 400; ++i) {
    holder.step();
    asker.pool().progress();
  }
  CHECK(std::all_of(bytes.begin(), bytes.end(), [](std::byte each) { return each == std::byte{0xA5}; }));
  asker.tiers().end_arrival(*mine, false);

  // The connection is in order: the same block comes whole. One thread drives both nodes, so that a send
  // times out while its frame still goes; the word that says so may arrive before the frame does, and the
  // block is asked for again.
  std::uint64_t arrived = 0;
  for (int attempt = 0; attempt < 1000 && arrived == 0; ++attempt) {
    auto again = asker.pool().ask(chain, 0, ~std::uint64_t{0}).value();
    while (again.where().next == offload::answer::pending) {
      asker.step();
      holder.step();
    }
    again.fetch();
    while (!again.has_arrived()) {
      holder.pool().progress();
      asker.pool().progress();
    }
    arrived = again.end().blocks;
  }
  CHECK(arrived == 1);
  const served_request came = asker.serve(prompt, [](auto&) {});
  CHECK(came.loaded == block_tokens);
  CHECK(asker.wrong() == "");
}

TEST_CASE("a node that computes between two looks gets every block, though sends to it time out") {
  const temporary_folder folder;
  socket_options first = options_of(folder.path(), 0);
  socket_options second = options_of(folder.path(), 1);
  SUBCASE("blocks of one frame") {}
  SUBCASE("blocks of many frames") {
    first.frame_bytes = second.frame_bytes = 65536;
  }
  socket_endpoint one(first);
  socket_endpoint other(second);
  constexpr std::size_t blocks = 6;
  const node_form form{.groups = large_group,
                       .blocks = blocks + 1,
                       .slots = 2 * blocks,
                       .lower_slots = 2 * blocks,
                       .tokens = (blocks + 1) * block_tokens};
  node_type holder(one, form, {.send_ns = 1'000'000});
  node_type asker(other, form, {});
  for (int i = 0; i < 2000 && (holder.pool().peers() == 0 || asker.pool().peers() == 0); ++i) {
    holder.step();
    asker.step();
  }
  REQUIRE(asker.pool().peers() == 1);
  const auto prompt = prompt_of(1, blocks);
  holder.serve(prompt, [](auto&) {});
  const kv_chain chain(asker.cache(), prompt);
  auto request = asker.pool().ask(chain, 0, ~std::uint64_t{0}).value();
  for (int i = 0; i < 2000 && request.where().elsewhere != blocks; ++i) {
    asker.step();
    holder.step();
    if (request.where().next != offload::answer::miss) continue;
    request.end();
    request = asker.pool().ask(chain, 0, ~std::uint64_t{0}).value();
  }
  REQUIRE(request.where().elsewhere == blocks);
  request.fetch();
  for (int i = 0; i < 10'000 && !request.has_arrived(); ++i) {
    holder.step();  // while the asker computes
    holder.step();
    asker.pool().progress();
  }
  const pool::fetch_result came = request.end();
  CHECK(came.blocks == blocks);
  CHECK(came.failed_blocks == 0);
  CHECK(came.late_blocks == 0);
  CHECK(holder.pool().stats().served_blocks == blocks);
  const served_request loaded = asker.serve(prompt, [](auto&) {});
  CHECK(loaded.loaded == blocks * block_tokens);
  CHECK(asker.wrong() == "");
}
