/// @file
/// What a `tiered_buffer` is set up with, and what it tells: handles, patience, options, counters.
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

/// How long a lease waits for its chunk to come up, in nanoseconds. The names are SGLang HiCache's.
struct patience {
  std::uint64_t ns = 0;
};
inline constexpr patience best_effort{0};                    ///< takes what is there, and starts the rest
inline constexpr patience wait_complete{~std::uint64_t{0}};  ///< for as long as it takes
/// That long by the buffer's clock. Where that is a virtual one and nobody moves it, as long of real time,
/// and at least a millisecond.
[[nodiscard]] constexpr patience timeout(std::uint64_t ns) noexcept {
  return {ns};
}

}  // namespace tiering

using patience [[deprecated("its name is tiering::patience")]] = tiering::patience;

/// How a tiered buffer is set up.
struct tiered_options {
  std::uint32_t max_chunks = 4096;        ///< alive at once, clones included
  std::uint32_t max_transfers = 64;       ///< under way at once
  std::uint64_t largest_lease_bytes = 0;  ///< most bytes leased at once; a first tier too small is refused
  std::uint64_t largest_chunk_bytes = 0;  ///< most bytes of a chunk; needed where a tier has a codec
  std::uint32_t staging_slots = 2;        ///< chunks that are encoded or decoded at once
  /// Host memory between two neighbours that the host cannot touch, a device above a file or a file above
  /// another, for each such pair; and of this the most that moves at once. Copies go through it as a ring
  /// (`bounce_queue`), whose pieces go on inside calls: `progress` now and then keeps them going. A copy that
  /// goes down from such a tier to one that leaves memory goes whole where it has not come up from there, as
  /// a checksum is of all of it.
  std::uint64_t bounce_bytes = std::uint64_t{8} << 20;
  std::uint64_t bounce_slot_bytes = std::uint64_t{1} << 20;
  std::string name = "tiered_buffer";  ///< for error texts
  metadata_source metadata{};
};

/// What a tier holds, and did.
struct tier_stats {
  std::uint64_t budget = 0;       ///< bytes it may hold
  std::uint64_t used = 0;         ///< bytes resident and in flight, as rounded
  std::uint64_t peak = 0;         ///< most of these at once
  std::uint64_t chunks = 0;       ///< copies it holds
  std::uint64_t hits = 0;         ///< leases whose chunk was found here, and nowhere above; a copy on its way
                                  ///< up counts beneath until a call has noted its arrival (`progress`)
  std::uint64_t drops = 0;        ///< copies that left because room was needed, and were clean
  std::uint64_t write_backs = 0;  ///< copies that were written to the tier beneath first
  std::uint64_t demotions = 0;    ///< clean copies that were stored in the tier beneath first (`demoting`)
  std::uint64_t refusals = 0;     ///< passages of chunks that its admission policy did not let stay
  std::uint64_t lost = 0;         ///< of `used`: never given out again, as a device may still write there
};

/// Counters of a tiered buffer of `Tiers` tiers.
template <std::size_t Tiers>
struct tiered_stats {
  std::array<tier_stats, Tiers> tiers{};
  transfer::meter_stats<Tiers - 1> moved{};  ///< bytes by link, and stalls by cause
  std::uint64_t leases = 0;                  ///< given out
  std::uint64_t shared = 0;                  ///< chunks that share what they have with a clone
  std::uint64_t parted_bytes = 0;            ///< copied within tier 0, for clones that came to differ
  std::uint64_t bounce_bytes = 0;            ///< of the rings between tiers that the host cannot touch
  std::uint64_t background_failures = 0;     ///< of transfers nobody waited for; nothing was lost by them
  std::uint64_t metadata_bytes = 0;
};

namespace tiering {

/// What became of one step of a plan.
enum class step_outcome : std::uint8_t {
  done,     ///< begun, or finished where it takes no time
  later,    ///< something under way is before it: ask again when that has ended
  useless,  ///< what it was to do is done, or can no longer be done
};

}  // namespace tiering

using step_outcome [[deprecated("its name is tiering::step_outcome")]] = tiering::step_outcome;

/// What a buffer reports to and measures by; to inherit and shadow.
struct tiered_traits {
  using clock = steady_meter_clock;
  /// An `access_observer`: `access_window` says how far from the best it goes. Clones that share what they
  /// hold have one number there.
  using observer = ignore_accesses;
  /// Where the rings between two tiers lie that the host cannot touch: memory that it can, pinned for
  /// devices.
  using bounce_space = host_space;
  /// Such a space, with room for `bytes`. It outlives the buffer, for good, where a device may still write to
  /// it.
  [[nodiscard]] static host_space make_bounce_space(std::uint64_t bytes) {
    host_options options;
    options.budget = bytes;
    options.name = "tiered_buffer: bounce ring";
    return host_space(options);
  }
};

}  // namespace v0
}  // namespace llmmem
