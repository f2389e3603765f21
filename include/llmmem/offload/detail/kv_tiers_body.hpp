/// @file
/// Bodies of kv_tiers.hpp: setup, lookup, progress and withdrawal. Only that file includes this one.
#pragma once

#include <llmmem/offload/kv_tiers.hpp>

#include <time.h>

namespace llmmem {
inline namespace v0 {

template <class Cache, offload::kv_mover Mover, class... Tiers>
kv_tiers<Cache, Mover, Tiers...>::kv_tiers(Cache& cache, Mover mover, kv_tiers_options options,
                                           Tiers... places)
    : options_(checked(std::move(options))),
      view_(cache),
      mover_(std::move(mover)),
      groups_(view_.groups().size()),
      stack_(options_, bytes_of_blocks(mover_), shares(), places...),
      content_form_(detail::lossy_form(groups_, places...)),
      seen_(4 * stack_.first().slots[0].capacity(), options_.metadata),
      stores_at_once_(options_.store.writes_at == &write_through::writes_at ||
                      options_.store.writes_at == &demoting<write_through>::writes_at),
      saves_(options_.max_transfers, options_.metadata, "kv_tiers: blocks on their way down"),
      loads_(options_.max_loads) {
  offload::tier_link& link = detail::link_finder<observer_type>::of(cache.observer());
  if (link.is_attached()) {
    throw argument_error(options_.name +
                         ": the cache has tiers already, and reports to one kv_tiers only; destroy the "
                         "other first, or give one of them more tiers");
  }
  link.attach(this);
  for (std::size_t g = 0; g < groups_; ++g) {
    const std::uint64_t layer_bytes = mover_.block_bytes(g) / mover_.layers(g);
    const std::uint64_t wanted = layer_bytes == 0 ? 1 : options_.restore_bytes / layer_bytes;
    const std::uint64_t most = mover_.layers(g);
    layers_at_once_[g] = static_cast<std::uint32_t>(wanted == 0 ? 1 : wanted < most ? wanted : most);
  }
}

template <class Cache, offload::kv_mover Mover, class... Tiers>
kv_tiers<Cache, Mover, Tiers...>::~kv_tiers() {
  flush();
  detail::link_finder<observer_type>::of(view_.cache().observer()).attach(nullptr);
}

template <class Cache, offload::kv_mover Mover, class... Tiers>
std::vector<std::uint64_t> kv_tiers<Cache, Mover, Tiers...>::bytes_of_blocks(const Mover& mover) {
  std::vector<std::uint64_t> bytes;
  for (std::size_t g = 0; g < mover.groups(); ++g)
    bytes.push_back(mover.block_bytes(g));
  return bytes;
}

/// By default each group gets space for equally many tokens.
template <class Cache, offload::kv_mover Mover, class... Tiers>
std::vector<double> kv_tiers<Cache, Mover, Tiers...>::shares() const {
  if (mover_.groups() != groups_) {
    throw argument_error(options_.name + ": the mover serves " + std::to_string(mover_.groups()) +
                         " groups of layers, the cache has " + std::to_string(groups_) +
                         "; make the mover from the same groups");
  }
  if constexpr (requires { mover_.blocks(); }) {
    if (mover_.blocks() < view_.block_capacity()) {
      throw argument_error(options_.name + ": the mover's memory has " + std::to_string(mover_.blocks()) +
                           " blocks, the cache uses " + std::to_string(view_.block_capacity()) +
                           ", the null block among them; give the mover all of the cache's memory");
    }
  }
  std::vector<double> out(groups_);
  bool any = false;
  for (std::size_t g = 0; g < groups_; ++g) {
    if (!(options_.shares[g] >= 0 && options_.shares[g] <= 1e18)) {
      throw argument_error(options_.name + ": the share of group " + std::to_string(g) +
                           " is negative, infinite or no number; shares are parts of a whole");
    }
    if (mover_.block_bytes(g) == 0 || mover_.layers(g) == 0) {
      throw argument_error(options_.name + ": the mover's blocks of group " + std::to_string(g) +
                           " have no bytes or no layers");
    }
    any = any || options_.shares[g] > 0;
  }
  for (std::size_t g = 0; g < groups_; ++g) {
    out[g] = any ? options_.shares[g]
                 : static_cast<double>(mover_.block_bytes(g)) / view_.groups()[g].block_tokens;
  }
  return out;
}

template <class Cache, offload::kv_mover Mover, class... Tiers>
kv_tiers_options kv_tiers<Cache, Mover, Tiers...>::checked(kv_tiers_options options) const {
  const auto refuse = [&](const char* what) {
    throw argument_error(options.name + ": " + what + " is 0; at least 1 is needed");
  };
  if (options.max_transfers == 0) refuse("max_transfers");
  if (options.max_loads == 0) refuse("max_loads");
  return options;
}

// Looking

template <class Cache, offload::kv_mover Mover, class... Tiers>
std::pair<offload::answer, detail::tier_place_found> kv_tiers<Cache, Mover, Tiers...>::look(
    std::size_t group, const block_key& key, std::uint64_t at) const noexcept {
  std::pair<offload::answer, detail::tier_place_found> out{offload::answer::miss, {tiers, no_slot}};
  stack_.for_each_level([&](std::size_t k, const auto& level) {
    if (out.first == offload::answer::hit || out.first == offload::answer::pending) return;
    const auto slot = level.slots[group].find(key);
    if (!slot) return;
    if (level.quiet_until > at) {
      out.first = offload::answer::unknown;
      return;
    }
    out = {level.slots[group].is_settled(*slot) ? offload::answer::hit : offload::answer::pending,
           {k, *slot}};
  });
  return out;
}

template <class Cache, offload::kv_mover Mover, class... Tiers>
std::pair<offload::answer, std::size_t> kv_tiers<Cache, Mover, Tiers...>::lookup_block(
    const kv_chain& chain, std::size_t group, std::uint64_t index) const noexcept {
  const std::uint64_t chunks = (index + 1) * view_.groups()[group].block_tokens / chain.chunk_tokens();
  if (chunks > chain.keys().size()) return {offload::answer::miss, tiers};
  const block_key key = detail::tier_key(chain.keys()[static_cast<std::size_t>(chunks - 1)], group);
  const auto found = look(group, key, now());
  return {found.first, found.second.tier};
}

template <class Cache, offload::kv_mover Mover, class... Tiers>
offload::kv_lookup_result kv_tiers<Cache, Mover, Tiers...>::lookup(sequence_id sequence,
                                                                   const kv_chain& chain) const noexcept {
  return lookup(chain, view_.cache().tokens(sequence));
}

template <class Cache, offload::kv_mover Mover, class... Tiers>
offload::kv_lookup_result kv_tiers<Cache, Mover, Tiers...>::lookup(const kv_chain& chain,
                                                                   std::uint64_t first) const noexcept {
  return lookup_with(chain, first, chain.keys().size(),
                     [](std::size_t, std::uint64_t, offload::answer) noexcept { return false; });
}

template <class Cache, offload::kv_mover Mover, class... Tiers>
template <class Elsewhere>
offload::kv_lookup_result kv_tiers<Cache, Mover, Tiers...>::lookup_with(
    const kv_chain& chain, std::uint64_t first, std::uint64_t chunks, Elsewhere&& elsewhere) const noexcept {
  const std::uint64_t at = now();
  offload::kv_lookup_result out =
      each_hit(chain, first, chunks, at, elsewhere, [](const auto&, const auto&) noexcept {});
  if constexpr (detail::cache_view<Cache>::is_hybrid) {
    each_needed(chain, first, out.tokens, at,
                [&](std::size_t, offload::answer, std::size_t tier, std::uint64_t) {
                  ++(tier < tiers ? out.blocks[tier] : out.elsewhere);
                });
  }
  return out;
}

/// Calls `f(group, answer, tier, chunks)` for each block after the first `first` tokens that a load of
/// `tokens` tokens needs.
template <class Cache, offload::kv_mover Mover, class... Tiers>
template <class F>
void kv_tiers<Cache, Mover, Tiers...>::each_needed(const kv_chain& chain, std::uint64_t first,
                                                   std::uint64_t tokens, std::uint64_t at, F&& f) const {
  if (tokens <= first) return;
  const std::uint64_t step = chain.chunk_tokens();
  for (std::size_t g = 0; g < groups_; ++g) {
    const layer_group& group = view_.groups()[g];
    detail::for_each_needed(group, tokens, [&](std::uint64_t index) {
      const std::uint64_t end = (index + 1) * group.block_tokens;
      if (end <= first) return;
      const block_key& key = chain.keys()[static_cast<std::size_t>(end / step - 1)];
      const auto found = look(g, detail::tier_key(key, g), at);
      f(g, found.first, found.second.tier, end / step);
    });
  }
}

/// Calls `on_hit(result, place)` for each length that can be loaded, from the shortest on, with the blocks by
/// tier if the cache has one group, and the place of the last of them; returns the last one. Every tier
/// answers as at time `at`.
template <class Cache, offload::kv_mover Mover, class... Tiers>
template <class Elsewhere, class OnHit>
offload::kv_lookup_result kv_tiers<Cache, Mover, Tiers...>::each_hit(const kv_chain& chain,
                                                                     std::uint64_t first,
                                                                     std::uint64_t chunks, std::uint64_t at,
                                                                     Elsewhere&& elsewhere,
                                                                     OnHit&& on_hit) const {
  // How many lookups ahead their cache lines are prefetched. A line takes a hundred nanoseconds from memory,
  // a lookup about seven.
  constexpr std::uint64_t ahead = 16;
  const std::span<const layer_group> groups = view_.groups();
  const std::uint64_t step = chain.chunk_tokens();
  offload::kv_lookup_result out{.first = first, .tokens = first, .next = offload::answer::hit};
  paging::hit_scan scan(groups);
  std::array<std::uint64_t, max_kv_tiers> from{};
  std::uint64_t from_elsewhere = 0;
  for (std::uint64_t c = 1; c <= chunks && !scan.is_exhausted(); ++c) {
    const std::uint64_t length = c * step;
    detail::tier_place_found place{tiers, no_slot};
    for (std::size_t g = 0; g < groups_; ++g) {
      const layer_group& group = groups[g];
      if (length % group.block_tokens != 0) continue;
      if (c + ahead <= chunks)
        stack_.prefetch(g, detail::tier_key(chain.keys()[static_cast<std::size_t>(c + ahead - 1)], g));
      const std::uint64_t index = length / group.block_tokens - 1;
      bool is_there = index < group.sink_blocks() || index >= group.dead_blocks(first);
      if (length > first) {
        const auto found = look(g, detail::tier_key(chain.keys()[static_cast<std::size_t>(c - 1)], g), at);
        is_there = found.first == offload::answer::hit;
        place = found.second;
        if (is_there) {
          ++from[found.second.tier];
        } else if (elsewhere(g, c, found.first)) {
          is_there = true;
          ++from_elsewhere;
        } else if (out.next == offload::answer::hit || found.first != offload::answer::miss) {
          out.next = found.first;
        }
      }
      scan.add(g, is_there);
    }
    if (length > first && scan.has_hit(length)) {
      out.tokens = chain.tokens_of(c);
      if constexpr (!detail::cache_view<Cache>::is_hybrid) {
        out.blocks = from;
        out.elsewhere = from_elsewhere;
      }
      if (c == chunks) out.next = offload::answer::hit;
      on_hit(std::as_const(out), std::as_const(place));
    }
  }
  return out;
}

template <class Cache, offload::kv_mover Mover, class... Tiers>
void kv_tiers<Cache, Mover, Tiers...>::touch(const kv_chain& chain, std::uint64_t tokens) noexcept {
  const std::uint64_t step = chain.chunk_tokens();
  std::uint64_t chunks = tokens / step;
  if (chunks > chain.keys().size()) chunks = chain.keys().size();
  for (std::uint64_t c = chunks; c > 0; --c) {
    for (std::size_t g = 0; g < groups_; ++g) {
      if (c * step % view_.groups()[g].block_tokens != 0) continue;
      stack_.touch(g, detail::tier_key(chain.keys()[static_cast<std::size_t>(c - 1)], g));
    }
  }
}

// Going on

template <class Cache, offload::kv_mover Mover, class... Tiers>
void kv_tiers<Cache, Mover, Tiers...>::proceed() noexcept {
  stack_.poll(now(), [this](const detail::load_cookie& waiting, slot_id upper, const failure& why) noexcept {
    arrive(waiting, upper, why);
  });
  poll_saves();
  reap();
}

template <class Cache, offload::kv_mover Mover, class... Tiers>
void kv_tiers<Cache, Mover, Tiers...>::progress() noexcept {
  proceed();
  for (std::uint32_t i = 0; i < loads_.size(); ++i) {
    if (loads_[i].state == record::phase::running) begin_reads(i);
  }
}

/// Sleeps for a moment, because another thread or the device must advance.
template <class Cache, offload::kv_mover Mover, class... Tiers>
void kv_tiers<Cache, Mover, Tiers...>::pause() noexcept {
  const timespec moment{0, 5'000};
  ::nanosleep(&moment, nullptr);
}

template <class Cache, offload::kv_mover Mover, class... Tiers>
void kv_tiers<Cache, Mover, Tiers...>::flush() noexcept {
  for (;;) {
    proceed();
    bool is_ending = false;
    for (const record& each : loads_)
      is_ending = is_ending || each.state == record::phase::ending;
    if (stack_.is_idle() && save_count_ == 0 && !is_ending) return;
    stack_.wait();
    for (std::size_t i = 0; i < save_count_; ++i) {
      static_cast<void>(detail::settled(saves_[i].after));
      if (saves_[i].has_begun) static_cast<void>(detail::settled(saves_[i].fence));
    }
    for (const record& each : loads_) {
      if (each.state != record::phase::ending) continue;
      for (const part& one : each.parts) {
        if (one.layers != 0) static_cast<void>(detail::settled(one.fence));
      }
    }
  }
}

template <class Cache, offload::kv_mover Mover, class... Tiers>
result<void> kv_tiers<Cache, Mover, Tiers...>::persist() noexcept {
  flush();
  return stack_.sync();
}

template <class Cache, offload::kv_mover Mover, class... Tiers>
offload::kv_tiers_stats kv_tiers<Cache, Mover, Tiers...>::stats() const noexcept {
  offload::kv_tiers_stats out{.saving = save_count_, .invalidated = invalidated_};
  stack_.count(out);
  for (const record& each : loads_)
    out.loads += each.state == record::phase::free ? 0U : 1U;
  out.metadata_bytes = stack_.metadata_bytes() + seen_.bytes() + saves_.bytes();
  return out;
}

template <class Cache, offload::kv_mover Mover, class... Tiers>
std::vector<std::string> kv_tiers<Cache, Mover, Tiers...>::audit() const {
  return stack_.audit();
}

// Withdrawing

template <class Cache, offload::kv_mover Mover, class... Tiers>
void kv_tiers<Cache, Mover, Tiers...>::invalidated(const block_key& key, std::size_t) noexcept {
  try {
    invalidated_ += stack_.drop_with_followers(key);
  } catch (...) {  // there is no memory to find the blocks that build on it
    stack_.clear();
  }
  for (record& each : loads_) {
    if (each.state != record::phase::running) continue;
    const auto keys = each.chain->keys();
    std::size_t wrong = 0;
    while (wrong < keys.size() && keys[wrong] != key)
      ++wrong;
    const std::uint64_t from = wrong * std::uint64_t{each.chain->chunk_tokens()};
    for (part& one : each.parts) {
      const std::uint64_t end = (std::uint64_t{one.index} + 1) * view_.groups()[one.group].block_tokens;
      if (wrong < keys.size() && end > from) one.is_wrong = true;
    }
  }
}

template <class Cache, offload::kv_mover Mover, class... Tiers>
void kv_tiers<Cache, Mover, Tiers...>::cleared() noexcept {
  stack_.clear();
  for (record& each : loads_) {
    for (part& one : each.parts)
      one.is_wrong = true;
  }
}

}  // namespace v0
}  // namespace llmmem
