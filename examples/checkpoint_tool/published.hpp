/// @file
/// A folder in Hugging Face's format, in place of a folder of checkpoints: an index and its shards.
#pragma once

#include <llmmem/checkpoint/safetensors_folder.hpp>
#include <llmmem/checkpoint/search.hpp>

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint_tool/describe.hpp"
#include "checkpoint_tool/select.hpp"
#include "common/text.hpp"

namespace checkpoint_tool {

namespace detail {

/// Tensors by the file that they are in.
[[nodiscard]] inline std::vector<std::vector<const llmmem::checkpoint_tensor*>> tensors_by_file(
    const llmmem::checkpoint_manifest& manifest) {
  std::vector<std::vector<const llmmem::checkpoint_tensor*>> all(manifest.files.size());
  for (const llmmem::checkpoint_tensor& each : manifest.tensors)
    all[each.pieces.front().file].push_back(&each);
  return all;
}

}  // namespace detail

/// Its files, and their tensors if `with_tensors` is set.
[[nodiscard]] inline std::string published_report(const std::string& folder,
                                                  const llmmem::found_checkpoint& model, bool with_tensors) {
  const llmmem::checkpoint_manifest& manifest = model.manifest;
  std::string text =
      fmt::format("{}\n  a published model: {} in {}, {}; headers agree with the index, no checksums\n",
                  shown(folder), counted(manifest.tensors.size(), "tensor"),
                  counted(manifest.files.size(), "file"), bytes_shown(bytes_in(manifest)));
  const auto tensors = detail::tensors_by_file(manifest);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    text += fmt::format("    {}  {} bytes  {}\n", shown(manifest.files[i].name),
                        example::grouped(manifest.files[i].bytes), counted(tensors[i].size(), "tensor"));
    if (!with_tensors) continue;
    for (const llmmem::checkpoint_tensor* const each : tensors[i])
      text +=
          fmt::format("      {}  {} {}\n", shown(each->name), name_of(each->type), shape_text(each->shape));
  }
  return text;
}

[[nodiscard]] inline std::string published_json(const std::string& folder,
                                                const llmmem::found_checkpoint& model) {
  const llmmem::checkpoint_manifest& manifest = model.manifest;
  std::vector<std::string> files;
  std::vector<std::string> tensors;
  for (const llmmem::checkpoint_file& each : manifest.files)
    files.push_back(
        fmt::format(R"({{"name": {}, "bytes": {}}})", example::json_string(each.name), each.bytes));
  for (const llmmem::checkpoint_tensor& each : manifest.tensors) {
    tensors.push_back(fmt::format(R"({{"name": {}, "type": "{}", "shape": {}, "file": {}}})",
                                  example::json_string(each.name), name_of(each.type), shape_text(each.shape),
                                  example::json_string(manifest.files[each.pieces.front().file].name)));
  }
  return fmt::format(R"({{"folder": {}, "published": true, "bytes": {}, "files": {}, "tensors": {}}})"
                     "\n",
                     example::json_string(folder), bytes_in(manifest), json_lines(files),
                     json_lines(tensors));
}

}  // namespace checkpoint_tool
