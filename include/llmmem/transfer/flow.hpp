/// @file
/// The traffic of a link, and a program's waiting: the figures that plans predict and meters count.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/transfer/link_model.hpp>

#include <array>
#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// Why a program had to wait.
enum class stall_cause : std::uint8_t {
  demand_fetch,    ///< the chunk was not requested before the program needed it
  prefetch_late,   ///< it was in flight, and had not arrived
  write_back,      ///< the space, or the chunk itself, was behind a write-back
  budget,          ///< no space in the tier, and none about to become free
  codec,           ///< bytes had arrived and were being decoded
  io_error_retry,  ///< a transfer failed and was retried
};
inline constexpr std::size_t stall_causes = 6;

/// Returns the name for reports and traces: "demand_fetch".
[[nodiscard]] constexpr const char* name_of(stall_cause cause) noexcept {
  constexpr std::array<const char*, stall_causes> names{"demand_fetch", "prefetch_late", "write_back",
                                                        "budget",       "codec",         "io_error_retry"};
  return names[static_cast<std::size_t>(cause)];
}

/// Nanoseconds of waiting, by cause.
struct stall_times {
  std::array<std::uint64_t, stall_causes> ns{};

  [[nodiscard]] constexpr std::uint64_t operator[](stall_cause cause) const noexcept {
    return ns[static_cast<std::size_t>(cause)];
  }
  [[nodiscard]] constexpr std::uint64_t& operator[](stall_cause cause) noexcept {
    return ns[static_cast<std::size_t>(cause)];
  }
  [[nodiscard]] constexpr std::uint64_t total() const noexcept {
    std::uint64_t sum = 0;
    for (const std::uint64_t each : ns)
      sum += each;
    return sum;
  }
  friend constexpr bool operator==(const stall_times&, const stall_times&) noexcept = default;
};

namespace transfer {

/// The traffic of a link in one direction.
struct flow {
  std::uint64_t bytes = 0;
  std::uint64_t operations = 0;
  friend constexpr bool operator==(const flow&, const flow&) noexcept = default;
};

}  // namespace transfer

using flow [[deprecated("its name is transfer::flow")]] = transfer::flow;

/// The traffic of a link.
struct link_flow {
  transfer::flow onboard;
  transfer::flow offload;

  [[nodiscard]] constexpr transfer::flow& operator[](link_direction way) noexcept {
    return way == link_direction::onboard ? onboard : offload;
  }
  [[nodiscard]] constexpr const transfer::flow& operator[](link_direction way) const noexcept {
    return way == link_direction::onboard ? onboard : offload;
  }
  friend constexpr bool operator==(const link_flow&, const link_flow&) noexcept = default;
};

}  // namespace v0
}  // namespace llmmem
