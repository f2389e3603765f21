/// @file
/// Bytes at a place of any alignment, among others that must stay.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <random>
#include <span>
#include <vector>

#include "support/cache_world.hpp"

namespace llmmem_tests {

/// A copy of bytes, `skew` bytes behind a multiple of 16, with poison before and behind them.
class guarded_bytes {
 public:
  guarded_bytes(std::span<const std::byte> bytes, std::uint64_t skew) : size_(bytes.size()) {
    all_.assign(bytes.size() + 64, poison);
    const auto address = reinterpret_cast<std::uintptr_t>(all_.data());
    first_ = 32 - address % 16 + skew;
    std::ranges::copy(bytes, data());
  }
  [[nodiscard]] std::byte* data() { return all_.data() + first_; }
  [[nodiscard]] std::vector<std::byte> bytes() { return {data(), data() + size_}; }
  /// Whether nothing was written beside the bytes.
  [[nodiscard]] bool is_intact() const {
    const auto is_poison = [](std::byte each) { return each == poison; };
    const auto first = all_.begin() + static_cast<std::ptrdiff_t>(first_);
    return std::all_of(all_.begin(), first, is_poison) &&
           std::all_of(first + static_cast<std::ptrdiff_t>(size_), all_.end(), is_poison);
  }

 private:
  std::vector<std::byte> all_{};
  std::uint64_t first_ = 0;
  std::uint64_t size_;
};

/// Offsets from a multiple of 16 that have accesses be 16, 4 or 1 bytes wide.
inline std::uint64_t any_skew(std::mt19937_64& random) {
  constexpr std::uint64_t skews[] = {0, 0, 4, 8, 2, 1, 15};
  return skews[random() % std::size(skews)];
}

}  // namespace llmmem_tests
