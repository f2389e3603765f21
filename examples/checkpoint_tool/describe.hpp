/// @file
/// Parts of a checkpoint in words and in JSON, whose names are untrusted.
#pragma once

#include <llmmem/checkpoint/manifest.hpp>
#include <llmmem/checkpoint/search.hpp>
#include <llmmem/model/safetensors.hpp>
#include <llmmem/sharding/element_runs.hpp>

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/text.hpp"

namespace checkpoint_tool {

/// A complete name, safe for a terminal.
[[nodiscard]] inline std::string shown(std::string_view name) {
  return example::printable(name, 512);
}

/// An error's text, safe for a terminal, with its quotes unchanged.
[[nodiscard]] inline std::string one_line(std::string_view text) {
  std::string line;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    line += byte < 0x20 || byte >= 0x7f ? fmt::format("\\x{:02x}", byte) : std::string(1, c);
  }
  return line;
}

/// `1.50 KiB`.
[[nodiscard]] inline std::string bytes_shown(std::uint64_t bytes) {
  return example::bytes_text(static_cast<double>(bytes));
}

/// `3 files`, `1 file`.
[[nodiscard]] inline std::string counted(std::uint64_t count, std::string_view what) {
  return fmt::format("{} {}{}", example::grouped(count), what, count == 1 ? "" : "s");
}

/// `[4, 6]`, which is also JSON.
[[nodiscard]] inline std::string shape_text(const std::vector<std::uint64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

/// Describes which elements of a tensor of `elements` a set has.
[[nodiscard]] inline std::string runs_text(const llmmem::element_runs& runs, std::uint64_t elements) {
  if (runs == llmmem::element_runs::all_of(elements)) return "all elements";
  if (runs.empty()) return "no elements";
  if (runs.count == 1) return fmt::format("{} from {} on", counted(runs.run, "element"), runs.begin);
  return fmt::format("{} runs of {}, one every {}, from {} on", runs.count, counted(runs.run, "element"),
                     runs.stride, runs.begin);
}

/// Bytes of all files.
[[nodiscard]] inline std::uint64_t bytes_in(const llmmem::checkpoint_manifest& manifest) {
  std::uint64_t bytes = 0;
  for (const llmmem::checkpoint_file& each : manifest.files)
    bytes += each.bytes;
  return bytes;
}

/// Returns whether a tensor is an extra of a rank: `rank.0/name`.
[[nodiscard]] inline bool is_extra(const llmmem::checkpoint_tensor& tensor) noexcept {
  return std::string_view(tensor.name).starts_with("rank.");
}

/// Members of an object that identify the checkpoint: `"folder": ..., "name": ..., "step": 1, "generation":
/// 1`.
[[nodiscard]] inline std::string json_of(std::string_view folder, const llmmem::checkpoint_id& id) {
  return fmt::format(R"("folder": {}, "name": {}, "step": {}, "generation": {})",
                     example::json_string(folder), example::json_string(folder_name(id)), id.step,
                     id.generation);
}

/// Objects as a JSON array, one per line.
[[nodiscard]] inline std::string json_lines(const std::vector<std::string>& objects) {
  return objects.empty() ? "[]" : fmt::format("[\n  {}\n]", fmt::join(objects, ",\n  "));
}

}  // namespace checkpoint_tool
