/// @file
/// The setup of a `tiered_buffer`, and what it reports: handles, patience, options, counters.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/tiering/access.hpp>
#include <llmmem/transfer/meter.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace llmmem {
inline namespace v0 {

/// A chunk of a tiered buffer. A default-constructed one names none.
struct chunk_handle {
  std::uint32_t slot = 0;
  std::uint32_t generation = 0;
  std::uint32_t owner = 0;

  friend constexpr bool operator==(const chunk_handle&, const chunk_handle&) noexcept = default;
};

namespace tiering {

/// The longest time that a lease waits for its chunk to come up, in nanoseconds. The names are SGLang
/// HiCache's.
struct patience {
  std::uint64_t ns = 0;
};
inline constexpr patience best_effort{0};  ///< uses resident chunks, and starts to bring up others
inline constexpr patience wait_complete{~std::uint64_t{0}};  ///< waits as long as it takes
/// Waits that long by the buffer's clock. If that is a virtual clock that no code advances, waits that long
/// in real time, and at least a millisecond.
[[nodiscard]] constexpr patience timeout(std::uint64_t ns) noexcept {
  return {ns};
}

}  // namespace tiering

using patience [[deprecated("its name is tiering::patience")]] = tiering::patience;

/// How a tiered buffer is set up.
struct tiered_options {
  std::uint32_t max_chunks = 4096;   ///< alive at once, clones included
  std::uint32_t max_transfers = 64;  ///< in flight at once
  /// Most bytes leased at once; the constructor refuses a smaller first tier.
  std::uint64_t largest_lease_bytes = 0;
  std::uint64_t largest_chunk_bytes = 0;  ///< most bytes of a chunk; required if a tier has a codec
  std::uint32_t staging_slots = 2;        ///< chunks that are encoded or decoded at once
  /// Host memory between two neighbours that the host cannot access (a device above a file, a file above
  /// another), for each such pair; also the most that moves between them at once. Copies pass through it as a
  /// ring (`bounce_queue`), whose pieces advance inside calls, so call `progress` now and then. From such a
  /// tier, a copy that has not come up from a tier outside memory moves down to it in full, because its
  /// checksum covers all of the copy.
  std::uint64_t bounce_bytes = std::uint64_t{8} << 20;
  std::uint64_t bounce_slot_bytes = std::uint64_t{1} << 20;
  std::string name = "tiered_buffer";  ///< for error texts
  metadata_source metadata{};
};

/// Contents and counters of a tier.
struct tier_stats {
  std::uint64_t budget = 0;  ///< bytes it may hold
  std::uint64_t used = 0;    ///< bytes resident and in flight, as rounded
  std::uint64_t peak = 0;    ///< most of these at once
  std::uint64_t chunks = 0;  ///< copies it holds
  std::uint64_t hits = 0;    ///< leases whose topmost copy was here; until a call has noted a copy's arrival
                             ///< (`progress`), it counts for the tier below
  std::uint64_t drops = 0;   ///< clean copies that left because space was needed
  std::uint64_t write_backs = 0;  ///< copies that were first written to the tier below
  std::uint64_t demotions = 0;    ///< clean copies that were first stored in the tier below (`demoting`)
  std::uint64_t refusals = 0;     ///< passages of chunks that its admission policy refused
  std::uint64_t lost = 0;  ///< of `used`: never allocated again, because a device may still write there
};

/// Counters of a tiered buffer of `Tiers` tiers.
template <std::size_t Tiers>
struct tiered_stats {
  std::array<tier_stats, Tiers> tiers{};
  transfer::meter_stats<Tiers - 1> moved{};  ///< bytes by link, and stalls by cause
  std::uint64_t leases = 0;                  ///< granted
  std::uint64_t shared = 0;                  ///< chunks that share their copies with a clone
  std::uint64_t parted_bytes = 0;            ///< copied within tier 0, for clones that parted
  std::uint64_t bounce_bytes = 0;            ///< of the rings between tiers that the host cannot access
  std::uint64_t background_failures = 0;     ///< of transfers that no call waited for; they lost nothing
  std::uint64_t metadata_bytes = 0;
};

namespace tiering {

/// The outcome of one step of a plan.
enum class step_outcome : std::uint8_t {
  done,      ///< begun, or finished if it takes no time
  deferred,  ///< something in flight comes first: call again after it has ended
  unneeded,  ///< already done, or no longer possible
  later [[deprecated("its name is deferred")]] = deferred,
  useless [[deprecated("its name is unneeded")]] = unneeded
};

/// Why a step must wait, or was unneeded.
enum class step_blocker : std::uint8_t {
  none,      ///< nothing: the step was done already, or the chunk has no contents
  transfer,  ///< a transfer of the chunk is in flight, or transfers use up what this one needs
  space,     ///< no space in the tier, and none until copies have left
  lease,     ///< the chunk is leased
};

}  // namespace tiering

using step_outcome [[deprecated("its name is tiering::step_outcome")]] = tiering::step_outcome;

/// The observer, clock and memory that a buffer uses; inherit from it and shadow its members.
struct tiered_traits {
  using clock = steady_meter_clock;
  /// An `access_observer`: `access_window` reports how far from the optimum it is. Clones that share contents
  /// have one number there.
  using observer = ignore_accesses;
  /// The memory of the rings between two tiers that the host cannot access: the host must be able to access
  /// it, and devices need it pinned.
  using bounce_space = host_space;
  /// Makes a bounce space of `bytes`. It outlives the buffer, and is never freed if a device may still write
  /// to it.
  [[nodiscard]] static host_space make_bounce_space(std::uint64_t bytes) {
    host_options options;
    options.budget = bytes;
    options.name = "tiered_buffer: bounce ring";
    return host_space(options);
  }
};

}  // namespace v0
}  // namespace llmmem
