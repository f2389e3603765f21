/// @file
/// `fence_loop`: completes operations when the fences that they wait for have passed, on a thread of the
/// caller.
#pragma once

#include <llmmem/config.hpp>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <type_traits>
#include <utility>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// An operation that a loop completes. Embedded in the operation state of a sender, so that `start`
/// allocates nothing.
struct loop_task {
  using passed_function = bool (*)(loop_task&) noexcept;
  using complete_function = void (*)(loop_task&) noexcept;

  loop_task(passed_function passed_by, complete_function complete_by) noexcept
      : passed(passed_by), complete(complete_by) {}
  loop_task(const loop_task&) = delete;
  loop_task& operator=(const loop_task&) = delete;

  loop_task* next = nullptr;
  passed_function passed;      ///< whether `complete` may be called
  complete_function complete;  ///< may end the operation state
};

/// Tasks in the order in which they started.
struct loop_tasks {
  loop_task* first = nullptr;
  loop_task* last = nullptr;

  void append(loop_task& task) noexcept {
    task.next = nullptr;
    (first == nullptr ? first : last->next) = &task;
    last = &task;
  }
  void append(loop_tasks other) noexcept {
    if (other.first == nullptr) return;
    (first == nullptr ? first : last->next) = other.first;
    last = other.last;
  }
};

}  // namespace detail

/// Completes senders when the fences that they wait for have passed. Fences have no callbacks, so a thread of
/// the caller polls: it calls `run`, or `poll` from a loop of its own.
///
///     fence_loop loop;
///     std::jthread polls([&] { loop.run(); });
///     auto step = submit(loop, [&] { return queue.start(read_from(file, offset, bytes)); })
///               | stdexec::then([&] { use(bytes); });
///     stdexec::sync_wait(std::move(step));            // throws io_error if the read fails
///     loop.finish();
///
/// Every continuation runs on the thread that polls, including those of work that could not start; so a
/// continuation never runs inside `start`, and needs no lock against others of its loop. The loop is a
/// scheduler as well (`get_scheduler`).
///
/// No GPU scheduler: stdexec's (nvexec) needs nvc++. Work on a device is submitted to its queue, and the
/// queue's fence completes the sender. Work of one stream that waits for another needs no sender:
/// `device_fence::hold` does that without the host.
///
/// @par Thread safety   any number of threads start operations, ask and call `finish`; one thread at a time
///      polls or runs. A continuation must not wait for a sender of its loop.
/// @par Complexity      a start O(1), one lock; a poll asks each fence that has not passed, in the order of
///      starts: for a device one query of its driver each. No allocation.
/// @par What waits      `run`. While fences are pending it sleeps for at most `longest_nap_ns`, by which a
///      continuation may be late; it sleeps until the next start when none is.
/// @par Errors          nothing throws. A loop that ends while operations are pending ends the program
///      (`std::terminate`), as stdexec's `run_loop` does: their memory may be in use.
class fence_loop {
 public:
  class scheduler;

  /// The longest that `run` sleeps between two polls.
  static constexpr std::uint64_t longest_nap_ns = 50'000;

  fence_loop() noexcept = default;
  fence_loop(const fence_loop&) = delete;
  fence_loop& operator=(const fence_loop&) = delete;
  ~fence_loop() {
    if (pending() != 0) std::terminate();
  }

  [[nodiscard]] scheduler get_scheduler() noexcept;

  /// Completes every operation whose fence has passed, in the order of starts, and returns how many.
  /// Operations that a continuation starts are asked at the next call. Inside a continuation it returns 0.
  std::size_t poll() noexcept {
    if (polling_) return 0;
    polling_ = true;
    take_started();
    detail::loop_tasks passed = take_passed();
    std::size_t completed = 0;
    while (passed.first != nullptr) {
      detail::loop_task& task = *passed.first;
      passed.first = task.next;  // before `complete`, which may end the task
      task.complete(task);
      ++completed;
    }
    pending_.fetch_sub(completed, std::memory_order_acq_rel);
    polling_ = false;
    return completed;
  }

  /// Polls until `finish` was called and nothing is pending.
  void run() noexcept {
    run([]() noexcept {});
  }
  /// As above, and calls `progress` before each poll: for queues that progress only when they are called
  /// (`file_queue` with `driven_by::waiters`: its `poll`).
  template <class Progress>
    requires std::is_nothrow_invocable_v<Progress&>
  void run(Progress progress) noexcept {
    std::uint64_t nap_ns = shortest_nap_ns;
    while (true) {
      progress();
      if (poll() != 0) {
        nap_ns = shortest_nap_ns;
        continue;
      }
      std::unique_lock lock(mutex_);
      const auto has_news = [&] { return started_.first != nullptr || (finishing_ && pending() == 0); };
      if (pending() == 0) {
        changed_.wait(lock, has_news);
      } else {
        changed_.wait_for(lock, std::chrono::nanoseconds(nap_ns), has_news);
        nap_ns = nap_ns * 2 < longest_nap_ns ? nap_ns * 2 : longest_nap_ns;
      }
      if (started_.first == nullptr && finishing_ && pending() == 0) return;
    }
  }

  /// Makes `run` return as soon as nothing is pending. Operations may still be started until then.
  void finish() noexcept {
    // Notifies under the lock: `run` may return, and the loop end, as soon as the lock is free.
    const std::scoped_lock lock(mutex_);
    finishing_ = true;
    changed_.notify_all();
  }

  /// Returns how many operations have started and are not complete.
  [[nodiscard]] std::size_t pending() const noexcept { return pending_.load(std::memory_order_acquire); }

  /// Adds an operation, which `poll` completes. For operation states.
  void add(detail::loop_task& task) noexcept {
    const std::scoped_lock lock(mutex_);
    pending_.fetch_add(1, std::memory_order_acq_rel);
    started_.append(task);
    changed_.notify_all();
  }

 private:
  static constexpr std::uint64_t shortest_nap_ns = 1'000;

  void take_started() noexcept {
    const std::scoped_lock lock(mutex_);
    waiting_.append(std::exchange(started_, {}));
  }
  /// Takes the tasks that have passed out of those that wait.
  [[nodiscard]] detail::loop_tasks take_passed() noexcept {
    detail::loop_tasks passed;
    detail::loop_tasks left;
    for (detail::loop_task* task = waiting_.first; task != nullptr;) {
      detail::loop_task* const next = task->next;
      (task->passed(*task) ? passed : left).append(*task);
      task = next;
    }
    waiting_ = left;
    return passed;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  detail::loop_tasks started_;  // under the lock
  bool finishing_ = false;      // under the lock
  std::atomic<std::size_t> pending_{0};
  detail::loop_tasks waiting_;  // of the polling thread
  bool polling_ = false;        // of the polling thread
};

}  // namespace v0
}  // namespace llmmem
