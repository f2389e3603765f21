/// @file
/// Sets of slots, each in order of age: a few word operations for each call, allocated once.
#pragma once

#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/error.hpp>
#include <llmmem/eviction/concepts.hpp>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// `sets` sets of slots in one order, that of their places. A slot takes the newest place by `renew` and
/// keeps it, in a set or in none, until `forget`; it is in at most one set, and its owner knows in which.
///
/// Places are assigned in rising order, two for each slot. Every set is a bitmap over the places, with a bit
/// above for each 64 bits that are not all zero, and so on up to a single word; the words of all sets for the
/// same places are adjacent. So finding the first of a set, entering and leaving take at most a step for each
/// level: 3 levels serve 131,072 slots, 6 serve any capacity.
///
/// When the last place is taken, the slots that have one are renumbered from 0, in their order: one pass over
/// the places, and the next one comes after at least as many renewals as there are slots. So `renew` is O(1)
/// amortised, O(capacity) at worst; all else is O(1) for each level.
///
/// 12 bytes a slot, and 2 bits, plus a 63rd of that, for each set and once for all.
template <std::size_t sets>
class place_sets {
 public:
  /// 32 bits number twice as many places.
  static constexpr std::uint64_t most_slots = max_slots / 2;

  /// @throws length_error for a capacity of 0 or above `most_slots`; out_of_memory when the source has none.
  place_sets(slot_count capacity, const metadata_source& source, const char* who)
      : places_(checked(capacity, who), nowhere, source, who),
        slots_(to_number(capacity) * 2, source, who),
        levels_(levels_over(slots_.size())),
        words_(levels_.words * columns, std::uint64_t{0}, source, who) {}

  [[nodiscard]] bool has_place(slot_id slot) const noexcept { return places_[to_index(slot)] != nowhere; }

  /// Whether `a` has the older place. @pre both have one.
  [[nodiscard]] bool before(slot_id a, slot_id b) const noexcept {
    return places_[to_index(a)] < places_[to_index(b)];
  }

  /// Gives `slot` the newest place, with or without a place before. @pre it is in no set.
  void renew(slot_id slot) noexcept {
    forget(slot);
    if (next_ == slots_.size()) renumber();
    slots_[next_] = to_index(slot);
    places_[to_index(slot)] = next_++;
    insert(taken, slot);
  }

  /// Takes the place of `slot` away, if it has one. @pre it is in no set.
  void forget(slot_id slot) noexcept {
    if (!has_place(slot)) return;
    remove(taken, slot);
    places_[to_index(slot)] = nowhere;
  }

  /// @pre `slot` has a place and is in no set.
  void insert(std::size_t set, slot_id slot) noexcept {
    std::uint64_t at = places_[to_index(slot)];
    for (std::size_t level = 0; level < levels_.count; ++level) {
      std::uint64_t& word = word_at(level, at / 64, set);
      const bool known_above = word != 0;
      word |= std::uint64_t{1} << at % 64;
      if (known_above) return;
      at /= 64;
    }
  }

  /// @pre `slot` is in `set`.
  void remove(std::size_t set, slot_id slot) noexcept {
    std::uint64_t at = places_[to_index(slot)];
    for (std::size_t level = 0; level < levels_.count; ++level) {
      std::uint64_t& word = word_at(level, at / 64, set);
      word &= ~(std::uint64_t{1} << at % 64);
      if (word != 0) return;
      at /= 64;
    }
  }

  /// Returns the slot of `set` with the oldest place.
  [[nodiscard]] std::optional<slot_id> first(std::size_t set) const noexcept {
    std::uint64_t at = 0;
    for (std::size_t level = levels_.count; level-- > 0;) {
      const std::uint64_t word = words_[(levels_.begins[level] + at) * columns + set];
      if (word == 0) return std::nullopt;  // as only the uppermost may be
      at = at * 64 + static_cast<std::uint64_t>(std::countr_zero(word));
    }
    return slot_id{slots_[at]};
  }

  [[nodiscard]] slot_count capacity() const noexcept { return slot_count{places_.size()}; }
  [[nodiscard]] std::size_t bytes() const noexcept {
    return places_.bytes() + slots_.bytes() + words_.bytes();
  }

 private:
  static constexpr std::uint32_t nowhere = 0xFFFF'FFFF;  // two places a slot are fewer
  static constexpr std::size_t most_levels = 6;
  static constexpr std::size_t taken = sets;  // the set of all that have a place
  static constexpr std::size_t columns = sets + 1;

  /// The lowest level is the bitmap; a word of a set in each level covers 64 words of the one below.
  struct levels {
    std::array<std::uint64_t, most_levels> begins;  // in words of each set
    std::size_t count;
    std::uint64_t words;
  };

  [[nodiscard]] static levels levels_over(std::uint64_t places) noexcept {
    levels all{};
    std::uint64_t length = places;
    do {
      length = (length + 63) / 64;
      all.begins[all.count++] = all.words;
      all.words += length;
    } while (length > 1);
    return all;
  }

  [[nodiscard]] static std::uint64_t checked(slot_count capacity, const char* who) {
    const std::uint64_t slots = checked_capacity(capacity, who);
    if (slots > most_slots) {
      throw length_error(std::string(who) + ": capacity " + std::to_string(slots) + " exceeds " +
                         std::to_string(most_slots) + ", the most slots of this policy");
    }
    return slots;
  }

  [[nodiscard]] std::uint64_t& word_at(std::size_t level, std::uint64_t i, std::size_t set) noexcept {
    return words_[(levels_.begins[level] + i) * columns + set];
  }

  /// Closes the gaps between the places taken. Moves nothing into a word that was not read yet.
  void renumber() noexcept {
    std::uint32_t next = 0;
    for (std::uint64_t i = 0; i < (slots_.size() + 63) / 64; ++i) {
      std::array<std::uint64_t, columns> bits{};
      for (std::size_t set = 0; set < columns; ++set)
        bits[set] = std::exchange(word_at(0, i, set), 0);
      for (std::uint64_t left = bits[taken]; left != 0; left &= left - 1) {
        const int bit = std::countr_zero(left);
        for (std::size_t set = 0; set < columns; ++set)
          word_at(0, next / 64, set) |= (bits[set] >> bit & 1) << next % 64;
        const std::uint32_t slot = slots_[i * 64 + static_cast<std::uint64_t>(bit)];
        slots_[next] = slot;
        places_[slot] = next++;
      }
    }
    next_ = next;
    for (std::size_t level = 1; level < levels_.count; ++level)
      sum_up(level);
  }

  /// Computes every word of a level above the lowest from the words that it covers.
  void sum_up(std::size_t level) noexcept {
    const std::uint64_t below = levels_.begins[level] - levels_.begins[level - 1];
    for (std::uint64_t i = 0; i < below; ++i) {
      for (std::size_t set = 0; set < columns; ++set) {
        std::uint64_t& word = word_at(level, i / 64, set);
        if (i % 64 == 0) word = 0;
        word |= std::uint64_t{word_at(level - 1, i, set) != 0} << i % 64;
      }
    }
  }

  fixed_array<std::uint32_t> places_;  // by slot
  fixed_array<std::uint32_t> slots_;   // by place, of those taken
  levels levels_;
  fixed_array<std::uint64_t> words_;  // of each level, of its words, of the sets
  std::uint32_t next_ = 0;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
