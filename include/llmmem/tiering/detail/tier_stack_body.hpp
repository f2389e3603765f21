/// @file
/// The tiers of a `tiered_buffer`: setup, refusals and counters.
#pragma once

#include <llmmem/codec/errors.hpp>
#include <llmmem/space/errors.hpp>
#include <llmmem/tiering/detail/tier_stack.hpp>

namespace llmmem {
inline namespace v0 {
namespace detail {

[[nodiscard]] inline tiered_options checked(const tiered_options& options, bool encodes) {
  const auto refuse = [&](const char* what) {
    throw argument_error(options.name + ": " + what + " is 0; it must be at least 1");
  };
  if (options.max_chunks == 0) refuse("max_chunks");
  if (options.max_transfers == 0) refuse("max_transfers");
  if (encodes && options.largest_chunk_bytes == 0) refuse("largest_chunk_bytes");
  if (encodes && options.staging_slots == 0) refuse("staging_slots");
  return options;
}

/// Refuses a tier 0 that is too small for the largest set of leases.
inline void check_largest_lease(const std::string& name, std::uint64_t capacity, std::uint64_t largest) {
  if (largest <= capacity) return;
  throw out_of_memory(name + ": tier 0 holds " + std::to_string(capacity) +
                      " bytes, but the largest set of leases needs " + std::to_string(largest) +
                      "; give it at least as many");
}

/// Returns the memory of an observer with tables. This is a function because nvcc 13 crashes on the same
/// requires-expression about a member.
template <class Observer>
[[nodiscard]] std::uint64_t observer_bytes(const Observer& observer) noexcept {
  if constexpr (requires { observer.metadata_bytes(); }) {
    return observer.metadata_bytes();
  } else {
    return 0;
  }
}

template <class Observer, class... Tiers>
tier_stack<Observer, Tiers...>::tier_stack(table_type& chunks, Observer observer,
                                           const tiered_options& options,
                                           const tier_place<typename Tiers::space_type>&... places)
    : chunks_(chunks),
      tiers_([&]<std::size_t... Index>(std::index_sequence<Index...>) {
        return std::tuple<typename tier_state<Tiers>::setup...>{
            {places, Index, options.name, options.max_chunks, options.largest_chunk_bytes,
             encodes ? options.staging_slots : 0, options.metadata}...};
      }(std::index_sequence_for<Tiers...>{})),
      stages_(at<last - 1>().places, encodes ? options.staging_slots : 0,
              at<last>().rounded(place_bytes(nth<last>, options.largest_chunk_bytes)), options.metadata),
      largest_chunk_bytes_(options.largest_chunk_bytes),
      observer_(std::move(observer)) {
  const place_stats top = at<0>().places.stats();
  std::uint64_t staging = 0;
  if constexpr (encodes) {
    staging = options.staging_slots * at<last - 1>().places.granted_for(stages_.each_bytes());
  }
  if (last != 1 || staging <= top.capacity) {
    check_largest_lease(options.name, top.capacity - (last == 1 ? staging : 0), options.largest_lease_bytes);
  }
  try {
    stages_.take_places();
  } catch (...) {
    release_places();
    throw;
  }
}

template <class Observer, class... Tiers>
tier_stack<Observer, Tiers...>::~tier_stack() {
  release_places();
}

template <class Observer, class... Tiers>
void tier_stack<Observer, Tiers...>::release_places() noexcept {
  for_each_index<tiers>([&](auto index) {
    constexpr std::size_t tier = index.value;
    if constexpr (never_fragments<space_type<tier>>()) {
      for (std::uint32_t slot = 0; slot < chunks_.slots(); ++slot) {
        if (chunks_.is_live(slot) && chunks_[slot].copies[tier].granted != 0)
          give_back(index, chunks_[slot].copies[tier]);
      }
      if constexpr (tier + 1 == last) stages_.release_places();
    }
  });
}

template <class Observer, class... Tiers>
failure tier_stack<Observer, Tiers...>::check_size(std::uint64_t bytes) const noexcept {
  if constexpr (encodes) {
    constexpr std::uint64_t unit = tier_type<last>::codec_type::element_bytes;
    if (bytes % unit != 0) return {errc::bad_granularity, 0, bytes, unit, chunks_.where()};
    if (bytes > largest_chunk_bytes_)
      return {errc::out_of_range, 0, bytes, largest_chunk_bytes_, chunks_.where()};
  }
  return {};
}

template <class Observer, class... Tiers>
failure tier_stack<Observer, Tiers...>::check_offset(std::uint64_t offset) const noexcept {
  const std::uint64_t capacity = at<last>().places.stats().capacity;
  const std::uint64_t unit = at<last>().granularity;
  if (offset > capacity) return {errc::past_the_bytes, 0, offset, capacity, chunks_.where()};
  if (offset % unit != 0) return {errc::bad_granularity, 0, offset, unit, chunks_.where()};
  return {};
}

template <class Observer, class... Tiers>
failure tier_stack<Observer, Tiers...>::check_fits(std::uint64_t bytes) const noexcept {
  failure wrong;
  if (bytes > max_bytes / 2) return wrong;  // the last tier refuses this
  for_each_index<tiers>([&](auto index) {
    constexpr std::size_t tier = index.value;
    const std::uint64_t takes = granted_for(index, tier == last ? place_bytes(index, bytes) : bytes);
    if (wrong.code != errc::ok || takes <= most_bytes(index)) return;
    wrong = failure{errc::out_of_bytes, 1, takes, most_bytes(index), at<tier>().places.name()};
  });
  return wrong;
}

template <class Observer, class... Tiers>
void tier_stack<Observer, Tiers...>::exchange_top(std::uint32_t slot, tier_copy& fresh) noexcept {
  tier_copy& held = chunks_[slot].copies[0];
  observer_.on_left(chunk_id{slot}, held.granted);
  std::swap(held.place, fresh.place);
  std::swap(held.data, fresh.data);
  std::swap(held.granted, fresh.granted);
  observer_.on_made(chunk_id{slot}, held.granted);
}

template <class Observer, class... Tiers>
void tier_stack<Observer, Tiers...>::expect(std::uint32_t slot, std::uint64_t next_use) noexcept {
  for_each_index<last>([&](auto tier) {
    if (!chunks_[slot].copies[tier.value].is_valid()) return;
    detail::expect(at<tier.value>().eviction, slot_id{slot}, next_use);
  });
}

template <class Observer, class... Tiers>
void tier_stack<Observer, Tiers...>::add_to(tiered_stats<tiers>& now) const noexcept {
  for_each_index<tiers>([&](auto index) {
    constexpr std::size_t i = index.value;
    const auto& tier = at<i>();
    const place_stats carved = tier.places.stats();
    tier_stats& seen = now.tiers[i];
    seen.budget = carved.capacity;
    seen.used = carved.used;
    seen.peak = carved.peak;
    seen.chunks = carved.places - carved.lost_places - (i + 1 == last ? stages_.placed() : 0);
    seen.hits = hits_[i];
    seen.drops = tier.drops;
    seen.write_backs = tier.write_backs;
    seen.demotions = tier.demotions;
    seen.refusals = tier.refusals;
    seen.lost = carved.lost;
    now.metadata_bytes +=
        carved.metadata_bytes + tier.eviction.metadata_bytes() + tier.admission.metadata_bytes();
  });
  now.shared = chunks_.shared();
  now.metadata_bytes += chunks_.metadata_bytes() + stages_.metadata_bytes() + observer_bytes(observer_);
}

template <class Observer, class... Tiers>
std::uint64_t tier_stack<Observer, Tiers...>::rounded_bytes(std::uint64_t bytes) const noexcept {
  std::uint64_t most = 0;
  for_each_index<last>([&](auto tier) {
    const std::uint64_t takes = granted_for(tier, bytes);
    most = takes > most ? takes : most;
  });
  return most;
}

template <class Observer, class... Tiers>
void tier_stack<Observer, Tiers...>::audit(std::vector<std::string>& found) const {
  const std::string name = chunks_.where();
  for_each_index<tiers>([&](auto index) {
    constexpr std::size_t i = index.value;
    const auto& tier = at<i>();
    std::uint64_t places = i + 1 == last ? stages_.placed() : 0;
    for (std::uint32_t slot = 0; slot < chunks_.slots(); ++slot) {
      if (!chunks_.is_live(slot)) continue;
      const record_type& c = chunks_[slot];
      const tier_copy& held = c.copies[i];
      const auto say = [&](const std::string& what) {
        found.push_back(name + ": chunk " + std::to_string(c.name) + " " + what);
      };
      const std::string here = "in tier " + std::to_string(i);
      if (i == 0 && c.leases != 0 && !held.is_valid()) say("is leased and not in tier 0");
      if (held.granted != 0) ++places;
      if (held.granted == 0 && held.at != residence::absent) say(here + " has no place");
      const std::uint64_t least = i == last ? place_bytes(nth<last>, c.bytes) : c.bytes;
      if (held.granted != 0 && held.granted < least) say(here + " has too small a place");
      if (i == last && held.granted == 0 && tier.places.stats().lost == 0)
        say("lost its place in the last tier");
      if (i != last && held.granted != 0 && held.at == residence::absent)
        say(here + " has a place and no copy");
      if (i != last && held.is_valid() && tier.eviction.is_candidate(slot_id{slot}) != (held.pins == 0)) {
        say(here +
            (held.pins == 0 ? " cannot leave, though it has no pin" : " may leave while it is in use"));
      }
    }
    const place_stats stats = tier.places.stats();
    if (const std::uint64_t given = stats.places - stats.lost_places; given != places) {
      found.push_back(name + ": tier " + std::to_string(i) + " gave " + std::to_string(given) +
                      " places, chunks have " + std::to_string(places));
    }
    tier.places.audit(found);
  });
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
