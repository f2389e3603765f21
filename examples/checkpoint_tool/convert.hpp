/// @file
/// `convert`: makes a checkpoint again for other ranks, in a new folder, one window of memory at a time.
#pragma once

#include <llmmem/checkpoint/file_plan.hpp>
#include <llmmem/checkpoint/folder.hpp>
#include <llmmem/checkpoint/manifest.hpp>
#include <llmmem/checkpoint/search.hpp>
#include <llmmem/error.hpp>
#include <llmmem/hash/crc32c.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint_tool/describe.hpp"
#include "checkpoint_tool/fold.hpp"
#include "checkpoint_tool/memory.hpp"
#include "checkpoint_tool/progress.hpp"
#include "checkpoint_tool/reshard_files.hpp"
#include "checkpoint_tool/select.hpp"
#include "checkpoint_tool/tensor_reader.hpp"
#include "common/program.hpp"
#include "common/text.hpp"

namespace checkpoint_tool {

/// How files are copied. Tensors take two windows of memory, and one chunk per reader.
struct copy_options {
  std::uint64_t chunk_bytes = std::uint64_t{4} << 20;  ///< of the new checkpoint
  std::uint64_t window_chunks = 8;
};

/// The outcome of a conversion.
struct conversion {
  std::string from{};  ///< folder of checkpoints
  llmmem::checkpoint_id from_id{};
  std::string to{};
  llmmem::checkpoint_id to_id{};
  llmmem::checkpoint_manifest manifest{};  ///< of the new one
  std::uint64_t read_bytes = 0;
};

/// Writes files from the bytes of another checkpoint.
class file_copier {
 public:
  file_copier(storage_type& from, const llmmem::found_checkpoint& found, storage_type& to,
              const copy_options& options, std::uint64_t largest_file, progress& meter)
      : reader_(from, found),
        to_(&to),
        options_(options),
        window_bytes_(
            std::min(options.chunk_bytes * options.window_chunks,
                     (largest_file + options.chunk_bytes - 1) / options.chunk_bytes * options.chunk_bytes)),
        memory_(2 * window_bytes_),
        meter_(&meter) {}

  /// Writes and syncs a file of a draft. While one window is written, the next one is read.
  [[nodiscard]] llmmem::checkpoint_file write(const llmmem::checkpoint_draft& draft, std::uint32_t rank,
                                              const llmmem::planned_file& file,
                                              const std::vector<span_source>& sources) {
    llmmem::checkpoint_file made{file.name, file.bytes, rank, 0, {}};
    std::array<std::vector<storage_type::output::write_token>, 2> under_way;
    auto output = to_->create(draft.path(file.name), file.bytes);
    std::size_t turn = 0;
    for (std::uint64_t begin = 0; begin < file.bytes; begin += window_bytes_, turn = 1 - turn) {
      for (const auto& token : under_way[turn])
        output.finish_write(token);
      under_way[turn].clear();
      const std::uint64_t bytes = std::min(window_bytes_, file.bytes - begin);
      const auto window = memory_.span().subspan(turn * static_cast<std::size_t>(window_bytes_),
                                                 static_cast<std::size_t>(bytes));
      fill(file, sources, begin, window);
      for (std::uint64_t at = 0; at < bytes; at += options_.chunk_bytes) {
        const std::uint64_t count = std::min(options_.chunk_bytes, bytes - at);
        const std::span<const std::byte> chunk =
            window.subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(count));
        made.chunks.push_back(llmmem::crc32c(0, chunk));
        made.crc32c = llmmem::crc32c_combine(made.crc32c, made.chunks.back(), count);
        under_way[turn].push_back(output.begin_write(begin + at, chunk));
      }
      meter_->add(bytes);
    }
    output.sync();
    return made;
  }
  [[nodiscard]] std::uint64_t read_bytes() const noexcept { return read_bytes_; }

 private:
  /// Fills in the bytes of a file from `begin` on: its head, and bytes of the other checkpoint.
  void fill(const llmmem::planned_file& file, const std::vector<span_source>& sources, std::uint64_t begin,
            std::span<std::byte> into) {
    const std::uint64_t end = begin + into.size();
    if (begin < file.head.size()) {
      const std::uint64_t bytes = std::min<std::uint64_t>(file.head.size(), end) - begin;
      std::memcpy(into.data(), file.head.data() + begin, static_cast<std::size_t>(bytes));
    }
    // Spans are consecutive.
    auto next = std::ranges::upper_bound(
        file.spans, begin, {}, [](const llmmem::planned_span& span) { return span.begin + span.bytes; });
    for (; next != file.spans.end() && next->begin < end; ++next) {
      const llmmem::planned_span& span = *next;
      const std::uint64_t first = std::max(begin, span.begin);
      const std::uint64_t last = std::min(end, span.begin + span.bytes);
      if (first >= last) continue;
      const span_source& source = sources[span.tensor];
      reader_.want(
          *source.tensor, source.part, span.offset + (first - span.begin),
          into.subspan(static_cast<std::size_t>(first - begin), static_cast<std::size_t>(last - first)));
    }
    read_bytes_ += reader_.read();
  }

  tensor_reader reader_;
  storage_type* to_;
  copy_options options_;
  std::uint64_t window_bytes_;
  file_memory memory_;
  progress* meter_;
  std::uint64_t read_bytes_ = 0;
};

/// @throws llmmem::io_error  if `to` has anything in it except remains of an earlier conversion.
inline void refuse_used_folder(const std::string& to) {
  std::error_code none;
  if (!std::filesystem::exists(to, none)) return;
  const auto storage = open_folder(to);
  for (const llmmem::storage_entry& each : storage->list("")) {
    if (each.name == llmmem::checkpoint_names::lock || llmmem::is_left_over(each.name)) continue;
    throw llmmem::io_error(
        fmt::format("{}: is there and not empty: it has \"{}\"; give a new folder", to, each.name));
  }
}

/// Makes the checkpoint `found` again, for other ranks, in `folder`.
[[nodiscard]] inline conversion convert_into(llmmem::checkpoint_folder<storage_type>& folder,
                                             storage_type& from, const llmmem::found_checkpoint& found,
                                             const std::vector<rank_files>& ranks, std::FILE* notes,
                                             const copy_options& options = {}) {
  std::uint64_t total = 0;
  std::uint64_t largest = 1;
  for (const rank_files& rank : ranks) {
    for (const llmmem::planned_file& file : rank.plan.files) {
      total += file.bytes;
      largest = std::max(largest, file.bytes);
    }
  }
  progress meter(notes, "converting", total);
  file_copier copier(from, found, folder.storage(), options, largest, meter);
  const llmmem::checkpoint_draft draft = folder.begin(found.id.step);
  llmmem::checkpoint_manifest all{.generation = draft.id.generation,
                                  .step = draft.id.step,
                                  .world = static_cast<std::uint32_t>(ranks.size()),
                                  .chunk_bytes = options.chunk_bytes};
  try {
    llmmem::manifest_merger merger;
    for (std::uint32_t rank = 0; rank < ranks.size(); ++rank) {
      llmmem::checkpoint_manifest part = all;
      part.tensors = ranks[rank].plan.tensors;
      for (const llmmem::planned_file& file : ranks[rank].plan.files)
        part.files.push_back(copier.write(draft, rank, file, ranks[rank].sources));
      merger.add(std::move(part), fmt::format("rank {}", rank));
    }
    all = std::move(merger).finish("the new checkpoint");
    folder.commit(draft, all);
  } catch (const llmmem::durability_uncertain&) {
    throw;  // the checkpoint exists
  } catch (...) {
    folder.abandon(draft);
    throw;
  }
  return {from.path(""), found.id, folder.storage().path(""), draft.id, std::move(all), copier.read_bytes()};
}

/// Executes `convert`.
[[nodiscard]] inline conversion convert(const checkpoint_reference& from, const std::string& to,
                                        const reshard_options& options, std::FILE* notes) {
  const auto source = open_folder(from.folder);
  const llmmem::found_checkpoint found = open_whole(*source, from.which);
  const std::vector<rank_files> ranks = plan_reshard(found.manifest, options);
  refuse_used_folder(to);
  storage_type target(to);
  llmmem::checkpoint_folder<storage_type> folder(target);
  conversion done = convert_into(folder, *source, found, ranks, notes);
  detail::hint_at_newest(folder, notes);
  return done;
}

[[nodiscard]] inline std::string to_report(const conversion& done) {
  std::string text = fmt::format(
      "{}/{}\n  of {}/{}\n  {}, {}; {} of {}, {} read\n", shown(done.to), folder_name(done.to_id),
      shown(done.from), folder_name(done.from_id), counted(done.manifest.world, "rank"),
      counted(done.manifest.tensors.size(), "tensor"), counted(done.manifest.files.size(), "file"),
      bytes_shown(bytes_in(done.manifest)), bytes_shown(done.read_bytes));
  for (const llmmem::checkpoint_file& each : done.manifest.files)
    text += fmt::format("    {}  {} bytes\n", shown(each.name), example::grouped(each.bytes));
  return text;
}

[[nodiscard]] inline std::string to_json(const conversion& done) {
  std::vector<std::string> files;
  for (const llmmem::checkpoint_file& each : done.manifest.files)
    files.push_back(
        fmt::format(R"({{"name": {}, "bytes": {}}})", example::json_string(each.name), each.bytes));
  return fmt::format(R"({{"from": {{{}}}, "to": {{{}}}, "world": {}, "tensors": {}, "bytes": {}, )"
                     R"("read_bytes": {}, "files": {}}})"
                     "\n",
                     json_of(done.from, done.from_id), json_of(done.to, done.to_id), done.manifest.world,
                     done.manifest.tensors.size(), bytes_in(done.manifest), done.read_bytes,
                     json_lines(files));
}

}  // namespace checkpoint_tool
