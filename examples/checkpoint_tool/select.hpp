/// @file
/// Finds the folder and the checkpoint that the user names.
#pragma once

#include <llmmem/checkpoint/manifest.hpp>
#include <llmmem/checkpoint/names.hpp>
#include <llmmem/checkpoint/posix_storage.hpp>
#include <llmmem/checkpoint/safetensors_folder.hpp>
#include <llmmem/checkpoint/search.hpp>
#include <llmmem/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "checkpoint_tool/describe.hpp"
#include "common/program.hpp"
#include "common/text.hpp"

namespace checkpoint_tool {

using storage_type = llmmem::posix_storage<>;

/// Returns whether a folder has a model in Hugging Face's format, by its index or its single file, and no
/// checkpoint.
[[nodiscard]] inline bool is_published(const std::string& path) {
  std::error_code none;
  const std::filesystem::path folder(path);
  if (!std::filesystem::exists(folder / llmmem::published_index, none) &&
      !std::filesystem::exists(folder / llmmem::published_file, none))
    return false;
  for (const auto& each : std::filesystem::directory_iterator(folder, none)) {
    if (llmmem::read_folder_name(each.path().filename().string())) return false;
  }
  return true;
}

/// Opens an existing folder. @throws llmmem::storage_error
[[nodiscard]] inline std::unique_ptr<storage_type> open_folder(const std::string& path) {
  llmmem::posix_storage_options options;
  options.missing = llmmem::missing_root::refuse;
  // Files in the hub's cache are links.
  if (is_published(path)) options.links = llmmem::symbolic_links::follow;
  return std::make_unique<storage_type>(path, options);
}

/// A folder of checkpoints, and one of them if the user names it.
struct checkpoint_reference {
  std::string folder;
  std::optional<std::string> which;
};

/// `DIR`, `DIR/NAME` or `DIR/STEP`. A folder without a checkpoint's name is a folder of checkpoints.
[[nodiscard]] inline checkpoint_reference read_reference(std::string_view text) {
  while (text.size() > 1 && text.back() == '/')
    text.remove_suffix(1);
  const std::size_t slash = text.rfind('/');
  const std::string last(slash == std::string_view::npos ? text : text.substr(slash + 1));
  const std::string before(slash == std::string_view::npos ? "." : slash == 0 ? "/" : text.substr(0, slash));
  std::error_code none;
  const bool is_step = example::parse_count(last).has_value() && !std::filesystem::exists(text, none);
  if (is_step || llmmem::read_folder_name(last)) return {before, last};
  return {std::string(text), std::nullopt};
}

/// A reference, and the checkpoint if it is given separately.
/// @throws usage_error  if both name a checkpoint.
[[nodiscard]] inline checkpoint_reference read_reference(std::string_view text,
                                                         const std::optional<std::string>& which) {
  checkpoint_reference all = read_reference(text);
  if (all.which && which) {
    throw example::usage_error(fmt::format("\"{}\" names a checkpoint already; leave out \"{}\"",
                                           example::printable(text), example::printable(*which)));
  }
  if (which) all.which = which;
  return all;
}

/// Finds a checkpoint by its step, which means the newest of that step, or by its name.
/// @throws usage_error       if the text is neither.
/// @throws llmmem::io_error  if there is no such checkpoint.
[[nodiscard]] inline llmmem::checkpoint_id find_id(storage_type& storage, const std::string& which) {
  const auto named = llmmem::read_folder_name(which);
  const auto step = example::parse_count(which);
  if (!named && !step) {
    throw example::usage_error(
        fmt::format("\"{}\" is neither a step nor a checkpoint's name, such as "
                    "step-0000000012-g00000003",
                    example::printable(which)));
  }
  const std::vector<llmmem::checkpoint_id> all = list_checkpoints(storage);
  for (const llmmem::checkpoint_id& each : all) {
    if (named ? each == *named : each.step == *step) return each;
  }
  std::string there;
  constexpr std::size_t most = 8;
  for (std::size_t i = 0; i < all.size() && i < most; ++i)
    there +=
        fmt::format("{}{}", i == 0 ? "" : ", ", named ? folder_name(all[i]) : std::to_string(all[i].step));
  throw llmmem::io_error(fmt::format(
      "{}: has no checkpoint {}{}; {}", storage.path(""), named ? "" : "of step ", which,
      all.empty() ? "it has none"
                  : (named ? "it has " : "it has steps ") + there + (all.size() > most ? ", ..." : "")));
}

/// Returns whether a checkpoint still exists, because a run may remove it meanwhile.
[[nodiscard]] inline bool is_there(storage_type& storage, const llmmem::checkpoint_id& id) {
  const std::vector<llmmem::checkpoint_id> now = list_checkpoints(storage);
  return std::find(now.begin(), now.end(), id) != now.end();
}

/// Reads a checkpoint's manifest, and nothing else.
/// @throws llmmem::storage_error, llmmem::format_error
[[nodiscard]] inline llmmem::found_checkpoint read_checkpoint(storage_type& storage,
                                                              const llmmem::checkpoint_id& id) {
  llmmem::found_checkpoint found{id, folder_name(id), {}};
  const std::string path = found.folder + "/" + std::string(llmmem::checkpoint_names::manifest);
  const auto input = storage.open(path);
  const std::uint64_t most = llmmem::max_manifest_bytes + 1;  // its reader refuses one of that size
  std::string text(static_cast<std::size_t>(std::min(input.bytes(), most)), '\0');
  input.read(0, std::as_writable_bytes(std::span(text.data(), text.size())));
  found.manifest = llmmem::read_manifest(text, storage.path(path));
  if (found.manifest.step != id.step || found.manifest.generation != id.generation) {
    throw llmmem::format_error(
        fmt::format("{}: it is of step {}, generation {}, which differs from the "
                    "folder's name",
                    storage.path(path), found.manifest.step, found.manifest.generation));
  }
  return found;
}

/// Finds the newest checkpoint whose files exist with their lengths.
/// @throws llmmem::io_error  if there is none.
[[nodiscard]] inline llmmem::found_checkpoint newest_whole(storage_type& storage) {
  llmmem::checkpoint_search search = find_checkpoint(storage, llmmem::verification::sizes);
  if (search.found) return std::move(*search.found);
  std::string text = storage.path("") + ": no checkpoint in it is whole";
  if (search.skipped.empty()) text = storage.path("") + ": there is no checkpoint in it";
  for (const llmmem::skipped_checkpoint& each : search.skipped)
    text += fmt::format("; {}: {}", each.folder, each.why);
  throw llmmem::io_error(text);
}

/// Opens a checkpoint whose tensors will be read.
[[nodiscard]] inline llmmem::found_checkpoint open_whole(storage_type& storage,
                                                         const std::optional<std::string>& which) {
  if (!which && is_published(storage.path(""))) return llmmem::open_safetensors_folder(storage);
  if (!which) return newest_whole(storage);
  return open_checkpoint(storage, find_id(storage, *which), llmmem::verification::sizes);
}

}  // namespace checkpoint_tool
