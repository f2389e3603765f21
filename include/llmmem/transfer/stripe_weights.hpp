/// @file
/// Distributes stripes over devices of unequal speed: the weights, and the resulting layout. Only arithmetic.
#pragma once

#include <llmmem/config.hpp>

#include <array>
#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// The most members of a striped space.
inline constexpr std::uint32_t max_stripe_members = 8;

/// The number of stripes after which a layout repeats.
inline constexpr std::uint32_t stripe_cycle = 32;

/// The number of stripes of each cycle for each member; they add up to `stripe_cycle`.
using stripe_shares = std::array<std::uint8_t, max_stripe_members>;

/// Where the stripes of one range are. Sixty-four bytes and the shares: everything needed to find them.
///
/// Each cycle of 32 stripes gives `shares[m]` of them to member `m`, spread as evenly as possible; within its
/// member a stripe directly follows the previous one.
///
/// @par Complexity   O(1) for each stripe.
/// @par Source       smooth weighted round robin, as nginx distributes requests to servers.
class stripe_layout {
 public:
  struct place {
    std::uint32_t member = 0;
    std::uint64_t index = 0;  ///< the stripe's number among those of its member

    friend constexpr bool operator==(const place&, const place&) noexcept = default;
  };

  constexpr stripe_layout() noexcept = default;

  /// @pre `shares` add up to `stripe_cycle`.
  explicit constexpr stripe_layout(const stripe_shares& shares) noexcept : shares_(shares) {
    std::array<std::int32_t, max_stripe_members> credit{};
    std::array<std::uint8_t, max_stripe_members> dealt{};
    for (std::uint32_t s = 0; s < stripe_cycle; ++s) {
      std::uint32_t best = 0;
      for (std::uint32_t m = 0; m < max_stripe_members; ++m) {
        credit[m] += shares[m];
        if (credit[m] > credit[best]) best = m;
      }
      credit[best] -= static_cast<std::int32_t>(stripe_cycle);
      member_[s] = static_cast<std::uint8_t>(best);
      rank_[s] = dealt[best]++;
    }
  }

  [[nodiscard]] constexpr place at(std::uint64_t stripe) const noexcept {
    const std::size_t in_cycle = stripe % stripe_cycle;
    const std::uint32_t member = member_[in_cycle];
    return {member, stripe / stripe_cycle * shares_[member] + rank_[in_cycle]};
  }

  /// Returns how many of the first `stripes` belong to `member`.
  [[nodiscard]] constexpr std::uint64_t count(std::uint32_t member, std::uint64_t stripes) const noexcept {
    std::uint64_t counted = stripes / stripe_cycle * shares_[member];
    for (std::size_t s = 0; s < stripes % stripe_cycle; ++s)
      counted += member_[s] == member ? 1U : 0U;
    return counted;
  }

  [[nodiscard]] constexpr const stripe_shares& shares() const noexcept { return shares_; }

 private:
  std::array<std::uint8_t, stripe_cycle> member_{};
  std::array<std::uint8_t, stripe_cycle> rank_{};
  stripe_shares shares_{stripe_cycle};
};

/// The measured speed of each member, and the shares that let all of them finish at the same time.
///
/// A moving average of bytes per nanosecond; the newest measurement counts a quarter. A member without a
/// measurement counts as the fastest measured one. A member so slow that its share rounds to nothing gets
/// none, except for one stripe per cycle each `probe_every` times that shares are requested, so that a
/// recovery is noticed.
///
/// @par Complexity   O(members squared), eight at most.
/// @par Source       an average of bandwidths as in Mooncake's TENT ("slice spraying"), for the idea.
class stripe_weights {
 public:
  static constexpr double newest = 0.25;
  static constexpr std::uint32_t probe_every = 16;

  /// @pre 1 to `max_stripe_members`.
  explicit constexpr stripe_weights(std::uint32_t members) noexcept : members_(members) {}

  /// Records that `member` moved `bytes` in `ns` during which it had work.
  constexpr void completed(std::uint32_t member, std::uint64_t bytes, std::uint64_t ns) noexcept {
    if (bytes == 0 || ns == 0) return;
    const double speed = static_cast<double>(bytes) / static_cast<double>(ns);
    double& mean = speeds_[member];
    mean = mean == 0 ? speed : mean + newest * (speed - mean);
  }

  /// Bytes per nanosecond, which are gigabytes per second; 0 before the first measurement.
  [[nodiscard]] constexpr double speed(std::uint32_t member) const noexcept { return speeds_[member]; }

  /// Returns the shares of the members that are not in `left_out` (a bit each). @pre not all of them are.
  [[nodiscard]] constexpr stripe_shares shares(std::uint32_t left_out = 0) noexcept {
    double fastest = 0;
    for (std::uint32_t m = 0; m < members_; ++m)
      fastest = speeds_[m] > fastest ? speeds_[m] : fastest;
    std::array<double, max_stripe_members> wanted{};
    double sum = 0;
    for (std::uint32_t m = 0; m < members_; ++m) {
      if ((left_out >> m & 1U) != 0) continue;
      const double speed = speeds_[m] != 0 ? speeds_[m] : fastest != 0 ? fastest : 1;
      wanted[m] = speed;
      sum += speed;
    }
    for (double& each : wanted)
      each *= stripe_cycle / sum;
    stripe_shares dealt = rounded(wanted);
    if (++asked_ % probe_every == 0) probe(dealt, left_out);
    return dealt;
  }

 private:
  /// Returns whole numbers near `wanted` that add up to the cycle: the rest goes to the largest remainders.
  [[nodiscard]] static constexpr stripe_shares rounded(
      const std::array<double, max_stripe_members>& wanted) noexcept {
    stripe_shares dealt{};
    std::uint32_t left = stripe_cycle;
    for (std::uint32_t m = 0; m < max_stripe_members; ++m) {
      // Slightly more, so that a whole number keeps its value despite rounding.
      dealt[m] = static_cast<std::uint8_t>(wanted[m] + 1e-9);
      left -= dealt[m];
    }
    for (; left != 0; --left) {
      std::uint32_t best = 0;
      for (std::uint32_t m = 1; m < max_stripe_members; ++m) {
        if (wanted[m] - dealt[m] > wanted[best] - dealt[best]) best = m;
      }
      ++dealt[best];
    }
    return dealt;
  }

  constexpr void probe(stripe_shares& dealt, std::uint32_t left_out) const noexcept {
    for (std::uint32_t m = 0; m < members_; ++m) {
      if (dealt[m] != 0 || (left_out >> m & 1U) != 0) continue;
      std::uint32_t most = 0;
      for (std::uint32_t other = 1; other < members_; ++other)
        most = dealt[other] > dealt[most] ? other : most;
      --dealt[most];
      ++dealt[m];
    }
  }

  std::uint32_t members_;
  std::uint32_t asked_ = 0;
  std::array<double, max_stripe_members> speeds_{};
};

}  // namespace v0
}  // namespace llmmem
