/// @file
/// Belady's MIN, as he said it: on a miss in a full cache, what is used last leaves.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <vector>

namespace llmmem_tests {

/// Misses of equal chunks, from what is `resident`; the one that is accessed is always brought in.
[[nodiscard]] inline std::uint64_t naive_min_misses(const std::vector<std::uint32_t>& accesses,
                                                    std::size_t capacity, std::set<std::uint32_t> resident) {
  std::uint64_t misses = 0;
  for (std::size_t i = 0; i < accesses.size(); ++i) {
    if (resident.contains(accesses[i])) continue;
    ++misses;
    if (resident.size() == capacity) {
      const auto next_use = [&](std::uint32_t chunk) {
        return std::find(accesses.begin() + static_cast<std::ptrdiff_t>(i), accesses.end(), chunk);
      };
      resident.erase(std::max_element(resident.begin(), resident.end(),
                                      [&](auto a, auto b) { return next_use(a) < next_use(b); }));
    }
    resident.insert(accesses[i]);
  }
  return misses;
}

}  // namespace llmmem_tests
