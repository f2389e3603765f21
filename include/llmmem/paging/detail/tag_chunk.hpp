/// @file
/// One cache line of the prefix index: twelve blocks, a byte of each one's key, and who passed it by.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/paging/ids.hpp>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace llmmem::inline v0::detail {

/// Places in a chunk whose tag matched, lowest first. Bit 7 of byte i stands for place i.
class tag_matches {
 public:
  constexpr tag_matches(std::uint64_t low, std::uint64_t high) noexcept : low_(low), high_(high) {}

  [[nodiscard]] constexpr bool any() const noexcept { return (low_ | high_) != 0; }
  [[nodiscard]] constexpr std::size_t first() const noexcept {
    return static_cast<std::size_t>(low_ != 0 ? std::countr_zero(low_) : 64 + std::countr_zero(high_)) / 8;
  }
  [[nodiscard]] constexpr std::size_t count() const noexcept {
    return static_cast<std::size_t>(std::popcount(low_)) + static_cast<std::size_t>(std::popcount(high_));
  }
  constexpr void pop() noexcept {
    if (low_ != 0) {
      low_ &= low_ - 1;
    } else {
      high_ &= high_ - 1;
    }
  }

 private:
  std::uint64_t low_;
  std::uint64_t high_;
};

/// Tags are compared eight at a time in ordinary registers, so the same code runs on every processor.
class alignas(64) tag_chunk {
 public:
  static constexpr std::size_t places = 12;

  [[nodiscard]] tag_matches places_of(std::uint8_t tag) const noexcept {
    const std::uint64_t pattern = tag * std::uint64_t{0x0101'0101'0101'0101};
    std::array<std::uint64_t, 2> words{};
    std::memcpy(words.data(), tags_.data(), sizeof(words));
    return {zero_bytes(words[0] ^ pattern), zero_bytes(words[1] ^ pattern) & tags_of_high_word};
  }

  [[nodiscard]] block_id block(std::size_t place) const noexcept { return blocks_[place]; }
  [[nodiscard]] bool is_full() const noexcept { return !places_of(empty).any(); }
  [[nodiscard]] std::size_t size() const noexcept { return places - places_of(empty).count(); }

  /// Blocks whose first choice was this line or one before it, and that stand in a later one.
  [[nodiscard]] std::uint32_t passed_by() const noexcept {
    std::uint32_t count = 0;
    std::memcpy(&count, tags_.data() + places, sizeof(count));
    return count;
  }
  void pass_by() noexcept { set_passed_by(passed_by() + 1); }
  void undo_pass_by() noexcept { set_passed_by(passed_by() - 1); }

  /// @pre not full; `tag` is not 0.
  void add(std::uint8_t tag, block_id block) noexcept {
    const std::size_t place = places_of(empty).first();
    tags_[place] = tag;
    blocks_[place] = block;
  }

  /// Empties the place of `block`, if it stands here.
  bool remove(std::uint8_t tag, block_id block) noexcept {
    for (auto found = places_of(tag); found.any(); found.pop()) {
      if (blocks_[found.first()] != block) continue;
      tags_[found.first()] = empty;
      return true;
    }
    return false;
  }

  [[nodiscard]] bool holds(block_id block) const noexcept {
    for (std::size_t i = 0; i < places; ++i) {
      if (tags_[i] != empty && blocks_[i] == block) return true;
    }
    return false;
  }

 private:
  static constexpr std::uint8_t empty = 0;

  /// Bit 7 of each byte that is zero, exactly: no carry runs from one byte into the next (Warren, Hacker's
  /// Delight).
  [[nodiscard]] static constexpr std::uint64_t zero_bytes(std::uint64_t x) noexcept {
    constexpr std::uint64_t low_bits = 0x7F7F'7F7F'7F7F'7F7F;
    return ~(((x & low_bits) + low_bits) | x | low_bits);
  }

  // Four of the high word's bytes are tags, the others the count.
  static constexpr std::uint64_t tags_of_high_word = 0x0000'0000'FFFF'FFFF;
  static_assert(std::endian::native == std::endian::little, "place i is byte i of a word");

  void set_passed_by(std::uint32_t count) noexcept {
    std::memcpy(tags_.data() + places, &count, sizeof(count));
  }

  std::array<std::uint8_t, 16> tags_{};  // twelve tags, then the count of those who passed by
  std::array<block_id, places> blocks_{};
};

static_assert(sizeof(tag_chunk) == 64);

}  // namespace llmmem::inline v0::detail
