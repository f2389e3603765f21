/// @file
/// Counts what goes through the global heap of the test program, and refuses some of it.
#pragma once

#include <cstdint>

namespace llmmem_tests {

/// Calls of `operator new` in this program so far, in every form.
[[nodiscard]] std::uint64_t heap_allocations() noexcept;

/// How often a heap that has begun to refuse does.
enum class heap_refusal : std::uint8_t { once, forever };

/// For as long as it lives, `operator new` throws in threads other than the one that made it: from their
/// request number `first` on, counted from 1 over all of them. One at a time.
class short_heap {
 public:
  short_heap(std::uint64_t first, heap_refusal how) noexcept;
  short_heap(const short_heap&) = delete;
  short_heap& operator=(const short_heap&) = delete;
  ~short_heap();

  /// Requests that were refused.
  [[nodiscard]] static std::uint64_t refused() noexcept;
};

}  // namespace llmmem_tests
