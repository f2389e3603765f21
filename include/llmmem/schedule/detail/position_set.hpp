/// @file
/// A set of small numbers that finds its greatest quickly. Private to schedule/.
#pragma once

#include <llmmem/config.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Numbers from 0 up to a bound, one bit each. Each level above has one bit for 64 bits of the level below.
/// Every operation reads one word per level; a billion numbers need five levels.
class position_set {
 public:
  static constexpr std::uint64_t none = ~std::uint64_t{0};

  explicit position_set(std::uint64_t bound) {
    do {
      bound = bound / 64 + 1;
      levels_.emplace_back(static_cast<std::size_t>(bound));
    } while (bound > 1);
  }

  [[nodiscard]] bool contains(std::uint64_t number) const noexcept {
    return (levels_[0][number / 64] >> (number % 64) & 1U) != 0;
  }
  void insert(std::uint64_t number) noexcept {
    for (auto& level : levels_) {
      std::uint64_t& word = level[number / 64];
      const bool knew = word != 0;
      word |= std::uint64_t{1} << (number % 64);
      if (knew) return;
      number /= 64;
    }
  }
  void erase(std::uint64_t number) noexcept {
    for (auto& level : levels_) {
      std::uint64_t& word = level[number / 64];
      word &= ~(std::uint64_t{1} << (number % 64));
      if (word != 0) return;
      number /= 64;
    }
  }
  /// Returns the greatest number; `none` if the set is empty.
  [[nodiscard]] std::uint64_t last() const noexcept {
    if (levels_.back()[0] == 0) return none;
    std::uint64_t at = 0;
    for (std::size_t i = levels_.size(); i-- > 0;)
      at = at * 64 + static_cast<std::uint64_t>(std::bit_width(levels_[i][at])) - 1;
    return at;
  }

 private:
  std::vector<std::vector<std::uint64_t>> levels_;  // the numbers' own bits first
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
