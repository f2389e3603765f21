/// @file
/// `redundant_replica`: giving back what was lost.
#pragma once

#include <llmmem/redundant_replica.hpp>
#include <llmmem/transfer/crc32c.hpp>

#include <algorithm>
#include <cstring>
#include <utility>

namespace llmmem::inline v0 {

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

/// Whether all that is held of a version is what was kept.
template <seated_transport T, seat_placement Place>
bool redundant_replica<T, Place>::is_whole(const generation& held) const noexcept {
  if (!check_blob(held, held.self, held.own)) return false;
  for (std::uint32_t rank = 0; rank < held.copies.size(); ++rank) {
    if (!held.copies[rank].empty() && !check_blob(held, rank_id{rank}, held.copies[rank])) return false;
  }
  for (std::size_t codeword = 0; codeword < held.parities.size(); ++codeword) {
    const std::vector<std::byte>& parity = held.parities[codeword];
    if (!parity.empty() && crc32c(0, parity) != held.parity_sums[codeword]) return false;
  }
  return true;
}

template <seated_transport T, seat_placement Place>
result<recovered_state> redundant_replica<T, Place>::recover(deadline by) {
  const result<recovered_state> outcome = recover_now(by);
  if (outcome.code() == errc::message_damaged) ranks_->revoke();  // others wait for what comes after it
  return outcome;
}

template <seated_transport T, seat_placement Place>
result<recovered_state> redundant_replica<T, Place>::recover_now(deadline by) {
  epoch_ = ranks_->epoch();
  map_ = place(ranks_->seats());
  pending_.is_there = false;
  lost_ = {};
  recovered_.assign(sizes_.size(), {});
  owners_.clear();
  // What is damaged here counts as lost: others have it whole.
  if (committed_.is_there && !is_whole(committed_)) committed_.is_there = false;
  std::vector<presence> all(to_number(ranks_->world()));
  presence& own = all[to_index(ranks_->rank())];
  own = {.version = committed_.version,
         .epoch = committed_.epoch,
         .rank = to_index(committed_.self),
         .world = committed_.is_there ? committed_.layout.world : 0};
  own.sum = sum_of(own);
  const std::span<std::byte> bytes = std::as_writable_bytes(std::span(all));
  const auto done =
      all_gather(*ranks_, bytes, even_blocks(bytes.size(), ranks_->world(), sizeof(presence)), call(by));
  if (!done) return done.error();
  for (std::uint32_t rank = 0; rank < all.size(); ++rank) {
    if (const auto sum = sum_of(all[rank]); sum != all[rank].sum)
      return refuse(errc::message_damaged, rank, all[rank].sum, sum);
  }

  const presence* newest = nullptr;
  for (const presence& each : all) {
    if (each.world == 0) continue;
    if (newest == nullptr || std::pair(each.version, each.epoch) > std::pair(newest->version, newest->epoch))
      newest = &each;
  }
  if (newest == nullptr) {
    own_by_home();
    return recovered_state{};
  }
  const auto holds = [&](const presence& each) {
    return each.world != 0 && each.version == newest->version && each.epoch == newest->epoch;
  };
  // One that was left out of the last commit, and came back: what it holds is stale.
  if (!holds(all[to_index(ranks_->rank())])) committed_.is_there = false;
  generation about;
  const auto from = rank_id{static_cast<std::uint32_t>(newest - all.data())};
  if (auto learnt = learn(about, from, newest->world, by); !learnt) return learnt.error();
  membership_change change{.home = homes_now(), .world = to_number(ranks_->world())};
  change.now.resize(about.layout.world);
  for (std::uint32_t rank = 0; rank < all.size(); ++rank) {
    if (holds(all[rank])) change.now[all[rank].rank] = rank_id{rank};
  }
  const ownership_plan plan = plan_ownership(about.layout, place(about.seats), change);
  if (!plan.unrecoverable.empty()) {
    lost_ = plan.unrecoverable;
    own_by_home();
    return refuse(errc::state_lost, to_index(*lost_.lowest()), lost_.size(), change.lost().size());
  }
  owners_ = plan.owners;
  if (auto moved = carry_out(plan, by); !moved) return moved.error();
  recovered_state outcome{.is_there = true, .version = newest->version, .moved_bytes = plan.moved_bytes};
  for (const part_id part : mine()) {
    const std::uint32_t sum = crc32c(0, recovered(part));
    if (sum != about.sums[to_index(part)])
      return refuse(errc::message_damaged, to_index(ranks_->rank()), about.sums[to_index(part)], sum);
    if (!change.now[to_index(about.layout.owners[to_index(part)])])
      outcome.rebuilt_bytes += sizes_[to_index(part)];
  }
  ++recoveries_;
  return outcome;
}

template <seated_transport T, seat_placement Place>
std::span<const std::byte> redundant_replica<T, Place>::bytes_at(
    const part_transfer& transfer) const noexcept {
  std::span<const std::byte> all = committed_.own;
  if (transfer.place == kept_place::copy) all = committed_.copies[to_index(transfer.of)];
  if (transfer.place == kept_place::parity) all = committed_.parities[transfer.codeword];
  return all.subspan(transfer.place_offset, transfer.bytes);
}

template <seated_transport T, seat_placement Place>
void redundant_replica<T, Place>::apply(const part_transfer& transfer,
                                        std::span<const std::byte> bytes) noexcept {
  const std::span<std::byte> part(recovered_[to_index(transfer.part)]);
  const std::span<std::byte> into = part.subspan(transfer.part_offset, bytes.size());
  if (transfer.is_summed) {
    static_cast<void>(gf256_multiply_add(into, bytes, transfer.coefficient));  // as long as each other
  } else {
    std::memcpy(into.data(), bytes.data(), bytes.size());
  }
}

template <seated_transport T, seat_placement Place>
result<void> redundant_replica<T, Place>::carry_out(const ownership_plan& plan, deadline by) {
  const rank_id self = ranks_->rank();
  for (const part_id part : mine())
    recovered_[to_index(part)].assign(sizes_[to_index(part)], std::byte{0});
  for (const part_transfer& each : plan.transfers) {
    result<void> done;
    if (each.source == self && each.target == self) {
      apply(each, bytes_at(each));
    } else if (each.source == self) {
      done = ranks_->send(bytes_at(each), each.target, options_.tag, by);
    } else if (each.target == self) {
      scratch_.resize(each.bytes);
      done = ranks_->recv(scratch_, each.source, options_.tag, by);
      if (done) apply(each, scratch_);
    }
    if (done) continue;
    ranks_->revoke();
    return done;
  }
  return {};
}

template <seated_transport T, seat_placement Place>
std::span<const std::byte> redundant_replica<T, Place>::recovered(part_id part) const noexcept {
  return recovered_[to_index(part)];
}

}  // namespace llmmem::inline v0
