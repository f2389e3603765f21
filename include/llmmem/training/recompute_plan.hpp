/// @file
/// Chooses the part of each layer's activations to keep, and the part to compute again, under a bound on the
/// peak.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// One way to keep a layer's record between its passes.
struct record_way {
  std::uint64_t kept_bytes = 0;
  std::uint64_t rebuild_ns =
      0;  ///< to compute the rest again; 0 if all is kept. Any unit of cost may be used
};

/// The record of a layer, as its passes use it, and the ways to keep it.
struct record_choices {
  std::uint64_t bytes = 0;  ///< of the record
  std::vector<record_way> ways{};
};

/// A way for each record.
struct recompute_plan {
  std::vector<std::uint32_t> ways{};  ///< an index into the choices, by record
  std::uint64_t peak_bytes = 0;       ///< the most alive at once, over both passes
  std::uint64_t rebuild_ns = 0;       ///< of all records together
};

namespace detail {

/// Returns the bytes alive while a record is made or used, without earlier records. A record kept completely
/// is used in place. Otherwise the kept part and the record are alive together, because one is copied from
/// the other.
[[nodiscard]] constexpr std::uint64_t in_use_bytes(const record_choices& record, const record_way& way) {
  return way.kept_bytes == record.bytes
             ? record.bytes
             : checked_add(way.kept_bytes, record.bytes, "plan_recompute: bytes of a record in use");
}

inline void check_choices(std::span<const record_choices> records) {
  for (std::size_t i = 0; i < records.size(); ++i) {
    const std::string who = "plan_recompute: record " + std::to_string(i);
    if (records[i].ways.empty()) throw argument_error(who + " has no way to keep it; give one");
    for (const record_way& way : records[i].ways) {
      if (way.kept_bytes <= records[i].bytes) continue;
      throw argument_error(who + " of " + std::to_string(records[i].bytes) + " bytes cannot keep " +
                           std::to_string(way.kept_bytes));
    }
  }
}

/// Whether any choice stays within `budget`. Of the ways of a record that fit, it takes the way that keeps
/// least, because that leaves the most space for later records.
[[nodiscard]] inline bool fits_budget(std::span<const record_choices> records, std::uint64_t budget) {
  std::uint64_t kept = 0;
  for (const record_choices& record : records) {
    std::uint64_t least = std::numeric_limits<std::uint64_t>::max();
    for (const record_way& way : record.ways) {
      const std::uint64_t needed = in_use_bytes(record, way);
      if (kept <= budget && needed <= budget - kept) least = std::min(least, way.kept_bytes);
    }
    if (least == std::numeric_limits<std::uint64_t>::max()) return false;
    kept += least;
  }
  return true;
}

}  // namespace detail

/// Returns the most bytes alive at once when each record is kept in its way. While layer i is in use, in
/// either pass, the kept parts of earlier layers are alive, and its own bytes (`detail::in_use_bytes`).
/// @pre `ways` has a valid index for each record
[[nodiscard]] inline std::uint64_t peak_of(std::span<const record_choices> records,
                                           std::span<const std::uint32_t> ways) {
  std::uint64_t kept = 0;
  std::uint64_t peak = 0;
  for (std::size_t i = 0; i < records.size(); ++i) {
    const record_way& way = records[i].ways[ways[i]];
    const std::uint64_t now =
        checked_add(kept, detail::in_use_bytes(records[i], way), "plan_recompute: bytes of all records");
    peak = std::max(peak, now);
    kept += way.kept_bytes;
  }
  return peak;
}

/// Returns the least budget with which `plan_recompute` finds a plan. O(ways x log bytes).
/// @throws as `plan_recompute`.
[[nodiscard]] inline std::uint64_t min_recompute_budget(std::span<const record_choices> records) {
  detail::check_choices(records);
  std::uint64_t high = 0;
  for (const record_choices& each : records)
    high =
        checked_add(high, checked_multiply(2, each.bytes, "plan_recompute"), "plan_recompute: all records");
  std::uint64_t low = 0;
  while (low < high) {
    const std::uint64_t middle = low + (high - low) / 2;
    (detail::fits_budget(records, middle) ? high : low) =
        detail::fits_budget(records, middle) ? middle : middle + 1;
  }
  return high;
}

/// The former name of `min_recompute_budget`.
[[nodiscard, deprecated("call min_recompute_budget()")]] inline std::uint64_t least_recompute_budget(
    std::span<const record_choices> records) {
  return min_recompute_budget(records);
}

/// Returns the ways with the least total cost, with at most `budget` bytes alive at any moment of the forward
/// and the backward pass. The layers form a chain: the forward pass goes from the first to the last, the
/// backward pass the other way, and each record is dropped after its backward pass.
///
/// The bound is on the peak, not on the saved bytes: while a record is computed again, it is alive together
/// with its kept part and those of all earlier layers. A larger budget never costs more.
///
/// @par Complexity      O(records x front x ways), where the front consists of the sums of kept bytes that no
///                      other sum beats in bytes and cost: for n equal layers of k ways O(n^(k-1)). Exact.
/// @par Thread safety   a pure function.
/// @throws argument_error  for a record without ways, a way that keeps more than the record, and a budget
///                         that no choice fits; the text has the least budget that works.
/// @throws length_error    when bytes or costs pass 2^63 - 1.
/// @par Source          the recurrence is the chain case of Jain et al., "Checkmate", MLSys 2020, in which
///                      each layer is computed again by itself.
[[nodiscard]] inline recompute_plan plan_recompute(std::span<const record_choices> records,
                                                   std::uint64_t budget) {
  detail::check_choices(records);
  struct partial {
    std::uint64_t kept = 0;
    std::uint64_t cost = 0;
    std::size_t before = 0;
    std::uint32_t way = 0;
  };
  std::vector<std::vector<partial>> fronts{{partial{}}};
  for (const record_choices& record : records) {
    std::vector<partial> next;
    for (std::size_t from = 0; from < fronts.back().size(); ++from) {
      const partial& so_far = fronts.back()[from];
      for (std::uint32_t way = 0; way < record.ways.size(); ++way) {
        const std::uint64_t needed = detail::in_use_bytes(record, record.ways[way]);
        if (so_far.kept > budget || needed > budget - so_far.kept) continue;
        next.push_back({so_far.kept + record.ways[way].kept_bytes,
                        checked_add(so_far.cost, record.ways[way].rebuild_ns, "plan_recompute: cost"), from,
                        way});
      }
    }
    if (next.empty()) {
      throw argument_error("plan_recompute: a budget of " + std::to_string(budget) +
                           " bytes of activations at once; the smallest that works is " +
                           std::to_string(min_recompute_budget(records)));
    }
    std::ranges::sort(next, [](const partial& a, const partial& b) {
      return std::tie(a.kept, a.cost, a.before, a.way) < std::tie(b.kept, b.cost, b.before, b.way);
    });
    std::vector<partial> front;
    for (const partial& each : next) {
      if (front.empty() || each.cost < front.back().cost) front.push_back(each);
    }
    fronts.push_back(std::move(front));
  }
  recompute_plan plan;
  plan.ways.resize(records.size());
  std::size_t at = fronts.back().size() - 1;  // the partial plan that keeps most costs least
  plan.rebuild_ns = fronts.back()[at].cost;
  for (std::size_t i = records.size(); i-- > 0;) {
    plan.ways[i] = fronts[i + 1][at].way;
    at = fronts[i + 1][at].before;
  }
  plan.peak_bytes = peak_of(records, plan.ways);
  return plan;
}

}  // namespace v0
}  // namespace llmmem
