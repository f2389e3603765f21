/// @file
/// `space_stats`: the counters of every space.
#pragma once

#include <llmmem/config.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// Counters of a space.
struct space_stats {
  std::uint64_t used = 0;            ///< bytes charged to the budget now
  std::uint64_t peak = 0;            ///< most bytes charged at once
  std::uint64_t ranges = 0;          ///< live ranges
  std::uint64_t allocations = 0;     ///< ranges allocated since construction
  std::uint64_t refusals = 0;        ///< allocations refused
  std::uint64_t misuses = 0;         ///< deallocations refused
  std::uint64_t metadata_bytes = 0;  ///< bytes of bookkeeping, outside the budget
  std::uint64_t kept_bytes = 0;      ///< of `used`: deallocated, but not yet returned to the source
};

}  // namespace v0
}  // namespace llmmem
