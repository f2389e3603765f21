/// @file
/// `redundant_replica`: keeping a version.
#pragma once

#include <llmmem/comm/errors.hpp>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/hash/errors.hpp>
#include <llmmem/redundancy/errors.hpp>
#include <llmmem/redundancy/gf256.hpp>
#include <llmmem/redundancy/redundant_replica.hpp>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// How many seats there are, members or not, where the transport can tell.
template <class T>
[[nodiscard]] std::optional<std::uint32_t> seats_of_job(T& ranks) {
  if constexpr (requires { ranks.endpoint().seats(); }) {
    return static_cast<std::uint32_t>(ranks.endpoint().seats());
  } else {
    return std::nullopt;
  }
}

}  // namespace detail

inline failure_domains seat_domains::operator()(std::span<const seat_id> seats) const {
  std::vector<domain_id> of_ranks;
  of_ranks.reserve(seats.size());
  for (const seat_id seat : seats) {
    if (to_index(seat) >= domains_.size()) {
      throw argument_error("seat_domains: seat " + std::to_string(to_index(seat)) + " has no domain, " +
                           std::to_string(domains_.size()) +
                           " seats have; give one for each seat of the job");
    }
    of_ranks.push_back(domains_[to_index(seat)]);
  }
  return failure_domains(std::move(of_ranks), crowded_domains::spread);
}

template <seated_transport T, seat_placement Place>
redundant_replica<T, Place>::redundant_replica(T& ranks, const redundancy_scheme& scheme,
                                               std::span<const std::uint64_t> sizes,
                                               std::span<const seat_id> homes, Place place,
                                               const replica_options& options)
    : ranks_(&ranks),
      scheme_(scheme),
      sizes_(sizes.begin(), sizes.end()),
      homes_(homes.begin(), homes.end()),
      place_(std::move(place)),
      options_(options) {
  for (std::size_t i = 0; i < homes.size(); ++i)
    home_seats_ +=
        std::ranges::find(homes.first(i), homes[i]) == homes.begin() + static_cast<std::ptrdiff_t>(i) ? 1U
                                                                                                      : 0U;
  if (sizes.size() != homes.size()) {
    throw argument_error(std::string(options.name) + ": " + std::to_string(sizes.size()) + " parts and " +
                         std::to_string(homes.size()) + " homes; each part has one");
  }
  const std::optional<std::uint32_t> seats = detail::seats_of_job(ranks);
  for (std::size_t i = 0; seats && i < homes.size(); ++i) {
    if (to_index(homes[i]) < *seats) continue;
    throw argument_error(std::string(options.name) + ": part " + std::to_string(i) + " is at home in seat " +
                         std::to_string(to_index(homes[i])) + ", the job has seats 0 to " +
                         std::to_string(*seats - 1) + "; name one of these");
  }
}

template <seated_transport T, seat_placement Place>
failure redundant_replica<T, Place>::refuse(error_code code, std::uint32_t index, std::uint64_t wanted,
                                            std::uint64_t found) const noexcept {
  return {.code = code, .index = index, .wanted = wanted, .found = found, .where = options_.name};
}

template <seated_transport T, seat_placement Place>
collective_call redundant_replica<T, Place>::call(deadline by) const {
  return {.by = by, .tag = options_.tag};
}

template <seated_transport T, seat_placement Place>
std::optional<replica_map> redundant_replica<T, Place>::place(std::span<const seat_id> seats) const {
  const rank_count world{static_cast<std::uint32_t>(seats.size())};
  const std::optional<redundancy_scheme> scheme = scheme_for(scheme_, world);
  if (!scheme) return std::nullopt;
  try {
    return place_(seats).place(*scheme, world);
  } catch (const argument_error&) {
    // Those that are left may be too few for what all could do: then next to each other is better than not.
    if (seats.size() >= home_seats_) throw;
    return ring_neighbours().place(*scheme, world);
  }
}

template <seated_transport T, seat_placement Place>
std::vector<part_id> redundant_replica<T, Place>::mine() const {
  std::vector<part_id> all;
  for (std::uint32_t i = 0; i < owners_.size(); ++i) {
    if (owners_[i] == ranks_->rank()) all.push_back(part_id{i});
  }
  return all;
}

template <seated_transport T, seat_placement Place>
std::vector<part_id> redundant_replica<T, Place>::wards() const {
  std::vector<part_id> all;
  if (!map_ || map_->scheme().is_coded()) return all;
  const std::span<const rank_id> kept = map_->kept_by(ranks_->rank());
  for (std::uint32_t i = 0; i < owners_.size(); ++i) {
    if (std::ranges::find(kept, owners_[i]) != kept.end()) all.push_back(part_id{i});
  }
  return all;
}

/// By part; empty for parts that are not asked for.
template <seated_transport T, seat_placement Place>
result<std::vector<std::span<const std::byte>>> redundant_replica<T, Place>::sorted(
    std::span<const part_bytes> parts) const {
  std::vector<part_id> wanted = mine();
  if (scheme_.kind() == redundancy_kind::compute) {
    const std::vector<part_id> more = wards();
    wanted.insert(wanted.end(), more.begin(), more.end());
  }
  std::vector<std::span<const std::byte>> by_part(sizes_.size());
  std::vector<bool> is_given(sizes_.size(), false);
  for (const part_bytes& each : parts) {
    const std::uint32_t part = to_index(each.part);
    if (std::ranges::find(wanted, each.part) == wanted.end() || is_given[part])
      return refuse(errc::size_mismatch, part, 0, each.bytes.size());
    if (each.bytes.size() != sizes_[part])
      return refuse(errc::size_mismatch, part, sizes_[part], each.bytes.size());
    by_part[part] = each.bytes;
    is_given[part] = true;
  }
  for (const part_id each : wanted) {
    if (!is_given[to_index(each)])
      return refuse(errc::size_mismatch, to_index(each), sizes_[to_index(each)], 0);
  }
  return result<std::vector<std::span<const std::byte>>>(std::move(by_part));
}

template <seated_transport T, seat_placement Place>
result<void> redundant_replica<T, Place>::keep(std::uint64_t version, std::span<const part_bytes> parts,
                                               deadline by) {
  generation& made = pending_;
  made.is_there = false;
  if (recovered_epoch_ == 0 || recovered_epoch_ != ranks_->epoch())
    return refuse(errc::not_recovered, 0, ranks_->epoch(), recovered_epoch_);
  const auto by_part = sorted(parts);
  if (!by_part) return by_part.error();
  made.version = version;
  made.epoch = epoch_;
  made.self = ranks_->rank();
  made.seats.assign(ranks_->seats().begin(), ranks_->seats().end());
  made.layout = {.part_bytes = sizes_, .owners = owners_, .world = to_number(ranks_->world())};
  made.own.clear();
  made.sums.assign(sizes_.size(), 0);
  for (const part_id part : mine()) {
    const std::span<const std::byte> bytes = (*by_part)[to_index(part)];
    made.own.insert(made.own.end(), bytes.begin(), bytes.end());
    made.sums[to_index(part)] = crc32c(0, bytes);
  }
  made.copies.resize(made.layout.world);
  for (std::vector<std::byte>& each : made.copies)
    each.clear();
  for (std::vector<std::byte>& each : made.parities)
    each.clear();
  result<void> done = share_sums(made, by);
  if (done && map_) {
    if (scheme_.kind() == redundancy_kind::compute) {
      done = compare_wards(made, *by_part);
    } else {
      done = map_->scheme().is_coded() ? send_stripes(made, by) : send_copies(made, by);
    }
  }
  made.about = sum_about(made);
  made.is_there = done.has_value();
  if (done.code() == errc::message_damaged) ranks_->revoke();  // others wait for what comes after it
  keeps_ += made.is_there ? 1U : 0U;
  return done;
}

template <seated_transport T, seat_placement Place>
void redundant_replica<T, Place>::commit() noexcept {
  if (!pending_.is_there) return;
  std::swap(committed_, pending_);
  pending_.is_there = false;  // its memory serves the next
  is_doubted_ = false;
  past_ = past::kept;
  for (std::span<const std::byte>& each : recovered_)
    each = {};
  rooms_.clear();
}

template <seated_transport T, seat_placement Place>
void redundant_replica<T, Place>::drop() noexcept {
  pending_.is_there = false;
}

template <seated_transport T, seat_placement Place>
void redundant_replica<T, Place>::forget() noexcept {
  committed_ = {};
  pending_ = {};
  past_ = past::forgotten;
  for (std::span<const std::byte>& each : recovered_)
    each = {};  // some of it was theirs
  rooms_.clear();
}

/// All ranks know the checksums of all parts and, of coded states, of all stripes: so that whoever gets one
/// can hold it to its own. What each rank says ends with a checksum of that.
template <seated_transport T, seat_placement Place>
result<void> redundant_replica<T, Place>::share_sums(generation& of, deadline by) {
  const std::uint32_t world = of.layout.world;
  std::vector<std::uint32_t> words;
  std::vector<std::uint64_t> blocks{0};
  stripe_sums_.assign(world, {});
  const auto stripes = [&](rank_id rank) {
    return map_ && map_->scheme().is_coded() ? map_->layout(map_->group_of(rank)).shape().data : 0U;
  };
  for (std::uint32_t rank = 0; rank < world; ++rank) {
    const auto parts = std::ranges::count(owners_, rank_id{rank});
    words.resize(words.size() + static_cast<std::size_t>(parts) + stripes(rank_id{rank}) + 1);
    blocks.push_back(words.size() * sizeof(std::uint32_t));
  }
  const auto said_by = [&](std::uint32_t rank) {
    return std::span(words).subspan(blocks[rank] / 4, (blocks[rank + 1] - blocks[rank]) / 4);
  };
  const std::span<std::uint32_t> own = said_by(to_index(of.self));
  std::size_t at = 0;
  for (const part_id part : mine())
    own[at++] = of.sums[to_index(part)];
  for (std::uint32_t stripe = 0; stripe < stripes(of.self); ++stripe) {
    const byte_range range = stripe_of(of.own.size(), stripes(of.self), stripe);
    own[at++] = crc32c(0, std::span<const std::byte>(of.own).subspan(range.first, range.count));
  }
  own[at] = crc32c(0, std::as_bytes(own.first(at)));
  const auto done = all_gather(*ranks_, std::as_writable_bytes(std::span(words)), blocks, call(by));
  if (!done) return done;
  for (std::uint32_t rank = 0; rank < world; ++rank) {
    const std::span<const std::uint32_t> said = said_by(rank);
    const std::uint32_t sum = crc32c(0, std::as_bytes(said.first(said.size() - 1)));
    if (sum != said.back()) return refuse(errc::message_damaged, rank, said.back(), sum);
    std::size_t next = 0;
    for (std::size_t i = 0; i < sizes_.size(); ++i) {
      if (owners_[i] == rank_id{rank}) of.sums[i] = said[next++];
    }
    for (std::uint32_t stripe = 0; stripe < stripes(rank_id{rank}); ++stripe)
      stripe_sums_[rank].push_back(said[next++]);
  }
  return {};
}

template <seated_transport T, seat_placement Place>
result<void> redundant_replica<T, Place>::trade(std::optional<std::span<const std::byte>> out, rank_id to,
                                                std::optional<std::span<std::byte>> into, rank_id from,
                                                deadline by) {
  result<void> done;
  if (out && into) {
    done = ranks_->exchange(*out, to, *into, from, options_.tag, by);
  } else if (out) {
    done = ranks_->send(*out, to, options_.tag, by);
  } else if (into) {
    done = ranks_->recv(*into, from, options_.tag, by);
  }
  if (!done) ranks_->revoke();
  return done;
}

/// Whether all parts in a rank's blob are what was kept of them.
template <seated_transport T, seat_placement Place>
result<void> redundant_replica<T, Place>::check_blob(const generation& of, rank_id owner,
                                                     std::span<const std::byte> blob) const noexcept {
  std::uint64_t at = 0;
  for (std::size_t i = 0; i < sizes_.size(); ++i) {
    if (of.layout.owners[i] != owner) continue;
    const std::uint32_t sum = crc32c(0, blob.subspan(at, sizes_[i]));
    if (sum != of.sums[i]) return refuse(errc::message_damaged, to_index(owner), of.sums[i], sum);
    at += sizes_[i];
  }
  return {};
}

template <seated_transport T, seat_placement Place>
result<void> redundant_replica<T, Place>::send_copies(generation& of, deadline by) {
  const std::uint32_t world = of.layout.world;
  const std::uint32_t self = to_index(of.self);
  const auto keeps = [this](std::uint32_t holder, std::uint32_t rank) {
    const std::span<const rank_id> holders = map_->holders(rank_id{rank});
    return std::ranges::find(holders, rank_id{holder}) != holders.end();
  };
  for (std::uint32_t d = 1; d < world; ++d) {
    const std::uint32_t to = (self + d) % world;
    const std::uint32_t from = (self + world - d) % world;
    std::optional<std::span<const std::byte>> out;
    std::optional<std::span<std::byte>> into;
    if (keeps(to, self)) out = of.own;
    if (keeps(self, from)) {
      of.copies[from].resize(of.layout.blob_bytes(rank_id{from}));
      into = of.copies[from];
    }
    if (auto done = trade(out, rank_id{to}, into, rank_id{from}, by); !done) return done;
    if (!into) continue;
    if (auto whole = check_blob(of, rank_id{from}, *into); !whole) return whole;
  }
  return {};
}

/// Both have computed it: what came out is held to what the owner has.
template <seated_transport T, seat_placement Place>
result<void> redundant_replica<T, Place>::compare_wards(generation& of,
                                                        std::span<const std::span<const std::byte>> parts) {
  for (const part_id part : wards()) {
    const std::span<const std::byte> bytes = parts[to_index(part)];
    const std::uint32_t sum = crc32c(0, bytes);
    const std::uint32_t wanted = of.sums[to_index(part)];
    if (sum != wanted) return refuse(errc::checksum_differs, to_index(part), wanted, sum);
    std::vector<std::byte>& copy = of.copies[to_index(owners_[to_index(part)])];
    copy.insert(copy.end(), bytes.begin(), bytes.end());
  }
  return {};
}

/// Each member sends its stripe of a codeword to those that keep the codeword's parity, who add it up.
template <seated_transport T, seat_placement Place>
result<void> redundant_replica<T, Place>::send_stripes(generation& of, deadline by) {
  const std::uint32_t group_number = map_->group_of(of.self);
  const std::vector<rank_id>& group = map_->groups()[group_number];
  const coded_group layout = map_->layout(group_number);
  const std::uint32_t k = layout.shape().data;
  const std::uint32_t members = layout.members();
  const std::uint32_t self = map_->member_of(of.self);
  const auto is_parity = [&](std::uint32_t member, std::uint32_t codeword) {
    return to_index(layout.piece_of(member, codeword)) >= k;
  };
  const auto stripe = [&](std::uint32_t member, std::uint32_t codeword) {
    return stripe_of(of.layout.blob_bytes(group[member]), k, layout.stripe_in(member, codeword));
  };
  of.parities.resize(members);
  of.parity_sums.assign(members, 0);
  for (std::uint32_t codeword = 0; codeword < members; ++codeword) {
    if (!is_parity(self, codeword)) continue;
    std::uint64_t longest = 0;
    for (std::uint32_t member = 0; member < members; ++member) {
      if (!is_parity(member, codeword)) longest = std::max(longest, stripe(member, codeword).count);
    }
    of.parities[codeword].assign(longest, std::byte{0});
  }
  for (std::uint32_t d = 1; d < members; ++d) {
    const std::uint32_t to = (self + d) % members;
    const std::uint32_t from = (self + members - d) % members;
    for (std::uint32_t codeword = 0; codeword < members; ++codeword) {
      std::optional<std::span<const std::byte>> out;
      if (is_parity(to, codeword) && !is_parity(self, codeword)) {
        const byte_range own = stripe(self, codeword);
        out = std::span<const std::byte>(of.own).subspan(own.first, own.count);
      }
      std::optional<std::span<std::byte>> into;
      if (is_parity(self, codeword) && !is_parity(from, codeword)) {
        scratch_.resize(stripe(from, codeword).count);
        into = scratch_;
      }
      if (auto done = trade(out, group[to], into, group[from], by); !done) return done;
      if (!into) continue;
      const std::uint32_t sum = crc32c(0, *into);
      const std::uint32_t wanted = stripe_sums_[to_index(group[from])][layout.stripe_in(from, codeword)];
      if (sum != wanted) return refuse(errc::message_damaged, to_index(group[from]), wanted, sum);
      const bool is_xor = map_->scheme().kind() == redundancy_kind::parity;
      const std::uint8_t coefficient = is_xor
                                           ? std::uint8_t{1}
                                           : code_coefficient(layout.shape(), layout.piece_of(self, codeword),
                                                              layout.piece_of(from, codeword));
      static_cast<void>(gf256_multiply_add(of.parities[codeword], scratch_, coefficient));  // is not longer
    }
  }
  for (std::uint32_t codeword = 0; codeword < members; ++codeword)
    of.parity_sums[codeword] = crc32c(0, of.parities[codeword]);
  return {};
}

template <seated_transport T, seat_placement Place>
replica_stats redundant_replica<T, Place>::stats() const noexcept {
  replica_stats now{.keeps = keeps_, .recoveries = recoveries_};
  for (const generation* const each : {&committed_, &pending_}) {
    now.own_bytes += each->own.capacity();
    for (const std::vector<std::byte>& copy : each->copies)
      now.kept_bytes += copy.capacity();
    for (const std::vector<std::byte>& parity : each->parities)
      now.kept_bytes += parity.capacity();
  }
  return now;
}

}  // namespace v0
}  // namespace llmmem
