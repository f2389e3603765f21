/// @file
/// Bodies of `copy_checkpoint` and `compact_checkpoint`.
#pragma once

#include <llmmem/checkpoint/copy.hpp>
#include <llmmem/checkpoint/detail/bodies.hpp>
#include <llmmem/checkpoint/detail/file_chunks.hpp>
#include <llmmem/hash/crc32c.hpp>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <span>
#include <string>

namespace llmmem {
inline namespace v0 {

LLMMEM_CHECKPOINT_BODY checkpoint_manifest folded_manifest(const checkpoint_manifest& what) {
  checkpoint_manifest folded = what;
  folded.stored.clear();
  for (checkpoint_file& each : folded.files)
    each.runs.clear();
  return folded;
}

namespace detail {

/// Checks consecutive bytes against the checksums of their chunks.
class chunk_prover {
 public:
  chunk_prover(const file_chunks& chunks, const checkpoint_file& file, std::uint64_t chunk_bytes)
      : chunks_(&chunks), file_(&file), chunk_bytes_(chunk_bytes) {}

  /// @throws format_error  at the end of a damaged chunk.
  void take(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const std::uint64_t left = chunk_bytes_of(*file_, chunk_bytes_, chunk_) - done_;
      const auto part = bytes.first(static_cast<std::size_t>(std::min<std::uint64_t>(left, bytes.size())));
      sum_ = crc32c(sum_, part);
      done_ += part.size();
      bytes = bytes.subspan(part.size());
      if (part.size() < left) continue;
      chunks_->check_chunk(chunk_, sum_);
      ++chunk_;
      done_ = 0;
      sum_ = 0;
    }
  }

 private:
  const file_chunks* chunks_;
  const checkpoint_file* file_;
  std::uint64_t chunk_bytes_;
  std::size_t chunk_ = 0;
  std::uint64_t done_ = 0;  // bytes of the chunk so far
  std::uint32_t sum_ = 0;
};

/// The two halves of a buffer: one is being written while the other is filled.
class copy_buffer {
 public:
  explicit copy_buffer(std::uint64_t bytes)
      : half_(half_of(bytes)), memory_(static_cast<std::size_t>(2 * half_)) {}

  [[nodiscard]] std::uint64_t half_bytes() const noexcept { return half_; }
  /// The halves take turns.
  [[nodiscard]] std::span<std::byte> half(std::uint64_t turn) noexcept {
    return memory_.span().subspan(static_cast<std::size_t>(turn % 2 * half_),
                                  static_cast<std::size_t>(half_));
  }

 private:
  /// Rounds to whole pages if there is space for some, because aligned ones bypass the page cache.
  [[nodiscard]] static std::uint64_t half_of(std::uint64_t bytes) {
    if (bytes < 2) {
      throw length_error("copy_checkpoint: a buffer of " + std::to_string(bytes) +
                         " bytes cannot be halved; give it some megabytes");
    }
    if (bytes > max_bytes) {
      throw length_error("copy_checkpoint: a buffer of " + std::to_string(bytes) +
                         " bytes exceeds the limit of 2^63 - 1");
    }
    const std::uint64_t half = bytes / 2;
    return half < aligned_bytes::alignment ? half
                                           : half / aligned_bytes::alignment * aligned_bytes::alignment;
  }

  std::uint64_t half_;
  aligned_bytes memory_;
};

inline void ask_watch(const copy_watch_ref& watch, const copy_progress& progress, const std::string& folder) {
  if (watch(progress) == copy_verdict::proceed) return;
  throw copy_stopped(folder + ": its copy was stopped after " + std::to_string(progress.copied) + " of " +
                     std::to_string(progress.bytes) + " bytes");
}

inline void copy_file(storage_ref from, const found_checkpoint& what, const checkpoint_file& file,
                      storage_ref to, const std::string& path, copy_buffer& buffer, copy_progress& progress,
                      const copy_watch_ref& watch) {
  using write_token = storage_ref::output::write_token;
  const file_chunks chunks(from, what.folder, what.manifest, file);
  chunk_prover prover(chunks, file, what.manifest.chunk_bytes);
  auto output = to.create(path, file.bytes);
  std::optional<write_token> writing;
  for (std::uint64_t at = 0, turn = 0; at < file.bytes; ++turn) {
    ask_watch(watch, progress, from.path(what.folder));
    const auto part =
        buffer.half(turn).first(static_cast<std::size_t>(std::min(buffer.half_bytes(), file.bytes - at)));
    chunks.read(at, part);
    prover.take(part);
    if (writing) output.finish_write(*writing);
    writing.emplace(output.begin_write(at, part));
    at += part.size();
    progress.copied += part.size();
  }
  output.sync();
}

}  // namespace detail

LLMMEM_CHECKPOINT_BODY copy_report copy_checkpoint(storage_ref from, const found_checkpoint& what,
                                                   checkpoint_folder_base& to, const copy_options& options,
                                                   copy_watch_ref watch) {
  detail::copy_buffer buffer(options.buffer_bytes);
  copy_report report{{what.id, {}, folded_manifest(what.manifest)}, 0};
  for (const checkpoint_file& each : what.manifest.files)
    report.bytes += each.bytes;
  const checkpoint_draft draft =
      options.generation == copy_generation::same ? to.begin_as(what.id) : to.begin(what.id.step);
  copy_progress progress{draft.id, report.bytes, 0};
  try {  // at once, because a failure from here on leaves a draft
    report.copy.id = draft.id;
    report.copy.folder = folder_name(draft.id);
    report.copy.manifest.generation = draft.id.generation;
    for (const checkpoint_file& each : what.manifest.files)
      detail::copy_file(from, what, each, to.storage(), draft.path(each.name), buffer, progress, watch);
    detail::ask_watch(watch, progress, from.path(what.folder));
    to.commit(draft, report.copy.manifest);
  } catch (const durability_uncertain&) {
    throw;  // the copy is visible, and no longer a draft
  } catch (...) {
    to.abandon(draft);
    throw;
  }
  return report;
}

LLMMEM_CHECKPOINT_BODY copy_report compact_checkpoint(checkpoint_folder_base& folder,
                                                      const found_checkpoint& what, copy_options options,
                                                      copy_watch_ref watch) {
  const std::vector<checkpoint_id> all = list_checkpoints(folder.storage());
  if (all.empty() || all.front() != what.id) {
    throw argument_error(folder.storage().path(what.folder) +
                         ": it is not the newest of its folder, but a copy of it would be; compact "
                         "the newest, " +
                         (all.empty() ? std::string("of which there is none") : folder_name(all.front())));
  }
  options.generation = copy_generation::next;
  return copy_checkpoint(folder.storage(), what, folder, options, watch);
}

}  // namespace v0
}  // namespace llmmem
