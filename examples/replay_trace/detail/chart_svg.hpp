/// @file
/// The drawing of `draw_svg`.
#pragma once

#include <iterator>

#include "common/svg.hpp"
#include "replay_trace/chart.hpp"

namespace replay_trace {
namespace detail {

inline void draw_axes(std::string& svg, const chart_frame& frame, const std::string& axis) {
  using f = chart_frame;
  const auto out = std::back_inserter(svg);
  for (int i = 0; i * frame.ratio_step <= frame.ratio_high + 1e-9; ++i) {
    const double ratio = i * frame.ratio_step;
    fmt::format_to(out, "<line class='grid' x1='{}' x2='{}' y1='{:.1f}' y2='{:.1f}'/>\n", f::left, f::right,
                   frame.y(ratio), frame.y(ratio));
    fmt::format_to(out, "<text x='{}' y='{:.1f}' text-anchor='end'>{:.0f}%</text>\n", f::left - 9,
                   frame.y(ratio) + 4.5, ratio * 100);
  }
  // 1, 2 and 5 of each power of ten; beyond three powers of ten only the powers carry text.
  const bool few = frame.log_high - frame.log_low <= 3.2;
  std::uint64_t power = 1;
  for (int digit = 0; digit <= 18; ++digit, power *= 10) {
    for (const std::uint64_t step : {1U, 2U, 5U}) {
      const double at = std::log10(static_cast<double>(power) * static_cast<double>(step));
      if (at < frame.log_low - 1e-9 || at > frame.log_high + 1e-9) continue;
      const double x = frame.x(power * step);
      fmt::format_to(out, "<line class='axis' x1='{:.1f}' x2='{:.1f}' y1='{}' y2='{}'/>\n", x, x, f::bottom,
                     f::bottom + (step == 1 ? 7 : 4));
      if (few || step == 1) {
        fmt::format_to(out, "<text x='{:.1f}' y='{}' text-anchor='middle'>{}</text>\n", x, f::bottom + 22,
                       tick_text(power * step));
      }
    }
  }
  fmt::format_to(out, "<line class='axis' x1='{}' x2='{}' y1='{}' y2='{}'/>\n", f::left, f::right, f::bottom,
                 f::bottom);
  fmt::format_to(out, "<text x='{}' y='{}' text-anchor='middle'>{}</text>\n", (f::left + f::right) / 2,
                 f::bottom + 48, example::xml_text(axis));
  fmt::format_to(
      out, "<text transform='translate(18 {}) rotate(-90)' text-anchor='middle'>block hit ratio</text>\n",
      (f::top + f::bottom) / 2);
}

}  // namespace detail

inline std::string draw_svg(const hit_ratio_chart& chart) {
  using f = detail::chart_frame;
  detail::check_chart(chart);
  const detail::chart_frame frame(chart);
  std::string svg;
  const auto out = std::back_inserter(svg);
  svg += example::svg_opening(f::width, f::height, chart.title,
                              ".ceiling { stroke: #737b87; stroke-dasharray: 3 3; }\n"
                              ".series { fill: none; stroke-width: 2.2; stroke-linejoin: round; }\n");
  svg += example::svg_title(f::left, chart.title);
  detail::draw_axes(svg, frame, chart.axis);

  std::vector<example::svg_label> labels;
  if (chart.ceiling) {
    const double y = frame.y(*chart.ceiling);
    fmt::format_to(out, "<line class='ceiling' x1='{}' x2='{}' y1='{:.1f}' y2='{:.1f}'/>\n", f::left,
                   f::right, y, y);
    labels.push_back({fmt::format("ceiling {:.1f}%", *chart.ceiling * 100), "#737b87", f::right, y});
  }
  for (std::size_t i = 0; i < chart.series.size(); ++i) {
    const chart_series& line = chart.series[i];
    const example::line_style style = example::line_styles.at(i % example::line_styles.size());
    fmt::format_to(out, "<polyline class='series' stroke='{}' stroke-dasharray='{}' points='", style.colour,
                   style.dash);
    for (const chart_point& point : line.points) {
      fmt::format_to(out, "{:.1f},{:.1f} ", frame.x(point.capacity), frame.y(point.ratio));
    }
    svg += "'/>\n";
    for (const chart_point& point : line.points) {
      svg += example::svg_marker(i, frame.x(point.capacity), frame.y(point.ratio), style.colour);
    }
    const chart_point last = line.points.back();
    labels.push_back({line.name, style.colour, frame.x(last.capacity), frame.y(last.ratio)});
  }

  svg += example::svg_labels(labels, f::right + 16, f::top + 4, f::bottom - 4);
  return svg + "</svg>\n";
}

}  // namespace replay_trace
