/// @file
/// `list`: the contents of a folder of checkpoints.
#pragma once

#include <llmmem/checkpoint/names.hpp>
#include <llmmem/checkpoint/search.hpp>
#include <llmmem/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint_tool/describe.hpp"
#include "checkpoint_tool/select.hpp"
#include "checkpoint_tool/stored.hpp"
#include "common/text.hpp"

namespace checkpoint_tool {

/// A checkpoint, and the reason if it is incomplete: a file is missing or has the wrong length.
struct listed_checkpoint {
  llmmem::checkpoint_id id{};
  std::optional<llmmem::checkpoint_manifest> manifest{};  ///< if it is readable
  std::string why{};                                      ///< empty if it is complete
};

/// A folder, the newest checkpoint first.
struct listing {
  std::string folder{};
  std::vector<listed_checkpoint> checkpoints{};
  std::vector<std::string> left_over{};  ///< names of drafts and trash

  [[nodiscard]] const listed_checkpoint* newest_whole() const noexcept {
    const auto found = std::find_if(checkpoints.begin(), checkpoints.end(),
                                    [](const listed_checkpoint& each) { return each.why.empty(); });
    return found == checkpoints.end() ? nullptr : &*found;
  }
  [[nodiscard]] bool is_complete() const noexcept {
    return std::all_of(checkpoints.begin(), checkpoints.end(),
                       [](const listed_checkpoint& each) { return each.why.empty(); });
  }
};

/// @throws llmmem::storage_error  if the folder cannot be listed.
[[nodiscard]] inline listing list_folder(storage_type& storage) {
  listing all{storage.path(""), {}, {}};
  for (const llmmem::checkpoint_id& id : list_checkpoints(storage)) {
    listed_checkpoint one{id, std::nullopt, {}};
    try {
      one.manifest = read_checkpoint(storage, id).manifest;
      static_cast<void>(open_checkpoint(storage, id, llmmem::verification::sizes));
    } catch (const llmmem::error& wrong) {
      if (!is_there(storage, id)) continue;
      one.why = wrong.what();
    }
    all.checkpoints.push_back(std::move(one));
  }
  for (const llmmem::storage_entry& each : storage.list("")) {
    if (llmmem::is_left_over(each.name)) all.left_over.push_back(each.name);
  }
  std::sort(all.left_over.begin(), all.left_over.end());
  return all;
}

/// Describes a left-over name.
[[nodiscard]] inline std::string_view left_over_text(std::string_view name) noexcept {
  if (name.starts_with(llmmem::checkpoint_names::draft)) return "in the making, or left by a crash";
  if (name.starts_with(llmmem::checkpoint_names::trash)) return "being removed, or left by a crash";
  return "left by a crash";
}

[[nodiscard]] inline std::string to_report(const listing& all) {
  std::string text = shown(all.folder) + '\n';
  if (all.checkpoints.empty()) text += "  no checkpoints\n";
  if (!all.checkpoints.empty()) {
    text += fmt::format("  {:<26}{:>12}{:>12}{:>7}{:>7}{:>11}\n", "checkpoint", "step", "generation", "world",
                        "files", "bytes");
  }
  for (const listed_checkpoint& each : all.checkpoints) {
    text += fmt::format("  {:<26}{:>12}{:>12}", folder_name(each.id), each.id.step, each.id.generation);
    if (each.manifest) {
      text += fmt::format("{:>7}{:>7}{:>11}", each.manifest->world, each.manifest->files.size(),
                          bytes_shown(bytes_in(*each.manifest)));
    } else {
      text += fmt::format("{:>7}{:>7}{:>11}", "?", "?", "?");
    }
    text += each.why.empty() ? "  whole" : "  not whole: " + one_line(each.why);
    if (&each == all.newest_whole()) text += ", the newest";
    if (each.manifest && !each.manifest->stored.empty()) text += "; " + share_text(share_of(*each.manifest));
    text += '\n';
  }
  for (const std::string& name : all.left_over)
    text += fmt::format("  {:<26}  {}\n", shown(name), left_over_text(name));
  return text;
}

[[nodiscard]] inline std::string to_json(const listing& all) {
  constexpr std::string_view unknown_share =
      R"("incremental": null, "chunks": null, "new_chunks": null, "own_bytes": null, "refers_to": null)";
  std::vector<std::string> checkpoints;
  for (const listed_checkpoint& each : all.checkpoints) {
    const auto number = [&](auto get) {
      return each.manifest ? std::to_string(get(*each.manifest)) : "null";
    };
    checkpoints.push_back(fmt::format(
        R"({{"name": {}, "step": {}, "generation": {}, "world": {}, "files": {}, "bytes": {}, "tensors": {}, )"
        R"({}, "whole": {}, "newest_whole": {}, "why": {}}})",
        example::json_string(folder_name(each.id)), each.id.step, each.id.generation,
        number([](const auto& manifest) { return manifest.world; }),
        number([](const auto& manifest) { return manifest.files.size(); }),
        number([](const auto& manifest) { return bytes_in(manifest); }),
        number([](const auto& manifest) { return manifest.tensors.size(); }),
        each.manifest ? share_json(share_of(*each.manifest)) : std::string(unknown_share), each.why.empty(),
        &each == all.newest_whole(), each.why.empty() ? "null" : example::json_string(each.why)));
  }
  std::vector<std::string> left_over;
  for (const std::string& name : all.left_over)
    left_over.push_back(example::json_string(name));
  return fmt::format(R"({{"folder": {}, "checkpoints": {}, "left_over": [{}]}})"
                     "\n",
                     example::json_string(all.folder), json_lines(checkpoints), fmt::join(left_over, ", "));
}

}  // namespace checkpoint_tool
