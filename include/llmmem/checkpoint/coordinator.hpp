/// @file
/// `checkpoint_coordinator`: how the ranks of a checkpoint agree that it is complete. Also the coordinator
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

/// Coordinates the ranks of a checkpoint.
///
/// - `rank()`, `world()`     this rank, and the number of ranks.
/// - `begin(step)`           returns the draft of that step, the same for all ranks: one rank makes it and
///   announces it to the others.
/// - `commit(draft, part)` declares this rank's files, listed in `part`, as synced; returns when the
///   checkpoint of all ranks is committed. Throws as `checkpoint_folder::commit`.
/// - `abandon(draft, why)` declares that this rank's files will not come. If the checkpoint was already
///   stopped, returns the earlier reason, because this rank's failure may be a consequence of it.
/// - `tidy()` called after a commit; returns a description of problems, or nothing. Never undoes the commit.
///
/// One thread at a time calls these, and not always the same one.
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

namespace detail {

/// The calls of one coordinator type.
struct coordinator_table {
  std::uint32_t (*rank)(const void* coordinator) noexcept;
  std::uint32_t (*world)(const void* coordinator) noexcept;
  storage_ref (*storage)(void* coordinator) noexcept;
  checkpoint_draft (*begin)(void* coordinator, std::uint64_t step);
  void (*commit)(void* coordinator, const checkpoint_draft& draft, const checkpoint_manifest& part);
  std::string (*abandon)(void* coordinator, const checkpoint_draft& draft, const std::string& why) noexcept;
  std::string (*tidy)(void* coordinator);
};

template <class C>
inline constexpr coordinator_table coordinator_table_of{
    .rank = [](const void* c) noexcept { return static_cast<const C*>(c)->rank(); },
    .world = [](const void* c) noexcept { return static_cast<const C*>(c)->world(); },
    .storage = [](void* c) noexcept { return storage_ref(static_cast<C*>(c)->storage()); },
    .begin = [](void* c, std::uint64_t step) { return static_cast<C*>(c)->begin(step); },
    .commit = [](void* c, const checkpoint_draft& draft,
                 const checkpoint_manifest& part) { static_cast<C*>(c)->commit(draft, part); },
    .abandon = [](void* c, const checkpoint_draft& draft,
                  const std::string& why) noexcept { return static_cast<C*>(c)->abandon(draft, why); },
    .tidy = [](void* c) { return static_cast<C*>(c)->tidy(); },
};

}  // namespace detail

/// A reference to a `checkpoint_coordinator` of any type: each call of the concept is one call through a
/// table. The coordinator outlives it.
class coordinator_ref {
 public:
  using storage_type = storage_ref;

  template <checkpoint_coordinator C>
    requires(!std::same_as<C, coordinator_ref>)
  coordinator_ref(C& coordinator) noexcept  // NOLINT(google-explicit-constructor): as a reference
      : coordinator_(&coordinator), table_(&detail::coordinator_table_of<C>) {}

  [[nodiscard]] std::uint32_t rank() const noexcept { return table_->rank(coordinator_); }
  [[nodiscard]] std::uint32_t world() const noexcept { return table_->world(coordinator_); }
  [[nodiscard]] storage_ref storage() const noexcept { return table_->storage(coordinator_); }
  [[nodiscard]] checkpoint_draft begin(std::uint64_t step) const { return table_->begin(coordinator_, step); }
  void commit(const checkpoint_draft& draft, const checkpoint_manifest& part) const {
    table_->commit(coordinator_, draft, part);
  }
  std::string abandon(const checkpoint_draft& draft, const std::string& why) const noexcept {
    return table_->abandon(coordinator_, draft, why);
  }
  [[nodiscard]] std::string tidy() const { return table_->tidy(coordinator_); }

 private:
  void* coordinator_;
  const detail::coordinator_table* table_;
};

/// The coordinator of a single rank, which decides alone.
template <checkpoint_storage Storage, retention_policy Retention = keep_last_and_every>
class solo_coordinator {
 public:
  using storage_type = Storage;

  /// @throws the errors of `checkpoint_folder`.
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
