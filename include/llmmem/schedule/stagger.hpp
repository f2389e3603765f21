/// @file
/// Starts requests apart in time, so that the sum of their contexts stays within a cap.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// A request that runs for `steps` steps. In its k-th step, from 0 on, its context has `prompt` + k tokens.
struct stagger_request {
  std::uint64_t prompt = 0;
  std::uint64_t steps = 1;     ///< tokens that it makes, one a step
  std::uint64_t earliest = 0;  ///< the first step in which it may start

  /// Returns the context of its last step.
  [[nodiscard]] constexpr std::uint64_t last_context() const noexcept { return prompt + (steps - 1); }
};

/// When requests start, and what follows.
struct stagger_plan {
  std::vector<std::uint64_t> starts{};  ///< of each request, in the given order
  std::uint64_t most_tokens = 0;        ///< the largest sum of contexts in a step
  std::uint64_t end_step = 0;           ///< the step after the last one in which a request runs

  friend bool operator==(const stagger_plan&, const stagger_plan&) = default;
};

namespace detail {

/// Placed requests, and the sum of contexts in the last step of each. Between such steps sums only rise, so
/// these are all the peaks.
class context_peaks {
 public:
  explicit context_peaks(std::span<const stagger_request> requests) : requests_(&requests[0]) {}

  /// Returns the sum of contexts in a step.
  [[nodiscard]] std::uint64_t tokens_in(std::uint64_t step) const noexcept {
    std::uint64_t sum = 0;
    for (const placed& each : all_)
      sum += context_of(each, step);
    return sum;
  }

  /// Returns the first start from `earliest` on with which no step exceeds `cap`.
  ///
  /// A step t that exceeds it makes every start up to t impossible that leaves the request with more than
  /// the rest of the cap there: the next one to try is t - (rest - prompt), or t + 1, where t is not among
  /// its steps.
  [[nodiscard]] std::uint64_t first_start(const stagger_request& of, std::uint64_t cap) const noexcept {
    std::uint64_t start = of.earliest;
    for (bool is_moved = true; is_moved;) {
      is_moved = false;
      const auto look = [&](std::uint64_t step, std::uint64_t tokens) {
        if (step < start || step - start >= of.steps) return;
        const std::uint64_t rest = cap - tokens;
        if (of.prompt + (step - start) <= rest) return;
        start = rest < of.prompt ? step + 1 : step - (rest - of.prompt);
        is_moved = true;
      };
      for (const placed& each : all_)
        look(each.last, each.peak);
      const std::uint64_t own_last = start + (of.steps - 1);
      look(own_last, tokens_in(own_last));
    }
    return start;
  }

  void place(std::size_t request, std::uint64_t start) {
    const stagger_request& of = requests_[request];
    placed made{.request = request, .start = start, .last = start + (of.steps - 1)};
    for (placed& each : all_)
      each.peak += context_of(made, each.last);
    made.peak = tokens_in(made.last) + of.last_context();
    all_.push_back(made);
  }

  [[nodiscard]] std::uint64_t most_tokens() const noexcept {
    std::uint64_t most = 0;
    for (const placed& each : all_)
      most = std::max(most, each.peak);
    return most;
  }

 private:
  struct placed {
    std::size_t request = 0;
    std::uint64_t start = 0;
    std::uint64_t last = 0;  // step
    std::uint64_t peak = 0;  // sum of contexts in it
  };

  [[nodiscard]] std::uint64_t context_of(const placed& each, std::uint64_t step) const noexcept {
    return step < each.start || step > each.last ? 0 : requests_[each.request].prompt + (step - each.start);
  }

  const stagger_request* requests_;
  std::vector<placed> all_{};
};

}  // namespace detail

/// Returns the start of each request with which the sum of contexts exceeds `cap` in no step. Each starts as
/// early as it can after those listed before it have got their steps; a short one may start before a long one
/// that is listed earlier, and delays none.
///
/// The work of attention grows with that sum, so this bounds the time of the host's part, and the KV of all
/// requests. Of requests that make S tokens each, B at a time: started together, contexts add up to B S at
/// the end. In S / F groups that start F steps apart, they add up to at most B (S + F) / 2: about half.
///
/// @param cap  tokens
/// @par Complexity      O(n^2) for n requests, times the starts that are tried for each: mostly few
/// @par Thread safety   any number of calls at once
/// @par Source          load control of He and Zhai, "FastDecode", arXiv 2403.11421, with prompts
/// @throws argument_error  for a request of 0 steps
/// @throws length_error    for a request whose last context alone exceeds the cap, and for steps or tokens
///                         past 2^63 - 1
[[nodiscard]] inline stagger_plan stagger(std::span<const stagger_request> requests, std::uint64_t cap) {
  constexpr std::uint64_t most = (std::uint64_t{1} << 63) - 1;
  const auto name = [](std::size_t i) { return "stagger: request " + std::to_string(i); };
  if (requests.empty()) return {};
  std::uint64_t steps = 0;  // of all, one after another
  std::uint64_t latest = 0;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const stagger_request& each = requests[i];
    if (each.steps == 0)
      throw argument_error(name(i) + " has 0 steps; leave it out, or let it make at least 1 token");
    if (each.prompt > most || each.steps > most - each.prompt || each.steps > most - steps ||
        each.earliest > most || steps + each.steps > most - std::max(latest, each.earliest)) {
      throw length_error(name(i) + ": its prompt of " + std::to_string(each.prompt) + " tokens, its " +
                         std::to_string(each.steps) + " steps or its earliest step, " +
                         std::to_string(each.earliest) +
                         ", exceed 2^63 - 1, with the requests before it; lower them");
    }
    if (each.last_context() > cap) {
      throw length_error(name(i) + " has a context of " + std::to_string(each.last_context()) +
                         " tokens at its end, but the cap is " + std::to_string(cap) +
                         "; raise the cap, or let it make fewer tokens");
    }
    steps += each.steps;
    latest = std::max(latest, each.earliest);
  }
  detail::context_peaks peaks(requests);
  stagger_plan plan;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const std::uint64_t start = peaks.first_start(requests[i], cap);
    peaks.place(i, start);
    plan.starts.push_back(start);
    plan.end_step = std::max(plan.end_step, start + requests[i].steps);
  }
  plan.most_tokens = peaks.most_tokens();
  return plan;
}

}  // namespace v0
}  // namespace llmmem
