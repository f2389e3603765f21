/// @file
/// `show`: the contents of a checkpoint's manifest.
#pragma once

#include <llmmem/checkpoint/manifest.hpp>
#include <llmmem/checkpoint/search.hpp>

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint_tool/describe.hpp"
#include "checkpoint_tool/stored.hpp"
#include "common/text.hpp"

namespace checkpoint_tool {

namespace detail {

[[nodiscard]] inline std::string piece_text(const llmmem::checkpoint_manifest& manifest,
                                            const llmmem::checkpoint_tensor& tensor,
                                            const llmmem::checkpoint_piece& piece) {
  std::string text = fmt::format("      {}  {}", shown(manifest.files[piece.file].name),
                                 runs_text(piece.runs, elements_of(tensor)));
  if (piece.entry != tensor.name) text += fmt::format(", called \"{}\" there", shown(piece.entry));
  return text + '\n';
}

/// The number of chunks that a checkpoint takes from each stored file.
[[nodiscard]] inline std::vector<std::uint64_t> chunks_by_stored(
    const llmmem::checkpoint_manifest& manifest) {
  std::vector<std::uint64_t> counts(manifest.stored.size());
  for (const llmmem::checkpoint_file& file : manifest.files) {
    for (const llmmem::chunk_run& run : file.runs)
      counts[run.stored] += run.count;
  }
  return counts;
}

[[nodiscard]] inline std::string stored_text(const llmmem::checkpoint_manifest& manifest) {
  const std::vector<std::uint64_t> counts = chunks_by_stored(manifest);
  std::string text = "  chunks are in\n";
  for (std::size_t i = 0; i < counts.size(); ++i)
    text += fmt::format("    {}  {}\n", shown(stored_path(manifest.stored[i])), counted(counts[i], "chunk"));
  return text;
}

[[nodiscard]] inline std::string stored_json(const llmmem::checkpoint_manifest& manifest) {
  const std::vector<std::uint64_t> counts = chunks_by_stored(manifest);
  std::vector<std::string> stored;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const llmmem::stored_chunks& each = manifest.stored[i];
    stored.push_back(
        fmt::format(R"({{"generation": {}, "step": {}, "name": {}, "bytes": {}, "used_chunks": {}}})",
                    each.generation, each.step, example::json_string(each.name), each.bytes, counts[i]));
  }
  return json_lines(stored);
}

[[nodiscard]] inline std::string piece_json(const llmmem::checkpoint_manifest& manifest,
                                            const llmmem::checkpoint_piece& piece) {
  return fmt::format(R"({{"file": {}, "entry": {}, "begin": {}, "run": {}, "stride": {}, "count": {}}})",
                     example::json_string(manifest.files[piece.file].name), example::json_string(piece.entry),
                     piece.runs.begin, piece.runs.run, piece.runs.stride, piece.runs.count);
}

}  // namespace detail

/// @param folder  of checkpoints.
[[nodiscard]] inline std::string to_report(const std::string& folder, const llmmem::found_checkpoint& one) {
  const llmmem::checkpoint_manifest& manifest = one.manifest;
  std::uint64_t extras = 0;
  for (const llmmem::checkpoint_tensor& each : manifest.tensors)
    extras += is_extra(each) ? 1U : 0U;
  std::string text =
      fmt::format("{}/{}\n  step {}, generation {}, {}; {}, {}; {} of {}; checksums of every {}\n",
                  shown(folder), one.folder, one.id.step, one.id.generation, counted(manifest.world, "rank"),
                  counted(manifest.tensors.size() - extras, "tensor"), counted(extras, "extra"),
                  counted(manifest.files.size(), "file"), bytes_shown(bytes_in(manifest)),
                  bytes_shown(manifest.chunk_bytes));
  const own_share share = share_of(manifest);
  if (share.is_incremental) text += "  " + share_text(share) + '\n';
  text += "  files\n";
  for (const llmmem::checkpoint_file& each : manifest.files) {
    text += fmt::format("    {}  rank {}  {} bytes  CRC-32C {:08x}", shown(each.name), each.rank,
                        example::grouped(each.bytes), each.crc32c);
    if (share.is_incremental)
      text += fmt::format("  {} of {} chunks new", new_chunks_of(manifest, each), each.chunks.size());
    text += '\n';
  }
  if (share.is_incremental) text += detail::stored_text(manifest);
  for (const bool of_extras : {false, true}) {
    if (of_extras ? extras == 0 : extras == manifest.tensors.size()) continue;
    text += of_extras ? "  extras\n" : "  tensors\n";
    for (const llmmem::checkpoint_tensor& each : manifest.tensors) {
      if (is_extra(each) != of_extras) continue;
      text += fmt::format("    {}  {} {}\n", shown(each.name), name_of(each.type), shape_text(each.shape));
      for (const llmmem::checkpoint_piece& piece : each.pieces)
        text += detail::piece_text(manifest, each, piece);
    }
  }
  return text;
}

[[nodiscard]] inline std::string to_json(const std::string& folder, const llmmem::found_checkpoint& one) {
  const llmmem::checkpoint_manifest& manifest = one.manifest;
  std::vector<std::string> files;
  for (const llmmem::checkpoint_file& each : manifest.files) {
    std::vector<std::string> chunks;
    for (const std::uint32_t chunk : each.chunks)
      chunks.push_back(fmt::format("\"{:08x}\"", chunk));
    files.push_back(fmt::format(
        R"({{"name": {}, "rank": {}, "bytes": {}, "crc32c": "{:08x}", "new_chunks": {}, "chunks": [{}]}})",
        example::json_string(each.name), each.rank, each.bytes, each.crc32c, new_chunks_of(manifest, each),
        fmt::join(chunks, ", ")));
  }
  std::vector<std::string> tensors;
  std::vector<std::string> extras;
  for (const llmmem::checkpoint_tensor& each : manifest.tensors) {
    std::vector<std::string> pieces;
    for (const llmmem::checkpoint_piece& piece : each.pieces)
      pieces.push_back(detail::piece_json(manifest, piece));
    (is_extra(each) ? extras : tensors)
        .push_back(fmt::format(R"({{"name": {}, "type": "{}", "shape": {}, "pieces": [{}]}})",
                               example::json_string(each.name), name_of(each.type), shape_text(each.shape),
                               fmt::join(pieces, ", ")));
  }
  return fmt::format(
      R"({{{}, "world": {}, "chunk_bytes": {}, {}, "files": {}, "stored": {}, "tensors": {}, "extras": {}}})"
      "\n",
      json_of(folder, one.id), manifest.world, manifest.chunk_bytes, share_json(share_of(manifest)),
      json_lines(files), detail::stored_json(manifest), json_lines(tensors), json_lines(extras));
}

}  // namespace checkpoint_tool
