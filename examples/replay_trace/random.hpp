/// @file
/// Seeded random numbers that are the same on every platform: integers only, no std distributions.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <vector>

namespace replay_trace {

/// SplitMix64 (Steele, Lea, Flood 2014): 64 bits of state, one output each step.
class splitmix64 {
 public:
  explicit constexpr splitmix64(std::uint64_t seed) noexcept : state_(seed) {}

  constexpr std::uint64_t next() noexcept {
    state_ += 0x9e3779b97f4a7c15U;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
    return z ^ (z >> 31);
  }

  /// A number from 0 to `bound` - 1. @pre 0 < `bound` < 2^32; its bias is below 2^-32 x `bound`.
  constexpr std::uint64_t below(std::uint64_t bound) noexcept { return ((next() >> 32) * bound) >> 32; }

 private:
  std::uint64_t state_;
};

/// A distribution given by quantiles: linear between them, sampled by inversion in integers.
template <std::size_t N>
struct quantile_table {
  struct point {
    std::uint32_t per_mille;  ///< ascending, from 0 to 1000
    std::uint32_t value;      ///< not falling
  };
  std::array<point, N> points;

  [[nodiscard]] constexpr std::uint64_t sample(splitmix64& random) const noexcept {
    constexpr std::uint64_t fine = 1000;
    const std::uint64_t u = random.below(1000 * fine);
    std::size_t upper = 1;
    while (upper + 1 < N && points[upper].per_mille * fine <= u)
      ++upper;
    const point low = points[upper - 1];
    const point high = points[upper];
    const std::uint64_t into = u - low.per_mille * fine;
    const std::uint64_t span = (high.per_mille - low.per_mille) * fine;
    return low.value + (std::uint64_t{high.value} - low.value) * into / span;
  }
};

/// Ranks 0, 1, 2, ... with probability proportional to 1 / (rank + 1).
class zipf_ranks {
 public:
  /// @pre `ranks` is from 1 to 65,536.
  explicit zipf_ranks(std::size_t ranks) {
    std::uint64_t sum = 0;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      sum += 1'000'000 / (rank + 1);
      cumulative_.push_back(sum);
    }
  }

  [[nodiscard]] std::size_t sample(splitmix64& random) const noexcept {
    const std::uint64_t u = random.below(cumulative_.back());
    const auto found = std::upper_bound(cumulative_.begin(), cumulative_.end(), u);
    return static_cast<std::size_t>(std::distance(cumulative_.begin(), found));
  }

 private:
  std::vector<std::uint64_t> cumulative_;
};

}  // namespace replay_trace
