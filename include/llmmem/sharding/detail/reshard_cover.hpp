/// @file
/// Chooses the fewest of several sets of elements from which a range can be read.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/sharding/element_runs.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// A part of a run, and the set it belongs to.
struct run_fragment {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::uint32_t set = 0;
};

/// The fragments of some sets within a window of elements. Taking from each place the fragment that reaches
/// furthest covers a range with the fewest fragments (the greedy interval cover).
///
/// @par Complexity   `sort` O(f log f), `at` and `next_behind` O(log f), for f fragments.
class cover_list {
 public:
  static constexpr std::uint64_t none_behind = ~std::uint64_t{0};

  void clear() noexcept { fragments_.clear(); }
  [[nodiscard]] bool empty() const noexcept { return fragments_.empty(); }

  /// Adds what `elements` has in [window_begin, window_end). @pre not empty
  void add(const element_runs& elements, std::uint32_t set, std::uint64_t window_begin,
           std::uint64_t window_end) {
    for (std::uint64_t i = elements.first_run_after(window_begin); i < elements.count; ++i) {
      const std::uint64_t begin = elements.begin + i * elements.stride;
      if (begin >= window_end) return;
      fragments_.push_back({std::max(begin, window_begin), std::min(begin + elements.run, window_end), set});
    }
  }

  void sort() {
    std::ranges::sort(fragments_, [](const run_fragment& a, const run_fragment& b) {
      return a.begin != b.begin ? a.begin < b.begin : a.set < b.set;
    });
    furthest_.resize(fragments_.size());
    for (std::size_t i = 0; i < fragments_.size(); ++i) {
      furthest_[i] = i;
      if (i != 0 && fragments_[furthest_[i - 1]].end >= fragments_[i].end) furthest_[i] = furthest_[i - 1];
    }
  }

  /// Returns the fragment with `element` in it that reaches furthest, or null.
  [[nodiscard]] const run_fragment* at(std::uint64_t element) const noexcept {
    const std::size_t behind = first_behind(element);
    if (behind == 0) return nullptr;
    const run_fragment& found = fragments_[furthest_[behind - 1]];
    return found.end > element ? &found : nullptr;
  }

  /// Returns where the next fragment begins after `element`.
  [[nodiscard]] std::uint64_t next_behind(std::uint64_t element) const noexcept {
    const std::size_t behind = first_behind(element);
    return behind == fragments_.size() ? none_behind : fragments_[behind].begin;
  }

  [[nodiscard]] const std::vector<run_fragment>& fragments() const noexcept { return fragments_; }

 private:
  [[nodiscard]] std::size_t first_behind(std::uint64_t element) const noexcept {
    const auto found = std::ranges::upper_bound(fragments_, element, {}, &run_fragment::begin);
    return static_cast<std::size_t>(found - fragments_.begin());
  }

  std::vector<run_fragment> fragments_;
  std::vector<std::size_t> furthest_;  // of the fragments up to this one
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
