/// @file
/// A queue of waiting chunks, the oldest first, which its owner walks repeatedly.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/metadata.hpp>

#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// A queue of slots with space for each slot once; the caller knows which slots are in it.
///
/// @par Complexity      `push_back` O(1), the others O(size). No allocation after construction.
/// @par Thread safety   one thread at a time.
/// @par Errors          the constructor's; nothing else fails.
class slot_queue {
 public:
  class walk;

  /// @param what  names the queue in the error if there is no memory for it.
  slot_queue(std::uint64_t capacity, const metadata_source& source, const char* what)
      : slots_(capacity, source, what) {}

  [[nodiscard]] bool empty() const noexcept { return count_ == 0; }
  [[nodiscard]] std::uint32_t size() const noexcept { return count_; }
  [[nodiscard]] std::uint32_t operator[](std::uint32_t i) const noexcept { return slots_[i]; }
  [[nodiscard]] std::size_t bytes() const noexcept { return slots_.bytes(); }

  /// @pre `slot` is not in it.
  void push_back(std::uint32_t slot) noexcept { slots_[count_++] = slot; }
  /// Pushes `slot` before all others. @pre `slot` is not in it.
  void push_front(std::uint32_t slot) noexcept {
    for (std::uint32_t i = count_++; i > 0; --i)
      slots_[i] = slots_[i - 1];
    slots_[0] = slot;
  }
  /// Changes nothing if `slot` is not in it.
  void take_out(std::uint32_t slot) noexcept;

 private:
  fixed_array<std::uint32_t> slots_;
  std::uint32_t count_ = 0;
};

/// Walks a queue once and takes out some slots; the rest stays in order, also after an exception. The owner
/// pushes nothing during a walk.
class slot_queue::walk {
 public:
  explicit walk(slot_queue& queue) noexcept : queue_(queue), end_(queue.count_) {}
  walk(const walk&) = delete;
  walk& operator=(const walk&) = delete;
  ~walk() {
    while (has_next())
      static_cast<void>(next());
    queue_.count_ = kept_;
  }
  [[nodiscard]] bool has_next() const noexcept { return next_ != end_; }
  std::uint32_t next() noexcept { return queue_.slots_[kept_++] = queue_.slots_[next_++]; }
  /// Takes the slot of the last `next` out of the queue.
  void take_out() noexcept { --kept_; }

 private:
  slot_queue& queue_;
  std::uint32_t end_;
  std::uint32_t next_ = 0;
  std::uint32_t kept_ = 0;
};

inline void slot_queue::take_out(std::uint32_t slot) noexcept {
  for (walk each(*this); each.has_next();) {
    if (each.next() == slot) each.take_out();
  }
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
