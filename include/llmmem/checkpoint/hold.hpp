/// @file
/// `checkpoint_hold`: prevents a checkpoint from being pruned while a reader uses it.
#pragma once

#include <llmmem/checkpoint/detail/try_again.hpp>
#include <llmmem/checkpoint/names.hpp>
#include <llmmem/checkpoint/search.hpp>
#include <llmmem/checkpoint/storage.hpp>
#include <llmmem/checkpoint/storage_ref.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// Keeps a checkpoint, and those it refers to, while this object lives, even if a concurrent run commits and
/// prunes: for a loader, an evaluation, or a copy that takes longer than the run keeps checkpoints.
///
///     const held_checkpoint held = hold_newest(storage);
///     if (held.hold) load_checkpoint(storage, *held.search.found, wanted, sink);
///
/// The hold is a file in the folder that this process has locked. It ends with the object or the process; the
/// run removes the file of a dead process when it next prunes.
///
/// Requires a folder that the reader may write to, locks that reach the run (not `file_locks::caller`), and a
/// run of this version or later.
///
/// @par Thread safety   one thread at a time. The storage outlives it.
class checkpoint_hold {
 public:
  /// @throws storage_error  with ENOENT when the checkpoint no longer exists: search again; and the storage's
  ///   errors.
  /// @throws io_error       while the run is removing checkpoints for longer than `waits` allows.
  checkpoint_hold(storage_ref storage, const checkpoint_id& id, const search_patience& waits = {})
      : storage_(storage), id_(id) {
    const auto alone = detail::try_again(waits, [&] {
      auto lock = storage_.try_lock(std::string(checkpoint_names::holding));
      if (!lock) {
        throw io_error(
            storage_.path(folder_name(id)) +
            ": it cannot be held while another process takes a hold or removes checkpoints; try again");
      }
      return std::move(*lock);
    });
    name_ = std::string(checkpoint_names::hold) + std::to_string(id.generation) + "-" +
            std::to_string(storage_.nonce());
    lock_ = storage_.try_lock(name_);
    const auto entries = storage_.list("");
    const bool is_there = std::ranges::find(entries, folder_name(id), &storage_entry::name) != entries.end();
    if (lock_ && is_there) return;
    end();
    throw storage_error(storage_call::open, storage_.path(folder_name(id)), ENOENT,
                        "it was removed before it could be held");
  }
  checkpoint_hold(checkpoint_hold&& other) noexcept
      : storage_(other.storage_),
        id_(other.id_),
        name_(std::exchange(other.name_, {})),
        lock_(std::exchange(other.lock_, std::nullopt)) {}
  checkpoint_hold& operator=(checkpoint_hold&&) = delete;
  ~checkpoint_hold() { end(); }

  [[nodiscard]] const checkpoint_id& id() const noexcept { return id_; }
  /// False when its file was removed: then the checkpoint may be removed too.
  [[nodiscard]] bool is_held() const { return lock_ && lock_->is_held(); }

 private:
  void end() noexcept {
    if (name_.empty()) return;
    try {
      storage_.remove(name_);  // before the lock is released, so that no process sees an unlocked hold
    } catch (...) {            // the run removes it
    }
    lock_.reset();
    name_.clear();
  }

  storage_ref storage_;
  checkpoint_id id_;
  std::string name_{};
  std::optional<storage_ref::lock_type> lock_{};
};

/// A checkpoint that was found and is held.
struct held_checkpoint {
  checkpoint_search search{};
  std::optional<checkpoint_hold> hold{};  ///< none if nothing was found
};

/// Finds the newest checkpoint that is verified as whole, and holds it before reading it.
/// @throws the errors of `find_checkpoint` and `checkpoint_hold`.
[[nodiscard]] inline held_checkpoint hold_newest(storage_ref storage,
                                                 verification how = verification::checksums,
                                                 const search_patience& waits = {}) {
  for (int tries = 16;; --tries) {
    held_checkpoint held;
    held.search = find_checkpoint(storage, verification::sizes, waits);
    if (!held.search.found) return held;
    const checkpoint_id id = held.search.found->id;
    try {
      held.hold.emplace(storage, id, waits);
    } catch (const storage_error& error) {
      if (error.number() != ENOENT || tries == 0) throw;
      continue;  // a newer one exists
    }
    if (how == verification::sizes) return held;
    try {
      *held.search.found = open_checkpoint(storage, id, how);
      return held;
    } catch (const format_error&) {  // an older one may be complete
      held.hold.reset();
      held.search = find_checkpoint(storage, how, waits);
      if (!held.search.found) return held;
      held.hold.emplace(storage, held.search.found->id, waits);
      return held;
    }
  }
}

}  // namespace v0
}  // namespace llmmem
