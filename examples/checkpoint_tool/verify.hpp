/// @file
/// `verify`: checks every byte of a checkpoint by its checksums, and every header by the manifest.
#pragma once

#include <llmmem/checkpoint/file_plan.hpp>
#include <llmmem/checkpoint/manifest.hpp>
#include <llmmem/checkpoint/search.hpp>
#include <llmmem/error.hpp>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/model/safetensors.hpp>
#include <llmmem/sharding/reshard.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint_tool/describe.hpp"
#include "checkpoint_tool/memory.hpp"
#include "checkpoint_tool/progress.hpp"
#include "checkpoint_tool/select.hpp"
#include "checkpoint_tool/stored.hpp"
#include "common/text.hpp"

namespace checkpoint_tool {

/// A fault.
struct damage {
  std::string file{};  ///< a file of the checkpoint; empty: the fault is a tensor's
  std::string tensor{};
  std::optional<std::pair<std::uint64_t, std::uint64_t>> bytes{};  ///< their place: from, up to
  std::string why{};
  std::string stored{};  ///< the other file that has those bytes; empty: the file itself
};

/// The verdict on a checkpoint.
struct verdict {
  llmmem::checkpoint_id id{};
  std::uint64_t files = 0;
  std::uint64_t read_bytes = 0;
  std::vector<damage> damages{};

  [[nodiscard]] bool is_complete() const noexcept { return damages.empty(); }
};

/// Verifies one checkpoint; the verdict has all faults.
class verifier {
 public:
  verifier(storage_type& storage, llmmem::checkpoint_id id, llmmem::verification how, std::FILE* notes)
      : storage_(&storage), how_(how), notes_(notes) {
    result_.id = id;
  }

  [[nodiscard]] verdict run() && {
    const std::string manifest(llmmem::checkpoint_names::manifest);
    try {
      found_ = read_checkpoint(*storage_, result_.id);
    } catch (const llmmem::error& wrong) {
      result_.damages.push_back({manifest, {}, std::nullopt, wrong.what()});
      return std::move(result_);
    }
    result_.files = found_.manifest.files.size();
    progress meter(notes_, "verifying " + found_.folder, bytes_in(found_.manifest));
    for (std::uint32_t i = 0; i < found_.manifest.files.size(); ++i) {
      const llmmem::checkpoint_file& file = found_.manifest.files[i];
      try {
        const stored_file input(*storage_, found_, file);
        for (const std::string& trouble : input.troubles())
          add(file, trouble);
        if (!input.troubles().empty()) continue;
        if (how_ == llmmem::verification::checksums) check_bytes(file, input, meter);
        check_header(i, input);
      } catch (const llmmem::error& wrong) {
        add(file, wrong.what());
      }
    }
    for (const llmmem::checkpoint_tensor& each : found_.manifest.tensors)
      check_cover(each);
    return std::move(result_);
  }

 private:
  void add(const llmmem::checkpoint_file& file, std::string why) {
    result_.damages.push_back({file.name, {}, std::nullopt, std::move(why)});
  }

  /// Adjacent damaged chunks are one fault.
  void check_bytes(const llmmem::checkpoint_file& file, const stored_file& input, progress& meter) {
    const std::uint64_t chunk_bytes = found_.manifest.chunk_bytes;
    file_memory memory(std::min(file.bytes, chunk_bytes));
    std::optional<std::pair<std::uint64_t, std::uint64_t>> bad;  // their place
    std::string bad_in;
    const auto tell = [&] {
      if (!bad) return;
      result_.damages.push_back({file.name,
                                 {},
                                 bad,
                                 fmt::format("bytes {} to {} are damaged: they have not the CRC-32C that the "
                                             "manifest has",
                                             bad->first, bad->second),
                                 bad_in});
      bad.reset();
    };
    for (std::size_t i = 0; i < file.chunks.size(); ++i) {
      const std::uint64_t begin = i * chunk_bytes;
      const std::uint64_t end = std::min(begin + chunk_bytes, file.bytes);
      const auto bytes = memory.span().first(static_cast<std::size_t>(end - begin));
      input.read(begin, bytes);
      result_.read_bytes += bytes.size();
      meter.add(bytes.size());
      if (llmmem::crc32c(0, bytes) == file.chunks[i]) {
        tell();
        continue;
      }
      const stored_file::place at = input.find(begin);
      if (bad && (bad_in != at.in || bad->second != at.offset)) tell();
      bad = {bad ? bad->first : at.offset, at.offset + bytes.size()};
      bad_in = at.in;
    }
    tell();
  }

  /// Checks that a safetensors header and the manifest's pieces have the same tensors.
  void check_header(std::uint32_t number, const stored_file& input) {
    const llmmem::checkpoint_file& file = found_.manifest.files[number];
    std::map<std::string_view, std::pair<const llmmem::checkpoint_tensor*, const llmmem::checkpoint_piece*>>
        pieces;
    for (const llmmem::checkpoint_tensor& tensor : found_.manifest.tensors) {
      for (const llmmem::checkpoint_piece& piece : tensor.pieces) {
        if (piece.file == number) pieces.emplace(piece.entry, std::pair(&tensor, &piece));
      }
    }
    if (pieces.empty() && !file.name.ends_with(".safetensors")) return;  // an index, or somebody's own
    std::vector<std::byte> begin(static_cast<std::size_t>(std::min<std::uint64_t>(8, file.bytes)));
    input.read(0, begin);
    const std::uint64_t header_bytes = llmmem::safetensors_header_bytes(begin, "its header");
    if (header_bytes > file.bytes) {
      return add(file,
                 fmt::format("its header would have {} bytes, the file has {}", header_bytes, file.bytes));
    }
    begin.resize(static_cast<std::size_t>(header_bytes));
    input.read(0, begin);
    const llmmem::safetensors_header header = llmmem::read_safetensors(begin, file.bytes, "its header");
    for (const llmmem::safetensors_entry& entry : header.entries) {
      const auto found = pieces.find(entry.name);
      if (found == pieces.end()) {
        result_.damages.push_back(
            {file.name, entry.name, std::nullopt, "is in the file, and the manifest does not say so"});
        continue;
      }
      const auto [tensor, piece] = found->second;
      pieces.erase(found);
      if (entry.type == tensor->type &&
          entry.bytes() == llmmem::bytes_of(tensor->type, piece->runs.elements(), "its piece"))
        continue;
      result_.damages.push_back(
          {file.name, entry.name, std::nullopt,
           fmt::format("is {} {} in the file, the manifest says {} of {}", name_of(entry.type),
                       shape_text(entry.shape), counted(piece->runs.elements(), "element"),
                       name_of(tensor->type))});
    }
    for (const auto& [name, piece] : pieces) {
      result_.damages.push_back(
          {file.name, std::string(name), std::nullopt, "is not in the file, and the manifest says so"});
    }
  }

  /// Checks that the pieces of a tensor have all its elements.
  void check_cover(const llmmem::checkpoint_tensor& tensor) {
    const llmmem::tensor_id first{0};
    const llmmem::tensor_facts facts[] = {{tensor.name, llmmem::tensor_shape::of(tensor.shape), 1}};
    std::vector<llmmem::stored_piece> stored;
    for (const llmmem::checkpoint_piece& each : tensor.pieces)
      stored.push_back({first, llmmem::holder_id{each.file}, each.runs});
    const llmmem::wanted_piece all[] = {{first, llmmem::rank_id{0},
                                         llmmem::element_runs::all_of(facts[0].shape.elements()),
                                         llmmem::no_holder}};
    try {
      static_cast<void>(llmmem::make_reshard(facts, stored, all));
    } catch (const llmmem::error& wrong) {
      result_.damages.push_back(
          {{}, tensor.name, std::nullopt, std::string("its pieces do not make all of it: ") + wrong.what()});
    }
  }

  storage_type* storage_;
  llmmem::verification how_;
  std::FILE* notes_;
  llmmem::found_checkpoint found_{};
  verdict result_{};
};

[[nodiscard]] inline std::string to_report(const verdict& one, llmmem::verification how) {
  std::string text = fmt::format("{}  ", folder_name(one.id));
  if (one.is_complete()) {
    return text +
           (how == llmmem::verification::checksums
                ? fmt::format("whole: {}, {} read\n", counted(one.files, "file"), bytes_shown(one.read_bytes))
                : fmt::format("whole by sizes: {}, no data read\n", counted(one.files, "file")));
  }
  text += "DAMAGED\n";
  for (const damage& each : one.damages) {
    text += "  ";
    if (!each.file.empty()) text += shown(each.file) + ": ";
    if (!each.stored.empty()) text += "in " + shown(each.stored) + ": ";
    if (!each.tensor.empty()) text += fmt::format("tensor \"{}\" ", shown(each.tensor));
    text += one_line(each.why) + '\n';
  }
  return text;
}

[[nodiscard]] inline std::string to_json(const std::string& folder, const std::vector<verdict>& all,
                                         llmmem::verification how) {
  const auto text_or_null = [](const std::string& text) {
    return text.empty() ? std::string("null") : example::json_string(text);
  };
  std::vector<std::string> checkpoints;
  for (const verdict& one : all) {
    std::vector<std::string> damages;
    for (const damage& each : one.damages) {
      damages.push_back(
          fmt::format(R"({{"file": {}, "tensor": {}, "begin": {}, "end": {}, "stored": {}, "why": {}}})",
                      text_or_null(each.file), text_or_null(each.tensor),
                      each.bytes ? std::to_string(each.bytes->first) : "null",
                      each.bytes ? std::to_string(each.bytes->second) : "null", text_or_null(each.stored),
                      example::json_string(each.why)));
    }
    checkpoints.push_back(
        fmt::format(R"({{"name": {}, "step": {}, "generation": {}, "whole": {}, "files": {}, )"
                    R"("read_bytes": {}, "damage": [{}]}})",
                    example::json_string(folder_name(one.id)), one.id.step, one.id.generation,
                    one.is_complete(), one.files, one.read_bytes, fmt::join(damages, ", ")));
  }
  return fmt::format(
      R"({{"folder": {}, "how": "{}", "whole": {}, "checkpoints": {}}})"
      "\n",
      example::json_string(folder), how == llmmem::verification::checksums ? "checksums" : "sizes",
      std::all_of(all.begin(), all.end(), [](const verdict& one) { return one.is_complete(); }),
      json_lines(checkpoints));
}

}  // namespace checkpoint_tool
