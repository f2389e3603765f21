/// @file
/// `redundant_replica`: the members of an epoch exchange reports of their versions, and find the newest.
#pragma once

#include <llmmem/comm/collectives.hpp>
#include <llmmem/comm/errors.hpp>
#include <llmmem/comm/ranks.hpp>
#include <llmmem/config.hpp>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/redundancy/detail/held_versions.hpp>
#include <llmmem/redundancy/detail/kept_damage.hpp>
#include <llmmem/redundancy/detail/kept_version.hpp>
#include <llmmem/redundancy/detail/replica_ranks.hpp>
#include <llmmem/redundancy/detail/replica_setup.hpp>
#include <llmmem/redundancy/errors.hpp>
#include <llmmem/redundancy/part_ownership.hpp>
#include <llmmem/redundancy/recovery.hpp>
#include <llmmem/result.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The result of a rendezvous, the same on all ranks: the version to restore, the mapping of its ranks to
/// present ones, and its damaged places.
struct found_version {
  version_facts facts{};
  membership_change change{};
  damaged_places damaged{};
};

/// The report of each rank when an epoch begins: exactly the bytes of a message.
struct replica_presence {
  std::uint64_t version = 0;
  std::uint64_t epoch = 0;  // the epoch in which the version was kept
  std::uint32_t rank = 0;   // this rank's number in that epoch
  std::uint32_t world = 0;  // number of ranks of that epoch; 0: this rank holds no version
  std::uint32_t setup = 0;  // digest of all facts that must be equal on all ranks
  known_past last = known_past::unknown;
  std::uint32_t damaged = 0;  // damaged places in its version
  std::uint32_t sum = 0;      // CRC-32C of all bytes before it

  [[nodiscard]] bool is_of(const replica_presence& other) const noexcept {
    return version == other.version && epoch == other.epoch;
  }
  /// Compares epochs first: after a return to a checkpoint, a version of a later epoch may have a lower
  /// number than the version of a rank that was away.
  [[nodiscard]] bool is_newer_than(const replica_presence& other) const noexcept {
    return std::pair(epoch, version) > std::pair(other.epoch, other.version);
  }
  [[nodiscard]] std::uint32_t sum_now() const noexcept {
    return crc32c(0, std::as_bytes(std::span(this, 1)).first(offsetof(replica_presence, sum)));
  }
};
static_assert(sizeof(replica_presence) == 40);

/// The exchange that begins an epoch. All members call `meet` and get the same result: the newest version
/// that any member has committed, how it was kept, which members hold it, and its damaged places. Each
/// message carries a checksum. The object keeps no state from one epoch to the next.
///
/// @par Complexity      40 bytes to each rank; if there is a version, a broadcast of 4 bytes per member and 8
///                      per part; if a place is damaged, a bit per place to each rank. @par Thread safety one
///                      thread at a time.
/// @par Errors          those of the transport; `errc::message_damaged`, `errc::setup_differs`.
class replica_rendezvous {
 public:
  /// Both must outlive the rendezvous.
  replica_rendezvous(replica_ranks& ranks, const replica_setup& setup) noexcept
      : ranks_(&ranks), setup_(&setup) {}

  /// @param held    the versions of this rank. It takes over the others' knowledge of the past, and drops a
  ///                version that is not the one to restore.
  /// @param damage  the damaged places of this rank's committed version.
  /// @param digest  the digest of this rank's setup.
  /// @return the newest version; nothing if no rank holds any.
  [[nodiscard]] result<std::optional<found_version>> meet(held_versions& held, const kept_damage& damage,
                                                          std::uint32_t digest, deadline by);

 private:
  [[nodiscard]] result<std::vector<replica_presence>> hear_all(const held_versions& held,
                                                               std::uint32_t damaged, std::uint32_t digest,
                                                               deadline by);
  [[nodiscard]] static const replica_presence* newest_of(std::span<const replica_presence> all) noexcept;
  [[nodiscard]] result<version_facts> learn_facts(const held_versions& held, const replica_presence& newest,
                                                  rank_id from, deadline by);
  [[nodiscard]] result<void> tell_all(std::vector<std::uint32_t>& words, rank_id from, deadline by);
  [[nodiscard]] result<void> learn_damage(found_version& of, const kept_damage& own, deadline by);

  replica_ranks* ranks_;
  const replica_setup* setup_;
};

inline result<std::optional<found_version>> replica_rendezvous::meet(held_versions& held,
                                                                     const kept_damage& damage,
                                                                     std::uint32_t digest, deadline by) {
  const result<std::vector<replica_presence>> all = hear_all(held, damage.places(), digest, by);
  if (!all) return all.error();
  for (const replica_presence& each : *all)
    held.learn(each.last);
  const replica_presence* const newest = newest_of(*all);
  if (newest == nullptr) return std::optional<found_version>();
  const auto holds = [&](const replica_presence& each) { return each.world != 0 && each.is_of(*newest); };
  // A rank that returned after it missed the last commit holds a stale version.
  if (!holds((*all)[to_index(ranks_->rank())])) held.discard_committed();
  // Assigned one by one, because g++ 12 warns at -O3 about designated initialisers that leave members to
  // their defaults.
  found_version found;
  found.change.home = setup_->homes_among(ranks_->seats());
  found.change.world = to_number(ranks_->world());
  const auto from = rank_id{static_cast<std::uint32_t>(newest - all->data())};
  result<version_facts> facts = learn_facts(held, *newest, from, by);
  if (!facts) return facts.error();
  found.facts = std::move(*facts);
  found.change.now.resize(newest->world);
  bool is_any_damaged = false;
  for (std::uint32_t rank = 0; rank < all->size(); ++rank) {
    const replica_presence& each = (*all)[rank];
    if (!holds(each)) continue;
    found.change.now[each.rank] = rank_id{rank};
    is_any_damaged = is_any_damaged || each.damaged != 0;
  }
  if (is_any_damaged) {
    if (auto learnt = learn_damage(found, damage, by); !learnt) return learnt.error();
  }
  return std::optional(std::move(found));
}

/// Returns the reports of all ranks, by rank.
inline result<std::vector<replica_presence>> replica_rendezvous::hear_all(const held_versions& held,
                                                                          std::uint32_t damaged,
                                                                          std::uint32_t digest, deadline by) {
  std::vector<replica_presence> all(to_number(ranks_->world()));
  replica_presence& own = all[to_index(ranks_->rank())];
  own.setup = digest;
  own.last = held.past();
  own.damaged = damaged;
  if (const kept_version* const committed = held.committed()) {
    own.version = committed->facts().version;
    own.epoch = committed->facts().epoch;
    own.rank = to_index(committed->self());
    own.world = committed->facts().layout.world;
  }
  own.sum = own.sum_now();
  const std::span<std::byte> bytes = std::as_writable_bytes(std::span(all));
  const auto blocks = even_blocks(bytes.size(), ranks_->world(), sizeof(replica_presence));
  if (auto done = all_gather(*ranks_, bytes, blocks, setup_->call(by)); !done) return done.error();
  for (std::uint32_t rank = 0; rank < all.size(); ++rank) {
    if (const std::uint32_t sum = all[rank].sum_now(); sum != all[rank].sum)
      return setup_->refuse(errc::message_damaged, rank, all[rank].sum, sum);
  }
  for (std::uint32_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank].setup != all[0].setup)
      return setup_->refuse(errc::setup_differs, rank, all[0].setup, all[rank].setup);
  }
  return result<std::vector<replica_presence>>(std::move(all));
}

/// Returns null if no rank holds a version.
inline const replica_presence* replica_rendezvous::newest_of(std::span<const replica_presence> all) noexcept {
  const replica_presence* newest = nullptr;
  for (const replica_presence& each : all) {
    if (each.world != 0 && (newest == nullptr || each.is_newer_than(*newest))) newest = &each;
  }
  return newest;
}

/// Sends the facts of the version from one rank that holds it to all ranks.
inline result<version_facts> replica_rendezvous::learn_facts(const held_versions& held,
                                                             const replica_presence& newest, rank_id from,
                                                             deadline by) {
  const std::size_t world = newest.world;
  const std::size_t parts = setup_->parts();
  std::vector<std::uint32_t> words;
  if (ranks_->rank() == from) {
    const version_facts& known = held.committed()->facts();
    for (const seat_id seat : known.seats)
      words.push_back(to_index(seat));
    for (const rank_id owner : known.layout.owners)
      words.push_back(to_index(owner));
    words.insert(words.end(), known.sums.begin(), known.sums.end());
  }
  words.resize(world + 2 * parts);
  if (auto done = tell_all(words, from, by); !done) return done.error();
  version_facts facts;
  facts.version = newest.version;
  facts.epoch = newest.epoch;
  facts.layout = {.part_bytes = setup_->sizes(), .owners = {}, .world = newest.world};
  for (std::size_t i = 0; i < world; ++i)
    facts.seats.push_back(seat_id{words[i]});
  for (std::size_t i = 0; i < parts; ++i) {
    facts.layout.owners.push_back(rank_id{words[world + i]});
    facts.sums.push_back(words[world + parts + i]);
  }
  return result<version_facts>(std::move(facts));
}

/// Sends words from one rank to all, followed by their checksum.
inline result<void> replica_rendezvous::tell_all(std::vector<std::uint32_t>& words, rank_id from,
                                                 deadline by) {
  words.push_back(crc32c(0, std::as_bytes(std::span(words))));
  const std::span<std::byte> bytes = std::as_writable_bytes(std::span(words));
  if (auto done = broadcast(*ranks_, bytes, from, setup_->call(by)); !done) return done;
  const std::uint32_t wanted = words.back();
  words.pop_back();
  const std::uint32_t sum = crc32c(0, std::as_bytes(std::span(words)));
  if (sum != wanted) return setup_->refuse(errc::message_damaged, to_index(from), wanted, sum);
  return {};
}

/// Exchanges the damaged places that each holder of the version found, with a checksum.
inline result<void> replica_rendezvous::learn_damage(found_version& of, const kept_damage& own, deadline by) {
  const std::uint32_t then = of.facts.layout.world;
  const std::size_t words = kept_damage::words_for(then);
  std::vector<std::uint32_t> all((words + 1) * to_number(ranks_->world()), 0);
  const auto said_by = [&](rank_id rank) {
    return std::span(all).subspan(to_index(rank) * (words + 1), words + 1);
  };
  // Reports of other versions, or of none, are ignored.
  const std::span<std::uint32_t> mine = said_by(ranks_->rank());
  std::ranges::copy(own.words().first(std::min(words, own.words().size())), mine.begin());
  mine.back() = crc32c(0, std::as_bytes(mine.first(words)));
  const std::span<std::byte> bytes = std::as_writable_bytes(std::span(all));
  const auto element_bytes = static_cast<std::uint32_t>((words + 1) * sizeof(std::uint32_t));
  const auto blocks = even_blocks(bytes.size(), ranks_->world(), element_bytes);
  if (auto done = all_gather(*ranks_, bytes, blocks, setup_->call(by)); !done) return done;
  for (std::uint32_t i = 0; i < then; ++i) {
    if (!of.change.now[i]) continue;
    const std::span<const std::uint32_t> said = said_by(*of.change.now[i]);
    const std::uint32_t sum = crc32c(0, std::as_bytes(said.first(words)));
    if (sum != said.back())
      return setup_->refuse(errc::message_damaged, to_index(*of.change.now[i]), said.back(), sum);
    kept_damage(then, said.first(words)).add_to(of.damaged, rank_id{i});
  }
  return {};
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
