/// @file
/// The folders of a run's checkpoints: one, and optionally a second one for copies.
#pragma once

#include <llmmem/checkpoint/coordinator.hpp>
#include <llmmem/checkpoint/file_coordinator.hpp>
#include <llmmem/checkpoint/mirrored_coordinator.hpp>
#include <llmmem/checkpoint/posix_storage.hpp>
#include <llmmem/checkpoint/recover.hpp>
#include <llmmem/checkpoint/retention.hpp>
#include <llmmem/checkpoint/search.hpp>

#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/program.hpp"
#include "train_gpt/rank_voice.hpp"
#include "train_gpt/run_options.hpp"

namespace train_gpt {

/// Reports on a stream each copy, as soon as it outlasts this machine.
class copy_notes {
 public:
  explicit copy_notes(std::FILE* to) noexcept : to_(to) {}
  void copied(const llmmem::checkpoint_id& id) const {
    if (to_ == nullptr) return;
    fmt::print(to_, "copied {} {}\n", id.step, id.generation);
    std::fflush(to_);
  }
  void failed(const llmmem::checkpoint_id& id, const std::string& why) const {
    if (to_ == nullptr) return;
    fmt::print(to_, "train_gpt: step {}: not copied: {}\n", id.step, example::printable(why, 1024));
    std::fflush(to_);
  }

 private:
  std::FILE* to_;
};

/// One rank's `checkpoint_coordinator` of a folder: alone, or with the other ranks by files in it.
class folder_coordinator {
 public:
  using storage_type = llmmem::posix_storage<>;

  /// With several ranks, it returns when all have joined.
  folder_coordinator(storage_type& storage, std::uint32_t rank, std::uint32_t world) {
    const llmmem::keep_last_and_every keep{.last = 2};
    if (world == 1) {
      alone_.emplace(storage, keep);
    } else {
      constexpr std::chrono::seconds patience(60);
      together_.emplace(storage,
                        llmmem::file_coordinator_options{.rank = rank,
                                                         .world = world,
                                                         .join_within = patience,
                                                         .begin_within = patience,
                                                         .commit_within = patience,
                                                         .poll = std::chrono::milliseconds(2)},
                        keep);
    }
  }

  [[nodiscard]] std::uint32_t rank() const noexcept { return alone_ ? 0 : together_->rank(); }
  [[nodiscard]] std::uint32_t world() const noexcept { return alone_ ? 1 : together_->world(); }
  [[nodiscard]] storage_type& storage() noexcept { return alone_ ? alone_->storage() : together_->storage(); }
  /// @pre this is rank 0's
  [[nodiscard]] llmmem::checkpoint_folder_base& folder() noexcept {
    if (alone_) return alone_->folder();
    return *together_->session().folder();
  }
  [[nodiscard]] llmmem::checkpoint_draft begin(std::uint64_t step) {
    return alone_ ? alone_->begin(step) : together_->begin(step);
  }
  void commit(const llmmem::checkpoint_draft& draft, const llmmem::checkpoint_manifest& part) {
    alone_ ? alone_->commit(draft, part) : together_->commit(draft, part);
  }
  std::string abandon(const llmmem::checkpoint_draft& draft, const std::string& why) noexcept {
    return alone_ ? alone_->abandon(draft, why) : together_->abandon(draft, why);
  }
  [[nodiscard]] std::string tidy() { return alone_ ? alone_->tidy() : together_->tidy(); }

 private:
  std::optional<llmmem::solo_coordinator<storage_type>> alone_;
  std::optional<llmmem::file_coordinator<storage_type>> together_;
};

/// A `checkpoint_coordinator` that commits to one folder, and copies to another if there is one.
class checkpoint_folders {
 public:
  using storage_type = llmmem::posix_storage<>;

  /// The newest checkpoint of both.
  struct newest_checkpoint {
    std::optional<llmmem::found_checkpoint> found{};
    storage_type* storage = nullptr;         ///< the storage that has it
    std::vector<std::string> skip_reason{};  ///< skipped newer checkpoints, and the reasons
    std::string message{};                   ///< all of that in a line
  };

  /// @param notes  null: no notes.
  checkpoint_folders(const checkpoint_options& asked, rank_voice& ranks, std::FILE* notes)
      : storage_(asked.folder), local_(storage_, met(ranks), ranks.world()), notes_(notes) {
    if (!asked.copy.empty()) durable_.emplace(asked.copy);
  }

  /// @throws llmmem::error  if the two folders have checkpoints of two runs.
  [[nodiscard]] newest_checkpoint newest() {
    newest_checkpoint all;
    if (!durable_) {
      llmmem::checkpoint_search search = llmmem::find_checkpoint(storage_);
      all.message = search.message();
      for (const llmmem::skipped_checkpoint& each : search.skipped)
        all.skip_reason.push_back(each.folder + ": " + each.why);
      all.found = std::move(search.found);
      all.storage = &storage_;
      return all;
    }
    auto search = llmmem::recover(llmmem::verification::checksums,
                                  llmmem::checkpoint_source("--checkpoint-dir", storage_),
                                  llmmem::checkpoint_source("--checkpoint-copy", *durable_));
    all.message = search.message();
    if (search.has_conflict()) {
      throw llmmem::error("--checkpoint-dir and --checkpoint-copy have checkpoints of two runs: " +
                          all.message + "; give one of them another folder");
    }
    for (const llmmem::skipped_in_source& each : search.skipped) {
      const char* const gap = each.folder.empty() ? "" : ": ";
      all.skip_reason.push_back(each.name + gap + each.folder + ": " + each.why);
    }
    if (search.found) all.storage = search.visit([](storage_type& has_it) { return &has_it; });
    all.found = std::move(search.found);
    return all;
  }

  /// Begins to copy committed checkpoints, first any that an earlier run did not copy.
  /// @pre no checkpoint has begun. @throws as `llmmem::mirrored_coordinator`.
  void begin_copying() {
    if (durable_)
      mirror_.emplace(local_, *durable_, llmmem::keep_last_and_every{.last = 2}, llmmem::mirror_options{},
                      copy_notes(notes_));
  }

  // The concept `checkpoint_coordinator`.
  [[nodiscard]] std::uint32_t rank() const noexcept { return local_.rank(); }
  [[nodiscard]] std::uint32_t world() const noexcept { return local_.world(); }
  [[nodiscard]] storage_type& storage() noexcept { return storage_; }
  [[nodiscard]] llmmem::checkpoint_draft begin(std::uint64_t step) { return local_.begin(step); }
  void commit(const llmmem::checkpoint_draft& draft, const llmmem::checkpoint_manifest& part) {
    mirror_ ? mirror_->commit(draft, part) : local_.commit(draft, part);
  }
  std::string abandon(const llmmem::checkpoint_draft& draft, const std::string& why) noexcept {
    return local_.abandon(draft, why);
  }
  [[nodiscard]] std::string tidy() { return mirror_ ? mirror_->tidy() : local_.tidy(); }

 private:
  /// A message shows a rank that failed earlier, so that this one does not wait for it in the folder.
  [[nodiscard]] static std::uint32_t met(rank_voice& ranks) {
    static_cast<void>(ranks.exchange(0));
    return ranks.rank();
  }

  storage_type storage_;
  folder_coordinator local_;
  std::optional<storage_type> durable_;
  std::optional<
      llmmem::mirrored_coordinator<folder_coordinator, storage_type, llmmem::keep_last_and_every, copy_notes>>
      mirror_;  // destroyed first, after its copies are done
  std::FILE* notes_;
};

static_assert(llmmem::checkpoint_coordinator<checkpoint_folders>);

}  // namespace train_gpt
