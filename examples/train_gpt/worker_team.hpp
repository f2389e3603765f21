/// @file
/// `worker_team`: threads that divide numbered work into fixed slices.
#pragma once

#include <llmmem/error.hpp>

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace train_gpt {

/// A fixed number of threads, including the caller's. The assignment of work depends only on counts, never on
/// timing.
///
/// @par Thread safety   one caller at a time.
/// @par Errors          the constructor throws `argument_error`; work must not throw.
class worker_team {
 public:
  static constexpr std::size_t most = 256;

  /// @param threads  1 to `most`; 1 starts none.
  explicit worker_team(std::size_t threads) {
    if (threads < 1 || threads > most) {
      throw llmmem::argument_error("worker_team: " + std::to_string(threads) +
                                   " threads; there may be 1 to " + std::to_string(most));
    }
    try {
      for (std::size_t worker = 1; worker < threads; ++worker)
        threads_.emplace_back([this, worker] { serve(worker); });
    } catch (...) {
      stop();
      throw;
    }
  }
  worker_team(const worker_team&) = delete;
  worker_team& operator=(const worker_team&) = delete;
  ~worker_team() { stop(); }

  [[nodiscard]] std::size_t size() const noexcept { return threads_.size() + 1; }

  /// Makes the caller of `slices` call `call(context)` at the beginning of each: a moment to progress
  /// transfers during long computations. It must be quick. Null: nothing.
  void before_slices(void (*call)(void*) noexcept, void* context) noexcept {
    before_ = call;
    context_ = context;
  }

  /// Cuts 0 to `count` into at most `size()` slices whose lengths, except the last one's, are multiples of
  /// `grain`, and calls `work(first, end, worker)` once for each, at the same time. Returns when all are
  /// done.
  template <class Work>
  void slices(std::size_t count, std::size_t grain, Work&& work) {
    if (before_ != nullptr) before_(context_);
    const std::size_t grains = (count + grain - 1) / grain;
    const std::size_t share = std::max<std::size_t>((grains + size() - 1) / size(), 1) * grain;
    const auto one = [&](std::size_t worker) noexcept {
      const std::size_t first = worker * share;
      if (first < count) work(first, std::min(first + share, count), worker);
    };
    if (share >= count) {
      one(0);
    } else {
      run([](const void* what, std::size_t worker) noexcept { (*static_cast<decltype(&one)>(what))(worker); },
          &one);
    }
  }

 private:
  using task = void (*)(const void*, std::size_t) noexcept;

  void run(task call, const void* what) {
    {
      const std::lock_guard lock(mutex_);
      call_ = call;
      what_ = what;
      busy_ = threads_.size();
      ++round_;
    }
    start_.notify_all();
    call(what, 0);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [&] { return busy_ == 0; });
  }

  void serve(std::size_t worker) {
    std::uint64_t seen = 0;
    for (;;) {
      std::unique_lock lock(mutex_);
      start_.wait(lock, [&] { return stopped_ || round_ != seen; });
      if (stopped_) return;
      seen = round_;
      const task call = call_;
      const void* const what = what_;
      lock.unlock();
      call(what, worker);
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  void stop() noexcept {
    {
      const std::lock_guard lock(mutex_);
      stopped_ = true;
    }
    start_.notify_all();
    for (std::thread& each : threads_)
      each.join();
    threads_.clear();
  }

  void (*before_)(void*) noexcept = nullptr;
  void* context_ = nullptr;
  std::mutex mutex_;
  std::condition_variable start_;
  std::condition_variable done_;
  task call_ = nullptr;
  const void* what_ = nullptr;
  std::size_t busy_ = 0;
  std::uint64_t round_ = 0;
  bool stopped_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace train_gpt
