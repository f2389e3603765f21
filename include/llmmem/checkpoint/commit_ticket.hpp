/// @file
/// `commit_ticket`: the outcome of a requested checkpoint.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/monotonic.hpp>

#include <pthread.h>
#include <time.h>

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// The progress of a checkpoint. All values except `pending` are final.
enum class commit_status : std::uint8_t {
  pending,               ///< being copied or written
  committed,             ///< the checkpoint survives any crash
  not_committed,         ///< the checkpoint does not exist, and never will
  durability_uncertain,  ///< if the checkpoint exists, it is complete, but the system did not confirm that it
                         ///< exists or lasts
};

/// Returns the status in words.
[[nodiscard]] constexpr std::string_view to_string(commit_status status) noexcept {
  switch (status) {
    case commit_status::pending:
      return "pending";
    case commit_status::committed:
      return "committed";
    case commit_status::not_committed:
      return "not committed";
    case commit_status::durability_uncertain:
      return "durability uncertain";
  }
  return "unknown";
}

namespace detail {

/// The state that the tickets of one checkpoint share with the writer.
struct commit_record {
  explicit commit_record(std::uint64_t of_step) noexcept : step(of_step) {}

  void settle(commit_status how, std::string reason) {
    const std::scoped_lock lock(mutex);
    if (status != commit_status::pending) return;
    status = how;
    why = std::move(reason);
    settled.notify_all();
  }

  std::uint64_t step;
  std::mutex mutex{};
  std::condition_variable settled{};
  commit_status status = commit_status::pending;
  std::string why{};
  std::uint64_t generation = 0;
  /// For a state that only its owner can copy: the owner calls this while it waits. Null once the state is
  /// copied.
  void (*stage)(void* checkpointer, std::uint64_t until) = nullptr;
  void* checkpointer = nullptr;
  ::pthread_t owner{};
};

}  // namespace detail

/// A requested checkpoint; copies refer to the same one. Outlives the checkpointer.
///
/// @par Thread safety   any threads.
class commit_ticket {
 public:
  /// A ticket without a checkpoint: not committed.
  commit_ticket() = default;
  explicit commit_ticket(std::shared_ptr<detail::commit_record> record) noexcept
      : record_(std::move(record)) {}

  [[nodiscard]] commit_status status() const {
    if (record_ == nullptr) return commit_status::not_committed;
    const std::scoped_lock lock(record_->mutex);
    return record_->status;
  }
  [[nodiscard]] bool is_committed() const { return status() == commit_status::committed; }
  /// Returns why the checkpoint is not committed, or not certainly; empty if there is no problem.
  [[nodiscard]] std::string why() const {
    if (record_ == nullptr) return "no checkpoint was requested";
    const std::scoped_lock lock(record_->mutex);
    return record_->why;
  }
  [[nodiscard]] std::uint64_t step() const noexcept { return record_ == nullptr ? 0 : record_->step; }
  /// Returns the checkpoint's generation; 0 until it has one.
  [[nodiscard]] std::uint64_t generation() const {
    if (record_ == nullptr) return 0;
    const std::scoped_lock lock(record_->mutex);
    return record_->generation;
  }

  /// Waits until the status is final, and returns it.
  commit_status wait() const { return wait_for(forever); }
  /// As `wait`, but returns `pending` after `limit_ns`.
  commit_status wait_for(std::uint64_t limit_ns) const {
    if (record_ == nullptr) return commit_status::not_committed;
    detail::commit_record& record = *record_;
    const std::uint64_t began = detail::monotonic_ns();
    std::unique_lock lock(record.mutex);
    while (record.status == commit_status::pending) {
      const std::uint64_t waited = detail::monotonic_ns() - began;
      if (waited >= limit_ns) break;
      if (record.stage != nullptr && ::pthread_equal(record.owner, ::pthread_self()) != 0) {
        void (*const stage)(void*, std::uint64_t) = record.stage;
        lock.unlock();
        stage(record.checkpointer, limit_ns > forever - began ? forever : began + limit_ns);
        lock.lock();
        continue;
      }
      // Waits at most as long as a clock can be set for, and then checks again.
      const std::uint64_t left = limit_ns - waited < day_ns ? limit_ns - waited : day_ns;
      record.settled.wait_for(lock, std::chrono::nanoseconds(static_cast<std::int64_t>(left)));
    }
    return record.status;
  }
  static constexpr std::uint64_t forever = ~std::uint64_t{0};

 private:
  static constexpr std::uint64_t day_ns = std::uint64_t{86'400'000'000'000};

  std::shared_ptr<detail::commit_record> record_;
};

}  // namespace v0
}  // namespace llmmem
