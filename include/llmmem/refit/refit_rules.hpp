/// @file
/// Rules that map tensors of a trainer to tensors of an engine: renamed, split from a fused one, or joined.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/sharding/split_2d.hpp>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Bands of a tensor: `count` times `run` rows (or columns), `stride` apart, from the `first` on. Rows are
/// the first dimension, columns all others.
struct refit_bands {
  split_axis axis = split_axis::none;  ///< none: the whole tensor
  std::uint64_t first = 0;
  std::uint64_t run = 0;
  std::uint64_t stride = 0;  ///< from the beginning of a band to that of the next one
  std::uint64_t count = 1;

  [[nodiscard]] static constexpr refit_bands rows(std::uint64_t first, std::uint64_t run) noexcept {
    return {split_axis::rows, first, run, run, 1};
  }
  [[nodiscard]] static constexpr refit_bands columns(std::uint64_t first, std::uint64_t run) noexcept {
    return {split_axis::columns, first, run, run, 1};
  }

  friend constexpr bool operator==(const refit_bands&, const refit_bands&) noexcept = default;
};

/// The rows or columns of `from` in tensor `source` become those of `to` in tensor `target`, in their order.
///
/// A name may have one `*`, which stands for any text without a dot: it is the same text in both names, so
/// that one rule maps the tensors of all layers. Bands of rows may have other columns on both sides if their
/// elements are as many (a row of stacked experts becomes the matrix of one expert); bands of columns need
/// equal rows. Nothing is transposed: a trainer whose matrices are [inputs, outputs] names an engine that
/// expects [outputs, inputs] only after it has transposed them itself.
struct refit_rule {
  std::string source;
  std::string target;
  refit_bands from{};
  refit_bands to{};
};

/// Returns the rules the other way round: those that split become those that join.
[[nodiscard]] inline std::vector<refit_rule> reversed(std::span<const refit_rule> rules) {
  std::vector<refit_rule> back(rules.begin(), rules.end());
  for (refit_rule& each : back) {
    std::swap(each.source, each.target);
    std::swap(each.from, each.to);
  }
  return back;
}

/// A part of a fused tensor.
struct fused_part {
  std::string name;
  std::uint64_t size = 0;  ///< rows, or columns
};

/// Returns rules that split a fused tensor into parts that follow one another: queries, keys and values; gate
/// and up. `reversed` of them joins.
/// @param axis  rows for weights stored as [outputs, inputs] and for biases; columns for [inputs, outputs].
[[nodiscard]] inline std::vector<refit_rule> split_fused(const std::string& fused, split_axis axis,
                                                         std::span<const fused_part> parts) {
  std::vector<refit_rule> rules;
  std::uint64_t at = 0;
  for (const fused_part& part : parts) {
    rules.push_back(
        {fused, part.name, {axis, at, part.size, part.size, 1}, {axis, 0, part.size, part.size, 1}});
    at = checked_add(at, part.size, "split_fused: rows or columns of all parts");
  }
  return rules;
}

/// Returns rules that split a fused tensor whose parts alternate: `groups` times the first `size` rows of
/// each part. With grouped-query attention a group is one key head: the sizes are query heads of a group x
/// head size, head size, head size (Megatron's layout of `linear_qkv`).
[[nodiscard]] inline std::vector<refit_rule> split_interleaved(const std::string& fused, split_axis axis,
                                                               std::uint64_t groups,
                                                               std::span<const fused_part> parts) {
  std::uint64_t group = 0;
  for (const fused_part& part : parts)
    group = checked_add(group, part.size, "split_interleaved: rows or columns of a group");
  std::vector<refit_rule> rules;
  std::uint64_t at = 0;
  for (const fused_part& part : parts) {
    rules.push_back(
        {fused, part.name, {axis, at, part.size, group, groups}, {axis, 0, part.size, part.size, groups}});
    at += part.size;
  }
  return rules;
}

namespace detail {

/// Returns what the `*` of `pattern` stands for in `name`; nothing if they do not match. A pattern without
/// one matches itself, with an empty text.
[[nodiscard]] inline std::optional<std::string_view> star_of(std::string_view pattern,
                                                             std::string_view name) {
  const std::size_t star = pattern.find('*');
  if (star == std::string_view::npos)
    return pattern == name ? std::optional(std::string_view{}) : std::nullopt;
  const std::string_view head = pattern.substr(0, star);
  const std::string_view tail = pattern.substr(star + 1);
  if (name.size() <= head.size() + tail.size() || !name.starts_with(head) || !name.ends_with(tail)) return {};
  const std::string_view text = name.substr(head.size(), name.size() - head.size() - tail.size());
  if (text.find('.') != std::string_view::npos) return {};
  return text;
}

/// Returns the name that `pattern` gives with that text for its `*`.
[[nodiscard]] inline std::string with_star(std::string_view pattern, std::string_view text) {
  const std::size_t star = pattern.find('*');
  if (star == std::string_view::npos) return std::string(pattern);
  return std::string(pattern.substr(0, star)) + std::string(text) + std::string(pattern.substr(star + 1));
}

/// @throws argument_error  for a rule with more than one `*` in a name, or with one in only one of them.
inline void check_names(const refit_rule& rule) {
  const auto stars = [](const std::string& name) { return std::ranges::count(name, '*'); };
  if (stars(rule.source) == stars(rule.target) && stars(rule.source) <= 1) return;
  throw argument_error("refit: rule '" + rule.source + "' -> '" + rule.target +
                       "': both names have one *, or none");
}

}  // namespace detail

}  // namespace v0
}  // namespace llmmem
