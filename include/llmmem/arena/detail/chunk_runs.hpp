/// @file
/// Consecutive chunks, each absent, free or used, and the runs of free chunks.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/detail/ordered_slots.hpp>
#include <llmmem/metadata.hpp>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The state of a chunk's place.
enum class chunk_state : std::uint8_t { absent, free, used };

/// Adjacent chunks: `count` of them from `first` on.
struct run_of_chunks {
  std::uint32_t first = no_index;
  std::uint32_t count = 0;

  [[nodiscard]] constexpr explicit operator bool() const noexcept { return count != 0; }
  friend constexpr bool operator==(const run_of_chunks&, const run_of_chunks&) noexcept = default;
};

/// Keeps the maximal runs of free chunks, by length and by place. Independent of memory.
///
/// @par Complexity   O(log runs) to find a run; O(its length) to change one.
class chunk_runs {
 public:
  chunk_runs(std::uint64_t chunks, const metadata_source& source, const char* what)
      : states_(chunks, chunk_state::absent, source, what),
        by_length_(chunks, source, what),
        by_place_(chunks, source, what) {}

  /// Returns the shortest free run of at least `count` chunks, the first among equals.
  [[nodiscard]] run_of_chunks best(std::uint32_t count) const noexcept {
    return run(by_length_.at_least({count, 0}));
  }
  /// Returns the longest free run, the last among equals, and the next shorter one.
  [[nodiscard]] run_of_chunks longest() const noexcept { return run(by_length_.last()); }
  [[nodiscard]] run_of_chunks shorter(const run_of_chunks& than) const noexcept {
    return run(by_length_.previous(than.first));
  }
  /// The free runs by place: the first run, and the run after `it`.
  [[nodiscard]] run_of_chunks front() const noexcept { return run(by_place_.first()); }
  [[nodiscard]] run_of_chunks behind(const run_of_chunks& it) const noexcept {
    return run(by_place_.next(it.first));
  }

  [[nodiscard]] bool all_free(const run_of_chunks& these) const noexcept {
    for (std::uint32_t at = these.first; at != these.first + these.count; ++at) {
      if (states_[at] != chunk_state::free) return false;
    }
    return true;
  }

  /// Returns the first absent run from `from` on, or its first `most` chunks.
  [[nodiscard]] run_of_chunks absent(std::uint32_t from, std::uint32_t most) const noexcept {
    const auto end = static_cast<std::uint32_t>(states_.size());
    while (from != end && states_[from] != chunk_state::absent)
      ++from;
    run_of_chunks found{from, 0};
    while (found.count != most && from + found.count != end &&
           states_[from + found.count] == chunk_state::absent) {
      ++found.count;
    }
    return found;
  }

  /// free -> used. @pre all chunks are free.
  void use(const run_of_chunks& these) noexcept { leave(these, chunk_state::used); }
  /// free -> absent. @pre all chunks are free.
  void remove(const run_of_chunks& these) noexcept {
    leave(these, chunk_state::absent);
    present_ -= these.count;
  }
  /// absent -> free. @pre all chunks are absent.
  void add(const run_of_chunks& these) noexcept {
    present_ += these.count;
    join(these);
  }
  /// used -> free. @pre all chunks are used.
  void give_back(const run_of_chunks& these) noexcept { join(these); }

  [[nodiscard]] chunk_state state(std::uint32_t chunk) const noexcept { return states_[chunk]; }
  [[nodiscard]] std::uint32_t free() const noexcept { return free_; }
  [[nodiscard]] std::uint32_t present() const noexcept { return present_; }
  [[nodiscard]] std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(states_.size()); }
  [[nodiscard]] std::uint64_t runs() const noexcept { return by_place_.size(); }
  [[nodiscard]] std::size_t bytes() const noexcept {
    return states_.bytes() + by_length_.bytes() + by_place_.bytes();
  }

  /// Compares runs and counts with the states. O(chunks log runs); allocates.
  void audit(const char* name, std::vector<std::string>& found) const {
    std::uint32_t free = 0, present = 0;
    std::uint64_t runs = 0;
    for (std::uint32_t at = 0; at < size();) {
      run_of_chunks whole{at, 0};
      while (at < size() && states_[at] == chunk_state::free) {
        ++whole.count;
        ++at;
      }
      if (whole) {
        ++runs;
        if (!by_place_.contains(whole.first) || run(whole.first) != whole ||
            !by_length_.contains(whole.first)) {
          found.push_back(std::string(name) + ": the free run of " + std::to_string(whole.count) +
                          " chunks from " + std::to_string(whole.first) + " on is not known");
        }
        free += whole.count;
        present += whole.count;
      } else {
        present += states_[at] == chunk_state::used ? 1U : 0U;
        ++at;
      }
    }
    if (free != free_ || present != present_ || runs != by_place_.size() || runs != by_length_.size()) {
      found.push_back(std::string(name) + ": chunks or free runs are miscounted");
    }
  }

 private:
  struct length {
    std::uint32_t count = 0;
    std::uint32_t first = 0;

    friend constexpr auto operator<=>(const length&, const length&) noexcept = default;
  };

  [[nodiscard]] run_of_chunks run(std::uint32_t first) const noexcept {
    return first == no_index ? run_of_chunks{} : run_of_chunks{first, by_length_.key(first).count};
  }
  void enter(const run_of_chunks& these) noexcept {
    by_length_.insert(these.first, {these.count, these.first});
    by_place_.insert(these.first, these.first);
  }
  void forget(std::uint32_t first) noexcept {
    by_length_.erase(first);
    by_place_.erase(first);
  }

  /// Takes `these` from the free run that holds them.
  void leave(const run_of_chunks& these, chunk_state to) noexcept {
    const run_of_chunks whole = run(by_place_.below(these.first + 1));
    forget(whole.first);
    const std::uint32_t end = these.first + these.count;
    if (whole.first != these.first) enter({whole.first, these.first - whole.first});
    if (whole.first + whole.count != end) enter({end, whole.first + whole.count - end});
    for (std::uint32_t at = these.first; at != end; ++at)
      states_[at] = to;
    free_ -= these.count;
  }

  /// Makes `these` free, as one run with free neighbours on either side.
  void join(const run_of_chunks& these) noexcept {
    const std::uint32_t end = these.first + these.count;
    for (std::uint32_t at = these.first; at != end; ++at)
      states_[at] = chunk_state::free;
    free_ += these.count;
    run_of_chunks whole = these;
    if (end != size() && by_place_.contains(end)) {
      whole.count += run(end).count;
      forget(end);
    }
    if (these.first != 0 && states_[these.first - 1] == chunk_state::free) {
      const run_of_chunks before = run(by_place_.below(these.first));
      whole = {before.first, before.count + whole.count};
      forget(before.first);
    }
    enter(whole);
  }

  fixed_array<chunk_state> states_;
  ordered_slots<length> by_length_;        // free runs, each at the slot of its first chunk
  ordered_slots<std::uint32_t> by_place_;  // the same
  std::uint32_t free_ = 0;
  std::uint32_t present_ = 0;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
