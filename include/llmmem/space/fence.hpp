/// @file
/// Fences: how an asynchronous operation reports its completion. The concept, and the fence of host threads.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/result.hpp>

#include <atomic>
#include <concepts>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

/// A point in a timeline that, once passed, stays passed. Cheap to copy: every copy is the same point.
///
/// - A default-constructed fence has passed: "nothing to wait for".
/// - `ready()` returns, without waiting, whether it has passed; everything written before it is then visible.
/// - `wait()` returns once it has. It may throw an error that the timeline reports, for example a lost
///   device.
///
/// A fence owns nothing. The timeline behind it (counter, stream, virtual clock) belongs to the code that
/// runs the operations, and must outlive its fences.
template <class F>
concept fence = std::copyable<F> && std::default_initializable<F> && requires(const F& f) {
  { f.ready() } noexcept -> std::same_as<bool>;
  f.wait();
};

/// Whether all of `fences` have passed. O(n).
template <fence F>
[[nodiscard]] bool all_ready(std::span<const F> fences) noexcept {
  for (const F& f : fences) {
    if (!f.ready()) return false;
  }
  return true;
}

/// Returns once all of `fences` have passed; throws what their `wait` throws.
template <fence F>
void wait_all(std::span<const F> fences) {
  for (const F& f : fences) {
    f.wait();
  }
}

class host_timeline;

/// A point of a `host_timeline`, or nothing to wait for. Sixteen bytes, trivially copyable.
///
/// @par Thread safety   any number of threads may ask and wait on copies of one fence.
class host_fence {
 public:
  /// Constructs a fence that has passed.
  constexpr host_fence() noexcept = default;

  /// Whether the point has passed. One acquire load.
  [[nodiscard]] bool ready() const noexcept;

  /// Blocks the calling thread until the point has passed.
  void wait() const noexcept;

  friend constexpr bool operator==(const host_fence&, const host_fence&) noexcept = default;

 private:
  friend class host_timeline;
  constexpr host_fence(const host_timeline* timeline, std::uint64_t point) noexcept
      : timeline_(timeline), point_(point) {}

  const host_timeline* timeline_ = nullptr;
  std::uint64_t point_ = 0;
};

static_assert(fence<host_fence>);

/// A counter whose points pass in order: the completion side of `host_fence`. The code that completes work
/// (an I/O thread, a copy pool, a test) owns one; it is the host's form of a timeline semaphore.
///
///     host_timeline done;
///     host_fence copied = done.issue();              // give this to waiters
///     ... worker: copy, then done.pass(copied) ...
///     copied.wait();
///
/// Points pass in the order they were issued: passing one passes all before it. Work that completes in any
/// order needs one timeline per worker.
///
/// @par Thread safety   `issue`, `pass` and the fences may be used from any threads concurrently. The
///   timeline must outlive its fences and every call of `pass`.
/// @par Complexity      one atomic operation each; `pass` wakes the waiters.
/// @par Errors          nothing throws; `pass` of another timeline's fence is refused.
class host_timeline {
 public:
  host_timeline() noexcept = default;
  host_timeline(const host_timeline&) = delete;
  host_timeline& operator=(const host_timeline&) = delete;

  /// Returns the next point: a fence that passes when `pass` is called with it or a later one.
  [[nodiscard]] host_fence issue() noexcept {
    return {this, issued_.fetch_add(1, std::memory_order_relaxed) + 1};
  }

  /// Passes `f` and all points issued before it. A point that has already passed, or a default-constructed
  /// fence, has no effect.
  /// @return `errc::foreign_handle` when another timeline issued `f`; then nothing passes.
  result<void> pass(const host_fence& f) noexcept {
    if (f.timeline_ == nullptr) return {};
    if (f.timeline_ != this) return failure{.code = errc::foreign_handle, .where = "host_timeline"};
    std::uint64_t seen = passed_.load(std::memory_order_relaxed);
    while (seen < f.point_) {
      if (passed_.compare_exchange_weak(seen, f.point_, std::memory_order_release,
                                        std::memory_order_relaxed)) {
        passed_.notify_all();
        break;
      }
    }
    return {};
  }

  /// Points issued and passed so far; equal when nothing is in progress.
  [[nodiscard]] std::uint64_t issued() const noexcept { return issued_.load(std::memory_order_relaxed); }
  [[nodiscard]] std::uint64_t passed() const noexcept { return passed_.load(std::memory_order_acquire); }

 private:
  friend class host_fence;

  void wait_for(std::uint64_t point) const noexcept {
    std::uint64_t seen = passed();
    while (seen < point) {
      passed_.wait(seen, std::memory_order_acquire);
      seen = passed();
    }
  }

  std::atomic<std::uint64_t> issued_{0};
  std::atomic<std::uint64_t> passed_{0};
};

inline bool host_fence::ready() const noexcept {
  return timeline_ == nullptr || timeline_->passed() >= point_;
}

inline void host_fence::wait() const noexcept {
  if (timeline_ != nullptr) timeline_->wait_for(point_);
}

}  // namespace v0
}  // namespace llmmem
