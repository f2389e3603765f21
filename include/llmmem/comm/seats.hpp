/// @file
/// `seat_id` and `seat_set`: the places of a job, of which each is taken by one process at a time.
#pragma once

#include <llmmem/config.hpp>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>

namespace llmmem::inline v0 {

/// A place in a job, from 0. Whoever sits there may die, and a fresh process take it; a rank is a place among
/// those who live, and changes when one of them dies: a seat stays what it is.
enum class seat_id : std::uint32_t {};

/// The most seats a job may have.
inline constexpr std::uint32_t max_seats = 1024;

/// A seat that is none.
inline constexpr seat_id no_seat{0xFFFF'FFFF};

/// The number in it, to index with.
[[nodiscard]] constexpr std::uint32_t to_index(seat_id seat) noexcept {
  return static_cast<std::uint32_t>(seat);
}

/// A set of seats below `max_seats`.
///
/// @par Complexity      O(max_seats / 64) for what concerns the whole set, else O(1); 128 bytes.
/// @par Thread safety   a plain value.
class seat_set {
 public:
  constexpr seat_set() noexcept = default;
  /// Seats 0 to `count` - 1. @pre count <= max_seats
  [[nodiscard]] static constexpr seat_set first(std::uint32_t count) noexcept {
    seat_set all;
    for (std::uint32_t i = 0; i < count; ++i)
      all.insert(seat_id{i});
    return all;
  }

  [[nodiscard]] constexpr bool has(seat_id seat) const noexcept {
    const std::uint32_t at = to_index(seat);
    return at < max_seats && ((words_[at / 64] >> (at % 64)) & 1U) != 0;
  }
  /// @pre `seat` is below `max_seats`
  constexpr void insert(seat_id seat) noexcept {
    words_[to_index(seat) / 64] |= std::uint64_t{1} << (to_index(seat) % 64);
  }
  /// @pre `seat` is below `max_seats`
  constexpr void erase(seat_id seat) noexcept {
    words_[to_index(seat) / 64] &= ~(std::uint64_t{1} << (to_index(seat) % 64));
  }
  [[nodiscard]] constexpr std::uint32_t size() const noexcept {
    std::uint32_t count = 0;
    for (const std::uint64_t word : words_)
      count += static_cast<std::uint32_t>(std::popcount(word));
    return count;
  }
  [[nodiscard]] constexpr bool empty() const noexcept { return size() == 0; }
  /// The lowest seat that is in it, `no_seat` when none is.
  [[nodiscard]] constexpr seat_id lowest() const noexcept { return next(seat_id{0}); }
  /// The lowest seat in it that is `from` or above, or `no_seat`:
  ///     for (seat_id s = set.lowest(); s != no_seat; s = set.next(above(s)))
  [[nodiscard]] constexpr seat_id next(seat_id from) const noexcept {
    std::size_t word = to_index(from) / 64;
    if (word >= words_.size()) return no_seat;
    std::uint64_t rest = words_[word] & (~std::uint64_t{0} << (to_index(from) % 64));
    while (rest == 0) {
      if (++word == words_.size()) return no_seat;
      rest = words_[word];
    }
    return seat_id{static_cast<std::uint32_t>(word * 64) +
                   static_cast<std::uint32_t>(std::countr_zero(rest))};
  }
  /// Calls `visit(seat)` for each, from the lowest on.
  template <class Visit>
  constexpr void each(Visit&& visit) const {
    for (std::size_t i = 0; i < words_.size(); ++i) {
      for (std::uint64_t rest = words_[i]; rest != 0; rest &= rest - 1)
        visit(
            seat_id{static_cast<std::uint32_t>(i * 64) + static_cast<std::uint32_t>(std::countr_zero(rest))});
    }
  }

  /// 64 seats a word, the lowest first: to write and to read.
  [[nodiscard]] constexpr const std::array<std::uint64_t, max_seats / 64>& words() const noexcept {
    return words_;
  }
  [[nodiscard]] static constexpr seat_set of(
      const std::array<std::uint64_t, max_seats / 64>& words) noexcept {
    seat_set made;
    made.words_ = words;
    return made;
  }

  constexpr seat_set& operator|=(const seat_set& other) noexcept {
    for (std::size_t i = 0; i < words_.size(); ++i)
      words_[i] |= other.words_[i];
    return *this;
  }
  constexpr seat_set& operator&=(const seat_set& other) noexcept {
    for (std::size_t i = 0; i < words_.size(); ++i)
      words_[i] &= other.words_[i];
    return *this;
  }
  /// What is in this set and not in the other.
  constexpr seat_set& operator-=(const seat_set& other) noexcept {
    for (std::size_t i = 0; i < words_.size(); ++i)
      words_[i] &= ~other.words_[i];
    return *this;
  }
  friend constexpr seat_set operator|(seat_set a, const seat_set& b) noexcept { return a |= b; }
  friend constexpr seat_set operator&(seat_set a, const seat_set& b) noexcept { return a &= b; }
  friend constexpr seat_set operator-(seat_set a, const seat_set& b) noexcept { return a -= b; }
  friend constexpr bool operator==(const seat_set&, const seat_set&) noexcept = default;

 private:
  std::array<std::uint64_t, max_seats / 64> words_{};
};

/// "seat 3", "seats 0, 2 and 5", or "no seat".
[[nodiscard]] inline std::string to_text(const seat_set& seats) {
  const std::uint32_t count = seats.size();
  if (count == 0) return "no seat";
  std::string text = count == 1 ? "seat " : "seats ";
  std::uint32_t told = 0;
  seats.each([&](seat_id seat) {
    if (told != 0) text += told + 1 == count ? " and " : ", ";
    text += std::to_string(to_index(seat));
    ++told;
  });
  return text;
}

}  // namespace llmmem::inline v0
