/// @file
/// `id_set`: a set of ranks or seats as a plain value, for failures, quorums and groups.
#pragma once

#include <llmmem/comm/ranks.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

namespace llmmem {
inline namespace v0 {

/// The noun for an id in texts.
template <class Id>
inline constexpr const char* id_noun = "id";
template <>
inline constexpr const char* id_noun<rank_id> = "rank";
template <>
inline constexpr const char* id_noun<seat_id> = "seat";

/// A set of numbers 0 to 1023, one bit each. Trivially copyable: it can be sent as its `words`, with the
/// lowest number in the lowest bit of the first.
///
///     rank_set failed{rank_id{1}, rank_id{5}};
///     for (const rank_id rank : rank_set::first(world) - failed) ...
///
/// @par Complexity      O(1) for one number, 16 words for a whole set; only `to_text` allocates.
/// @par Thread safety   as a plain value.
/// @par Errors          `argument_error` for a number or a count past `capacity`; nothing else throws.
template <class Id>
class id_set {
 public:
  static constexpr std::uint32_t capacity = 1024;
  using word_array = std::array<std::uint64_t, capacity / 64>;

  /// Iterates in ascending order; valid while its set is not changed.
  class iterator {
   public:
    using value_type = Id;
    using difference_type = std::ptrdiff_t;

    constexpr iterator() noexcept = default;
    [[nodiscard]] constexpr Id operator*() const noexcept { return Id{at_}; }
    constexpr iterator& operator++() noexcept {
      at_ = set_->next(at_ + 1);
      return *this;
    }
    constexpr iterator operator++(int) noexcept {
      const iterator before = *this;
      ++*this;
      return before;
    }
    friend constexpr bool operator==(const iterator& a, const iterator& b) noexcept { return a.at_ == b.at_; }

   private:
    friend class id_set;
    constexpr iterator(const id_set* set, std::uint32_t at) noexcept : set_(set), at_(at) {}

    const id_set* set_ = nullptr;
    std::uint32_t at_ = capacity;
  };

  constexpr id_set() noexcept = default;
  constexpr id_set(std::initializer_list<Id> ids) {
    for (const Id id : ids)
      insert(id);
  }

  /// Returns the set of 0 to `count` - 1: all ranks of a world.
  [[nodiscard]] static constexpr id_set first(rank_count count) {
    if (to_number(count) > capacity) {
      throw argument_error(std::string(id_noun<Id>) + "_set: the first " + std::to_string(to_number(count)) +
                           " " + id_noun<Id> + "s; a set holds " + id_noun<Id> + "s 0 to 1023");
    }
    id_set set;
    for (std::uint32_t id = 0; id < to_number(count); ++id)
      set.words_[id / 64] |= std::uint64_t{1} << (id % 64);
    return set;
  }

  constexpr void insert(Id id) {
    if (to_index(id) >= capacity) {
      throw argument_error(std::string(id_noun<Id>) + "_set: " + id_noun<Id> + " " +
                           std::to_string(to_index(id)) + "; a set holds " + id_noun<Id> + "s 0 to 1023");
    }
    words_[to_index(id) / 64] |= std::uint64_t{1} << (to_index(id) % 64);
  }
  constexpr void erase(Id id) noexcept {
    if (contains(id)) words_[to_index(id) / 64] &= ~(std::uint64_t{1} << (to_index(id) % 64));
  }

  [[nodiscard]] constexpr bool contains(Id id) const noexcept {
    return to_index(id) < capacity && (words_[to_index(id) / 64] >> (to_index(id) % 64) & 1U) != 0;
  }
  /// Whether all its members are in `other` too.
  [[nodiscard]] constexpr bool is_subset_of(const id_set& other) const noexcept {
    return (*this - other).empty();
  }
  [[nodiscard]] constexpr std::uint32_t size() const noexcept {
    std::uint32_t count = 0;
    for (const std::uint64_t word : words_)
      count += static_cast<std::uint32_t>(std::popcount(word));
    return count;
  }
  [[nodiscard]] constexpr bool empty() const noexcept { return *this == id_set{}; }
  /// Returns the lowest member, or nothing.
  [[nodiscard]] constexpr std::optional<Id> lowest() const noexcept {
    const std::uint32_t at = next(0);
    return at == capacity ? std::nullopt : std::optional(Id{at});
  }

  [[nodiscard]] constexpr iterator begin() const noexcept { return {this, next(0)}; }
  [[nodiscard]] constexpr iterator end() const noexcept { return {this, capacity}; }

  /// Returns the bits, to send or store.
  [[nodiscard]] constexpr const word_array& words() const noexcept { return words_; }
  [[nodiscard]] static constexpr id_set from_words(const word_array& words) noexcept {
    id_set set;
    set.words_ = words;
    return set;
  }

  constexpr id_set& operator|=(const id_set& other) noexcept {
    for (std::size_t i = 0; i < words_.size(); ++i)
      words_[i] |= other.words_[i];
    return *this;
  }
  constexpr id_set& operator&=(const id_set& other) noexcept {
    for (std::size_t i = 0; i < words_.size(); ++i)
      words_[i] &= other.words_[i];
    return *this;
  }
  constexpr id_set& operator-=(const id_set& other) noexcept {
    for (std::size_t i = 0; i < words_.size(); ++i)
      words_[i] &= ~other.words_[i];
    return *this;
  }
  [[nodiscard]] friend constexpr id_set operator|(id_set a, const id_set& b) noexcept { return a |= b; }
  [[nodiscard]] friend constexpr id_set operator&(id_set a, const id_set& b) noexcept { return a &= b; }
  [[nodiscard]] friend constexpr id_set operator-(id_set a, const id_set& b) noexcept { return a -= b; }
  friend constexpr bool operator==(const id_set&, const id_set&) noexcept = default;

 private:
  /// Returns the lowest member not below `at`, or `capacity`.
  [[nodiscard]] constexpr std::uint32_t next(std::uint32_t at) const noexcept {
    while (at < capacity) {
      const std::uint64_t rest = words_[at / 64] >> (at % 64);
      if (rest != 0) return at + static_cast<std::uint32_t>(std::countr_zero(rest));
      at = (at / 64 + 1) * 64;
    }
    return capacity;
  }

  word_array words_{};
};

/// Ranks of one epoch.
using rank_set = id_set<rank_id>;
/// Seats of a job.
using seat_set = id_set<seat_id>;

/// Returns "no rank", "rank 3", "ranks 1, 2 and 5".
template <class Id>
[[nodiscard]] std::string to_text(const id_set<Id>& ids) {
  const std::string noun = id_noun<Id>;
  if (ids.empty()) return "no " + noun;
  const std::uint32_t count = ids.size();
  std::string text = noun + (count == 1 ? " " : "s ");
  std::uint32_t told = 0;
  for (const Id id : ids) {
    if (told != 0) text += told + 1 == count ? " and " : ", ";
    text += std::to_string(to_index(id));
    ++told;
  }
  return text;
}

}  // namespace v0
}  // namespace llmmem
