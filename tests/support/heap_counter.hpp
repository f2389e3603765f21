/// @file
/// Counts what goes through the global heap of the test program.
#pragma once

#include <cstdint>

namespace llmmem_tests {

/// Calls of `operator new` in this program so far, in every form.
[[nodiscard]] std::uint64_t heap_allocations() noexcept;

}  // namespace llmmem_tests
