/// @file
/// `show`: what a checkpoint says of itself.
#pragma once

#include <llmmem/checkpoint/manifest.hpp>
#include <llmmem/checkpoint/search.hpp>

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint_tool/describe.hpp"
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
    extras += is_extra(each) ? 1 : 0;
  std::string text =
      fmt::format("{}/{}\n  step {}, generation {}, {}; {}, {}; {} of {}; checksums of every {}\n  files\n",
                  shown(folder), one.folder, one.id.step, one.id.generation, counted(manifest.world, "rank"),
                  counted(manifest.tensors.size() - extras, "tensor"), counted(extras, "extra"),
                  counted(manifest.files.size(), "file"), bytes_shown(bytes_in(manifest)),
                  bytes_shown(manifest.chunk_bytes));
  for (const llmmem::checkpoint_file& each : manifest.files) {
    text += fmt::format("    {}  rank {}  {} bytes  CRC-32C {:08x}\n", shown(each.name), each.rank,
                        example::grouped(each.bytes), each.crc32c);
  }
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
        R"({{"name": {}, "rank": {}, "bytes": {}, "crc32c": "{:08x}", "chunks": [{}]}})",
        example::json_string(each.name), each.rank, each.bytes, each.crc32c, fmt::join(chunks, ", ")));
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
  return fmt::format(R"({{{}, "world": {}, "chunk_bytes": {}, "files": {}, "tensors": {}, "extras": {}}})"
                     "\n",
                     json_of(folder, one.id), manifest.world, manifest.chunk_bytes, json_lines(files),
                     json_lines(tensors), json_lines(extras));
}

}  // namespace checkpoint_tool
