/// @file
/// The state of one block shared by several threads: eight bytes, changed as one.
#pragma once

#include <llmmem/config.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// References, whether the contents are cached, the last use, and the generation. A value: a thread loads it,
/// derives the next state, and exchanges the two.
///
///     free     no reference, not cached     on a free list, or held by the call that moves it there
///     private  references, not cached       known only to its holders
///     cached   found by match; idle when it has no reference, and then it may be evicted
///
/// The generation rises when a private block loses its last reference and when an idle block is evicted.
/// Eviction leaves one reference, held by the evicting thread, so no other thread can reach the block.
class shared_state {
 public:
  static constexpr std::uint32_t max_references = (1U << 23) - 1;
  static constexpr std::uint64_t one_reference = 1;
  static constexpr std::uint64_t cached_bit = std::uint64_t{1} << 23;

  constexpr explicit shared_state(std::uint64_t word) noexcept : word_(word) {}

  [[nodiscard]] constexpr std::uint64_t word() const noexcept { return word_; }
  [[nodiscard]] constexpr std::uint32_t references() const noexcept {
    return static_cast<std::uint32_t>(word_) & max_references;
  }
  [[nodiscard]] constexpr bool is_cached() const noexcept { return (word_ & cached_bit) != 0; }
  [[nodiscard]] constexpr bool is_idle() const noexcept { return is_cached() && references() == 0; }
  [[nodiscard]] constexpr std::uint8_t last_use() const noexcept {
    return static_cast<std::uint8_t>(word_ >> use_shift);
  }
  [[nodiscard]] constexpr std::uint32_t generation() const noexcept {
    return static_cast<std::uint32_t>(word_ >> life_shift);
  }

  [[nodiscard]] constexpr shared_state with_reference() const noexcept {
    return shared_state(word_ + one_reference);
  }

  /// Drops a reference at time `now`; dropping the last one of a private block ends its generation.
  [[nodiscard]] constexpr shared_state without_reference(std::uint8_t now) const noexcept {
    const std::uint64_t use = std::uint64_t{now} << use_shift;
    const shared_state next(((word_ - one_reference) & ~use_mask) | use);
    return next.references() == 0 && !next.is_cached() ? next.in_next_life() : next;
  }

  /// Returns the state of an evicted idle block: it belongs to the evicting thread alone.
  [[nodiscard]] constexpr shared_state evicted() const noexcept {
    return shared_state((word_ & ~cached_bit) + one_reference).in_next_life();
  }

 private:
  static constexpr int use_shift = 24;
  static constexpr int life_shift = 32;
  static constexpr std::uint64_t use_mask = std::uint64_t{0xFF} << use_shift;

  // The carry out of the top bits is the wrap-around of the generation.
  [[nodiscard]] constexpr shared_state in_next_life() const noexcept {
    return shared_state(word_ + (std::uint64_t{1} << life_shift));
  }

  std::uint64_t word_;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
