/// @file
/// The effect of tiers below the cache on the time to the first token, by bandwidth and compute alone.
#pragma once

#include <llmmem/model/model_shape.hpp>

#include <algorithm>
#include <cstdint>

#include "replay_trace/replay.hpp"

namespace replay_trace {

/// The speeds of a report's assumed machine.
struct imagined_machine {
  double host_bytes_per_second = 50e9;  ///< PCIe 5 x16, as copies reach it
  double nvme_bytes_per_second = 10e9;  ///< four drives of PCIe 4: DeepNVMe's figure for reads
  double flops = 1e15;                  ///< of the devices that share a model
};

/// Milliseconds of a mean request before its first token, each part alone and none overlapped.
struct first_token_times {
  double host_ms = 0;           ///< to bring up the host tier's blocks
  double nvme_ms = 0;           ///< to bring up the NVMe tier's blocks
  double compute_ms = 0;        ///< to compute the tokens of no tier: two operations per parameter and token
  double without_tiers_ms = 0;  ///< to compute all tokens that the cache alone did not have

  [[nodiscard]] double total_ms() const noexcept { return host_ms + nvme_ms + compute_ms; }
};

/// @pre the result has tiers.
[[nodiscard]] inline first_token_times time_to_first_token(const replay_result& result,
                                                           const llmmem::model_shape& model,
                                                           const imagined_machine& machine = {}) {
  const double requests = static_cast<double>(std::max<std::uint64_t>(result.requests, 1));
  const double kv_bytes = static_cast<double>(model.kv_bytes_per_token());
  const double operations = 2 * static_cast<double>(model.active_parameters());
  const auto load = [&](std::uint64_t tokens, double bytes_per_second) {
    return static_cast<double>(tokens) * kv_bytes / bytes_per_second * 1e3 / requests;
  };
  const auto compute = [&](std::uint64_t tokens) {
    return static_cast<double>(tokens) * operations / machine.flops * 1e3 / requests;
  };
  return {.host_ms = load(result.tiers->host, machine.host_bytes_per_second),
          .nvme_ms = load(result.tiers->nvme, machine.nvme_bytes_per_second),
          .compute_ms = compute(result.tiers->computed),
          .without_tiers_ms = compute(result.input_tokens - result.tiers->hbm)};
}

}  // namespace replay_trace
