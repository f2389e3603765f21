#include <llmmem/checkpoint/interval.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "support/documented.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

constexpr double hour = 3600;
constexpr double nan_s = std::numeric_limits<double>::quiet_NaN();

[[nodiscard]] double uniform(random_numbers& random) {
  return (static_cast<double>(random.next() >> 11) + 0.5) / 9007199254740992.0;
}

/// Times from one failure to the next, of a job that fails at a constant rate.
[[nodiscard]] std::vector<double> exponential_gaps(std::uint64_t seed, double mtbf_s, std::size_t count) {
  random_numbers random(seed);
  std::vector<double> gaps(count);
  for (double& each : gaps)
    each = -mtbf_s * std::log(uniform(random));
  return gaps;
}

/// `failures` at random times of `seconds`.
[[nodiscard]] std::vector<double> scattered_gaps(std::uint64_t seed, double seconds, std::size_t failures) {
  random_numbers random(seed);
  std::vector<double> times(failures);
  for (double& each : times)
    each = seconds * uniform(random);
  std::sort(times.begin(), times.end());
  std::vector<double> gaps;
  double before = 0;
  for (const double each : times) {
    gaps.push_back(each - before);
    before = each;
  }
  return gaps;
}

struct job {
  double stall_s = 0;
  double durable_s = 0;  // from the begin of a save
  double recovery_s = 0;
};

/// Work that lasts, of one stretch between two failures: recovery, then work and saves in turn, of which
/// those count that were durable before the failure.
[[nodiscard]] double saved_work(double gap, double work_s, const job& of) {
  const double saves = std::floor((gap - of.recovery_s + of.stall_s - of.durable_s) / (work_s + of.stall_s));
  return saves > 0 ? saves * work_s : 0;
}

[[nodiscard]] double availability(const std::vector<double>& gaps, double work_s, const job& of) {
  double all = 0;
  double saved = 0;
  for (const double gap : gaps) {
    all += gap;
    saved += saved_work(gap, work_s, of);
  }
  return saved / all;
}

/// The best of 400 intervals, from a twentieth of `about` to twenty times it, and not below `least`.
[[nodiscard]] double best_of_sweep(const std::vector<double>& gaps, double about, double least,
                                   const job& of) {
  double best = 0;
  for (int i = 0; i <= 400; ++i) {
    const double work = about / 20 * std::pow(400.0, i / 400.0);
    if (work >= least) best = std::max(best, availability(gaps, work, of));
  }
  return best;
}

[[nodiscard]] bool is_close(double a, double b, double relative = 1e-12) {
  return std::abs(a - b) <= relative * std::max(std::abs(a), std::abs(b));
}

}  // namespace

TEST_CASE("square root and exponential are those of the standard library, also in constant expressions") {
  static_assert(detail::newton_sqrt(144) == 12);
  static_assert(detail::exp_minus_one(0) == 0);
  for (const auto seed : seeds(2000)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const double x = std::exp((uniform(random) - 0.5) * 1200);
    REQUIRE(is_close(detail::newton_sqrt(x), std::sqrt(x), 5e-16));
    const double y = std::exp((uniform(random) - 1) * 40) * 700;
    REQUIRE(is_close(detail::exp_minus_one(y), std::expm1(y), 1e-12));
  }
  CHECK(detail::newton_sqrt(0) == 0);
  CHECK(detail::newton_sqrt(never_s) == never_s);
  CHECK(is_close(detail::newton_sqrt(5e-324), std::sqrt(5e-324), 1e-12));
  CHECK(is_close(detail::newton_sqrt(1e308), std::sqrt(1e308), 5e-16));
  CHECK(detail::exp_minus_one(1e4) == never_s);
}

TEST_CASE("Daly's interval matches his three published examples") {
  // Daly 2006, figures 3 to 5: a save of 5 minutes; the paper prints 117, 57 and 9.1 minutes.
  CHECK(std::round(daly_interval(300, 24 * hour) / 60) == 117);
  CHECK(std::round(daly_interval(300, 6 * hour) / 60) == 57);
  CHECK(std::round(daly_interval(300, 900) / 6) == 91);
  CHECK(is_close(young_interval(300, 24 * hour), 7200));
  static_assert(young_interval(2, 100) == 20);
}

TEST_CASE("the availability-optimal period maximises the availability that it predicts") {
  for (const auto seed : seeds(100)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const double save = std::exp(uniform(random) * 8);
    const double mtbf = save * (2 + uniform(random) * 1000);
    const double recovery = uniform(random) * 1000;
    const double period = availability_period(save, mtbf, recovery);
    const auto at = [&](double t) { return (1 - save / t) * mtbf / (mtbf + recovery + t / 2); };
    REQUIRE(at(period) >= at(period * 1.001));
    REQUIRE(at(period) >= at(period * 0.999));
    REQUIRE(period >= young_interval(save, mtbf));
  }
}

TEST_CASE("the expected availability is that of many simulated failures, and largest at Daly's interval") {
  for (const auto seed : seeds(30)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const double mtbf = 1000 + uniform(random) * 50'000;
    const job of{.stall_s = mtbf * std::exp(-8 * uniform(random)) / 2,
                 .recovery_s = uniform(random) * mtbf / 10};
    const job with{of.stall_s, of.stall_s, of.recovery_s};
    const double work = daly_interval(of.stall_s, mtbf);
    const auto gaps = exponential_gaps(seed + 1000, mtbf, 60'000);
    const double expected = expected_availability(work, of.stall_s, mtbf, of.recovery_s);
    CHECK(is_close(availability(gaps, work, with), expected, 0.03));
    for (double factor = 0.05; factor < 20; factor *= 1.05)
      REQUIRE(expected_availability(work * factor, of.stall_s, mtbf, of.recovery_s) <= expected * 1.002);
  }
}

TEST_CASE("the tuner chooses within 1 % of the best interval, for the published failure rates") {
  // MTTF 7.9 h on 1,024 GPUs and 1.8 h on 16,384; 419 unexpected interruptions in 54 days on 16,384 GPUs.
  struct world {
    double mtbf_s;
    bool scattered;
  };
  for (const world& each :
       {world{7.9 * hour, false}, world{1.8 * hour, false}, world{54 * 24 * hour / 419, true}}) {
    for (const job& of : {job{0.5, 20, 600}, job{5, 120, 600}, job{60, 60, 600}, job{300, 300, 300}}) {
      CAPTURE(each.mtbf_s);
      CAPTURE(of.stall_s);
      const auto gaps =
          each.scattered ? scattered_gaps(7, 54 * 24 * hour, 419) : exponential_gaps(7, each.mtbf_s, 20'000);
      // No cap here, so that the optimum alone is seen.
      const interval_tuner tuner({.step_s = 4,
                                  .stall_s = of.stall_s,
                                  .durable_s = of.durable_s,
                                  .mtbf_s = each.mtbf_s,
                                  .recovery_s = of.recovery_s,
                                  .overhead_cap = never_s});
      const save_interval chosen = tuner.interval();
      CHECK(availability(gaps, chosen.work_s, of) >=
            0.99 * best_of_sweep(gaps, chosen.work_s, of.durable_s - of.stall_s, of));
    }
  }
}

TEST_CASE("a tuner that expects far too few failures learns from them and ends within 1 % of the best") {
  for (const auto seed : seeds(20)) {
    CAPTURE(seed);
    const auto gaps = scattered_gaps(seed, 54 * 24 * hour, 419);
    const job of{2, 60, 300};
    interval_tuner tuner({.step_s = 4,
                          .stall_s = of.stall_s,
                          .durable_s = of.durable_s,
                          .mtbf_s = 30 * 24 * hour,
                          .recovery_s = of.recovery_s});
    double saved = 0;
    double all = 0;
    for (const double gap : gaps) {
      saved += saved_work(gap, tuner.interval().work_s, of);
      all += gap;
      tuner.observe_run(gap, 1);
    }
    CHECK(saved / all >= 0.99 * best_of_sweep(gaps, 200, of.durable_s - of.stall_s, of));
    CHECK(tuner.mtbf_s() == doctest::Approx((30 * 24 * hour + all) / 420));
  }
}

TEST_CASE("the interval respects the cap and the time until durable, and nothing else makes it longer") {
  for (const auto seed : seeds(2000)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const auto about = [&](double least, double most) {
      return least * std::pow(most / least, uniform(random));
    };
    const double stall = random.once_in(10) ? 0 : about(0.001, 500);
    const double mtbf = about(10, 1e7);
    const interval_options options{.step_s = about(0.01, 60),
                                   .stall_s = stall,
                                   .durable_s = about(0.01, 1000),
                                   .mtbf_s = mtbf,
                                   .recovery_s = about(0.1, 1000),
                                   .overhead_cap = about(0.001, 1)};
    const interval_tuner tuner(options);
    const save_interval chosen = tuner.interval();
    REQUIRE(chosen.steps >= 1);
    CHECK(chosen.work_s == static_cast<double>(chosen.steps) * options.step_s);
    REQUIRE(chosen.overhead <= options.overhead_cap * (1 + 1e-15));
    REQUIRE(chosen.work_s >= options.durable_s);
    CHECK(chosen.overhead == stall / chosen.work_s);
    CHECK(chosen.availability == expected_availability(chosen.work_s, stall, mtbf, options.recovery_s));
    const double fewer = static_cast<double>(chosen.steps - 1) * options.step_s;
    const double more = static_cast<double>(chosen.steps + 1) * options.step_s;
    switch (chosen.bound) {
      case interval_bound::overhead:
        CHECK(stall > options.overhead_cap * fewer * (1 - 1e-12));
        break;
      case interval_bound::durability:
        CHECK(fewer < options.durable_s);
        break;
      case interval_bound::failures:
        // Daly's is a series: half a per cent where saves are long against the failures.
        CHECK(expected_availability(more, stall, mtbf, options.recovery_s) <= chosen.availability * 1.005);
        if (chosen.steps > 1) {
          CHECK(expected_availability(fewer, stall, mtbf, options.recovery_s) <= chosen.availability * 1.005);
        }
    }
  }
}

TEST_CASE("saves stay within CheckFreq's cap of 3.5 % while steps and saves vary as measured") {
  random_numbers random(3);
  interval_tuner tuner({.step_s = 100, .stall_s = 0.01, .durable_s = 1, .mtbf_s = 300});
  double work = 0;
  double stalled = 0;
  for (int save = 0; save < 2000; ++save) {
    const std::uint64_t steps = tuner.interval().steps;
    for (std::uint64_t i = 0; i < steps; ++i) {
      const double step = 0.3 + 0.2 * uniform(random);
      work += step;
      tuner.observe_step(step);
    }
    const double stall = 2 + 2 * uniform(random);
    const double durable = 30 + 60 * uniform(random);
    stalled += stall;
    tuner.observe_save(stall, durable);
    const double next = static_cast<double>(tuner.interval().steps) * tuner.step_s();
    REQUIRE(next >= durable);
    REQUIRE(stall <= 0.035 * next * (1 + 1e-12));
  }
  CHECK(stalled / work <= 0.035);
  CHECK(stalled / work > 0.025);
}

TEST_CASE("free saves happen at every step, and a run that never fails is never saved") {
  CHECK(young_interval(0, 100) == 0);
  CHECK(daly_interval(0, 100) == 0);
  CHECK(availability_period(0, 100, 5) == 0);
  CHECK(young_interval(0, never_s) == 0);
  CHECK(daly_interval(0, never_s) == 0);
  CHECK(young_interval(5, never_s) == never_s);
  CHECK(daly_interval(5, never_s) == never_s);
  CHECK(availability_period(5, never_s, 5) == never_s);
  CHECK(daly_interval(200, 100) == 100);  // two failures a save
  CHECK(daly_interval(1e300, 100) == 100);
  CHECK(is_close(young_interval(1e300, 1e300), std::sqrt(2.0) * 1e300));
  CHECK(expected_availability(10, 0, never_s, 5) == 1);
  CHECK(expected_availability(30, 10, never_s, 5) == 0.75);
  CHECK(expected_availability(never_s, 10, never_s, 5) == 1);
  CHECK(expected_availability(never_s, 10, 100, 5) == 0);
  CHECK(expected_availability(0, 10, 100, 5) == 0);
  CHECK(is_close(expected_availability(0, 0, 100, 50), std::exp(-0.5)));
  CHECK(is_close(expected_availability(1e-9, 0, 100, 50), std::exp(-0.5), 1e-9));
  CHECK(save_overhead(0, 0) == 0);
  CHECK(save_overhead(0, 1) == never_s);
  CHECK(save_overhead(never_s, 1) == 0);
  CHECK(interval_tuner({.step_s = 2, .mtbf_s = 100}).interval().steps == 1);
  const save_interval never = interval_tuner({.stall_s = 1, .mtbf_s = never_s}).interval();
  CHECK(never.steps == never_steps);
  CHECK(never.availability == 1);
  interval_tuner surprised({.stall_s = 1, .mtbf_s = never_s});
  surprised.observe_run(2 * hour, 0);
  CHECK(surprised.interval().steps == never_steps);
  surprised.observe_run(2 * hour, 2);
  CHECK(surprised.mtbf_s() == 2 * hour);
  interval_tuner at_once({.stall_s = 1, .mtbf_s = never_s});
  at_once.observe_run(0, 1);
  CHECK(at_once.interval().steps == 29);  // the cap alone
}

TEST_CASE("a tuner uses its assumptions until it has measurements") {
  interval_tuner tuner({.step_s = 100, .stall_s = 50, .durable_s = 1000, .mtbf_s = 1000, .overhead_cap = 1});
  tuner.observe_step(0);
  CHECK(tuner.step_s() == 100);
  tuner.observe_step(2);
  CHECK(tuner.step_s() == 2);
  tuner.observe_step(10);
  CHECK(tuner.step_s() == 3);
  tuner.observe_save(8, 20);
  CHECK(tuner.stall_s() == 8);
  CHECK(tuner.durable_s() == 20);
  tuner.observe_save(0, 100);
  CHECK(tuner.stall_s() == 7);
  CHECK(tuner.durable_s() == 100);  // the last, above the mean of 30
  CHECK(tuner.interval().work_s >= 100);
  constexpr save_interval fixed =
      interval_tuner({.step_s = 2, .stall_s = 2, .mtbf_s = 10'000, .overhead_cap = 1}).interval();
  CHECK(fixed.steps == 99);
}

TEST_CASE("invalid times are refused by name") {
  CHECK_THROWS_WITH_AS(static_cast<void>(young_interval(nan_s, 1)),
                       "young_interval: save_s is nan; give seconds, 0 or more", argument_error);
  CHECK_THROWS_WITH_AS(static_cast<void>(daly_interval(-1, 1)),
                       "daly_interval: save_s is -1.000000; give seconds, 0 or more", argument_error);
  CHECK_THROWS_WITH_AS(static_cast<void>(daly_interval(never_s, 1)),
                       "daly_interval: save_s is infinite; give finite seconds", argument_error);
  CHECK_THROWS_WITH_AS(static_cast<void>(availability_period(1, 0, 1)),
                       "availability_period: mtbf_s is 0; a job that always fails cannot be saved",
                       argument_error);
  CHECK_THROWS_WITH_AS(static_cast<void>(expected_availability(1, 1, nan_s, 1)),
                       "expected_availability: mtbf_s is nan; give seconds, 0 or more", argument_error);
  CHECK_THROWS_WITH_AS(static_cast<void>(save_overhead(-1, 1)),
                       "save_overhead: work_s is -1.000000; give seconds, 0 or more", argument_error);
  CHECK_THROWS_WITH_AS(interval_tuner({.step_s = 0}), "interval_tuner: step_s is 0; give the time of a step",
                       argument_error);
  CHECK_THROWS_WITH_AS(interval_tuner({.prior_failures = 0}),
                       "interval_tuner: prior_failures is 0.000000; give a finite number above 0",
                       argument_error);
  CHECK_THROWS_WITH_AS(interval_tuner({.overhead_cap = nan_s}),
                       "interval_tuner: overhead_cap is nan; give a part of the time above 0, such as 0.035",
                       argument_error);
  interval_tuner tuner({.step_s = 2});
  CHECK_THROWS_WITH_AS(tuner.observe_step(never_s), "interval_tuner: a step is infinite; give finite seconds",
                       argument_error);
  CHECK_THROWS_WITH_AS(tuner.observe_save(1, nan_s),
                       "interval_tuner: durable_s is nan; give seconds, 0 or more", argument_error);
  CHECK_THROWS_WITH_AS(tuner.observe_run(-1, 0),
                       "interval_tuner: a run is -1.000000; give seconds, 0 or more", argument_error);
  CHECK(tuner.stall_s() == 0);
  CHECK(tuner.step_s() == 2);
}

TEST_CASE("docs/checkpoint_interval.md has the intervals and availabilities that are computed here") {
  std::string table =
      "| MTBF | a save stops work for | Young | Daly | arXiv 2410.18124, less the save | expected at Daly's "
      "| "
      "simulated there | best of 401 intervals |\n|---|---|---|---|---|---|---|---|\n";
  struct machine {
    const char* name;
    double mtbf_s;
  };
  for (const machine& on : {machine{"7.9 h (1,024 GPUs)", 7.9 * hour},
                            machine{"3.09 h (419 in 54 days, 16,384 GPUs)", 54 * 24 * hour / 419},
                            machine{"1.8 h (16,384 GPUs)", 1.8 * hour}}) {
    const auto gaps = exponential_gaps(1, on.mtbf_s, 20'000);
    for (const double save : {0.5, 5.0, 60.0, 300.0}) {
      const job of{save, save, 600};
      const double daly = daly_interval(save, on.mtbf_s);
      const auto percent = [](double part) { return decimal(100 * part, 2) + " %"; };
      const auto seconds = [](double value) { return decimal(value, 0) + " s"; };
      table += std::string("| ") + on.name + " | " + decimal(save, 1) + " s | " +
               seconds(young_interval(save, on.mtbf_s)) + " | " + seconds(daly) + " | " +
               seconds(availability_period(save, on.mtbf_s, 600) - save) + " | " +
               percent(expected_availability(daly, save, on.mtbf_s, 600)) + " | " +
               percent(availability(gaps, daly, of)) + " | " + percent(best_of_sweep(gaps, daly, 0, of)) +
               " |\n";
    }
  }
  check_documented("checkpoint_interval.md", table);
}
