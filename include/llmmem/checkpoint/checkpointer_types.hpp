/// @file
/// Options, counters and progress of an `async_checkpointer`, and the guard of a snapshot.
#pragma once

#include <llmmem/checkpoint/commit_ticket.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/version/snapshot_gate.hpp>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace llmmem {
inline namespace v0 {

namespace detail {

class checkpointer_core;

}  // namespace detail

/// What to do when a snapshot begins while the maximum number is still being written.
enum class when_busy : std::uint8_t {
  wait,  ///< until one is complete: every checkpoint is saved, at the price of a stall (`max_stall_ns` at
         ///< most)
  skip,  ///< the snapshot is not saved, and its ticket says so; for one rank only
};

/// The most checkpoints from one full one to the next. A reader of the last one opens a file of each of them,
/// which takes two descriptors, and many systems allow a process only 1024.
inline constexpr std::uint32_t max_full_every = 256;
[[deprecated("its name is max_full_every")]] inline constexpr std::uint32_t max_whole_every = max_full_every;

/// The construction parameters of a checkpointer.
struct checkpointer_options {
  std::uint64_t ring_bytes = std::uint64_t{64} << 20;  ///< staging memory, the only memory that it takes
  /// The unit of copying, checking and writing, with one checksum. A ring of less than two chunks uses
  /// smaller ones.
  std::uint64_t chunk_bytes = std::uint64_t{4} << 20;
  std::uint64_t max_shard_bytes = 5'000'000'000;  ///< most bytes of a file, see `file_plan_options`
  std::uint32_t max_pending = 2;                  ///< snapshots that have begun and are not complete
  when_busy busy = when_busy::wait;
  /// One checkpoint in this many is written in full; the others write the chunks that changed since the last
  /// committed one, and refer to earlier ones for the rest. 1: all are full; at most `max_full_every`. One
  /// changed byte writes `chunk_bytes`, so use smaller chunks if changes are scattered.
  std::uint32_t full_every = 1;
  /// A snapshot that stalls a step for longer is abandoned: a hung disk does not stop training.
  std::uint64_t max_stall_ns = std::uint64_t{3'600'000'000'000};
  std::string name = "async_checkpointer";  ///< the name in error texts
};

/// Counters of a checkpointer.
struct checkpointer_stats {
  std::uint64_t begun = 0;
  std::uint64_t committed = 0;
  std::uint64_t failed = 0;     ///< checkpoints not committed for any reason, including skipped ones
  std::uint64_t uncertain = 0;  ///< checkpoints whose durability is uncertain
  std::uint64_t skipped = 0;    ///< checkpoints skipped because the checkpointer was busy
  /// Time that callers waited to begin, to change the state or to have it copied.
  std::uint64_t stall_ns = 0;
  std::uint64_t staged_bytes = 0;
  std::uint64_t stage_ns = 0;         ///< time of copying, without waits for space
  std::uint64_t persisted_bytes = 0;  ///< bytes written, for committed checkpoints
  std::uint64_t unchanged_bytes = 0;  ///< bytes referred to instead, for committed checkpoints
  std::uint64_t persist_ns = 0;       ///< from the first chunk taken to the commit, for committed checkpoints
  std::uint64_t staging_bytes = 0;    ///< bytes in the ring now
  std::uint64_t staging_peak = 0;     ///< the maximum of `staging_bytes` so far
  std::uint64_t ring_bytes = 0;       ///< size of the ring
  std::uint64_t last_step = 0;        ///< of the last committed checkpoint
  std::uint64_t last_generation = 0;  ///< of the last committed checkpoint; 0: none
  std::string last_error{};           ///< reason of the last failure, or of the last problem during tidying

  /// Returns bytes per second, from a snapshot's first chunk to its commit.
  [[nodiscard]] double bandwidth() const noexcept {
    return persist_ns == 0 ? 0 : static_cast<double>(persisted_bytes) * 1e9 / static_cast<double>(persist_ns);
  }
};

/// The progress of the oldest pending checkpoint.
struct checkpoint_progress {
  std::uint64_t step = 0;
  std::uint64_t bytes = 0;      ///< bytes of all files; 0: none is pending
  std::uint64_t staged = 0;     ///< bytes copied out of the state
  std::uint64_t persisted = 0;  ///< bytes written, or found unchanged
};

/// A snapshot in progress. Until it is staged, the state must stay unchanged; the gate ensures that. The
/// destructor waits until the snapshot is staged, so the state may be destroyed after it.
///
/// With a stable view (`is_stable_view`) the state may change at once: neither `mutate` nor the destructor
/// waits. Until the snapshot is staged, the view's memory is in use (pool pages of a `cow_range`, clones,
/// forks); the objects that the view reads from may be destroyed once it is staged, after `flush`, or after
/// the checkpointer.
///
/// The guard and all permits must end before the checkpointer: declare them after it.
class [[nodiscard]] snapshot_guard {
 public:
  snapshot_guard(snapshot_guard&& other) noexcept
      : gate_(std::exchange(other.gate_, nullptr)),
        reading_(std::move(other.reading_)),
        ticket_(std::move(other.ticket_)) {}
  snapshot_guard& operator=(snapshot_guard&&) = delete;
  ~snapshot_guard() {
    if (gate_ != nullptr) gate_->wait();  // a stable view does not freeze the gate
  }

  [[nodiscard]] const commit_ticket& ticket() const noexcept { return ticket_; }
  /// Returns whether the snapshot has been read, or abandoned, which ends it as well.
  [[nodiscard]] bool is_staged() const noexcept {
    const snapshot_gate* const reads = staging();
    return reads == nullptr || !reads->is_frozen();
  }
  /// Waits until the snapshot is staged: then the state may change, or the memory that a stable view kept is
  /// free. A snapshot that takes longer than `max_stall_ns` is abandoned. Called by the thread that owns the
  /// state.
  void wait_staged() const noexcept {
    if (snapshot_gate* const reads = staging(); reads != nullptr) reads->wait();
  }
  /// Waits until the state may change, and returns the permit. The guard is then finished.
  /// @throws argument_error  for a guard that was moved from, or has given its permit.
  [[nodiscard]] mutation_permit mutate() && {
    if (gate_ == nullptr) throw argument_error("snapshot_guard: it was moved from, or has given its permit");
    return std::exchange(gate_, nullptr)->mutate();
  }

 private:
  friend class detail::checkpointer_core;
  snapshot_guard(snapshot_gate& gate, commit_ticket ticket, std::shared_ptr<snapshot_gate> reading) noexcept
      : gate_(&gate), reading_(std::move(reading)), ticket_(std::move(ticket)) {}

  [[nodiscard]] snapshot_gate* staging() const noexcept { return reading_ ? reading_.get() : gate_; }

  snapshot_gate* gate_;
  // For a stable view: frozen until it has been read; otherwise null.
  std::shared_ptr<snapshot_gate> reading_;
  commit_ticket ticket_;
};

}  // namespace v0
}  // namespace llmmem
