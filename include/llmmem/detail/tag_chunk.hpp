/// @file
/// One cache line of a hash table: twelve numbers, a byte of each number's key, and the overflow count.
#pragma once

#include <llmmem/config.hpp>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Sixteen bytes, compared with one byte all at once.
using tag_bytes = std::array<std::uint8_t, 16>;

/// Returns a mask with bit i set if byte i equals `tag`, computed in ordinary registers, for every processor.
[[nodiscard]] inline std::uint32_t equal_bytes_portable(const tag_bytes& bytes, std::uint8_t tag) noexcept {
  static_assert(std::endian::native == std::endian::little, "byte i of memory is byte i of a word");
  const std::uint64_t pattern = tag * std::uint64_t{0x0101'0101'0101'0101};
  const auto equal_in_word = [&](std::size_t first) noexcept {
    std::uint64_t x = 0;
    std::memcpy(&x, bytes.data() + first, sizeof(x));
    x ^= pattern;
    // Sets bit 7 of exactly those bytes that are zero: no carry runs from one byte into the next (Warren,
    // Hacker's Delight). The product gathers those bits in the top byte.
    constexpr std::uint64_t low_bits = 0x7F7F'7F7F'7F7F'7F7F;
    const std::uint64_t zero = ~(((x & low_bits) + low_bits) | x | low_bits);
    return static_cast<std::uint32_t>(((zero >> 7) * 0x0102'0408'1020'4080) >> 56);
  };
  return equal_in_word(0) | equal_in_word(8) << 8;
}

/// Returns the same mask, computed in the fastest way for the processor.
[[nodiscard]] inline std::uint32_t equal_bytes(const tag_bytes& bytes, std::uint8_t tag) noexcept {
#if defined(__SSE2__)
  const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes.data()));
  // Four copies of the tag by a product: a byte that the compiler keeps on the stack would be loaded as four,
  // and such a load waits until the store of the byte has left the processor's buffer.
  const __m128i wanted = _mm_set1_epi32(static_cast<int>(tag * std::uint32_t{0x0101'0101}));
  const __m128i equal = _mm_cmpeq_epi8(all, wanted);
  return static_cast<std::uint32_t>(_mm_movemask_epi8(equal));
#else
  return equal_bytes_portable(bytes, tag);
#endif
}

/// The places in a chunk whose tag matched, lowest first. Bit i represents place i.
class tag_matches {
 public:
  constexpr explicit tag_matches(std::uint32_t places) noexcept : places_(places) {}

  [[nodiscard]] constexpr bool any() const noexcept { return places_ != 0; }
  [[nodiscard]] constexpr std::size_t first() const noexcept {
    return static_cast<std::size_t>(std::countr_zero(places_));
  }
  [[nodiscard]] constexpr std::size_t count() const noexcept {
    return static_cast<std::size_t>(std::popcount(places_));
  }
  constexpr void pop() noexcept { places_ &= places_ - 1; }

 private:
  std::uint32_t places_;
};

/// An unordered set of tagged numbers: a place is free, or holds a tag and its number.
///
/// @tparam Number  of 32 bits: the number of a block, of a slot.
template <class Number>
class alignas(64) tag_chunk {
  static_assert(sizeof(Number) == 4, "twelve numbers and their tags are one cache line");

 public:
  static constexpr std::size_t places = 12;

  [[nodiscard]] tag_matches places_of(std::uint8_t tag) const noexcept {
    return tag_matches(equal_bytes(tags_, tag) & tag_places);
  }

  [[nodiscard]] Number number(std::size_t place) const noexcept { return numbers_[place]; }
  [[nodiscard]] bool is_full() const noexcept { return !places_of(empty).any(); }
  [[nodiscard]] std::size_t size() const noexcept { return places - places_of(empty).count(); }

  /// Numbers that are in a later line, and whose first choice was this line or an earlier one.
  [[nodiscard]] std::uint32_t passed_by() const noexcept {
    std::uint32_t count = 0;
    std::memcpy(&count, tags_.data() + places, sizeof(count));
    return count;
  }
  void pass_by() noexcept { set_passed_by(passed_by() + 1); }
  void undo_pass_by() noexcept { set_passed_by(passed_by() - 1); }

  /// @pre not full; `tag` is not 0.
  void add(std::uint8_t tag, Number number) noexcept {
    const std::size_t place = places_of(empty).first();
    tags_[place] = tag;
    numbers_[place] = number;
  }

  /// Empties the place of `number`, if it is here.
  bool remove(std::uint8_t tag, Number number) noexcept {
    for (auto found = places_of(tag); found.any(); found.pop()) {
      if (numbers_[found.first()] != number) continue;
      tags_[found.first()] = empty;
      return true;
    }
    return false;
  }

  [[nodiscard]] bool holds(Number number) const noexcept {
    for (std::size_t i = 0; i < places; ++i) {
      if (tags_[i] != empty && numbers_[i] == number) return true;
    }
    return false;
  }

 private:
  static constexpr std::uint8_t empty = 0;
  static constexpr std::uint32_t tag_places = (1U << places) - 1;  // the bytes after these are the count

  void set_passed_by(std::uint32_t count) noexcept {
    std::memcpy(tags_.data() + places, &count, sizeof(count));
  }

  tag_bytes tags_{};  // twelve tags, then the overflow count
  std::array<Number, places> numbers_{};
};

static_assert(sizeof(tag_chunk<std::uint32_t>) == 64);

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
