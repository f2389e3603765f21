/// @file
/// Bodies of `recover`: finds the newest checkpoint of several sources.
#pragma once

#include <llmmem/checkpoint/copy.hpp>
#include <llmmem/checkpoint/detail/bodies.hpp>
#include <llmmem/checkpoint/detail/search_body.hpp>
#include <llmmem/checkpoint/detail/try_again.hpp>
#include <llmmem/checkpoint/recover.hpp>

#include <algorithm>
#include <exception>

namespace llmmem {
inline namespace v0 {

namespace detail {

LLMMEM_CHECKPOINT_BODY checkpoint_manifest source_set::manifest(std::size_t i,
                                                                const checkpoint_id& id) const {
  const std::string path = folder_name(id) + "/" + std::string(checkpoint_names::manifest);
  return read_manifest(read_whole(storages_[i], path, max_manifest_bytes), storages_[i].path(path));
}

/// A checkpoint by its name, and its source.
struct source_entry {
  std::size_t source;
  checkpoint_id id;
};

/// All checkpoints, newest first; for equal generations, in the order of the sources.
struct source_list {
  std::vector<source_entry> entries{};
  std::vector<skipped_in_source> skipped{};  // sources
};

[[nodiscard]] inline source_list list_sources(const source_set& sources, const search_patience& waits) {
  source_list all;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    try {
      for (const checkpoint_id& id : try_again(waits, [&] { return sources.list(i); }))
        all.entries.push_back({i, id});
    } catch (const std::exception& error) {
      all.skipped.push_back({i, sources.name(i), skip_reason::source, {}, error.what()});
    }
  }
  std::ranges::sort(all.entries, [](const source_entry& a, const source_entry& b) {
    if (a.id.generation != b.id.generation) return a.id.generation > b.id.generation;
    return a.source != b.source ? a.source < b.source : a.id.step > b.id.step;
  });
  return all;
}

/// Tries to open a listed checkpoint; returns it, or the reason.
[[nodiscard]] inline open_attempt attempt_to_open(const source_set& sources, const source_entry& entry,
                                                  verification how, const search_patience& waits) {
  const storage_ref storage = sources.storage(entry.source);
  return attempt_to_open(storage, folder_name(entry.id), waits,
                         [&] { return open_checkpoint(storage, entry.id, how); });
}

/// Records a checkpoint that could not be opened.
[[nodiscard]] inline skipped_in_source noted(const source_set& sources, const source_entry& entry,
                                             open_trouble trouble) {
  return {entry.source, sources.name(entry.source),
          trouble.is_proof ? skip_reason::damaged : skip_reason::unread, folder_name(entry.id),
          std::move(trouble.why)};
}

/// Returns whether a listed checkpoint no longer exists, or a newer one does; the search then starts again.
[[nodiscard]] inline bool is_outdated(const source_set& sources, const source_list& listed,
                                      const source_entry& entry, const search_patience& waits) {
  try {
    const auto now = try_again(waits, [&] { return sources.list(entry.source); });
    return std::ranges::find(now, entry.id) == now.end() ||
           now.front().generation > listed.entries.front().id.generation;
  } catch (const std::exception&) {  // this source refuses now; the next one may have it
    return false;
  }
}

/// Returns how two checkpoints of the same generation differ, or nothing. Manifests are compared without the
/// places of chunks, because a copy of an incremental checkpoint has other places.
[[nodiscard]] inline std::string difference(const source_set& sources, const source_entry& one,
                                            const checkpoint_manifest& contents, const source_entry& other) {
  if (one.id.step != other.id.step) return "it has the generation of step " + std::to_string(one.id.step);
  try {
    if (folded_manifest(sources.manifest(other.source, other.id)) != folded_manifest(contents))
      return "it has the same step and generation as another one, but other contents";
  } catch (const std::exception&) {  // a damaged checkpoint does not matter
  }
  return {};
}

/// Records generations that were used twice: for the found checkpoint by contents, for others by their steps.
inline void note_conflicts(const source_set& sources, const source_list& listed, const source_entry& taken,
                           const found_checkpoint& found, std::vector<skipped_in_source>& skipped) {
  const source_entry* first = nullptr;  // first entry of its generation
  for (const source_entry& each : listed.entries) {
    const bool is_of_taken = each.id.generation == taken.id.generation;
    if (first == nullptr || first->id.generation != each.id.generation) first = &each;
    const source_entry& other = is_of_taken ? taken : *first;
    if (other.source == each.source && other.id == each.id) continue;
    if (!is_of_taken && other.id.step == each.id.step) continue;
    const std::string why = difference(sources, other, found.manifest, each);
    const auto is_told = [&](const skipped_in_source& told) {
      return told.source == each.source && told.folder == folder_name(each.id);
    };
    if (why.empty() || std::ranges::find_if(skipped, is_told) != skipped.end()) continue;
    skipped.push_back({each.source, sources.name(each.source), skip_reason::conflict, folder_name(each.id),
                       why + " in " + sources.name(other.source) + ": these belong to different runs"});
  }
}

LLMMEM_CHECKPOINT_BODY recovery_result recover_from(const source_set& all, verification how,
                                                    const search_patience& waits) {
  // As in `find_checkpoint`: after this many attempts, the race cannot be won.
  constexpr int tries = 16;
  for (int i = 0;; ++i) {
    recovery_result recovered;
    const source_list listed = list_sources(all, waits);
    recovered.skipped = listed.skipped;
    if (listed.skipped.size() == all.size()) {
      std::string text = "recover: no source can be listed";
      for (const skipped_in_source& each : listed.skipped)
        text += "; " + each.name + ": " + each.why;
      throw io_error(text);
    }
    bool again = false;
    const source_entry* unread = nullptr;  // may be complete, so nothing older is taken instead
    std::string why_unread;
    const auto refuse = [&] {
      throw unreadable_checkpoint("recover: " +
                                  unread_text(all.name(unread->source), folder_name(unread->id), why_unread));
    };
    for (const source_entry& each : listed.entries) {
      if (unread != nullptr && each.id.generation < unread->id.generation) refuse();
      open_attempt opened = attempt_to_open(all, each, how, waits);
      if (!opened.found) {
        again = i + 1 < tries && is_outdated(all, listed, each, waits);
        if (again) break;
        if (!opened.trouble.is_proof && unread == nullptr && waits.unread == unread_checkpoint::refuse) {
          unread = &each;
          why_unread = opened.trouble.why;
        }
        recovered.skipped.push_back(noted(all, each, std::move(opened.trouble)));
        continue;
      }
      unread = nullptr;
      recovered.found = std::move(opened.found);
      recovered.source = each.source;
      recovered.name = all.name(each.source);
      note_conflicts(all, listed, each, *recovered.found, recovered.skipped);
      break;
    }
    if (again) continue;
    if (unread != nullptr) refuse();
    return recovered;
  }
}

}  // namespace detail

}  // namespace v0
}  // namespace llmmem
