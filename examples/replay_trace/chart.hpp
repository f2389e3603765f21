/// @file
/// Hit ratio against capacity as an SVG picture.
#pragma once

#include <llmmem/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace replay_trace {

struct chart_point {
  std::uint64_t capacity;  ///< in the unit of the axis, at least 1
  double ratio;            ///< 0 to 1
};

struct chart_series {
  std::string name;
  std::vector<chart_point> points;  ///< in ascending order of capacity
};

struct hit_ratio_chart {
  std::string title;
  std::vector<chart_series> series;
  std::optional<double> ceiling;  ///< the ratio that no capacity exceeds
  std::string axis = "capacity (blocks, logarithmic)";
};

namespace detail {

/// 50000 as `50k`.
[[nodiscard]] inline std::string tick_text(std::uint64_t value) {
  if (value >= 1'000'000'000'000 && value % 1'000'000'000'000 == 0)
    return fmt::format("{}T", value / 1'000'000'000'000);
  if (value >= 1'000'000'000 && value % 1'000'000'000 == 0) return fmt::format("{}G", value / 1'000'000'000);
  if (value >= 1'000'000 && value % 1'000'000 == 0) return fmt::format("{}M", value / 1'000'000);
  if (value >= 1'000 && value % 1'000 == 0) return fmt::format("{}k", value / 1'000);
  return fmt::format("{}", value);
}

/// Maps capacities (by logarithm) and ratios to the plot's pixels.
struct chart_frame {
  static constexpr double width = 790, height = 440;
  static constexpr double left = 66, right = 652, top = 56, bottom = 376;

  double log_low, log_high;
  double ratio_step, ratio_high;

  explicit chart_frame(const hit_ratio_chart& chart) {
    std::uint64_t low = ~std::uint64_t{0};
    std::uint64_t high = 0;
    double most = chart.ceiling.value_or(0);
    for (const chart_series& line : chart.series) {
      for (const chart_point& point : line.points) {
        low = std::min(low, point.capacity);
        high = std::max(high, point.capacity);
        most = std::max(most, point.ratio);
      }
    }
    log_low = std::log10(static_cast<double>(low));
    log_high = std::log10(static_cast<double>(high));
    if (const double missing = 1 - (log_high - log_low); missing > 0) {  // a power of ten has three ticks
      log_low -= missing / 2;
      log_high += missing / 2;
    }
    ratio_step = 0.2;
    for (const double step : {0.1, 0.05, 0.02, 0.01}) {
      if (most <= step * 6) ratio_step = step;
    }
    ratio_high = ratio_step * std::max(1.0, std::ceil(most / ratio_step + 0.2));
    if (ratio_high > 1) ratio_high = 1;
  }

  [[nodiscard]] double x(std::uint64_t capacity) const {
    return left +
           (std::log10(static_cast<double>(capacity)) - log_low) / (log_high - log_low) * (right - left);
  }
  [[nodiscard]] double y(double ratio) const { return bottom - ratio / ratio_high * (bottom - top); }
};

inline void check_chart(const hit_ratio_chart& chart) {
  for (const chart_series& line : chart.series) {
    if (line.points.empty())
      throw llmmem::argument_error("chart: series \"" + line.name + "\" has no points");
    for (const chart_point& point : line.points) {
      if (point.capacity == 0) {
        throw llmmem::argument_error("chart: series \"" + line.name +
                                     "\" has a point at capacity 0, which a logarithmic axis cannot show");
      }
      if (!(point.ratio >= 0 && point.ratio <= 1)) {
        throw llmmem::argument_error(fmt::format(
            "chart: series \"{}\" has the hit ratio {} at capacity {}; it must be between 0 and 1", line.name,
            point.ratio, point.capacity));
      }
    }
  }
  if (chart.series.empty()) throw llmmem::argument_error("chart: nothing to draw, there is no series");
  if (chart.ceiling && !(*chart.ceiling >= 0 && *chart.ceiling <= 1)) {
    throw llmmem::argument_error(
        fmt::format("chart: the ceiling is {}; it must be between 0 and 1", *chart.ceiling));
  }
}

}  // namespace detail

/// Draws `chart` as a self-contained SVG without background, fonts or scripts.
///
/// All colours are mid-tones with a contrast of 3 or more against white and against near-black, so that the
/// picture suits light and dark pages; lines also differ in dash and marker.
///
/// @throws llmmem::argument_error  for no series, a series without points, capacity 0, or a ratio outside [0,
///         1].
[[nodiscard]] std::string draw_svg(const hit_ratio_chart& chart);

}  // namespace replay_trace

#include "replay_trace/detail/chart_svg.hpp"
