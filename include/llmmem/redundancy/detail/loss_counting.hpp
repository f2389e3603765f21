/// @file
/// Counts the sets of failures that lose a state, by sums of positive terms, so that small probabilities stay
/// precise.
#pragma once

#include <llmmem/config.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Sets of failed members of a group, by size: those that lose a state, and those that do not.
struct loss_counts {
  std::vector<double> lost;
  std::vector<double> kept;
};

/// A row of Pascal's triangle. Whole numbers up to 2^53 are exact; 1024 over 512 is less than 10^307.
[[nodiscard]] inline std::vector<double> binomial_row(std::size_t n) {
  std::vector<double> row(n + 1, 0);
  row[0] = 1;
  for (std::size_t i = 1; i <= n; ++i) {
    for (std::size_t k = i; k != 0; --k)
      row[k] += row[k - 1];
  }
  return row;
}

/// Counts a group that tolerates up to `tolerated` losses, for sets of up to `most` failures.
[[nodiscard]] inline loss_counts count_group(std::size_t members, std::size_t tolerated, std::size_t most) {
  const std::vector<double> all = binomial_row(members);
  const std::size_t end = (members < most ? members : most) + 1;
  loss_counts counts{std::vector<double>(end, 0), std::vector<double>(end, 0)};
  for (std::size_t size = 0; size < end; ++size)
    (size > tolerated ? counts.lost : counts.kept)[size] = all[size];
  return counts;
}

/// Counts a ring that loses a state if `run` neighbours fail.
///
/// The failed members between two live ones form a bin, so there are `live` bins, whose sizes add up to the
/// number of failures. Mark one live member and count the ways to fill the bins after it. The member has
/// `members` places, and any of the `live` ones may be the marked one: the sets are members / live times the
/// bins.
[[nodiscard]] inline loss_counts count_ring(std::size_t members, std::size_t run, std::size_t most) {
  const std::size_t end = (members < most ? members : most) + 1;
  loss_counts counts{std::vector<double>(end, 0), std::vector<double>(end, 0)};
  // By number of failures: the ways to fill the bins of this round without a bin as large as `run`, and with
  // at least one.
  std::vector<double> without(end, 0);
  std::vector<double> with(end, 0);
  std::vector<double> any(end, 0);
  without[0] = any[0] = 1;
  for (std::size_t live = 1; live <= members; ++live) {
    const std::size_t sizes = members - live + 1 < end ? members - live + 1 : end;
    for (std::size_t size = 1; size < sizes; ++size)
      any[size] += any[size - 1];
    for (std::size_t size = sizes; size-- != 0;) {
      double fewer_without = 0;
      double fewer_with = 0;
      for (std::size_t bin = 0; bin < run && bin <= size; ++bin) {
        fewer_without += without[size - bin];
        fewer_with += with[size - bin];
      }
      without[size] = fewer_without;
      with[size] = fewer_with + (size >= run ? any[size - run] : 0);
    }
    const std::size_t failed = members - live;
    if (failed >= end) continue;
    const auto places = static_cast<double>(members);
    const auto marks = static_cast<double>(live);
    // Small counts are exact, and large ones stay within the range of a double.
    const auto sets = [&](double bins) {
      return bins < 0x1p40 ? bins * places / marks : bins / marks * places;
    };
    counts.lost[failed] = sets(with[failed]);
    counts.kept[failed] = sets(without[failed]);
  }
  if (members < end) counts.lost[members] = 1;  // no live member is left to mark
  return counts;
}

/// Combines the counts of two groups.
[[nodiscard]] inline loss_counts combine(const loss_counts& a, const loss_counts& b, std::size_t most) {
  const std::size_t together = a.lost.size() + b.lost.size() - 1;
  const std::size_t end = together < most + 1 ? together : most + 1;
  loss_counts counts{std::vector<double>(end, 0), std::vector<double>(end, 0)};
  for (std::size_t i = 0; i < a.lost.size() && i < end; ++i) {
    for (std::size_t j = 0; j < b.lost.size() && i + j < end; ++j) {
      counts.lost[i + j] += a.lost[i] * (b.lost[j] + b.kept[j]) + a.kept[i] * b.lost[j];
      counts.kept[i + j] += a.kept[i] * b.kept[j];
    }
  }
  return counts;
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
