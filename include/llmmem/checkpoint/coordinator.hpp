/// @file
/// Who takes part in a checkpoint, and how they agree that it is one: `checkpoint_coordinator`, and the one
/// for a single rank.
#pragma once

#include <llmmem/checkpoint/folder.hpp>
#include <llmmem/checkpoint/manifest.hpp>
#include <llmmem/checkpoint/retention.hpp>
#include <llmmem/checkpoint/storage.hpp>
#include <llmmem/config.hpp>

#include <concepts>
#include <cstdint>
#include <string>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// Brings the ranks of a checkpoint together.
///
/// - `rank()`, `world()`     who this is, and of how many.
/// - `begin(step)`           the draft of that step, the same for all ranks: one makes it, the others learn
///                           of it.
/// - `commit(draft, part)`   says that this rank's files, which `part` lists, are synced; returns once the
///                           checkpoint of all ranks is committed. What it throws is as for
///                           `checkpoint_folder::commit`.
/// - `abandon(draft, why)`   says that this rank's files will not come. Returns what stopped the checkpoint
///                           before, if anything did: it is then the true reason, since what failed here may
///                           have failed because of it.
/// - `tidy()`                after a commit; what went wrong, or nothing. Never undoes it.
///
/// One thread at a time, not always the same.
template <class C>
concept checkpoint_coordinator =
    requires(C& coordinator, const C& seen, std::uint64_t step, const checkpoint_draft& draft,
             const checkpoint_manifest& part, const std::string& why) {
      typename C::storage_type;
      { seen.rank() } noexcept -> std::same_as<std::uint32_t>;
      { seen.world() } noexcept -> std::same_as<std::uint32_t>;
      { coordinator.storage() } noexcept -> std::same_as<typename C::storage_type&>;
      { coordinator.begin(step) } -> std::same_as<checkpoint_draft>;
      coordinator.commit(draft, part);
      { coordinator.abandon(draft, why) } noexcept -> std::same_as<std::string>;
      { coordinator.tidy() } -> std::same_as<std::string>;
    };

/// One rank: what it says is so.
template <checkpoint_storage Storage, retention_policy Retention = keep_last_and_every>
class solo_coordinator {
 public:
  using storage_type = Storage;

  /// @throws as `checkpoint_folder`.
  explicit solo_coordinator(Storage& storage, Retention retention = {})
      : folder_(storage), retention_(std::move(retention)) {}

  [[nodiscard]] std::uint32_t rank() const noexcept { return 0; }
  [[nodiscard]] std::uint32_t world() const noexcept { return 1; }
  [[nodiscard]] Storage& storage() noexcept { return folder_.storage(); }
  [[nodiscard]] checkpoint_folder<Storage>& folder() noexcept { return folder_; }

  [[nodiscard]] checkpoint_draft begin(std::uint64_t step) { return folder_.begin(step); }
  void commit(const checkpoint_draft& draft, const checkpoint_manifest& part) { folder_.commit(draft, part); }
  std::string abandon(const checkpoint_draft& draft, const std::string& /*why*/) noexcept {
    folder_.abandon(draft);
    return {};
  }
  [[nodiscard]] std::string tidy() {
    try {
      static_cast<void>(folder_.tidy(retention_));
    } catch (const error& error) {
      return error.what();
    }
    return {};
  }

 private:
  checkpoint_folder<Storage> folder_;
  Retention retention_;
};

}  // namespace v0
}  // namespace llmmem
