/// @file
/// The next use of each chunk, across the end of the iteration. Private to schedule/.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/schedule/trace.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The next acquire after each acquire, and the first of each chunk. O(events).
class use_table {
 public:
  static constexpr std::uint32_t none = 0xFFFF'FFFF;

  explicit use_table(const schedule_trace& trace)
      : next_(trace.events().size(), none), first_(trace.sizes().size(), none) {
    const auto events = trace.events();
    for (std::size_t i = events.size(); i-- > 0;) {
      if (events[i].call != trace_call::acquire) continue;
      std::uint32_t& known = first_[to_index(events[i].chunk)];
      next_[i] = known;
      known = static_cast<std::uint32_t>(i);
    }
    for (std::size_t i = events.size(); i-- > 0;) {
      if (events[i].call == trace_call::acquire && next_[i] == none)
        next_[i] = first_[to_index(events[i].chunk)];
    }
  }

  /// Returns the event that next acquires the chunk of event `acquire`; at most `acquire` if it is in the
  /// next iteration.
  [[nodiscard]] std::uint32_t after(std::uint32_t acquire) const noexcept { return next_[acquire]; }
  /// Returns the first acquire of `chunk`; `none` for a chunk that is never acquired.
  [[nodiscard]] std::uint32_t first(chunk_id chunk) const noexcept { return first_[to_index(chunk)]; }

 private:
  std::vector<std::uint32_t> next_;
  std::vector<std::uint32_t> first_;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
