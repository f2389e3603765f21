/// @file
/// Bodies of kv_tiers.hpp: blocks on their way from the tiers into the cache. Only that file includes this
/// one.
#pragma once

#include <llmmem/detail/named_range.hpp>
#include <llmmem/offload/kv_tiers.hpp>
#include <llmmem/paging/errors.hpp>

namespace llmmem {
inline namespace v0 {

template <class Cache, offload::kv_mover Mover, class... Tiers>
result<typename kv_tiers<Cache, Mover, Tiers...>::load> kv_tiers<Cache, Mover, Tiers...>::prepare_load(
    sequence_id sequence, const kv_chain& chain, const offload::load_limits& limits) {
  const detail::named_range range("kv_tiers prepare_load");
  Cache& cache = view_.cache();
  if (const auto alive = cache.check(sequence); !alive) return alive.error();
  const std::uint64_t have = cache.tokens(sequence);
  const std::uint64_t step = chain.chunk_tokens();
  if (have % step != 0) return refusal(errc::not_whole_blocks, sequence.slot, have, step);
  if (chain.epoch() != cache.epoch()) return refusal(errc::epoch_differs, 0, chain.epoch(), cache.epoch());
  if (!continues(sequence, chain, have)) return refusal(errc::not_a_prefix, sequence.slot, have, 0);
  proceed();
  const std::uint64_t whole = chain.keys().size();
  std::uint64_t limit = limits.upto >= chain.tokens() ? whole : limits.upto / step;
  if (limits.costs) {
    const std::uint64_t worth = choose_load(chain, have, limit < whole ? limit : whole, *limits.costs).tokens;
    limit = (worth + step - 1) / step;
  }
  limit = limit < whole ? limit : whole;
  std::uint32_t slot = 0;
  while (slot < loads_.size() && loads_[slot].state != record::phase::free)
    ++slot;
  record* const place = slot < loads_.size() ? &loads_[slot] : nullptr;
  const offload::kv_lookup_result where = find_parts(place, chain, have, limit);
  load empty;
  empty.result_ = {.first = have, .tokens = have, .wanted = have};
  if (where.loadable() == 0) return empty;
  if (place == nullptr) return refusal(errc::table_full, 0, loads_.size() + 1, loads_.size());

  record& made = *place;
  const std::uint64_t most = limits.patience_ns.value_or(options_.patience_ns);
  const std::uint64_t begun = now();
  made.sequence = sequence;
  made.chain = &chain;
  made.deadline = most > ~std::uint64_t{0} - begun ? ~std::uint64_t{0} : begun + most;
  made.first_queued = 0;
  made.progress = {};
  made.wanted = {.first = have, .tokens = have, .wanted = where.tokens};
  take_parts(made);
  // The tiers' slots are pinned by now, so blocks that the cache evicts for the load cannot displace them.
  made.state = record::phase::running;
  if (const auto grown = view_.grow(sequence, chain, where.tokens); !grown) {
    for (part& each : made.parts)
      let_go(each);
    end(made);
    take_back(sequence, have);
    return grown.error();
  }
  if (!take_blocks(made)) {
    cancel(slot);
    take_back(sequence, have);
    return refusal(errc::too_many_shares, 0, 1, 0);
  }
  static_cast<void>(cache.limit_commits(sequence, have));  // cannot fail: the sequence is alive
  begin_reads(slot);
  return load(*this, slot, made.wanted);
}

/// Returns whether the chain has the sequence's context, and its first `have` tokens are those of the
/// sequence, as far as the cache knows.
template <class Cache, offload::kv_mover Mover, class... Tiers>
bool kv_tiers<Cache, Mover, Tiers...>::continues(sequence_id sequence, const kv_chain& chain,
                                                 std::uint64_t have) const noexcept {
  const Cache& cache = view_.cache();
  if (!(cache.context(sequence) == chain.context())) return false;
  const std::uint64_t chunks = have / chain.chunk_tokens();
  if (chunks > chain.keys().size()) return false;
  for (std::size_t g = 0; g < groups_ && have != 0; ++g) {
    if (have % view_.groups()[g].block_tokens != 0) continue;
    const block_id last =
        view_.table(sequence, g)[static_cast<std::size_t>(have / view_.groups()[g].block_tokens - 1)];
    const auto known = cache.cached_key(last);
    if (known && *known != chain.keys()[static_cast<std::size_t>(chunks - 1)]) return false;
  }
  return true;
}

/// Truncates a sequence to the tokens that it had, or to fewer if windows have moved: it keeps no token
/// without contents.
template <class Cache, offload::kv_mover Mover, class... Tiers>
void kv_tiers<Cache, Mover, Tiers...>::take_back(sequence_id sequence, std::uint64_t have) noexcept {
  Cache& cache = view_.cache();
  if (cache.truncate(sequence, have)) return;
  if constexpr (detail::cache_view<Cache>::is_hybrid) {
    const auto cuts = cache.nearest_cuts(sequence, have);
    if (cuts && cache.truncate(sequence, cuts->below)) return;
  }
  static_cast<void>(cache.invalidate(sequence, have));  // otherwise those tokens are at least never committed
}

/// Looks for the blocks of the chain's first `chunks` chunks, and notes in `into`, unless that is null, where
/// each block of a load is.
template <class Cache, offload::kv_mover Mover, class... Tiers>
offload::kv_lookup_result kv_tiers<Cache, Mover, Tiers...>::find_parts(record* into, const kv_chain& chain,
                                                                       std::uint64_t first,
                                                                       std::uint64_t chunks) {
  const std::uint64_t step = chain.chunk_tokens();
  const auto nowhere_else = [](std::size_t, std::uint64_t, offload::answer) noexcept { return false; };
  const auto add = [&](std::size_t g, std::uint64_t index, const detail::tier_place_found& found) noexcept {
    const auto tier = static_cast<std::uint8_t>(found.tier);
    into->parts.push_back({.group = static_cast<std::uint32_t>(g),
                           .index = static_cast<std::uint32_t>(index),
                           .slot = found.slot,
                           .tier = tier,
                           .from = tier,
                           .state = tier == 0 ? part_state::ready : part_state::queued});
  };
  if (into == nullptr) return lookup_with(chain, first, chunks, nowhere_else);
  into->parts.clear();
  for (std::size_t g = 0; g < groups_; ++g)
    into->layer_fences[g].assign(mover_.layers(g), fence_type{});
  if constexpr (!detail::cache_view<Cache>::is_hybrid) {
    // Each length that can be loaded adds one block: the scan that finds the length finds all blocks.
    if (chunks > first / step) into->parts.reserve(static_cast<std::size_t>(chunks - first / step));
    std::uint64_t next = first / step;
    return each_hit(
        chain, first, chunks, now(), nowhere_else,
        [&](const auto&, const detail::tier_place_found& found) noexcept { add(0, next++, found); });
  } else {
    // At a later time a tier that is quiet now might name another slot, whose contents are on their way.
    const std::uint64_t at = now();
    const offload::kv_lookup_result out =
        each_hit(chain, first, chunks, at, nowhere_else, [](const auto&, const auto&) noexcept {});
    if (out.tokens == first) return out;
    const std::uint64_t end = (out.tokens + step - 1) / step * step;
    std::size_t most = 0;
    for (const layer_group& group : view_.groups())
      detail::for_each_needed(group, end, [&](std::uint64_t) { ++most; });
    into->parts.reserve(most);
    for (std::size_t g = 0; g < groups_; ++g) {
      const layer_group& group = view_.groups()[g];
      detail::for_each_needed(group, end, [&](std::uint64_t index) {
        const std::uint64_t last = (index + 1) * group.block_tokens;
        if (last <= first) return;
        const block_key& key = chain.keys()[static_cast<std::size_t>(last / step - 1)];
        add(g, index, look(g, detail::tier_key(key, g), at).second);
      });
    }
    return out;
  }
}

/// Pins the slots of a load's parts, and counts their use.
template <class Cache, offload::kv_mover Mover, class... Tiers>
void kv_tiers<Cache, Mover, Tiers...>::take_parts(record& of) noexcept {
  const std::uint64_t step = of.chain->chunk_tokens();
  for (const part& each : of.parts) {
    const std::uint64_t end = (std::uint64_t{each.index} + 1) * view_.groups()[each.group].block_tokens;
    const block_key& key = of.chain->keys()[static_cast<std::size_t>(end / step - 1)];
    stack_.take(each.tier, each.group, each.slot, detail::tier_key(key, each.group));
    of.progress[each.group].missing += each.state == part_state::queued ? 1U : 0U;
  }
}

/// Finds the blocks that receive the parts, and pins them. Returns whether all could be pinned.
template <class Cache, offload::kv_mover Mover, class... Tiers>
bool kv_tiers<Cache, Mover, Tiers...>::take_blocks(record& of) noexcept {
  std::span<const block_id> table;
  std::size_t group = groups_;
  for (part& each : of.parts) {
    if (each.group != group) table = view_.table(of.sequence, group = each.group);
    const block_id block = table[each.index];
    if (!view_.cache().pin(block)) return false;
    each.block = block;
  }
  return true;
}

template <class Cache, offload::kv_mover Mover, class... Tiers>
void kv_tiers<Cache, Mover, Tiers...>::let_go(part& of) noexcept {
  if (of.slot == no_slot) return;
  stack_.with(of.tier, [&](auto& level) {
    level.slots[of.group].end_load(of.slot);
    level.slots[of.group].unpin(of.slot);
  });
  of.slot = no_slot;
}

template <class Cache, offload::kv_mover Mover, class... Tiers>
void kv_tiers<Cache, Mover, Tiers...>::give_up(record& from, part& of, part_state state) noexcept {
  // The slot stays as long as a copy into the cache reads it.
  if (of.layers == 0) let_go(of);
  detail::load_progress& progress = from.progress[of.group];
  if (of.state == part_state::queued || of.state == part_state::reading) --progress.missing;
  if (of.state == part_state::reading) --progress.reading;
  of.state = state;
}

/// Gives up parts that are not in the first tier; the engine computes them instead.
template <class Cache, offload::kv_mover Mover, class... Tiers>
void kv_tiers<Cache, Mover, Tiers...>::give_up_missing(record& of) noexcept {
  for (part& each : of.parts) {
    if (each.state == part_state::queued || each.state == part_state::reading)
      give_up(of, each, part_state::late);
  }
  stack_.forget_reader(static_cast<std::uint32_t>(&of - loads_.data()), of.generation);
}

template <class Cache, offload::kv_mover Mover, class... Tiers>
void kv_tiers<Cache, Mover, Tiers...>::begin_reads(std::uint32_t slot) noexcept {
  using begun = typename detail::kv_tier_stack<Tiers...>::begun;
  record& of = loads_[slot];
  for (; of.first_queued < of.parts.size(); ++of.first_queued) {
    part& each = of.parts[of.first_queued];
    if (each.state != part_state::queued) continue;
    const auto came =
        stack_.begin_read(each.tier, each.group, each.slot,
                          {.load = slot, .generation = of.generation, .entry = of.first_queued}, now());
    if (came == begun::no_slot || came == begun::no_transfer) return;
    if (came == begun::yes) {
      each.state = part_state::reading;
      ++of.progress[each.group].reading;
    } else {
      if (came == begun::failed && of.wanted.why.code == errc::ok) of.wanted.why = stack_.last_failure();
      give_up(of, each, part_state::bad);
    }
  }
}

template <class Cache, offload::kv_mover Mover, class... Tiers>
void kv_tiers<Cache, Mover, Tiers...>::arrive(const detail::load_cookie& waiting, slot_id upper,
                                              const failure& why) noexcept {
  record& of = loads_[waiting.load];
  part& each = of.parts[waiting.entry];
  let_go(each);  // releases the slot in the lower tier
  detail::load_progress& progress = of.progress[each.group];
  --progress.missing;
  --progress.reading;
  if (why.code != errc::ok) {
    if (of.wanted.why.code == errc::ok) of.wanted.why = why;
    each.state = part_state::bad;
    return;
  }
  each.tier = 0;
  each.slot = upper;
  each.state = part_state::ready;
  progress.layers = 0;
  stack_.first().slots[each.group].begin_load(upper);
}

/// Begins to copy into the cache the blocks in the first tier, up to `layers` layers of a group.
template <class Cache, offload::kv_mover Mover, class... Tiers>
void kv_tiers<Cache, Mover, Tiers...>::restore(record& of, std::size_t group, std::uint32_t layers) noexcept {
  if (of.progress[group].layers >= layers) return;
  of.progress[group].layers = layers;
  std::array<offload::slot_pair, offload::max_slot_pairs> pairs;
  std::array<part*, offload::max_slot_pairs> which{};
  std::size_t count = 0;
  const auto begin = [&] {
    if (count == 0) return;
    const std::uint32_t first = which[0]->layers;
    const auto begun =
        mover_.restore(group, stack_.first().medium.slots_of(group), std::span(pairs).first(count),
                       layer_range{.first = first, .count = layers - first});
    for (std::size_t i = 0; i < count; ++i) {
      part& each = *which[i];
      if (!begun) {
        if (of.wanted.why.code == errc::ok) of.wanted.why = begun.error();
        each.state = part_state::bad;
        continue;
      }
      each.layers = layers;
      each.fence = *begun;
      if (layers == mover_.layers(group)) each.state = part_state::restored;
    }
    if (begun) {
      for (std::uint32_t l = first; l < layers; ++l)
        of.layer_fences[group][l] = *begun;
    }
    count = 0;
  };
  for (part& each : of.parts) {
    if (each.group != group || each.state != part_state::ready || each.layers >= layers) continue;
    if (each.is_wrong) {
      give_up(of, each, part_state::bad);
      continue;
    }
    if (count == pairs.size() || (count != 0 && which[0]->layers != each.layers)) begin();
    pairs[count] = {each.block, to_index(each.slot)};
    which[count++] = &each;
  }
  begin();
}

/// Releases the slots of blocks that are in the cache's memory.
template <class Cache, offload::kv_mover Mover, class... Tiers>
void kv_tiers<Cache, Mover, Tiers...>::free_restored(record& of) noexcept {
  for (part& each : of.parts) {
    if (each.state == part_state::restored && each.slot != no_slot && each.fence.ready()) let_go(each);
  }
}

template <class Cache, offload::kv_mover Mover, class... Tiers>
bool kv_tiers<Cache, Mover, Tiers...>::is_reading(const record& of) const noexcept {
  std::uint64_t reading = 0;
  for (std::size_t g = 0; g < groups_; ++g)
    reading += of.progress[g].reading;
  return reading != 0;
}

/// If parts are queued for a slot, restores all layers of the ready parts, so that their slots become free
/// while others are still read. If no transfer in progress could free a slot, gives up the queued parts.
template <class Cache, offload::kv_mover Mover, class... Tiers>
void kv_tiers<Cache, Mover, Tiers...>::make_way(std::uint32_t slot) noexcept {
  record& of = loads_[slot];
  if (of.first_queued == of.parts.size()) return;
  for (std::size_t g = 0; g < groups_; ++g)
    restore(of, g, mover_.layers(g));
  if (!is_reading(of)) {
    for (const part& each : of.parts) {
      if (each.state == part_state::restored && each.slot != no_slot)
        static_cast<void>(detail::settled(each.fence));
    }
  }
  free_restored(of);
  begin_reads(slot);
  if (!is_reading(of) && of.first_queued < of.parts.size() && stack_.is_idle() && save_count_ == 0)
    give_up_missing(of);
}

template <class Cache, offload::kv_mover Mover, class... Tiers>
result<typename Mover::fence_type> kv_tiers<Cache, Mover, Tiers...>::bring(std::uint32_t slot,
                                                                           std::size_t group,
                                                                           std::uint32_t layer) noexcept {
  record& of = loads_[slot];
  if (group >= groups_ || layer >= mover_.layers(group)) {
    return refusal(errc::out_of_range, static_cast<std::uint32_t>(group), layer,
                   group < groups_ ? mover_.layers(group) : 0);
  }
  for (;;) {
    proceed();
    begin_reads(slot);
    restore(of, group, layers_to_restore(group, layer));
    if (of.progress[group].missing == 0) return of.layer_fences[group][layer];
    free_restored(of);
    if (now() >= of.deadline) {
      give_up_missing(of);
      continue;
    }
    make_way(slot);
    if (of.progress[group].missing == 0) continue;
    if (of.deadline != ~std::uint64_t{0}) {
      pause();
    } else if (!stack_.wait_for_one(slot, of.generation)) {
      wait_for_save();
    }
  }
}

/// Waits for the copies of a load's parts, counts them, and returns the leading tokens of the sequence whose
/// blocks have the right contents.
template <class Cache, offload::kv_mover Mover, class... Tiers>
std::uint64_t kv_tiers<Cache, Mover, Tiers...>::count_parts(record& of) noexcept {
  const Cache& cache = view_.cache();
  std::uint64_t sound = of.wanted.wanted;
  std::span<const block_id> table;
  std::size_t group = groups_;
  for (part& each : of.parts) {
    if (each.layers != 0) {
      if (const auto copied = detail::settled(each.fence); !copied) {
        each.state = part_state::bad;
        if (of.wanted.why.code == errc::ok) of.wanted.why = copied.error();
      }
    }
    if (each.group != group) table = view_.table(of.sequence, group = each.group);
    const bool is_right = each.state == part_state::restored && !each.is_wrong;
    // Against the contract, the sequence was truncated and grown again, and has another block here.
    if (!is_right || each.index >= table.size() || table[each.index] != each.block) {
      const std::uint64_t first = std::uint64_t{each.index} * view_.groups()[each.group].block_tokens;
      if (first < sound) sound = first;
    }
    if (is_right) {
      ++of.wanted.blocks[each.from];
    } else if (each.state == part_state::late) {
      ++of.wanted.late_blocks;
    } else {
      ++of.wanted.failed_blocks;
    }
  }
  stack_.count_loaded(of.wanted.blocks);
  if (!cache.check(of.sequence)) return of.wanted.first < sound ? of.wanted.first : sound;
  if (const std::uint64_t prefix = cache.prefix_tokens(of.sequence); prefix < sound) sound = prefix;
  if constexpr (detail::cache_view<Cache>::is_hybrid) {
    // A shorter length is useful only if every group has the blocks that the next token attends to.
    if (sound < of.wanted.wanted) {
      const auto cuts = cache.nearest_cuts(of.sequence, sound);
      sound = cuts ? cuts->below : 0;
    }
  }
  return sound;
}

template <class Cache, offload::kv_mover Mover, class... Tiers>
offload::load_result kv_tiers<Cache, Mover, Tiers...>::finish(std::uint32_t slot) noexcept {
  record& of = loads_[slot];
  for (std::size_t g = 0; g < groups_; ++g)
    static_cast<void>(bring(slot, g, mover_.layers(g) - 1));
  of.wanted.tokens = count_parts(of);
  const bool is_complete = of.wanted.tokens == of.wanted.wanted;
  static_cast<void>(view_.cache().limit_commits(of.sequence, is_complete ? unlimited : of.wanted.tokens));
  if (of.wanted.tokens > of.wanted.first && view_.cache().check(of.sequence)) {
    const auto published = view_.publish(of.sequence, *of.chain, of.wanted.tokens);
    if (!published && of.wanted.why.code == errc::ok) of.wanted.why = published.error();
  }
  const offload::load_result out = of.wanted;
  end(of);
  return out;
}

template <class Cache, offload::kv_mover Mover, class... Tiers>
void kv_tiers<Cache, Mover, Tiers...>::cancel(std::uint32_t slot) noexcept {
  record& of = loads_[slot];
  give_up_missing(of);
  for (part& each : of.parts) {
    if (each.state == part_state::ready) give_up(of, each, part_state::late);
  }
  of.state = record::phase::ending;
  reap();
}

/// Ends a cancelled load once its copies have ended.
template <class Cache, offload::kv_mover Mover, class... Tiers>
void kv_tiers<Cache, Mover, Tiers...>::reap() noexcept {
  for (record& of : loads_) {
    if (of.state != record::phase::ending) continue;
    bool is_over = true;
    for (const part& each : of.parts)
      is_over = is_over && (each.layers == 0 || each.fence.ready());
    if (is_over) end(of);
  }
}

/// Releases all pins of a load.
template <class Cache, offload::kv_mover Mover, class... Tiers>
void kv_tiers<Cache, Mover, Tiers...>::end(record& of) noexcept {
  of.state = record::phase::free;
  ++of.generation;
  for (part& each : of.parts) {
    let_go(each);
    if (each.block == null_block) continue;
    static_cast<void>(
        view_.cache().unpin(std::exchange(each.block, null_block)));  // cannot fail: it was pinned
  }
}

template <class Cache, offload::kv_mover Mover, class... Tiers>
bool kv_tiers<Cache, Mover, Tiers...>::load::has_arrived() noexcept {
  if (tiers_ == nullptr) return true;
  tiers_->proceed();
  tiers_->begin_reads(slot_);
  record& of = tiers_->loads_[slot_];
  if (tiers_->now() >= of.deadline) {
    tiers_->give_up_missing(of);
  } else if (of.first_queued < of.parts.size()) {
    for (std::size_t g = 0; g < tiers_->groups_; ++g)
      tiers_->restore(of, g, tiers_->mover_.layers(g));
    tiers_->free_restored(of);
    tiers_->begin_reads(slot_);
  }
  for (std::size_t g = 0; g < tiers_->groups_; ++g) {
    if (of.progress[g].missing != 0) return false;
  }
  return true;
}

}  // namespace v0
}  // namespace llmmem
