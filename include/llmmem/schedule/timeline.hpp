/// @file
/// Draws a simulation: Chrome-trace JSON for Perfetto, and SVG.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/schedule/simulate.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Returns `run` in the Trace Event format that chrome://tracing and ui.perfetto.dev read: one track for the
/// program with its stalls, named by cause, and one for each edge and direction with its transfers, named by
/// chunk.
///
/// @pre `run` was made with `timeline_detail::full`; otherwise the tracks are empty.
/// @par Complexity   O(spans), about 100 bytes of text each.
[[nodiscard]] std::string write_chrome_trace(const schedule::simulation& run);

/// The options of `write_timeline_svg`.
struct timeline_svg_options {
  std::uint32_t width = 1200;  ///< pixels of the longest row
  std::uint64_t from_ns = 0;   ///< earlier spans are not drawn
  std::uint64_t until_ns = ~std::uint64_t{0};
};

/// Returns `run` as rows of bars over time: computing, stalls, and each edge and direction. Neighbouring bars
/// of a row that would touch within a tenth of a pixel are drawn as one.
///
/// @throws argument_error  when the width is 0 or over 100,000.
[[nodiscard]] std::string write_timeline_svg(const schedule::simulation& run,
                                             const timeline_svg_options& options = {});

namespace detail {

/// Returns the row or track of a span: 0 for the program, 1 for its stalls, then two per edge.
[[nodiscard]] inline std::size_t row_of(const timeline_span& each) noexcept {
  if (each.kind != schedule::span_kind::transfer) return each.kind == schedule::span_kind::stall ? 1 : 0;
  return 2 + std::size_t{each.tier} * 2 + (each.way == link_direction::offload ? 1 : 0);
}
[[nodiscard]] inline std::string row_name(std::size_t row) {
  if (row < 2) return row == 0 ? "compute" : "stall";
  const std::string upper = std::to_string((row - 2) / 2);
  const std::string lower = std::to_string((row - 2) / 2 + 1);
  return row % 2 == 0 ? "onboard, tier " + lower + " to " + upper : "offload, tier " + upper + " to " + lower;
}
[[nodiscard]] inline std::size_t rows_of(const schedule::simulation& run) noexcept {
  return 2 + run.most_bytes.size() * 2;
}

/// Returns `value` / 10^digits as an exact decimal fraction.
[[nodiscard]] inline std::string decimal(std::uint64_t value, int digits) {
  std::string text = std::to_string(value);
  const auto places = static_cast<std::size_t>(digits);
  if (text.size() <= places) text.insert(0, places + 1 - text.size(), '0');
  text.insert(text.size() - places, 1, '.');
  return text;
}

}  // namespace detail

inline std::string write_chrome_trace(const schedule::simulation& run) {
  std::string text = R"({"displayTimeUnit":"ns","traceEvents":[)"
                     "\n";
  for (std::size_t row = 0; row < detail::rows_of(run); ++row) {
    if (row == 1) continue;
    text += R"({"ph":"M","pid":0,"tid":)" + std::to_string(row) +
            R"(,"name":"thread_name","args":{"name":")" + (row == 0 ? "program" : detail::row_name(row)) +
            R"("}},)"
            "\n";
  }
  for (const timeline_span& each : run.spans) {
    const std::size_t row = each.kind == schedule::span_kind::stall ? 0 : detail::row_of(each);
    text += R"({"ph":"X","pid":0,"tid":)" + std::to_string(row) + R"(,"ts":)" +
            detail::decimal(each.start_ns, 3) + R"(,"dur":)" +
            detail::decimal(each.finish_ns - each.start_ns, 3) + R"(,"name":")";
    if (each.kind == schedule::span_kind::compute) {
      text += R"(compute","args":{"event":)" + std::to_string(each.event);
    } else if (each.kind == schedule::span_kind::stall) {
      text += std::string("stall: ") + name_of(each.cause) + R"(","cname":"terrible","args":{"event":)" +
              std::to_string(each.event) + R"(,"chunk":)" + std::to_string(to_index(each.chunk));
    } else {
      text += "chunk " + std::to_string(to_index(each.chunk)) + R"(","args":{"chunk":)" +
              std::to_string(to_index(each.chunk));
    }
    text += "}},\n";
  }
  text += R"({"ph":"M","pid":0,"name":"process_name","args":{"name":"llmmem schedule"}})"
          "\n"
          "]}"
          "\n";
  return text;
}

inline std::string write_timeline_svg(const schedule::simulation& run, const timeline_svg_options& options) {
  if (options.width == 0 || options.width > 100'000) {
    throw argument_error("write_timeline_svg: a width of " + std::to_string(options.width) +
                         " pixels; it must be 1 to 100000");
  }
  constexpr std::uint64_t left = 170;
  constexpr std::uint64_t row_height = 26;
  std::uint64_t end = options.from_ns + 1;
  for (const timeline_span& each : run.spans)
    end = std::max(end, std::min(each.finish_ns, options.until_ns));
  const std::uint64_t shown = end - options.from_ns;
  const std::size_t rows = detail::rows_of(run);
  const std::uint64_t height = rows * row_height + 40;
  // Works in integers, tenths of a pixel, so that the picture is the same on every machine.
  const std::uint64_t tenths = std::uint64_t{options.width} * 10;
  const auto at = [&](std::uint64_t ns) {
    const std::uint64_t since = std::min(std::max(ns, options.from_ns), end) - options.from_ns;
    return since > ~std::uint64_t{0} / tenths ? since / shown * tenths : since * tenths / shown;
  };
  std::string text = R"(<svg xmlns="http://www.w3.org/2000/svg" width=")" +
                     std::to_string(left + options.width + 20) + R"(" height=")" + std::to_string(height) +
                     R"(" font-family="sans-serif" font-size="12">)"
                     "\n"
                     R"(<rect width="100%" height="100%" fill="white"/>)"
                     "\n";
  struct bar {
    std::uint64_t from = 0;
    std::uint64_t to = 0;
    bool open = false;
  };
  std::vector<bar> bars(rows);
  constexpr const char* colours[] = {"#4c78a8", "#e45756", "#54a24b", "#f2a03d"};
  const auto draw = [&](std::size_t row) {
    bar& each = bars[row];
    if (!each.open) return;
    text += R"(<rect x=")" + detail::decimal(left * 10 + each.from, 1) + R"(" y=")" +
            std::to_string(10 + row * row_height) + R"(" width=")" +
            detail::decimal(std::max<std::uint64_t>(each.to - each.from, 1), 1) + R"(" height=")" +
            std::to_string(row_height - 6) + R"(" fill=")" + colours[row < 2 ? row : 2 + row % 2] +
            R"("/>)"
            "\n";
    each.open = false;
  };
  for (std::size_t row = 0; row < rows; ++row) {
    text += R"(<text x="8" y=")" + std::to_string(10 + row * row_height + 14) + R"(">)" +
            detail::row_name(row) + "</text>\n";
  }
  for (const timeline_span& each : run.spans) {
    if (each.finish_ns <= options.from_ns || each.start_ns >= end) continue;
    const std::size_t row = detail::row_of(each);
    bar& last = bars[row];
    // A gap of half a pixel separates neighbouring bars that are wide enough for it.
    const std::uint64_t from = at(each.start_ns);
    const std::uint64_t to = at(each.finish_ns);
    if (last.open && from <= last.to + 1 && (to - from < 30 || last.to - last.from < 30)) {
      last.to = std::max(last.to, to);
      continue;
    }
    draw(row);
    last = {from, to > from + 30 ? to - 5 : to, true};
  }
  for (std::size_t row = 0; row < rows; ++row)
    draw(row);
  const std::string axis_y = std::to_string(10 + rows * row_height + 14);
  text += R"(<text x=")" + std::to_string(left) + R"(" y=")" + axis_y + R"(">)" +
          detail::decimal(options.from_ns, 6) +
          " ms</text>"
          "\n"
          R"(<text x=")" +
          std::to_string(left + options.width) + R"(" y=")" + axis_y + R"(" text-anchor="end">)" +
          detail::decimal(end, 6) + " ms</text>\n</svg>\n";
  return text;
}

}  // namespace v0
}  // namespace llmmem
