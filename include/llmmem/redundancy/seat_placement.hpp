/// @file
/// `seat_placement`: the placement for an epoch's members, by their seats.
#pragma once

#include <llmmem/comm/ranks.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/redundancy/placement.hpp>

#include <concepts>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Makes the placement for the members of an epoch, by their seats.
template <class P>
concept seat_placement = std::copyable<P> && requires(const P& place, std::span<const seat_id> seats) {
  { place(seats) } -> replica_placement;
};

/// The same placement for all members: only their number matters.
template <replica_placement Placement = ring_neighbours>
class any_seats {
 public:
  explicit any_seats(Placement of_any = Placement()) : placement_(std::move(of_any)) {}
  [[nodiscard]] Placement operator()(std::span<const seat_id> /*seats*/) const { return placement_; }

 private:
  Placement placement_;
};

static_assert(seat_placement<any_seats<>>);

/// `failure_domains` of the remaining members: each seat has its domain. If the copies no longer fit into
/// different domains, they are spread as widely as possible.
class seat_domains {
 public:
  /// @param domains  the domain of each seat, by seat number.
  explicit seat_domains(std::vector<domain_id> domains) : domains_(std::move(domains)) {}
  /// @throws argument_error  for a seat without a domain.
  [[nodiscard]] failure_domains operator()(std::span<const seat_id> seats) const;

 private:
  std::vector<domain_id> domains_;
};

static_assert(seat_placement<seat_domains>);

inline failure_domains seat_domains::operator()(std::span<const seat_id> seats) const {
  std::vector<domain_id> of_ranks;
  of_ranks.reserve(seats.size());
  for (const seat_id seat : seats) {
    if (to_index(seat) >= domains_.size()) {
      throw argument_error("seat_domains: seat " + std::to_string(to_index(seat)) + " has no domain, but " +
                           std::to_string(domains_.size()) +
                           " seats have one; give one for each seat of the job");
    }
    of_ranks.push_back(domains_[to_index(seat)]);
  }
  return failure_domains(std::move(of_ranks), crowded_domains::spread);
}

}  // namespace v0
}  // namespace llmmem
