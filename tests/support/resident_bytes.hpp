/// @file
/// What the system's tools show of this process's memory.
#pragma once

#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>
#include <string_view>

namespace llmmem_tests {

/// Returns the resident bytes of this process's mappings whose name contains `name`, from /proc/self/smaps:
/// memory that is mapped twice counts once for each address that it was touched at.
[[nodiscard]] inline std::uint64_t resident_bytes_of(std::string_view name) {
  std::ifstream maps("/proc/self/smaps");
  std::uint64_t kib = 0;
  bool is_named = false;
  for (std::string line; std::getline(maps, line);) {
    const std::size_t colon = line.find(':');
    const bool is_field = colon != std::string::npos && line.find(' ') > colon;
    if (!is_field) {
      is_named = line.find(name) != std::string::npos;
    } else if (is_named && line.starts_with("Rss:")) {
      std::uint64_t more = 0;
      std::istringstream(line.substr(colon + 1)) >> more;
      kib += more;
    }
  }
  return kib * 1024;
}

/// Returns the most resident bytes that this process had since `forget_peak_resident_bytes`.
[[nodiscard]] inline std::uint64_t peak_resident_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    std::uint64_t kib = 0;
    if (line.starts_with("VmHWM:") && std::istringstream(line.substr(6)) >> kib) return kib * 1024;
  }
  return 0;
}
inline void forget_peak_resident_bytes() {
  std::ofstream("/proc/self/clear_refs") << 5;
}

}  // namespace llmmem_tests
