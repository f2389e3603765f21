/// @file
/// The last idle periods of a cache's entries, found by content even after the entry has left.
#pragma once

#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/eviction/concepts.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// A ring of the last `length` periods, numbered from 1 as they begin. A period's age is the number of
/// periods that began since.
///
/// Periods are found by content in a table of sets of four. A set that overflows forgets its oldest period's
/// content, but not the period: it then misses a return, and no answer depends on that.
///
/// @par Complexity   every operation O(1); 14 bytes a period.
class idle_history {
 public:
  static constexpr std::uint8_t ended = 0xFF;  ///< the class of a period that is over

  /// @pre `length` is a power of two, 4 to 2^62.
  idle_history(std::uint64_t length, const metadata_source& source, const char* who)
      : mask_(length - 1),
        contents_(length, 0, source, who),
        classes_(length, ended, source, who),
        uses_(length, 0, source, who),
        table_(length, 0, source, who) {}

  /// Returns the number of the latest period.
  [[nodiscard]] std::uint64_t now() const noexcept { return now_; }
  [[nodiscard]] std::uint64_t length() const noexcept { return mask_ + 1; }

  /// Begins a period and forgets the oldest one. No lookup finds content 0.
  std::uint64_t begin(std::uint64_t content, std::uint8_t in_class, std::uint8_t uses) noexcept {
    const std::uint64_t at = ++now_ & mask_;
    contents_[at] = content;
    classes_[at] = in_class;
    uses_[at] = uses;
    if (content != 0) place(content);
    return now_;
  }

  /// Returns the open period of `content`.
  [[nodiscard]] std::optional<std::uint64_t> find(std::uint64_t content) const noexcept {
    if (content == 0) return std::nullopt;
    const std::uint64_t set = content & mask_ & ~(ways - 1);
    for (std::uint64_t i = set; i < set + ways; ++i) {
      const std::uint64_t age = age_of(table_[i]);
      if (age < now_ && age <= mask_ && holds(now_ - age, content)) return now_ - age;
    }
    return std::nullopt;
  }

  /// @pre the period was found, or was begun and is not forgotten.
  [[nodiscard]] std::uint8_t uses(std::uint64_t period) const noexcept { return uses_[period & mask_]; }

  /// Returns the class of a remembered period, or `ended`.
  [[nodiscard]] std::uint8_t class_of(std::uint64_t period) const noexcept {
    return classes_[period & mask_];
  }

  /// Ends a period and returns its class; returns nothing if it has ended or is forgotten.
  std::optional<std::uint8_t> end(std::uint64_t period) noexcept {
    if (now_ - period > mask_) return std::nullopt;
    std::uint8_t& in = classes_[period & mask_];
    if (in == ended) return std::nullopt;
    const std::uint8_t was = in;
    in = ended;
    return was;
  }

  [[nodiscard]] std::size_t bytes() const noexcept {
    return contents_.bytes() + classes_.bytes() + uses_.bytes() + table_.bytes();
  }

 private:
  static constexpr std::uint64_t ways = 4;

  /// Returns the age of a remembered period from the low 32 bits of its number, which the table keeps.
  [[nodiscard]] std::uint64_t age_of(std::uint32_t low) const noexcept {
    return static_cast<std::uint32_t>(static_cast<std::uint32_t>(now_) - low);
  }

  [[nodiscard]] bool holds(std::uint64_t period, std::uint64_t content) const noexcept {
    return contents_[period & mask_] == content && classes_[period & mask_] != ended;
  }

  void place(std::uint64_t content) noexcept {
    const std::uint64_t set = content & mask_ & ~(ways - 1);
    std::uint64_t chosen = set;
    std::uint64_t oldest = 0;
    for (std::uint64_t i = set; i < set + ways; ++i) {
      const std::uint64_t age = age_of(table_[i]);
      const bool free = age >= now_ || age > mask_ || class_of(now_ - age) == ended;
      const std::uint64_t rank = free ? ~std::uint64_t{0} : age;
      if (rank > oldest) {
        chosen = i;
        oldest = rank;
      }
    }
    table_[chosen] = static_cast<std::uint32_t>(now_);
  }

  std::uint64_t mask_;
  std::uint64_t now_ = 0;
  fixed_array<std::uint64_t> contents_;
  fixed_array<std::uint8_t> classes_;
  fixed_array<std::uint8_t> uses_;
  fixed_array<std::uint32_t> table_;  // by content: the low bits of a period's number
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
