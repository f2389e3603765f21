/// @file
/// The operation states of `fence_senders.hpp`.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/interop/fence_loop.hpp>
#include <llmmem/space/fence.hpp>

#include <stdexec/execution.hpp>

#include <exception>
#include <optional>
#include <type_traits>
#include <utility>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Whether waiting for a fence can report a failure.
template <fence F>
inline constexpr bool reports_failure =
    requires(const F& f) { f.settled(); } || !noexcept(std::declval<const F&>().wait());

/// Returns how the work behind a fence that has passed ended: null, or the exception.
/// `last`: no other copy of the fence asks, so its queue may forget the failure.
template <bool last, fence F>
[[nodiscard]] std::exception_ptr failure_behind(const F& fence) noexcept {
  try {
    if constexpr (last && requires { fence.conclude(); }) {
      fence.conclude().value();
    } else {
      fence.wait();
    }
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

/// The attributes of senders that complete on a loop.
struct loop_attributes {
  fence_loop* loop;

  // `Loop`, because the scheduler is defined after this: all that names it waits for the instance.
  template <class Signal, class Loop = fence_loop>
  [[nodiscard]] typename Loop::scheduler query(stdexec::get_completion_scheduler_t<Signal>) const noexcept {
    return static_cast<Loop*>(loop)->get_scheduler();
  }
};

template <class Receiver>
[[nodiscard]] bool is_stopped(const Receiver& receiver) noexcept {
  return stdexec::get_stop_token(stdexec::get_env(receiver)).stop_requested();
}

/// A task with its loop and its receiver: what all operation states here have.
template <class Receiver>
class loop_operation : public loop_task {
 public:
  using operation_state_concept = stdexec::operation_state_t;

 protected:
  loop_operation(fence_loop& loop, Receiver receiver, passed_function passed_by,
                 complete_function complete_by) noexcept
      : loop_task(passed_by, complete_by), loop_(&loop), receiver_(std::move(receiver)) {}

  void enter() noexcept { loop_->add(*this); }
  void succeed() noexcept { stdexec::set_value(std::move(receiver_)); }
  void fail(std::exception_ptr why) noexcept { stdexec::set_error(std::move(receiver_), std::move(why)); }
  void stop() noexcept { stdexec::set_stopped(std::move(receiver_)); }
  [[nodiscard]] bool stop_requested() const noexcept { return is_stopped(receiver_); }

 private:
  fence_loop* loop_;
  Receiver receiver_;
};

template <class Receiver>
class schedule_operation : public loop_operation<Receiver> {
 public:
  schedule_operation(fence_loop& loop, Receiver receiver) noexcept
      : loop_operation<Receiver>(
            loop, std::move(receiver), [](loop_task&) noexcept { return true; },
            [](loop_task& task) noexcept {
              auto& self = static_cast<schedule_operation&>(task);
              self.stop_requested() ? self.stop() : self.succeed();
            }) {}
  void start() & noexcept { this->enter(); }
};

template <fence F, class Receiver>
class passed_operation : public loop_operation<Receiver> {
 public:
  passed_operation(fence_loop& loop, F awaited, Receiver receiver) noexcept
      : loop_operation<Receiver>(
            loop, std::move(receiver),
            [](loop_task& task) noexcept { return static_cast<passed_operation&>(task).fence_.ready(); },
            [](loop_task& task) noexcept { static_cast<passed_operation&>(task).finish(); }),
        fence_(std::move(awaited)) {}
  void start() & noexcept { this->enter(); }

 private:
  void finish() noexcept {
    if constexpr (reports_failure<F>) {
      if (std::exception_ptr why = failure_behind<false>(fence_)) return this->fail(std::move(why));
    }
    this->succeed();
  }

  F fence_;
};

/// The fence in what work returns: a fence, or a `result` with one.
template <class Started>
struct started_fence {
  using type = std::remove_cvref_t<decltype(std::declval<Started>().value())>;
};
template <fence Started>
struct started_fence<Started> {
  using type = Started;
};

template <class Work, class Receiver>
class submit_operation : public loop_operation<Receiver> {
 public:
  submit_operation(fence_loop& loop, Work work,
                   Receiver receiver) noexcept(std::is_nothrow_move_constructible_v<Work>)
      : loop_operation<Receiver>(
            loop, std::move(receiver),
            [](loop_task& task) noexcept { return static_cast<submit_operation&>(task).has_ended(); },
            [](loop_task& task) noexcept { static_cast<submit_operation&>(task).finish(); }),
        work_(std::move(work)) {}

  void start() & noexcept {
    if (!this->stop_requested()) begin();
    this->enter();
  }

 private:
  void begin() noexcept {
    try {
      auto started = work_();
      if constexpr (fence<decltype(started)>) {
        fence_.emplace(std::move(started));
      } else {
        fence_.emplace(std::move(started).value());
      }
    } catch (...) {
      why_ = std::current_exception();
    }
  }
  [[nodiscard]] bool has_ended() const noexcept { return !fence_ || fence_->ready(); }
  void finish() noexcept {
    if (fence_) why_ = failure_behind<true>(*fence_);
    if (why_ != nullptr) return this->fail(std::move(why_));
    fence_ ? this->succeed() : this->stop();
  }

  Work work_;
  std::optional<typename started_fence<std::invoke_result_t<Work&>>::type> fence_;
  std::exception_ptr why_;
};

}  // namespace detail

}  // namespace v0
}  // namespace llmmem
