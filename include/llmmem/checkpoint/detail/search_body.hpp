/// @file
/// Bodies of `find_checkpoint`, `open_checkpoint` and `list_checkpoints`.
#pragma once

#include <llmmem/checkpoint/detail/bodies.hpp>
#include <llmmem/checkpoint/detail/coverage.hpp>
#include <llmmem/checkpoint/detail/file_chunks.hpp>
#include <llmmem/checkpoint/detail/try_again.hpp>
#include <llmmem/checkpoint/search.hpp>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <exception>
#include <span>
#include <utility>

namespace llmmem {
inline namespace v0 {

LLMMEM_CHECKPOINT_BODY std::string checkpoint_search::message() const {
  std::string text = found ? found->folder : "no checkpoint";
  for (const skipped_checkpoint& each : skipped)
    text += "; passed over " + each.folder + ": " + each.why;
  return text;
}

namespace detail {

[[nodiscard]] inline std::string read_whole(storage_ref storage, const std::string& path,
                                            std::uint64_t most) {
  const auto input = storage.open(path);
  if (input.bytes() > most) {
    throw format_error(storage.path(path) + ": has " + std::to_string(input.bytes()) + " bytes, more than " +
                       std::to_string(most));
  }
  std::string text(static_cast<std::size_t>(input.bytes()), '\0');
  input.read(0, std::as_writable_bytes(std::span(text.data(), text.size())));
  return text;
}

/// @param folder  the folder of the checkpoint, or of its draft.
inline void verify_file(storage_ref storage, const std::string& folder, const checkpoint_manifest& manifest,
                        const checkpoint_file& file, verification how) {
  const file_chunks chunks(storage, folder, manifest, file);
  if (how == verification::sizes) return;
  constexpr std::uint64_t most = std::uint64_t{4} << 20;
  aligned_bytes memory(static_cast<std::size_t>(std::min({file.bytes, manifest.chunk_bytes, most})));
  chunks.verify(memory.span());
}

}  // namespace detail

LLMMEM_CHECKPOINT_BODY std::vector<checkpoint_id> list_checkpoints(storage_ref storage) {
  std::vector<checkpoint_id> all;
  for (const storage_entry& each : storage.list("")) {
    if (each.what != storage_entry::kind::folder && each.what != storage_entry::kind::link) continue;
    if (const auto id = read_folder_name(each.name)) all.push_back(*id);
  }
  std::ranges::sort(all, [](const checkpoint_id& a, const checkpoint_id& b) {
    return a.generation != b.generation ? a.generation > b.generation : a.step > b.step;
  });
  return all;
}

namespace detail {

/// Reads the manifest in the folder of that name.
[[nodiscard]] inline found_checkpoint open_manifest(storage_ref storage, const checkpoint_id& id) {
  found_checkpoint found{id, folder_name(id), {}};
  const std::string path = found.folder + "/" + std::string(checkpoint_names::manifest);
  found.manifest = read_manifest(read_whole(storage, path, max_manifest_bytes), storage.path(path));
  if (found.manifest.step != id.step || found.manifest.generation != id.generation) {
    throw format_error(storage.path(path) + ": it is of step " + std::to_string(found.manifest.step) +
                       ", generation " + std::to_string(found.manifest.generation) +
                       ", which differs from the folder's name");
  }
  return found;
}

}  // namespace detail

LLMMEM_CHECKPOINT_BODY found_checkpoint open_checkpoint(storage_ref storage, const checkpoint_id& id,
                                                        verification how) {
  found_checkpoint found = detail::open_manifest(storage, id);
  try {
    detail::check_complete(found.manifest, storage.path(found.folder));
  } catch (const argument_error& error) {
    throw format_error(error.what());
  }
  for (const checkpoint_file& file : found.manifest.files)
    detail::verify_file(storage, found.folder, found.manifest, file, how);
  return found;
}

namespace detail {

/// Why a checkpoint was not opened.
struct open_trouble {
  std::string why{};
  bool is_proof = false;  // it proves that the checkpoint is incomplete or damaged
};

/// A checkpoint, or the reason why it could not be opened.
struct open_attempt {
  std::optional<found_checkpoint> found{};
  open_trouble trouble{};
};

/// Opens a checkpoint, and retries while the error may pass. @param open  returns a `found_checkpoint`.
template <class Open>
[[nodiscard]] open_attempt attempt_to_open(storage_ref storage, const std::string& folder,
                                           const search_patience& waits, Open open) {
  try {
    return {try_again(waits, open), {}};
  } catch (const format_error& error) {
    return {{}, {error.what(), true}};
  } catch (const storage_error& error) {
    if (error.number() == ENOENT && leads_nowhere(storage, folder))
      return {{}, {std::string(error.what()) + "; " + std::string(link_without_end), false}};
    return {{}, {error.what(), proves_damage(error)}};
  } catch (const std::exception& error) {
    return {{}, {error.what(), false}};
  }
}

/// Returns the text for a checkpoint that may be complete. @param of the storage's name in texts.
[[nodiscard]] inline std::string unread_text(const std::string& of, const std::string& folder,
                                             const std::string& why) {
  return of + ": " + folder + " cannot be read now, but is not proved damaged: " + why +
         "; no older checkpoint was used instead. Resolve that and search again; to continue from an older "
         "one, move this one away, or search with unread_checkpoint::pass_over";
}

}  // namespace detail

LLMMEM_CHECKPOINT_BODY checkpoint_search find_checkpoint(storage_ref storage, verification how,
                                                         const search_patience& waits) {
  // A checkpoint is removed only if newer ones exist, so the search then starts again from the newest, rather
  // than take an older one that may have been kept. After this many attempts, the race cannot be won.
  constexpr int tries = 16;
  const auto list = [&] { return detail::try_again(waits, [&] { return list_checkpoints(storage); }); };
  checkpoint_search search;
  for (int i = 0; i < tries; ++i) {
    bool is_outdated = false;
    search = {};
    const std::vector<checkpoint_id> listed = list();
    for (const checkpoint_id& id : listed) {
      const std::string folder = folder_name(id);
      detail::open_attempt opened =
          detail::attempt_to_open(storage, folder, waits, [&] { return open_checkpoint(storage, id, how); });
      if (opened.found) {
        search.found = std::move(opened.found);
        return search;
      }
      const std::vector<checkpoint_id> now = list();
      const bool is_there = std::ranges::find(now, id) != now.end();
      is_outdated = is_outdated || !is_there || now.front().generation > listed.front().generation;
      if (is_outdated && i + 1 < tries) break;
      if (!is_there) continue;
      if (!opened.trouble.is_proof && waits.unread == unread_checkpoint::refuse)
        throw unreadable_checkpoint(detail::unread_text(storage.path(""), folder, opened.trouble.why));
      search.skipped.push_back({folder, std::move(opened.trouble.why)});
    }
    if (!is_outdated) break;
  }
  return search;
}

}  // namespace v0
}  // namespace llmmem
