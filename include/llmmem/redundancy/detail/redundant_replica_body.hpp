/// @file
/// The body of `redundant_replica`: the order in which its objects work.
#pragma once

#include <llmmem/comm/errors.hpp>
#include <llmmem/detail/named_range.hpp>
#include <llmmem/redundancy/errors.hpp>
#include <llmmem/redundancy/redundant_replica.hpp>

#include <cstddef>
#include <utility>

namespace llmmem {
inline namespace v0 {

template <seated_transport T, seat_placement Place>
redundant_replica<T, Place>::redundant_replica(T& ranks, const redundancy_scheme& scheme,
                                               std::span<const std::uint64_t> sizes,
                                               std::span<const seat_id> homes, Place place,
                                               const replica_options& options)
    : ranks_(ranks),
      place_(std::move(place)),
      setup_(scheme, sizes, homes, detail::seats_of_job(ranks), options),
      owners_(setup_),
      rendezvous_(ranks_, setup_),
      sender_(ranks_, setup_),
      restorer_(ranks_, setup_) {}

template <seated_transport T, seat_placement Place>
result<recovered_state> redundant_replica<T, Place>::recover_to(detail::destinations_ref into, deadline by) {
  const detail::named_range range("redundant_replica recover");
  try {
    const result<recovered_state> outcome = recover_now(into, by);
    if (!outcome) restorer_.clear();
    // Revoke, because other ranks wait for the next message.
    if (outcome.code() == errc::message_damaged || outcome.code() == errc::size_mismatch) ranks_.revoke();
    return outcome;
  } catch (...) {
    ranks_.revoke();
    restorer_.clear();
    throw;
  }
}

template <seated_transport T, seat_placement Place>
result<recovered_state> redundant_replica<T, Place>::recover_now(detail::destinations_ref into, deadline by) {
  restorer_.clear();
  owners_.begin(ranks_.epoch(), ranks_.rank(), setup_.map_of(place_, ranks_.seats()));
  const detail::kept_damage damage = held_.begin_recovery(ranks_.epoch());
  const auto met = rendezvous_.meet(held_, damage, setup_.digest(owners_.map()), by);
  if (!met) return met.error();
  if (!*met) return nothing_found();
  const detail::found_version& found = **met;
  const ownership_plan plan = plan_ownership(found.facts.layout, setup_.map_of(place_, found.facts.seats),
                                             found.change, found.damaged);
  if (!plan.unrecoverable.empty()) {
    owners_.assign(setup_.owners_by_home(ranks_.seats()));
    owners_.lose(plan.unrecoverable);
    owners_.settle();
    const rank_set gone = found.change.lost() | found.damaged.own;
    return setup_.refuse(errc::state_lost, to_index(*plan.unrecoverable.lowest()), plan.unrecoverable.size(),
                         gone.size());
  }
  owners_.assign(plan.owners);
  const result<std::uint64_t> rebuilt = restorer_.restore(found, plan, held_.committed(), into, by);
  if (!rebuilt) return rebuilt.error();
  owners_.settle();
  ++recoveries_;
  return recovered_state{.is_recovered = true,
                         .version = found.facts.version,
                         .moved_bytes = plan.moved_bytes,
                         .rebuilt_bytes = *rebuilt};
}

/// No rank holds a version: parts belong to the ranks at their homes.
template <seated_transport T, seat_placement Place>
recovered_state redundant_replica<T, Place>::nothing_found() {
  owners_.assign(setup_.owners_by_home(ranks_.seats()));
  owners_.settle();
  constexpr redundancy::absence why[] = {redundancy::absence::lost, redundancy::absence::never_kept,
                                         redundancy::absence::forgotten, redundancy::absence::lost};
  return {.reason = why[static_cast<std::size_t>(held_.past())]};
}

template <seated_transport T, seat_placement Place>
result<void> redundant_replica<T, Place>::keep(std::uint64_t version, std::span<const part_bytes> parts,
                                               deadline by) {
  held_.drop();
  if (auto settled = owners_.check_settled(ranks_.epoch()); !settled) return settled;
  const auto by_part = owners_.by_part(parts);
  if (!by_part) return by_part.error();
  detail::kept_version& made = held_.begin();
  const std::span<const seat_id> seats = ranks_.seats();
  detail::version_facts facts;
  facts.version = version;
  facts.epoch = owners_.epoch();
  facts.seats.assign(seats.begin(), seats.end());
  facts.layout = {.part_bytes = setup_.sizes(), .owners = owners_.all(), .world = to_number(ranks_.world())};
  made.begin(std::move(facts), ranks_.rank());
  for (const part_id part : owners_.own_parts())
    made.add_own(part, (*by_part)[to_index(part)]);
  const result<void> done = sender_.spread(made, owners_, *by_part, by);
  if (done) held_.finish();
  if (done) ++keeps_;
  if (done.code() == errc::message_damaged) ranks_.revoke();  // other ranks wait for the next message
  return done;
}

template <seated_transport T, seat_placement Place>
void redundant_replica<T, Place>::commit() noexcept {
  if (held_.commit()) restorer_.clear();
}

template <seated_transport T, seat_placement Place>
void redundant_replica<T, Place>::forget() noexcept {
  held_.forget();
  restorer_.clear();  // some of its parts are in the memory of held versions
}

template <seated_transport T, seat_placement Place>
replica_stats redundant_replica<T, Place>::stats() const noexcept {
  replica_stats now{.keeps = keeps_, .recoveries = recoveries_};
  held_.count(now);
  return now;
}

}  // namespace v0
}  // namespace llmmem
