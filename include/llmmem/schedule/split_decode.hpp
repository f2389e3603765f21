/// @file
/// Splits the attention of a decode step between a device and its host.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/schedule/detail/nanoseconds.hpp>
#include <llmmem/schedule/detail/split_search.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Where a sequence attends.
enum class decode_side : std::uint8_t { device, host };

/// A sequence of a decode step.
struct split_sequence {
  std::uint64_t tokens = 0;  ///< of context that the step's rows attend to; of several rows, their sum
  std::uint64_t blocks = 0;  ///< that it takes on the device at the end of the step
  /// The side where its keys and values are, if they are to stay there. Empty: the plan chooses.
  std::optional<decode_side> fixed{};
};

/// What attention takes on one side, in all layers.
struct decode_rates {
  /// Of each step. On the device: its other work that runs while the host attends. On the host: the start of
  /// its part; it counts only if a sequence attends there.
  std::uint64_t fixed_ns = 0;
  std::uint64_t sequence_ns = 0;  ///< of each sequence
  std::uint64_t token_ps = 0;     ///< of each token of context, in picoseconds; at least 1
};

/// The rates of both sides.
struct split_rates {
  decode_rates device{};
  decode_rates host{};
  /// Of each sequence on the host: its query rows to the host and its results back, over the link. `copy_ns`
  /// computes it from bytes.
  std::uint64_t link_ns = 0;
};

/// A side for each sequence, and what follows.
struct split_plan {
  std::vector<decode_side> sides{};  ///< of each sequence, in the given order
  std::uint64_t device_ns = 0;
  std::uint64_t host_ns = 0;         ///< 0 without sequences there
  std::uint64_t step_ns = 0;         ///< the longer of the two
  std::uint64_t lower_bound_ns = 0;  ///< no choice takes less; sequences may be cut in it
  std::uint64_t device_blocks = 0;   ///< of sequences on the device
  std::size_t host_sequences = 0;
  bool is_exact = false;  ///< no choice is faster

  friend bool operator==(const split_plan&, const split_plan&) = default;
};

/// The most free sequences up to which `split_decode` tries every choice.
inline constexpr std::size_t max_exact_split = 12;

namespace detail {

/// The last time that planning of splits represents: 2^63 - 1 picoseconds, 106 days.
inline constexpr std::uint64_t max_split_ps = (std::uint64_t{1} << 63) - 1;

/// Adds up times in picoseconds within 2^63 - 1.
class split_clock {
 public:
  explicit split_clock(const char* who) noexcept : who_(who) {}

  [[nodiscard]] std::uint64_t add(std::uint64_t a, std::uint64_t b) const {
    if (b > max_split_ps - a) refuse();
    return a + b;
  }
  [[nodiscard]] std::uint64_t multiply(std::uint64_t a, std::uint64_t b) const {
    if (b != 0 && a > max_split_ps / b) refuse();
    return a * b;
  }
  [[nodiscard]] std::uint64_t picoseconds(std::uint64_t ns) const { return multiply(ns, 1000); }
  /// Of a sequence on a side.
  [[nodiscard]] std::uint64_t sequence(const decode_rates& rates, std::uint64_t link_ns,
                                       std::uint64_t tokens) const {
    return add(add(picoseconds(rates.sequence_ns), picoseconds(link_ns)), multiply(tokens, rates.token_ps));
  }

 private:
  [[noreturn]] LLMMEM_COLD void refuse() const {
    throw length_error(std::string(who_) +
                       ": the times of all sequences exceed 2^63 - 1 ps, 106 days; rates are in ns for a "
                       "sequence and in ps for a token; lower them");
  }
  const char* who_;
};

[[nodiscard]] constexpr std::uint64_t ns_of_ps(std::uint64_t ps) noexcept {
  return ps / 1000 + (ps % 1000 != 0 ? 1 : 0);
}

/// Both sides' times of each sequence, within the largest representable sums.
[[nodiscard]] inline std::vector<split_item> split_items(std::span<const split_sequence> sequences,
                                                         const split_rates& rates, const char* who) {
  const auto check = [who](const decode_rates& side, const char* name) {
    if (side.token_ps != 0) return;
    throw argument_error(std::string(who) + ": the " + name +
                         "'s token_ps is 0; measure what a token of context takes there, at least 1 ps");
  };
  check(rates.device, "device");
  check(rates.host, "host");
  const split_clock clock(who);
  std::vector<split_item> items;
  items.reserve(sequences.size());
  std::uint64_t device = clock.picoseconds(rates.device.fixed_ns);
  std::uint64_t host = clock.picoseconds(rates.host.fixed_ns);
  std::uint64_t blocks = 0;
  for (const split_sequence& each : sequences) {
    items.push_back({clock.sequence(rates.device, 0, each.tokens),
                     clock.sequence(rates.host, rates.link_ns, each.tokens), each.blocks});
    device = clock.add(device, items.back().device);
    host = clock.add(host, items.back().host);
    if (each.blocks > max_split_ps - blocks) {
      throw length_error(std::string(who) + ": sequence " + std::to_string(items.size() - 1) + " has " +
                         std::to_string(each.blocks) + " blocks, and all together exceed 2^63 - 1");
    }
    blocks += each.blocks;
  }
  return items;
}

/// The times of given sides.
[[nodiscard]] inline split_plan price_items(std::span<const split_item> items, const split_rates& rates,
                                            std::vector<decode_side> sides) {
  std::uint64_t device = rates.device.fixed_ns * 1000;
  std::uint64_t host = 0;
  split_plan plan;
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (sides[i] == decode_side::host) {
      host += items[i].host;
      ++plan.host_sequences;
    } else {
      device += items[i].device;
      plan.device_blocks += items[i].blocks;
    }
  }
  plan.device_ns = ns_of_ps(device);
  plan.host_ns = plan.host_sequences == 0 ? 0 : ns_of_ps(host + rates.host.fixed_ns * 1000);
  plan.step_ns = std::max(plan.device_ns, plan.host_ns);
  plan.sides = std::move(sides);
  return plan;
}

/// The free sequences of a step, and what the fixed ones take.
[[nodiscard]] inline split_problem problem_of(std::span<const split_sequence> sequences,
                                              std::span<const split_item> items, const split_rates& rates,
                                              std::uint64_t device_blocks, const char* who) {
  split_problem problem{.device = rates.device.fixed_ns * 1000, .host_fixed = rates.host.fixed_ns * 1000};
  std::uint64_t fixed_blocks = 0;
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (!sequences[i].fixed) {
      problem.items.push_back(items[i]);
    } else if (*sequences[i].fixed == decode_side::host) {
      problem.host += items[i].host;
      problem.has_host = true;
    } else {
      problem.device += items[i].device;
      fixed_blocks += items[i].blocks;
    }
  }
  if (fixed_blocks > device_blocks) {
    throw length_error(std::string(who) + ": the sequences fixed on the device take " +
                       std::to_string(fixed_blocks) + " blocks, but its budget is " +
                       std::to_string(device_blocks) +
                       "; move some of them to the host first, or raise the budget");
  }
  problem.blocks = device_blocks - fixed_blocks;
  return problem;
}

}  // namespace detail

/// Returns the times of given sides, with the lower bound over all choices: for a rule of the caller, and to
/// compare rules.
///
/// @param sides  of each sequence
/// @par Complexity   O(n log n) for n sequences
/// @throws argument_error  for another number of sides than of sequences, and for a side that is not the one
///                         where the sequence is fixed; as `split_decode`
/// @throws length_error    for sequences on the device that exceed the budget; as `split_decode`
[[nodiscard]] inline split_plan price_split(std::span<const split_sequence> sequences,
                                            const split_rates& rates, std::uint64_t device_blocks,
                                            std::span<const decode_side> sides) {
  static constexpr const char* who = "price_split";
  if (sides.size() != sequences.size()) {
    throw argument_error(std::string(who) + ": " + std::to_string(sides.size()) + " sides for " +
                         std::to_string(sequences.size()) + " sequences; give one for each");
  }
  for (std::size_t i = 0; i < sides.size(); ++i) {
    if (sequences[i].fixed.value_or(sides[i]) == sides[i]) continue;
    throw argument_error(std::string(who) + ": sequence " + std::to_string(i) +
                         " is fixed on the other side; leave `fixed` empty to move it");
  }
  const auto items = detail::split_items(sequences, rates, who);
  const auto relaxed = detail::relax_split(detail::problem_of(sequences, items, rates, device_blocks, who));
  split_plan plan = detail::price_items(items, rates, {sides.begin(), sides.end()});
  if (plan.device_blocks > device_blocks) {
    throw length_error(std::string(who) + ": the sequences on the device take " +
                       std::to_string(plan.device_blocks) + " blocks, but its budget is " +
                       std::to_string(device_blocks) + "; give more of them to the host");
  }
  plan.lower_bound_ns = detail::ns_of_ps(relaxed.bound);
  return plan;
}

/// Chooses the sequences that attend on the host in this step, so that the step ends earliest. Both sides
/// attend at the same time:
///
///     device = device.fixed + sum over its sequences (device.sequence + tokens x device.token)
///     host   = host.fixed + sum over its sequences (host.sequence + link + tokens x host.token), 0 if none
///     step   = max(device, host);   blocks of sequences on the device <= device_blocks
///
/// The host takes part where the device has too few blocks, and where the host ends its share before the
/// device ends the rest. What neither side can overlap (the rest of a layer, if both meet after its
/// attention) changes no choice: leave it out, and add it to the result.
///
/// **Up to `max_exact_split` free sequences** it tries every choice. Of equally fast ones it takes one with
/// the fewest sequences on the host.
///
/// **With more**, it solves the fractional relaxation, in which a sequence may be cut. For given weights of
/// both sides' times that is a knapsack by the gain for each block, and so an order by length. The choices
/// around its optimum are tried, then moves and exchanges of sequences as long as they make the step shorter.
/// The result exceeds the lower bound by at most twice the longest host time of a free sequence in all tests,
/// and by less than 0.1% with 200 sequences of served lengths.
///
/// @param sequences      of the step; none is a plan in which only the device's fixed time counts
/// @param device_blocks  the device's budget for the KV of these sequences
/// @par Complexity      O(n log n) for the relaxation, O(n^2) for each of at most 64 rounds of exchanges;
///                      2^12 additions for an exact choice. A lower bound within 1e-9 of the relaxation's.
/// @par Thread safety   any number of calls at once
/// @par Source          the step with both sides at once, and its comparison with the device alone: Jiang et
///      al., "NEO", MLSys 2025, arXiv 2411.01142; attention on the host near its KV: He and Zhai,
///      "FastDecode", arXiv 2403.11421
/// @throws argument_error  for a `token_ps` of 0
/// @throws length_error    when sequences fixed on the device exceed the budget, and when times pass 2^63 - 1
///                         ps or blocks 2^63 - 1
[[nodiscard]] inline split_plan split_decode(std::span<const split_sequence> sequences,
                                             const split_rates& rates, std::uint64_t device_blocks) {
  static constexpr const char* who = "split_decode";
  const auto items = detail::split_items(sequences, rates, who);
  const detail::split_problem problem = detail::problem_of(sequences, items, rates, device_blocks, who);
  const detail::split_relaxation relaxed = detail::relax_split(problem);
  const bool tries_all = problem.items.size() <= max_exact_split;
  const detail::split_choice choice =
      tries_all ? detail::best_of_all_splits(problem) : detail::near_best_split(problem, relaxed);
  std::vector<decode_side> sides;
  sides.reserve(sequences.size());
  std::size_t next = 0;
  for (const split_sequence& each : sequences) {
    sides.push_back(each.fixed ? *each.fixed : choice[next++] ? decode_side::host : decode_side::device);
  }
  split_plan plan = detail::price_items(items, rates, std::move(sides));
  plan.lower_bound_ns = detail::ns_of_ps(relaxed.bound);
  plan.is_exact = tries_all || plan.step_ns == plan.lower_bound_ns;
  return plan;
}

}  // namespace v0
}  // namespace llmmem
