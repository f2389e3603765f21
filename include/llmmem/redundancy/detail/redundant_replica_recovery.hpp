/// @file
/// `redundant_replica`: giving back what was lost.
#pragma once

#include <llmmem/comm/errors.hpp>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/redundancy/errors.hpp>
#include <llmmem/redundancy/redundant_replica.hpp>

#include <algorithm>
#include <cstring>
#include <utility>

namespace llmmem {
inline namespace v0 {

template <seated_transport T, seat_placement Place>
std::vector<std::optional<rank_id>> redundant_replica<T, Place>::homes_now() const {
  const std::span<const seat_id> seats = ranks_->seats();
  std::vector<std::optional<rank_id>> homes(homes_.size());
  for (std::size_t i = 0; i < homes_.size(); ++i) {
    const auto at = std::ranges::find(seats, homes_[i]);
    if (at != seats.end()) homes[i] = rank_id{static_cast<std::uint32_t>(at - seats.begin())};
  }
  return homes;
}

/// Of the scheme, the parts, their homes, and who keeps what of whom in this epoch.
template <seated_transport T, seat_placement Place>
std::uint32_t redundant_replica<T, Place>::setup_digest() const {
  std::vector<std::uint64_t> words{static_cast<std::uint64_t>(scheme_.kind()), scheme_.shape().data,
                                   scheme_.shape().parity, sizes_.size()};
  words.insert(words.end(), sizes_.begin(), sizes_.end());
  for (const seat_id home : homes_)
    words.push_back(to_index(home));
  for (std::uint32_t rank = 0; map_ && rank < to_number(map_->world()); ++rank) {
    for (const rank_id holder : map_->holders(rank_id{rank}))
      words.push_back(to_index(holder));
  }
  return crc32c(0, std::as_bytes(std::span(words)));
}

/// Nothing is there yet: whose home is not taken goes to whoever has least.
template <seated_transport T, seat_placement Place>
void redundant_replica<T, Place>::own_by_home() {
  const std::vector<std::optional<rank_id>> homes = homes_now();
  std::vector<std::uint64_t> load(to_number(ranks_->world()), 0);
  for (std::size_t i = 0; i < homes.size(); ++i) {
    if (homes[i]) load[to_index(*homes[i])] += sizes_[i];
  }
  owners_.assign(homes.size(), rank_id{0});
  for (std::size_t i = 0; i < homes.size(); ++i) {
    const auto least = std::ranges::min_element(load) - load.begin();
    owners_[i] = homes[i].value_or(rank_id{static_cast<std::uint32_t>(least)});
    if (!homes[i]) load[to_index(owners_[i])] += sizes_[i];
  }
}

/// Words from one to all, with their checksum behind them.
template <seated_transport T, seat_placement Place>
result<void> redundant_replica<T, Place>::tell_all(std::vector<std::uint32_t>& words, rank_id from,
                                                   deadline by) {
  words.push_back(crc32c(0, std::as_bytes(std::span(words))));
  if (auto done = broadcast(*ranks_, std::as_writable_bytes(std::span(words)), from, call(by)); !done)
    return done;
  const std::uint32_t wanted = words.back();
  words.pop_back();
  const std::uint32_t sum = crc32c(0, std::as_bytes(std::span(words)));
  if (sum != wanted) return refuse(errc::message_damaged, to_index(from), wanted, sum);
  return {};
}

/// How the version was kept, from one that has it to all.
template <seated_transport T, seat_placement Place>
result<void> redundant_replica<T, Place>::learn(generation& about, rank_id from, std::uint32_t world,
                                                deadline by) {
  std::vector<std::uint32_t> words;
  if (ranks_->rank() == from) {
    for (const seat_id seat : committed_.seats)
      words.push_back(to_index(seat));
    for (const rank_id owner : committed_.layout.owners)
      words.push_back(to_index(owner));
    words.insert(words.end(), committed_.sums.begin(), committed_.sums.end());
  }
  words.resize(world + 2 * sizes_.size());
  if (auto done = tell_all(words, from, by); !done) return done;
  about.layout = {.part_bytes = sizes_, .owners = {}, .world = world};
  for (std::size_t i = 0; i < world; ++i)
    about.seats.push_back(seat_id{words[i]});
  for (std::size_t i = 0; i < sizes_.size(); ++i) {
    about.layout.owners.push_back(rank_id{words[world + i]});
    about.sums.push_back(words[world + sizes_.size() + i]);
  }
  return {};
}

/// Of what others are told of a version: all of them hold what comes back to it.
template <seated_transport T, seat_placement Place>
std::uint32_t redundant_replica<T, Place>::sum_about(const generation& held) noexcept {
  const std::uint64_t numbers[] = {held.version, held.epoch, to_index(held.self), held.layout.world};
  std::uint32_t sum = crc32c(0, std::as_bytes(std::span(numbers)));
  sum = crc32c(sum, std::as_bytes(std::span(held.seats)));
  sum = crc32c(sum, std::as_bytes(std::span(held.layout.owners)));
  return crc32c(sum, std::as_bytes(std::span(held.sums)));
}

template <seated_transport T, seat_placement Place>
result<recovered_state> redundant_replica<T, Place>::recover(deadline by) {
  return recover_for(nullptr, nullptr, by);
}

template <seated_transport T, seat_placement Place>
template <part_rooms Rooms>
result<recovered_state> redundant_replica<T, Place>::recover(deadline by, Rooms into) {
  const ask_room ask = [](void* whom, part_id part) -> std::span<std::byte> {
    return (*static_cast<Rooms*>(whom))(part);
  };
  return recover_for(ask, &into, by);
}

template <seated_transport T, seat_placement Place>
result<recovered_state> redundant_replica<T, Place>::recover_for(ask_room ask, void* whom, deadline by) {
  const auto give_up = [this] {
    recovered_.assign(sizes_.size(), {});
    rooms_.clear();
  };
  try {
    const result<recovered_state> outcome = recover_now(ask, whom, by);
    arrivals_.clear();
    if (!outcome) give_up();
    // Others wait for what comes after it.
    if (outcome.code() == errc::message_damaged || outcome.code() == errc::size_mismatch) ranks_->revoke();
    return outcome;
  } catch (...) {
    ranks_->revoke();
    give_up();
    throw;
  }
}

/// What all ranks say of themselves: the same to all.
template <seated_transport T, seat_placement Place>
auto redundant_replica<T, Place>::hear_all(std::uint32_t damaged, deadline by)
    -> result<std::vector<presence>> {
  std::vector<presence> all(to_number(ranks_->world()));
  presence& own = all[to_index(ranks_->rank())];
  own = {.version = committed_.version,
         .epoch = committed_.epoch,
         .rank = to_index(committed_.self),
         .world = committed_.is_there ? committed_.layout.world : 0,
         .setup = setup_digest(),
         .last = past_,
         .damaged = damaged};
  own.sum = sum_of(own);
  const std::span<std::byte> bytes = std::as_writable_bytes(std::span(all));
  const auto done =
      all_gather(*ranks_, bytes, even_blocks(bytes.size(), ranks_->world(), sizeof(presence)), call(by));
  if (!done) return done.error();
  for (std::uint32_t rank = 0; rank < all.size(); ++rank) {
    if (const auto sum = sum_of(all[rank]); sum != all[rank].sum)
      return refuse(errc::message_damaged, rank, all[rank].sum, sum);
  }
  for (std::uint32_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank].setup != all[0].setup)
      return refuse(errc::setup_differs, rank, all[0].setup, all[rank].setup);
  }
  return result<std::vector<presence>>(std::move(all));
}

/// Who has it, of what is said. A version is of the epoch it was kept in: numbers may have gone back since,
/// to those of a checkpoint, where one was away that still has a higher one.
template <seated_transport T, seat_placement Place>
auto redundant_replica<T, Place>::newest_of(std::span<const presence> all) noexcept -> const presence* {
  const presence* newest = nullptr;
  for (const presence& each : all) {
    if (each.world != 0 && (newest == nullptr || each.is_newer_than(*newest))) newest = &each;
  }
  return newest;
}

/// What there is to know of the newest version before its bytes move.
template <seated_transport T, seat_placement Place>
auto redundant_replica<T, Place>::find(std::span<const presence> all, const presence& newest,
                                       std::vector<std::uint32_t> damage, deadline by)
    -> result<found_version> {
  const auto holds = [&](const presence& each) { return each.world != 0 && each.is_of(newest); };
  // One that was left out of the last commit, and came back: what it holds is stale.
  if (!holds(all[to_index(ranks_->rank())])) committed_.is_there = false;
  // Assigned one by one: of members left to their defaults beside designated ones g++ 12 warns at -O3.
  found_version found;
  found.about.version = newest.version;
  found.change.home = homes_now();
  found.change.world = to_number(ranks_->world());
  const auto from = rank_id{static_cast<std::uint32_t>(&newest - all.data())};
  if (auto learnt = learn(found.about, from, newest.world, by); !learnt) return learnt.error();
  found.change.now.resize(newest.world);
  bool is_any_damaged = false;
  for (std::uint32_t rank = 0; rank < all.size(); ++rank) {
    if (!holds(all[rank])) continue;
    found.change.now[all[rank].rank] = rank_id{rank};
    is_any_damaged = is_any_damaged || all[rank].damaged != 0;
  }
  if (!is_any_damaged) return result<found_version>(std::move(found));
  if (auto learnt = learn_damage(found, std::move(damage), by); !learnt) return learnt.error();
  return result<found_version>(std::move(found));
}

/// In an epoch in which nothing is given back.
template <seated_transport T, seat_placement Place>
void redundant_replica<T, Place>::begin_afresh() {
  own_by_home();
  recovered_epoch_ = epoch_;
}

template <seated_transport T, seat_placement Place>
result<recovered_state> redundant_replica<T, Place>::recover_now(ask_room ask, void* whom, deadline by) {
  epoch_ = ranks_->epoch();
  map_ = place(ranks_->seats());
  pending_.is_there = false;
  lost_ = {};
  recovered_.assign(sizes_.size(), {});
  rooms_.clear();
  owners_.clear();
  recovered_epoch_ = 0;
  // What is said of a version is short, and all go by the word of one: it is proved each time.
  if (committed_.is_there && sum_about(committed_) != committed_.about) committed_.is_there = false;
  // Most of what is held is not asked for, and what is sent is proved by who gets it. Where that has gone
  // wrong, all is proved where it lies.
  std::vector<std::uint32_t> damage;
  if (committed_.is_there && is_doubted_) damage = damage_in(committed_);
  is_doubted_ = true;
  if (epoch_ == 1 && past_ == past::unknown) past_ = past::never_kept;  // it has seen all there was
  const result<std::vector<presence>> all = hear_all(bits_in(damage), by);
  if (!all) return all.error();
  for (const presence& each : *all)
    past_ = std::max(past_, each.last);
  const presence* const newest = newest_of(*all);
  if (newest == nullptr) {
    begin_afresh();
    constexpr absence why[] = {absence::gone, absence::never_kept, absence::forgotten, absence::gone};
    return recovered_state{.why_not = why[static_cast<std::size_t>(past_)]};
  }
  const result<found_version> found = find(*all, *newest, std::move(damage), by);
  if (!found) return found.error();
  const ownership_plan plan =
      plan_ownership(found->about.layout, place(found->about.seats), found->change, found->damaged);
  if (!plan.unrecoverable.empty()) {
    lost_ = plan.unrecoverable;
    begin_afresh();
    const rank_set gone = found->change.lost() | found->damaged.own;
    return refuse(errc::state_lost, to_index(*lost_.lowest()), lost_.size(), gone.size());
  }
  return give_back(*found, plan, ask, whom, by);
}

template <seated_transport T, seat_placement Place>
result<recovered_state> redundant_replica<T, Place>::give_back(const found_version& found,
                                                               const ownership_plan& plan, ask_room ask,
                                                               void* whom, deadline by) {
  owners_ = plan.owners;
  if (auto made = make_rooms(plan, ask, whom); !made) return made.error();
  if (auto moved = carry_out(plan, by); !moved) return moved.error();
  recovered_state outcome{.is_there = true, .version = found.about.version, .moved_bytes = plan.moved_bytes};
  for (const part_id part : mine()) {
    const std::uint32_t i = to_index(part);
    const bool is_here = arrivals_[i].room().empty();  // it has stayed where it was
    const std::uint32_t sum = is_here ? crc32c(0, recovered_[i]) : arrivals_[i].finish();
    const std::uint32_t wanted = found.about.sums[i];
    if (sum != wanted) return refuse(errc::message_damaged, to_index(ranks_->rank()), wanted, sum);
    const rank_id owner = found.about.layout.owners[i];
    if (!found.change.now[to_index(owner)] || found.damaged.own.contains(owner))
      outcome.rebuilt_bytes += sizes_[i];
  }
  recovered_epoch_ = epoch_;
  ++recoveries_;
  return outcome;
}

/// Where each part is to lie that this rank owns now. Without rooms of the caller's, a part that is held here
/// whole stays where it is, and others get memory.
template <seated_transport T, seat_placement Place>
result<void> redundant_replica<T, Place>::make_rooms(const ownership_plan& plan, ask_room ask, void* whom) {
  arrivals_.assign(sizes_.size(), {});
  std::vector<const part_transfer*> here(sizes_.size(), nullptr);
  for (const part_transfer& each : plan.transfers) {
    const std::uint32_t part = to_index(each.part);
    if (each.source == each.target && !each.is_summed && each.bytes == sizes_[part]) here[part] = &each;
  }
  for (const part_id part : mine()) {
    const std::uint32_t i = to_index(part);
    if (ask != nullptr) {
      arrivals_[i] = detail::part_arrival(ask(whom, part));
      const std::uint64_t bytes = arrivals_[i].room().size();
      if (bytes != sizes_[i]) return refuse(errc::size_mismatch, i, sizes_[i], bytes);
    } else if (here[i] != nullptr) {
      recovered_[i] = bytes_at(*here[i]);
      continue;
    } else {
      rooms_.emplace_back(sizes_[i]);
      arrivals_[i] = detail::part_arrival(rooms_.back().bytes());
    }
    recovered_[i] = arrivals_[i].room();
  }
  return {};
}

template <seated_transport T, seat_placement Place>
std::span<const std::byte> redundant_replica<T, Place>::bytes_at(
    const part_transfer& transfer) const noexcept {
  std::span<const std::byte> all = committed_.own;
  if (transfer.place == kept_place::copy) all = committed_.copies[to_index(transfer.of)];
  if (transfer.place == kept_place::parity) all = committed_.parities[transfer.codeword];
  return all.subspan(transfer.place_offset, transfer.bytes);
}

/// A piece of a transfer: what has come is still in a processor's caches when its checksum is taken, and the
/// next piece is on its way meanwhile.
template <seated_transport T, seat_placement Place>
result<void> redundant_replica<T, Place>::carry_out(const part_transfer& transfer, std::uint64_t at,
                                                    deadline by) {
  const rank_id self = ranks_->rank();
  const std::uint64_t bytes = std::min(transfer.bytes - at, recovery_piece);
  if (transfer.source == self && transfer.target != self)
    return ranks_->send(bytes_at(transfer).subspan(at, bytes), transfer.target, options_.tag, by);
  detail::part_arrival& part = arrivals_[to_index(transfer.part)];
  const std::uint64_t offset = transfer.part_offset + at;
  if (transfer.source == self) {
    part.take(offset, bytes_at(transfer).subspan(at, bytes), transfer.coefficient, transfer.is_summed);
    return {};
  }
  const std::span<std::byte> straight = part.landing(offset, bytes, transfer.is_summed);
  if (straight.empty()) scratch_.resize(bytes);
  const std::span<std::byte> into = straight.empty() ? std::span<std::byte>(scratch_) : straight;
  if (auto done = ranks_->recv(into, transfer.source, options_.tag, by); !done) return done;
  if (straight.empty()) {
    part.add(offset, into, transfer.coefficient);
  } else {
    part.landed(offset, bytes, transfer.coefficient);
  }
  return {};
}

template <seated_transport T, seat_placement Place>
result<void> redundant_replica<T, Place>::carry_out(const ownership_plan& plan, deadline by) {
  const rank_id self = ranks_->rank();
  for (const part_transfer& each : plan.transfers) {
    if (each.source != self && each.target != self) continue;
    if (each.source == self && each.target == self && arrivals_[to_index(each.part)].room().empty())
      continue;  // it stays where it is
    for (std::uint64_t at = 0; at < each.bytes; at += recovery_piece) {
      const result<void> done = carry_out(each, at, by);
      if (done) continue;
      ranks_->revoke();
      return done;
    }
  }
  return {};
}

template <seated_transport T, seat_placement Place>
std::span<const std::byte> redundant_replica<T, Place>::recovered(part_id part) const noexcept {
  return recovered_[to_index(part)];
}

}  // namespace v0
}  // namespace llmmem
