/// @file
/// The exact search of `min_comm_partition`, which explains the terms.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/schedule/detail/nanoseconds.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The numbers of one stage, or the maximum of each over the stages of a wave.
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

/// Prefix sums over the layers, so that the sum over a range is a difference. All sums were checked to fit.
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

  // The step is a sum over its waves; the forward pass of the last wave is added at the end.
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

/// The time that a plan may lose compared with perfect balance and still be as fast as a known plan. Times
/// are multiplied by the number of devices G, so that all arithmetic is exact in integers.
///
/// A wave of layers that take f forward, cut into G equal stages, would take f + (m - 1) f / G. A wave whose
/// slowest stage takes x loses (m - 1) (x - f / G) compared with that. If only its first g stages are known,
/// which take f together, and the slowest of them takes x, the wave will lose at least (m - 1) (g x - f) / G,
/// because each later stage makes up at most x of the difference. The same holds for backward passes.
class swap_slack {
 public:
  /// Accepts every plan.
  explicit swap_slack(const swap_problem& problem) noexcept : problem_(&problem) {}

  /// Refuses plans that must take longer than `known_ns`, if that can be computed without overflow.
  swap_slack(const swap_problem& problem, std::uint64_t known_ns) noexcept : problem_(&problem) {
    const std::uint64_t most = max_ns / problem.devices;
    limited_ = known_ns <= most && compute_ns(0, problem.layers()) <= most / problem.micro_batches;
    if (limited_) known_ = known_ns * problem.devices;
  }

  /// Returns whether a wave from `first` whose first `stages` stages end at `end` can be skipped.
  [[nodiscard]] bool refuses_wave(std::size_t first, std::size_t end, std::uint64_t stages,
                                  const stage_peaks& peaks) const noexcept {
    if (!limited_) return false;
    const std::uint64_t lost = stages * (peaks.forward_ns + peaks.backward_ns) - compute_ns(first, end);
    return balanced(0) + (problem_->micro_batches - 1) * lost > known_;
  }

  /// Returns whether a plan up to layer `end` that has taken `ns` can be skipped.
  [[nodiscard]] bool refuses_plan(std::size_t end, std::uint64_t ns) const noexcept {
    return limited_ && (ns > known_ / problem_->devices || ns * problem_->devices + balanced(end) > known_);
  }

 private:
  [[nodiscard]] std::uint64_t compute_ns(std::size_t first, std::size_t end) const noexcept {
    return problem_->forward_ns[end] - problem_->forward_ns[first] + problem_->backward_ns[end] -
           problem_->backward_ns[first];
  }
  /// Returns the time of the layers from `first`, balanced perfectly.
  [[nodiscard]] std::uint64_t balanced(std::size_t first) const noexcept {
    return (problem_->devices + problem_->micro_batches - 1) * compute_ns(first, problem_->layers());
  }

  const swap_problem* problem_;
  std::uint64_t known_ = 0;
  bool limited_ = false;
};

/// The ways to keep of cutting a range of layers into stages.
enum class ways_kept : std::uint8_t {
  unbeaten,  ///< each way that no other beats in all three numbers
  one,       ///< one way, with the least forward and backward time of the slowest stage
};

/// Adds `peaks` to the kept ways if none of them beats it.
inline void keep_way(std::vector<stage_peaks>& ways, const stage_peaks& peaks, ways_kept kept) {
  const auto beats = [kept](const stage_peaks& a, const stage_peaks& b) {
    return kept == ways_kept::unbeaten ? a.within(b)
                                       : a.forward_ns + a.backward_ns <= b.forward_ns + b.backward_ns;
  };
  for (const stage_peaks& way : ways) {
    if (beats(way, peaks)) return;
  }
  std::erase_if(ways, [&](const stage_peaks& way) { return beats(peaks, way); });
  ways.push_back(peaks);
}

/// Returns, for each end, the ways to cut the layers from `first` to it into at most as many stages as
/// devices, each within a device's memory.
[[nodiscard]] inline std::vector<std::vector<stage_peaks>> wave_ways(const swap_problem& problem,
                                                                     std::size_t first, ways_kept kept,
                                                                     const swap_slack& slack) {
  using by_end = std::vector<std::vector<stage_peaks>>;
  const std::size_t layers = problem.layers();
  by_end ways(layers + 1);
  by_end last(layers + 1);  // ways with one more stage each round
  const auto add = [&](by_end& to, std::size_t end, std::uint64_t stages, const stage_peaks& peaks) {
    if (!slack.refuses_wave(first, end, stages, peaks)) keep_way(to[end], peaks, kept);
  };
  for (std::size_t end = first + 1; end <= layers; ++end) {
    const auto stage = problem.stage(first, end);
    if (stage.bytes > problem.device_bytes) break;
    add(last, end, 1, stage);
    add(ways, end, problem.devices, stage);
  }
  for (std::uint64_t stages = 2; stages <= std::min<std::uint64_t>(problem.devices, layers - first);
       ++stages) {
    by_end next(layers + 1);
    for (std::size_t cut = first + 1; cut < layers; ++cut) {
      if (last[cut].empty()) continue;
      for (std::size_t end = cut + 1; end <= layers; ++end) {
        const auto stage = problem.stage(cut, end);
        if (stage.bytes > problem.device_bytes) break;
        for (const stage_peaks& way : last[cut])
          add(next, end, stages, way.with(stage));
      }
    }
    for (std::size_t end = first + 1; end <= layers; ++end) {
      for (const stage_peaks& way : next[end])
        add(ways, end, problem.devices, way);
    }
    last = std::move(next);
  }
  return ways;
}

/// Returns the ends of the fewest stages that cut layers `first` to `end` with none worse than `peaks`.
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
  std::ranges::reverse(ends);
  return ends;
}

/// A plan and its costs.
struct found_waves {
  std::vector<std::vector<std::size_t>> ends{};  // of the stages of each wave
  std::uint64_t step_ns = 0;
};

/// Returns the fastest plan whose waves are cut in the kept ways, if `slack` accepts one.
[[nodiscard]] inline found_waves search_waves(const swap_problem& problem, ways_kept kept,
                                              const swap_slack& slack) {
  struct plan_so_far {
    std::uint64_t step_ns = 0;
    std::uint64_t forward_ns = 0;  // of the last wave
    std::uint64_t load_ns = 0;     // of the last wave
    stage_peaks peaks{};           // of the last wave
    std::size_t first = 0;         // where the last wave begins
    std::size_t before = 0;        // the index of the plan that this one continues, among those that end
                                   // there
  };
  const std::size_t layers = problem.layers();
  std::vector<std::vector<plan_so_far>> plans(layers + 1);
  const auto keep = [&](std::size_t end, const plan_so_far& plan) {
    if (slack.refuses_plan(end, plan.step_ns + plan.forward_ns)) return;
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
    const auto ways = wave_ways(problem, first, kept, slack);
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
  found_waves found{.step_ns = plans[layers][at].step_ns + plans[layers][at].forward_ns};
  for (std::size_t end = layers; end != 0;) {
    const plan_so_far& plan = plans[end][at];
    found.ends.push_back(stage_ends(problem, plan.first, end, plan.peaks));
    end = plan.first;
    at = plan.before;
  }
  std::ranges::reverse(found.ends);
  return found;
}

/// Returns the ends of each wave's stages for a plan with the shortest step. It finds a good plan first, then
/// the best of all that can be as fast.
[[nodiscard]] inline std::vector<std::vector<std::size_t>> best_waves(const swap_problem& problem) {
  const auto good = search_waves(problem, ways_kept::one, swap_slack(problem));
  return search_waves(problem, ways_kept::unbeaten, swap_slack(problem, good.step_ns)).ends;
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
