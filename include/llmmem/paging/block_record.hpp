/// @file
/// The pool's record of one block, in eight bytes.
#pragma once

#include <llmmem/config.hpp>

#include <cstdint>
#include <string_view>

namespace llmmem {
inline namespace v0 {

namespace paging {

/// The last event of a block: an audit reports it with a broken invariant.
enum class transition : std::uint8_t {
  never_used,
  allocated,
  shared,    ///< a reference was added to others
  revived,   ///< a reference was added while the block was idle
  released,  ///< a reference was released, others remain
  cached,    ///< its contents were declared worth keeping
  idled,     ///< its last reference was released, contents kept
  freed,     ///< its last reference was released, contents not kept
  uncached,  ///< its contents were declared worthless
  evicted,   ///< its kept contents were dropped to make space
  moved,     ///< a compaction moved its contents elsewhere
};

}  // namespace paging

using transition [[deprecated("its name is paging::transition")]] = paging::transition;

/// Returns a word or two for an audit's text.
[[nodiscard]] constexpr std::string_view to_string(paging::transition last) noexcept {
  switch (last) {
    case paging::transition::never_used:
      return "never used";
    case paging::transition::allocated:
      return "allocated";
    case paging::transition::shared:
      return "shared";
    case paging::transition::revived:
      return "revived";
    case paging::transition::released:
      return "released";
    case paging::transition::cached:
      return "cached";
    case paging::transition::idled:
      return "idled";
    case paging::transition::freed:
      return "freed";
    case paging::transition::uncached:
      return "uncached";
    case paging::transition::evicted:
      return "evicted";
    case paging::transition::moved:
      return "moved";
  }
  return "unknown";
}

/// References (up to 2^24 - 1), whether the contents are kept or wrong, the last transition, and the
/// generation.
class block_record {
 public:
  static constexpr std::uint32_t max_references = (1U << 24) - 1;

  [[nodiscard]] constexpr std::uint32_t references() const noexcept { return state_ >> 8; }
  [[nodiscard]] constexpr bool is_active() const noexcept { return state_ >= one_reference; }
  [[nodiscard]] constexpr bool is_cached() const noexcept { return (state_ & cached_bit) != 0; }
  [[nodiscard]] constexpr bool is_idle() const noexcept { return !is_active() && is_cached(); }
  /// Whether the contents were declared wrong after the block was allocated, see
  /// `paged_allocator::invalidate`.
  [[nodiscard]] constexpr bool is_invalid() const noexcept { return (state_ & invalid_bit) != 0; }
  [[nodiscard]] constexpr paging::transition last() const noexcept {
    return paging::transition(state_ & transition_bits);
  }
  [[nodiscard]] constexpr std::uint32_t generation() const noexcept { return generation_; }

  /// Sets one reference, contents not kept.
  constexpr void allocate() noexcept { state_ = one_reference | bits(paging::transition::allocated); }

  constexpr void add_reference(paging::transition why) noexcept {
    state_ = with(state_ + one_reference, why);
  }

  /// Removes a reference; returns whether it was the last.
  constexpr bool drop_reference() noexcept {
    state_ -= one_reference;
    if (is_active()) {
      state_ = with(state_, paging::transition::released);
      return false;
    }
    return true;
  }

  constexpr void note(paging::transition why) noexcept { state_ = with(state_, why); }
  constexpr void keep() noexcept { state_ = with(state_ | cached_bit, paging::transition::cached); }
  constexpr void give_up(paging::transition why) noexcept { state_ = with(state_ & ~cached_bit, why); }
  /// Marks the contents wrong until the block is allocated again.
  constexpr void invalidate() noexcept { state_ |= invalid_bit; }

  /// Takes references, cached state and history of `from`, whose life ends; this block keeps its own
  /// generation.
  constexpr void take_over(block_record& from) noexcept {
    state_ = from.state_;
    from.state_ = bits(paging::transition::moved);
    from.end_life();
  }

  /// Begins a new generation: handles to the old one become stale.
  constexpr void end_life() noexcept { ++generation_; }
  constexpr void undo_end_life() noexcept { --generation_; }

 private:
  static constexpr std::uint32_t one_reference = 1U << 8;
  static constexpr std::uint32_t cached_bit = 1U << 7;
  static constexpr std::uint32_t invalid_bit = 1U << 6;
  static constexpr std::uint32_t transition_bits = invalid_bit - 1;

  [[nodiscard]] static constexpr std::uint32_t bits(paging::transition why) noexcept {
    return static_cast<std::uint32_t>(why);
  }
  [[nodiscard]] static constexpr std::uint32_t with(std::uint32_t state, paging::transition why) noexcept {
    return (state & ~transition_bits) | bits(why);
  }

  std::uint32_t state_ = 0;
  std::uint32_t generation_ = 0;
};

static_assert(sizeof(block_record) == 8);

}  // namespace v0
}  // namespace llmmem
