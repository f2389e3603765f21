// A trace served by several nodes, alone and as one pool.
#include <doctest/doctest.h>

#include <cstdint>

#include "replay_trace/generator.hpp"
#include "replay_trace/paged_replay.hpp"
#include "support/temporary_folder.hpp"

using namespace replay_trace;

namespace {

replay_result replay_pool(const trace& from, const tier_blocks& tiers, std::uint64_t capacity) {
  replay_options options{.capacity_blocks = capacity};
  options.tiers = tiers;
  return replay(from, options, [](std::uint64_t) {});
}

std::uint64_t all_hits(const replay_result& of) {
  return of.hits + of.host_hits + of.nvme_hits + of.pool->peer_hits;
}

}  // namespace

TEST_CASE("a pool with space for everything has the hits of one unlimited cache, for any number of nodes") {
  const trace from = generate_trace({.requests = 600});
  const std::uint64_t ceiling = replay(from, {}, [](std::uint64_t) {}).hits;
  for (const std::uint32_t nodes : {2U, 3U, 7U}) {
    const replay_result found = replay_pool(from, {.host = 20'000, .nvme = 1, .nodes = nodes}, 64);
    CHECK(all_hits(found) == ceiling);
    CHECK(found.pool->local_hits < ceiling);
    CHECK(found.pool->peer_hits > 0);
    CHECK(found.verified_blocks == all_hits(found) - found.hits);
    CHECK(found.tiers->hbm + found.tiers->host + found.tiers->nvme + found.pool->peer_tokens +
              found.tiers->computed ==
          from.input_tokens());
  }
}

TEST_CASE("a small pool has more hits than its nodes separately, also on a file") {
  const trace from = generate_trace({.requests = 600});
  const llmmem_tests::temporary_folder folder;
  const tier_blocks tiers{.host = 200, .nvme = 600, .block_bytes = 64, .nodes = 3};
  const replay_result found = replay_pool(from, tiers, 64);
  CHECK(all_hits(found) > found.pool->local_hits);
  tier_blocks on_file = tiers;
  on_file.folder = folder.path();
  const replay_result filed = replay_pool(from, on_file, 64);
  CHECK(filed.verified_blocks == all_hits(filed) - filed.hits);
  CHECK(all_hits(filed) > filed.pool->local_hits);
}
