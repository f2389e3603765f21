/// @file
/// `checkpoint_folder`: checkpoints that are complete or absent, through any crash.
#pragma once

#include <llmmem/checkpoint/detail/bodies.hpp>
#include <llmmem/checkpoint/manifest.hpp>
#include <llmmem/checkpoint/names.hpp>
#include <llmmem/checkpoint/retention.hpp>
#include <llmmem/checkpoint/search.hpp>
#include <llmmem/checkpoint/storage.hpp>
#include <llmmem/checkpoint/storage_ref.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// A commit may have become visible, but the system did not confirm that it lasts, or even that it exists.
/// After a crash the checkpoint may be there or not; if it is, it is complete.
class durability_uncertain : public io_error {
 public:
  using io_error::io_error;
};

/// Another process took over the folder, so this object may no longer commit to it.
class fenced : public io_error {
 public:
  using io_error::io_error;
};

/// The step that makes a checkpoint visible.
enum class commit_method : std::uint8_t {
  rename,    ///< its folder gets its final name, atomically
  manifest,  ///< for a storage that cannot rename folders: its manifest is written last, and readers ignore a
             ///< folder without one
};

/// Returns the method in words.
[[nodiscard]] constexpr std::string_view to_string(commit_method how) noexcept {
  return how == commit_method::rename ? "by rename" : "by a manifest written last";
}

/// A checkpoint under construction. Any process creates its files with
/// `Storage::create(draft.path(name), bytes)` and syncs them.
struct checkpoint_draft {
  checkpoint_id id{};
  std::string folder{};

  [[nodiscard]] std::string path(std::string_view file) const { return folder + "/" + std::string(file); }
};

/// The writing side of a folder of checkpoints.
///
///     checkpoint_folder folder(storage);                  // takes the lock, removes remains of a crash
///     const checkpoint_draft draft = folder.begin(step);
///     ...                                                 // files are written, synced and summed
///     folder.commit(draft, manifest);                     // when it returns, the checkpoint survives any
///     crash folder.tidy(keep_last_and_every{.last = 3});
///
/// A commit has these steps, in order: the caller has created and synced the files; `commit` writes and syncs
/// the manifest, syncs the names in the draft's folder, renames that folder to the checkpoint's name, never
/// onto another, and syncs the folder of checkpoints. Only then does it return. At any moment, and after any
/// crash, each folder named `step-...` is a complete checkpoint. If the storage cannot rename folders (see
/// `method()`), the draft has its final name from the beginning, and becomes a checkpoint when its manifest
/// is written, last of all; a folder without a manifest is then not a checkpoint.
///
/// @par Complexity      a commit makes 6 storage calls, three of them syncs, in addition to those for the
///   files.
/// @par Thread safety   one thread at a time. Any number of processes may read concurrently
///   (`find_checkpoint`).
/// @par Errors          `storage_error` and those named below; a failed call leaves no checkpoint behind.
/// @par Source          the order of calls: Pillai et al., "All File Systems Are Not Created Equal", OSDI
///   2014; no sync is repeated after a failure: Rebello et al., 2020.
class checkpoint_folder_base {
 public:
  /// Takes the lock, reads the highest generation, determines the commit method, and removes drafts and
  /// trash.
  /// @throws io_error  if another process holds the lock.
  explicit checkpoint_folder_base(storage_ref storage);
  checkpoint_folder_base(const checkpoint_folder_base&) = delete;
  checkpoint_folder_base& operator=(const checkpoint_folder_base&) = delete;

  /// Returns a new draft, with a generation and a folder that were never used.
  ///
  /// If the lock's file was removed, this object no longer holds the lock, and takes it again: a save in
  /// progress fails, the next one works. This is refused while another process has the lock, and permanently
  /// once another process has committed here.
  /// @throws fenced  if another process took the lock.
  [[nodiscard]] checkpoint_draft begin(std::uint64_t step);

  /// Returns a new draft of a given generation: a copy has the generation of its original. Later drafts of
  /// `begin` have higher ones. First removes remains of that generation that `abandon` could not remove.
  /// @throws argument_error  if anything else of that generation exists: a checkpoint of any step, a draft,
  ///                         or trash.
  [[nodiscard]] checkpoint_draft begin_as(const checkpoint_id& id);

  /// Makes later drafts use generations above that one, because other runs may have used it elsewhere. This
  /// is not stored: call it again after the folder is reopened.
  void raise_generation(std::uint64_t at_least) noexcept {
    if (generation_ < at_least) generation_ = at_least;
  }

  /// Keeps `tidy` from removing these generations, regardless of the retention, because they are being read.
  /// Replaces the previous set.
  void hold(std::vector<std::uint64_t> generations) noexcept { held_ = std::move(generations); }

  /// Makes the draft a checkpoint. @pre each file of the manifest exists and is synced. Checks that the
  /// earlier checkpoints it refers to exist.
  /// @throws durability_uncertain  if the checkpoint is visible but may not survive a crash, and if its
  ///                               rename is reported as failed and the folder cannot be examined: a file
  ///                               server may complete a call and lose the answer. A rename found complete is
  ///                               a commit. Also if the lock was taken away while the draft got its name
  ///                               (`checkpoint_storage`'s lease files): another process may have the folder
  ///                               without knowing of the checkpoint.
  /// @throws fenced                if another process took the lock.
  /// @throws argument_error        for a manifest of another draft.
  /// @throws storage_error         for all other failures: nothing was committed, and the caller should
  ///                               abandon the draft.
  void commit(const checkpoint_draft& draft, const checkpoint_manifest& manifest);

  /// Removes a draft as far as possible. The rest is removed when its generation is requested again
  /// (`begin_as`), or when the folder is next opened.
  void abandon(const checkpoint_draft& draft) noexcept;

  /// Updates LATEST and removes checkpoints that the retention no longer keeps, after a commit. Neither the
  /// next commit nor a reader needs it. A problem with one checkpoint does not affect the others. A
  /// checkpoint that cannot be removed stays, with those it refers to; the next call tries again, also for
  /// partly removed ones. Checkpoints that a reader holds (`checkpoint_hold`) stay, with those they refer to.
  /// If a checkpoint's folder is a symbolic link, only the link is removed, not its target.
  /// @return the checkpoints that were removed.
  /// @throws io_error  at the end, with each problem: a checkpoint or its files that cannot be removed,
  ///   LATEST that cannot be written, an existing manifest that cannot be read now (it may refer to any older
  ///   checkpoint, so none of those was removed).
  std::vector<checkpoint_id> tidy(retention_ref retention);

  /// Returns the checkpoints that `tidy` would remove; no remaining one refers to any of them.
  [[nodiscard]] std::vector<checkpoint_id> removable(retention_ref retention);
  [[nodiscard, deprecated("call removable()")]] std::vector<checkpoint_id> superfluous(
      retention_ref retention) {
    return removable(retention);
  }

  [[nodiscard]] commit_method method() const noexcept { return method_; }
  /// Returns the generation of the last draft, or the last known one.
  [[nodiscard]] std::uint64_t generation() const noexcept { return generation_; }
  [[nodiscard]] storage_ref storage() const noexcept { return storage_; }

 private:
  enum class draft_name : std::uint8_t { its_own, final, unknown };
  static constexpr std::string_view whole_for_now = " is complete, but a crash may remove it";
  static constexpr std::string_view lock_lost =
      ": it was removed or replaced while this process held it, or its lease ran out: another one may commit "
      "to "
      "the folder now";
  struct uncertainty;
  struct leaving_checkpoint {
    checkpoint_id id{};
    std::vector<std::uint64_t> refers_to{};  // generations
  };
  struct leaving_list {
    std::vector<leaving_checkpoint> all{};
    // Why the references of a remaining checkpoint are unknown; nothing older is removed then.
    std::string unread{};
  };
  class troubles;

  [[nodiscard]] leaving_list leaving(retention_ref retention);
  [[nodiscard]] bool is_complete(const found_checkpoint& found);
  void check_lock() const;
  void check_lock_after(const checkpoint_draft& draft);
  void discard_drafts();
  void hold_lock();
  [[nodiscard]] checkpoint_draft make_draft(const checkpoint_id& id);
  void probe();
  void remove_left_over();
  void remove_without_manifest();
  void remove_if_there(const std::string& path);
  void remove_tree(const std::string& folder);
  void remove_entry(const storage_entry& entry);
  [[nodiscard]] std::vector<checkpoint_id> remove_names(const std::vector<leaving_checkpoint>& leaving,
                                                        troubles& met);
  [[nodiscard]] std::vector<std::uint64_t> held_by_readers(troubles& met);
  void remove_trash(const std::vector<checkpoint_id>& gone, troubles& met);
  void check_stored(const checkpoint_manifest& manifest);
  void commit_by_rename(const checkpoint_draft& draft, const std::string& text, const uncertainty& uncertain);
  void commit_by_manifest(const checkpoint_draft& draft, const std::string& text,
                          const uncertainty& uncertain);
  void give_name(const checkpoint_draft& draft, const uncertainty& uncertain);
  [[nodiscard]] draft_name name_now(const checkpoint_draft& draft) noexcept;
  void write_file(const std::string& path, std::string_view text);
  void hint_at(const checkpoint_id& id);

  storage_ref storage_;
  std::optional<storage_ref::lock_type> lock_;
  commit_method method_ = commit_method::rename;
  std::uint64_t generation_ = 0;
  std::uint64_t committed_ = 0;             // the highest known generation of a checkpoint
  std::vector<std::uint64_t> uncertain_{};  // generations that do not count as committed
  std::vector<std::uint64_t> held_{};       // generations
  std::vector<std::string> abandoned_{};    // folders of drafts that could not be removed
};

/// The writing side of a folder of checkpoints in a storage of that type: see `checkpoint_folder_base`.
template <checkpoint_storage Storage>
class checkpoint_folder : public checkpoint_folder_base {
 public:
  explicit checkpoint_folder(Storage& storage) : checkpoint_folder_base(storage), storage_(&storage) {}

  [[nodiscard]] Storage& storage() const noexcept { return *storage_; }

 private:
  Storage* storage_;
};

}  // namespace v0
}  // namespace llmmem

#if LLMMEM_CHECKPOINT_BODIES
#include <llmmem/checkpoint/detail/folder_body.hpp>
#endif
