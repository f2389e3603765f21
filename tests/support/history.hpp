/// @file
/// Whether what threads saw can be explained by some order of their calls, one at a time.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace llmmem_tests {

/// A call, with the moments at which it began and had ended: unique numbers of a common count.
template <class Operation>
struct timed {
  std::uint64_t began = 0;
  std::uint64_t ended = 0;
  Operation operation{};
};

/// Searches for an order of the calls of all threads in which each comes after those that had ended when it
/// began, and `apply(state, operation)` allows each: it returns the state after it, or nothing if the
/// operation could not have had that result. Exhaustive (Wing and Gong 1993), never the same state twice at
/// one place (Lowe 2017).
template <class State, class Operation, class Apply>
class linearization {
 public:
  using history = std::vector<std::vector<timed<Operation>>>;  // by thread, each in its order

  linearization(const history& calls, Apply apply) : calls_(calls), apply_(std::move(apply)) {}

  [[nodiscard]] bool exists(const State& initial) {
    return search(std::vector<std::size_t>(calls_.size()), initial);
  }

 private:
  using place = std::vector<std::size_t>;  // by thread: how many of its calls have been ordered

  bool search(const place& done, const State& state) {
    if (!seen_.insert({done, state}).second) return false;
    std::uint64_t first_end = ~std::uint64_t{0};
    for (std::size_t t = 0; t < calls_.size(); ++t) {
      if (done[t] < calls_[t].size()) first_end = std::min(first_end, calls_[t][done[t]].ended);
    }
    if (first_end == ~std::uint64_t{0}) return true;
    for (std::size_t t = 0; t < calls_.size(); ++t) {
      if (done[t] == calls_[t].size() || calls_[t][done[t]].began > first_end) continue;
      const std::optional<State> after = apply_(state, calls_[t][done[t]].operation);
      if (!after) continue;
      place next = done;
      ++next[t];
      if (search(next, *after)) return true;
    }
    return false;
  }

  const history& calls_;
  Apply apply_;
  std::set<std::pair<place, State>> seen_;
};

}  // namespace llmmem_tests
