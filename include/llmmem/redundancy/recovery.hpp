/// @file
/// `plan_recovery`: which bytes to fetch from which rank after failures, and their coefficients.
#pragma once

#include <llmmem/comm/id_set.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/redundancy/coded_group.hpp>
#include <llmmem/redundancy/rebuild_plan.hpp>
#include <llmmem/redundancy/replica_map.hpp>
#include <llmmem/sharding/ids.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// How a range of a lost state is restored.
enum class recovery_kind : std::uint8_t {
  fetch,    ///< one source holds a copy
  rebuild,  ///< the sum of all sources, each times its coefficient
};

/// The bytes that a live rank sends. In a rebuild they are the beginning of its piece of the step's codeword;
/// a piece that is shorter than the range counts as if zeros followed, and may be empty.
struct recovery_source {
  rank_id holder{};
  piece_id piece{};
  std::uint8_t coefficient = 1;
  std::uint64_t bytes = 0;
  friend bool operator==(const recovery_source&, const recovery_source&) = default;
};

/// One range of one lost rank's state.
struct recovery_step {
  recovery_kind kind = recovery_kind::fetch;
  rank_id lost{};
  redundancy::byte_range range{};  ///< of the lost rank's state
  std::uint32_t codeword = 0;      ///< of the rank's group, for a rebuild
  std::vector<recovery_source> sources;
  friend bool operator==(const recovery_step&, const recovery_step&) = default;
};

/// Damaged data of live ranks: a plan takes nothing from there, and may take everything else.
struct damaged_places {
  /// Data that a rank keeps for others: a copy of a rank's state, or parity of a codeword of its group.
  struct kept_one {
    rank_id holder{};
    std::uint32_t of = 0;  ///< the rank of the copy, or the codeword of the parity
    friend constexpr bool operator==(const kept_one&, const kept_one&) noexcept = default;
  };
  rank_set own{};  ///< ranks whose own state is damaged
  std::vector<kept_one> copies{};
  std::vector<kept_one> parities{};

  [[nodiscard]] bool has_copy(rank_id holder, rank_id of) const noexcept {
    return std::ranges::find(copies, kept_one{holder, to_index(of)}) != copies.end();
  }
  [[nodiscard]] bool has_parity(rank_id holder, std::uint32_t codeword) const noexcept {
    return std::ranges::find(parities, kept_one{holder, codeword}) != parities.end();
  }
};

/// Steps that may run in any order, or concurrently: none needs the result of another.
struct recovery_plan {
  std::vector<recovery_step> steps;
  rank_set unrecoverable;        ///< ranks whose state is lost and cannot be restored; no step is for these
  std::uint64_t bytes_sent = 0;  ///< by all sources
  std::uint64_t max_sent = 0;    ///< by the busiest source
  friend bool operator==(const recovery_plan&, const recovery_plan&) = default;
};

/// Plans how to restore the states of ranks that failed or whose own state is damaged, each from the least
/// loaded sources.
///
/// A rank's load is the bytes that it sends in this plan so far. States with the fewest live holders are
/// planned first; among equally loaded sources the first in the map's order sends. This is greedy: near the
/// least possible `max_sent`, without a guarantee. The plan covers only states: copies and parity that failed
/// ranks kept for others return with the next step that is kept.
///
/// @param state_bytes  the bytes of each rank's state, in order; for failed ranks those before the failure.
/// @param damaged      places of live ranks from which the plan takes nothing. Entries for other ranks are
///                     ignored.
/// @par Complexity   O(lost x holders x damaged places), and for coded schemes k^3 for each stripe.
/// @throws argument_error  if the numbers of states and ranks differ, or a failed rank is past the world.
[[nodiscard]] inline recovery_plan plan_recovery(const replica_map& map, const rank_set& failed,
                                                 std::span<const std::uint64_t> state_bytes,
                                                 const damaged_places& damaged = {});

namespace detail {

/// Makes a plan, and tracks the bytes that each rank sends in it.
class recovery_planner {
 public:
  recovery_planner(const replica_map& map, const rank_set& failed, std::span<const std::uint64_t> state_bytes,
                   const damaged_places& damaged)
      : map_(map), failed_(failed), damaged_(damaged), bytes_(state_bytes), load_(state_bytes.size(), 0) {}

  [[nodiscard]] recovery_plan plan() {
    std::vector<std::pair<std::size_t, rank_id>> order;
    for (const rank_id rank : failed_ | damaged_.own) {
      if (const std::size_t sources = spare_sources(rank); sources != 0) {
        order.emplace_back(sources, rank);
      } else {
        plan_.unrecoverable.insert(rank);
      }
    }
    std::ranges::sort(order);
    for (const auto& [live, rank] : order) {
      if (map_.scheme().is_coded()) {
        rebuild(rank);
      } else {
        fetch(rank);
      }
    }
    for (const std::uint64_t load : load_) {
      plan_.bytes_sent += load;
      plan_.max_sent = std::max(plan_.max_sent, load);
    }
    return std::move(plan_);
  }

 private:
  [[nodiscard]] bool has_copy(rank_id holder, rank_id of) const {
    return !failed_.contains(holder) && !damaged_.has_copy(holder, of);
  }
  [[nodiscard]] bool has_piece(const std::vector<rank_id>& group, const coded_group& layout,
                               std::uint32_t member, std::uint32_t codeword) const {
    const rank_id holder = group[member];
    if (failed_.contains(holder)) return false;
    return to_index(layout.piece_of(member, codeword)) < layout.shape().data
               ? !damaged_.own.contains(holder)
               : !damaged_.has_parity(holder, codeword);
  }
  [[nodiscard]] std::vector<std::uint32_t> with_pieces(const std::vector<rank_id>& group,
                                                       const coded_group& layout,
                                                       std::uint32_t codeword) const {
    std::vector<std::uint32_t> members;
    for (std::uint32_t member = 0; member < layout.members(); ++member) {
      if (has_piece(group, layout, member, codeword)) members.push_back(member);
    }
    return members;
  }

  /// Returns how many sources can restore a state, or a stripe of it, beyond the number that it takes;
  /// nothing if there are too few.
  [[nodiscard]] std::size_t spare_sources(rank_id rank) const {
    if (!map_.scheme().is_coded()) {
      return static_cast<std::size_t>(
          std::ranges::count_if(map_.holders(rank), [&](rank_id holder) { return has_copy(holder, rank); }));
    }
    const std::vector<rank_id>& group = map_.groups()[map_.group_of(rank)];
    const coded_group layout = map_.layout(map_.group_of(rank));
    std::size_t fewest = layout.members();
    for (std::uint32_t stripe = 0; stripe < layout.shape().data; ++stripe) {
      const std::uint32_t codeword = layout.codeword_of(map_.member_of(rank), stripe);
      fewest = std::min(fewest, with_pieces(group, layout, codeword).size());
    }
    return fewest < layout.shape().data ? 0 : fewest + 1 - layout.shape().data;
  }

  void fetch(rank_id rank) {
    const std::uint64_t bytes = bytes_[to_index(rank)];
    rank_id best = rank;
    for (const rank_id holder : map_.holders(rank)) {
      if (!has_copy(holder, rank)) continue;
      if (best == rank || load_[to_index(holder)] < load_[to_index(best)]) best = holder;
    }
    load_[to_index(best)] += bytes;
    plan_.steps.push_back({.kind = recovery_kind::fetch,
                           .lost = rank,
                           .range = {0, bytes},
                           .sources = {{.holder = best, .bytes = bytes}}});
  }

  void rebuild(rank_id rank) {
    const std::vector<rank_id>& group = map_.groups()[map_.group_of(rank)];
    const coded_group layout = map_.layout(map_.group_of(rank));
    const std::uint32_t member = map_.member_of(rank);
    for (std::uint32_t stripe = 0; stripe < layout.shape().data; ++stripe) {
      const redundancy::byte_range range = stripe_of(bytes_[to_index(rank)], layout.shape().data, stripe);
      if (range.count != 0 || stripe == 0)
        plan_.steps.push_back(rebuild_stripe(rank, range, group, layout, layout.codeword_of(member, stripe)));
    }
  }

  [[nodiscard]] recovery_step rebuild_stripe(rank_id rank, const redundancy::byte_range& range,
                                             const std::vector<rank_id>& group, const coded_group& layout,
                                             std::uint32_t codeword) {
    std::vector<std::uint32_t> live = with_pieces(group, layout, codeword);
    std::ranges::sort(live, [&](std::uint32_t a, std::uint32_t b) {
      const std::uint64_t load_a = load_[to_index(group[a])];
      const std::uint64_t load_b = load_[to_index(group[b])];
      return load_a != load_b ? load_a < load_b : a < b;
    });
    live.resize(layout.shape().data);
    std::ranges::sort(live);
    recovery_step step{
        .kind = recovery_kind::rebuild, .lost = rank, .range = range, .codeword = codeword, .sources = {}};
    std::vector<piece_id> pieces;
    pieces.reserve(live.size());
    for (const std::uint32_t member : live)
      pieces.push_back(layout.piece_of(member, codeword));
    const piece_id target = layout.piece_of(map_.member_of(rank), codeword);
    std::vector<std::uint8_t> coefficients(pieces.size(), 1);
    if (map_.scheme().kind() == redundancy_kind::reed_solomon)
      coefficients = plan_rebuild_from(layout.shape(), pieces, std::span(&target, 1)).coefficients;
    for (std::size_t s = 0; s < live.size(); ++s) {
      const rank_id holder = group[live[s]];
      const std::uint64_t bytes =
          std::min(range.count, piece_bytes(group, layout, codeword, pieces[s], live[s]));
      load_[to_index(holder)] += bytes;
      step.sources.push_back(
          {.holder = holder, .piece = pieces[s], .coefficient = coefficients[s], .bytes = bytes});
    }
    return step;
  }

  /// Returns a member's bytes of a codeword: a stripe of its own, or parity, which is as long as the longest
  /// stripe.
  [[nodiscard]] std::uint64_t piece_bytes(const std::vector<rank_id>& group, const coded_group& layout,
                                          std::uint32_t codeword, piece_id piece,
                                          std::uint32_t member) const {
    const std::uint32_t k = layout.shape().data;
    if (to_index(piece) < k)
      return stripe_of(bytes_[to_index(group[member])], k, layout.stripe_in(member, codeword)).count;
    std::uint64_t longest = 0;
    for (std::uint32_t data = 0; data < k; ++data) {
      const std::uint32_t of = layout.member_of(piece_id{data}, codeword);
      longest =
          std::max(longest, stripe_of(bytes_[to_index(group[of])], k, layout.stripe_in(of, codeword)).count);
    }
    return longest;
  }

  const replica_map& map_;
  const rank_set& failed_;
  const damaged_places& damaged_;
  std::span<const std::uint64_t> bytes_;
  std::vector<std::uint64_t> load_;
  recovery_plan plan_{};
};

}  // namespace detail

inline recovery_plan plan_recovery(const replica_map& map, const rank_set& failed,
                                   std::span<const std::uint64_t> state_bytes,
                                   const damaged_places& damaged) {
  const std::uint32_t world = to_number(map.world());
  if (state_bytes.size() != world) {
    throw argument_error("plan_recovery: bytes of " + std::to_string(state_bytes.size()) +
                         " states are given, but the world has " + std::to_string(world) + " ranks");
  }
  const rank_set strangers = failed - rank_set::first(map.world());
  if (!strangers.empty()) {
    throw argument_error("plan_recovery: failed " + to_text(strangers) + "; the world has ranks 0 to " +
                         std::to_string(world - 1));
  }
  return detail::recovery_planner(map, failed, state_bytes, damaged).plan();
}

}  // namespace v0
}  // namespace llmmem
