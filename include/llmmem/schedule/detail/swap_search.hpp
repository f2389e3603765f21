/// @file
/// The exact search behind `min_comm_partition`; see there for what is meant.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/schedule/detail/nanoseconds.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace llmmem::inline v0::detail {

/// One stage, or the worst in each respect of the stages of a wave.
struct stage_peaks {
  std::uint64_t forward_ns = 0;
  std::uint64_t backward_ns = 0;
  std::uint64_t bytes = 0;

  [[nodiscard]] constexpr stage_peaks with(const stage_peaks& other) const noexcept {
    return {.forward_ns = std::max(forward_ns, other.forward_ns),
            .backward_ns = std::max(backward_ns, other.backward_ns),
            .bytes = std::max(bytes, other.bytes)};
  }
  [[nodiscard]] constexpr bool within(const stage_peaks& other) const noexcept {
    return forward_ns <= other.forward_ns && backward_ns <= other.backward_ns && bytes <= other.bytes;
  }
};

/// Layers as sums up to each, so that a run of them is a difference. All sums are known to fit.
struct swap_problem {
  std::uint64_t devices = 0;
  std::uint64_t device_bytes = 0;
  std::uint64_t micro_batches = 0;
  std::uint64_t bytes_per_second = 0;
  std::uint64_t latency_ns = 0;
  std::vector<std::uint64_t> parameter_bytes{0};
  std::vector<std::uint64_t> forward_ns{0};
  std::vector<std::uint64_t> backward_ns{0};
  std::vector<std::uint64_t> input_bytes{};  // of each layer, all micro-batches

  [[nodiscard]] std::size_t layers() const noexcept { return input_bytes.size(); }

  [[nodiscard]] stage_peaks stage(std::size_t first, std::size_t end) const noexcept {
    return {.forward_ns = forward_ns[end] - forward_ns[first],
            .backward_ns = backward_ns[end] - backward_ns[first],
            .bytes = parameter_bytes[end] - parameter_bytes[first] + input_bytes[first]};
  }
  [[nodiscard]] std::uint64_t load_ns(std::uint64_t bytes) const {
    return link_ns(bytes, bytes_per_second, latency_ns, "min_comm_partition");
  }
  [[nodiscard]] std::uint64_t wave_forward_ns(std::size_t first, std::size_t end,
                                              const stage_peaks& peaks) const noexcept {
    return forward_ns[end] - forward_ns[first] + (micro_batches - 1) * peaks.forward_ns;
  }
  [[nodiscard]] std::uint64_t wave_backward_ns(std::size_t first, std::size_t end,
                                               const stage_peaks& peaks) const noexcept {
    return backward_ns[end] - backward_ns[first] + (micro_batches - 1) * peaks.backward_ns;
  }

  // The step as a sum over its waves; the forward pass of the last one is added at the end.
  [[nodiscard]] std::uint64_t first_ns(std::uint64_t load, std::uint64_t backward) const noexcept {
    return load + std::max(backward, load);
  }
  [[nodiscard]] std::uint64_t next_ns(std::uint64_t load_before, std::uint64_t forward_before,
                                      std::uint64_t load, std::uint64_t backward,
                                      bool prefetched) const noexcept {
    return prefetched ? std::max(forward_before, load) + std::max({backward, load, load_before})
                      : forward_before + load + std::max(backward, load) + load_before;
  }
};

/// Adds `peaks` to ways of which none is within another, unless one there is within it.
inline void keep_unbeaten(std::vector<stage_peaks>& ways, const stage_peaks& peaks) {
  for (const stage_peaks& way : ways) {
    if (way.within(peaks)) return;
  }
  std::erase_if(ways, [&](const stage_peaks& way) { return peaks.within(way); });
  ways.push_back(peaks);
}

/// For each end, the unbeaten ways to cut layers `first` up to there into at most as many stages as there are
/// devices, each no larger than a device.
[[nodiscard]] inline std::vector<std::vector<stage_peaks>> unbeaten_waves(const swap_problem& problem,
                                                                          std::size_t first) {
  const std::size_t layers = problem.layers();
  std::vector<std::vector<stage_peaks>> ways(layers + 1);
  for (std::size_t end = first + 1; end <= layers; ++end) {
    const auto stage = problem.stage(first, end);
    if (stage.bytes <= problem.device_bytes) ways[end].push_back(stage);
  }
  for (std::uint64_t stages = 2; stages <= std::min<std::uint64_t>(problem.devices, layers - first);
       ++stages) {
    auto more = ways;
    for (std::size_t cut = first + 1; cut < layers; ++cut) {
      if (ways[cut].empty()) continue;
      for (std::size_t end = cut + 1; end <= layers; ++end) {
        const auto stage = problem.stage(cut, end);
        if (stage.bytes > problem.device_bytes) break;
        for (const stage_peaks& way : ways[cut])
          keep_unbeaten(more[end], way.with(stage));
      }
    }
    ways = std::move(more);
  }
  return ways;
}

/// The ends of the fewest stages that cut layers `first` to `end` with none worse than `peaks`.
/// @pre there are such stages.
[[nodiscard]] inline std::vector<std::size_t> stage_ends(const swap_problem& problem, std::size_t first,
                                                         std::size_t end, const stage_peaks& peaks) {
  struct step {
    std::size_t stages = 0;  // 0: cannot be reached
    std::size_t from = 0;
  };
  std::vector<step> reached(end - first + 1);
  for (std::size_t cut = first; cut < end; ++cut) {
    if (cut != first && reached[cut - first].stages == 0) continue;
    for (std::size_t to = cut + 1; to <= end; ++to) {
      if (!problem.stage(cut, to).within(peaks)) break;
      step& there = reached[to - first];
      const std::size_t stages = reached[cut - first].stages + 1;
      if (there.stages == 0 || stages < there.stages) there = {.stages = stages, .from = cut};
    }
  }
  std::vector<std::size_t> ends;
  for (std::size_t at = end; at != first; at = reached[at - first].from)
    ends.push_back(at);
  std::reverse(ends.begin(), ends.end());
  return ends;
}

/// Ends of the stages of each wave, of a plan with the shortest step.
[[nodiscard]] inline std::vector<std::vector<std::size_t>> best_waves(const swap_problem& problem) {
  struct plan_so_far {
    std::uint64_t step_ns = 0;
    std::uint64_t forward_ns = 0;  // of the last wave
    std::uint64_t load_ns = 0;     // of the last wave
    stage_peaks peaks{};           // of the last wave
    std::size_t first = 0;         // where that begins
    std::size_t before = 0;        // which plan, of those that end there, it goes on
  };
  const std::size_t layers = problem.layers();
  std::vector<std::vector<plan_so_far>> plans(layers + 1);
  const auto keep = [&plans](std::size_t end, const plan_so_far& plan) {
    const auto beats = [](const plan_so_far& a, const plan_so_far& b) {
      return a.step_ns <= b.step_ns && a.forward_ns <= b.forward_ns && a.peaks.bytes <= b.peaks.bytes;
    };
    for (const plan_so_far& other : plans[end]) {
      if (beats(other, plan)) return;
    }
    std::erase_if(plans[end], [&](const plan_so_far& other) { return beats(plan, other); });
    plans[end].push_back(plan);
  };
  for (std::size_t first = 0; first < layers; ++first) {
    if (first > 0 && plans[first].empty()) continue;
    const auto ways = unbeaten_waves(problem, first);
    for (std::size_t end = first + 1; end <= layers; ++end) {
      for (const stage_peaks& peaks : ways[end]) {
        const std::uint64_t load = problem.load_ns(peaks.bytes);
        const std::uint64_t backward = problem.wave_backward_ns(first, end, peaks);
        plan_so_far plan{.forward_ns = problem.wave_forward_ns(first, end, peaks),
                         .load_ns = load,
                         .peaks = peaks,
                         .first = first};
        if (first == 0) {
          plan.step_ns = problem.first_ns(load, backward);
          keep(end, plan);
        }
        for (std::size_t i = 0; i < plans[first].size(); ++i) {
          const plan_so_far& before = plans[first][i];
          const bool prefetched = peaks.bytes <= problem.device_bytes - before.peaks.bytes;
          plan.step_ns =
              before.step_ns + problem.next_ns(before.load_ns, before.forward_ns, load, backward, prefetched);
          plan.before = i;
          keep(end, plan);
        }
      }
    }
  }
  std::size_t at = 0;
  for (std::size_t i = 1; i < plans[layers].size(); ++i) {
    const auto total = [](const plan_so_far& plan) { return plan.step_ns + plan.forward_ns; };
    if (total(plans[layers][i]) < total(plans[layers][at])) at = i;
  }
  std::vector<std::vector<std::size_t>> waves;
  for (std::size_t end = layers; end != 0;) {
    const plan_so_far& plan = plans[end][at];
    waves.push_back(stage_ends(problem, plan.first, end, plan.peaks));
    end = plan.first;
    at = plan.before;
  }
  std::reverse(waves.begin(), waves.end());
  return waves;
}

}  // namespace llmmem::inline v0::detail
