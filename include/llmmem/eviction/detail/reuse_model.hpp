/// @file
/// Estimates by class and age how likely the next use of an idle entry is: proportional hazards, learned
/// online.
#pragma once

#include <llmmem/eviction/detail/idle_history.hpp>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <numbers>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The rate of reuse of an idle entry: a curve over its age, common to all, times the factor of its class.
///
/// Ages are split at powers of two. For every class and span the model counts the periods that reached the
/// span, and the periods that ended with a reuse. Both include open periods up to their present age, so
/// unfinished periods do not bias the fit. The prior of a span's chance of reuse is the chance of the span
/// before it, and the prior of a factor is its first guess; each counts like a few observations. Without data
/// the order is that of recency, weighted by uses.
///
/// Factors never fall with the uses, and the curve never rises with age (`hazard_eviction` relies on both).
class reuse_model {
 public:
  // Classes: ends of chains by uses; then other entries used once, by the length of their chain; then all
  // others, by uses.
  static constexpr std::uint32_t use_classes = 7;  // 1, 2, 3, 4-5, 6-8, 9-16, more
  static constexpr std::uint32_t length_classes = 8;
  static constexpr std::uint32_t classes = use_classes + length_classes + (use_classes - 1);

  explicit reuse_model(std::uint64_t longest_age) noexcept
      : counted_(std::min(spans, static_cast<std::uint32_t>(std::bit_width(longest_age - 1)))) {
    fit();
  }

  /// Returns the class of a chain's length, in powers of two: 0 or 1, 2 or 3, 4 to 7...
  [[nodiscard]] static std::uint8_t length_class(std::uint32_t chain) noexcept {
    return static_cast<std::uint8_t>(
        std::min<std::uint32_t>(length_classes - 1, static_cast<std::uint32_t>(std::bit_width(chain / 2))));
  }

  [[nodiscard]] static std::uint8_t class_of(std::uint8_t uses, std::uint8_t length, bool is_end) noexcept {
    std::uint32_t used = 0;
    for (const std::uint32_t limit : {1U, 2U, 3U, 5U, 8U, 16U})
      used += uses > limit ? 1U : 0U;
    if (is_end) return static_cast<std::uint8_t>(used);
    if (used == 0) return static_cast<std::uint8_t>(use_classes + length);
    return static_cast<std::uint8_t>(use_classes + length_classes + used - 1);
  }

  /// Counts a period that has begun and enters the first span; earlier periods that are still open may enter
  /// a later span.
  void count_idle(const idle_history& history) noexcept {
    ++reached_[history.class_of(history.now())][0];
    for (std::uint32_t s = 1; s < counted_; ++s) {
      const std::uint64_t age = std::uint64_t{1} << s;
      if (age >= history.now()) return;
      const std::uint8_t in = history.class_of(history.now() - age);
      if (in != idle_history::ended) ++reached_[in][s];
    }
  }

  /// Counts the end of a period of class `in` at `age`, because its entry was used.
  void count_reuse(std::uint8_t in, std::uint64_t age) noexcept {
    ++reused_[in];
    ++reused_at_[std::min(span_of(age), counted_ - 1)];
  }

  /// Halves the weight of past counts.
  void halve() noexcept {
    for (auto& of_class : reached_)
      for (double& n : of_class)
        n /= 2;
    for (double& n : reused_)
      n /= 2;
    for (double& n : reused_at_)
      n /= 2;
  }

  void fit() noexcept {
    double chance[spans];
    double before = 0.01;
    for (std::uint32_t s = 0; s < spans; ++s) {
      double reached = 0;
      for (const auto& of_class : reached_)
        reached += of_class[s];
      chance[s] = before = std::min(0.9, (reused_at_[s] + 50 * before) / (reached + 50));
      curve_[s] = chance[s] / static_cast<double>(std::uint64_t{1} << s);
    }
    for (std::uint32_t s = spans - 1; s-- > 0;)
      curve_[s] = std::max(curve_[s], curve_[s + 1]);

    for (std::uint32_t c = 0; c < classes; ++c) {
      double expected = 0;  // reuses if all classes were alike
      for (std::uint32_t s = 0; s < counted_; ++s)
        expected += reached_[c][s] * chance[s];
      const double lean = guess_root(c);
      factor_[c] = (reused_[c] + guess_weight * lean) / (expected + guess_weight / lean);
    }
    order_factors();
  }

  [[nodiscard]] double rate(std::uint32_t in, std::uint64_t age) const noexcept {
    const std::uint32_t s = span_of(age);
    if (s + 1 >= spans) return factor_[in] * curve_[spans - 1];
    const std::uint64_t width = std::uint64_t{1} << s;
    const double into = age < width ? 0 : static_cast<double>(age - width) / static_cast<double>(width);
    return factor_[in] * (curve_[s] + into * (curve_[s + 1] - curve_[s]));
  }

 private:
  static constexpr std::uint32_t spans = 40;
  static constexpr double guess_weight = 500;

  [[nodiscard]] static std::uint32_t span_of(std::uint64_t age) noexcept {
    return age < 2 ? 0 : std::min(spans - 1, static_cast<std::uint32_t>(std::bit_width(age) - 1));
  }

  /// Returns the square root of a class's first guess: twice the rate for each class of uses, a tenth for
  /// ends of chains. By the root, data lowers a factor as fast as it raises it.
  [[nodiscard]] static double guess_root(std::uint32_t in) noexcept {
    constexpr std::uint32_t once = use_classes + length_classes - 1;  // the class of one use, if it came last
    double root = in < use_classes ? 0.31622776601683794 : 1;
    for (std::uint32_t used = in < use_classes ? in : in > once ? in - once : 0; used > 0; --used)
      root *= std::numbers::sqrt2;
    return root;
  }

  void order_factors() noexcept {
    constexpr std::uint32_t once = use_classes;
    constexpr std::uint32_t more = once + length_classes;
    double least = factor_[0];
    for (std::uint32_t c = once; c < more; ++c)
      least = std::max(least, factor_[c]);
    for (std::uint32_t c = once; c < more; ++c)
      factor_[c] = std::max(factor_[c], factor_[0]);
    for (std::uint32_t u = 1; u < use_classes; ++u) {
      double& factor = factor_[more + u - 1];
      factor = least = std::max({factor, least, factor_[u]});
    }
  }

  std::uint32_t counted_;             // spans that the history reaches
  double reached_[classes][spans]{};  // periods that reached the span
  double reused_[classes]{};          // periods ended by a reuse
  double reused_at_[spans]{};         // the same, by age
  double curve_[spans]{};             // rate at the start of each span, for factor 1
  double factor_[classes]{};
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
