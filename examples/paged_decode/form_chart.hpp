/// @file
/// What the forms of keys and values cost a model, against their bytes, as a picture.
#pragma once

#include <llmmem/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <string>
#include <vector>

#include "common/svg.hpp"
#include "paged_decode/perplexity.hpp"

namespace paged_decode {
namespace detail {

/// A form in the picture.
struct form_point {
  std::string name;
  std::size_t kind;  ///< 0: a form of all tokens; 1: a cold tier's codec; 2: a form with a budget of tokens
  double bytes;      ///< of a window, divided by its tokens
  double divergence;
};

[[nodiscard]] inline std::vector<form_point> form_points(const perplexity_finding& found) {
  std::vector<form_point> out;
  for (const form_quality& each : found.forms) {
    out.push_back(
        {std::string(name_of(each.form)), 0, static_cast<double>(each.bytes_per_token), each.divergence});
  }
  for (const form_quality& each : found.cold) {
    out.push_back({"cold " + each.cold_name, 1, static_cast<double>(each.bytes_per_token), each.divergence});
  }
  const auto context = static_cast<double>(found.shape.context);
  for (const form_quality& each : found.kept) {
    out.push_back({fmt::format("{} of {}", each.budget.budget, name_of(each.form)), 2,
                   static_cast<double>(each.most_held * each.bytes_per_token) / context, each.divergence});
  }
  // A logarithm has no place for what changes nothing, nor for what is not finite.
  std::erase_if(out, [](const form_point& each) {
    return !(each.divergence > 0) || !std::isfinite(each.divergence) || !(each.bytes > 0);
  });
  return out;
}

/// Maps bytes and divergences, both by logarithm, to the plot's pixels. Many labels make it higher.
struct form_frame {
  static constexpr double width = 900;
  static constexpr double left = 76, right = 640, top = 56;
  static constexpr double first_label = top + 4;

  double bottom, height;
  double x_low, x_high, y_low, y_high;

  explicit form_frame(const std::vector<form_point>& points) {
    bottom = std::max(496.0, first_label + example::label_gap * static_cast<double>(points.size()));
    height = bottom + 64;
    const auto [least, most] = std::ranges::minmax_element(points, {}, &form_point::bytes);
    const auto [near, far] = std::ranges::minmax_element(points, {}, &form_point::divergence);
    x_low = std::floor(std::log2(least->bytes));
    x_high = std::max(std::ceil(std::log2(most->bytes)), x_low + 1);
    y_low = std::floor(std::log10(near->divergence));
    y_high = std::max(std::ceil(std::log10(far->divergence)), y_low + 1);
  }
  [[nodiscard]] double x(double bytes) const {
    return left + (std::log2(bytes) - x_low) / (x_high - x_low) * (right - left);
  }
  [[nodiscard]] double y(double divergence) const {
    return bottom - (std::log10(divergence) - y_low) / (y_high - y_low) * (bottom - top);
  }
};

inline void draw_form_axes(std::string& svg, const form_frame& frame) {
  using f = form_frame;
  const auto out = std::back_inserter(svg);
  for (double power = frame.y_low; power <= frame.y_high; ++power) {
    const double y = frame.y(std::pow(10, power));
    fmt::format_to(out,
                   "<line class='grid' x1='{}' x2='{}' y1='{:.1f}' y2='{:.1f}'/>\n"
                   "<text x='{}' y='{:.1f}' text-anchor='end'>1e{:.0f}</text>\n",
                   f::left, f::right, y, y, f::left - 9, y + 4.5, power);
  }
  for (double power = frame.x_low; power <= frame.x_high; ++power) {
    const double x = frame.x(std::exp2(power));
    fmt::format_to(out,
                   "<line class='axis' x1='{:.1f}' x2='{:.1f}' y1='{}' y2='{}'/>\n"
                   "<text x='{:.1f}' y='{}' text-anchor='middle'>{:.0f}</text>\n",
                   x, x, frame.bottom, frame.bottom + 6, x, frame.bottom + 22, std::exp2(power));
  }
  fmt::format_to(out, "<line class='axis' x1='{}' x2='{}' y1='{}' y2='{}'/>\n", f::left, f::right,
                 frame.bottom, frame.bottom);
  fmt::format_to(out, "<text x='{}' y='{}' text-anchor='middle'>{}</text>\n", (f::left + f::right) / 2,
                 frame.bottom + 46, "bytes of keys and values a token, all layers (logarithmic)");
  fmt::format_to(out,
                 "<text transform='translate(18 {}) rotate(-90)' text-anchor='middle'>KL to f32, mean, in "
                 "nats</text>\n",
                 (f::top + frame.bottom) / 2);
}

}  // namespace detail

/// Draws every measured form: mean divergence against bytes. A form is better the nearer it is to the lower
/// left corner. What has no divergence, or none that is finite, is left out.
/// @throws llmmem::argument_error  if nothing is left to draw.
[[nodiscard]] inline std::string draw_svg(const perplexity_finding& found) {
  using f = detail::form_frame;
  const std::vector<detail::form_point> points = detail::form_points(found);
  if (points.empty())
    throw llmmem::argument_error(
        "chart: no form has a finite divergence above 0, so there is nothing to draw");
  const detail::form_frame frame(points);
  const std::string title = "What forms of keys and values cost a trained model";
  std::string svg = example::svg_opening(f::width, frame.height, title, "");
  svg += example::svg_title(f::left, title);
  detail::draw_form_axes(svg, frame);
  std::vector<example::svg_label> labels;
  for (const detail::form_point& each : points) {
    const char* const colour = example::line_styles.at(each.kind).colour;
    const double x = frame.x(each.bytes);
    const double y = frame.y(each.divergence);
    svg += example::svg_marker(each.kind, x, y, colour);
    labels.push_back({each.name, colour, x, y});
  }
  svg += example::svg_labels(labels, f::right + 16, f::first_label, frame.bottom - 4);
  return svg + "</svg>\n";
}

}  // namespace paged_decode
