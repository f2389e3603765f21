/// @file
/// Bodies of hybrid_allocator.hpp; included by it alone.
#pragma once

#include <llmmem/paging/hybrid_allocator.hpp>

#include <cstring>
#include <numeric>
#include <optional>
#include <utility>

namespace llmmem::inline v0 {

namespace detail {

/// The groups that `options` ask for, once every number in them can be worked with.
[[nodiscard]] inline std::array<layer_group, max_layer_groups> checked_groups(const hybrid_options& options) {
  if (options.groups.empty() || options.groups.size() > max_layer_groups) {
    throw length_error(options.name + ": " + std::to_string(options.groups.size()) +
                       " groups; allowed are 1 to " + std::to_string(max_layer_groups));
  }
  std::array<layer_group, max_layer_groups> all{};
  for (std::size_t g = 0; g < options.groups.size(); ++g) {
    options.groups[g].validate();
    all[g] = options.groups[g];
    if (all[g].block_tokens > max_block_tokens) {
      throw length_error(options.name + ": blocks of " + std::to_string(all[g].block_tokens) +
                         " tokens in group " + std::string(all[g].name) + "; allowed are 1 to " +
                         std::to_string(max_block_tokens));
    }
  }
  if (options.max_sequences == 0)
    throw length_error(options.name + ": max_sequences is 0; at least 1 is needed");
  if (options.max_sequence_tokens == 0) {
    throw length_error(options.name + ": max_sequence_tokens is 0; at least 1 is needed");
  }
  return all;
}

/// What the pool is built from; keeps the sizes that the options refer to.
struct pool_plan {
  explicit pool_plan(const hybrid_options& options) {
    for (std::size_t g = 0; g < options.groups.size(); ++g)
      sizes[g] = options.groups[g].block_bytes;
    pool = {.budget_bytes = options.budget_bytes,
            .page_bytes = options.page_bytes,
            .block_bytes = std::span(sizes).first(options.groups.size()),
            .name = options.name,
            .metadata = options.metadata};
  }
  pool_plan(const pool_plan&) = delete;
  pool_plan& operator=(const pool_plan&) = delete;

  std::array<std::uint64_t, max_layer_groups> sizes{};
  super_page_options pool{};
};

[[nodiscard]] inline std::uint32_t common_tokens(std::span<const layer_group> groups) noexcept {
  std::uint32_t common = 0;
  for (const layer_group& each : groups)
    common = std::gcd(common, each.block_tokens);
  return common;
}

/// Chunks that the group which needs the fewest bytes for one could cache with all of the budget.
[[nodiscard]] inline std::uint64_t most_chunks(const hybrid_options& options) noexcept {
  if (options.max_chunks != 0) return options.max_chunks;
  const std::uint32_t chunk = common_tokens(options.groups);
  std::uint64_t most = 1;
  for (const layer_group& each : options.groups) {
    const std::uint64_t blocks =
        (options.budget_bytes / options.page_bytes - 1) * (options.page_bytes / each.block_bytes);
    const std::uint64_t nodes = blocks * (each.block_tokens / chunk);
    if (nodes > most) most = nodes;
  }
  return most < max_blocks ? most : max_blocks;
}

}  // namespace detail

template <class Traits>
hybrid_allocator<Traits>::hybrid_allocator(const hybrid_options& options)
    : hybrid_allocator(options, [](slot_count slots, const metadata_source& source) {
        return eviction_type(slots, source);
      }) {}

template <class Traits>
template <class Make>
hybrid_allocator<Traits>::hybrid_allocator(const hybrid_options& options, Make&& make)
    : groups_(detail::checked_groups(options)),
      group_count_(options.groups.size()),
      pool_(detail::pool_plan(options).pool, make),
      chunk_tokens_(detail::common_tokens(options.groups)),
      chain_(detail::most_chunks(options), chunk_tokens_, group_count_, options.seed, options.metadata),
      node_of_(pool_.block_ids(), options.metadata, "hybrid_allocator: nodes of blocks"),
      max_sequence_tokens_(options.max_sequence_tokens),
      records_(options.max_sequences, options.metadata, "hybrid_allocator: sequences") {
  static_assert(eviction_factory<Make, eviction_type>, "make(slots, source) must give a Traits::eviction");
  for (std::size_t g = 0; g < group_count_; ++g) {
    row_first_[g] = row_entries_;
    row_entries_ += groups_[g].blocks_for(max_sequence_tokens_) + 1;
  }
  rows_ = detail::fixed_array<block_id>(
      checked_multiply(row_entries_, options.max_sequences, "hybrid_allocator: block tables"),
      options.metadata, "hybrid_allocator: block tables");
  tokens_ = detail::fixed_array<token_id>(
      checked_multiply(max_sequence_tokens_, options.max_sequences, "hybrid_allocator: tokens"),
      options.metadata, "hybrid_allocator: tokens");
}

// The life of a sequence

template <class Traits>
result<sequence_id> hybrid_allocator<Traits>::create(const prefix_context& context) noexcept {
  const std::uint32_t slot =
      records_.acquire({.tokens = 0, .committed = 0, .at = chain_.root(context), .context = context});
  if (slot == detail::no_index) return refusal(errc::out_of_sequences, 0, 1, records_.live());
  return records_.handle(slot);
}

template <class Traits>
result<sequence_id> hybrid_allocator<Traits>::fork(sequence_id parent) noexcept {
  if (const auto alive = check(parent); !alive) return alive.error();
  const record& original = records_[parent.slot];
  for (std::size_t g = 0; g < group_count_; ++g) {
    for (const block_id block : table(parent, g)) {
      const std::uint32_t references = pool_.record(block).references();
      if (block != null_block && references == block_record::max_references) {
        return refusal(errc::too_many_shares, to_index(block), 1, references);
      }
    }
  }
  const std::uint32_t slot = records_.acquire(original);
  if (slot == detail::no_index) return refusal(errc::out_of_sequences, 0, 1, records_.live());
  for (std::size_t g = 0; g < group_count_; ++g) {
    const auto held = table(parent, g);
    std::memcpy(row(slot, g), held.data(), held.size_bytes());
    for (const block_id block : held) {
      if (block != null_block) static_cast<void>(pool_.share(block));  // cannot fail: looked at above
    }
  }
  std::memcpy(tokens_.data() + slot * max_sequence_tokens_,
              tokens_.data() + parent.slot * max_sequence_tokens_, original.tokens * sizeof(token_id));
  chain_.share(original.at.node);
  counters_.tokens += original.tokens;
  return records_.handle(slot);
}

template <class Traits>
result<void> hybrid_allocator<Traits>::release(sequence_id sequence) noexcept {
  if (const auto alive = check(sequence); !alive) return alive.error();
  counters_.tokens -= records_[sequence.slot].tokens;
  give_back(sequence.slot);
  chain_.release(records_[sequence.slot].at.node);
  records_.release(sequence.slot);
  return {};
}

/// Drops the references of all tables.
template <class Traits>
void hybrid_allocator<Traits>::give_back(std::uint32_t slot) noexcept {
  const record& ended = records_[slot];
  for (std::size_t g = 0; g < group_count_; ++g) {
    for (std::uint64_t i = groups_[g].blocks_for(ended.tokens); i > ended.dead[g]; --i)
      static_cast<void>(pool_.release(row(slot, g)[i - 1]));  // cannot fail: the sequence held it
  }
}

/// Gives back what no token looks at from `length` tokens on.
template <class Traits>
void hybrid_allocator<Traits>::release_dead(std::uint32_t slot, std::uint64_t length) noexcept {
  record& sequence = records_[slot];
  for (std::size_t g = 0; g < group_count_; ++g) {
    const std::uint64_t end = groups_[g].dead_blocks(length);
    for (std::uint32_t& i = sequence.dead[g]; i < end; ++i) {
      block_id& entry = row(slot, g)[i];
      static_cast<void>(pool_.release(entry));  // cannot fail: the sequence held it
      entry = null_block;
      ++counters_.released_early;
    }
  }
}

// Growing

template <class Traits>
result<void> hybrid_allocator<Traits>::check_length(std::uint32_t slot, std::uint64_t count) const noexcept {
  const std::uint64_t held = records_[slot].tokens;
  if (count <= max_sequence_tokens_ - held) return {};
  return refusal(errc::sequence_full, slot, count > max_bytes ? max_bytes : held + count,
                 max_sequence_tokens_);
}

template <class Traits>
typename hybrid_allocator<Traits>::need hybrid_allocator<Traits>::needed_for(
    std::uint32_t slot, std::size_t group, std::uint64_t count) const noexcept {
  if (count == 0) return {};
  const layer_group& of = groups_[group];
  const std::uint64_t tokens = records_[slot].tokens;
  need out{.more = of.blocks_to_append(tokens, count)};
  if (tokens % of.block_tokens != 0) {
    const block_id last = row(slot, group)[of.blocks_for(tokens) - 1];
    out.copies = pool_.record(last).references() > 1;
  } else {
    out.carries = of.kind == layer_kind::state_snapshots && tokens != 0;
  }
  return out;
}

template <class Traits>
result<bool> hybrid_allocator<Traits>::shortage(sequence_id sequence, std::uint64_t count,
                                                std::span<group_shortage> out) noexcept {
  if (const auto alive = check(sequence); !alive) return alive.error();
  if (out.size() != group_count_) return refusal(errc::size_mismatch, 0, out.size(), group_count_);
  if (const auto fits = check_length(sequence.slot, count); !fits) return fits.error();
  release_dead(sequence.slot, records_[sequence.slot].tokens);
  std::array<std::uint64_t, max_layer_groups> wanted{};
  for (std::size_t g = 0; g < group_count_; ++g)
    wanted[g] = needed_for(sequence.slot, g, count).blocks();
  return !pool_.shortage(std::span(wanted).first(group_count_), out);
}

template <class Traits>
result<hybrid_append> hybrid_allocator<Traits>::append(sequence_id sequence,
                                                       std::span<const token_id> tokens) noexcept {
  if (const auto alive = check(sequence); !alive) return alive.error();
  const std::uint32_t slot = sequence.slot;
  if (const auto fits = check_length(slot, tokens.size()); !fits) return fits.error();
  record& grown = records_[slot];
  release_dead(slot, grown.tokens);
  hybrid_append out{.first = grown.tokens};
  if (tokens.empty()) return out;

  std::array<need, max_layer_groups> needs{};
  std::array<group_blocks, max_layer_groups> wanted{};
  for (std::size_t g = 0; g < group_count_; ++g) {
    needs[g] = needed_for(slot, g, tokens.size());
    // A copy's block comes behind the new ones.
    wanted[g] = {g, {row(slot, g) + groups_[g].blocks_for(grown.tokens), needs[g].blocks()}};
    out.new_blocks += needs[g].blocks();
  }
  const auto had = pool_.allocate(std::span(wanted).first(group_count_), forget_evicted());
  if (!had) return had.error();

  std::size_t copies = 0;
  for (std::size_t g = 0; g < group_count_; ++g) {
    const layer_group& of = groups_[g];
    const std::uint64_t entries = of.blocks_for(grown.tokens);
    const auto used = static_cast<std::uint32_t>(
        of.kind == layer_kind::state_snapshots ? of.block_tokens : grown.tokens % of.block_tokens);
    if (needs[g].copies) {
      block_id& last = row(slot, g)[entries - 1];
      const block_id copy = row(slot, g)[entries + needs[g].more];
      copies_[copies++] = {g, {.source = last, .destination = copy, .tokens = used}};
      static_cast<void>(pool_.release(last));  // cannot fail: others hold it too
      last = copy;
      ++counters_.copies;
    } else if (needs[g].carries) {
      copies_[copies++] = {
          g, {.source = row(slot, g)[entries - 1], .destination = row(slot, g)[entries], .tokens = used}};
    }
  }
  std::memcpy(tokens_.data() + slot * max_sequence_tokens_ + grown.tokens, tokens.data(),
              tokens.size_bytes());
  grown.tokens += tokens.size();
  counters_.tokens += tokens.size();
  out.copies = std::span(copies_).first(copies);
  return out;
}

// What is cached and found

template <class Traits>
typename hybrid_allocator<Traits>::hit hybrid_allocator<Traits>::longest_hit(
    std::span<const token_id> tokens, place at, const prefix_context& context) const noexcept {
  hit_scan scan(groups());
  hit best{.tokens = 0, .at = at};
  const std::uint64_t limit = tokens.size() < max_sequence_tokens_ ? tokens.size() : max_sequence_tokens_;
  for (std::uint64_t end = chunk_tokens_; end <= limit && !scan.hopeless(); end += chunk_tokens_) {
    const auto part = tokens.subspan(static_cast<std::size_t>(end - chunk_tokens_), chunk_tokens_);
    const auto next = chain_.find(at, part, context);
    if (!next) break;
    at = *next;
    for (std::size_t g = 0; g < group_count_; ++g) {
      if (end % groups_[g].block_tokens == 0) scan.see(g, chain_.cached(at.node, g) != null_block);
    }
    if (scan.serves(end)) best = {.tokens = end, .at = at};
  }
  return best;
}

template <class Traits>
result<match_result> hybrid_allocator<Traits>::match(sequence_id sequence,
                                                     std::span<const token_id> tokens) noexcept {
  if (const auto alive = check(sequence); !alive) return alive.error();
  record& taker = records_[sequence.slot];
  if (taker.tokens != 0) return refusal(errc::not_fresh, sequence.slot, 0, taker.tokens);
  ++counters_.matches;
  const hit found = longest_hit(tokens, taker.at, taker.context);
  if (found.tokens == 0) return match_result{};
  const auto blocks = take(sequence.slot, found);
  if (!blocks) return blocks.error();
  chain_.share(found.at.node);
  taker.at = found.at;
  taker.committed = found.tokens / chunk_tokens_;
  taker.tokens = found.tokens;
  std::memcpy(tokens_.data() + sequence.slot * max_sequence_tokens_, tokens.data(),
              found.tokens * sizeof(token_id));
  counters_.tokens += found.tokens;
  counters_.hit_tokens += found.tokens;
  return match_result{.tokens = found.tokens, .blocks = *blocks};
}

/// Fills the tables of a sequence without tokens with what a hit has, and shares it; says how many blocks.
template <class Traits>
result<std::uint64_t> hybrid_allocator<Traits>::take(std::uint32_t slot, const hit& found) noexcept {
  record& taker = records_[slot];
  std::uint64_t first_token = found.tokens;
  for (std::size_t g = 0; g < group_count_; ++g) {
    const block_range needed = groups_[g].hit_blocks(found.tokens);
    taker.dead[g] = static_cast<std::uint32_t>(needed.first);
    for (std::uint64_t i = 0; i < needed.end; ++i)
      row(slot, g)[i] = null_block;
    if (needed.count() == 0) continue;
    const std::uint64_t begins = needed.first * groups_[g].block_tokens;
    if (begins < first_token) first_token = begins;
  }
  // Up the chain, as far as any group needs it.
  block_id node = found.at.node;
  for (std::uint64_t end = found.tokens; end > first_token; end -= chunk_tokens_) {
    for (std::size_t g = 0; g < group_count_; ++g) {
      const std::uint64_t blocks = end / groups_[g].block_tokens;
      if (end % groups_[g].block_tokens == 0 && blocks > taker.dead[g])
        row(slot, g)[blocks - 1] = chain_.cached(node, g);
    }
    node = chain_.parent(node);
  }
  std::uint64_t shared = 0;
  for (std::size_t g = 0; g < group_count_; ++g) {
    const block_range needed = groups_[g].hit_blocks(found.tokens);
    for (std::uint64_t i = needed.first; i < needed.end; ++i) {
      const block_id block = row(slot, g)[i];
      if (const auto done = pool_.share(block); !done) {
        for (std::size_t h = 0; h <= g; ++h) {
          const block_range back = groups_[h].hit_blocks(found.tokens);
          for (std::uint64_t k = h == g ? i : back.end; k > back.first; --k)
            static_cast<void>(pool_.release(row(slot, h)[k - 1]));
        }
        taker.dead = {};
        return done.error();
      }
      const block_id named_by = node_of_[to_index(block)];
      pool_.touch(block, {.content = chain_.key(named_by).low, .position = static_cast<std::uint32_t>(i)});
      ++shared;
    }
  }
  return shared;
}

/// The place behind the next chunk; where the chain has no room, idle blocks make some.
template <class Traits>
std::optional<typename hybrid_allocator<Traits>::place> hybrid_allocator<Traits>::next_place(
    record& sequence, std::span<const token_id> part) noexcept {
  for (;;) {
    const auto next = chain_.extend(sequence.at, part, sequence.context);
    if (next || chain_.free() != 0 || chain_.collides(sequence.at, part, sequence.context)) return next;
    bool evicted = false;
    for (std::size_t g = 0; g < group_count_; ++g)
      evicted = pool_.evict_one(g, forget_evicted()) || evicted;
    if (!evicted) return std::nullopt;
  }
}

template <class Traits>
result<std::uint64_t> hybrid_allocator<Traits>::commit(sequence_id sequence, std::uint64_t written) noexcept {
  if (const auto alive = check(sequence); !alive) return alive.error();
  record& writer = records_[sequence.slot];
  if (written > writer.tokens) return refusal(errc::past_the_end, sequence.slot, written, writer.tokens);
  std::uint64_t registered = 0;
  for (; writer.committed < written / chunk_tokens_; ++writer.committed) {
    const auto next = next_place(writer, chunk(sequence.slot, writer.committed));
    if (!next) break;
    chain_.share(next->node);
    chain_.release(writer.at.node);
    writer.at = *next;
    const std::uint64_t end = (writer.committed + 1) * chunk_tokens_;
    for (std::size_t g = 0; g < group_count_; ++g) {
      if (end % groups_[g].block_tokens != 0) continue;
      const std::uint64_t i = end / groups_[g].block_tokens - 1;
      const block_id block = row(sequence.slot, g)[i];
      if (block == null_block) continue;
      if (const block_id cached = chain_.cached(next->node, g); cached != null_block) {
        counters_.duplicates += cached != block ? 1 : 0;
        continue;
      }
      chain_.hold(next->node, g, block);
      node_of_[to_index(block)] = next->node;
      pool_.mark_cached(block, {.content = next->key.low, .position = static_cast<std::uint32_t>(i)});
      ++registered;
    }
  }
  counters_.registrations += registered;
  release_dead(sequence.slot, written);
  return registered;
}

template <class Traits>
std::uint64_t hybrid_allocator<Traits>::drop_idle() noexcept {
  std::uint64_t dropped = 0;
  for (std::size_t g = 0; g < group_count_; ++g) {
    while (pool_.evict_one(g, forget_evicted()))
      ++dropped;
  }
  return dropped;
}

// What a sequence holds

template <class Traits>
std::span<const block_id> hybrid_allocator<Traits>::table(sequence_id sequence,
                                                          std::size_t group) const noexcept {
  if (!check(sequence)) return {};
  return {row(sequence.slot, group), groups_[group].blocks_for(records_[sequence.slot].tokens)};
}

template <class Traits>
result<std::uint64_t> hybrid_allocator<Traits>::write_table(sequence_id sequence, std::size_t group,
                                                            std::span<std::int32_t> out) const noexcept {
  if (const auto alive = check(sequence); !alive) return alive.error();
  const auto held = table(sequence, group);
  if (out.size() < held.size()) return refusal(errc::size_mismatch, 0, out.size(), held.size());
  for (std::size_t i = 0; i < held.size(); ++i)
    out[i] = pool_.unit_index(held[i]);
  for (auto& padding : out.subspan(held.size()))
    padding = 0;
  return held.size();
}

template <class Traits>
hybrid_stats hybrid_allocator<Traits>::stats() const noexcept {
  const super_page_stats pages = pool_.stats();
  return {.sequences = records_.live(),
          .tokens = counters_.tokens,
          .chunks = chain_.size(),
          .matches = counters_.matches,
          .hit_tokens = counters_.hit_tokens,
          .registrations = counters_.registrations,
          .duplicates = counters_.duplicates,
          .released_early = counters_.released_early,
          .copies = counters_.copies,
          .pages = pages,
          .metadata_bytes = pages.metadata_bytes + chain_.metadata_bytes() + node_of_.bytes() +
                            records_.bytes() + rows_.bytes() + tokens_.bytes(),
          .verification_bytes = chain_.verification_bytes()};
}

template <class Traits>
std::vector<std::string> hybrid_allocator<Traits>::audit() const {
  std::vector<std::string> found = pool_.audit();
  const auto blame = [&](const std::string& what) { found.push_back(name() + ": " + what); };
  std::vector<std::uint64_t> held(pool_.block_ids());
  std::vector<std::uint64_t> holders(chain_.capacity() + 1);
  std::uint64_t tokens = 0;
  for (std::uint32_t slot = 0; slot < records_.touched(); ++slot) {
    if (!records_.is_live(slot)) continue;
    const record& sequence = records_[slot];
    tokens += sequence.tokens;
    ++holders[to_index(sequence.at.node)];
    const std::string who = "sequence " + std::to_string(slot);
    if (sequence.tokens > max_sequence_tokens_ || sequence.committed > sequence.tokens / chunk_tokens_) {
      blame(who + " counts " + std::to_string(sequence.committed) + " chunks committed, of " +
            std::to_string(sequence.tokens) + " tokens");
      return found;
    }
    for (std::size_t g = 0; g < group_count_; ++g) {
      for (std::uint64_t i = 0; i < groups_[g].blocks_for(sequence.tokens); ++i) {
        const block_id block = row(slot, g)[i];
        const std::string where = "[" + std::string(groups_[g].name) + "][" + std::to_string(i) + "]";
        if ((block == null_block) != (i < sequence.dead[g])) {
          blame(who + where + (block == null_block ? " holds no block" : " still holds a block"));
        } else if (block != null_block && (to_index(block) >= held.size() || pool_.group_of(block) != g)) {
          blame(who + where + " names block " + std::to_string(to_index(block)) +
                ", which is not its group's");
        } else if (block != null_block) {
          ++held[to_index(block)];
        }
      }
    }
  }
  if (tokens != counters_.tokens) {
    blame("counts " + std::to_string(counters_.tokens) + " tokens, there are " + std::to_string(tokens));
  }
  for (std::uint32_t i = 1; i < held.size(); ++i) {
    const block_record& block = pool_.record(block_id{i});
    const auto accuse = [&](const std::string& what) {
      blame("block " + std::to_string(i) + " " + what + " (last: " + std::string(to_string(block.last())) +
            ")");
    };
    if (block.references() != held[i]) {
      accuse("counts " + std::to_string(block.references()) + " references, " + std::to_string(held[i]) +
             " exist");
    }
    if (!block.is_cached()) continue;
    const block_id node = node_of_[i];
    if (!chain_.contains(node) || chain_.cached(node, pool_.group_of(block_id{i})) != block_id{i})
      accuse("is cached, and no prefix names it");
  }
  std::uint64_t named = 0;
  std::uint64_t cached = 0;
  for (std::uint32_t i = 1; i < held.size(); ++i)
    cached += pool_.record(block_id{i}).is_cached() ? 1 : 0;
  for (std::uint32_t node = 1; node < holders.size(); ++node) {
    for (std::size_t g = 0; g < group_count_; ++g) {
      named += chain_.contains(block_id{node}) && chain_.cached(block_id{node}, g) != null_block ? 1 : 0;
    }
  }
  if (named != cached) {
    blame("prefixes name " + std::to_string(named) + " blocks, " + std::to_string(cached) + " are cached");
  }
  for (const std::string& each : chain_.audit(holders))
    blame(each);
  return found;
}

}  // namespace llmmem::inline v0
