/// @file
/// Contestants that take turns: each round measures a contestant and its limit, and the figures are medians
/// of the rounds' ratios. Load on a shared machine affects both alike.
///
/// LLMMEM_BENCH_CHECKPOINT_ROUNDS   rounds of every experiment (5)
#pragma once

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace llmmem_benchmarks {

[[nodiscard]] inline std::uint64_t number_from_environment(const char* name, std::uint64_t usual) {
  const char* const text = std::getenv(name);
  return text != nullptr && *text != 0 ? std::strtoull(text, nullptr, 10) : usual;
}

/// The time of a turn, and its other figures, by name.
struct turn {
  double seconds = 0;
  std::map<std::string, double> told{};
};

[[nodiscard]] inline double median_of(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 != 0 ? values[half] : (values[half - 1] + values[half]) / 2;
}

/// Its turns, or the reason why it takes none.
struct contestant_turns {
  std::vector<turn> turns{};
  std::string why_not{};

  [[nodiscard]] std::vector<double> seconds() const {
    std::vector<double> all;
    for (const turn& each : turns)
      all.push_back(each.seconds);
    return all;
  }
};

/// The times of all contestants, by name.
class outcome {
 public:
  std::map<std::string, contestant_turns> of{};

  [[nodiscard]] bool has(const std::string& who) const {
    const auto found = of.find(who);
    return found != of.end() && found->second.why_not.empty() && !found->second.turns.empty();
  }
  /// `combine(seconds of each of the named)` for each round; nothing if one of them is missing.
  template <class Combine>
  [[nodiscard]] std::vector<double> by_round(const std::vector<std::string>& whom, Combine combine) const {
    std::vector<double> all;
    for (const std::string& each : whom) {
      if (!has(each)) return {};
    }
    for (std::size_t round = 0; round < of.at(whom.front()).turns.size(); ++round) {
      std::vector<double> seconds;
      for (const std::string& each : whom)
        seconds.push_back(of.at(each).turns[round].seconds);
      all.push_back(combine(seconds));
    }
    return all;
  }
};

/// A counter with its spread.
inline void count(benchmark::State& state, const std::string& name, const std::vector<double>& values) {
  if (values.empty()) return;
  state.counters[name] = median_of(values);
  state.counters[name + "_min"] = *std::min_element(values.begin(), values.end());
  state.counters[name + "_max"] = *std::max_element(values.begin(), values.end());
}

/// The share of a limit's rate, if both do the same work: 1 is as fast.
inline void count_share(benchmark::State& state, const outcome& all, const std::string& who,
                        const std::string& limit) {
  if (who == limit) return;
  count(state, "share_of_" + limit,
        all.by_round({limit, who}, [](const std::vector<double>& s) { return s[0] / s[1]; }));
}

using take_turn = std::function<turn()>;
using tell_ratios = std::function<void(benchmark::State&, const outcome&, const std::string& who)>;

/// Rows `group/who`, all measured when the first of them runs.
class experiment : public std::enable_shared_from_this<experiment> {
 public:
  /// @param make  what each does, in the order of `whom`; called when the experiment begins. What a
  /// contestant
  ///              throws takes its row away, with the text as the reason.
  experiment(std::string group, std::string parameters, std::vector<std::string> whom,
             std::function<std::vector<take_turn>()> make, tell_ratios tell)
      : group_(std::move(group)),
        parameters_(std::move(parameters)),
        whom_(std::move(whom)),
        make_(std::move(make)),
        tell_(std::move(tell)) {}

  void add_rows() {
    for (const std::string& who : whom_) {
      benchmark::RegisterBenchmark(
          (group_ + "/" + who + parameters_).c_str(),
          [self = shared_from_this(), who](benchmark::State& state) { self->report(state, who); })
          ->UseManualTime()
          ->Iterations(1)
          ->Repetitions(1)
          ->Unit(benchmark::kMillisecond);
    }
  }

 private:
  void run() {
    if (!outcome_.of.empty()) return;
    for (const std::string& who : whom_)
      outcome_.of[who];
    std::vector<take_turn> turns;
    try {
      turns = make_();
    } catch (const std::exception& error) {
      for (const std::string& who : whom_)
        outcome_.of[who].why_not = error.what();
      return;
    }
    const std::uint64_t rounds = number_from_environment("LLMMEM_BENCH_CHECKPOINT_ROUNDS", 5);
    // Round 0 does not count, because pages, threads and clocks wake up in it. Each round begins with another
    // contestant.
    for (std::uint64_t round = 0; round <= rounds; ++round) {
      for (std::size_t i = 0; i < whom_.size(); ++i) {
        const std::size_t at = (i + static_cast<std::size_t>(round)) % whom_.size();
        contestant_turns& his = outcome_.of[whom_[at]];
        if (!his.why_not.empty()) continue;
        try {
          turn taken = turns[at]();
          if (round != 0) his.turns.push_back(std::move(taken));
        } catch (const std::exception& error) {
          his.why_not = error.what();
        }
      }
    }
  }

  void report(benchmark::State& state, const std::string& who) {
    run();
    const contestant_turns& his = outcome_.of.at(who);
    for (auto _ : state)
      state.SetIterationTime(std::max(1e-9, median_of(his.seconds())));
    if (!outcome_.has(who)) {
      state.SkipWithError(his.why_not.empty() ? "no rounds" : his.why_not.c_str());
      return;
    }
    std::vector<double> ms = his.seconds();
    for (double& each : ms)
      each *= 1e3;
    count(state, "ms", ms);
    for (const auto& [name, value] : his.turns.front().told) {
      std::vector<double> values;
      for (const turn& each : his.turns)
        values.push_back(each.told.at(name));
      state.counters[name] = median_of(values);
      static_cast<void>(value);
    }
    if (tell_) tell_(state, outcome_, who);
  }

  std::string group_;
  std::string parameters_;
  std::vector<std::string> whom_;
  std::function<std::vector<take_turn>()> make_;
  tell_ratios tell_;
  outcome outcome_;
};

inline int add_experiment(std::string group, std::string parameters, std::vector<std::string> whom,
                          std::function<std::vector<take_turn>()> make, tell_ratios tell = {}) {
  std::make_shared<experiment>(std::move(group), std::move(parameters), std::move(whom), std::move(make),
                               std::move(tell))
      ->add_rows();
  return 0;
}

}  // namespace llmmem_benchmarks
