/// @file
/// How placements divide ranks into groups.
#pragma once

#include <llmmem/redundancy/placement.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

namespace detail {

inline void check_placement(const char* who, const redundancy_scheme& scheme, rank_count world) {
  check_replica_world(to_number(world));
  if (const std::optional<std::string> why = scheme.fits(world))
    throw argument_error(std::string(who) + ": " + *why);
}

/// Divides a column into groups. @pre it has at least a group's ranks
inline void cut_column(const redundancy_scheme& scheme, const std::vector<rank_id>& column,
                       std::vector<std::vector<rank_id>>& groups) {
  const std::size_t count = column.size() / scheme.group_ranks();
  for (std::size_t g = 0; g < count; ++g) {
    index_range range = even_share(column.size(), g, count);
    if (!scheme.is_coded()) {
      range.first = g * scheme.group_ranks();
      range.count = g + 1 == count ? column.size() - range.first : scheme.group_ranks();
    }
    const auto first = column.begin() + static_cast<std::ptrdiff_t>(range.first);
    groups.emplace_back(first, first + static_cast<std::ptrdiff_t>(range.count));
  }
}

struct domain_ranks {
  domain_id domain;
  std::vector<rank_id> ranks;
};

/// Returns the ranks of each domain, in the order of the domains' numbers.
[[nodiscard]] inline std::vector<domain_ranks> ranks_by_domain(std::span<const domain_id> domains) {
  std::vector<domain_ranks> all;
  for (std::uint32_t rank = 0; rank < domains.size(); ++rank) {
    auto at =
        std::ranges::find_if(all, [&](const domain_ranks& each) { return each.domain >= domains[rank]; });
    if (at == all.end() || at->domain != domains[rank]) at = all.insert(at, {domains[rank], {}});
    at->ranks.push_back(rank_id{rank});
  }
  return all;
}

/// Places the copies of each rank so that all are in different domains, on the ranks that keep least; among
/// equals, on the next rank in order. @pre there are as many domains as copies
[[nodiscard]] inline replica_map place_by_load(const redundancy_scheme& scheme,
                                               std::span<const domain_id> domains) {
  const auto world = static_cast<std::uint32_t>(domains.size());
  std::vector<std::vector<rank_id>> holders(world);
  std::vector<std::uint32_t> keeps(world, 0);
  for (std::uint32_t rank = 0; rank < world; ++rank) {
    std::vector<domain_id> used{domains[rank]};
    while (holders[rank].size() + 1 < scheme.copies()) {
      std::uint32_t best = rank;
      for (std::uint32_t next = 1; next < world; ++next) {
        const std::uint32_t other = (rank + next) % world;
        if (std::ranges::find(used, domains[other]) != used.end()) continue;
        if (best == rank || keeps[other] < keeps[best]) best = other;
      }
      holders[rank].push_back(rank_id{best});
      used.push_back(domains[best]);
      ++keeps[best];
    }
  }
  return replica_map::of_holders(scheme, std::move(holders));
}

}  // namespace detail

inline replica_map ring_neighbours::place(const redundancy_scheme& scheme, rank_count world) const {
  detail::check_placement(name(), scheme, world);
  std::vector<rank_id> all;
  all.reserve(to_number(world));
  for (std::uint32_t rank = 0; rank < to_number(world); ++rank)
    all.push_back(rank_id{rank});
  std::vector<std::vector<rank_id>> groups;
  if (scheme.is_coded()) {
    detail::cut_column(scheme, all, groups);
  } else {
    groups.push_back(std::move(all));
  }
  return replica_map::of_groups(scheme, world, std::move(groups));
}

inline replica_map redundancy::grouped::place(const redundancy_scheme& scheme, rank_count world) const {
  detail::check_placement(name(), scheme, world);
  const std::uint32_t ranks = to_number(world);
  if (ranks / jump_ < scheme.group_ranks()) {
    throw argument_error("grouped: " + to_text(scheme) + " needs " + std::to_string(scheme.group_ranks()) +
                         " ranks a jump of " + std::to_string(jump_) + " apart, but a world of " +
                         std::to_string(ranks) + " has " + std::to_string(ranks / jump_) +
                         " in some columns: use a jump of at most " +
                         std::to_string(ranks / scheme.group_ranks()));
  }
  std::vector<std::vector<rank_id>> groups;
  for (std::uint32_t first = 0; first < jump_; ++first) {
    std::vector<rank_id> column;
    for (std::uint32_t rank = first; rank < ranks; rank += jump_)
      column.push_back(rank_id{rank});
    detail::cut_column(scheme, column, groups);
  }
  return replica_map::of_groups(scheme, world, std::move(groups));
}

inline replica_map failure_domains::place(const redundancy_scheme& scheme, rank_count world) const {
  detail::check_placement(name(), scheme, world);
  if (domains_.size() != to_number(world)) {
    throw argument_error("failure_domains: domains of " + std::to_string(domains_.size()) +
                         " ranks are given, but the world has " + std::to_string(to_number(world)));
  }
  std::vector<detail::domain_ranks> by_domain = detail::ranks_by_domain(domains_);
  const std::size_t domains = by_domain.size();
  std::ranges::sort(by_domain, [](const auto& a, const auto& b) {
    return a.ranks.size() != b.ranks.size() ? a.ranks.size() > b.ranks.size() : a.domain < b.domain;
  });
  const std::size_t count = domains_.size() / scheme.group_ranks();
  const detail::domain_ranks& largest = by_domain.front();
  if (largest.ranks.size() > count) {
    if (!scheme.is_coded() && domains >= scheme.copies()) return detail::place_by_load(scheme, domains_);
    if (crowded_ == crowded_domains::refuse) {
      throw argument_error("failure_domains: domain " + std::to_string(to_index(largest.domain)) + " has " +
                           std::to_string(largest.ranks.size()) + " ranks, but " + to_text(scheme) +
                           " makes only " + std::to_string(count) + (count == 1 ? " group" : " groups") +
                           " of " + std::to_string(domains_.size()) + " ranks in " + std::to_string(domains) +
                           (domains == 1 ? " domain" : " domains") +
                           ", so some would share a group: use a scheme with smaller groups, or "
                           "crowded_domains::spread without that guarantee");
    }
  }
  std::vector<std::vector<rank_id>> groups(count);
  std::size_t dealt = 0;
  for (const detail::domain_ranks& each : by_domain) {
    for (const rank_id rank : each.ranks)
      groups[dealt++ % count].push_back(rank);
  }
  return replica_map::of_groups(scheme, world, std::move(groups));
}

inline std::vector<domain_id> fatal_domains(const replica_map& map, std::span<const domain_id> domains) {
  std::vector<domain_id> fatal;
  for (const detail::domain_ranks& each : detail::ranks_by_domain(domains)) {
    rank_set failed;
    for (const rank_id rank : each.ranks)
      failed.insert(rank);
    if (!map.survives(failed)) fatal.push_back(each.domain);
  }
  return fatal;
}

}  // namespace v0
}  // namespace llmmem
