/// @file
/// Joins copies that can be written as one.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/sharding/reshard_plan.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

[[nodiscard]] inline bool is_same_pair(const reshard_copy& a, const reshard_copy& b) noexcept {
  return a.source == b.source && a.destination == b.destination;
}

/// Makes `b` part of `a`, if it is a single run that continues where the single run of `a` ends.
inline bool extend_run(reshard_copy& a, const reshard_copy& b) noexcept {
  if (a.count != 1 || b.count != 1 || !is_same_pair(a, b)) return false;
  if (b.source_offset != a.source_offset + a.run || b.destination_offset != a.destination_offset + a.run) {
    return false;
  }
  a.run += b.run;
  a.source_stride = a.destination_stride = a.run;
  return true;
}

/// Makes `b` part of `a`, if its runs continue at the distance of those of `a`.
inline bool extend_series(reshard_copy& a, const reshard_copy& b) noexcept {
  if (a.run != b.run || !is_same_pair(a, b)) return false;
  const std::uint64_t source_step = b.source_offset - (a.source_offset + (a.count - 1) * a.source_stride);
  const std::uint64_t destination_step =
      b.destination_offset - (a.destination_offset + (a.count - 1) * a.destination_stride);
  const auto goes = [&](const reshard_copy& each) {
    return each.count == 1 ||
           (each.source_stride == source_step && each.destination_stride == destination_step);
  };
  if (!goes(a) || !goes(b)) return false;
  a.count += b.count;
  a.source_stride = source_step;
  a.destination_stride = destination_step;
  return true;
}

/// Sorts by destination, source and offset, and joins adjacent copies.
inline void join_copies(std::vector<reshard_copy>& copies) {
  std::ranges::sort(copies, [](const reshard_copy& a, const reshard_copy& b) {
    return std::tuple(a.destination, a.source, a.destination_offset) <
           std::tuple(b.destination, b.source, b.destination_offset);
  });
  // Runs first: a run that had already become part of a series could no longer grow.
  std::size_t kept = 0;
  for (const reshard_copy& each : copies) {
    if (kept == 0 || !extend_run(copies[kept - 1], each)) copies[kept++] = each;
  }
  copies.resize(kept);

  // A row may hold several copies between the same two pieces, so that their series interleave.
  constexpr std::size_t looks_back = 4;
  kept = 0;
  for (const reshard_copy& each : copies) {
    bool is_joined = false;
    for (std::size_t back = 1; back <= std::min(looks_back, kept) && !is_joined; ++back)
      is_joined = extend_series(copies[kept - back], each);
    if (!is_joined) copies[kept++] = each;
  }
  copies.resize(kept);
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
