/// @file
/// Replay results as JSON.
#pragma once

#include <llmmem/model/model_shape.hpp>

#include <fmt/format.h>

#include <cmath>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "common/text.hpp"
#include "replay_trace/first_token.hpp"
#include "replay_trace/replay.hpp"

namespace replay_trace {

/// The shortest digits that read back as the same double; `null` for nothing, infinities and NaN.
[[nodiscard]] inline std::string json_number(std::optional<double> value) {
  return value && std::isfinite(*value) ? fmt::format("{}", *value) : "null";
}

/// One result as an object on one line. Figures that do not exist (a ratio of no references) are `null`.
/// `capacity_blocks` is always a number: for an unlimited replay, the blocks that it held at the end.
[[nodiscard]] inline std::string to_json(std::string_view trace_name, const replay_result& result,
                                         const llmmem::model_shape& model) {
  std::string tiers;
  if (result.tiers) {
    const first_token_times times = time_to_first_token(result, model);
    tiers = fmt::format(
        R"(, "hits_by_tier": {{"hbm": {}, "host": {}, "nvme": {}}}, "first_token_ms": {{"host": {}, )"
        R"("nvme": {}, "compute": {}, "without_tiers": {}}}, "bytes_by_tier": {{"host": {}, "nvme": {}}}, )"
        R"("verified_blocks": {})",
        result.hits, result.host_hits, result.nvme_hits, json_number(times.host_ms),
        json_number(times.nvme_ms), json_number(times.compute_ms), json_number(times.without_tiers_ms),
        result.host_hits * result.block_bytes, result.nvme_hits * result.block_bytes, result.verified_blocks);
  }
  if (result.pool) {
    const std::uint64_t all = result.hits + result.host_hits + result.nvme_hits + result.pool->peer_hits;
    tiers += fmt::format(
        R"(, "pool": {{"nodes": {}, "peer_hits": {}, "all_hits": {}, "local_hits": {}, "bytes_from_peers": {}, )"
        R"("asked_spans": {}, "told_messages": {}, "directory_spans": {}}})",
        result.pool->nodes, result.pool->peer_hits, all, result.pool->local_hits,
        result.pool->peer_hits * result.block_bytes, result.pool->asked_spans, result.pool->posted_messages,
        result.pool->directory_spans);
  }
  return fmt::format(
      R"({{"trace": {}, "requests": {}, "block_refs": {}, "hits": {}, "hit_ratio": {}, "capacity_blocks": {}, )"
      R"("policy": {}, "evictions": {}, "useful_over_reserved": {}, "ns_per_block_ref": {}, )"
      R"("peak_metadata_bytes": {}{}}})",
      example::json_string(trace_name), result.requests, result.block_refs, result.hits,
      json_number(result.hit_ratio()), result.capacity_blocks, example::json_string(result.policy),
      result.evictions, json_number(result.useful_over_reserved()), json_number(result.ns_per_block_ref()),
      result.peak_metadata_bytes, tiers);
}

/// Results as an array, one object per line.
[[nodiscard]] inline std::string to_json(std::string_view trace_name, std::span<const replay_result> results,
                                         const llmmem::model_shape& model) {
  std::string out = "[";
  for (std::size_t i = 0; i < results.size(); ++i) {
    out += i == 0 ? "\n  " : ",\n  ";
    out += to_json(trace_name, results[i], model);
  }
  return out + "\n]";
}

}  // namespace replay_trace
