/// @file
/// Checks whether the pieces that all ranks have of a tensor cover it.
#pragma once

#include <llmmem/checkpoint/detail/manifest_body.hpp>
#include <llmmem/checkpoint/manifest.hpp>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Returns the first element of `[0, end)` that no range covers. @param ranges beginnings and ends.
[[nodiscard]] inline std::optional<std::uint64_t> first_gap(
    std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges, std::uint64_t end) {
  std::ranges::sort(ranges);
  std::uint64_t reached = 0;
  for (const auto& [from, to] : ranges) {
    if (from > reached) break;
    reached = std::max(reached, to);
  }
  return reached < end ? std::optional(reached) : std::nullopt;
}

/// Returns an element that no piece covers, in the simple cases: ranges of elements, columns of all rows, and
/// any pieces that are too few in total. Other cases count as complete.
[[nodiscard]] inline std::optional<std::uint64_t> missing_element(const checkpoint_tensor& tensor) {
  const std::uint64_t elements = elements_of(tensor);
  if (elements == 0) return std::nullopt;
  std::uint64_t sum = 0;
  bool are_ranges = true;
  std::uint64_t columns = 0;
  bool are_columns = true;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges;
  for (const checkpoint_piece& each : tensor.pieces) {
    const element_runs& runs = each.runs;
    if (runs.empty()) continue;
    sum = std::min(sum + runs.elements(), elements);
    if (columns == 0) columns = runs.stride;
    are_ranges = are_ranges && runs.count == 1;
    are_columns = are_columns && runs.stride == columns && runs.begin + runs.run <= columns &&
                  elements / columns == runs.count && elements % columns == 0;
    ranges.emplace_back(runs.begin, runs.begin + runs.run);
  }
  if (are_ranges) return first_gap(std::move(ranges), elements);
  if (are_columns) return first_gap(std::move(ranges), columns);
  return sum < elements ? std::optional(elements) : std::nullopt;
}

/// Checks that the ranks together have all of each tensor. Does not check a single rank, which may keep only
/// its own part in its folder.
/// @throws argument_error  the text names the tensor.
inline void check_complete(const checkpoint_manifest& manifest, const std::string& what) {
  if (manifest.world == 1) return;
  for (const checkpoint_tensor& each : manifest.tensors) {
    const auto missing = missing_element(each);
    if (!missing) continue;
    const std::uint64_t elements = elements_of(each);
    throw argument_error(
        what + ": tensor " + json_quoted(each.name) + ": no rank has " +
        (*missing < elements ? "element " + std::to_string(*missing) : std::string("some elements")) +
        " of its " + std::to_string(elements));
  }
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
