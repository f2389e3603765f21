/// @file
/// Enumeration of every run of a test that makes choices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace llmmem_tests {

/// Every sequence of choices, depth first: each run consumes choices, and the last that can still change is
/// changed for the next run.
class all_choices {
 public:
  [[nodiscard]] std::uint32_t below(std::uint32_t bound) {
    if (next_ == made_.size()) made_.push_back({0, bound});
    return made_[next_++].value;
  }
  /// The next run; false when there is none.
  [[nodiscard]] bool advance() {
    next_ = 0;
    while (!made_.empty() && ++made_.back().value == made_.back().bound)
      made_.pop_back();
    return !made_.empty();
  }

 private:
  struct choice {
    std::uint32_t value;
    std::uint32_t bound;
  };
  std::vector<choice> made_;
  std::size_t next_ = 0;
};

}  // namespace llmmem_tests
