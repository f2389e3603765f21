/// @file
/// The capacity of a link between two memories, for plans and simulators.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <cstdint>
#include <string>

namespace llmmem {
inline namespace v0 {

/// The direction over a link: `onboard` towards the faster memory, `offload` away from it.
enum class link_direction : std::uint8_t { onboard, offload };

/// Whether both directions work at once.
enum class link_duplex : std::uint8_t {
  full,  ///< each direction has its own bandwidth: PCIe, NVLink
  half,  ///< reads and writes take turns: one NVMe drive, one memory bus
};

/// Bandwidth and latency of a link. A plain value; times are in nanoseconds, sizes in bytes, all integers, so
/// that results are the same on every machine.
struct link_model {
  std::uint64_t bytes_per_second = 0;          ///< towards the faster memory; 1 to `most_bytes_per_second`
  std::uint64_t latency_ns = 0;                ///< of each transfer, during which the link does nothing else
  std::uint64_t offload_bytes_per_second = 0;  ///< away from it; 0: as `bytes_per_second`
  link_duplex duplex = link_duplex::full;

  /// The fastest link that can be computed with: ten times this fits 64 bits.
  static constexpr std::uint64_t most_bytes_per_second = std::uint64_t{1} << 60;

  [[nodiscard]] constexpr std::uint64_t bandwidth(link_direction way) const noexcept {
    return way == link_direction::offload && offload_bytes_per_second != 0 ? offload_bytes_per_second
                                                                           : bytes_per_second;
  }
  friend constexpr bool operator==(const link_model&, const link_model&) noexcept = default;
};

/// Returns the nanoseconds for `bytes` at the link's bandwidth, rounded up, without its latency.
/// @pre the bandwidth is not 0.
/// @throws length_error  past 2^64 - 1 ns, which is 584 years.
[[nodiscard]] constexpr std::uint64_t transfer_ns(const link_model& link, std::uint64_t bytes,
                                                  link_direction way = link_direction::onboard) {
  // bytes * 10^9 / bandwidth without a 128-bit product: by decimal digits of the fraction, nine of them.
  const std::uint64_t bandwidth = link.bandwidth(way);
  std::uint64_t whole = bytes / bandwidth;
  std::uint64_t rest = bytes % bandwidth;
  for (int digit = 0; digit < 9; ++digit) {
    if (whole > ~std::uint64_t{0} / 10 - 1) {
      throw length_error("link: " + std::to_string(bytes) + " bytes at " + std::to_string(bandwidth) +
                         " bytes per second take more than 2^64 - 1 ns");
    }
    whole = whole * 10 + rest * 10 / bandwidth;
    rest = rest * 10 % bandwidth;
  }
  return whole + (rest != 0 ? 1 : 0);
}

/// Refuses a bandwidth outside the valid range.
/// @param what  begins the error's text: `"virtual link"`.
/// @throws argument_error
constexpr void check_link(const link_model& link, const char* what) {
  const auto refuse = [what](std::uint64_t bandwidth) {
    throw argument_error(std::string(what) + ": a bandwidth of " + std::to_string(bandwidth) +
                         " bytes per second; it must be 1 to 2^60");
  };
  if (link.bytes_per_second == 0 || link.bytes_per_second > link_model::most_bytes_per_second)
    refuse(link.bytes_per_second);
  if (link.offload_bytes_per_second > link_model::most_bytes_per_second)
    refuse(link.offload_bytes_per_second);
}

}  // namespace v0
}  // namespace llmmem
