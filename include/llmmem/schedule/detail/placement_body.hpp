/// @file
/// The linear program of `solve_placement`, and the search of `round_placement`.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/schedule/detail/bodies.hpp>
#include <llmmem/schedule/detail/dense_simplex.hpp>
#include <llmmem/schedule/detail/nanoseconds.hpp>
#include <llmmem/schedule/placement.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

inline constexpr std::size_t placed_kinds = 3;  // weights, KV, activations
inline constexpr std::size_t step_parts = 5;    // in the order of `placement_times`

/// The time of a step, part by part: `fixed_ns` and, for each kind, the part's time when all of the kind is
/// away from the device, and when all of it is on NVMe. Each is rounded up.
struct placement_costs {
  struct part {
    std::uint64_t fixed_ns = 0;
    std::array<std::uint64_t, placed_kinds> away_ns{};
    std::array<std::uint64_t, placed_kinds> nvme_ns{};
  };
  std::array<part, step_parts> parts{};
  std::uint64_t slowest_ns = 0;  // no placement is slower
};

/// Returns the sum, at most `limit`.
[[nodiscard]] inline std::uint64_t sum_up_to(std::uint64_t limit,
                                             std::initializer_list<std::uint64_t> terms) {
  std::uint64_t left = limit;
  for (const std::uint64_t term : terms)
    left -= std::min(left, term);
  return limit - left;
}

[[nodiscard]] inline placement_costs priced(const placement_facts& facts, const char* who) {
  static_cast<void>(
      checked_add(checked_add(facts.weight_bytes, facts.kv_bytes, who), facts.activation_bytes, who));
  const auto over = [who](std::uint64_t bytes, std::uint64_t bytes_per_second) {
    return link_ns(bytes, bytes_per_second, 0, who);
  };
  const auto nvme = [&](std::uint64_t bytes, std::uint64_t bytes_per_second) {
    return facts.nvme_bytes == 0 ? 0 : over(bytes, bytes_per_second);  // without NVMe, its bandwidth is
                                                                       // unused
  };
  const bool sent = facts.attention == offloaded_attention::on_device;
  const std::uint64_t moved = facts.activation_moved_bytes;
  placement_costs costs;
  costs.parts[0] = {.fixed_ns = facts.compute_ns, .away_ns = {0, sent ? 0 : facts.host_attention_ns, 0}};
  costs.parts[1] = {.away_ns = {over(facts.weight_bytes, facts.host_to_device),
                                sent ? over(facts.kv_read_bytes, facts.host_to_device) : 0,
                                over(moved, facts.host_to_device)}};
  costs.parts[2] = {
      .away_ns = {0, over(facts.kv_written_bytes, facts.device_to_host), over(moved, facts.device_to_host)}};
  costs.parts[3] = {.nvme_ns = {nvme(facts.weight_bytes, facts.nvme_to_host),
                                nvme(facts.kv_read_bytes, facts.nvme_to_host),
                                nvme(moved, facts.nvme_to_host)}};
  costs.parts[4] = {
      .nvme_ns = {0, nvme(facts.kv_written_bytes, facts.host_to_nvme), nvme(moved, facts.host_to_nvme)}};
  for (const auto& part : costs.parts) {
    std::uint64_t all = part.fixed_ns;
    for (std::size_t kind = 0; kind < placed_kinds; ++kind)
      all = add_ns(all, add_ns(part.away_ns[kind], part.nvme_ns[kind], who), who);
    costs.slowest_ns = std::max(costs.slowest_ns, all);
  }
  return costs;
}

[[nodiscard]] inline std::array<std::uint64_t, placed_kinds> bytes_of(const placement_facts& facts) noexcept {
  return {facts.weight_bytes, facts.kv_bytes, facts.activation_bytes};
}

[[nodiscard]] inline double ratio(std::uint64_t a, std::uint64_t b) noexcept {
  return b == 0 ? 0 : static_cast<double>(a) / static_cast<double>(b);
}

/// Solves the linear program. The variables are each kind's fractions on device and host, and the share of
/// the slowest step that is saved. Bytes are in units of all bytes, times in units of the slowest step.
[[nodiscard]] inline std::vector<double> solve(const placement_facts& facts, const placement_costs& costs) {
  constexpr std::size_t saved = 2 * placed_kinds;
  const auto bytes = bytes_of(facts);
  const std::uint64_t all = bytes[0] + bytes[1] + bytes[2];
  std::vector<linear_row> rows;
  const auto row = [&rows](double bound) -> linear_row& {
    rows.push_back({.coefficients = std::vector<double>(saved + 1, 0), .bound = bound});
    return rows.back();
  };
  for (std::size_t kind = 0; kind < placed_kinds; ++kind) {
    auto& whole = row(1).coefficients;
    whole[2 * kind] = whole[2 * kind + 1] = 1;
  }
  // A tier with space for everything sets no limit, so its bytes are cut to all bytes: all numbers stay near
  // 1.
  auto& device = row(ratio(std::min(facts.device_bytes, all), all)).coefficients;
  for (std::size_t kind = 0; kind < placed_kinds; ++kind)
    device[2 * kind] = ratio(bytes[kind], all);
  auto& host = row(ratio(std::min(facts.host_bytes, all), all)).coefficients;
  for (std::size_t kind = 0; kind < placed_kinds; ++kind)
    host[2 * kind + 1] = ratio(bytes[kind], all);
  auto& nvme = row(ratio(std::min(facts.nvme_bytes, all), all) - (all == 0 ? 0 : 1)).coefficients;
  for (std::size_t kind = 0; kind < placed_kinds; ++kind)
    nvme[2 * kind] = nvme[2 * kind + 1] = -ratio(bytes[kind], all);
  // fixed + away (1 - device) + nvme (1 - device - host) <= slowest - saved
  for (const auto& part : costs.parts) {
    auto& time = row(costs.slowest_ns == 0 ? 0 : 1);
    time.bound -= ratio(part.fixed_ns, costs.slowest_ns);
    for (std::size_t kind = 0; kind < placed_kinds; ++kind) {
      const double away = ratio(part.away_ns[kind], costs.slowest_ns);
      const double on_nvme = ratio(part.nvme_ns[kind], costs.slowest_ns);
      time.bound -= away + on_nvme;
      time.coefficients[2 * kind] = -away - on_nvme;
      time.coefficients[2 * kind + 1] = -on_nvme;
    }
    time.bound = std::max(time.bound, 0.0);
    time.coefficients[saved] = 1;
  }
  std::vector<double> objective(saved + 1, 0);
  objective[saved] = 1;
  const auto fastest = dense_simplex::maximize(objective, rows);
  if (!fastest)
    throw length_error("solve_placement: the tiers have no space left for rounding up; raise their bytes");

  // Among the fastest placements, finds the one with the most bytes near the device.
  auto& keep = row(-(*fastest)[saved] + 1e-9);
  keep.coefficients[saved] = -1;
  objective[saved] = 0;
  for (std::size_t kind = 0; kind < placed_kinds; ++kind) {
    objective[2 * kind] = 2 * ratio(bytes[kind], all);
    objective[2 * kind + 1] = ratio(bytes[kind], all);
  }
  return dense_simplex::maximize(objective, rows).value_or(*fastest);
}

/// @pre `0 <= value < 2^63`.
[[nodiscard]] inline std::int64_t rounded_up(double value) noexcept {
  const auto whole = static_cast<std::int64_t>(value);
  return whole + (static_cast<double>(whole) < value ? 1 : 0);
}

/// Returns non-negative fractions that add up to 1, from two fractions with rounding errors.
[[nodiscard]] inline tier_fractions fractions(double device, double host) noexcept {
  device = std::clamp(device, 0.0, 1.0);
  host = std::clamp(host, 0.0, 1.0 - device);
  if (device + host > 1 - 1e-9) (host > device ? host : device) = 1 - (host > device ? device : host);
  return {.device = device, .host = host, .nvme = std::max(0.0, 1 - device - host)};
}

[[nodiscard]] inline placement_times as_times(const std::array<std::uint64_t, step_parts>& ns) noexcept {
  return {.compute_ns = ns[0],
          .host_to_device_ns = ns[1],
          .device_to_host_ns = ns[2],
          .nvme_to_host_ns = ns[3],
          .host_to_nvme_ns = ns[4]};
}

/// Returns the times, rounded up kind by kind.
[[nodiscard]] inline placement_times times_of(const placement_facts& facts,
                                              const std::array<tier_fractions, placed_kinds>& placed) {
  const auto costs = priced(facts, "solve_placement");
  const auto share = [](std::uint64_t ns, double fraction) {
    const double exact = static_cast<double>(ns) * fraction - 1e-6;  // the most that rounding of fractions
                                                                     // adds
    return exact <= 0 ? 0 : std::min(ns, static_cast<std::uint64_t>(rounded_up(exact)));
  };
  std::array<std::uint64_t, step_parts> ns{};
  for (std::size_t i = 0; i < step_parts; ++i) {
    ns[i] = costs.parts[i].fixed_ns;
    for (std::size_t kind = 0; kind < placed_kinds; ++kind) {
      ns[i] += share(costs.parts[i].away_ns[kind], placed[kind].host + placed[kind].nvme) +
               share(costs.parts[i].nvme_ns[kind], placed[kind].nvme);
    }
  }
  return as_times(ns);
}

/// The search of `round_placement`.
class chunk_search {
 public:
  chunk_search(const placement_facts& facts, const schedule::placement& fractional,
               const schedule::chunk_counts& chunks)
      : costs_(priced(facts, who)),
        counts_{chunks.weights, chunks.kv, chunks.activations},
        budgets_{facts.device_bytes, facts.host_bytes, facts.nvme_bytes} {
    constexpr std::array<const char*, placed_kinds> names{"weights", "kv", "activations"};
    const auto bytes = bytes_of(facts);
    const std::array<tier_fractions, placed_kinds> nearest{fractional.weights, fractional.kv,
                                                           fractional.activations};
    for (std::size_t kind = 0; kind < placed_kinds; ++kind) {
      const std::uint32_t count = counts_[kind];
      if (count == 0 || count > schedule::chunk_counts::max_chunks) {
        throw argument_error(std::string(who) + ": " + names[kind] + " in " + std::to_string(count) +
                             " chunks; it must be 1 to " +
                             std::to_string(schedule::chunk_counts::max_chunks));
      }
      const double sum = nearest[kind].device + nearest[kind].host + nearest[kind].nvme;
      const bool good = nearest[kind].device >= 0 && nearest[kind].host >= 0 && nearest[kind].nvme >= 0 &&
                        sum >= 1 - 1e-6 && sum <= 1 + 1e-6;  // also false for NaN
      if (!good) {
        throw argument_error(std::string(who) + ": fractions of " + names[kind] +
                             " must be 0 or more and add up to 1");
      }
      chunk_bytes_[kind] = bytes[kind] / count + (bytes[kind] % count != 0 ? 1 : 0);
      wanted_[kind] = {nearest[kind].device * count, nearest[kind].host * count};
    }
  }

  [[nodiscard]] chunked_placement run() {
    const bool all = few();
    for (std::uint32_t radius = 1; radius <= 3 && !best_ && !all; ++radius)
      try_near(radius);
    if (all) try_near(schedule::chunk_counts::max_chunks);
    if (!best_) {
      throw length_error(std::string(who) +
                         ": no numbers of whole chunks near the fractions fit the budgets; use smaller "
                         "chunks, or raise the tiers' bytes");
    }
    while (!all && try_moves()) {
    }
    const auto chunks = [this](std::size_t kind) {
      const auto& at = best_->at[kind];
      return tier_chunks{.device = at[0], .host = at[1], .nvme = at[2]};
    };
    return {.weights = chunks(0), .kv = chunks(1), .activations = chunks(2), .times = times(best_->at)};
  }

 private:
  static constexpr const char* who = "round_placement";
  static constexpr std::size_t tiers = 3;
  using chunks_at = std::array<std::array<std::uint32_t, tiers>, placed_kinds>;

  struct candidate {
    chunks_at at{};
    std::uint64_t step_ns = 0;
    std::uint64_t away_bytes = 0;  // from the device
    std::uint64_t nvme_bytes = 0;
  };

  /// Returns whether the search can try every combination.
  [[nodiscard]] bool few() const noexcept {
    std::uint64_t combinations = 1;
    for (const std::uint64_t count : counts_) {
      combinations *= (count + 1) * (count + 2) / 2;
      if (combinations > max_exact_placements) return false;  // at most 2^18 x 2^40 before
    }
    return true;
  }

  /// Makes `at` the best if it meets the budgets and is better than the best so far.
  bool offer(const chunks_at& at) {
    candidate now{.at = at, .step_ns = times(at).step_ns()};
    for (std::size_t tier = 0; tier < tiers; ++tier) {
      std::uint64_t left = budgets_[tier];
      for (std::size_t kind = 0; kind < placed_kinds; ++kind) {
        // At most the sum of all bytes and 2^20.
        const std::uint64_t held = chunk_bytes_[kind] * at[kind][tier];
        if (held > left) return false;
        left -= held;
        if (tier > 0) now.away_bytes += held;
        if (tier > 1) now.nvme_bytes += held;
      }
    }
    const auto rank = [](const candidate& each) {
      return std::tuple(each.step_ns, each.away_bytes, each.nvme_bytes);
    };
    if (best_ && rank(now) >= rank(*best_)) return false;
    best_ = now;
    return true;
  }

  /// Tries every combination of counts less than `radius` from the targets.
  void try_near(std::uint32_t radius) {
    std::array<std::vector<std::array<std::uint32_t, tiers>>, placed_kinds> nearest;
    for (std::size_t kind = 0; kind < placed_kinds; ++kind) {
      const auto around = [&](double wanted) {
        const auto first = static_cast<std::int64_t>(wanted) - (radius - 1);
        const auto last = rounded_up(wanted) + (radius - 1);
        return std::pair(std::max<std::int64_t>(first, 0), std::min<std::int64_t>(last, counts_[kind]));
      };
      const auto device = around(wanted_[kind][0]);
      const auto host = around(wanted_[kind][1]);
      for (auto d = device.first; d <= device.second; ++d) {
        for (auto h = host.first; h <= host.second && d + h <= counts_[kind]; ++h) {
          nearest[kind].push_back({static_cast<std::uint32_t>(d), static_cast<std::uint32_t>(h),
                                   static_cast<std::uint32_t>(counts_[kind] - d - h)});
        }
      }
    }
    for (const auto& weights : nearest[0]) {
      for (const auto& kv : nearest[1]) {
        for (const auto& activations : nearest[2])
          offer({weights, kv, activations});
      }
    }
  }

  /// Tries to move one or two chunks of any kind from any tier to any other; returns whether that helped.
  bool try_moves() {
    const chunks_at from = best_->at;
    bool better = false;
    each_move(from, [&](const chunks_at& one) {
      better = offer(one) || better;
      each_move(one, [&](const chunks_at& two) { better = offer(two) || better; });
    });
    return better;
  }

  template <class Visit>
  static void each_move(const chunks_at& at, const Visit& visit) {
    for (std::size_t kind = 0; kind < placed_kinds; ++kind) {
      for (std::size_t from = 0; from < tiers; ++from) {
        for (std::size_t to = 0; to < tiers; ++to) {
          if (from == to || at[kind][from] == 0) continue;
          chunks_at moved = at;
          --moved[kind][from];
          ++moved[kind][to];
          visit(moved);
        }
      }
    }
  }

  [[nodiscard]] placement_times times(const chunks_at& at) const noexcept {
    std::array<std::uint64_t, step_parts> ns{};
    for (std::size_t i = 0; i < step_parts; ++i) {
      ns[i] = costs_.parts[i].fixed_ns;
      for (std::size_t kind = 0; kind < placed_kinds; ++kind) {
        ns[i] += share(costs_.parts[i].away_ns[kind], at[kind][1] + at[kind][2], counts_[kind]) +
                 share(costs_.parts[i].nvme_ns[kind], at[kind][2], counts_[kind]);
      }
    }
    return as_times(ns);
  }

  /// Returns `ns * part / count`, rounded up. @pre `part <= count <= max_chunks`.
  [[nodiscard]] static std::uint64_t share(std::uint64_t ns, std::uint32_t part,
                                           std::uint32_t count) noexcept {
    const std::uint64_t rest = ns % count * part;
    return ns / count * part + rest / count + (rest % count != 0 ? 1 : 0);
  }

  placement_costs costs_;
  std::array<std::uint32_t, placed_kinds> counts_;
  std::array<std::uint64_t, tiers> budgets_;
  std::array<std::uint64_t, placed_kinds> chunk_bytes_{};
  std::array<std::array<double, 2>, placed_kinds> wanted_{};
  std::optional<candidate> best_{};
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem

namespace llmmem {
inline namespace v0 {

LLMMEM_SCHEDULE_BODY schedule::placement solve_placement(const placement_facts& facts) {
  const auto costs = detail::priced(facts, "solve_placement");
  const std::uint64_t needed =
      facts.weight_bytes + facts.kv_bytes + facts.activation_bytes;  // checked by `priced`
  const std::uint64_t room =
      detail::sum_up_to(needed, {facts.device_bytes, facts.host_bytes, facts.nvme_bytes});
  if (room < needed) {
    throw length_error("solve_placement: " + std::to_string(needed) +
                       " bytes of weights, KV and activations are needed, but all tiers together have " +
                       std::to_string(room) + "; use a smaller block, or raise the tiers' bytes");
  }
  const auto x = detail::solve(facts, costs);
  const auto fractions = [&](std::size_t kind, std::uint64_t bytes) {
    return bytes == 0 ? tier_fractions{.device = 1} : detail::fractions(x[2 * kind], x[2 * kind + 1]);
  };
  schedule::placement found{.weights = fractions(0, facts.weight_bytes),
                            .kv = fractions(1, facts.kv_bytes),
                            .activations = fractions(2, facts.activation_bytes)};
  found.times = detail::times_of(facts, {found.weights, found.kv, found.activations});
  return found;
}

LLMMEM_SCHEDULE_BODY chunked_placement round_placement(const placement_facts& facts,
                                                       const schedule::placement& fractional,
                                                       const schedule::chunk_counts& chunks) {
  return detail::chunk_search(facts, fractional, chunks).run();
}

}  // namespace v0
}  // namespace llmmem
