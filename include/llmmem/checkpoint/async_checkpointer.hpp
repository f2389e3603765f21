/// @file
/// `async_checkpointer`: saves a training run's state beside the training, and says what became of it.
#pragma once

#include <llmmem/checkpoint/chunk_digest.hpp>
#include <llmmem/checkpoint/commit_ticket.hpp>
#include <llmmem/checkpoint/coordinator.hpp>
#include <llmmem/checkpoint/detail/incremental.hpp>
#include <llmmem/checkpoint/file_plan.hpp>
#include <llmmem/checkpoint/manifest.hpp>
#include <llmmem/checkpoint/posix_storage.hpp>
#include <llmmem/checkpoint/state_view.hpp>
#include <llmmem/config.hpp>
#include <llmmem/space/buffer.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/version/snapshot_gate.hpp>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// What to do with a snapshot that begins while as many as may are still being written.
enum class when_busy : std::uint8_t {
  wait,  ///< until one is over: every checkpoint is made, at the price of a stall (`max_stall_ns` at most)
  skip,  ///< it is not made, and its ticket says so; for one rank only
};

/// Most checkpoints from one that is whole to the next. Who reads a file of the last opens one of each of
/// them, and a process may often have no more than 1024 files open, of which a reader takes two each.
inline constexpr std::uint32_t max_whole_every = 256;

/// How a checkpointer is set up.
struct checkpointer_options {
  std::uint64_t ring_bytes = std::uint64_t{64} << 20;  ///< staging memory, all it ever takes; see below
  std::uint64_t chunk_bytes = std::uint64_t{4}
                              << 20;              ///< copied, checked and written at once; has a checksum
  std::uint64_t max_shard_bytes = 5'000'000'000;  ///< of a file, see `file_plan_options`
  std::uint32_t max_pending = 2;                  ///< snapshots begun and not over
  when_busy busy = when_busy::wait;
  /// One checkpoint in so many is written whole; those between write the chunks that changed since the last
  /// one that was committed, and refer to earlier ones for the rest. 1: all are whole; at most
  /// `max_whole_every`. One changed byte is `chunk_bytes` written: where changes are scattered take smaller
  /// chunks. See below.
  std::uint32_t whole_every = 1;
  /// A snapshot that holds a step up for longer is given up: a disk that hangs does not stop the training.
  std::uint64_t max_stall_ns = std::uint64_t{3'600'000'000'000};
  std::string name = "async_checkpointer";  ///< for error texts
};

/// Counters of a checkpointer.
struct checkpointer_stats {
  std::uint64_t begun = 0;
  std::uint64_t committed = 0;
  std::uint64_t failed = 0;     ///< not committed, for whatever reason, those skipped among them
  std::uint64_t uncertain = 0;  ///< durability uncertain
  std::uint64_t skipped = 0;    ///< because it was busy
  std::uint64_t stall_ns = 0;   ///< callers waited: to begin, and to change the state or have it copied
  std::uint64_t staged_bytes = 0;
  std::uint64_t stage_ns = 0;         ///< copying, less what it waited for room
  std::uint64_t persisted_bytes = 0;  ///< written, of those committed
  std::uint64_t unchanged_bytes = 0;  ///< referred to instead, likewise
  std::uint64_t persist_ns = 0;     ///< from the first chunk that was taken to the commit, of those committed
  std::uint64_t staging_bytes = 0;  ///< in the ring now
  std::uint64_t staging_peak = 0;   ///< and at most
  std::uint64_t ring_bytes = 0;     ///< all of it
  std::uint64_t last_step = 0;      ///< of the last that was committed
  std::uint64_t last_generation = 0;  ///< likewise; 0: none was
  std::string last_trouble{};         ///< why the last one that failed did, or what tidying met

  /// Bytes a second, from a snapshot's first chunk to its commit.
  [[nodiscard]] double bandwidth() const noexcept {
    return persist_ns == 0 ? 0 : static_cast<double>(persisted_bytes) * 1e9 / static_cast<double>(persist_ns);
  }
};

/// How far the oldest checkpoint that is pending has come.
struct checkpoint_progress {
  std::uint64_t step = 0;
  std::uint64_t bytes = 0;      ///< of all files; 0: none is pending
  std::uint64_t staged = 0;     ///< copied out of the state
  std::uint64_t persisted = 0;  ///< written, or found not to have changed
};

/// Is told of nothing.
struct no_checkpoint_observer {
  void settled(const commit_ticket& /*ticket*/) const noexcept {}
};

/// What an `async_checkpointer` is made of: inherit and shadow.
struct checkpointer_traits {
  using storage_type = posix_storage<>;
  using coordinator_type = solo_coordinator<storage_type>;
  using view_type = host_state_view;
  using staging_space = host_space;     ///< must be accessible to the host
  using digest_type = no_chunk_digest;  ///< how incremental saves find out what changed, where no view tells
  /// `settled(ticket)` is called when a status is final, by the thread that made it so: the checkpointer's
  /// own, or, of one that never began, its caller's; never by two at once. It holds up the next checkpoint;
  /// what it throws is noted in `last_trouble`.
  using observer_type = no_checkpoint_observer;
};

template <class Traits>
class async_checkpointer;

/// A snapshot that was begun. While it is not staged, the state must stay as it is; the gate sees to that. It
/// waits for that when it goes, so that the state may go after it.
///
/// Of a stable view (`is_stable_view`) the state may change at once: `mutate` waits for nothing, nor does the
/// guard when it goes. Until it is staged, what the view reads is in use (a `cow_range`'s pool pages, clones,
/// forks); what the view stands on may go once it is staged, after `flush`, or after the checkpointer.
///
/// It and all permits end before the checkpointer does: declare them behind it.
class [[nodiscard]] snapshot_guard {
 public:
  snapshot_guard(snapshot_guard&& other) noexcept
      : gate_(std::exchange(other.gate_, nullptr)),
        reading_(std::move(other.reading_)),
        ticket_(std::move(other.ticket_)) {}
  snapshot_guard& operator=(snapshot_guard&&) = delete;
  ~snapshot_guard() {
    if (gate_ != nullptr) gate_->wait();  // a stable view does not freeze it
  }

  [[nodiscard]] const commit_ticket& ticket() const noexcept { return ticket_; }
  /// Whether it has been read; or given up, which ends that as well.
  [[nodiscard]] bool is_staged() const noexcept {
    const snapshot_gate* const reads = staging();
    return reads == nullptr || !reads->is_frozen();
  }
  /// Returns when it is: the state may change, or what a stable view kept is free. A snapshot that takes
  /// longer than `max_stall_ns` is given up. By the thread that owns the state.
  void wait_staged() const noexcept {
    if (snapshot_gate* const reads = staging(); reads != nullptr) reads->wait();
  }
  /// The permit to change the state, once it may. The guard has no more to do.
  /// @throws argument_error  of a guard that was moved from, or has given its permit.
  [[nodiscard]] mutation_permit mutate() && {
    if (gate_ == nullptr) throw argument_error("snapshot_guard: it was moved from, or has given its permit");
    return std::exchange(gate_, nullptr)->mutate();
  }

 private:
  template <class Traits>
  friend class async_checkpointer;
  snapshot_guard(snapshot_gate& gate, commit_ticket ticket, std::shared_ptr<snapshot_gate> reading) noexcept
      : gate_(&gate), reading_(std::move(reading)), ticket_(std::move(ticket)) {}

  [[nodiscard]] snapshot_gate* staging() const noexcept { return reading_ ? reading_.get() : gate_; }

  snapshot_gate* gate_;
  std::shared_ptr<snapshot_gate> reading_;  // of a stable view: frozen until it has been read; else null
  commit_ticket ticket_;
};

/// Checkpoints of a state, written behind the training.
///
///     posix_storage storage("/checkpoints/run-7");
///     solo_coordinator coordinator(storage, keep_last_and_every{.last = 3, .every_steps = 1000});
///     async_checkpointer<> checkpointer(coordinator, tensors, {.ring_bytes = 256 << 20});
///
///     snapshot_guard guard = checkpointer.begin_snapshot(step, host_state_view(spans), extras);
///     const commit_ticket ticket = guard.ticket();
///     ...                                             // forward and backward pass: they only read
///     optimizer.step(std::move(guard).mutate());      // waits until all is copied
///     if (ticket.wait() == commit_status::committed)  // whenever one wants to know
///
/// `begin_snapshot` copies nothing but the extras. From then on bytes go through a ring of `ring_bytes`, the
/// only memory this takes: out of the state chunk by chunk, each with a CRC-32C, into safetensors files,
/// which are synced and committed (`checkpoint_folder`). A ring as large as the state holds a step up for no
/// longer than copying the state takes; with a smaller one for as long as it takes to write the rest. Whoever
/// changes the state takes a `mutation_permit`, from the guard or from `gate()`: without it his function does
/// not compile, and it is not given while a snapshot is being copied. A stable view (`cow_state_view`, say)
/// is read while the state changes: then the permit is given at once.
///
/// A checkpoint that fails, for whatever reason, ends no training and is never silent: its ticket, and
/// `stats().last_trouble`, say why. The next one begins anew.
///
/// *Incremental saves* (`whole_every`). What changed is told by the view (`change_tracking_view`: what did
/// not is not even copied), or found by a digest of each chunk (`digest_type`: copied and read, not written).
/// Each chunk is in one file, of this checkpoint or of an earlier one, which retention keeps as long as it is
/// needed: a restore reads each wanted byte once, from plain files. A checkpoint of which all chunks changed
/// is whole, as is the first of a process and the one after a failure. In others a file that is not whole is
/// there as `model.safetensors.changes`, so that no tool takes it for the model; `copy_checkpoint` folds
/// them. A snapshot is then copied once the one before it is over.
///
/// @par Complexity      `begin_snapshot` O(1) in the state; O(extras).
/// @par Thread safety   `begin_snapshot`, `gate` and guards by the thread that owns the state; the rest any.
///                      Two threads of its own (one where the view is not concurrent).
/// @par Errors          the constructor throws what `plan_files` does, `length_error` for a ring of less than
///                      two chunks, `argument_error` for incremental saves without a way to find out what
///                      changed, and `out_of_memory`.
/// @par Source          two phases, snapshot and persist: Mohan et al., "CheckFreq", FAST 2021.
template <class Traits = checkpointer_traits>
class async_checkpointer {
 public:
  static_assert(
      requires {
        typename Traits::storage_type;
        typename Traits::coordinator_type;
        typename Traits::view_type;
        typename Traits::observer_type;
        typename Traits::digest_type;
      }, "Traits lacks a policy: inherit from llmmem::checkpointer_traits, and shadow those to change");
  using storage_type = typename Traits::storage_type;
  using coordinator_type = typename Traits::coordinator_type;
  using view_type = typename Traits::view_type;
  using observer_type = typename Traits::observer_type;
  using digest_type = typename Traits::digest_type;
  static_assert(checkpoint_coordinator<coordinator_type>,
                "Traits::coordinator_type must be a checkpoint_coordinator: "
                "<llmmem/checkpoint/coordinator.hpp> lists its "
                "members");
  static_assert(state_view<view_type>,
                "Traits::view_type must be a state_view: it is copied, has copy_out(tensor, offset, into), "
                "and a static "
                "constexpr bool is_concurrent");
  static_assert(
      chunk_digest<digest_type>,
      "Traits::digest_type must be a chunk_digest: <llmmem/checkpoint/chunk_digest.hpp> lists its members");

  /// @param coordinator  outlives the checkpointer, which alone calls it.
  /// @param tensors      of every snapshot; the view numbers them in this order.
  async_checkpointer(coordinator_type& coordinator, std::vector<state_tensor> tensors,
                     checkpointer_options options = {}, observer_type observer = {});
  async_checkpointer(const async_checkpointer&) = delete;
  async_checkpointer& operator=(const async_checkpointer&) = delete;
  /// Waits for all that is pending.
  ~async_checkpointer();

  /// Begins a checkpoint of the state as it is now. @pre what `view` refers to stays as it is until the guard
  /// says that it is staged. Of a stable view the checkpoint is of the moment at which the view was taken.
  /// @throws argument_error  while a permit of the gate is alive (for stable views too: it would be of half a
  ///                         step), and for extras with bad names.
  snapshot_guard begin_snapshot(std::uint64_t step, view_type view,
                                std::vector<checkpoint_extra> extras = {});

  /// Who changes the state asks here, whether or not a snapshot was begun.
  [[nodiscard]] snapshot_gate& gate() noexcept { return gate_; }

  /// Returns once nothing is pending, or after `most_ns`: whether nothing is. For the end of a run, and for a
  /// process that was told to go. By the thread that owns the state, where the view is not concurrent.
  bool flush(std::uint64_t most_ns = commit_ticket::forever);

  /// Copies for about `most_ns`, without waiting for room; whether nothing is left to copy. Who changes the
  /// state under views that are stable, and not concurrent, waits for nothing, and copies nothing by that: he
  /// calls this now and then. Others need it not. By the thread that owns the state.
  bool stage_for(std::uint64_t most_ns);

  /// What the files will be, whatever the state.
  [[nodiscard]] const file_plan& plan() const noexcept { return plan_; }
  [[nodiscard]] checkpointer_stats stats() const;
  [[nodiscard]] checkpoint_progress progress() const;

 private:
  struct job;
  struct filled_chunk {
    std::size_t slot = 0;
    std::uint64_t bytes = 0;
    bool is_end = false;          // nothing more comes of this snapshot
    std::uint64_t unchanged = 0;  // chunks that were not copied, instead of one that was
  };
  class file_writer;

  void start();
  void stop();
  [[nodiscard]] std::string wait_for_turn(std::unique_lock<std::mutex>& lock);
  [[nodiscard]] static checkpointer_options checked(checkpointer_options options);
  [[nodiscard]] std::span<std::byte> slot(std::size_t at) noexcept;
  // Staging.
  void run_stager();
  [[nodiscard]] job* unstaged() noexcept;
  [[nodiscard]] job* stageable() noexcept;
  [[nodiscard]] bool is_hurried() noexcept;
  [[nodiscard]] bool stage_some(job& of, std::unique_lock<std::mutex>& lock);
  [[nodiscard]] static bool is_unchanged(const job& of, const planned_file& file, std::uint64_t begin,
                                         std::uint64_t bytes);
  void pass(job& of, std::uint64_t bytes);
  template <class Visit>
  static void each_span(const planned_file& file, std::uint64_t begin, std::uint64_t end, Visit&& visit);
  static void fill(job& of, const planned_file& file, std::uint64_t begin, std::span<std::byte> into);
  void end_staging(job& of, std::unique_lock<std::mutex>& lock, std::string why);
  void pump(std::unique_lock<std::mutex>& lock, std::uint64_t until);
  void hold_up(std::uint64_t until);
  [[nodiscard]] std::shared_ptr<snapshot_gate> hold();

  // Persisting.
  void run_persister();
  void persist(job& of);
  void give_up(job& of);
  [[nodiscard]] std::string tidy() noexcept;
  [[nodiscard]] checkpoint_manifest write_files(job& of, const checkpoint_draft& draft);
  void remember(job& of, checkpoint_manifest part);
  [[nodiscard]] filled_chunk take(job& of);
  void check_given_up(const job& of) const;
  [[nodiscard]] bool has_filled() const;
  void release(std::span<const std::size_t> slots);
  void drain(job& of);
  void conclude(job& of, commit_status how, std::string why);
  void note_trouble(std::string_view what) noexcept;

  coordinator_type* coordinator_;
  checkpointer_options options_;
  observer_type observer_;
  file_plan plan_;
  snapshot_gate gate_;
  typename Traits::staging_space space_;
  space_buffer<typename Traits::staging_space> ring_;

  std::mutex observer_mutex_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::unique_ptr<job>> jobs_;  // pending, the oldest first
  std::vector<filled_chunk> filled_;        // likewise; as many as there are slots, what lies between, ends
  std::vector<std::size_t> free_;           // slots
  std::shared_ptr<const detail::committed_part> committed_{};  // what incremental saves refer to
  bool ends_ = false;
  checkpointer_stats stats_;
  std::thread persister_;
  std::thread stager_;
};

}  // namespace v0
}  // namespace llmmem

#include <llmmem/checkpoint/detail/async_checkpointer_body.hpp>
