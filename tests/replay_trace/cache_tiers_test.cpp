#include "replay_trace/cache_tiers.hpp"

#include <llmmem/model/presets.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "replay_trace/first_token.hpp"
#include "replay_trace/generator.hpp"
#include "replay_trace/paged_replay.hpp"
#include "support/temporary_folder.hpp"

using namespace replay_trace;

TEST_CASE("with tiers for every block, a small cache has the hits of an unlimited one") {
  const trace from = generate_trace({});
  const auto nothing = [](std::uint64_t) {};
  const replay_result all = replay(from, {.policy = "lru"}, nothing);
  const std::uint64_t distinct = distinct_blocks(from);
  for (const char* policy : {"lru", "s3fifo", "min"}) {
    CAPTURE(policy);
    const replay_result got = replay(from,
                                     {.policy = policy,
                                      .capacity_blocks = 200,
                                      .tiers = tier_blocks{.host = distinct / 10, .nvme = distinct}},
                                     nothing);
    CHECK(got.hits + got.host_hits + got.nvme_hits == all.hits);
    const tokens_by_tier& tokens = *got.tiers;
    CHECK(tokens.hbm == got.matched_tokens);
    CHECK(tokens.hbm + tokens.host + tokens.nvme == all.matched_tokens);
    CHECK(tokens.hbm + tokens.host + tokens.nvme + tokens.computed == got.input_tokens);
    CHECK(got.nvme_hits != 0);
  }
}

TEST_CASE("blocks of any size have the same hits in memory and in a file, and each is verified") {
  const trace from = generate_trace({.requests = 1500});
  const auto nothing = [](std::uint64_t) {};
  const llmmem_tests::temporary_folder folder;
  const auto run = [&](tier_blocks tiers) {
    return replay(from, {.policy = "lru", .capacity_blocks = 200, .tiers = tiers}, nothing);
  };
  const replay_result small = run({.host = 300, .nvme = 2000});
  CHECK(small.host_hits != 0);
  CHECK(small.nvme_hits != 0);
  CHECK(small.verified_blocks == small.host_hits + small.nvme_hits);
  for (const replay_result& other :
       {run({.host = 300, .nvme = 2000, .block_bytes = 1000}),
        run({.host = 300, .nvme = 2000, .block_bytes = 4096, .folder = folder.file("")})}) {
    CHECK(other.hits == small.hits);
    CHECK(other.host_hits + other.nvme_hits == small.host_hits + small.nvme_hits);
    CHECK(other.host_hits == small.host_hits);
    CHECK(other.verified_blocks == small.verified_blocks);
  }
}

TEST_CASE("a first token takes the time of its bytes and operations") {
  replay_result result;
  result.requests = 2;
  result.input_tokens = 1000;
  result.tiers = tokens_by_tier{.hbm = 100, .host = 200, .nvme = 300, .computed = 400};
  const llmmem::model_shape model = llmmem::find_model("llama3-70b");
  REQUIRE(model.kv_bytes_per_token() == 327'680);
  const first_token_times times = time_to_first_token(result, model);
  CHECK(times.host_ms == doctest::Approx(100 * 327'680 / 50e9 * 1e3));
  CHECK(times.nvme_ms == doctest::Approx(150 * 327'680 / 10e9 * 1e3));
  const double per_token = 2 * static_cast<double>(model.active_parameters()) / 1e15 * 1e3;
  CHECK(times.compute_ms == doctest::Approx(200 * per_token));
  CHECK(times.without_tiers_ms == doctest::Approx(450 * per_token));
  CHECK(times.total_ms() == doctest::Approx(times.host_ms + times.nvme_ms + times.compute_ms));
}
