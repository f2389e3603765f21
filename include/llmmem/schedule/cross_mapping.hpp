/// @file
/// Assigns devices to the positions of a wave, so that devices that share a link load at different times.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The maximum number of devices that `cross_mapping` takes, because it may have to try each of their n!
/// orders.
inline constexpr std::uint32_t max_cross_mapping_devices = 10;

namespace schedule {

/// The device of each position, and the cost.
struct device_mapping {
  std::vector<std::uint32_t> device{};  ///< of each position
  std::uint64_t contention = 0;         ///< sum of the overlaps of pairs that share a link
};

}  // namespace schedule

using device_mapping [[deprecated("its name is schedule::device_mapping")]] = schedule::device_mapping;

/// Returns an estimate of how much the loads of two positions overlap if only their order is known: n minus
/// their distance, because neighbours load shortly after each other. An n x n matrix, row by row; 0 on the
/// diagonal.
/// @throws length_error  for 0 devices or more than `max_cross_mapping_devices`.
[[nodiscard]] inline std::vector<std::uint64_t> overlap_by_distance(std::uint32_t devices) {
  if (devices == 0 || devices > max_cross_mapping_devices) {
    throw length_error("overlap_by_distance: " + std::to_string(devices) + " devices; it takes 1 to " +
                       std::to_string(max_cross_mapping_devices));
  }
  std::vector<std::uint64_t> overlap(std::size_t{devices} * devices, 0);
  for (std::uint32_t a = 0; a < devices; ++a) {
    for (std::uint32_t b = 0; b < devices; ++b) {
      if (a != b) overlap[std::size_t{a} * devices + b] = devices - (a > b ? a - b : b - a);
    }
  }
  return overlap;
}

/// Returns the mapping with the least contention: the sum of the overlaps of all pairs of positions whose
/// devices share a link. The aim is that of Mobius's cross mapping (Feng et al., ASPLOS 2023).
///
/// `overlap` and `shares_link` are n x n matrices, row by row: `overlap` has nanoseconds, or any other
/// measure, for two positions of a wave; `shares_link` is not 0 for two devices on one link. The function
/// reads both above the diagonal, and they must be symmetric. Of mappings with equal contention it returns
/// the first in lexicographic order.
///
/// @par Complexity   O(n! n) at worst; the search skips branches that cannot be better.
/// @throws length_error    for 0 devices or more than `max_cross_mapping_devices`, or when all overlaps
///                         together pass 2^63 - 1.
/// @throws argument_error  for a matrix of another size, or an asymmetric one.
[[nodiscard]] inline schedule::device_mapping cross_mapping(std::uint32_t devices,
                                                            std::span<const std::uint64_t> overlap,
                                                            std::span<const std::uint8_t> shares_link) {
  static constexpr const char* who = "cross_mapping";
  const std::size_t n = devices;
  if (n == 0 || n > max_cross_mapping_devices) {
    throw length_error(std::string(who) + ": " + std::to_string(n) + " devices; it takes 1 to " +
                       std::to_string(max_cross_mapping_devices));
  }
  const auto check = [n](const auto& matrix, const char* name) {
    if (matrix.size() != n * n) {
      throw argument_error(std::string(who) + ": " + name + " has " + std::to_string(matrix.size()) +
                           " entries, " + std::to_string(n) + " devices need " + std::to_string(n * n));
    }
    for (std::size_t a = 0; a < n; ++a) {
      for (std::size_t b = a + 1; b < n; ++b) {
        if (matrix[a * n + b] != matrix[b * n + a]) {
          throw argument_error(std::string(who) + ": " + name + " of " + std::to_string(a) + " and " +
                               std::to_string(b) + " is " + std::to_string(matrix[a * n + b]) + ", of " +
                               std::to_string(b) + " and " + std::to_string(a) + " " +
                               std::to_string(matrix[b * n + a]) + "; make the matrix symmetric");
        }
      }
    }
  };
  check(overlap, "overlap");
  check(shares_link, "shares_link");
  std::uint64_t all = 0;
  for (std::size_t a = 0; a < n; ++a) {
    for (std::size_t b = a + 1; b < n; ++b) {
      const std::uint64_t more = overlap[a * n + b];
      if (more > max_bytes - all) {
        throw length_error(std::string(who) +
                           ": the sum of the overlaps exceeds 2^63 - 1; use a coarser unit");
      }
      all += more;
    }
  }

  schedule::device_mapping best{.contention = ~std::uint64_t{0}};
  std::vector<std::uint32_t> chosen;
  std::vector<bool> taken(n, false);
  const auto extend = [&](const auto& self, std::uint64_t contention) -> void {
    if (contention >= best.contention) return;
    const std::size_t position = chosen.size();
    if (position == n) {
      best = {.device = chosen, .contention = contention};
      return;
    }
    for (std::uint32_t device = 0; device < devices; ++device) {
      if (taken[device]) continue;
      std::uint64_t more = contention;
      for (std::size_t other = 0; other < position; ++other) {
        if (shares_link[chosen[other] * n + device] != 0) more += overlap[other * n + position];
      }
      chosen.push_back(device);
      taken[device] = true;
      self(self, more);
      taken[device] = false;
      chosen.pop_back();
    }
  };
  extend(extend, 0);
  return best;
}

}  // namespace v0
}  // namespace llmmem
