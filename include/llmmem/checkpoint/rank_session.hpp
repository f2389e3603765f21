/// @file
/// `rank_session`: one of several ranks that save a checkpoint together through files of a shared folder, one
/// step at a time.
#pragma once

#include <llmmem/checkpoint/detail/bodies.hpp>
#include <llmmem/checkpoint/detail/rank_message.hpp>
#include <llmmem/checkpoint/folder.hpp>
#include <llmmem/checkpoint/manifest.hpp>
#include <llmmem/checkpoint/names.hpp>
#include <llmmem/checkpoint/rank_errors.hpp>
#include <llmmem/checkpoint/retention.hpp>
#include <llmmem/checkpoint/search.hpp>
#include <llmmem/checkpoint/storage.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The rank and its world.
struct rank_session_options {
  std::uint32_t rank = 0;
  std::uint32_t world = 1;
  /// How closely rank 0 checks the files that other ranks report: that each exists with the reported size, or
  /// also each byte, which reads the whole checkpoint.
  verification votes = verification::sizes;
};

/// What a call was waiting for, for the error of a caller that gives up.
struct rank_wait {
  std::vector<std::uint32_t> ranks{};
  std::string text{};  ///< "ranks 1 and 2 have not joined"
};

/// One of several ranks, each in its own process or machine, that share a folder of checkpoints. Nothing here
/// waits: a caller that wants to wait calls again, as `file_coordinator` does. So one thread can run all
/// ranks of a test.
///
///     while (!session.try_join()) ...                // all ranks are there
///     auto draft = session.try_begin(step);          // until there is one; the same for all ranks
///     ...                                            // this rank's files are written and synced
///     session.vote(*draft, part);
///     while (!session.try_conclude(*draft)) ...      // committed
///
/// They communicate by files in the folder, whose names begin with `.rank-`. One rank writes and syncs each
/// file before the file gets its name, so that no rank sees half of one; rank 0 removes the files of an
/// earlier run.
///
/// - *Membership.* A rank holds the lock `LOCK.rank-<r>` as long as this object lives; rank 0 also holds the
///   folder's. A rank draws a nonce and publishes it (`join`). It publishes the nonce again whenever the file
///   vanishes, because rank 0 may start later and tidy. Once rank 0 has a nonce of every rank, it publishes
///   the `session`: its own nonce and theirs. A rank takes part only in a session that lists *its* nonce, so
///   never in a session of an earlier run. All later messages have the session in their names, so that late
///   messages from a process of an earlier run are ignored.
/// - *A checkpoint* is a round: rank 0 announces the `draft`; a rank syncs its names in the draft's folder
///   and reports its files with the manifest of its part (`vote`). The first file with the name `decision`
///   decides: rank 0 writes "go" once it has all votes and has checked them; any rank that fails, or waits
///   for too long, writes "stop". So a rank that stopped a round knows that nothing is committed. After "go"
///   rank 0 commits and announces the `outcome`.
/// - Ranks meet by steps: a rank that begins step 30 while step 20 is announced stops step 20. Ranks that
///   went back to an earlier step, and continue training differently, begin a new session.
/// - Rank 0 removes the messages of a round when all ranks have voted in a later one.
///
/// @par Complexity      a call lists the folder once; a round writes 3 + world - 1 files of a few bytes,
///   except for votes, which are manifests.
/// @par Thread safety   one thread at a time.
/// @par Errors          `storage_error`; `fenced` if another process took the lock; and those named below.
/// @par Source          two phases: Gray, "Notes on Data Base Operating Systems", 1978; a decision by the
///   first writer: Gray and Lamport, "Consensus on Transaction Commit", TODS 2006, with one acceptor, the
///   file system.
class rank_session_base {
 public:
  /// Takes the locks; rank 0 opens the folder and removes remains of earlier runs.
  /// @throws argument_error  for a rank that is not below the world. @throws io_error if another process
  ///                         holds the rank or the folder.
  rank_session_base(storage_ref storage, const rank_session_options& options);
  rank_session_base(const rank_session_base&) = delete;
  rank_session_base& operator=(const rank_session_base&) = delete;

  [[nodiscard]] std::uint32_t rank() const noexcept { return options_.rank; }
  [[nodiscard]] std::uint32_t world() const noexcept { return options_.world; }
  [[nodiscard]] storage_ref storage() const noexcept { return storage_; }
  /// Returns rank 0's folder; null for other ranks.
  [[nodiscard]] checkpoint_folder_base* folder() noexcept { return folder_ ? &*folder_ : nullptr; }
  [[nodiscard]] bool is_joined() const noexcept { return session_.has_value(); }

  /// Returns whether all ranks have joined; once true, it stays true.
  [[nodiscard]] bool try_join();
  /// Withdraws this rank, so that rank 0 does not count on it.
  void leave() noexcept;

  /// Returns the draft of that step once it is announced; rank 0 makes and announces it.
  /// @throws checkpoint_stopped if the step is already stopped. @throws io_error if rank 0 is at a later
  ///         step.
  /// @throws argument_error  before all ranks have joined.
  [[nodiscard]] std::optional<checkpoint_draft> try_begin(std::uint64_t step);

  /// Reports this rank's files, listed in `part`, as synced, after syncing their names.
  /// @throws argument_error  for a draft other than the last begun, or a part that does not belong to it.
  void vote(const checkpoint_draft& draft, const checkpoint_manifest& part);

  /// Returns whether the checkpoint is committed. Rank 0 commits when it has all votes.
  /// @throws checkpoint_stopped if a rank stopped it. @throws durability_uncertain if it is visible but may
  ///         not survive a crash. @throws io_error on rank 0 for an invalid vote, and on the other ranks for
  ///         any other failure of rank 0.
  [[nodiscard]] bool try_conclude(const checkpoint_draft& draft);

  /// Stops a round, so that all ranks learn why. When it returns, nothing is committed, now or later.
  /// @throws checkpoint_stopped if another rank stopped it first. @throws durability_uncertain if this rank
  ///         has voted and rank 0 had decided to commit, or the storage did not answer: only the folder shows
  ///         whether the checkpoint exists.
  void stop(const checkpoint_draft& draft, const std::string& why);

  /// Stops a round in which this rank does not vote, and informs the others of the reason; rank 0 removes the
  /// draft. Has no further effect once the round is over.
  /// @return if another rank stopped the round before, that rank and its reason; rank 0 has then removed the
  ///         draft, possibly while this rank was writing.
  std::string abandon(const checkpoint_draft& draft, const std::string& why) noexcept;

  /// Returns what `try_join`, `try_begin` or `try_conclude` last found missing.
  [[nodiscard]] const rank_wait& waits_for() const noexcept { return waits_; }

  /// Returns, once, the problems after a commit that did not undo it; empty if there are none.
  [[nodiscard]] std::string take_error() { return std::exchange(trouble_, {}); }

 private:
  enum class verdict : std::uint8_t { stop, go };
  enum class fate : std::uint8_t { committed, uncertain, failed };
  struct round {
    std::uint64_t number = 0;
    checkpoint_draft draft{};
    std::vector<std::optional<checkpoint_manifest>> votes{};  // held by rank 0
    bool has_voted = false;
    bool is_over = false;
    bool is_there = false;  // committed, though its durability may be uncertain
  };
  struct decision {
    verdict what = verdict::stop;
    std::uint32_t by = 0;
    std::string why{};
  };

  [[nodiscard]] static storage_ref::lock_type take_rank(storage_ref storage,
                                                        const rank_session_options& options);
  [[nodiscard]] std::string where(const checkpoint_draft& draft) const;
  void check_lock() const;
  [[nodiscard]] round& current(const checkpoint_draft& draft, const char* call);
  [[nodiscard]] std::string name_of(std::string_view kind, std::uint64_t number) const;
  [[nodiscard]] std::string vote_name(std::uint64_t number, std::uint32_t rank) const;
  [[nodiscard]] std::vector<std::string> names();
  [[nodiscard]] static bool has(const std::vector<std::string>& sorted, const std::string& name);
  void remove_quietly(const std::string& name);

  [[nodiscard]] bool publish(const std::string& name, const detail::rank_message& message);
  void write_message(const std::string& name, std::string_view text);
  [[nodiscard]] bool give_name(const std::string& from, const std::string& name, std::string_view text);
  [[nodiscard]] checkpoint_draft announce(std::uint64_t step);
  [[nodiscard]] std::optional<detail::rank_message> read(const std::string& name);
  [[nodiscard]] std::optional<detail::rank_message> read_told(const std::string& name, std::string_view kind,
                                                              std::uint64_t number, std::size_t numbers);

  [[nodiscard]] bool gather(const std::vector<std::string>& there);
  [[nodiscard]] bool find_session(const std::vector<std::string>& there);

  [[nodiscard]] std::optional<decision> read_decision(std::uint64_t number);
  [[nodiscard]] bool decide(std::uint64_t number, verdict what, const std::string& why);
  [[nodiscard]] static std::string stopped_by(const decision& by);
  [[noreturn]] void fail_stopped(round& of, const decision& by);
  [[noreturn]] void refuse(round& of, const std::string& why);
  [[nodiscard]] bool gather_votes(round& of, const std::vector<std::string>& there);
  void check_vote(const checkpoint_manifest& vote, std::uint32_t rank, const checkpoint_draft& draft);
  [[nodiscard]] bool commit(round& of);
  void tell(const round& of, fate how, const std::string& why);
  void note_trouble(const round& of, const char* what, const std::exception& why) noexcept;
  [[nodiscard]] bool learn(round& of, const std::vector<std::string>& there);
  void forget_before(std::uint64_t number, const std::vector<std::string>& there);

  storage_ref storage_;
  rank_session_options options_;
  std::uint64_t nonce_;
  storage_ref::lock_type lock_;
  std::optional<checkpoint_folder_base> folder_;
  std::optional<std::uint64_t> session_;
  std::uint64_t next_ = 1;  // round
  std::optional<round> round_;
  rank_wait waits_;
  std::string trouble_;
};

/// A session over a storage of that type: see `rank_session_base`.
template <checkpoint_storage Storage>
class rank_session : public rank_session_base {
 public:
  using storage_type = Storage;

  rank_session(Storage& storage, const rank_session_options& options)
      : rank_session_base(storage, options), storage_(&storage) {}

  [[nodiscard]] Storage& storage() const noexcept { return *storage_; }

 private:
  Storage* storage_;
};

}  // namespace v0
}  // namespace llmmem

#if LLMMEM_CHECKPOINT_BODIES
#include <llmmem/checkpoint/detail/rank_session_joining.hpp>
#include <llmmem/checkpoint/detail/rank_session_messages.hpp>
#include <llmmem/checkpoint/detail/rank_session_rounds.hpp>
#endif
