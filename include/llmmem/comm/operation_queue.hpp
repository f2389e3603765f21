/// @file
/// `operation_queue`: a thread that communicates with the other ranks, so that gathers and sums overlap with
/// computing.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/result.hpp>

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// Runs operations one after the other, in the order in which they were put, on its own thread. A transport
/// is for one thread at a time: from the first operation on it belongs to this thread, and other threads use
/// it through this queue. Collectives match among ranks by their order: put them in the same order on all
/// ranks.
///
///     operation_queue queue;
///     comm::operation gather([&] { return gather_next(); });
///     queue.put(gather);
///     compute();
///     queue.wait(gather).value();
///     queue.run([&] { return gradients.reduce_scatter(sums, sum_f32); }).value();   // put and wait
///
/// The wait for an operation returns its failure and rethrows its exception. The operations after it still
/// run: on a revoked transport they fail at once.
///
/// @par Complexity      one lock to put, to begin, to end and to wait; nothing is allocated.
/// @par Thread safety   any thread may put and wait; each operation one at a time.
/// @par Errors          the constructor throws `std::system_error` if no thread can be started.
class operation_queue {
 public:
  /// The queue's view of an operation: see `operation`.
  class entry {
   public:
    entry(const entry&) = delete;
    entry& operator=(const entry&) = delete;

   protected:
    using function = result<void> (*)(entry& self);
    explicit entry(function call) noexcept : call_(call) {}
    ~entry() = default;

   private:
    friend class operation_queue;
    function call_;
    entry* next_ = nullptr;
    bool is_in_queue_ = false;  // put, and not done
    result<void> outcome_{};
    std::exception_ptr thrown_{};
  };

  operation_queue() : thread_([this] { serve(); }) {}
  operation_queue(const operation_queue&) = delete;
  operation_queue& operator=(const operation_queue&) = delete;
  /// Runs the remaining operations, as the other ranks do, and ends.
  ~operation_queue() {
    {
      const std::lock_guard held(mutex_);
      is_over_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  /// Queues an operation after all earlier ones. It must stay in place until it is done. @pre it is not in
  /// the queue
  void put(entry& one) noexcept {
    {
      const std::lock_guard held(mutex_);
      one.next_ = nullptr;
      one.is_in_queue_ = true;
      (last_ == nullptr ? first_ : last_->next_) = &one;
      last_ = &one;
    }
    changed_.notify_all();
  }
  /// Waits for an operation and returns its result; success for one that was never put.
  result<void> wait(entry& one) {
    std::unique_lock held(mutex_);
    changed_.wait(held, [&] { return !one.is_in_queue_; });
    if (one.thrown_) std::rethrow_exception(std::exchange(one.thrown_, nullptr));
    return one.outcome_;
  }
  /// Whether `wait` would return at once.
  [[nodiscard]] bool is_done(const entry& one) const noexcept {
    const std::lock_guard held(mutex_);
    return !one.is_in_queue_;
  }

  /// Runs `work`, a function that returns `result<void>`, after all earlier operations, and waits for it.
  template <class Work>
  result<void> run(Work&& work);

 private:
  void serve() noexcept {
    std::unique_lock held(mutex_);
    for (;;) {
      changed_.wait(held, [&] { return is_over_ || first_ != nullptr; });
      if (first_ == nullptr) return;
      entry& now = *first_;
      held.unlock();
      result<void> outcome;
      std::exception_ptr thrown;
      try {
        outcome = now.call_(now);
      } catch (...) {
        thrown = std::current_exception();
      }
      held.lock();
      first_ = now.next_;
      if (first_ == nullptr) last_ = nullptr;
      now.outcome_ = outcome;
      now.thrown_ = std::move(thrown);
      now.is_in_queue_ = false;
      changed_.notify_all();
    }
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  entry* first_ = nullptr;
  entry* last_ = nullptr;
  bool is_over_ = false;
  std::thread thread_;  // last, because it uses the others
};

namespace comm {

/// A function that returns `result<void>`, for the queue to run. Wait for it before it is destroyed.
template <class Work>
class operation : public operation_queue::entry {
 public:
  explicit operation(Work work)
      : entry([](entry& self) -> result<void> { return static_cast<operation&>(self).work_(); }),
        work_(std::move(work)) {}

 private:
  Work work_;
};

}  // namespace comm

template <class Work>
using operation [[deprecated("its name is comm::operation")]] = comm::operation<Work>;

template <class Work>
result<void> operation_queue::run(Work&& work) {
  const auto call = [&work]() -> result<void> { return work(); };
  comm::operation<decltype(call)> one(call);
  put(one);
  return wait(one);
}

}  // namespace v0
}  // namespace llmmem
