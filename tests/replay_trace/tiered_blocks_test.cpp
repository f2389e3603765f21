#include "replay_trace/tiered_blocks.hpp"

#include <llmmem/model/presets.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <list>
#include <optional>
#include <string>
#include <vector>

#include "replay_trace/first_token.hpp"
#include "replay_trace/generator.hpp"
#include "replay_trace/paged_replay.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace replay_trace;
using llmmem_tests::random_numbers;
using llmmem_tests::seeds;

namespace {

/// The rules, as lists: NVMe has every block, least recently used first; host copies, the same.
class two_lists {
 public:
  explicit two_lists(tier_blocks blocks) : blocks_(blocks) {}

  void offload(std::uint64_t id) {
    if (has(nvme_, id)) return to_end(nvme_, id);
    if (nvme_.size() == blocks_.nvme) {
      host_.remove(nvme_.front());
      nvme_.pop_front();
    }
    nvme_.push_back(id);
    up(id);
  }
  [[nodiscard]] tiered_blocks::found_in onboard(std::uint64_t id) {
    if (!has(nvme_, id)) return tiered_blocks::found_in::nowhere;
    const bool in_host = has(host_, id);
    to_end(nvme_, id);
    up(id);
    return in_host ? tiered_blocks::found_in::host : tiered_blocks::found_in::nvme;
  }

 private:
  [[nodiscard]] static bool has(const std::list<std::uint64_t>& in, std::uint64_t id) {
    return std::find(in.begin(), in.end(), id) != in.end();
  }
  static void to_end(std::list<std::uint64_t>& in, std::uint64_t id) {
    in.remove(id);
    in.push_back(id);
  }
  void up(std::uint64_t id) {
    to_end(host_, id);
    if (host_.size() > blocks_.host) host_.pop_front();
  }

  tier_blocks blocks_;
  std::list<std::uint64_t> host_;
  std::list<std::uint64_t> nvme_;
};

}  // namespace

TEST_CASE("blocks are found in the tiers where two lists by last use have them") {
  for (const auto seed : seeds(60)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const tier_blocks blocks{1 + random.below(20U), 1 + random.below(40U)};
    tiered_blocks tiers(blocks);
    two_lists oracle(blocks);
    for (int i = 0; i < 300; ++i) {
      const std::uint64_t id = random.below(50U);
      if (random.once_in(2)) {
        tiers.offload(llmmem::key_from_id(id));
        oracle.offload(id);
      } else {
        REQUIRE(tiers.onboard(llmmem::key_from_id(id)) == oracle.onboard(id));
      }
    }
  }
}

TEST_CASE("with room for every block beneath it, a small cache finds what an unlimited one does") {
  const trace from = generate_trace({});
  const auto nothing = [](std::uint64_t) {};
  const replay_result all = replay(from, {.policy = "lru"}, nothing);
  const std::uint64_t distinct = distinct_blocks(from);
  for (const char* policy : {"lru", "s3fifo", "min"}) {
    CAPTURE(policy);
    const replay_result got = replay(
        from, {.policy = policy, .capacity_blocks = 200, .tiers = tier_blocks{distinct / 10, distinct}},
        nothing);
    CHECK(got.hits + got.host_hits + got.nvme_hits == all.hits);
    const tokens_by_tier& tokens = *got.tiers;
    CHECK(tokens.hbm == got.matched_tokens);
    CHECK(tokens.hbm + tokens.host + tokens.nvme == all.matched_tokens);
    CHECK(tokens.hbm + tokens.host + tokens.nvme + tokens.computed == got.input_tokens);
    CHECK(got.nvme_hits != 0);
  }
}

TEST_CASE("a first token takes what its bytes and operations take") {
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
