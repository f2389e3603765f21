/// @file
/// The checkpoint that an incremental save refers to, and the record of where its chunks are.
#pragma once

#include <llmmem/checkpoint/manifest.hpp>
#include <llmmem/checkpoint/names.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The digest of a chunk, in addition to its checksum.
using chunk_digest_value = std::array<std::uint64_t, 2>;

/// A rank's part of a committed checkpoint, to which the next one may refer.
struct committed_part {
  checkpoint_manifest part{};                            // files in planned order, followed by extras
  std::vector<std::vector<chunk_digest_value>> digests;  // by file and chunk
  std::uint64_t version = 0;                             // version of the view
  std::uint32_t since_whole = 0;  // number of committed checkpoints since the last full one, inclusive
};

/// Returns where a chunk of a file of a committed part is.
[[nodiscard]] inline std::pair<stored_chunks, std::uint64_t> place_of(const checkpoint_manifest& part,
                                                                      const checkpoint_file& file,
                                                                      std::uint64_t chunk) {
  if (file.runs.empty()) return {{part.generation, part.step, file.name, file.bytes}, chunk};
  const chunk_run& run = *(std::ranges::upper_bound(file.runs, chunk, {}, &chunk_run::first) - 1);
  return {part.stored[run.stored], run.place + (chunk - run.first)};
}

/// Records in a new part the places of the chunks of one of its files, in order.
class run_list {
 public:
  run_list(checkpoint_manifest& part, checkpoint_file& file)
      : part_(&part), file_(&file), first_(part.stored.size()) {}

  /// Adds the place of the next chunk.
  void add(const stored_chunks& in, std::uint64_t place) {
    const std::uint32_t stored = number_of(in);
    const std::uint64_t chunk = chunks_++;
    if (!file_->runs.empty()) {
      chunk_run& last = file_->runs.back();
      if (last.stored == stored && last.place + last.count == place) {
        last.count += 1;
        return;
      }
    }
    file_->runs.push_back({chunk, 1, stored, place});
  }

 private:
  [[nodiscard]] std::uint32_t number_of(const stored_chunks& in) {
    // The search is short: one file of each checkpoint since the last full one. Earlier entries belong to
    // other files.
    const auto found =
        std::find(part_->stored.begin() + static_cast<std::ptrdiff_t>(first_), part_->stored.end(), in);
    if (found == part_->stored.end()) {
      part_->stored.push_back(in);
      return static_cast<std::uint32_t>(part_->stored.size() - 1);
    }
    return static_cast<std::uint32_t>(found - part_->stored.begin());
  }

  checkpoint_manifest* part_;
  checkpoint_file* file_;
  std::size_t first_;
  std::uint64_t chunks_ = 0;
};

/// Returns the name of a file that holds only the new chunks of a checkpoint's file.
[[nodiscard]] inline std::string changes_name(const std::string& file) {
  return file + ".changes";
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
