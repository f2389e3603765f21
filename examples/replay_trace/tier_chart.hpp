/// @file
/// Hit ratio against bytes for a cache and the tiers below it, as a picture.
#pragma once

#include <llmmem/model/model_shape.hpp>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "replay_trace/chart.hpp"
#include "replay_trace/replay.hpp"
#include "replay_trace/tier_blocks.hpp"

namespace replay_trace {

/// A cache and its tiers at one of the sizes that a picture shows.
struct tier_budget {
  std::uint64_t hbm = 0;  ///< blocks
  tier_blocks below{};
};

/// Returns an eighth to eight times the given sizes, by factors of two, of which the cache must hold `least`
/// blocks.
[[nodiscard]] inline std::vector<tier_budget> tier_budgets(std::uint64_t hbm, const tier_blocks& below,
                                                           std::uint64_t least) {
  std::vector<tier_budget> out;
  for (const std::uint64_t eighths : {1U, 2U, 4U, 8U, 16U, 32U, 64U}) {
    const auto scaled = [&](std::uint64_t blocks) {
      return std::max<std::uint64_t>(blocks * eighths / 8, 1);
    };
    tier_budget each{.hbm = scaled(hbm), .below = below};
    each.below.host = scaled(below.host);
    each.below.nvme = scaled(below.nvme);
    if (each.hbm >= least || eighths == 8) out.push_back(each);
  }
  return out;
}

/// Draws three lines: hits in the cache, in it and host memory, and in all tiers, each against the bytes of
/// these together.
/// @param results  one of each budget.
[[nodiscard]] inline hit_ratio_chart tier_chart(const std::vector<tier_budget>& budgets,
                                                const std::vector<replay_result>& results,
                                                const llmmem::model_shape& model) {
  hit_ratio_chart chart{"Block hit ratio by bytes of KV, " + results.front().policy,
                        {{"hbm", {}}, {"hbm and host", {}}, {"all tiers", {}}},
                        {}};
  chart.axis = "bytes of the tiers together (" + std::string(model.name) + ", logarithmic)";
  for (std::size_t i = 0; i < budgets.size(); ++i) {
    const replay_result& of = results[i];
    const double block =
        static_cast<double>(of.block_tokens) * static_cast<double>(model.kv_bytes_per_token());
    const double refs = static_cast<double>(std::max<std::uint64_t>(of.block_refs, 1));
    const std::uint64_t blocks[] = {budgets[i].hbm, budgets[i].below.host, budgets[i].below.nvme};
    const std::uint64_t hits[] = {of.hits, of.host_hits, of.nvme_hits};
    std::uint64_t held = 0;
    std::uint64_t found = 0;
    for (std::size_t tier = 0; tier < 3; ++tier) {
      held += blocks[tier];
      found += hits[tier];
      const double bytes = std::min(static_cast<double>(held) * block, 9e18);
      chart.series[tier].points.push_back(
          {static_cast<std::uint64_t>(bytes), static_cast<double>(found) / refs});
    }
  }
  return chart;
}

}  // namespace replay_trace
