/// @file
/// The parts that the examples' SVG pictures share.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace example {

/// `text` as XML text: markup escaped, characters outside XML 1.0 (and all non-ASCII) as `?`.
[[nodiscard]] inline std::string xml_text(std::string_view text) {
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '&') {
      out += "&amp;";
    } else if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else if (c == '"') {
      out += "&quot;";
    } else {
      out += byte < 0x20 || byte >= 0x7f ? '?' : c;
    }
  }
  return out;
}

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
[[nodiscard]] inline std::string svg_marker(std::size_t shape, double x, double y, const char* colour) {
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

/// Places labels so that neighbours are `gap` apart and all are within [top, bottom] if possible, each as
/// near its `wanted` place as the order allows.
[[nodiscard]] inline std::vector<double> spread_labels(const std::vector<double>& wanted, double gap,
                                                       double top, double bottom) {
  std::vector<std::size_t> order(wanted.size());
  for (std::size_t i = 0; i < order.size(); ++i)
    order[i] = i;
  std::sort(order.begin(), order.end(),
            [&](auto a, auto b) { return std::pair(wanted[a], a) < std::pair(wanted[b], b); });
  std::vector<double> placed(wanted);
  double least = top;
  for (const std::size_t i : order) {
    placed[i] = std::max(placed[i], least);
    least = placed[i] + gap;
  }
  double most = bottom;
  for (auto i = order.rbegin(); i != order.rend(); ++i) {
    placed[*i] = std::min(placed[*i], most);
    most = placed[*i] - gap;
  }
  return placed;
}

/// The name of what is drawn at (x, y).
struct svg_label {
  std::string text;
  const char* colour;
  double x;
  double y;
};

inline constexpr double label_gap = 17;  ///< pixels from a label to the next

/// Writes labels one below the other to the right of `x`, each with a line to what it names.
[[nodiscard]] inline std::string svg_labels(const std::vector<svg_label>& labels, double x, double top,
                                            double bottom) {
  std::vector<double> wanted;
  for (const svg_label& each : labels)
    wanted.push_back(each.y);
  const std::vector<double> placed = spread_labels(wanted, label_gap, top, bottom);
  std::string out;
  for (std::size_t i = 0; i < labels.size(); ++i) {
    const svg_label& each = labels[i];
    out += fmt::format(
        "<path d='M{:.1f} {:.1f}L{:.1f} {:.1f}' fill='none' stroke='{}' stroke-opacity='0.6'/>\n"
        "<text class='label' x='{:.1f}' y='{:.1f}' style='fill: {}'>{}</text>\n",
        each.x + 5, each.y, x, placed[i], each.colour, x + 3, placed[i] + 4.5, each.colour,
        xml_text(each.text));
  }
  return out;
}

/// The beginning of a self-contained SVG without background, fonts or scripts.
/// @param styles  CSS of the picture's own classes.
[[nodiscard]] inline std::string svg_opening(double width, double height, std::string_view title,
                                             std::string_view styles) {
  return fmt::format(
      "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {} {}' width='{}' height='{}' role='img'>\n"
      "<title>{}</title>\n"
      "<style>\n"
      "text {{ font: 13px system-ui, sans-serif; fill: #737b87; }}\n"
      ".title {{ font-size: 16px; font-weight: 600; }}\n"
      ".label {{ font-weight: 600; }}\n"
      ".axis {{ stroke: #737b87; }}\n"
      ".grid {{ stroke: #737b87; stroke-opacity: 0.22; }}\n"
      "{}</style>\n",
      width, height, width, height, xml_text(title), styles);
}

[[nodiscard]] inline std::string svg_title(double x, std::string_view title) {
  return fmt::format("<text class='title' x='{}' y='28'>{}</text>\n", x, xml_text(title));
}

}  // namespace example
