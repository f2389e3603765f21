/// @file
/// Where the bytes of a checkpoint are: in its own files, or, if it is incremental, also in earlier ones.
#pragma once

#include <llmmem/checkpoint/manifest.hpp>
#include <llmmem/checkpoint/names.hpp>
#include <llmmem/checkpoint/search.hpp>
#include <llmmem/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint_tool/describe.hpp"
#include "checkpoint_tool/select.hpp"

namespace checkpoint_tool {

/// How much of a checkpoint, or of one of its files, is its own, and which checkpoints it needs for the rest.
struct own_share {
  bool is_incremental = false;
  std::uint64_t chunks = 0;
  std::uint64_t new_chunks = 0;            ///< its own chunks
  std::uint64_t own_bytes = 0;             ///< bytes in its folder
  std::vector<std::uint64_t> refers_to{};  ///< generations, the oldest first
};

/// Counts the chunks of a file that this checkpoint wrote itself.
[[nodiscard]] inline std::uint64_t new_chunks_of(const llmmem::checkpoint_manifest& manifest,
                                                 const llmmem::checkpoint_file& file) {
  if (file.runs.empty()) return file.chunks.size();
  std::uint64_t count = 0;
  for (const llmmem::chunk_run& run : file.runs)
    count += manifest.stored[run.stored].generation == manifest.generation ? run.count : 0;
  return count;
}

[[nodiscard]] inline own_share share_of(const llmmem::checkpoint_manifest& manifest) {
  own_share share;
  share.is_incremental = !manifest.stored.empty();
  for (const llmmem::checkpoint_file& file : manifest.files) {
    share.chunks += file.chunks.size();
    share.new_chunks += new_chunks_of(manifest, file);
    share.own_bytes += file.runs.empty() ? file.bytes : 0;
  }
  for (const llmmem::stored_chunks& each : manifest.stored) {
    if (each.generation == manifest.generation) {
      share.own_bytes += each.bytes;
    } else {
      share.refers_to.push_back(each.generation);
    }
  }
  std::sort(share.refers_to.begin(), share.refers_to.end());
  share.refers_to.erase(std::unique(share.refers_to.begin(), share.refers_to.end()), share.refers_to.end());
  return share;
}

/// `g3, g7`.
[[nodiscard]] inline std::string generations_text(const std::vector<std::uint64_t>& generations) {
  std::string text;
  for (const std::uint64_t each : generations)
    text += fmt::format("{}g{}", text.empty() ? "" : ", ", each);
  return text;
}

/// `incremental: 12 of 400 chunks new (48.0 MiB), refers to g3, g7`. @pre the checkpoint is incremental
[[nodiscard]] inline std::string share_text(const own_share& share) {
  return fmt::format("incremental: {} of {} chunks new ({}), refers to {}", share.new_chunks, share.chunks,
                     bytes_shown(share.own_bytes),
                     share.refers_to.empty() ? "no other" : generations_text(share.refers_to));
}

/// The same as members of an object.
[[nodiscard]] inline std::string share_json(const own_share& share) {
  return fmt::format(
      R"("incremental": {}, "chunks": {}, "new_chunks": {}, "own_bytes": {}, "refers_to": [{}])",
      share.is_incremental, share.chunks, share.new_chunks, share.own_bytes,
      fmt::join(share.refers_to, ", "));
}

/// `step-0000000012-g00000003/model.safetensors`.
[[nodiscard]] inline std::string stored_path(const llmmem::stored_chunks& in) {
  return folder_name(llmmem::checkpoint_id{in.step, in.generation}) + "/" + in.name;
}

/// A file of a checkpoint, with chunks in any stored files.
class stored_file {
 public:
  /// The place of bytes. If `in` is empty, they are in the file itself.
  struct place {
    std::string_view in{};
    std::uint64_t offset = 0;  ///< there
    std::uint64_t bytes = 0;   ///< bytes from there on
  };

  /// Opens all files that it can; `troubles` has the others. @param found outlives this, and has `file`.
  stored_file(storage_type& storage, const llmmem::found_checkpoint& found,
              const llmmem::checkpoint_file& file)
      : file_(&file), chunk_bytes_(found.manifest.chunk_bytes), inputs_(found.manifest.stored.size() + 1) {
    if (file.runs.empty()) {
      open(storage, found.folder + "/" + file.name, file.bytes, {}, inputs_.size() - 1);
      return;
    }
    for (const llmmem::chunk_run& run : file.runs) {
      const llmmem::stored_chunks& in = found.manifest.stored[run.stored];
      if (inputs_[run.stored].name.empty())
        open(storage, stored_path(in), in.bytes, stored_path(in), run.stored);
    }
  }

  /// Files that are missing, or have the wrong length.
  [[nodiscard]] const std::vector<std::string>& troubles() const noexcept { return troubles_; }

  [[nodiscard]] place find(std::uint64_t offset) const { return find_run(offset).second; }

  /// @pre there are no troubles.
  void read(std::uint64_t offset, std::span<std::byte> into) const {
    while (!into.empty()) {
      const auto [number, at] = find_run(offset);
      const auto part = into.first(static_cast<std::size_t>(std::min<std::uint64_t>(into.size(), at.bytes)));
      inputs_[number].input->read(at.offset, part);
      offset += part.size();
      into = into.subspan(part.size());
    }
  }

 private:
  struct stored_input {
    std::string name{};  // of another file than this one
    std::optional<storage_type::input> input{};
  };

  void open(storage_type& storage, const std::string& path, std::uint64_t bytes, const std::string& name,
            std::size_t number) {
    inputs_[number].name = name;
    try {
      inputs_[number].input.emplace(storage.open(path));
      const std::uint64_t there = inputs_[number].input->bytes();
      if (there == bytes) return;
      troubles_.push_back(fmt::format("{}has {} bytes, but the manifest says {}",
                                      name.empty() ? "" : name + ": ", there, bytes));
    } catch (const llmmem::error& wrong) {
      troubles_.emplace_back(wrong.what());
    }
  }

  [[nodiscard]] std::pair<std::size_t, place> find_run(std::uint64_t offset) const {
    if (file_->runs.empty()) return {inputs_.size() - 1, {{}, offset, file_->bytes - offset}};
    const std::uint64_t chunk = offset / chunk_bytes_;
    const auto after =
        std::upper_bound(file_->runs.begin(), file_->runs.end(), chunk,
                         [](std::uint64_t i, const llmmem::chunk_run& run) { return i < run.first; });
    const llmmem::chunk_run& run = *(after - 1);  // the first begins at 0
    const std::uint64_t end = std::min((run.first + run.count) * chunk_bytes_, file_->bytes);
    return {run.stored,
            {inputs_[run.stored].name, run.place * chunk_bytes_ + (offset - run.first * chunk_bytes_),
             end - offset}};
  }

  const llmmem::checkpoint_file* file_;
  std::uint64_t chunk_bytes_;
  std::vector<stored_input> inputs_;  // by their numbers in the manifest, followed by the file itself
  std::vector<std::string> troubles_{};
};

}  // namespace checkpoint_tool
