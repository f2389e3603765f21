/// @file
/// `comm_coordinator`: coordinates the ranks of a checkpoint by messages; any of them may die.
#pragma once

#include <llmmem/checkpoint/coordinator.hpp>
#include <llmmem/checkpoint/detail/rank_message.hpp>
#include <llmmem/checkpoint/rank_errors.hpp>
#include <llmmem/checkpoint/rank_waiter.hpp>
#include <llmmem/checkpoint/search.hpp>
#include <llmmem/comm/endpoint.hpp>
#include <llmmem/comm/ranks.hpp>
#include <llmmem/comm/transport.hpp>
#include <llmmem/config.hpp>
#include <llmmem/result.hpp>

#include <concepts>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// A transport with one epoch at a time that reports dead ranks and incoming messages. `communicator` is a
/// model.
template <class T>
concept watched_transport =
    transport<T> && requires(T& ranks, const T& seen, rank_id rank, std::uint32_t tag, deadline by) {
      { seen.epoch() } noexcept -> std::same_as<std::uint64_t>;
      { seen.is_revoked() } noexcept -> std::same_as<bool>;
      { seen.has_failed(rank) } noexcept -> std::same_as<bool>;
      { ranks.probe(rank, tag, by) } -> std::same_as<result<std::uint64_t>>;
      ranks.poll();
    };

/// The time limits, in nanoseconds.
struct comm_coordinator_options {
  std::uint32_t tag = 0x6370'0000;  ///< tag of its messages; nothing else uses this tag on these ranks
  /// For the folder's lock, which may still be a dead process's.
  std::uint64_t open_within_ns = 30'000'000'000;
  std::uint64_t begin_within_ns = 1'800'000'000'000;   ///< for rank 0 to reach the step
  std::uint64_t commit_within_ns = 1'800'000'000'000;  ///< for the other ranks' files, and the commit
  /// For the outcome of a checkpoint, if rank 0 has become silent.
  std::uint64_t answer_within_ns = 60'000'000'000;
  std::uint64_t poll_ns = 20'000'000;  ///< between two checks of ranks that this rank is not waiting for
  verification votes = verification::sizes;  ///< see `rank_session_options`
};

/// A `checkpoint_coordinator` for the ranks of a `communicator`: it uses messages where a `file_coordinator`
/// uses files. It detects a dead rank at once, without a deadline. The folder is as there: one file system
/// for all ranks, with locks that reach them.
///
///     communicator saves(endpoint, {.name = "checkpoints"});  // not the training's: another thread calls it
///     saves.join(saves.after(60'000'000'000)).value();
///     comm_coordinator coordinator(storage, saves);
///     async_checkpointer<traits> checkpointer(coordinator, rank_state(tensors, split, saves.rank()));
///
/// A checkpoint is a round with a number that is never reused. Rank 0 makes the draft and announces it. Each
/// rank reports when its files are synced and, on request, sends the manifest of its part. Rank 0 checks the
/// parts against the folder, merges and commits them, and announces the outcome. Messages of another round
/// are dropped; messages of another epoch are never received.
///
/// - **A rank dies**: rank 0 stops the round, and all learn which rank it was. If that rank's part has
///   arrived, the commit continues without the rank.
/// - **Rank 0 dies**: if some rank has not sent its part, nothing is committed, and that rank says so at
///   once. A rank that has sent its part looks into the folder. A checkpoint that is there is committed. If
///   it is absent and the folder's lock is free, no process can commit it any longer, so it failed. If a
///   silent but live process holds the lock for all of `answer_within_ns`, the answer is
///   `durability_uncertain`. The answer is the same for a checkpoint found in a storage that cannot rename
///   folders.
/// - **A rank fails, or waits for too long**: it stops the round for all. If its part is already sent, it
///   asks rank 0 to stop, and rank 0 answers with the outcome.
///
/// **Repair.** The owner of the ranks repairs them between two checkpoints, as with any communicator: by
/// `agree` and then `admit` or `shrink`, on all of them. Until then `begin` fails at once and names the dead
/// ranks. The coordinator does not continue without them by itself, because their state would not be saved:
/// the remaining ranks redistribute the state and make new checkpointers. This object may stay; it continues
/// in the new epoch, in which rank 0 may be a different process that takes over the folder. A slow rank
/// breaks nothing: the next `begin` works.
///
/// @par Complexity      a round: 4 messages per other rank, one of them its manifest, all to or from rank 0;
///   N - 1 messages from a rank that stops it. Memory: rank 0 holds all parts.
/// @par Thread safety   one thread at a time, which owns the transport during the call.
/// @par Errors          The constructor: as `checkpoint_folder`, on rank 0; `argument_error` before `join`.
///   `begin`: `ranks_missing` for dead and late ranks; `comm_error` for an epoch that was revoked, or
///   continues without this rank; `checkpoint_stopped` if rank 0 could not begin; `io_error` if rank 0 is at
///   a later step. `commit`: after `ranks_missing`, `checkpoint_stopped`, `comm_error`, and `argument_error`
///   for a draft or a part of another round, nothing is committed, now or later; `durability_uncertain` as
///   above, and as in `checkpoint_folder::commit`; `io_error` for other failures there.
/// @par Source          two phases: Gray, "Notes on Data Base Operating Systems", 1978; a rank that cannot
///   ask the coordinator asks the storage it writes to: after Gray and Lamport, "Consensus on Transaction
///   Commit", 2006.
template <checkpoint_storage Storage, watched_transport T, retention_policy Retention = keep_last_and_every,
          rank_waiter Waiter = sleeping_waiter>
class comm_coordinator {
 public:
  using storage_type = Storage;

  /// The storage and the ranks must outlive it. @pre the ranks have joined
  comm_coordinator(Storage& storage, T& ranks, const comm_coordinator_options& options = {},
                   Retention retention = {}, Waiter waiter = {});
  comm_coordinator(const comm_coordinator&) = delete;
  comm_coordinator& operator=(const comm_coordinator&) = delete;

  /// Returns this process's rank in the present epoch.
  [[nodiscard]] std::uint32_t rank() const noexcept { return to_index(ranks_->rank()); }
  [[nodiscard]] std::uint32_t world() const noexcept { return to_number(ranks_->world()); }
  [[nodiscard]] Storage& storage() noexcept { return *storage_; }
  [[nodiscard]] T& ranks() noexcept { return *ranks_; }
  /// Returns rank 0's folder, opening it if necessary. @pre this is rank 0
  [[nodiscard]] checkpoint_folder<Storage>& folder() {
    open_folder();
    return *folder_;
  }

  [[nodiscard]] checkpoint_draft begin(std::uint64_t step);
  void commit(const checkpoint_draft& draft, const checkpoint_manifest& part);
  std::string abandon(const checkpoint_draft& draft, const std::string& why) noexcept;
  [[nodiscard]] std::string tidy();

 private:
  enum class fate : std::uint8_t { committed, uncertain, failed, stopped };
  /// The progress of this rank.
  enum class phase : std::uint8_t { writing, told, part_sent, deciding, over };
  struct round {
    std::uint64_t number = 0;
    checkpoint_draft draft{};
    phase at = phase::writing;
    bool is_there = false;                                    // committed, though its durability may be
                                                              // uncertain
    bool has_asked = false;                                   // has asked rank 0 to stop the round
    std::vector<std::optional<checkpoint_manifest>> parts{};  // held by rank 0
  };
  /// Rank 0's message about a step: its draft, or the reason why there is none.
  struct announcement {
    std::uint64_t number = 0;
    checkpoint_draft draft{};
    std::string stopped{};
  };

  [[nodiscard]] bool is_over(deadline by) const noexcept { return ranks_->after(0).ns >= by.ns; }
  [[nodiscard]] std::string where() const { return storage_->path("") + ": "; }
  [[nodiscard]] std::string where(const checkpoint_draft& draft) const {
    return where() + "step " + std::to_string(draft.id.step) + ": ";
  }
  void open_folder();
  void enter_epoch();
  void check_ranks() const;
  [[nodiscard]] std::vector<std::uint32_t> failed_of(const std::vector<std::uint32_t>& ranks) const;
  [[nodiscard]] round& current(const checkpoint_draft& draft);
  void check_part(const checkpoint_manifest& part, std::uint32_t rank, const checkpoint_draft& draft) const;

  bool tell(std::uint32_t to, const detail::rank_message& message);
  void tell_others(const detail::rank_message& message);
  [[nodiscard]] std::optional<detail::rank_message> take(std::uint32_t from);
  void wait(std::uint32_t from, deadline by);
  void hear_zero(const detail::rank_message& message);

  [[nodiscard]] checkpoint_draft announce(std::uint64_t step);
  [[nodiscard]] checkpoint_draft await_draft(std::uint64_t step);
  void lead(round& of, const checkpoint_manifest& part);
  void hear_part(round& of, std::uint32_t from, const detail::rank_message& message);
  void commit_all(round& of);
  void end(round& of, fate how, const std::string& why);
  void follow(round& of, const checkpoint_manifest& part);
  void settle(round& of, const detail::rank_message& outcome);
  void ask_to_stop(round& of, deadline& by);
  [[nodiscard]] fate fate_of(const round& of);
  std::string stop(round& of, const std::string& why);
  [[nodiscard]] std::string by_this(const std::string& why) const {
    return "rank " + std::to_string(rank()) + " stopped it: " + why;
  }
  [[nodiscard]] fate look(const checkpoint_draft& draft, deadline by);
  [[nodiscard]] std::optional<fate> look_once(const checkpoint_draft& draft);

  Storage* storage_;
  T* ranks_;
  comm_coordinator_options options_;
  Retention retention_;
  Waiter waiter_;
  std::uint64_t epoch_ = 0;  // of the fields below
  std::optional<checkpoint_folder<Storage>> folder_{};
  std::optional<round> round_{};
  std::optional<announcement> announced_{};
};

}  // namespace v0
}  // namespace llmmem

#include <llmmem/checkpoint/detail/comm_coordinator_body.hpp>
#include <llmmem/checkpoint/detail/comm_coordinator_commit.hpp>
