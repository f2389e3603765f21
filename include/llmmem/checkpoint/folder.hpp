/// @file
/// `checkpoint_folder`: checkpoints that are there whole or not at all, whatever happens meanwhile.
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

/// A commit went as far as others may see, and then the system would not say that it lasts, or even that it
/// is there: after a crash the checkpoint may be there or not, and if so it is whole.
class durability_uncertain : public io_error {
 public:
  using io_error::io_error;
};

/// Somebody else took the folder over: this one may not commit to it any more.
class fenced : public io_error {
 public:
  using io_error::io_error;
};

/// What makes a checkpoint visible.
enum class commit_method : std::uint8_t {
  rename,    ///< its folder gets its name, at once
  manifest,  ///< its manifest is written last, where folders cannot be renamed; readers ignore what has none
};

/// The method in words.
[[nodiscard]] constexpr std::string_view to_string(commit_method how) noexcept {
  return how == commit_method::rename ? "by rename" : "by a manifest written last";
}

/// A checkpoint in the making. Its files are made by `Storage::create(draft.path(name), bytes)`, by any
/// process, and synced.
struct checkpoint_draft {
  checkpoint_id id{};
  std::string folder{};

  [[nodiscard]] std::string path(std::string_view file) const { return folder + "/" + std::string(file); }
};

/// The writing side of a folder of checkpoints.
///
///     checkpoint_folder folder(storage);                  // takes the lock, removes what a crash left
///     const checkpoint_draft draft = folder.begin(step);
///     ...                                                 // files are written and synced, their sums taken
///     folder.commit(draft, manifest);                     // returns: it outlasts any crash from here on
///     folder.tidy(keep_last_and_every{.last = 3});
///
/// A commit is, in order: the files are there and synced (by the caller); the manifest is written and synced;
/// the names in the draft's folder are synced; that folder is renamed to what a checkpoint is called, never
/// onto another; the folder of checkpoints is synced. Only then `commit` returns. At any moment, and after
/// any crash, whatever is called `step-...` is a whole checkpoint. Where folders cannot be renamed, the draft
/// has its name from the beginning, and is a checkpoint once its manifest is there, which is written last
/// (`method()` tells); there one without a manifest is none.
///
/// @par Complexity      a commit makes 6 calls of the storage, three of them syncs, beside the files' own.
/// @par Thread safety   one thread at a time. Any number of processes may read meanwhile (`find_checkpoint`).
/// @par Errors          `storage_error` and what is said below; a failed call leaves no checkpoint behind.
/// @par Source          the order of calls: Pillai et al., "All File Systems Are Not Created Equal", OSDI
///      2014; no sync is asked for twice after a failure: Rebello et al., 2020.
class checkpoint_folder_base {
 public:
  /// Takes the lock, learns the highest generation, finds out how to commit, and removes drafts and trash.
  /// @throws io_error  when another process holds the lock.
  explicit checkpoint_folder_base(storage_ref storage);
  checkpoint_folder_base(const checkpoint_folder_base&) = delete;
  checkpoint_folder_base& operator=(const checkpoint_folder_base&) = delete;

  /// A new draft, with a generation and a folder that were never used.
  ///
  /// Where somebody removed the lock's file, which is no longer this object's lock then, the lock is taken
  /// again: a save that was under way fails, and the next one is as good as any. That is refused while
  /// another process has it, and for good once one has committed here.
  /// @throws fenced  when the lock was taken away.
  [[nodiscard]] checkpoint_draft begin(std::uint64_t step);

  /// A new draft of a generation that is told: a copy has that of what it is a copy of. Later ones of `begin`
  /// go beyond it. What `abandon` could not remove of that generation is removed first.
  /// @throws argument_error  when anything else of that generation is there: a checkpoint, whatever its step,
  ///      a draft, or trash.
  [[nodiscard]] checkpoint_draft begin_as(const checkpoint_id& id);

  /// Drafts to come are of later generations than that, which others may have used elsewhere. It is not
  /// remembered: say it again when the folder is opened again.
  void raise_generation(std::uint64_t at_least) noexcept {
    if (generation_ < at_least) generation_ = at_least;
  }

  /// From now on `tidy` removes none of these generations, whatever a retention says: somebody reads them.
  /// They take the place of those that were held before.
  void hold(std::vector<std::uint64_t> generations) noexcept { held_ = std::move(generations); }

  /// Makes it a checkpoint. @pre each file of the manifest is there and synced. What it takes from earlier
  /// checkpoints is looked for.
  /// @throws durability_uncertain  when it can be seen, but may not outlast a crash; and when its rename is
  ///                               said to have failed, and the folder cannot be looked at: a file server may
  ///                               do what its answer is lost of. One that is found to have been done is a
  ///                               commit.
  /// @throws fenced                when the lock was taken away.
  /// @throws argument_error        for a manifest of something else.
  /// @throws storage_error         whatever else: nothing was committed, and the draft should be abandoned.
  void commit(const checkpoint_draft& draft, const checkpoint_manifest& manifest);

  /// Removes a draft, as far as that goes. What is left of it goes when its generation is asked for again
  /// (`begin_as`), or the folder is opened next.
  void abandon(const checkpoint_draft& draft) noexcept;

  /// What comes after a commit: LATEST, and what need not stay goes. Neither is needed by the next commit, or
  /// by a reader. A trouble with one checkpoint is in the way of no other: one that cannot be removed stays,
  /// with what it refers to, and is tried again the next time, and so is what could not be removed of others.
  /// What a reader holds (`checkpoint_hold`) stays, with what it refers to.
  /// Of a checkpoint whose folder is a symbolic link the link is removed, and nothing of what it leads to.
  /// @return the checkpoints that were removed.
  /// @throws io_error  at the end, with each trouble: a checkpoint or its files that cannot be removed,
  /// LATEST
  ///      that cannot be written, a manifest that is there and cannot be read now (it may refer to any older
  ///      one, so none of those was removed).
  std::vector<checkpoint_id> tidy(retention_ref retention);

  /// Which `tidy` would remove. None that one which stays refers to.
  [[nodiscard]] std::vector<checkpoint_id> superfluous(retention_ref retention);

  [[nodiscard]] commit_method method() const noexcept { return method_; }
  /// Of the last draft, or the last that is known of.
  [[nodiscard]] std::uint64_t generation() const noexcept { return generation_; }
  [[nodiscard]] storage_ref storage() const noexcept { return storage_; }

 private:
  enum class draft_name : std::uint8_t { its_own, final, unknown };
  static constexpr std::string_view whole_for_now = " is whole, and may be gone after a crash";
  struct uncertainty;
  struct leaving_checkpoint {
    checkpoint_id id{};
    std::vector<std::uint64_t> refers_to{};  // generations
  };
  struct leaving_list {
    std::vector<leaving_checkpoint> all{};
    std::string unread{};  // what one that stays refers to cannot be told now: nothing older leaves
  };
  class troubles;

  [[nodiscard]] leaving_list leaving(retention_ref retention);
  [[nodiscard]] bool is_whole(const found_checkpoint& found);
  void check_lock() const;
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
  std::uint64_t committed_ = 0;             // the highest generation of a checkpoint that is known of
  std::vector<std::uint64_t> uncertain_{};  // generations: they do not count as committed
  std::vector<std::uint64_t> held_{};       // generations
  std::vector<std::string> abandoned_{};    // folders of drafts that could not be removed
};

/// The writing side of a folder of checkpoints in a storage of that type: `checkpoint_folder_base` says what
/// it does.
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
