/// @file
/// Sets of slots in order of age: a few word operations per call, allocated once.
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

/// `sets` sets of slots in one order, the order of their places. `renew` gives a slot the newest place, which
/// it keeps, in a set or in none, until `forget`. A slot is in at most one set, and the owner of this object
/// knows in which.
///
/// Places are assigned in rising order, two for each slot. Every set is a bitmap over the places. Each level
/// above has one bit for 64 bits of the level below, set if any of them is; the top level is one word. The
/// words of all sets for the same places are adjacent. So finding the first of a set, entering it and leaving
/// it take at most one step per level: 3 levels serve 131,072 slots, 6 serve any capacity.
///
/// When the last place is taken, `renew` renumbers the slots with a place from 0, in their order. That is one
/// pass over the places, and at least `capacity` renewals come before the next pass. So `renew` is O(1)
/// amortised, O(capacity) at worst; all else is O(1) per level.
///
/// 12 bytes a slot, and 2 bits plus a 63rd of that for each set and once for all sets together.
template <std::size_t sets>
class place_sets {
 public:
  /// Half as many as 32 bits can number, because each slot has two places.
  static constexpr std::uint64_t most_slots = max_slots / 2;

  /// @throws length_error for a capacity of 0 or above `most_slots`; out_of_memory when the source has no
  ///         memory.
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

  /// Gives `slot` the newest place, whether or not it had one. @pre `slot` is in no set.
  void renew(slot_id slot) noexcept {
    forget(slot);
    if (next_ == slots_.size()) renumber();
    slots_[next_] = to_index(slot);
    places_[to_index(slot)] = next_++;
    insert(taken, slot);
  }

  /// Frees the place of `slot`, if it has one. @pre `slot` is in no set.
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
    const slot_id slot = oldest(set);
    if (slot == no_slot) return std::nullopt;
    return slot;
  }

  /// `first`, with `no_slot` for an empty set: for callers that choose between sets. An optional slot is
  /// stored in parts and then loaded whole, which stalls.
  [[nodiscard]] slot_id oldest(std::size_t set) const noexcept {
    std::uint64_t at = 0;
    for (std::size_t level = levels_.count; level-- > 0;) {
      const std::uint64_t word = words_[(levels_.begins[level] + at) * columns + set];
      if (word == 0) return no_slot;  // possible only in the top word
      at = at * 64 + static_cast<std::uint64_t>(std::countr_zero(word));
    }
    return slot_id{slots_[at]};
  }

  [[nodiscard]] slot_count capacity() const noexcept { return slot_count{places_.size()}; }
  [[nodiscard]] std::size_t bytes() const noexcept {
    return places_.bytes() + slots_.bytes() + words_.bytes();
  }

 private:
  static constexpr std::uint32_t nowhere = 0xFFFF'FFFF;  // above every place
  static constexpr std::size_t most_levels = 6;
  static constexpr std::size_t taken = sets;  // the set of all slots with a place
  static constexpr std::size_t columns = sets + 1;

  /// The lowest level is the bitmap; a set's word in each level covers 64 words of the level below.
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

  /// Closes the gaps between taken places. Writes only to words that it has already read.
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
  fixed_array<std::uint32_t> slots_;   // by taken place
  levels levels_;
  fixed_array<std::uint64_t> words_;  // by level, then word, then set
  std::uint32_t next_ = 0;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
