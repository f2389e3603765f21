/// @file
/// Bodies of `checkpoint_folder`: the commit protocol.
#pragma once

#include <llmmem/checkpoint/detail/bodies.hpp>
#include <llmmem/checkpoint/detail/search_body.hpp>
#include <llmmem/checkpoint/folder.hpp>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <new>
#include <span>

namespace llmmem {
inline namespace v0 {

LLMMEM_CHECKPOINT_BODY checkpoint_folder_base::checkpoint_folder_base(storage_ref storage)
    : storage_(storage), lock_(storage.try_lock(std::string(checkpoint_names::lock))) {
  if (!lock_) {
    throw io_error(storage_.path(std::string(checkpoint_names::lock)) +
                   ": another process commits to this folder; stop it, or use another folder");
  }
  discard_drafts();
  for (const storage_entry& each : storage_.list("")) {
    if (const auto generation = generation_in(each.name)) generation_ = std::max(generation_, *generation);
    if (const auto id = read_folder_name(each.name)) committed_ = std::max(committed_, id->generation);
  }
  remove_left_over();
  probe();
  if (method_ == commit_method::manifest) remove_without_manifest();
}

LLMMEM_CHECKPOINT_BODY void checkpoint_folder_base::check_lock() const {
  if (lock_ && lock_->is_held()) return;
  throw fenced(storage_.path(std::string(checkpoint_names::lock)) + std::string(lock_lost) +
               "; nothing was committed");
}

/// A process that was stopped between the look at its lease and the rename may have committed when another
/// one had the folder, which then may not know of it.
LLMMEM_CHECKPOINT_BODY void checkpoint_folder_base::check_lock_after(const checkpoint_draft& draft) {
  if (lock_ && lock_->is_held()) return;
  uncertain_.push_back(draft.id.generation);  // space for it is reserved
  throw durability_uncertain(storage_.path(std::string(checkpoint_names::lock)) + std::string(lock_lost) +
                             "; " + folder_name(draft.id) + " may exist, whole, or not at all");
}

/// Takes the names of drafts away from a process that had the folder before and was only asleep: its rename
/// then fails. Removing their files first would let it name a part of a checkpoint.
LLMMEM_CHECKPOINT_BODY void checkpoint_folder_base::discard_drafts() {
  for (const storage_entry& each : storage_.list("")) {
    std::string_view rest = each.name;
    if (each.what != storage_entry::kind::folder || !detail::take_text(rest, checkpoint_names::draft))
      continue;
    try {
      storage_.rename(each.name, std::string(checkpoint_names::trash) + std::string(rest));
    } catch (const storage_error&) {  // where folders cannot be renamed, drafts have other names
    }
  }
}

/// Takes the lock again if its file was removed, except during a save: other ranks may have found the lock
/// free, and concluded that the save failed.
LLMMEM_CHECKPOINT_BODY void checkpoint_folder_base::hold_lock() {
  if (lock_ && lock_->is_held()) return;
  // A lease is of the name: this object's own, which its thread renews, would refuse the next one.
  lock_.reset();
  std::optional<storage_ref::lock_type> again = storage_.try_lock(std::string(checkpoint_names::lock));
  if (!again) return check_lock();
  std::uint64_t highest = 0;
  for (const storage_entry& each : storage_.list("")) {
    const auto id = read_folder_name(each.name);
    const bool is_known = !id || id->generation <= committed_ ||
                          std::ranges::find(uncertain_, id->generation) != uncertain_.end();
    if (!is_known) return check_lock();
    if (const auto generation = generation_in(each.name)) highest = std::max(highest, *generation);
  }
  raise_generation(highest);
  lock_ = std::move(again);
}

/// Determines whether the storage can rename folders.
LLMMEM_CHECKPOINT_BODY void checkpoint_folder_base::probe() {
  const std::string from = std::string(checkpoint_names::probe) + std::to_string(storage_.nonce());
  const std::string to = from + "-renamed";
  storage_.make_folder(from);
  try {
    storage_.rename(from, to);
  } catch (const storage_error& error) {
    if (!detail::is_unsupported(error.number())) throw;
    method_ = commit_method::manifest;
    storage_.remove_folder(from);
    return;
  }
  storage_.remove_folder(to);
}

LLMMEM_CHECKPOINT_BODY void checkpoint_folder_base::remove_left_over() {
  for (const storage_entry& each : storage_.list("")) {
    if (!is_left_over(each.name)) continue;
    try {
      remove_entry(each);
    } catch (const storage_error&) {  // its name is not a checkpoint's: the next opening removes it
    }
  }
}

/// Removes a folder with all its contents, a file, or a link. A missing entry is no failure, because other
/// ranks rename and remove remains.
LLMMEM_CHECKPOINT_BODY void checkpoint_folder_base::remove_entry(const storage_entry& entry) {
  if (entry.what == storage_entry::kind::folder) {
    remove_tree(entry.name);
  } else {
    remove_if_there(entry.name);
  }
}

/// If the manifest is written last, a crash leaves drafts with the names of checkpoints.
LLMMEM_CHECKPOINT_BODY void checkpoint_folder_base::remove_without_manifest() {
  for (const storage_entry& each : storage_.list("")) {
    if (each.what != storage_entry::kind::folder || !read_folder_name(each.name)) continue;
    const std::string& name = each.name;
    try {
      static_cast<void>(storage_.open(name + "/" + std::string(checkpoint_names::manifest)));
    } catch (const storage_error& error) {
      if (error.number() != ENOENT) continue;
      try {
        remove_tree(name);
      } catch (const storage_error&) {  // the next opening removes it
      }
    }
  }
}

/// Removes a file; a missing one is no error, because the goal is reached.
LLMMEM_CHECKPOINT_BODY void checkpoint_folder_base::remove_if_there(const std::string& path) {
  try {
    storage_.remove(path);
  } catch (const storage_error& error) {
    if (error.number() != ENOENT) throw;
  }
}

/// Removes a folder and its files. If a file cannot be removed, continues with the others. @throws the first
/// problem, at the end.
LLMMEM_CHECKPOINT_BODY void checkpoint_folder_base::remove_tree(const std::string& folder) {
  std::optional<storage_error> first;
  try {
    for (const storage_entry& each : storage_.list(folder)) {
      const std::string path = folder + "/" + each.name;
      try {
        remove_entry({path, each.what});
      } catch (const storage_error& error) {
        if (!first) first = error;
      }
    }
    if (!first) return storage_.remove_folder(folder);
  } catch (const storage_error& error) {
    if (error.number() != ENOENT) throw;
  }
  if (first) throw storage_error(*first);
}

LLMMEM_CHECKPOINT_BODY checkpoint_draft checkpoint_folder_base::begin(std::uint64_t step) {
  hold_lock();
  if (generation_ == ~std::uint64_t{0}) {
    throw length_error(storage_.path("") + ": a name in it has the last generation there is, " +
                       std::to_string(generation_) + "; use another folder");
  }
  return make_draft({step, ++generation_});
}

LLMMEM_CHECKPOINT_BODY checkpoint_draft checkpoint_folder_base::begin_as(const checkpoint_id& id) {
  hold_lock();
  for (const storage_entry& each : storage_.list("")) {
    if (generation_in(each.name) != id.generation) continue;
    if (std::ranges::find(abandoned_, each.name) != abandoned_.end()) {
      remove_tree(each.name);
      std::erase(abandoned_, each.name);
      continue;
    }
    throw argument_error(storage_.path(each.name) + ": generation " + std::to_string(id.generation) +
                         " already exists; its number cannot be used again");
  }
  raise_generation(id.generation);
  return make_draft(id);
}

LLMMEM_CHECKPOINT_BODY checkpoint_draft checkpoint_folder_base::make_draft(const checkpoint_id& id) {
  checkpoint_draft draft{id, folder_name(id)};
  // The name also has a random number, so that a process left over from another run writes to its own draft.
  if (method_ == commit_method::rename)
    draft.folder =
        std::string(checkpoint_names::draft) + draft.folder + "-" + std::to_string(storage_.nonce());
  storage_.make_folder(draft.folder);
  return draft;
}

LLMMEM_CHECKPOINT_BODY void checkpoint_folder_base::write_file(const std::string& path,
                                                               std::string_view text) {
  auto output = storage_.create(path, text.size());
  static_cast<void>(output.begin_write(0, std::as_bytes(std::span(text.data(), text.size()))));
  output.sync();
}

/// Checks that the earlier files to which an incremental checkpoint refers still exist.
LLMMEM_CHECKPOINT_BODY void checkpoint_folder_base::check_stored(const checkpoint_manifest& manifest) {
  for (const stored_chunks& each : manifest.stored) {
    if (each.generation == manifest.generation) continue;
    const std::string path = folder_name({each.step, each.generation}) + "/" + each.name;
    const std::uint64_t bytes = storage_.open(path).bytes();
    if (bytes == each.bytes) continue;
    throw io_error(storage_.path(path) + ": has " + std::to_string(bytes) +
                   " bytes, but the checkpoint of step " + std::to_string(manifest.step) + " counts on " +
                   std::to_string(each.bytes) + "; nothing was committed");
  }
}

/// Reports that a commit is uncertain, and records it.
struct checkpoint_folder_base::uncertainty {
  std::vector<std::uint64_t>* noted;  // has space for one more
  std::uint64_t generation;
  const std::string* name;
  const durability_uncertain* in_short;

  [[nodiscard]] durability_uncertain operator()(const storage_error& error,
                                                std::string_view what_is_known) const {
    noted->push_back(generation);
    try {
      return durability_uncertain(std::string(error.what()) + "; " + *name + std::string(what_is_known));
    } catch (const std::bad_alloc&) {
      return *in_short;
    }
  }
};

LLMMEM_CHECKPOINT_BODY void checkpoint_folder_base::commit(const checkpoint_draft& draft,
                                                           const checkpoint_manifest& manifest) {
  if (manifest.step != draft.id.step || manifest.generation != draft.id.generation) {
    throw argument_error("checkpoint_folder: a manifest of step " + std::to_string(manifest.step) +
                         ", generation " + std::to_string(manifest.generation) + " for the draft of step " +
                         std::to_string(draft.id.step) + ", generation " +
                         std::to_string(draft.id.generation));
  }
  const std::string text = to_json(manifest);
  if (text.size() > max_manifest_bytes) {
    throw argument_error("checkpoint_folder: a manifest of " + std::to_string(text.size()) +
                         " bytes, but readers accept at most " + std::to_string(max_manifest_bytes) +
                         "; use larger chunks");
  }
  check_lock();  // the next holder has removed the draft: its error would not say why
  check_stored(manifest);
  // All that can fail comes before the checkpoint becomes visible. If there is no memory for the text, the
  // exception is still `durability_uncertain`.
  uncertain_.reserve(uncertain_.size() + 1);
  const std::string name = folder_name(draft.id);
  const durability_uncertain in_short(name + " may exist or not, now or after a crash");
  const uncertainty uncertain{&uncertain_, draft.id.generation, &name, &in_short};
  if (method_ == commit_method::rename) {
    commit_by_rename(draft, text, uncertain);
  } else {
    commit_by_manifest(draft, text, uncertain);
  }
  check_lock_after(draft);
  committed_ = std::max(committed_, draft.id.generation);
}

LLMMEM_CHECKPOINT_BODY void checkpoint_folder_base::commit_by_rename(const checkpoint_draft& draft,
                                                                     const std::string& text,
                                                                     const uncertainty& uncertain) {
  write_file(draft.path(checkpoint_names::manifest), text);
  storage_.sync_folder(draft.folder);
  check_lock();
  give_name(draft, uncertain);
  try {
    storage_.sync_folder("");
  } catch (const storage_error& error) {
    throw uncertain(error, whole_for_now);
  }
}

LLMMEM_CHECKPOINT_BODY void checkpoint_folder_base::give_name(const checkpoint_draft& draft,
                                                              const uncertainty& uncertain) {
  try {
    storage_.rename(draft.folder, folder_name(draft.id));
  } catch (const storage_error& error) {
    switch (name_now(draft)) {
      case draft_name::its_own:
        throw;
      case draft_name::unknown:
        throw uncertain(error, " may exist, whole, or not at all");
      case draft_name::final:
        return;
    }
  }
}

LLMMEM_CHECKPOINT_BODY void checkpoint_folder_base::commit_by_manifest(const checkpoint_draft& draft,
                                                                       const std::string& text,
                                                                       const uncertainty& uncertain) {
  storage_.sync_folder(draft.folder);
  storage_.sync_folder("");
  check_lock();
  const std::string path = draft.path(checkpoint_names::manifest);
  try {
    write_file(path, text);
  } catch (const storage_error& error) {
    // The manifest is written but not synced, so other processes may have seen a complete one. Undo that if
    // possible.
    try {
      remove_if_there(path);
    } catch (const storage_error&) {
      if (error.call() == storage_call::sync) throw uncertain(error, whole_for_now);
    }
    throw;
  }
  try {
    storage_.sync_folder(draft.folder);
  } catch (const storage_error& error) {
    throw uncertain(error, whole_for_now);
  }
}

/// Returns the present name of a draft whose rename is reported as failed. A file server's answer may be
/// lost, and its repeated request then finds nothing to rename.
LLMMEM_CHECKPOINT_BODY auto checkpoint_folder_base::name_now(const checkpoint_draft& draft) noexcept
    -> draft_name {
  try {
    draft_name found = draft_name::its_own;
    for (const storage_entry& each : storage_.list("")) {
      if (each.name == draft.folder) return draft_name::its_own;
      if (each.name == folder_name(draft.id)) found = draft_name::final;
    }
    return found;
  } catch (...) {  // including lack of memory
    return draft_name::unknown;
  }
}

LLMMEM_CHECKPOINT_BODY void checkpoint_folder_base::abandon(const checkpoint_draft& draft) noexcept {
  try {
    remove_tree(draft.folder);
  } catch (...) {
    try {
      abandoned_.push_back(draft.folder);
    } catch (...) {  // the next opening of the folder removes the rest
    }
  }
}

LLMMEM_CHECKPOINT_BODY std::vector<checkpoint_id> checkpoint_folder_base::removable(retention_ref retention) {
  std::vector<checkpoint_id> all;
  for (const leaving_checkpoint& each : leaving(retention).all)
    all.push_back(each.id);
  return all;
}

/// Returns whether a checkpoint's files exist with their sizes.
LLMMEM_CHECKPOINT_BODY bool checkpoint_folder_base::is_complete(const found_checkpoint& found) {
  try {
    for (const checkpoint_file& each : found.manifest.files)
      detail::verify_file(storage_, found.folder, found.manifest, each, verification::sizes);
    return true;
  } catch (const error&) {
    return false;
  }
}

/// Returns the checkpoints that the retention gives up, newest first.
LLMMEM_CHECKPOINT_BODY auto checkpoint_folder_base::leaving(retention_ref retention) -> leaving_list {
  leaving_list list;
  std::vector<leaving_checkpoint>& all = list.all;
  // Generations that incremental checkpoints refer to, which are always older.
  std::vector<std::uint64_t> needed;
  std::uint64_t newer = 0;
  for (const checkpoint_id& id : list_checkpoints(storage_)) {
    const bool counts = std::ranges::find(uncertain_, id.generation) == uncertain_.end();
    found_checkpoint found;
    try {
      found = detail::open_manifest(storage_, id);
    } catch (const storage_error& error) {
      const bool is_none = error.number() == ENOENT && !detail::leads_nowhere(storage_, folder_name(id));
      if (is_none) continue;  // incomplete
      // The checkpoint may still be complete, and refer to any older one.
      list.unread = error.what();
      return list;
    } catch (const error&) {  // a damaged one does not count, and stays for a person to examine
      continue;
    }
    if (!is_complete(found)) {  // also damaged; the files that it refers to may still be useful
      for (const stored_chunks& each : found.manifest.stored)
        needed.push_back(each.generation);
      continue;
    }
    const bool is_needed = std::ranges::find(needed, id.generation) != needed.end() ||
                           std::ranges::find(held_, id.generation) != held_.end();
    const bool leaves = counts && !is_needed && newer >= 2 && !retention.keeps(id, newer);
    if (leaves) all.push_back({id, {}});
    for (const stored_chunks& each : found.manifest.stored)
      (leaves ? all.back().refers_to : needed).push_back(each.generation);
    if (counts) ++newer;
  }
  return list;
}

/// Collects problems while other work continues.
class checkpoint_folder_base::troubles {
 public:
  /// Calls `work`, and records a failure of the storage. Returns whether the work was done.
  template <class Work>
  bool bear(Work work) {
    try {
      work();
      return true;
    } catch (const storage_error& error) {
      note(error.what());
      return false;
    }
  }
  void note(std::string_view text) {
    if (++count_ <= most) text_.append(text_.empty() ? "" : "; ").append(text);
  }
  void raise_if_any() const {
    if (count_ == 0) return;
    throw io_error(count_ <= most ? text_
                                  : text_ + "; and " + std::to_string(count_ - most) + " more like it");
  }

 private:
  static constexpr std::uint64_t most = 4;  // in the text
  std::string text_{};
  std::uint64_t count_ = 0;
};

/// Returns the generations that readers hold. Removes the remains of dead readers.
LLMMEM_CHECKPOINT_BODY std::vector<std::uint64_t> checkpoint_folder_base::held_by_readers(troubles& met) {
  std::vector<std::uint64_t> held;
  for (const storage_entry& each : storage_.list("")) {
    const std::optional<std::uint64_t> generation = held_generation(each.name);
    if (!generation) continue;
    bool is_free = false;
    met.bear([&] {
      const auto lock = storage_.try_lock(each.name);
      is_free = lock.has_value();
      if (is_free) remove_if_there(each.name);
    });
    if (!is_free) held.push_back(*generation);
  }
  return held;
}

/// Takes the names of checkpoints from these folders. @return the checkpoints for which that succeeded.
LLMMEM_CHECKPOINT_BODY std::vector<checkpoint_id> checkpoint_folder_base::remove_names(
    const std::vector<leaving_checkpoint>& leaving, troubles& met) {
  std::vector<checkpoint_id> gone;
  if (leaving.empty()) return gone;
  // No reader can take a hold during this, because a reader with a hold keeps its checkpoint as long as it
  // wants. If a reader is taking a hold now, nothing is removed until the next call.
  std::optional<storage_ref::lock_type> alone;
  met.bear([&] { alone = storage_.try_lock(std::string(checkpoint_names::holding)); });
  if (!alone) return gone;
  std::vector<std::uint64_t> needed;  // generations needed by checkpoints that may still exist after a crash
  // Also those needed by checkpoints that could not be removed.
  std::vector<std::uint64_t> stays = held_by_readers(met);
  const std::vector<storage_entry> entries = storage_.list("");
  const auto has = [](const std::vector<std::uint64_t>& all, std::uint64_t generation) {
    return std::ranges::find(all, generation) != all.end();
  };
  for (const leaving_checkpoint& each : leaving) {
    const std::string name = folder_name(each.id);
    const auto entry = std::ranges::find(entries, name, &storage_entry::name);
    const bool is_link = entry != entries.end() && entry->what == storage_entry::kind::link;
    check_lock();  // the next holder counts on what it finds
    const bool is_done = !has(stays, each.id.generation) && met.bear([&] {
      if (has(needed, each.id.generation)) {
        storage_.sync_folder("");
        needed.clear();
      }
      if (method_ == commit_method::rename) {
        storage_.rename(name, std::string(checkpoint_names::trash) + name);
      } else if (is_link) {
        storage_.remove(name);
      } else {
        storage_.remove(name + "/" + std::string(checkpoint_names::manifest));
        storage_.sync_folder(name);
      }
    });
    std::vector<std::uint64_t>& refers = is_done ? needed : stays;
    refers.insert(refers.end(), each.refers_to.begin(), each.refers_to.end());
    if (is_done) gone.push_back(each.id);
  }
  return gone;
}

/// Removes all folders that no longer have a checkpoint's name, also from earlier calls.
LLMMEM_CHECKPOINT_BODY void checkpoint_folder_base::remove_trash(const std::vector<checkpoint_id>& gone,
                                                                 troubles& met) {
  if (method_ == commit_method::rename) {
    // Sync before any file is removed, because an incomplete folder must not have a checkpoint's name.
    if (!gone.empty() && !met.bear([&] { storage_.sync_folder(""); })) return;
    for (const storage_entry& each : storage_.list("")) {
      if (each.name.starts_with(checkpoint_names::trash)) met.bear([&] { remove_entry(each); });
    }
    return;
  }
  for (const checkpoint_id& each : gone)
    met.bear([&] { remove_tree(folder_name(each)); });
}

LLMMEM_CHECKPOINT_BODY std::vector<checkpoint_id> checkpoint_folder_base::tidy(retention_ref retention) {
  check_lock();
  troubles met;
  const leaving_list list = leaving(retention);
  const std::vector<checkpoint_id> gone = remove_names(list.all, met);
  remove_trash(gone, met);
  // LATEST comes last, so that a failure to write it does not affect the removals.
  const std::vector<checkpoint_id> left = list_checkpoints(storage_);
  if (!left.empty()) met.bear([&] { hint_at(left.front()); });
  if (!list.unread.empty()) met.note(list.unread + "; no older checkpoint is removed while it may need one");
  met.raise_if_any();
  return gone;
}

/// Writes LATEST without a sync, because nothing relies on it.
LLMMEM_CHECKPOINT_BODY void checkpoint_folder_base::hint_at(const checkpoint_id& id) {
  const std::string latest(checkpoint_names::latest);
  const bool renames = method_ == commit_method::rename;
  const std::string path =
      renames ? std::string(checkpoint_names::hint) + std::to_string(storage_.nonce()) : latest;
  if (!renames) remove_if_there(latest);
  const std::string text = folder_name(id) + "\n";
  {
    auto output = storage_.create(path, text.size());
    output.finish_write(output.begin_write(0, std::as_bytes(std::span(text.data(), text.size()))));
  }
  if (renames) storage_.replace(path, latest);
}

}  // namespace v0
}  // namespace llmmem
