/// @file
/// `comm_coordinator`: brings the ranks of a checkpoint together by messages; any of them may die.
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

/// A transport of one epoch at a time that tells who has died, and what is on its way. `communicator` is one.
template <class T>
concept watched_transport =
    transport<T> && requires(T& ranks, const T& seen, rank_id rank, std::uint32_t tag, deadline by) {
      { seen.epoch() } noexcept -> std::same_as<std::uint64_t>;
      { seen.is_revoked() } noexcept -> std::same_as<bool>;
      { seen.has_failed(rank) } noexcept -> std::same_as<bool>;
      { ranks.probe(rank, tag, by) } -> std::same_as<result<std::uint64_t>>;
      ranks.poll();
    };

/// How long what is waited for. Nanoseconds.
struct comm_coordinator_options {
  std::uint32_t tag = 0x6370'0000;                ///< of its messages: nothing else uses it on these ranks
  std::uint64_t open_within_ns = 30'000'000'000;  ///< for the folder's lock, which one that died had
  std::uint64_t begin_within_ns = 1'800'000'000'000;   ///< for rank 0 to come to the step
  std::uint64_t commit_within_ns = 1'800'000'000'000;  ///< for the others' files, and the commit
  /// For what became of a checkpoint that rank 0 says nothing more of.
  std::uint64_t answer_within_ns = 60'000'000'000;
  std::uint64_t poll_ns = 20'000'000;        ///< between two looks at whoever is not waited for
  verification votes = verification::sizes;  ///< see `rank_session_options`
};

/// A `checkpoint_coordinator` for the ranks of a `communicator`: messages in place of the files by which a
/// `file_coordinator` has them meet. A rank that dies is noticed at once, not by a deadline. The folder is
/// the same: one file system for all ranks, with locks that reach them.
///
///     communicator saves(endpoint, {.name = "checkpoints"});  // not the training's: another thread calls it
///     saves.join(saves.after(60'000'000'000)).value();
///     comm_coordinator coordinator(storage, saves);
///     async_checkpointer<traits> checkpointer(coordinator, rank_state(tensors, split, saves.rank()));
///
/// A checkpoint is a round with a number that is never used again. Rank 0 makes the draft and tells it; a
/// rank whose files are synced says so, and, asked for it, sends the manifest of its part; rank 0 holds the
/// parts to what is in the folder, merges and commits them, and tells the outcome. What is of another round
/// is dropped, what is of another epoch never heard.
///
/// - **A rank dies**: rank 0 stops the round, and all learn which rank it was. One whose part had come is not
///   missed: the commit goes on without it.
/// - **Rank 0 dies**: nothing is committed as long as somebody has not sent his part, and that one says so at
///   once. Whoever has sent it looks into the folder: the checkpoint is there, and so committed; or it is
///   not, and the folder's lock is free, so that nobody can commit it any more: it failed. Where the lock is
///   held for all of `answer_within_ns`, by a process that is silent and not dead, the answer is
///   `durability_uncertain`. So it is where folders cannot be renamed, for one that is found.
/// - **A rank fails, or waits for too long**: it stops the round for all, unless its part is sent; then it
///   asks rank 0 to, which answers with what became of it.
///
/// **Who repairs the ranks**: their owner, as with any communicator, `agree` and then `admit` or `shrink`, on
/// all of them, between two checkpoints. Until then `begin` fails at once, and names the dead. It does not go
/// on without them by itself, since what they held would not be saved: those that are left share the state
/// anew, and make new checkpointers. This object may stay; it goes on in the new epoch, in which rank 0 may
/// be another one, which takes the folder over. A slow rank breaks nothing: the next `begin` just works.
///
/// @par Complexity      a round: 4 messages for each other rank, one of them its manifest, all to or from
///      rank 0; N - 1 from a rank that stops it. Memory: rank 0 holds all parts.
/// @par Thread safety   one thread at a time, which owns the transport meanwhile.
/// @par Errors          The constructor: as `checkpoint_folder`, on rank 0; `argument_error` before `join`.
///      `begin`: `ranks_missing` for the dead and the late; `comm_error` for an epoch that was revoked, or
///      goes on without this rank; `checkpoint_stopped` when rank 0 could not; `io_error` when rank 0 is at a
///      later step. `commit`: `ranks_missing`, `checkpoint_stopped`, `comm_error`, `argument_error` for a
///      draft or a part that is not of this round: nothing is committed, nor will be; `durability_uncertain`
///      as above, and as `checkpoint_folder::commit` has it; `io_error` for what else went wrong there.
/// @par Source          two phases: Gray, "Notes on Data Base Operating Systems", 1978; who cannot ask the
///      coordinator asks what it writes to: after Gray and Lamport, "Consensus on Transaction Commit", 2006.
template <checkpoint_storage Storage, watched_transport T, retention_policy Retention = keep_last_and_every,
          rank_waiter Waiter = sleeping_waiter>
class comm_coordinator {
 public:
  using storage_type = Storage;

  /// The storage and the ranks outlive it. @pre the ranks have joined
  comm_coordinator(Storage& storage, T& ranks, const comm_coordinator_options& options = {},
                   Retention retention = {}, Waiter waiter = {});
  comm_coordinator(const comm_coordinator&) = delete;
  comm_coordinator& operator=(const comm_coordinator&) = delete;

  /// In the epoch of now.
  [[nodiscard]] std::uint32_t rank() const noexcept { return to_index(ranks_->rank()); }
  [[nodiscard]] std::uint32_t world() const noexcept { return to_number(ranks_->world()); }
  [[nodiscard]] Storage& storage() noexcept { return *storage_; }
  [[nodiscard]] T& ranks() noexcept { return *ranks_; }
  /// Rank 0's, which is opened if it is not. @pre this is rank 0
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
  /// How far this rank is.
  enum class phase : std::uint8_t { writing, told, part_sent, deciding, over };
  struct round {
    std::uint64_t number = 0;
    checkpoint_draft draft{};
    phase at = phase::writing;
    bool is_there = false;                                    // committed, though perhaps not surely
    bool has_asked = false;                                   // rank 0 to stop it
    std::vector<std::optional<checkpoint_manifest>> parts{};  // rank 0 has them
  };
  /// What rank 0 said of a step: its draft, or why there is none, or none any more.
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
  std::uint64_t epoch_ = 0;  // that what follows is of
  std::optional<checkpoint_folder<Storage>> folder_{};
  std::optional<round> round_{};
  std::optional<announcement> announced_{};
};

}  // namespace v0
}  // namespace llmmem

#include <llmmem/checkpoint/detail/comm_coordinator_body.hpp>
#include <llmmem/checkpoint/detail/comm_coordinator_commit.hpp>
