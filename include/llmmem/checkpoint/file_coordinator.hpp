/// @file
/// `file_coordinator`: coordinates the ranks of a checkpoint by files in their shared folder.
#pragma once

#include <llmmem/checkpoint/coordinator.hpp>
#include <llmmem/checkpoint/detail/reason.hpp>
#include <llmmem/checkpoint/rank_errors.hpp>
#include <llmmem/checkpoint/rank_session.hpp>
#include <llmmem/checkpoint/rank_waiter.hpp>
#include <llmmem/config.hpp>

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// The ranks, and the time limits for waiting.
struct file_coordinator_options {
  std::uint32_t rank = 0;
  std::uint32_t world = 1;
  /// From construction until all ranks have joined.
  std::chrono::nanoseconds join_within = std::chrono::minutes(5);
  std::chrono::nanoseconds begin_within = std::chrono::minutes(30);   ///< for rank 0 to reach the step
  std::chrono::nanoseconds commit_within = std::chrono::minutes(30);  ///< for the other ranks' files, and the
                                                                      ///< commit
  std::chrono::nanoseconds poll = std::chrono::milliseconds(20);      ///< between two looks at the folder
  verification votes = verification::sizes;                           ///< see `rank_session_options`
};

/// A `checkpoint_coordinator` for several ranks, as processes on one or several machines, without a network:
/// they find each other in the folder of checkpoints. `rank_session` describes the protocol and its
/// protections.
///
///     posix_storage storage("/shared/run-7");
///     file_coordinator coordinator(storage, {.rank = rank, .world = world});   // waits for all ranks
///     async_checkpointer<traits> checkpointer(coordinator, rank_state(tensors, split, rank));
///
/// Suitable for checkpoints at intervals of minutes, because a commit takes several looks at the folder,
/// `poll` apart. The folder must be one file system for all ranks, with locks that reach all of them and
/// names that all soon see (a local one, or NFS 4, Lustre and others mounted with locks).
///
/// Every wait has a deadline, and the error names the missing ranks. A rank that fails or gives up stops the
/// checkpoint for all ranks at once; the next checkpoint starts from scratch. A process that dies loses its
/// rank's place: all ranks then make new coordinators, in any order.
///
/// @par Thread safety   one thread at a time.
/// @par Errors          the constructor: as `rank_session`, and `ranks_missing`. `begin` and `commit`:
///   `ranks_missing`, and as `try_begin`, `vote` and `try_conclude`. `durability_uncertain` also if this rank
///   has voted and cannot learn whether rank 0 committed; only the folder shows it.
template <checkpoint_storage Storage, retention_policy Retention = keep_last_and_every,
          rank_waiter Waiter = sleeping_waiter>
class file_coordinator {
 public:
  using storage_type = Storage;

  /// Returns when all ranks have joined.
  explicit file_coordinator(Storage& storage, const file_coordinator_options& options,
                            Retention retention = {}, Waiter waiter = {})
      : session_(storage, {.rank = options.rank, .world = options.world, .votes = options.votes}),
        options_(options),
        retention_(std::move(retention)),
        waiter_(std::move(waiter)) {
    try {
      wait(
          options_.join_within, [&] { return session_.try_join(); },
          [&] { throw missing(storage.path("") + ": ", options_.join_within); });
    } catch (const error&) {
      session_.leave();
      throw;
    }
  }

  [[nodiscard]] std::uint32_t rank() const noexcept { return session_.rank(); }
  [[nodiscard]] std::uint32_t world() const noexcept { return session_.world(); }
  [[nodiscard]] Storage& storage() noexcept { return session_.storage(); }
  [[nodiscard]] rank_session<Storage>& session() noexcept { return session_; }

  [[nodiscard]] checkpoint_draft begin(std::uint64_t step) {
    std::optional<checkpoint_draft> draft;
    wait(
        options_.begin_within,
        [&] {
          draft = session_.try_begin(step);
          return draft.has_value();
        },
        [&] { throw missing(storage().path("") + ": ", options_.begin_within); });
    return *std::move(draft);
  }

  void commit(const checkpoint_draft& draft, const checkpoint_manifest& part) {
    try {
      session_.vote(draft, part);
      wait(
          options_.commit_within, [&] { return session_.try_conclude(draft); },
          [&] {
            const ranks_missing why =
                missing(storage().path("") + ": step " + std::to_string(draft.id.step) + ": ",
                        options_.commit_within);
            session_.stop(draft, "it has waited for too long: " + session_.waits_for().text);
            throw ranks_missing(why);
          });
    } catch (const std::exception& error) {
      stop(draft, detail::reason_of(error));
      throw;
    } catch (...) {
      stop(draft, detail::reason("an exception that is not from the standard library"));
      throw;
    }
  }

  std::string abandon(const checkpoint_draft& draft, const std::string& why) noexcept {
    return session_.abandon(draft, why);
  }

  [[nodiscard]] std::string tidy() {
    std::string trouble = session_.take_error();
    if (session_.folder() == nullptr) return trouble;
    try {
      static_cast<void>(session_.folder()->tidy(retention_));
    } catch (const error& error) {
      trouble += (trouble.empty() ? "" : "; ") + std::string(error.what());
    }
    return trouble;
  }

 private:
  template <class Step, class GiveUp>
  void wait(std::chrono::nanoseconds most, Step step, GiveUp give_up) {
    const std::chrono::nanoseconds began = waiter_.now();
    while (!step()) {
      if (waiter_.now() - began >= most) give_up();
      waiter_.pause(options_.poll);
    }
  }
  /// Stops the round after any failure, because the others may have continued, and a guess whether it is
  /// committed would be wrong. A problem while stopping matters less than the original failure.
  void stop(const checkpoint_draft& draft, const std::string& why) {
    try {
      session_.stop(draft, why);
    } catch (const checkpoint_stopped&) {
      throw;
    } catch (const durability_uncertain&) {
      throw;
    } catch (...) {
    }
  }
  [[nodiscard]] ranks_missing missing(const std::string& where, std::chrono::nanoseconds within) const {
    const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(within).count();
    const rank_wait& waits = session_.waits_for();
    return {where + waits.text + " within " + std::to_string(ms) + " ms", waits.ranks};
  }

  rank_session<Storage> session_;
  file_coordinator_options options_;
  Retention retention_;
  Waiter waiter_;
};

}  // namespace v0
}  // namespace llmmem
