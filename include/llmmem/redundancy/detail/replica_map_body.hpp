/// @file
/// The body of `replica_map`.
#pragma once

#include <llmmem/redundancy/detail/loss_counting.hpp>
#include <llmmem/redundancy/replica_map.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// @throws argument_error  for an empty world, or one with more ranks than a `rank_set` holds.
inline void check_replica_world(std::uint64_t world) {
  if (world == 0 || world > rank_set::capacity) {
    throw argument_error("replica_map: a world of " + std::to_string(world) + " ranks; it must be 1 to 1024");
  }
}

/// Advances to the next set of `failures` of `world` ranks; returns false after the last one.
[[nodiscard]] inline bool next_choice(std::vector<std::uint32_t>& choice, std::uint32_t world) {
  for (std::size_t i = choice.size(); i-- != 0;) {
    if (choice[i] + (choice.size() - i) >= world) continue;
    ++choice[i];
    for (std::size_t j = i + 1; j < choice.size(); ++j)
      choice[j] = choice[j - 1] + 1;
    return true;
  }
  return false;
}

/// Sebastiano Vigna's SplitMix64: the next of a sequence that its state determines.
[[nodiscard]] inline std::uint64_t split_mix(std::uint64_t& state) noexcept {
  std::uint64_t mixed = state += 0x9E37'79B9'7F4A'7C15U;
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58'476D'1CE4'E5B9U;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D0'49BB'1331'11EBU;
  return mixed ^ (mixed >> 31);
}

/// Returns a square root by Newton's iteration, for 0 to 1, because <cmath> is a costly header for one
/// function.
[[nodiscard]] inline double root(double of) noexcept {
  if (of <= 0) return 0;
  double guess = 1;
  for (int step = 0; step < 64; ++step)
    guess = (guess + of / guess) / 2;
  return guess;
}

}  // namespace detail

inline replica_map::replica_map(const redundancy_scheme& scheme, std::vector<std::vector<rank_id>> holders)
    : scheme_(scheme), holders_(std::move(holders)), kept_(holders_.size()) {
  for (std::uint32_t rank = 0; rank < holders_.size(); ++rank) {
    for (const rank_id holder : holders_[rank])
      kept_[to_index(holder)].push_back(rank_id{rank});
  }
}

inline replica_map replica_map::of_holders(const redundancy_scheme& scheme,
                                           std::vector<std::vector<rank_id>> holders) {
  detail::check_replica_world(holders.size());
  if (scheme.is_coded()) {
    throw argument_error("replica_map: " + to_text(scheme) +
                         " has parity, which needs groups; use of_groups()");
  }
  for (std::uint32_t rank = 0; rank < holders.size(); ++rank) {
    const std::string who = "replica_map: rank " + std::to_string(rank);
    if (holders[rank].size() != scheme.copies() - 1) {
      throw argument_error(who + " has " + std::to_string(holders[rank].size()) + " holders; " +
                           to_text(scheme) + " needs " + std::to_string(scheme.copies() - 1));
    }
    rank_set seen{rank_id{rank}};
    for (const rank_id holder : holders[rank]) {
      if (to_index(holder) >= holders.size() || seen.contains(holder)) {
        throw argument_error(who + " has holder " + std::to_string(to_index(holder)) +
                             "; holders are different other ranks of a world of " +
                             std::to_string(holders.size()));
      }
      seen.insert(holder);
    }
  }
  return replica_map(scheme, std::move(holders));
}

inline replica_map replica_map::of_groups(const redundancy_scheme& scheme, rank_count world,
                                          std::vector<std::vector<rank_id>> groups) {
  detail::check_replica_world(to_number(world));
  rank_set seen;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const std::string who = "replica_map: group " + std::to_string(g);
    if (groups[g].size() < scheme.group_ranks()) {
      throw argument_error(who + " has " + std::to_string(groups[g].size()) + " ranks; " + to_text(scheme) +
                           " needs " + std::to_string(scheme.group_ranks()));
    }
    if (scheme.is_coded() && groups[g].size() > max_code_pieces) {
      throw argument_error(who + " has " + std::to_string(groups[g].size()) +
                           " ranks, but a code has at most 256 pieces; use smaller groups");
    }
    for (const rank_id rank : groups[g]) {
      if (to_index(rank) >= to_number(world)) {
        throw argument_error(who + " has rank " + std::to_string(to_index(rank)) +
                             "; the world has ranks 0 to " + std::to_string(to_number(world) - 1));
      }
      if (seen.contains(rank)) {
        throw argument_error(who + " has rank " + std::to_string(to_index(rank)) +
                             ", which is already in a group");
      }
      seen.insert(rank);
    }
  }
  const rank_set missing = rank_set::first(world) - seen;
  if (!missing.empty()) throw argument_error("replica_map: no group has " + to_text(missing));

  std::vector<std::vector<rank_id>> holders(to_number(world));
  std::vector<place> places(to_number(world));
  for (std::uint32_t g = 0; g < groups.size(); ++g) {
    const std::size_t members = groups[g].size();
    const std::size_t others = scheme.is_coded() ? members - 1 : scheme.copies() - 1;
    for (std::uint32_t m = 0; m < members; ++m) {
      const std::uint32_t rank = to_index(groups[g][m]);
      places[rank] = {g, m};
      for (std::size_t next = 1; next <= others; ++next)
        holders[rank].push_back(groups[g][(m + next) % members]);
    }
  }
  replica_map map(scheme, std::move(holders));
  map.groups_ = std::move(groups);
  map.place_ = std::move(places);
  return map;
}

inline redundancy::survival replica_map::survives(const rank_set& failed) const {
  redundancy::survival what;
  if (scheme_.is_coded()) {
    for (const std::vector<rank_id>& group : groups_) {
      rank_set down;
      for (const rank_id rank : group) {
        if (failed.contains(rank)) down.insert(rank);
      }
      if (down.size() > scheme_.tolerates()) what.lost |= down;
    }
    return what;
  }
  for (std::uint32_t rank = 0; rank < holders_.size(); ++rank) {
    if (!failed.contains(rank_id{rank})) continue;
    bool held = false;
    for (const rank_id holder : holders_[rank])
      held = held || !failed.contains(holder);
    if (!held) what.lost.insert(rank_id{rank});
  }
  return what;
}

inline loss_chance replica_map::loss_probability(std::uint32_t failures,
                                                 const chance_options& options) const {
  const auto ranks = static_cast<std::uint32_t>(holders_.size());
  if (failures > ranks) {
    throw argument_error("replica_map: " + std::to_string(failures) + " failures in a world of " +
                         std::to_string(ranks));
  }
  if (!groups_.empty()) {
    detail::loss_counts counts{{0}, {1}};
    for (const std::vector<rank_id>& group : groups_) {
      counts = detail::combine(counts,
                               scheme_.is_coded()
                                   ? detail::count_group(group.size(), scheme_.tolerates(), failures)
                                   : detail::count_ring(group.size(), scheme_.copies(), failures),
                               failures);
    }
    return {counts.lost[failures] / (counts.lost[failures] + counts.kept[failures])};
  }

  std::vector<std::uint32_t> choice(failures);
  const auto loses = [&] {
    rank_set failed;
    for (const std::uint32_t rank : choice)
      failed.insert(rank_id{rank});
    return !survives(failed);
  };
  const double sets = detail::binomial_row(ranks)[failures];
  if (sets <= static_cast<double>(options.most_enumerated)) {
    for (std::uint32_t i = 0; i < failures; ++i)
      choice[i] = i;
    std::uint64_t lost = 0;
    do {
      lost += loses() ? 1U : 0U;
    } while (detail::next_choice(choice, ranks));
    return {static_cast<double>(lost) / sets, chance_method::enumerated};
  }
  if (options.samples == 0) {
    throw argument_error(
        "replica_map: too many sets of failures to try all, and chance_options::samples is 0");
  }
  std::uint64_t state = options.seed;
  std::vector<std::uint32_t> order(ranks);
  for (std::uint32_t i = 0; i < ranks; ++i)
    order[i] = i;
  std::uint64_t lost = 0;
  for (std::uint64_t sample = 0; sample < options.samples; ++sample) {
    // The first steps of a shuffle, beginning with the order that the last one left.
    for (std::uint32_t i = 0; i < failures; ++i) {
      const auto other = static_cast<std::uint32_t>(i + detail::split_mix(state) % (ranks - i));
      std::swap(order[i], order[other]);
      choice[i] = order[i];
    }
    lost += loses() ? 1U : 0U;
  }
  const auto samples = static_cast<double>(options.samples);
  const double share = static_cast<double>(lost) / samples;
  return {share, chance_method::sampled, detail::root(share * (1 - share) / samples)};
}

}  // namespace v0
}  // namespace llmmem
