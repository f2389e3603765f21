/// @file
/// `snapshot_gate`: state is changed or copied, never both; code that changes it presents a permit.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <time.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>

namespace llmmem {
inline namespace v0 {

class snapshot_gate;

/// The right to change the state that a gate protects, while the permit lives. Only `snapshot_gate::mutate`
/// makes one, so a caller must wait for snapshots before it can call a function that takes one:
///
///     void optimizer::step(const mutation_permit& permit);
class [[nodiscard]] mutation_permit {
 public:
  mutation_permit(mutation_permit&& other) noexcept : gate_(std::exchange(other.gate_, nullptr)) {}
  mutation_permit& operator=(mutation_permit&&) = delete;
  ~mutation_permit();

  /// Whether `gate` made the permit. False for a moved-from permit.
  [[nodiscard]] bool is_of(const snapshot_gate& gate) const noexcept { return gate_ == &gate; }

 private:
  friend class snapshot_gate;
  explicit mutation_permit(snapshot_gate& gate) noexcept : gate_(&gate) {}

  snapshot_gate* gate_;
};

/// Separates changes of a state from copies of it. Any number of copies may be in progress, or any number of
/// permits may live, but not both.
///
/// A permit waits for copies; a copy does not wait for permits. The thread that takes the permits begins the
/// copy between two steps; a copy that meets a permit is a defect of the program, reported by an exception.
///
/// @par Complexity      O(1), without system calls if no thread waits.
/// @par Thread safety   `thaw`, `is_frozen` and `waited_ns` from any thread; all other calls from one thread.
class snapshot_gate {
 public:
  /// A waiting thread calls this function to do part of the work for which it waits. Without one, it sleeps.
  using pump_function = void (*)(void* context);

  snapshot_gate() noexcept = default;
  snapshot_gate(const snapshot_gate&) = delete;
  snapshot_gate& operator=(const snapshot_gate&) = delete;

  /// Waits until no copy is in progress. The caller may then change the state while the permit lives.
  mutation_permit mutate() noexcept {
    wait();
    permits_ += 1;
    return mutation_permit(*this);
  }

  /// Begins a copy: `mutate` waits until as many copies have ended.
  /// @param pump  see `pump_function`; used for this copy until it ends.
  /// @throws argument_error  while a permit is alive.
  void freeze(pump_function pump = nullptr, void* context = nullptr) {
    if (permits_ != 0) {
      throw argument_error(
          "snapshot_gate: a snapshot begins while the state is being changed: " + std::to_string(permits_) +
          " permits are alive; begin it between two steps, or end them first");
    }
    pump_ = pump;
    context_ = context;
    copies_.fetch_add(1, std::memory_order_relaxed);
  }
  /// Ends a copy, whose reads are all done.
  void thaw() noexcept {
    if (copies_.fetch_sub(1, std::memory_order_release) == 1) copies_.notify_all();
  }

  [[nodiscard]] bool is_frozen() const noexcept { return copies_.load(std::memory_order_acquire) != 0; }

  /// Returns when no copy is in progress, without taking a permit.
  void wait() noexcept {
    if (!is_frozen()) return;
    const std::uint64_t began = now_ns();
    for (std::uint32_t seen = copies_.load(std::memory_order_acquire); seen != 0;
         seen = copies_.load(std::memory_order_acquire)) {
      if (pump_ != nullptr) {
        pump_(context_);
      } else {
        copies_.wait(seen, std::memory_order_acquire);
      }
    }
    waited_ns_.fetch_add(now_ns() - began, std::memory_order_relaxed);
  }

  /// Returns the total time that `mutate` and `wait` have waited.
  [[nodiscard]] std::uint64_t waited_ns() const noexcept {
    return waited_ns_.load(std::memory_order_relaxed);
  }

 private:
  friend class mutation_permit;

  [[nodiscard]] static std::uint64_t now_ns() noexcept {
    timespec now{};
    ::clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(now.tv_nsec);
  }

  std::atomic<std::uint32_t> copies_{0};
  std::uint32_t permits_ = 0;
  std::atomic<std::uint64_t> waited_ns_{0};
  pump_function pump_ = nullptr;
  void* context_ = nullptr;
};

inline mutation_permit::~mutation_permit() {
  if (gate_ != nullptr) gate_->permits_ -= 1;
}

/// A value that any code can read, but only code with a permit of its gate can change.
///
///     guarded<weights> state(gate, ...);
///     state.read();                      // const
///     const mutation_permit permit = gate.mutate();    // waits for snapshots; nothing else makes one
///     state.write(permit).scale(0.5F);
///
/// @par Thread safety   that of the value.
template <class T>
class guarded {
 public:
  template <class... Args>
  explicit guarded(snapshot_gate& gate, Args&&... value)
      : gate_(&gate), value_(std::forward<Args>(value)...) {}

  [[nodiscard]] const T& read() const noexcept { return value_; }
  /// The caller may use the reference while the permit lives.
  /// @throws argument_error  for a permit of another gate.
  [[nodiscard]] T& write(const mutation_permit& permit) {
    if (!permit.is_of(*gate_))
      throw argument_error("guarded: the permit is of another gate, or was moved from");
    return value_;
  }
  /// Deleted, because a temporary permit ends before the reference is used.
  T& write(mutation_permit&& permit) = delete;
  [[nodiscard]] snapshot_gate& gate() const noexcept { return *gate_; }

 private:
  snapshot_gate* gate_;
  T value_;
};

}  // namespace v0
}  // namespace llmmem
