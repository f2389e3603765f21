/// @file
/// `rank_set`: a set of ranks as a plain value, for failures, quorums and groups.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/sharding/ids.hpp>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

namespace llmmem::inline v0 {

/// Ranks 0 to 1023, a bit each. Trivially copyable: it can be sent as its `words`, the lowest rank in the
/// lowest bit of the first.
///
///     rank_set failed{rank_id{1}, rank_id{5}};
///     for (const rank_id rank : rank_set::first(world) - failed) ...
///
/// @par Complexity      O(1) for one rank, 16 words for a whole set; nothing allocates but `to_text`.
/// @par Thread safety   as a plain value.
/// @par Errors          `argument_error` where a rank or a count is past `capacity`; nothing else throws.
class rank_set {
 public:
  static constexpr std::uint32_t capacity = 1024;
  using word_array = std::array<std::uint64_t, capacity / 64>;

  /// Walks the ranks upwards; valid as long as its set is not changed.
  class iterator {
   public:
    using value_type = rank_id;
    using difference_type = std::ptrdiff_t;

    constexpr iterator() noexcept = default;
    [[nodiscard]] constexpr rank_id operator*() const noexcept { return rank_id{at_}; }
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
    friend class rank_set;
    constexpr iterator(const rank_set* set, std::uint32_t at) noexcept : set_(set), at_(at) {}

    const rank_set* set_ = nullptr;
    std::uint32_t at_ = capacity;
  };

  constexpr rank_set() noexcept = default;
  constexpr rank_set(std::initializer_list<rank_id> ranks) {
    for (const rank_id rank : ranks)
      insert(rank);
  }

  /// Ranks 0 to `count` - 1: all of a world.
  [[nodiscard]] static constexpr rank_set first(rank_count count) {
    if (to_number(count) > capacity) {
      throw argument_error("rank_set: the first " + std::to_string(to_number(count)) +
                           " ranks; a set holds ranks 0 to 1023");
    }
    rank_set set;
    for (std::uint32_t rank = 0; rank < to_number(count); ++rank)
      set.words_[rank / 64] |= std::uint64_t{1} << (rank % 64);
    return set;
  }

  constexpr void insert(rank_id rank) {
    if (to_index(rank) >= capacity) {
      throw argument_error("rank_set: rank " + std::to_string(to_index(rank)) +
                           "; a set holds ranks 0 to 1023");
    }
    words_[to_index(rank) / 64] |= std::uint64_t{1} << (to_index(rank) % 64);
  }
  constexpr void erase(rank_id rank) noexcept {
    if (contains(rank)) words_[to_index(rank) / 64] &= ~(std::uint64_t{1} << (to_index(rank) % 64));
  }

  [[nodiscard]] constexpr bool contains(rank_id rank) const noexcept {
    return to_index(rank) < capacity && (words_[to_index(rank) / 64] >> (to_index(rank) % 64) & 1U) != 0;
  }
  /// Whether every rank here is in `other` too.
  [[nodiscard]] constexpr bool is_subset_of(const rank_set& other) const noexcept {
    return (*this - other).empty();
  }
  [[nodiscard]] constexpr std::uint32_t size() const noexcept {
    std::uint32_t count = 0;
    for (const std::uint64_t word : words_)
      count += static_cast<std::uint32_t>(std::popcount(word));
    return count;
  }
  [[nodiscard]] constexpr bool empty() const noexcept { return *this == rank_set{}; }

  [[nodiscard]] constexpr iterator begin() const noexcept { return {this, next(0)}; }
  [[nodiscard]] constexpr iterator end() const noexcept { return {this, capacity}; }

  /// The bits, to send or to store.
  [[nodiscard]] constexpr const word_array& words() const noexcept { return words_; }
  [[nodiscard]] static constexpr rank_set from_words(const word_array& words) noexcept {
    rank_set set;
    set.words_ = words;
    return set;
  }

  constexpr rank_set& operator|=(const rank_set& other) noexcept {
    for (std::size_t i = 0; i < words_.size(); ++i)
      words_[i] |= other.words_[i];
    return *this;
  }
  constexpr rank_set& operator&=(const rank_set& other) noexcept {
    for (std::size_t i = 0; i < words_.size(); ++i)
      words_[i] &= other.words_[i];
    return *this;
  }
  constexpr rank_set& operator-=(const rank_set& other) noexcept {
    for (std::size_t i = 0; i < words_.size(); ++i)
      words_[i] &= ~other.words_[i];
    return *this;
  }
  [[nodiscard]] friend constexpr rank_set operator|(rank_set a, const rank_set& b) noexcept { return a |= b; }
  [[nodiscard]] friend constexpr rank_set operator&(rank_set a, const rank_set& b) noexcept { return a &= b; }
  [[nodiscard]] friend constexpr rank_set operator-(rank_set a, const rank_set& b) noexcept { return a -= b; }
  friend constexpr bool operator==(const rank_set&, const rank_set&) noexcept = default;

 private:
  /// The lowest rank from `at` on, or `capacity`.
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

/// "no rank", "rank 3", "ranks 1, 2 and 5".
[[nodiscard]] inline std::string to_text(const rank_set& ranks) {
  if (ranks.empty()) return "no rank";
  const std::uint32_t count = ranks.size();
  std::string text = count == 1 ? "rank " : "ranks ";
  std::uint32_t told = 0;
  for (const rank_id rank : ranks) {
    if (told != 0) text += told + 1 == count ? " and " : ", ";
    text += std::to_string(to_index(rank));
    ++told;
  }
  return text;
}

}  // namespace llmmem::inline v0
