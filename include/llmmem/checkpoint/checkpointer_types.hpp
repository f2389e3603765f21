/// @file
/// What an `async_checkpointer` is set up with, and what it gives: options, counters, and the guard of a
/// snapshot.
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
  /// Copied, checked and written at once; has a checksum. A ring of less than two takes smaller ones.
  std::uint64_t chunk_bytes = std::uint64_t{4} << 20;
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
  friend class detail::checkpointer_core;
  snapshot_guard(snapshot_gate& gate, commit_ticket ticket, std::shared_ptr<snapshot_gate> reading) noexcept
      : gate_(&gate), reading_(std::move(reading)), ticket_(std::move(ticket)) {}

  [[nodiscard]] snapshot_gate* staging() const noexcept { return reading_ ? reading_.get() : gate_; }

  snapshot_gate* gate_;
  std::shared_ptr<snapshot_gate> reading_;  // of a stable view: frozen until it has been read; else null
  commit_ticket ticket_;
};

}  // namespace v0
}  // namespace llmmem
