/// @file
/// `redundant_replica`: the damaged places of one rank's data, as reported to the others.
#pragma once

#include <llmmem/comm/ranks.hpp>
#include <llmmem/config.hpp>
#include <llmmem/redundancy/recovery.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Damaged places of a version that `world` ranks kept, one bit each: the own state, copies by rank, parities
/// by codeword. Messages carry its words unchanged.
class kept_damage {
 public:
  kept_damage() = default;
  explicit kept_damage(std::uint32_t world) : world_(world), words_(words_for(world), 0) {}
  /// Constructs from a rank's report. @pre words.size() == words_for(world)
  kept_damage(std::uint32_t world, std::span<const std::uint32_t> words)
      : world_(world), words_(words.begin(), words.end()) {}

  [[nodiscard]] static constexpr std::size_t words_for(std::uint32_t world) noexcept {
    return (1 + 2 * std::size_t{world} + 31) / 32;
  }

  void note_own() noexcept { note(0); }
  void note_copy(std::uint32_t of) noexcept { note(1 + std::size_t{of}); }
  void note_parity(std::uint32_t codeword) noexcept { note(1 + std::size_t{world_} + codeword); }

  [[nodiscard]] std::span<const std::uint32_t> words() const noexcept { return words_; }
  [[nodiscard]] std::uint32_t places() const noexcept {
    std::uint32_t bits = 0;
    for (const std::uint32_t each : words_)
      bits += static_cast<std::uint32_t>(std::popcount(each));
    return bits;
  }
  /// Adds these places to those of all ranks. @param holder the rank, in the version's epoch, that has these
  /// places.
  void add_to(damaged_places& all, rank_id holder) const {
    if (has(0)) all.own.insert(holder);
    for (std::uint32_t what = 0; what < world_; ++what) {
      if (has(1 + std::size_t{what})) all.copies.push_back({holder, what});
      if (has(1 + std::size_t{world_} + what)) all.parities.push_back({holder, what});
    }
  }

 private:
  void note(std::size_t place) noexcept { words_[place / 32] |= std::uint32_t{1} << place % 32; }
  [[nodiscard]] bool has(std::size_t place) const noexcept {
    return (words_[place / 32] >> place % 32 & 1U) != 0;
  }

  std::uint32_t world_ = 0;
  std::vector<std::uint32_t> words_{};
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
