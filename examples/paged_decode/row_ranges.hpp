/// @file
/// A step's rows in ranges, one for each thread that attends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <future>
#include <span>
#include <vector>

namespace paged_decode {

/// Returns where the ranges begin and end: `ranges` of them or fewer, none empty, of about as many tokens.
[[nodiscard]] inline std::vector<std::size_t> equal_cuts(std::span<const std::int32_t> lengths,
                                                         std::uint32_t ranges) {
  std::uint64_t all = 0;
  for (const std::int32_t each : lengths)
    all += static_cast<std::uint64_t>(each);
  std::vector<std::size_t> cuts{0};
  std::uint64_t before = 0;
  for (std::size_t row = 0; row < lengths.size(); ++row) {
    before += static_cast<std::uint64_t>(lengths[row]);
    if (before * ranges >= all * cuts.size()) cuts.push_back(row + 1);
  }
  return cuts;
}

/// Runs `run(first, end)` for each range at the same time, the first one in this thread.
template <class Run>
void run_ranges(std::span<const std::size_t> cuts, const Run& run) {
  std::vector<std::future<void>> others;
  for (std::size_t i = 1; i + 1 < cuts.size(); ++i)
    others.push_back(std::async(std::launch::async, [&run, cuts, i] { run(cuts[i], cuts[i + 1]); }));
  if (cuts.size() > 1) run(cuts[0], cuts[1]);
  for (std::future<void>& each : others)
    each.get();
}

}  // namespace paged_decode
