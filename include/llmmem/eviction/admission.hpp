/// @file
/// Decides before an entry is cached whether it is worth caching.
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

namespace llmmem {
inline namespace v0 {

/// An entry that could be cached.
struct admission_request {
  const access_hint& hint;
  bool is_partial = false;  ///< its block is partial
};

/// Decides what is cached. A `paged_allocator` asks once for each entry of a chain, head first. After a
/// refused entry it caches nothing of that chain, but continues to ask, so that the policy sees every entry.
/// A `tiered_buffer` asks once each time a chunk passes through a middle tier.
///
/// @par Constructor   `P(slot_count capacity, const metadata_source&)`, like an `eviction_policy`'s.
template <class P>
concept admission_policy =
    std::constructible_from<P, slot_count, const metadata_source&> && std::movable<P> &&
    requires(P policy, const P& read, const admission_request& request) {
      { policy.admit(request) } noexcept -> std::same_as<bool>;
      { read.metadata_bytes() } noexcept -> std::same_as<std::size_t>;
    };

/// Caches everything. The default.
class admit_all {
 public:
  explicit admit_all(slot_count, const metadata_source& = {}) noexcept {}
  [[nodiscard]] bool admit(const admission_request&) noexcept { return true; }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return 0; }
};

static_assert(admission_policy<admit_all>);

/// Caches full blocks only, because a prompt's partial last block is reused only by the same prompt.
class admit_full_blocks {
 public:
  explicit admit_full_blocks(slot_count, const metadata_source& = {}) noexcept {}
  [[nodiscard]] bool admit(const admission_request& request) noexcept { return !request.is_partial; }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return 0; }
};

static_assert(admission_policy<admit_full_blocks>);

/// Caches contents at their `N`-th touch, by default the second, so contents used once take no space. In a
/// `paged_allocator` every reused prompt is then computed `N` times; in a `tiered_buffer` a chunk comes from
/// below `N` times.
///
/// Two filters count the contents seen. When the newer one has seen as many contents as the cache has slots,
/// the older one is cleared and becomes the newer (an ageing Bloom filter, with counters up to `N - 1`). The
/// policy never misses a touch within the last `capacity` different contents; in about 1 case of 100 it
/// counts `N - 1` touches as `N`. It admits contents without a name (`access_hint::content` is 0). Every
/// sequence's commit is a touch, so each fork made before the commit of shared contents touches them once.
///
/// @tparam N  2 to 16.
/// @par Complexity   O(1): reads or sets four counters, and clears a filter once per `capacity` contents; 4
///      bytes a slot, 16 if `N` is above 2.
/// @par Source   Bloom 1970; ageing as in Yoon, "Aging Bloom filter with two active buffers", 2010; counters
///      as in Fan et al., "Summary cache", 2000, raised by conservative update (Estan and Varghese, 2002).
///      SGLang's `write_through_selective` and CDN caches also admit at the n-th touch.
template <std::uint32_t N = 2>
  requires(N >= 2 && N <= 16)
class second_touch {
 public:
  explicit second_touch(slot_count capacity, const metadata_source& source = {})
      : capacity_(detail::checked_capacity(capacity, "second_touch")),
        words_(words_for(capacity_) * 2, std::uint64_t{0}, source, "second_touch: filters") {}

  [[nodiscard]] bool admit(const admission_request& request) noexcept {
    const std::uint64_t content = request.hint.content;
    if (content == 0) return true;
    const std::uint64_t lately = touches(newer_, content);
    const std::uint64_t before = lately + touches(1 - newer_, content);
    if (lately < most) remember(content, lately);
    return before >= most;
  }

  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return words_.bytes(); }

 private:
  static constexpr std::uint64_t most = N - 1;  // of a counter
  static constexpr std::uint64_t counter_bits = N == 2 ? 1 : 4;
  static constexpr std::uint64_t counters_a_word = 64 / counter_bits;
  static constexpr std::uint64_t counters_a_slot = 16;
  static constexpr std::uint64_t mask = (std::uint64_t{1} << counter_bits) - 1;
  static constexpr int probes = 4;

  [[nodiscard]] static std::uint64_t words_for(std::uint64_t slots) noexcept {
    return (slots * counters_a_slot + counters_a_word - 1) / counters_a_word;
  }

  /// Finds positions by double hashing, because contents are evenly distributed already.
  template <class Visit>
  void each_counter(std::uint64_t filter, std::uint64_t content, Visit&& visit) const noexcept {
    const std::uint64_t words = words_.size() / 2;
    const std::uint64_t step = (content * 0x9E37'79B9'7F4A'7C15ULL) | 1U;
    for (int i = 0; i < probes; ++i) {
      const std::uint64_t mixed = content ^ (content >> 29);
      visit(filter * words + mixed % words, (content >> 58) % counters_a_word * counter_bits);
      content += step;
    }
  }

  /// Returns how often a filter counted the contents, at most `most`: the least of their counters.
  [[nodiscard]] std::uint64_t touches(std::uint64_t filter, std::uint64_t content) const noexcept {
    std::uint64_t least = most;
    each_counter(filter, content, [&](std::uint64_t word, std::uint64_t shift) noexcept {
      const std::uint64_t here = words_[word] >> shift & mask;
      if (here < least) least = here;
    });
    return least;
  }

  /// Counts one more touch of contents that the newer filter has counted `lately` times.
  void remember(std::uint64_t content, std::uint64_t lately) noexcept {
    if (lately == 0) {
      if (seen_ == capacity_) {
        newer_ = 1 - newer_;
        const std::uint64_t words = words_.size() / 2;
        for (std::uint64_t i = 0; i < words; ++i)
          words_[newer_ * words + i] = 0;
        seen_ = 0;
      }
      ++seen_;
    }
    // Raises only the least counters, because other contents share the rest.
    each_counter(newer_, content, [&](std::uint64_t word, std::uint64_t shift) noexcept {
      if ((words_[word] >> shift & mask) == lately) words_[word] += std::uint64_t{1} << shift;
    });
  }

  std::uint64_t capacity_;
  detail::fixed_array<std::uint64_t> words_;  // two filters, one after the other
  std::uint64_t newer_ = 0;
  std::uint64_t seen_ = 0;  // contents seen by the newer filter
};

static_assert(admission_policy<second_touch<>> && admission_policy<second_touch<3>>);

}  // namespace v0
}  // namespace llmmem
