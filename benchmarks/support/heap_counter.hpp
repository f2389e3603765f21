/// @file
/// Counts the calls of the global heap in the benchmark program.
#pragma once

#include <cstdint>

namespace llmmem_benchmarks {

/// Calls of `operator new` so far, in every form. Not of `malloc`: the glibc, mimalloc and jemalloc rows
/// measure that itself.
[[nodiscard]] std::uint64_t heap_allocations() noexcept;

/// Counts from its construction, which comes right before a timed loop.
class heap_watch {
 public:
  /// Calls of `operator new` since.
  [[nodiscard]] std::uint64_t calls() const noexcept { return heap_allocations() - before_; }

 private:
  std::uint64_t before_ = heap_allocations();
};

}  // namespace llmmem_benchmarks
