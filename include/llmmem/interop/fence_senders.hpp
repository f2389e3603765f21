/// @file
/// `when_passed` and `submit`: fences and queues as senders (`std::execution`, P2300), by NVIDIA's stdexec;
/// and the scheduler of a `fence_loop`.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/interop/detail/fence_operations.hpp>
#include <llmmem/interop/fence_loop.hpp>
#include <llmmem/space/fence.hpp>

#include <stdexec/execution.hpp>

#include <concepts>
#include <exception>
#include <type_traits>
#include <utility>

namespace llmmem {
inline namespace v0 {
/// The scheduler of a loop: its work runs on the thread that polls. The loop outlives it.
class fence_loop::scheduler {
 public:
  using scheduler_concept = stdexec::scheduler_t;

  /// The sender of `schedule`.
  class sender {
   public:
    using sender_concept = stdexec::sender_t;
    using completion_signatures =
        stdexec::completion_signatures<stdexec::set_value_t(), stdexec::set_stopped_t()>;

    template <class Receiver>
    [[nodiscard]] auto connect(Receiver receiver) const noexcept {
      return detail::schedule_operation<Receiver>(*loop_, std::move(receiver));
    }
    [[nodiscard]] detail::loop_attributes get_env() const noexcept { return {loop_}; }

   private:
    friend class scheduler;
    explicit sender(fence_loop& loop) noexcept : loop_(&loop) {}
    fence_loop* loop_;
  };

  [[nodiscard]] sender schedule() const noexcept { return sender(*loop_); }
  template <class Signal>
  [[nodiscard]] scheduler query(stdexec::get_completion_scheduler_t<Signal>) const noexcept {
    return *this;
  }
  friend bool operator==(const scheduler&, const scheduler&) noexcept = default;

 private:
  friend class fence_loop;
  explicit scheduler(fence_loop& loop) noexcept : loop_(&loop) {}
  fence_loop* loop_;
};

inline fence_loop::scheduler fence_loop::get_scheduler() noexcept {
  return scheduler(*this);
}

/// The sender of `when_passed`.
template <fence F>
class passed_sender {
 public:
  using sender_concept = stdexec::sender_t;
  using completion_signatures = std::conditional_t<
      detail::reports_failure<F>,
      stdexec::completion_signatures<stdexec::set_value_t(), stdexec::set_error_t(std::exception_ptr)>,
      stdexec::completion_signatures<stdexec::set_value_t()>>;

  passed_sender(fence_loop& loop, F awaited) noexcept : loop_(&loop), fence_(std::move(awaited)) {}

  template <class Receiver>
  [[nodiscard]] auto connect(Receiver receiver) const noexcept {
    return detail::passed_operation<F, Receiver>(*loop_, fence_, std::move(receiver));
  }
  [[nodiscard]] detail::loop_attributes get_env() const noexcept { return {loop_}; }

 private:
  fence_loop* loop_;
  F fence_;
};

/// A sender that completes when `awaited` has passed: with no value, or with the exception that
/// `awaited.wait()` throws. Other copies of the fence still report a failure. The operation runs already, so
/// a stop request has no effect.
/// @par Thread safety   connect and start on any thread. The loop, and what the fence belongs to, outlive it.
template <fence F>
[[nodiscard]] passed_sender<F> when_passed(fence_loop& loop, F awaited) noexcept {
  return passed_sender<F>(loop, std::move(awaited));
}

/// Work that starts an operation: called without arguments, it returns a fence or a `result` with one.
template <class W>
concept fence_work = std::move_constructible<W> && std::invocable<W&> &&
                     (fence<std::invoke_result_t<W&>> || requires(std::invoke_result_t<W&> started) {
                       requires fence<std::remove_cvref_t<decltype(std::move(started).value())>>;
                     });

/// The sender of `submit`.
template <fence_work Work>
class submit_sender {
 public:
  using sender_concept = stdexec::sender_t;
  using completion_signatures =
      stdexec::completion_signatures<stdexec::set_value_t(), stdexec::set_error_t(std::exception_ptr),
                                     stdexec::set_stopped_t()>;

  submit_sender(fence_loop& loop, Work work) : loop_(&loop), work_(std::move(work)) {}

  template <class Receiver>
  [[nodiscard]] auto connect(Receiver receiver) && {
    return detail::submit_operation<Work, Receiver>(*loop_, std::move(work_), std::move(receiver));
  }
  template <class Receiver>
    requires std::copy_constructible<Work>
  [[nodiscard]] auto connect(Receiver receiver) const& {
    return detail::submit_operation<Work, Receiver>(*loop_, work_, std::move(receiver));
  }
  [[nodiscard]] detail::loop_attributes get_env() const noexcept { return {loop_}; }

 private:
  fence_loop* loop_;
  Work work_;
};

/// A sender that calls `work()` when it is started, on the thread that starts it, and completes when the
/// fence that `work` returned has passed. Completes with no value; with the exception that `work` throws,
/// that its refusal stands for, or that the fence reports; and stopped, without calling `work`, if a stop was
/// requested before the start. **A stop request afterwards does not end the wait**: the operation may still
/// read or write its memory, so the sender completes only when the fence has passed.
/// @par Thread safety   connect and start on any thread. The loop, and what `work` uses, outlive it.
template <fence_work Work>
[[nodiscard]] submit_sender<Work> submit(fence_loop& loop, Work work) {
  return submit_sender<Work>(loop, std::move(work));
}

}  // namespace v0
}  // namespace llmmem
