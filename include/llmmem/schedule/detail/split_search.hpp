/// @file
/// The search of `split_decode`: which sequences go to the host so that the slower of both sides ends
/// earliest.
#pragma once

#include <llmmem/config.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// A free sequence: its time on each side in picoseconds, and its blocks.
struct split_item {
  std::uint64_t device = 0;
  std::uint64_t host = 0;
  std::uint64_t blocks = 0;
};

/// Both sides without the free sequences. All sums of times are below 2^63.
struct split_problem {
  std::vector<split_item> items{};
  std::uint64_t device = 0;      ///< fixed time, and that of sequences fixed there
  std::uint64_t host = 0;        ///< of sequences fixed there
  std::uint64_t host_fixed = 0;  ///< counts if any sequence is on the host
  bool has_host = false;         ///< a sequence is fixed there
  std::uint64_t blocks = 0;      ///< left for free sequences
};

/// The sums of a choice.
struct split_sums {
  std::uint64_t device = 0;
  std::uint64_t host = 0;
  std::uint64_t blocks = 0;
  std::size_t on_host = 0;
};

/// A choice: true for the host.
using split_choice = std::vector<bool>;

inline void place_item(split_sums& sums, const split_item& item, bool to_host, bool from_host) noexcept {
  if (to_host == from_host) return;
  if (to_host) {
    sums.device -= item.device;
    sums.blocks -= item.blocks;
    sums.host += item.host;
    ++sums.on_host;
  } else {
    sums.device += item.device;
    sums.blocks += item.blocks;
    sums.host -= item.host;
    --sums.on_host;
  }
}

[[nodiscard]] inline std::uint64_t host_time(const split_problem& problem, const split_sums& sums) noexcept {
  return problem.host + sums.host + (problem.has_host || sums.on_host != 0 ? problem.host_fixed : 0);
}
[[nodiscard]] inline std::uint64_t step_time(const split_problem& problem, const split_sums& sums) noexcept {
  return std::max(problem.device + sums.device, host_time(problem, sums));
}

[[nodiscard]] inline split_sums sums_of(const split_problem& problem, const split_choice& choice) noexcept {
  split_sums sums;
  for (std::size_t i = 0; i < choice.size(); ++i) {
    const split_item& item = problem.items[i];
    if (choice[i]) {
      sums.host += item.host;
      ++sums.on_host;
    } else {
      sums.device += item.device;
      sums.blocks += item.blocks;
    }
  }
  return sums;
}

/// Tries every choice in the order of Gray's code, where neighbours differ in one sequence.
[[nodiscard]] inline split_choice best_of_all_splits(const split_problem& problem) {
  const std::size_t count = problem.items.size();
  split_choice now(count, true);
  split_choice best = now;
  split_sums sums = sums_of(problem, now);
  auto least = std::pair(step_time(problem, sums), sums.on_host);
  for (std::uint64_t turn = 1; turn < std::uint64_t{1} << count; ++turn) {
    std::size_t which = 0;
    while ((turn >> which & 1) == 0)
      ++which;
    place_item(sums, problem.items[which], !now[which], now[which]);
    now[which] = !now[which];
    if (sums.blocks > problem.blocks) continue;
    const auto found = std::pair(step_time(problem, sums), sums.on_host);
    if (found < least) {
      least = found;
      best = now;
    }
  }
  return best;
}

/// The fractional choice for a weight of the device's time, with 1 minus that of the host's.
struct weighed_split {
  split_choice choice{};  ///< a sequence that is cut in two counts as the host's
  double value = 0;       ///< a bound on the step, for any weight
  bool device_longer = false;
};

/// Minimises weight x device time + (1 - weight) x host time: a fractional knapsack, by gain for each block.
[[nodiscard]] inline weighed_split weigh_split(const split_problem& problem, double weight) {
  const std::size_t count = problem.items.size();
  weighed_split out{.choice = split_choice(count, true)};
  auto device = static_cast<double>(problem.device);
  auto host = static_cast<double>(problem.host + problem.host_fixed);
  struct gain {
    double of_block = 0;
    std::size_t item = 0;
  };
  std::vector<gain> gains;
  for (std::size_t i = 0; i < count; ++i) {
    const split_item& item = problem.items[i];
    host += static_cast<double>(item.host);
    const double each =
        (1 - weight) * static_cast<double>(item.host) - weight * static_cast<double>(item.device);
    // A sequence without blocks takes no budget, so it comes first.
    if (each > 0)
      gains.push_back({item.blocks == 0 ? std::numeric_limits<double>::infinity()
                                        : each / static_cast<double>(item.blocks),
                       i});
  }
  std::ranges::sort(gains, [](const gain& a, const gain& b) {
    return a.of_block != b.of_block ? a.of_block > b.of_block : a.item < b.item;
  });
  std::uint64_t left = problem.blocks;
  for (const gain& each : gains) {
    const split_item& item = problem.items[each.item];
    const bool fits = item.blocks <= left;
    const double share = fits ? 1 : static_cast<double>(left) / static_cast<double>(item.blocks);
    device += share * static_cast<double>(item.device);
    host -= share * static_cast<double>(item.host);
    if (!fits) break;
    left -= item.blocks;
    out.choice[each.item] = false;
  }
  out.value = weight * device + (1 - weight) * host;
  out.device_longer = device > host;
  return out;
}

/// A bound for all choices, and choices near the fractional optimum.
struct split_relaxation {
  std::uint64_t bound = 0;
  split_choice device_heavy{};
  split_choice host_heavy{};
};

/// Solves the fractional relaxation by its dual: `weigh_split(weight).value` is a bound for every weight, and
/// concave in it, so that bisection by its slope finds the largest.
[[nodiscard]] inline split_relaxation relax_split(const split_problem& problem) {
  weighed_split low = weigh_split(problem, 0);
  weighed_split high = weigh_split(problem, 1);
  double most = std::max(low.value, high.value);
  double from = 0;
  double to = 1;
  for (int turn = 0; turn < 48 && low.device_longer && !high.device_longer; ++turn) {
    const double weight = (from + to) / 2;
    weighed_split found = weigh_split(problem, weight);
    most = std::max(most, found.value);
    if (found.device_longer) {
      from = weight;
      low = std::move(found);
    } else {
      to = weight;
      high = std::move(found);
    }
  }
  // Sums of doubles are off by less than this share.
  split_relaxation out{.bound = static_cast<std::uint64_t>(std::max(0.0, most * (1 - 1e-9))),
                       .device_heavy = std::move(low.choice),
                       .host_heavy = std::move(high.choice)};
  // The relaxation counts the host's fixed time. Without sequences there it does not apply.
  const split_sums all = sums_of(problem, split_choice(problem.items.size(), false));
  if (!problem.has_host && all.blocks <= problem.blocks)
    out.bound = std::min(out.bound, problem.device + all.device);
  return out;
}

/// The best choice seen.
class split_record {
 public:
  explicit split_record(const split_problem& problem)
      : problem_(&problem), best_(problem.items.size(), true), sums_(sums_of(problem, best_)) {}

  void offer(const split_choice& choice, const split_sums& sums) {
    if (sums.blocks > problem_->blocks || step_time(*problem_, sums) >= time()) return;
    best_ = choice;
    sums_ = sums;
  }
  [[nodiscard]] const split_choice& choice() const noexcept { return best_; }
  [[nodiscard]] const split_sums& sums() const noexcept { return sums_; }
  [[nodiscard]] std::uint64_t time() const noexcept { return step_time(*problem_, sums_); }

 private:
  const split_problem* problem_;
  split_choice best_;
  split_sums sums_;
};

/// Goes from the choice with more on the device to the one with more on the host, a sequence at a time.
inline void walk_splits(const split_problem& problem, const split_relaxation& between, split_record& record) {
  split_choice now = between.device_heavy;
  split_sums sums = sums_of(problem, now);
  record.offer(now, sums);
  const auto move = [&](std::size_t i) {
    place_item(sums, problem.items[i], !now[i], now[i]);
    now[i] = !now[i];
    record.offer(now, sums);
  };
  std::vector<std::size_t> to_device;
  for (std::size_t i = 0; i < now.size(); ++i) {
    if (now[i] && !between.host_heavy[i]) to_device.push_back(i);
  }
  std::size_t next = 0;
  for (std::size_t i = 0; i < now.size(); ++i) {
    if (now[i] || !between.host_heavy[i]) continue;
    move(i);
    for (; next < to_device.size(); ++next) {
      if (problem.items[to_device[next]].blocks > problem.blocks - std::min(problem.blocks, sums.blocks))
        break;
      move(to_device[next]);
    }
  }
}

/// The most rounds of exchanges. Each round makes the step shorter.
inline constexpr int max_split_rounds = 64;

/// Moves a sequence, or exchanges two, as long as that makes the step shorter; the best of each round.
inline void exchange_splits(const split_problem& problem, std::uint64_t bound, split_record& record) {
  const std::size_t count = problem.items.size();
  for (int round = 0; round < max_split_rounds && record.time() > bound; ++round) {
    const split_choice& now = record.choice();
    std::uint64_t least = record.time();
    std::size_t first = count;
    std::size_t second = count;
    const auto consider = [&](const split_sums& sums, std::size_t a, std::size_t b) {
      if (sums.blocks > problem.blocks || step_time(problem, sums) >= least) return;
      least = step_time(problem, sums);
      first = a;
      second = b;
    };
    for (std::size_t a = 0; a < count; ++a) {
      split_sums sums = record.sums();
      place_item(sums, problem.items[a], !now[a], now[a]);
      consider(sums, a, count);
      if (now[a]) continue;
      for (std::size_t b = 0; b < count; ++b) {
        if (!now[b]) continue;
        split_sums exchanged = sums;
        place_item(exchanged, problem.items[b], false, true);
        consider(exchanged, a, b);
      }
    }
    if (first == count) return;
    split_choice better = now;
    better[first] = !better[first];
    if (second != count) better[second] = !better[second];
    record.offer(better, sums_of(problem, better));
  }
}

/// Near the best choice: around the fractional optimum, then by exchanges.
[[nodiscard]] inline split_choice near_best_split(const split_problem& problem,
                                                  const split_relaxation& relaxed) {
  split_record record(problem);
  const split_choice all_on_device(problem.items.size(), false);
  record.offer(all_on_device, sums_of(problem, all_on_device));
  walk_splits(problem, relaxed, record);
  record.offer(relaxed.host_heavy, sums_of(problem, relaxed.host_heavy));
  exchange_splits(problem, relaxed.bound, record);
  return record.choice();
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
