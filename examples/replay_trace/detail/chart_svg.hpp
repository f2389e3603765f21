/// @file
/// The drawing of `draw_svg`.
#pragma once

#include <iterator>

#include "replay_trace/chart.hpp"

namespace replay_trace {
namespace detail {

struct line_style {
  const char* colour;
  const char* dash;
};

inline constexpr std::array<line_style, 6> line_styles{{{"#2f81f7", "none"},
                                                        {"#d9730d", "7 4"},
                                                        {"#1a9e63", "2 4"},
                                                        {"#b45bd8", "11 3 2 3"},
                                                        {"#d8505c", "4 2"},
                                                        {"#8a7a22", "1 3"}}};

/// A marker of the `shape`-th kind around (x, y): circle, square, diamond, triangle.
[[nodiscard]] inline std::string marker(std::size_t shape, double x, double y, const char* colour) {
  switch (shape % 4) {
    case 0:
      return fmt::format("<circle cx='{:.1f}' cy='{:.1f}' r='3.2' fill='{}'/>\n", x, y, colour);
    case 1:
      return fmt::format("<rect x='{:.1f}' y='{:.1f}' width='6' height='6' fill='{}'/>\n", x - 3, y - 3,
                         colour);
    case 2:
      return fmt::format("<path d='M{:.1f} {:.1f}l4.2 4.2l-4.2 4.2l-4.2 -4.2z' fill='{}'/>\n", x, y - 4.2,
                         colour);
    default:
      return fmt::format("<path d='M{:.1f} {:.1f}l4 7l-8 0z' fill='{}'/>\n", x, y - 4.2, colour);
  }
}

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
                 f::bottom + 48, xml_text(axis));
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
  fmt::format_to(
      out,
      "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {} {}' width='{}' height='{}' role='img'>\n"
      "<title>{}</title>\n"
      "<style>\n"
      "text {{ font: 13px system-ui, sans-serif; fill: #737b87; }}\n"
      ".title {{ font-size: 16px; font-weight: 600; }}\n"
      ".label {{ font-weight: 600; }}\n"
      ".axis {{ stroke: #737b87; }}\n"
      ".grid {{ stroke: #737b87; stroke-opacity: 0.22; }}\n"
      ".ceiling {{ stroke: #737b87; stroke-dasharray: 3 3; }}\n"
      ".series {{ fill: none; stroke-width: 2.2; stroke-linejoin: round; }}\n"
      "</style>\n",
      f::width, f::height, f::width, f::height, detail::xml_text(chart.title));
  fmt::format_to(out, "<text class='title' x='{}' y='28'>{}</text>\n", f::left,
                 detail::xml_text(chart.title));
  detail::draw_axes(svg, frame, chart.axis);

  struct label {
    std::string text;
    const char* colour;
    double x;
    double y;
  };
  std::vector<label> labels;
  if (chart.ceiling) {
    const double y = frame.y(*chart.ceiling);
    fmt::format_to(out, "<line class='ceiling' x1='{}' x2='{}' y1='{:.1f}' y2='{:.1f}'/>\n", f::left,
                   f::right, y, y);
    labels.push_back({fmt::format("ceiling {:.1f}%", *chart.ceiling * 100), "#737b87", f::right, y});
  }
  for (std::size_t i = 0; i < chart.series.size(); ++i) {
    const chart_series& line = chart.series[i];
    const detail::line_style style = detail::line_styles.at(i % detail::line_styles.size());
    fmt::format_to(out, "<polyline class='series' stroke='{}' stroke-dasharray='{}' points='", style.colour,
                   style.dash);
    for (const chart_point& point : line.points) {
      fmt::format_to(out, "{:.1f},{:.1f} ", frame.x(point.capacity), frame.y(point.ratio));
    }
    svg += "'/>\n";
    for (const chart_point& point : line.points) {
      svg += detail::marker(i, frame.x(point.capacity), frame.y(point.ratio), style.colour);
    }
    const chart_point last = line.points.back();
    labels.push_back({line.name, style.colour, frame.x(last.capacity), frame.y(last.ratio)});
  }

  std::vector<double> wanted;
  for (const label& l : labels)
    wanted.push_back(l.y);
  const auto placed = detail::spread_labels(wanted, 17, f::top + 4, f::bottom - 4);
  for (std::size_t i = 0; i < labels.size(); ++i) {
    const label& l = labels[i];
    fmt::format_to(out,
                   "<path d='M{:.1f} {:.1f}L{:.1f} {:.1f}' fill='none' stroke='{}' stroke-opacity='0.6'/>\n"
                   "<text class='label' x='{:.1f}' y='{:.1f}' style='fill: {}'>{}</text>\n",
                   l.x + 5, l.y, f::right + 16, placed[i], l.colour, f::right + 19, placed[i] + 4.5, l.colour,
                   detail::xml_text(l.text));
  }
  return svg + "</svg>\n";
}

}  // namespace replay_trace
