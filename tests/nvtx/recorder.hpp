/// @file
/// A profiler that writes down the ranges of this program: names, payloads and nesting.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace llmmem_tests {

struct recorded_range {
  std::string domain;
  std::string name;
  std::uint64_t bytes = 0;
  bool has_ended = false;
};

/// Returns the ranges since the last call, in the order of their beginnings; those of all threads.
std::vector<recorded_range> take_ranges();

}  // namespace llmmem_tests
