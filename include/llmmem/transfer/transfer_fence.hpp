/// @file
/// `transfer_fence`: the fence of an operation that can fail, and the board that records its outcome.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/atomic_array.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/fence.hpp>
#include <llmmem/transfer/errors.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

namespace llmmem {
inline namespace v0 {

class transfer_board;

/// The fence of an operation that may fail. Sixteen bytes, trivially copyable.
///
/// It has passed when the operation is complete, successful or not: `outcome()` returns the result, any
/// number of times and to any thread.
///
/// @par Thread safety   any number of threads may ask and wait on copies of one fence.
class transfer_fence {
 public:
  /// Constructs a fence that has passed without failure.
  constexpr transfer_fence() noexcept = default;

  /// Whether the operation is complete. One acquire load.
  [[nodiscard]] bool ready() const noexcept;

  /// Blocks until the operation is complete; a queue without its own thread does the work in the meantime.
  /// @throws io_error  when it failed: operation, path, offset, bytes and errno.
  void wait() const;

  /// As `wait`, but returns what it would throw.
  result<void> settled() const noexcept;

  /// As `settled`, for the last caller: the failure is forgotten, and no longer counts among those kept. From
  /// then on every copy of the fence reports success.
  result<void> conclude() const noexcept;

  /// Returns the outcome without waiting: `errc::not_finished` while it is in flight.
  [[nodiscard]] result<void> outcome() const noexcept;

  friend constexpr bool operator==(const transfer_fence&, const transfer_fence&) noexcept = default;

 private:
  friend class transfer_board;
  constexpr transfer_fence(transfer_board* board, std::uint32_t slot, std::uint32_t generation) noexcept
      : board_(board), slot_(slot), generation_(generation) {}

  transfer_board* board_ = nullptr;
  std::uint32_t slot_ = 0;
  std::uint32_t generation_ = 0;
};

/// Records the operations of one queue: running, or complete with their outcomes. For authors of queues.
///
/// A slot is reused for the next operation as soon as its own is complete: an older fence then sees another
/// generation and has passed. Failures are kept separately, `max_failures` of them, until `clear_failures`,
/// so that none is forgotten while it may still be queried: when that many are kept, `begin` refuses. (A
/// fence kept for 2^32 later operations of its slot is confused with that of the last.)
///
/// @par Thread safety   fences: any. `begin` and `finish` are called under the queue's own lock.
/// @par Complexity      O(1); a query of a completed operation, while failures are kept, O(failures).
class transfer_board {
 public:
  /// Waits until `awaited` is ready, or for a while: called by the waiting thread, when the queue has no
  /// thread.
  using drive_function = void (*)(void* context, const transfer_fence& awaited) noexcept;

  transfer_board(std::uint32_t operations, std::uint32_t max_failures, const metadata_source& metadata)
      : slots_(operations, 0, metadata, "transfer_board: operations"),
        free_(operations, metadata, "transfer_board: free slots"),
        failures_(std::uint64_t{max_failures} + operations, metadata, "transfer_board: failures"),
        max_failures_(max_failures) {
    for (std::uint32_t i = 0; i < operations; ++i)
      free_[i] = operations - 1 - i;
    free_count_ = operations;
  }
  transfer_board(const transfer_board&) = delete;
  transfer_board& operator=(const transfer_board&) = delete;

  /// Makes waiting threads call `drive(context, fence)` instead of sleeping.
  void driven_by(drive_function drive, void* context) noexcept {
    drive_ = drive;
    context_ = context;
  }

  /// Returns a slot for a new operation. `errc::table_full` when there is none, `errc::failures_kept` when no
  /// further failure could be kept.
  [[nodiscard]] result<std::uint32_t> begin(const char* where) noexcept {
    if (free_count_ == 0) return failure{.code = errc::table_full, .wanted = 1, .found = 0, .where = where};
    if (failures() >= max_failures_) {
      return failure{.code = errc::failures_kept, .found = failures(), .where = where};
    }
    const std::uint32_t slot = free_[--free_count_];
    const std::atomic_ref<std::uint64_t> word = slots_[slot];
    // Release: a thread that sees this generation sees the outcome of the previous one.
    word.store(word.load(std::memory_order_relaxed) + 1, std::memory_order_release);
    return slot;
  }

  [[nodiscard]] transfer_fence fence(std::uint32_t slot) noexcept {
    return {this, slot, generation_of(slots_[slot].load(std::memory_order_relaxed))};
  }

  /// Marks the operation in `slot` complete. Wakes the threads that wait for it.
  /// @pre it runs.
  void finish(std::uint32_t slot, const failure& why) noexcept {
    const std::atomic_ref<std::uint64_t> word = slots_[slot];
    const std::uint64_t running = word.load(std::memory_order_relaxed);
    if (why.code != errc::ok) keep({slot, generation_of(running), why});
    word.store(running + 1, std::memory_order_release);
    word.notify_all();
    free_[free_count_++] = slot;
  }

  /// Whether `f` belongs to this board; and the slot of its operation.
  [[nodiscard]] bool gave(const transfer_fence& f) const noexcept { return f.board_ == this; }
  [[nodiscard]] static std::uint32_t slot_of(const transfer_fence& f) noexcept { return f.slot_; }

  /// The number of operations in flight.
  [[nodiscard]] std::uint32_t running() const noexcept {
    return static_cast<std::uint32_t>(slots_.size()) - free_count_;
  }

  /// Bytes of its tables.
  [[nodiscard]] std::uint64_t metadata_bytes() const noexcept {
    return slots_.bytes() + free_.bytes() + failures_.bytes();
  }

  /// The number of failures kept now.
  [[nodiscard]] std::uint32_t failures() const noexcept {
    return failure_count_.load(std::memory_order_relaxed);
  }

  /// Forgets all kept failures: see `transfer_fence::conclude` for one. Fences of those operations report
  /// success from then on. Call it when all interested threads have read them.
  void clear_failures() noexcept {
    const std::scoped_lock lock(failure_mutex_);
    failure_count_.store(0, std::memory_order_relaxed);
  }

 private:
  friend class transfer_fence;

  struct kept_failure {
    std::uint32_t slot = 0;
    std::uint32_t generation = 0;
    failure why;
  };

  // A word counts beginnings and ends: odd while an operation runs, its generation in the higher bits.
  [[nodiscard]] static constexpr std::uint32_t generation_of(std::uint64_t word) noexcept {
    return static_cast<std::uint32_t>(word >> 1);
  }
  [[nodiscard]] static constexpr bool runs(std::uint64_t word, std::uint32_t generation) noexcept {
    return (word & 1) != 0 && generation_of(word) == generation;
  }

  void keep(const kept_failure& failed) noexcept {
    const std::scoped_lock lock(failure_mutex_);
    const std::uint32_t count = failure_count_.load(std::memory_order_relaxed);
    failures_[count] = failed;  // space: those kept at the last `begin`, and all that run
    failure_count_.store(count + 1, std::memory_order_relaxed);
  }

  [[nodiscard]] result<void> failure_of(std::uint32_t slot, std::uint32_t generation) noexcept {
    if (failure_count_.load(std::memory_order_relaxed) == 0) return {};
    const std::scoped_lock lock(failure_mutex_);
    const std::uint32_t count = failure_count_.load(std::memory_order_relaxed);
    for (std::uint32_t i = 0; i < count; ++i) {
      const kept_failure& kept = failures_[i];
      if (kept.slot == slot && kept.generation == generation) return kept.why;
    }
    return {};
  }

  [[nodiscard]] result<void> take_failure_of(std::uint32_t slot, std::uint32_t generation) noexcept {
    if (failure_count_.load(std::memory_order_relaxed) == 0) return {};
    const std::scoped_lock lock(failure_mutex_);
    const std::uint32_t count = failure_count_.load(std::memory_order_relaxed);
    for (std::uint32_t i = 0; i < count; ++i) {
      const kept_failure kept = failures_[i];
      if (kept.slot != slot || kept.generation != generation) continue;
      failures_[i] = failures_[count - 1];
      failure_count_.store(count - 1, std::memory_order_relaxed);
      return kept.why;
    }
    return {};
  }

  detail::atomic_array<std::uint64_t> slots_;
  detail::fixed_array<std::uint32_t> free_;
  std::uint32_t free_count_ = 0;
  detail::fixed_array<kept_failure> failures_;
  std::uint32_t max_failures_;
  std::atomic<std::uint32_t> failure_count_{0};
  std::mutex failure_mutex_;
  drive_function drive_ = nullptr;
  void* context_ = nullptr;
};

inline bool transfer_fence::ready() const noexcept {
  return board_ == nullptr ||
         !transfer_board::runs(board_->slots_[slot_].load(std::memory_order_acquire), generation_);
}

inline result<void> transfer_fence::outcome() const noexcept {
  if (board_ == nullptr) return {};
  if (!ready()) return failure{.code = errc::not_finished, .where = "transfer_fence"};
  return board_->failure_of(slot_, generation_);
}

inline result<void> transfer_fence::settled() const noexcept {
  if (board_ == nullptr) return {};
  const std::atomic_ref<std::uint64_t> word = board_->slots_[slot_];
  std::uint64_t seen = word.load(std::memory_order_acquire);
  while (transfer_board::runs(seen, generation_)) {
    if (board_->drive_ != nullptr) {
      board_->drive_(board_->context_, *this);
    } else {
      word.wait(seen, std::memory_order_acquire);
    }
    seen = word.load(std::memory_order_acquire);
  }
  return board_->failure_of(slot_, generation_);
}

inline result<void> transfer_fence::conclude() const noexcept {
  const result<void> how = settled();
  if (board_ != nullptr && !how) static_cast<void>(board_->take_failure_of(slot_, generation_));
  return how;
}

inline void transfer_fence::wait() const {
  settled().value();
}

static_assert(fence<transfer_fence>);

}  // namespace v0
}  // namespace llmmem
