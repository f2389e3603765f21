/// @file
/// What a `tiered_buffer` counts, and whether its books agree.
#pragma once

#include <llmmem/tiering/tiered_buffer.hpp>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// Of one that has tables. (A function, as nvcc 13 crashes over the same question about a member.)
template <class Observer>
[[nodiscard]] std::uint64_t observer_bytes(const Observer& observer) noexcept {
  if constexpr (requires { observer.metadata_bytes(); }) {
    return observer.metadata_bytes();
  } else {
    return 0;
  }
}

}  // namespace detail

template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
auto basic_tiered_buffer<Traits, Tiers...>::stats() const -> stats_type {
  stats_type now;
  for (std::size_t i = 0; i < tiers; ++i) {
    with_index<tiers>(i, [&]<class Index>(Index) {
      const auto& tier = tier_at<Index::value>();
      const detail::room_stats carved = tier.room.stats();
      const std::uint64_t staged = Index::value + 1 == last ? placed_stages() : 0;
      tier_stats& seen = now.tiers[Index::value];
      seen.budget = carved.capacity;
      seen.used = carved.used;
      seen.peak = carved.peak;
      seen.chunks = carved.places - carved.lost_places - staged;
      seen.hits = hits_[Index::value];
      seen.drops = tier.drops;
      seen.write_backs = tier.write_backs;
      seen.demotions = tier.demotions;
      seen.refusals = tier.refusals;
      seen.lost = carved.lost;
      now.metadata_bytes +=
          carved.metadata_bytes + tier.eviction.metadata_bytes() + tier.admission.metadata_bytes();
    });
  }
  now.moved = meter_.stats();
  now.leases = leases_;
  now.shared = shared_;
  now.parted_bytes = parted_bytes_;
  now.background_failures = background_failures_;
  std::apply([&](const auto&... edge) { now.bounce_bytes += (edge.bounce_bytes() + ...); }, edges_);
  now.metadata_bytes += names_.bytes() + keys_.metadata_bytes() + chunks_.bytes() + transfers_.bytes() +
                        free_transfers_.bytes() + stages_.bytes() + wanted_.bytes() + due_.bytes();
  now.metadata_bytes += detail::observer_bytes(observer_);
  std::apply([&](const auto&... edge) { now.metadata_bytes += (edge.metadata_bytes() + ...); }, edges_);
  return now;
}

template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
std::vector<std::string> basic_tiered_buffer<Traits, Tiers...>::audit() const {
  std::vector<std::string> found;
  std::array<std::uint64_t, tiers> places{};
  places[last - 1] = placed_stages();
  std::array<std::uint64_t, tiers> leaving{};
  std::uint32_t under_way = 0;
  std::uint32_t wanted = 0;
  for (std::uint32_t slot = 0; slot < chunks_.touched(); ++slot) {
    if (!chunks_.is_live(slot)) continue;
    const chunk_record& c = chunks_[slot];
    const auto say = [&](const std::string& what) {
      found.push_back(options_.name + ": chunk " + std::to_string(c.name) + " " + what);
    };
    if (c.transfer != none) {
      ++under_way;
      const transfer& t = transfers_[c.transfer];
      if (t.chunk != slot) say("has the transfer of another");
      if (t.then_drops) leaving[t.edge] += c.copies[t.edge].granted;
    }
    if (c.wanted) ++wanted;
    if (c.leases != 0 && !c.copies[0].is_valid()) say("is leased and not in tier 0");
    if (c.writing && c.leases != 1) say("is written under " + std::to_string(c.leases) + " leases");
    for (std::size_t i = 0; i < tiers; ++i) {
      with_index<tiers>(i, [&]<class Index>(Index) {
        constexpr std::size_t at = Index::value;
        const copy& held = c.copies[at];
        const std::string tier = "in tier " + std::to_string(at);
        if (held.granted != 0) ++places[at];
        if (held.granted == 0 && held.at != detail::residence::absent) say(tier + " has no place");
        if (held.granted != 0 && held.granted < c.bytes) say(tier + " has too small a place");
        if (at == last && held.granted == 0 && tier_at<last>().room.stats().lost == 0)
          say("lost its place in the last tier");
        if (held.at == detail::residence::reserved && !c.wanted) say(tier + " keeps a place for nothing");
        std::uint32_t users = at == 0 ? c.leases : 0;
        if (c.transfer != none) {
          const transfer& t = transfers_[c.transfer];
          users += (t.edge + 1 == at) || (t.stores && t.edge == at) ? 1U : 0U;
        }
        if (held.pins != users) {
          say(tier + " is pinned " + std::to_string(held.pins) + " times, by " + std::to_string(users));
        }
        if (at != last && held.granted != 0 && held.at == detail::residence::absent) {
          say(tier + " has a place and no copy");
        }
        if (held.at == detail::residence::arriving && c.transfer == none) say(tier + " awaits nothing");
        if (at != last && held.is_valid() &&
            tier_at<at>().eviction.is_candidate(slot_id{slot}) != (held.pins == 0)) {
          say(tier +
              (held.pins == 0 ? " cannot leave, though nobody uses it" : " may leave while it is in use"));
        }
      });
    }
  }
  audit_names(found);
  if (under_way + free_transfer_count_ != transfers_.size()) {
    found.push_back(options_.name + ": " + std::to_string(under_way) + " transfers under way and " +
                    std::to_string(free_transfer_count_) + " free are not " +
                    std::to_string(transfers_.size()));
  }
  if (wanted != wanted_count_) {
    found.push_back(options_.name + ": " + std::to_string(wanted) + " chunks are wanted, " +
                    std::to_string(wanted_count_) + " are in the queue");
  }
  for (std::size_t i = 0; i < tiers; ++i) {
    with_index<tiers>(i, [&]<class Index>(Index) {
      const auto& room = tier_at<Index::value>().room;
      const std::uint64_t given = room.stats().places - room.stats().lost_places;
      if (given != places[Index::value]) {
        found.push_back(options_.name + ": tier " + std::to_string(Index::value) + " gave " +
                        std::to_string(given) + " places, chunks have " +
                        std::to_string(places[Index::value]));
      }
      if (leaving_[Index::value] != leaving[Index::value]) {
        found.push_back(options_.name + ": " + std::to_string(leaving[Index::value]) + " bytes leave tier " +
                        std::to_string(Index::value) + ", " + std::to_string(leaving_[Index::value]) +
                        " are counted");
      }
      room.audit(found);
    });
  }
  return found;
}

template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
std::uint64_t basic_tiered_buffer<Traits, Tiers...>::rounded_bytes(std::uint64_t bytes) const noexcept {
  std::uint64_t most = 0;
  [&]<std::size_t... Index>(std::index_sequence<Index...>) {
    ((most =
          tier_at<Index>().room.granted_for(bytes) > most ? tier_at<Index>().room.granted_for(bytes) : most),
     ...);
  }(std::make_index_sequence<last>{});
  return most;
}

}  // namespace v0
}  // namespace llmmem
