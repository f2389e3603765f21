/// @file
/// The bodies of `copy_plan`.
#pragma once

#include <llmmem/transfer/copy_plan.hpp>

#include <algorithm>

namespace llmmem {
inline namespace v0 {

namespace detail {

inline constexpr std::array<std::string_view, copy_ways> copy_way_names{"loop", "batch", "strided", "kernel"};
inline constexpr std::array<std::string_view, copy_directions> copy_direction_names{"up", "down", "within"};
inline constexpr std::string_view copy_plan_title = "llmmem copy plan 1";

/// The position of a number in an ascending list: the entry before it, the distance to the next one, and the
/// ratio to the last one if it is above.
struct grid_place {
  std::size_t at = 0;
  double part = 0;
  double beyond = 1;
};
[[nodiscard]] inline grid_place place_in_grid(const std::vector<std::uint64_t>& rising,
                                              std::uint64_t number) noexcept {
  if (number <= rising.front()) return {};
  const auto asked = static_cast<double>(number);
  if (number >= rising.back()) return {rising.size() - 1, 0, asked / static_cast<double>(rising.back())};
  const auto next = std::ranges::upper_bound(rising, number);
  const auto above = static_cast<double>(*next);
  const auto below = static_cast<double>(*(next - 1));
  return {static_cast<std::size_t>(next - rising.begin()) - 1, (asked - below) / (above - below), 1};
}

/// Returns the words of a line, separated by single spaces; the rest belongs to the last.
template <std::size_t Count>
[[nodiscard]] bool split_words(std::string_view line, std::array<std::string_view, Count>& words) noexcept {
  for (std::size_t i = 0; i < Count; ++i) {
    const std::size_t end = i + 1 == Count ? line.size() : line.find(' ');
    if (end == std::string_view::npos || end == 0) return false;
    words[i] = line.substr(0, end);
    line.remove_prefix(std::min(line.size(), end + 1));
  }
  return true;
}

/// Times are kept as whole numbers; 0 means none.
[[nodiscard]] inline std::uint64_t whole_nanoseconds(double ns) noexcept {
  const auto whole = static_cast<std::uint64_t>(ns);
  return static_cast<double>(whole) < ns ? whole + 1 : whole;
}

/// Reads a number above 0, digits only.
[[nodiscard]] inline bool read_number(std::string_view text, std::uint64_t& into) noexcept {
  constexpr std::size_t most_digits = 18;  // no such number wraps
  if (text.empty() || text.size() > most_digits) return false;
  into = 0;
  for (const char each : text) {
    if (each < '0' || each > '9') return false;
    into = into * 10 + static_cast<std::uint64_t>(each - '0');
  }
  return into != 0;
}

}  // namespace detail

inline copy_plan::copy_plan(copy_grid grid) : grid_(std::move(grid)) {
  const auto check = [](const std::vector<std::uint64_t>& list, const char* what) {
    const auto falls = [](std::uint64_t a, std::uint64_t b) { return a >= b; };
    const bool rises = std::ranges::adjacent_find(list, falls) == list.end();
    if (list.empty() || list.front() == 0 || !rises)
      throw argument_error(std::string("copy_plan: the grid's ") + what +
                           " must be at least one number above 0, each larger than the one before");
  };
  check(grid_.bytes, "bytes");
  check(grid_.counts, "counts");
  if (grid_.bytes.size() > most_points / grid_.counts.size())
    throw argument_error("copy_plan: the grid has more than 4096 points");
  times_.assign(copy_ways * copy_directions * grid_.bytes.size() * grid_.counts.size(), 0);
}

inline double copy_plan::time_near(copy_way way, copy_direction direction, std::size_t b,
                                   std::size_t c) const noexcept {
  for (std::size_t i = b + 1; i-- > 0;) {
    for (std::size_t k = c + 1; k-- > 0;) {
      const double ns = times_[place(way, direction, i, k)];
      if (ns == 0) continue;
      const double more_bytes = static_cast<double>(grid_.bytes[b]) / static_cast<double>(grid_.bytes[i]);
      const double more_pieces = static_cast<double>(grid_.counts[c]) / static_cast<double>(grid_.counts[k]);
      return ns * more_bytes * more_pieces;
    }
  }
  return 0;
}

inline std::optional<double> copy_plan::nanoseconds(copy_way way, const copy_shape& shape) const noexcept {
  if (times_.empty() || shape.count == 0) return std::nullopt;
  const detail::grid_place b = detail::place_in_grid(grid_.bytes, shape.bytes);
  const detail::grid_place c = detail::place_in_grid(grid_.counts, shape.count);
  double sum = 0;
  double weight = 0;
  for (std::size_t i = 0; i < 2; ++i) {
    for (std::size_t k = 0; k < 2; ++k) {
      const double of = (i == 0 ? 1 - b.part : b.part) * (k == 0 ? 1 - c.part : c.part);
      if (of == 0) continue;
      const double ns = time_near(way, shape.direction, b.at + i, c.at + k);
      if (ns == 0) continue;
      sum += of * ns;
      weight += of;
    }
  }
  if (weight == 0) return std::nullopt;
  return sum / weight * b.beyond * c.beyond;
}

inline copy_way copy_plan::choose(const copy_shape& shape, const copy_ways_open& open) const noexcept {
  std::optional<double> least;
  copy_way quickest = copy_way::loop;
  for (std::size_t i = 0; i < copy_ways; ++i) {
    const auto way = static_cast<copy_way>(i);
    if (!open[way]) continue;
    const std::optional<double> ns = nanoseconds(way, shape);
    if (!ns || (least && *least <= *ns)) continue;
    least = ns;
    quickest = way;
  }
  if (least) return quickest;
  constexpr std::uint64_t few = 16;
  constexpr std::uint64_t short_bytes = 32768;
  if (shape.count <= 1) return copy_way::loop;
  if (open.strided) return copy_way::strided;
  if (open.kernel && shape.count > few && shape.bytes < short_bytes) return copy_way::kernel;
  return open.batch ? copy_way::batch : copy_way::loop;
}

inline std::string copy_plan::text() const {
  std::string out(detail::copy_plan_title);
  out += "\n# way, direction, bytes a piece, pieces, nanoseconds\n";
  for (std::size_t way = 0; way < copy_ways && is_measured(); ++way) {
    for (std::size_t direction = 0; direction < copy_directions; ++direction) {
      for (std::size_t b = 0; b < grid_.bytes.size(); ++b) {
        for (std::size_t c = 0; c < grid_.counts.size(); ++c) {
          const double ns =
              times_[place(static_cast<copy_way>(way), static_cast<copy_direction>(direction), b, c)];
          if (ns == 0) continue;
          out += std::string(detail::copy_way_names[way]) + ' ' +
                 std::string(detail::copy_direction_names[direction]) + ' ' + std::to_string(grid_.bytes[b]) +
                 ' ' + std::to_string(grid_.counts[c]) + ' ' + std::to_string(detail::whole_nanoseconds(ns)) +
                 '\n';
        }
      }
    }
  }
  return out;
}

inline copy_plan copy_plan::parsed(std::string_view text) {
  struct line_of_text {
    std::size_t way;
    std::size_t direction;
    std::uint64_t bytes;
    std::uint64_t count;
    std::uint64_t ns;
  };
  std::vector<line_of_text> lines;
  copy_grid grid{{}, {}, max_bytes};
  std::size_t number = 0;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(text.size(), end + 1));
    const auto refuse = [&](const char* wanted) {
      throw format_error("copy_plan: line " + std::to_string(number) + ": '" + std::string(line) +
                         "' is not " + wanted + "; measure the plan again");
    };
    if (++number == 1) {
      if (line != detail::copy_plan_title) refuse("'llmmem copy plan 1'");
      continue;
    }
    if (line.empty() || line.front() == '#') continue;
    std::array<std::string_view, 5> words;
    line_of_text read{};
    constexpr const char* wanted = "a way, a direction, bytes, a count and nanoseconds";
    if (!detail::split_words(line, words)) refuse(wanted);
    const auto way = std::ranges::find(detail::copy_way_names, words[0]);
    const auto direction = std::ranges::find(detail::copy_direction_names, words[1]);
    if (way == detail::copy_way_names.end() || direction == detail::copy_direction_names.end() ||
        !detail::read_number(words[2], read.bytes) || !detail::read_number(words[3], read.count) ||
        !detail::read_number(words[4], read.ns)) {
      refuse(wanted);
    }
    read.way = static_cast<std::size_t>(way - detail::copy_way_names.begin());
    read.direction = static_cast<std::size_t>(direction - detail::copy_direction_names.begin());
    constexpr std::size_t most_lines = copy_ways * copy_directions * most_points;
    if (lines.size() == most_lines) refuse("one of the lines that a plan can have");
    lines.push_back(read);
    grid.bytes.push_back(read.bytes);
    grid.counts.push_back(read.count);
  }
  if (number == 0) throw format_error("copy_plan: no text; measure the plan again");
  if (lines.empty()) return {};
  for (auto* const list : {&grid.bytes, &grid.counts}) {
    std::ranges::sort(*list);
    list->erase(std::ranges::unique(*list).begin(), list->end());
  }
  if (grid.bytes.size() > most_points / grid.counts.size())
    throw format_error("copy_plan: the text has more than 4096 points; measure the plan again");
  copy_plan made(std::move(grid));
  for (const line_of_text& each : lines) {
    const auto at = [](const std::vector<std::uint64_t>& list, std::uint64_t value) {
      return static_cast<std::size_t>(std::ranges::lower_bound(list, value) - list.begin());
    };
    made.time(static_cast<copy_way>(each.way), static_cast<copy_direction>(each.direction),
              at(made.grid_.bytes, each.bytes), at(made.grid_.counts, each.count)) =
        static_cast<double>(each.ns);
  }
  return made;
}

}  // namespace v0
}  // namespace llmmem
