/// Pools whose reads of each other's memory end in every way, in any order, also after their request has
/// ended.
#include <llmmem/pool/kv_pool.hpp>
#include <llmmem/pool/shared_memory_mover.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "pool/memory_nodes.hpp"
#include "pool/pool_cluster.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

/// A mover of whose reads a share ends later, or in a way that leaves no right bytes.
struct fickle_mover : shared_memory_mover {
  using shared_memory_mover::shared_memory_mover;

  pool::moved fetch(seat_id seat, const block_key& name, std::span<std::byte> into,
                    const pool::move_ticket& ticket) noexcept {
    if (random() % 100 >= share) return shared_memory_mover::fetch(seat, name, into, ticket);
    if (random() % 3 != 0) return failed();
    open.push_back({ticket, seat, name, into});
    return pool::moved::begun;
  }
  void drop(const pool::move_ticket& ticket) noexcept {
    std::erase_if(open, [&](const begun_read& each) { return each.ticket == ticket; });
  }
  template <class F>
  void progress(F&& on_end) noexcept {
    shared_memory_mover::progress(on_end);
    for (std::size_t i = 0; i < open.size();) {
      if (random() % 2 == 0) {
        ++i;
        continue;
      }
      const begun_read each = open[i];
      open.erase(open.begin() + static_cast<std::ptrdiff_t>(i));
      const bool is_right = random() % 2 == 0;
      on_end(each.ticket,
             is_right ? shared_memory_mover::fetch(each.seat, each.name, each.into, each.ticket) : failed());
    }
  }
  pool::moved failed() noexcept {
    constexpr std::array all{pool::moved::changed, pool::moved::absent, pool::moved::busy,
                             pool::moved::unreached, pool::moved::damaged};
    return all[random() % all.size()];
  }

  struct begun_read {
    pool::move_ticket ticket;
    seat_id seat;
    block_key name;
    std::span<std::byte> into;
  };
  std::vector<begun_read> open;
  std::minstd_rand random{1};
  std::uint64_t share = 0;  // percent
};

using fickle_cluster = memory_cluster<fickle_mover>;

/// Flips a bit of a block in a node's first tier, if it is there with a checksum.
void damage(fickle_cluster::node& of, const block_key& key) {
  const auto held = of.tiers().hold(0, key);
  if (!held) return;
  if (of.tiers().checksum_of(*held)) of.tiers().bytes_of(*held)[3] ^= std::byte{1};
  of.tiers().release(*held);
}

/// Asks for a prompt's blocks, and ends the request after a few steps.
void give_up(fickle_cluster& nodes, std::size_t at, std::span<const token_id> prompt,
             std::minstd_rand& random) {
  auto& node = *nodes.all[at];
  const kv_chain chain(node.cache(), prompt);
  auto request = node.pool().ask(chain, 0).value();
  nodes.settle(static_cast<int>(random() % 6));
  request.fetch();
  nodes.settle(static_cast<int>(random() % 6));
  static_cast<void>(request.end());
  CHECK(nodes.movers[at]->open.empty());  // the slots may have other contents from now on
}

}  // namespace

TEST_CASE("reads that end in any way and order leave no slot taken, no read counted and no token wrong") {
  std::uint64_t read = 0;
  std::uint64_t failed = 0;
  std::uint64_t dropped = 0;
  for (const auto seed : seeds(20)) {
    CAPTURE(seed);
    std::minstd_rand random(static_cast<std::minstd_rand::result_type>(seed * 7 + 1));
    const std::uint64_t slots = 4 + random() % 60;
    kv_pool_options options;
    options.max_gets = static_cast<std::uint32_t>(1 + random() % 40);
    options.serve_bytes = 64 * (1 + random() % 40);
    fickle_cluster nodes(3, slots, shared_memory_options{.bytes = std::uint64_t{1} << 20, .blocks = slots},
                         options);
    std::uint32_t families = 0;
    for (int round = 0; round < 30; ++round) {
      if (round == 0 || random() % 3 == 0) nodes.serve(0, prompt_of(++families, 100));
      for (auto& each : nodes.movers)
        each->share = random() % 3 == 0 ? 0 : random() % 100;
      const auto prompt = prompt_of(static_cast<std::uint32_t>(1 + random() % families), 20 + random() % 80);
      const std::size_t reader = 1 + random() % 2;
      const kv_chain chain(nodes.all[0]->cache(), prompt);
      if (random() % 2 == 0) damage(*nodes.all[0], chain.keys()[random() % chain.keys().size()]);
      if (random() % 3 == 0) {
        give_up(nodes, reader, prompt, random);
      } else {
        nodes.serve(reader, prompt);
      }
    }
    for (auto& each : nodes.movers)
      each->share = 0;
    nodes.settle();
    for (auto& each : nodes.all) {
      read += each->pool().stats().read_blocks;
      failed += each->pool().stats().failed_reads;
      dropped += each->pool().stats().dropped_blocks;
      CHECK(each->tiers().stats().tiers[0].in_use == 0);
      CHECK(each->tiers().audit().empty());
      CHECK(each->wrong() == "");
    }
    // A read that counted as in flight for ever would use up `max_gets`.
    const auto last = prompt_of(99, 13);
    nodes.serve(0, last);
    CHECK(nodes.serve(1, last).loaded == 12);
  }
  CHECK(read > 500);
  CHECK(failed > 500);
  CHECK(dropped > 10);
}
