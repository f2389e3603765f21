/// @file
/// How often to save: Young's, Daly's and the availability-optimal interval, and `interval_tuner`, which
/// computes "every k steps" from measurements.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <bit>
#include <cstdint>
#include <limits>
#include <string>

namespace llmmem {
inline namespace v0 {

/// Never: the interval without any save.
inline constexpr double never_s = std::numeric_limits<double>::infinity();
inline constexpr std::uint64_t never_steps = ~std::uint64_t{0};

namespace detail {

/// Returns the square root by Newton's iteration, because `std::sqrt` is not a constant expression in C++20.
/// Within two units in the last place of a normal number. @pre `x >= 0`.
[[nodiscard]] constexpr double newton_sqrt(double x) noexcept {
  if (x == 0 || x == never_s) return x;
  // Half the exponent is a start within a few per cent; the first step lands above the root, and later ones
  // descend.
  const auto bits = std::bit_cast<std::uint64_t>(x);
  auto root = std::bit_cast<double>((bits >> 1) + (std::uint64_t{0x1FF8} << 48));
  root = (root + x / root) / 2;
  for (;;) {
    const double next = (root + x / root) / 2;
    if (next >= root) return root;
    root = next;
  }
}

/// Returns e^x - 1 without loss for small x. @pre `x >= 0`.
[[nodiscard]] constexpr double exp_minus_one(double x) noexcept {
  if (x > 710) return never_s;
  int doublings = 0;
  while (x > 0.25) {
    x /= 2;
    ++doublings;
  }
  double sum = 0;
  for (int i = 14; i > 0; --i)
    sum = x / i * (1 + sum);
  for (; doublings > 0; --doublings)
    sum *= sum + 2;  // e^2x - 1 = (e^x - 1)(e^x + 1)
  return sum;
}

/// Returns `value`, or refuses a value that is not a duration. Infinity is allowed, for `mtbf_s`.
constexpr double checked_seconds(double value, const char* who, const char* what) {
  if (!(value >= 0)) {
    throw argument_error(std::string(who) + ": " + what + " is " + std::to_string(value) +
                         "; give seconds, 0 or more");
  }
  return value;
}
constexpr double checked_finite(double value, const char* who, const char* what) {
  checked_seconds(value, who, what);
  if (value == never_s) {
    throw argument_error(std::string(who) + ": " + what + " is infinite; give finite seconds");
  }
  return value;
}
constexpr double checked_mtbf(double value, const char* who) {
  checked_seconds(value, who, "mtbf_s");
  if (value == 0) {
    throw argument_error(std::string(who) + ": mtbf_s is 0; a job that always fails cannot be saved");
  }
  return value;
}

/// Returns the least integer not below `x`; `never_steps` past 2^63.
[[nodiscard]] constexpr std::uint64_t ceil_steps(double x) noexcept {
  if (x >= 9.0e18) return never_steps;
  const auto whole = static_cast<std::uint64_t>(x);
  return static_cast<double>(whole) < x ? whole + 1 : whole;
}

}  // namespace detail

// The functions below take and return seconds. `save_s` is the pause of the application for one save (for an
// asynchronous one the stall, not the time until it is durable), `mtbf_s` the mean time between failures of
// the whole job, `recovery_s` the time from a failure until the job computes again, `work_s` the computing
// time between two saves. All throw `argument_error` for NaN, negative numbers, an mtbf of 0, and infinite
// times except mtbf.
//
// If a save costs nothing the result is 0: save at every step. For a job that never fails (`never_s`) it is
// `never_s`, unless saves cost nothing.

/// Returns the work between two saves that loses least, to first order: sqrt(2 save mtbf) (J. W. Young, CACM
/// 17(9), 1974). Accurate while saves are short compared with the mtbf; otherwise too long, see
/// `daly_interval`.
[[nodiscard]] constexpr double young_interval(double save_s, double mtbf_s) {
  detail::checked_finite(save_s, "young_interval", "save_s");
  detail::checked_mtbf(mtbf_s, "young_interval");
  if (save_s == 0) return 0;
  return detail::newton_sqrt(2 * save_s) * detail::newton_sqrt(mtbf_s);
}

/// Returns the work between two saves that loses least, to higher order (J. T. Daly, Future Generation
/// Computer Systems 22(3), 2006): with x = save / (2 mtbf), sqrt(2 save mtbf) (1 + sqrt(x) / 3 + x / 9) -
/// save; the mtbf itself if a save takes two of them or more.
[[nodiscard]] constexpr double daly_interval(double save_s, double mtbf_s) {
  detail::checked_finite(save_s, "daly_interval", "save_s");
  detail::checked_mtbf(mtbf_s, "daly_interval");
  if (save_s == 0) return 0;
  if (mtbf_s == never_s) return never_s;
  if (save_s / 2 >= mtbf_s) return mtbf_s;
  const double x = save_s / 2 / mtbf_s;
  return young_interval(save_s, mtbf_s) * (1 + detail::newton_sqrt(x) / 3 + x / 9) - save_s;
}

/// Returns the period from the beginning of one save to the beginning of the next that gives the highest
/// availability: save + sqrt(2 (mtbf + recovery) save + save^2) (Saxena et al., arXiv 2410.18124). It
/// maximises (1 - save / period) mtbf / (mtbf + recovery + period / 2). Subtract the save to compare it with
/// the two above.
[[nodiscard]] constexpr double availability_period(double save_s, double mtbf_s, double recovery_s) {
  detail::checked_finite(save_s, "availability_period", "save_s");
  detail::checked_mtbf(mtbf_s, "availability_period");
  detail::checked_finite(recovery_s, "availability_period", "recovery_s");
  if (save_s == 0) return 0;
  if (mtbf_s == never_s) return never_s;
  return save_s + detail::newton_sqrt(save_s) * detail::newton_sqrt(2 * (mtbf_s + recovery_s) + save_s);
}

/// Returns the share of all time that becomes saved work, if failures come at random at a constant rate, also
/// during saves and recovery: work / (mtbf e^(recovery / mtbf) (e^((work + save) / mtbf) - 1)), Daly's
/// complete model. Exact for saves that stop the work. 0 for no work, unless saves are free; 0 for endless
/// work, unless nothing fails.
[[nodiscard]] constexpr double expected_availability(double work_s, double save_s, double mtbf_s,
                                                     double recovery_s) {
  detail::checked_seconds(work_s, "expected_availability", "work_s");
  detail::checked_finite(save_s, "expected_availability", "save_s");
  detail::checked_mtbf(mtbf_s, "expected_availability");
  detail::checked_finite(recovery_s, "expected_availability", "recovery_s");
  if (mtbf_s == never_s) {
    if (work_s == never_s || save_s == 0) return 1;
    return work_s / (work_s + save_s);
  }
  if (work_s == never_s || (work_s == 0 && save_s > 0)) return 0;
  const double recovering = 1 + detail::exp_minus_one(recovery_s / mtbf_s);
  if (work_s == 0) return 1 / recovering;
  return work_s / (mtbf_s * recovering * detail::exp_minus_one((work_s + save_s) / mtbf_s));
}

/// Returns the time of saves relative to that of the work: save / work. Infinite for saves without work
/// between them.
[[nodiscard]] constexpr double save_overhead(double work_s, double save_s) {
  detail::checked_seconds(work_s, "save_overhead", "work_s");
  detail::checked_finite(save_s, "save_overhead", "save_s");
  if (save_s == 0) return 0;
  return work_s == 0 ? never_s : save_s / work_s;
}

/// The assumptions of an `interval_tuner` before it has measurements, and its limits.
struct interval_options {
  double step_s = 1;            ///< of one training step; above 0
  double stall_s = 0;           ///< time that a save stalls the steps
  double durable_s = 0;         ///< from the beginning of a save until it survives a crash
  double mtbf_s = 24 * 3600.0;  ///< expected before the first failure; `never_s`: never
  /// The weight of `mtbf_s`, in failures. With 1, the first observed failure weighs as much; with more, the
  /// tuner adapts more slowly.
  double prior_failures = 1;
  double recovery_s = 0;  ///< after a failure, for the expected availability
  /// The most that saves may add to the time of the steps, as a ratio. The default is CheckFreq's bound
  /// (Mohan, Phanishayee, Chidambaram, FAST 2021). Above 0.
  double overhead_cap = 0.035;
};

/// The limit that determined an interval.
enum class interval_bound : std::uint8_t {
  failures,    ///< the optimum for the failure rate
  overhead,    ///< the cap on overhead requires fewer saves
  durability,  ///< the previous save must first be durable
};

/// An interval: save every `steps` steps.
struct save_interval {
  std::uint64_t steps = 1;  ///< at least 1; `never_steps` when nothing ever fails and saves cost time
  interval_bound bound = interval_bound::failures;
  double work_s = 0;        ///< time of these steps
  double overhead = 0;      ///< added by saving, see `save_overhead`
  double availability = 0;  ///< see `expected_availability`; ignores the loss of a save in progress
};

/// Computes how often to save, from measured steps and saves and the observed failures.
///
/// The optimum is Daly's, computed for the stall, because an asynchronous save costs only that. The time
/// until the save is durable changes the loss by a failure, but not the position of the optimum. The interval
/// is then lengthened until saves stay within the cap, and each begins after the previous one is durable.
/// Step and stall times are running means (an eighth of each new value); for stall and durable time, the last
/// value counts if it is larger. The failure rate is that of a gamma prior: (prior failures + seen) / (prior
/// failures x mtbf + observed time).
///
/// A plain value; the same observations give the same answers. Each call is O(1), and allocates nothing.
///
/// @par Thread safety   as a plain value.
/// @par Errors          `argument_error` for invalid times; the tuner is unchanged.
class interval_tuner {
 public:
  explicit constexpr interval_tuner(const interval_options& options) : options_(options) {
    const char* const who = "interval_tuner";
    detail::checked_finite(options.step_s, who, "step_s");
    detail::checked_finite(options.stall_s, who, "stall_s");
    detail::checked_finite(options.durable_s, who, "durable_s");
    detail::checked_mtbf(options.mtbf_s, who);
    detail::checked_finite(options.recovery_s, who, "recovery_s");
    if (options.step_s == 0) throw argument_error("interval_tuner: step_s is 0; give the time of a step");
    if (!(options.prior_failures > 0) || options.prior_failures == never_s) {
      throw argument_error("interval_tuner: prior_failures is " + std::to_string(options.prior_failures) +
                           "; give a finite number above 0");
    }
    if (!(options.overhead_cap > 0)) {
      throw argument_error("interval_tuner: overhead_cap is " + std::to_string(options.overhead_cap) +
                           "; give a part of the time above 0, such as 0.035");
    }
  }

  /// Records a step of `seconds`, without saves. Steps of 0 are ignored.
  constexpr void observe_step(double seconds) {
    detail::checked_finite(seconds, "interval_tuner", "a step");
    if (seconds == 0) return;
    options_.step_s = steps_seen_ == 0 ? seconds : options_.step_s + (seconds - options_.step_s) / 8;
    if (steps_seen_ == 0) steps_seen_ = 1;
  }

  /// Records a save that stalled the steps for `stall_s`, and was durable `durable_s` after it began.
  constexpr void observe_save(double stall_s, double durable_s) {
    detail::checked_finite(stall_s, "interval_tuner", "stall_s");
    detail::checked_finite(durable_s, "interval_tuner", "durable_s");
    options_.stall_s = saves_seen_ == 0 ? stall_s : options_.stall_s + (stall_s - options_.stall_s) / 8;
    options_.durable_s =
        saves_seen_ == 0 ? durable_s : options_.durable_s + (durable_s - options_.durable_s) / 8;
    saves_seen_ = 1;
    last_stall_s_ = stall_s;
    last_durable_s_ = durable_s;
  }

  /// Records that the job ran for `seconds`, in which it failed `failures` times.
  constexpr void observe_run(double seconds, std::uint64_t failures) {
    detail::checked_finite(seconds, "interval_tuner", "a run");
    observed_s_ += seconds;
    failures_ += static_cast<double>(failures);
  }

  /// Returns the present estimate of the mean time between failures.
  [[nodiscard]] constexpr double mtbf_s() const noexcept {
    if (options_.mtbf_s == never_s) return failures_ == 0 ? never_s : observed_s_ / failures_;
    return (options_.prior_failures * options_.mtbf_s + observed_s_) / (options_.prior_failures + failures_);
  }
  [[nodiscard]] constexpr double step_s() const noexcept { return options_.step_s; }
  /// Returns the larger of the last stall and the mean stall; `durable_s` does the same for the time until
  /// durable.
  [[nodiscard]] constexpr double stall_s() const noexcept { return larger(options_.stall_s, last_stall_s_); }
  [[nodiscard]] constexpr double durable_s() const noexcept {
    return larger(options_.durable_s, last_durable_s_);
  }

  /// Returns how often to save now.
  [[nodiscard]] constexpr save_interval interval() const {
    const double step = step_s();
    const double stall = stall_s();
    // Not 0: after a failure in zero observed time with the prior `never_s`, save as often as possible.
    const double mtbf = larger(mtbf_s(), std::numeric_limits<double>::min());
    save_interval found{};
    found.steps = best_steps(step, stall, mtbf);
    const auto at_least = [&](std::uint64_t steps, interval_bound bound) {
      if (steps > found.steps) {
        found.steps = steps;
        found.bound = bound;
      }
    };
    at_least(steps_of(durable_s(), step), interval_bound::durability);
    at_least(steps_of(stall / options_.overhead_cap, step), interval_bound::overhead);
    found.work_s = found.steps == never_steps ? never_s : static_cast<double>(found.steps) * step;
    found.overhead = save_overhead(found.work_s, stall);
    found.availability = expected_availability(found.work_s, stall, mtbf, options_.recovery_s);
    return found;
  }
  [[nodiscard, deprecated("call interval()")]] constexpr save_interval every() const { return interval(); }

 private:
  [[nodiscard]] static constexpr double larger(double a, double b) noexcept { return a > b ? a : b; }

  // Returns the fewest steps that take `seconds`, robust against the rounding of a division.
  [[nodiscard]] static constexpr std::uint64_t steps_of(double seconds, double step) noexcept {
    const std::uint64_t steps = detail::ceil_steps(seconds / step);
    return steps != never_steps && static_cast<double>(steps) * step < seconds ? steps + 1 : steps;
  }

  // Returns the better of the two step counts next to Daly's interval.
  [[nodiscard]] constexpr std::uint64_t best_steps(double step, double stall, double mtbf) const {
    const std::uint64_t above = detail::ceil_steps(daly_interval(stall, mtbf) / step);
    if (above <= 1) return 1;
    if (above == never_steps) return never_steps;
    const auto at = [&](std::uint64_t steps) {
      return expected_availability(static_cast<double>(steps) * step, stall, mtbf, options_.recovery_s);
    };
    return at(above - 1) >= at(above) ? above - 1 : above;
  }

  interval_options options_;  // its times become running means at the first observation
  double last_stall_s_ = 0;
  double last_durable_s_ = 0;
  double observed_s_ = 0;
  double failures_ = 0;
  std::uint8_t steps_seen_ = 0;
  std::uint8_t saves_seen_ = 0;
};

}  // namespace v0
}  // namespace llmmem
