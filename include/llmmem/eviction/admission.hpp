/// @file
/// Whether an entry is worth caching at all, asked before it is.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/eviction/concepts.hpp>
#include <llmmem/metadata.hpp>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace llmmem::inline v0 {

/// An entry that could be cached.
struct admission_request {
  const access_hint& hint;
  bool is_partial = false;  ///< its block is not full
};

/// Decides what is cached. Asked once for each entry of a chain, head first; behind one that is refused
/// nothing of that chain is cached, but the policy is asked on, to see what comes by.
///
/// @par Constructor   `P(slot_count capacity, const metadata_source&)`, as an `eviction_policy`'s.
template <class P>
concept admission_policy =
    std::constructible_from<P, slot_count, const metadata_source&> && std::movable<P> &&
    requires(P policy, const P& read, const admission_request& request) {
      { policy.admit(request) } noexcept -> std::same_as<bool>;
      { read.metadata_bytes() } noexcept -> std::same_as<std::size_t>;
    };

/// Everything is cached. The default.
class admit_all {
 public:
  explicit admit_all(slot_count, const metadata_source& = {}) noexcept {}
  [[nodiscard]] bool admit(const admission_request&) noexcept { return true; }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return 0; }
};

static_assert(admission_policy<admit_all>);

/// Blocks that are not full are not cached: a prompt's last block is reused only by the same prompt.
class admit_full_blocks {
 public:
  explicit admit_full_blocks(slot_count, const metadata_source& = {}) noexcept {}
  [[nodiscard]] bool admit(const admission_request& request) noexcept { return !request.is_partial; }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return 0; }
};

static_assert(admission_policy<admit_full_blocks>);

/// Contents are cached when they are written for the second time: one-shot prompts leave no trace in the
/// cache, and every reused one is computed twice.
///
/// What was seen is kept in two Bloom filters; when the newer has seen as many contents as the cache has
/// slots, it takes the older's place (an ageing Bloom filter). Contents seen within the last `capacity`
/// different ones are remembered for certain, others are taken for seen in about 1 case of 100. Contents that
/// are not told (`access_hint::content` is 0) are admitted. Every sequence's commit is a writing: forks that
/// were made before the commit of what they share write it once each.
///
/// @par Complexity   O(1), four bits read or set, and once in `capacity` contents a filter is cleared; 4
///      bytes a slot.
/// @par Source   Bloom 1970; ageing as in Yoon, "Aging Bloom filter with two active buffers", 2010. Admission
///      at the second touch is what SGLang's `write_through_selective` and CDN caches do.
class second_touch {
 public:
  explicit second_touch(slot_count capacity, const metadata_source& source = {})
      : capacity_(detail::checked_capacity(capacity, "second_touch")),
        words_(words_for(capacity_) * 2, std::uint64_t{0}, source, "second_touch: filters") {}

  [[nodiscard]] bool admit(const admission_request& request) noexcept {
    const std::uint64_t content = request.hint.content;
    if (content == 0) return true;
    const bool is_recent = holds(newer_, content);
    const bool was_seen = is_recent || holds(1 - newer_, content);
    if (!is_recent) remember(content);
    return was_seen;
  }

  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return words_.bytes(); }

 private:
  static constexpr std::uint64_t bits_a_slot = 16;
  static constexpr int probes = 4;

  [[nodiscard]] static std::uint64_t words_for(std::uint64_t slots) noexcept {
    return (slots * bits_a_slot + 63) / 64;
  }

  /// Bit positions by double hashing; contents are evenly distributed already.
  template <class Visit>
  void each_bit(std::uint64_t filter, std::uint64_t content, Visit&& visit) const noexcept {
    const std::uint64_t words = words_.size() / 2;
    const std::uint64_t step = (content * 0x9E37'79B9'7F4A'7C15ULL) | 1U;
    for (int i = 0; i < probes; ++i) {
      const std::uint64_t mixed = content ^ (content >> 29);
      if (!visit(filter * words + mixed % words, std::uint64_t{1} << (content >> 58))) return;
      content += step;
    }
  }

  [[nodiscard]] bool holds(std::uint64_t filter, std::uint64_t content) const noexcept {
    bool all = true;
    each_bit(filter, content, [&](std::uint64_t word, std::uint64_t bit) noexcept {
      all = (words_[word] & bit) != 0;
      return all;
    });
    return all;
  }

  void remember(std::uint64_t content) noexcept {
    if (seen_ == capacity_) {
      newer_ = 1 - newer_;
      const std::uint64_t words = words_.size() / 2;
      for (std::uint64_t i = 0; i < words; ++i)
        words_[newer_ * words + i] = 0;
      seen_ = 0;
    }
    ++seen_;
    each_bit(newer_, content, [&](std::uint64_t word, std::uint64_t bit) noexcept {
      words_[word] |= bit;
      return true;
    });
  }

  std::uint64_t capacity_;
  detail::fixed_array<std::uint64_t> words_;  // two filters, one after the other
  std::uint64_t newer_ = 0;
  std::uint64_t seen_ = 0;  // by the newer one
};

static_assert(admission_policy<second_touch>);

}  // namespace llmmem::inline v0
