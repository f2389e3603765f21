/// @file
/// A `hybrid_allocator` and the memory behind its blocks, driven by choices from anywhere.
#pragma once

#include <llmmem/eviction/any.hpp>
#include <llmmem/paging/hybrid_allocator.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <numeric>
#include <set>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "support/random.hpp"
#include "support/world.hpp"

namespace llmmem_tests {

/// Whether the token at `position` looks at the one at `other`, as papers define the kind; for states,
/// whether it looks at the state after it.
[[nodiscard]] inline bool looks_at(const llmmem::layer_group& group, std::uint64_t position,
                                   std::uint64_t other) {
  if (other > position) return false;
  switch (group.kind) {
    case llmmem::layer_kind::sliding_window:
      return position - other < group.reach || other < group.sinks;
    case llmmem::layer_kind::chunked_local:
      return position / group.reach == other / group.reach;
    case llmmem::layer_kind::state_snapshots:
      return position - other <= 1;
    case llmmem::layer_kind::full_attention:
      break;
  }
  return true;
}

/// Up to four groups of any kinds, with blocks of different sizes.
template <class Choices>
std::vector<llmmem::layer_group> choose_groups(Choices& choices) {
  std::vector<llmmem::layer_group> groups;
  const std::uint64_t count = 1 + choices.below(std::uint64_t{4});
  const std::uint32_t base = 1 + choices.below(std::uint32_t{4});
  for (std::uint64_t i = 0; i < count; ++i) {
    llmmem::layer_group each;
    each.kind = llmmem::layer_kind(choices.below(std::uint32_t{4}));
    each.reach = 1 + choices.below(std::uint64_t{12});
    if (each.kind == llmmem::layer_kind::sliding_window && choices.once_in(3))
      each.sinks = each.reach > 1 ? 1 + choices.below(std::uint64_t{6}) : 0;
    if (each.kind == llmmem::layer_kind::state_snapshots && choices.once_in(2))
      each.writes = llmmem::snapshot_times::end_of_step;
    each.block_tokens = choices.once_in(3) ? base * (1 + choices.below(std::uint32_t{3})) : base;
    // At least a cell a token.
    each.block_bytes = each.block_tokens * (1 + choices.below(std::uint64_t{5})) +
                       (choices.once_in(3) ? choices.below(std::uint64_t{7}) : 0);
    groups.push_back(each);
  }
  return groups;
}

/// What the allocator says is cached, by group; the world adds what the cells then held.
struct cached_group_contents {
  struct entry {
    std::size_t group = 0;
    llmmem::block_key key{};
    std::uint64_t stamp = 0;
    std::vector<std::uint64_t> cells{};
  };
  std::map<llmmem::block_id, entry> blocks;
  std::uint64_t stamps = 0;
  std::uint64_t shared = 0;
};

struct group_recorder {
  cached_group_contents* contents;
  void on_cached(const llmmem::stored_block& stored, std::size_t group) noexcept {
    must(stored.tokens == stored.token_ids.size());
    must(contents->blocks
             .emplace(stored.block, cached_group_contents::entry{group, stored.key, ++contents->stamps})
             .second);
  }
  void on_dropped(llmmem::block_id block, const llmmem::block_key& key, std::size_t group) noexcept {
    const auto at = contents->blocks.find(block);
    must(at != contents->blocks.end() && at->second.key == key && at->second.group == group);
    contents->blocks.erase(at);
  }
  void on_cleared(std::uint64_t) noexcept { contents->blocks.clear(); }
  void on_shared(llmmem::block_id block, const llmmem::block_key& key, std::size_t group) noexcept {
    const auto at = contents->blocks.find(block);
    must(at != contents->blocks.end() && at->second.key == key && at->second.group == group);
    ++contents->shared;
  }
};

struct hybrid_world_traits : llmmem::hybrid_traits {
  using eviction = llmmem::any_eviction;
  using observer = group_recorder;
};
struct weak_hybrid_world_traits : hybrid_world_traits {
  using hash = weak_hash;
};
struct trusting_hybrid_world_traits : hybrid_world_traits {
  using verification = llmmem::trust_hash;
};

/// Every byte of the budget is a cell. Each token leaves in each attention group the one value that its KV
/// could have, a function of the context and all tokens so far; each state is the value of its last token.
/// Whatever the allocator does, every living sequence must read what its next token looks at, hold no block
/// that it does not, and find by `match` exactly what a search over all lengths finds; what is cached must
/// stay as it was, and what a kernel reads until its fence has passed.
template <class Traits, class Choices>
class hybrid_world {
 public:
  using cache_type = llmmem::hybrid_allocator<Traits>;

  explicit hybrid_world(Choices choices)
      : choices_(choices),
        groups_(choose_groups(choices_)),
        options_(choose_options()),
        policy_(llmmem::eviction_names[choices_.below(std::uint64_t{llmmem::eviction_names.size()})]),
        cache_(
            options_,
            [this](llmmem::slot_count slots, const llmmem::metadata_source& source) {
              return llmmem::make_eviction(policy_, slots, source);
            },
            group_recorder{&contents_}),
        memory_(cache_.pool().max_physical_bytes()) {}
  hybrid_world(const hybrid_world&) = delete;
  hybrid_world& operator=(const hybrid_world&) = delete;

  void step() {
    act();
    if (const auto found = cache_.audit(); !found.empty()) throw broken_promise(found.front());
    std::set<llmmem::block_id> held;
    std::uint64_t bytes = 0;
    for (const held_sequence& each : living_) {
      check_contents(each, each.expected.size());
      for (std::size_t g = 0; g < groups_.size(); ++g) {
        for (const llmmem::block_id block : cache_.table(each.id, g)) {
          if (block != llmmem::null_block && held.insert(block).second) bytes += groups_[g].block_bytes;
        }
      }
    }
    const std::uint64_t active = cache_.stats().pages.active_bytes;
    must(cache_.stats().deferred == 0 ? active == bytes : active >= bytes);
    check_cached();
    check_readers();
  }

  void end() {
    must(stream_.pass(stream_.issue()).has_value());
    for (; !living_.empty(); living_.pop_back())
      must(cache_.release(living_.back().id).has_value());
    must(stream_.pass(stream_.issue()).has_value());
    cache_.collect();
    must(cache_.stats().deferred == 0 && cache_.stats().pages.active_bytes == 0 &&
         cache_.stats().tokens == 0);
    must(cache_.stats().pages.retiring_pages == 0);
    cache_.drop_idle();
    must(cache_.stats().pages.free_pages == cache_.stats().pages.pages && cache_.stats().chunks == 0);
    must(cache_.audit().empty() && contents_.blocks.empty());
  }

  [[nodiscard]] Choices& choices() { return choices_; }
  [[nodiscard]] llmmem::hybrid_stats stats() const { return cache_.stats(); }
  /// Appends that were refused, and hits shorter than the longest prefix that any one group could have
  /// served.
  [[nodiscard]] std::uint64_t refused() const { return refused_; }
  /// Pages that retired while sequences held blocks in them.
  [[nodiscard]] std::uint64_t retired() const { return retired_; }
  [[nodiscard]] std::uint64_t evacuated() const { return evacuated_; }
  /// Sequences cut shorter, cuts that were refused, batches that grew, and reads that were still under way
  /// when what they read was given back.
  [[nodiscard]] std::uint64_t cuts() const { return cuts_; }
  [[nodiscard]] std::uint64_t refused_cuts() const { return refused_cuts_; }
  [[nodiscard]] std::uint64_t batches() const { return batches_; }
  [[nodiscard]] std::uint64_t waited() const { return waited_; }
  /// Blocks that invalidations took out of the cache, and ranges that left the middle of sequences.
  [[nodiscard]] std::uint64_t invalidated() const { return invalidated_; }
  [[nodiscard]] std::uint64_t removals() const { return removals_; }
  /// Tokens whose values came later, and blocks given up for equal ones.
  [[nodiscard]] std::uint64_t named() const { return named_; }
  [[nodiscard]] std::uint64_t deduplicated() const { return deduplicated_; }

 private:
  static constexpr std::uint32_t most_sequences = 5;

  struct held_sequence {
    llmmem::sequence_id id;
    llmmem::prefix_context context;
    std::vector<llmmem::token_id> tokens;
    std::vector<std::uint64_t> expected;      // value of each token
    std::set<std::uint64_t> steps{};          // lengths at which one ended
    std::uint64_t weights = 0;                // that they were computed with
    std::uint64_t sound = ~std::uint64_t{0};  // what is behind was computed from wrong contents
    std::uint64_t named = ~std::uint64_t{0};  // tokens from here on got no values yet
    std::uint64_t hold = ~std::uint64_t{0};   // what tokens from here on read is kept
    bool was_limited = false;                 // releases were, once
    llmmem::host_fence until{};  // of the last kernel that reads it, or read what it was forked from
  };
  struct cached_block {
    llmmem::block_id block;
    std::uint64_t stamp;
  };
  /// A kernel that reads cells until its fence has passed.
  struct reader {
    llmmem::host_fence until;
    llmmem::sequence_id sequence;
    struct read {
      std::uint64_t cell;
      std::uint64_t position;
      std::uint64_t value;
    };
    std::vector<read> reads;
  };

  [[nodiscard]] llmmem::hybrid_options choose_options() {
    std::uint64_t largest = 0;
    for (const llmmem::layer_group& each : groups_)
      largest = std::max(largest, each.block_bytes);
    const std::uint64_t page = largest + choices_.below(3 * largest);
    const std::uint64_t longest = choices_.once_in(4) ? 9 : 50;
    const std::uint64_t budget = page * (2 + choices_.below(std::uint64_t{30}));
    return {.groups = groups_,
            .budget_bytes = budget,
            .budget_capacity_bytes = budget + page * choices_.below(std::uint64_t{5}),
            .page_bytes = page,
            .max_sequences = most_sequences,
            .max_sequence_tokens = longest,
            .max_chunks = choices_.once_in(4) ? 1 + choices_.below(std::uint64_t{12}) : 0,
            .max_deferred = choices_.once_in(3) ? choices_.below(std::uint64_t{12}) : llmmem::unlimited,
            .name = "kv"};
  }

  static std::uint64_t last_value(const held_sequence& sequence) {
    return sequence.expected.empty()
               ? random_numbers(sequence.context.salt[0] + 1000 * sequence.weights).next()
               : sequence.expected.back();
  }

  std::vector<llmmem::token_id> prompt() { return choose_prompt(choices_, 24); }

  /// The cell of `position` in a group's block; states have one.
  std::uint64_t& cell(std::size_t g, llmmem::block_id block, std::uint64_t position) {
    const llmmem::layer_group& group = groups_[g];
    must(block != llmmem::null_block);
    std::uint64_t at = cache_.layout().offset(block, group.block_bytes);
    must(at + group.block_bytes <= memory_.size());
    if (group.kind != llmmem::layer_kind::state_snapshots)
      at += position % group.block_tokens * (group.block_bytes / group.block_tokens);
    return memory_[at];
  }
  std::uint64_t& cell_of(const held_sequence& sequence, std::size_t g, std::uint64_t position) {
    return cell(g, cache_.table(sequence.id, g)[position / groups_[g].block_tokens], position);
  }

  /// What the token at `position` looks at is there, before itself.
  void check_contents(const held_sequence& sequence, std::uint64_t position) {
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      for (std::uint64_t other = 0; other < position; ++other) {
        if (!looks_at(groups_[g], position, other) || other >= sequence.sound) continue;
        must(cell_of(sequence, g, other) == sequence.expected[other] + g);
      }
    }
  }

  /// No block is held that no token from `position` on looks at.
  void check_dead(const held_sequence& sequence, std::uint64_t position) {
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      const auto table = cache_.table(sequence.id, g);
      for (std::uint64_t i = 0; i < table.size(); ++i) {
        bool seen = false;
        for (std::uint64_t k = 0; k < groups_[g].block_tokens; ++k)
          seen = seen || looks_at(groups_[g], position, i * groups_[g].block_tokens + k);
        if (table[i] == llmmem::null_block) {
          must(!seen);
        } else {
          // Kept too long only where the queue had no room for it.
          must(seen || i * groups_[g].block_tokens > position || cache_.stats().deferred != 0 ||
               waits(sequence) || sequence.hold < position);
        }
      }
    }
  }

  /// Whether a kernel still reads what the sequence holds or held.
  [[nodiscard]] static bool waits(const held_sequence& sequence) { return !sequence.until.ready(); }

  /// What is cached is what was written when it became so.
  void check_cached() {
    std::uint64_t visited = 0;
    cache_.for_each_cached([&](const llmmem::stored_key& stored, std::size_t g) {
      ++visited;
      const auto at = contents_.blocks.find(stored.block);
      must(at != contents_.blocks.end() && at->second.key == stored.key && at->second.group == g);
      const bool is_state = groups_[g].kind == llmmem::layer_kind::state_snapshots;
      std::vector<std::uint64_t> cells;
      for (std::uint64_t i = 0; i < (is_state ? 1 : groups_[g].block_tokens); ++i)
        cells.push_back(cell(g, stored.block, i));
      if (at->second.cells.empty()) at->second.cells = cells;
      must(at->second.cells == cells);
    });
    must(visited == contents_.blocks.size());
  }

  /// Begins a kernel that reads what the sequence's next token looks at. States only when it is the last: the
  /// next step writes them in place.
  void read(held_sequence& sequence, bool last = false) {
    reader fresh{.until = stream_.issue(), .sequence = sequence.id, .reads = {}};
    const std::uint64_t length = sequence.expected.size();
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      if (groups_[g].kind == llmmem::layer_kind::state_snapshots && !last) continue;
      for (std::uint64_t other = 0; other < length; ++other) {
        if (!looks_at(groups_[g], length, other)) continue;
        const std::uint64_t& at = cell_of(sequence, g, other);
        fresh.reads.push_back({static_cast<std::uint64_t>(&at - memory_.data()), other, at});
      }
    }
    must(cache_.read_until(sequence.id, fresh.until).has_value());
    sequence.until = fresh.until;
    readers_.push_back(std::move(fresh));
  }

  void check_readers() {
    std::erase_if(readers_, [](const reader& each) { return each.until.ready(); });
    for (const reader& each : readers_) {
      for (const auto& read : each.reads)
        must(memory_[read.cell] == read.value);
      waited_ += cache_.check(each.sequence) ? 0U : 1U;
    }
  }

  /// The longest length at which every group has what the next token looks at, tried one by one.
  [[nodiscard]] std::uint64_t longest_hit(std::span<const llmmem::token_id> tokens,
                                          const llmmem::prefix_context& context) {
    for (std::uint64_t length = std::min<std::uint64_t>(tokens.size(), options_.max_sequence_tokens);
         length > 0; --length) {
      bool hit = true;
      bool needs_any = false;
      for (std::size_t g = 0; g < groups_.size() && hit; ++g) {
        const std::uint32_t block_tokens = groups_[g].block_tokens;
        hit = length % block_tokens == 0;
        for (std::uint64_t other = 0; other < length && hit; ++other) {
          if (!looks_at(groups_[g], length, other)) continue;
          needs_any = true;
          hit = is_cached(g, tokens.first((other / block_tokens + 1) * block_tokens), context);
        }
      }
      if (hit && needs_any) return length;
    }
    return 0;
  }

  using cache_key = std::tuple<std::size_t, std::uint64_t, std::vector<llmmem::token_id>>;

  [[nodiscard]] bool is_cached(std::size_t g, std::span<const llmmem::token_id> tokens,
                               const llmmem::prefix_context& context) {
    const auto at = cached_.find(cache_key{g, context.salt[0], {tokens.begin(), tokens.end()}});
    if (at == cached_.end()) return false;
    const auto now = contents_.blocks.find(at->second.block);
    if (now != contents_.blocks.end() && now->second.stamp == at->second.stamp) return true;
    cached_.erase(at);
    return false;
  }

  void begin() {
    held_sequence fresh;
    fresh.weights = cache_.epoch();
    if (choices_.once_in(3)) fresh.context.salt[0] = 1;
    must(cache_.create({}, {.keep = {.priority = 101}}).code() == llmmem::errc::bad_priority);
    const auto id = cache_.create(
        fresh.context, {.session = 1 + choices_.below(std::uint64_t{3}),
                        .keep = {.priority = choices_.once_in(2) ? std::uint8_t{35} : std::uint8_t{90}}});
    must(id.has_value() == (living_.size() < most_sequences));
    if (!id) return must(id.code() == llmmem::errc::out_of_sequences);
    fresh.id = *id;
    living_.push_back(fresh);
    held_sequence& sequence = living_.back();
    const std::vector<llmmem::token_id> tokens = prompt();
    const std::uint64_t longest = longest_hit(tokens, fresh.context);
    must(cache_.cached_tokens(tokens, fresh.context) == longest);
    const llmmem::hybrid_cost cost = cache_.cost(tokens, fresh.context);
    must(cost.cached_tokens == longest);
    std::vector<std::uint64_t> idle;
    for (std::size_t g = 0; g < groups_.size(); ++g)
      idle.push_back(cache_.pool().stats(g).idle_blocks);
    const std::uint64_t told = contents_.shared;
    const auto hit = cache_.match(sequence.id, tokens).value();
    must(hit.tokens == longest && contents_.shared - told == hit.blocks);
    std::uint64_t shared = 0;
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      shared += cost.groups[g].cached_blocks;
      must(idle[g] - cache_.pool().stats(g).idle_blocks == cost.groups[g].revived_blocks);
    }
    must(shared == hit.blocks);
    for (std::uint64_t i = 0; i < hit.tokens; ++i) {
      sequence.tokens.push_back(tokens[i]);
      sequence.expected.push_back(next_value(last_value(sequence), tokens[i]));
    }
    sequence.steps.insert(hit.tokens);
    check_contents(sequence, hit.tokens);
    check_dead(sequence, hit.tokens);
    std::vector<llmmem::group_shortage> lacks(groups_.size());
    if (cache_.shortage(sequence.id,
                        std::min<std::uint64_t>(tokens.size(), options_.max_sequence_tokens) - hit.tokens,
                        lacks)
                .value() == false &&
        tokens.size() <= options_.max_sequence_tokens) {
      for (std::size_t g = 0; g < groups_.size(); ++g)
        must(lacks[g].wanted == cost.groups[g].new_blocks);
    }
    append(sequence, std::span(tokens).subspan(hit.tokens));
  }

  void append(held_sequence& sequence, std::span<const llmmem::token_id> tokens) {
    const llmmem::hybrid_stats before = cache_.stats();
    const std::uint64_t first = sequence.expected.size();
    std::vector<llmmem::group_shortage> lacks(groups_.size());
    const auto lacking = cache_.shortage(sequence.id, tokens.size(), lacks);
    const std::uint64_t deferred = cache_.stats().deferred;
    const auto blocks = cache_.blocks_to_append(sequence.id, tokens.size());
    // Values that come later do not change what a step takes.
    const bool extends = choices_.once_in(4);
    const auto done =
        extends ? cache_.extend(sequence.id, tokens.size()) : cache_.append(sequence.id, tokens);
    if (!done) {
      ++refused_;
      must(cache_.stats().tokens == before.tokens && cache_.tokens(sequence.id) == first);
      must(cache_.stats().pages.evictions == before.pages.evictions);
      if (done.code() == llmmem::errc::deferred_full) return must(waits(sequence));
      if (done.code() == llmmem::errc::sequence_full) {
        return must(!lacking.has_value() && first + tokens.size() > options_.max_sequence_tokens);
      }
      must(done.code() == llmmem::errc::out_of_group_blocks && *lacking);
      return must(lacks[done.error().index].missing() == done.error().wanted - done.error().found);
    }
    must(!*lacking && done->first == first);
    for (std::size_t g = 0; g < groups_.size(); ++g)
      must(blocks[g] == lacks[g].wanted || cache_.stats().deferred < deferred);
    if (extends && !tokens.empty()) sequence.named = std::min(sequence.named, first);
    std::uint64_t wanted = 0;
    for (const llmmem::group_shortage& each : lacks)
      wanted += each.wanted;
    // Fewer where collecting, for a copy's source to be queued, took the reason to copy.
    must(wanted == done->new_blocks || (wanted > done->new_blocks && cache_.stats().deferred < deferred));
    for (const llmmem::group_copy& each : done->copies)
      carry_out(each);
    write(sequence, tokens);
    // All that was appended can be taken back token by token, but for states.
    if (std::any_of(groups_.begin(), groups_.end(), [](const llmmem::layer_group& each) {
          return each.kind == llmmem::layer_kind::state_snapshots;
        })) {
      return;
    }
    for (std::uint64_t n = first; n <= sequence.expected.size(); ++n)
      must(cache_.nearest_cuts(sequence.id, n).value() == llmmem::paging::cut_points{.below = n, .above = n});
  }

  void write(held_sequence& sequence, std::span<const llmmem::token_id> tokens) {
    const std::uint64_t first = sequence.expected.size();
    for (const llmmem::token_id token : tokens) {
      const std::uint64_t position = sequence.expected.size();
      sequence.tokens.push_back(token);
      sequence.expected.push_back(next_value(last_value(sequence), token));
      for (std::size_t g = 0; g < groups_.size(); ++g) {
        if (groups_[g].skips_blocks()) continue;
        std::uint64_t& at = cell_of(sequence, g, position);
        // The state goes on in the block it is written to.
        if (groups_[g].kind == llmmem::layer_kind::state_snapshots && position == first && first != 0 &&
            position <= sequence.sound) {
          must(at == sequence.expected[position - 1] + g);
        }
        at = sequence.expected[position] + g;
      }
    }
    for (std::size_t g = 0; g < groups_.size() && !tokens.empty(); ++g) {
      if (!groups_[g].skips_blocks()) continue;
      // Only the last state of the step is written, where the one before the step was brought to.
      std::uint64_t& at = cell_of(sequence, g, sequence.expected.size() - 1);
      if (first != 0 && first <= sequence.sound) must(at == sequence.expected[first - 1] + g);
      at = sequence.expected.back() + g;
      const auto table = cache_.table(sequence.id, g);
      for (std::uint64_t i = groups_[g].blocks_for(first); i + 1 < table.size(); ++i)
        must(table[i] == llmmem::null_block);
    }
    sequence.steps.insert(sequence.expected.size());
    // All positions of the step can look at what they need, not only the last one's successor.
    for (std::uint64_t position = first; position < sequence.expected.size(); ++position) {
      for (std::size_t g = 0; g < groups_.size(); ++g) {
        if (groups_[g].kind == llmmem::layer_kind::state_snapshots) continue;
        for (std::uint64_t other = 0; other <= position; ++other) {
          if (looks_at(groups_[g], position, other) && other < sequence.sound)
            must(cell_of(sequence, g, other) == sequence.expected[other] + g);
        }
      }
    }
  }

  /// What is above the new budget is no longer cached; what sequences hold stays.
  void resize() {
    const std::uint64_t most = cache_.pool().max_physical_bytes() / options_.page_bytes;
    const std::uint64_t pages = choices_.once_in(3) ? most : 2 + choices_.below(most - 1);
    const auto retiring = cache_.resize(pages * options_.page_bytes);
    must(retiring && *retiring == cache_.stats().pages.retiring_pages);
    for (const auto& [block, entry] : contents_.blocks)
      must(!cache_.pool().is_retiring(block));
    retired_ += *retiring;
    if (choices_.once_in(2)) evacuate();
  }
  /// Nothing reads while blocks move, and only blocks in retiring pages do.
  void evacuate() {
    must(stream_.pass(stream_.issue()).has_value());
    llmmem::block_id pinned = llmmem::null_block;
    for (const held_sequence& each : living_)
      for (std::size_t g = 0; g < groups_.size(); ++g)
        for (const llmmem::block_id block : cache_.table(each.id, g))
          if (cache_.pool().is_retiring(block) && choices_.once_in(4)) pinned = block;
    if (pinned != llmmem::null_block) must(cache_.pin(pinned).has_value());
    std::vector<llmmem::group_copy> moves(1 + choices_.below(std::uint64_t{12}));
    const std::uint64_t moved = cache_.evacuate(moves);
    for (const llmmem::group_copy& each : std::span(moves).first(moved)) {
      must(each.copy.source != pinned);
      must(cache_.pool().is_retiring(each.copy.source) && !cache_.pool().is_retiring(each.copy.destination));
      carry_out(each);
    }
    evacuated_ += moved;
    if (pinned != llmmem::null_block) must(cache_.unpin(pinned).has_value());
    if (moved == moves.size() || pinned != llmmem::null_block) return;
    // For what is left there is no place.
    std::vector<llmmem::group_shortage> lacks(groups_.size());
    for (const held_sequence& each : living_) {
      for (std::size_t g = 0; g < groups_.size(); ++g) {
        std::vector<std::uint64_t> one(groups_.size());
        one[g] = 1;
        for (const llmmem::block_id block : cache_.table(each.id, g))
          must(!cache_.pool().is_retiring(block) || !cache_.pool().shortage(one, lacks));
      }
    }
  }

  /// All of them or none: a refusal has changed no sequence and evicted nothing.
  void append_batch() {
    std::vector<std::size_t> who;
    std::vector<std::vector<llmmem::token_id>> tokens;
    for (std::size_t i = 0; i < living_.size(); ++i) {
      if (choices_.once_in(3)) continue;
      who.push_back(i);
      tokens.push_back(choices_.once_in(2) ? prompt() : std::vector<llmmem::token_id>{1});
    }
    std::vector<llmmem::hybrid_growth> batch;
    std::uint64_t longest = 0;
    for (std::size_t k = 0; k < who.size(); ++k) {
      const std::size_t known =
          choices_.once_in(4) ? choices_.below(std::uint64_t{tokens[k].size() + 1}) : tokens[k].size();
      batch.push_back({.sequence = living_[who[k]].id,
                       .tokens = std::span(tokens[k]).first(known),
                       .unknown_tokens = tokens[k].size() - known});
      longest = std::max<std::uint64_t>(longest, living_[who[k]].expected.size() + tokens[k].size());
    }
    const bool twice = batch.size() > 1 && choices_.once_in(10);
    if (twice) batch.back().sequence = batch.front().sequence;
    std::vector<std::uint64_t> leave;
    for (std::size_t g = 0; g < groups_.size() && choices_.below(std::uint32_t{3}) != 0; ++g)
      leave.push_back(choices_.below(std::uint64_t{4}));
    leave.resize(leave.empty() ? 0 : groups_.size());
    std::vector<llmmem::hybrid_append> out(batch.size());
    std::vector<llmmem::group_shortage> asked(groups_.size());
    const auto is_short = cache_.shortage(batch, asked);
    const llmmem::hybrid_stats before = cache_.stats();
    const auto done = cache_.append_batch(batch, out, leave);
    if (!is_short.has_value()) must(done.code() == is_short.code());
    if (done || (leave.empty() && done.code() == llmmem::errc::out_of_group_blocks))
      must(*is_short != done.has_value());
    const llmmem::hybrid_stats after = cache_.stats();
    std::vector<llmmem::group_shortage> lacks(groups_.size());
    if (!done) {
      must(after.tokens == before.tokens && after.pages.evictions == before.pages.evictions &&
           after.pages.allocations == before.pages.allocations && after.copies == before.copies);
      if (done.code() == llmmem::errc::listed_twice) return must(twice);
      if (done.code() == llmmem::errc::sequence_full)
        return must(longest > options_.max_sequence_tokens || twice);
      if (done.code() == llmmem::errc::deferred_full) return must(options_.max_deferred != llmmem::unlimited);
      must(done.code() == llmmem::errc::out_of_group_blocks && done.error().wanted > done.error().found);
      // One by one they do not all fit either, or leave too little.
      return check_too_much(who, tokens, leave);
    }
    must(!twice);
    must(leave.empty() || cache_.pool().shortage(leave, lacks));
    std::uint64_t taken = 0;
    for (const llmmem::hybrid_append& each : out)
      taken += each.new_blocks;
    must(after.pages.allocations - before.pages.allocations == taken);
    for (const llmmem::hybrid_append& each : out) {
      for (const llmmem::group_copy& copy : each.copies)
        carry_out(copy);  // all before any write
    }
    for (std::size_t k = 0; k < who.size(); ++k) {
      must(out[k].first == living_[who[k]].expected.size());
      held_sequence& grown = living_[who[k]];
      if (batch[k].unknown_tokens != 0)
        grown.named = std::min(grown.named, out[k].first + batch[k].tokens.size());
      write(living_[who[k]], tokens[k]);
    }
    ++batches_;
  }

  /// Grows one by one what a batch could not: somebody is refused, or less is left than asked for.
  void check_too_much(const std::vector<std::size_t>& who,
                      const std::vector<std::vector<llmmem::token_id>>& tokens,
                      std::span<const std::uint64_t> leave) {
    const std::uint64_t refused = refused_;
    for (std::size_t k = 0; k < who.size(); ++k)
      append(living_[who[k]], tokens[k]);
    std::vector<llmmem::group_shortage> lacks(groups_.size());
    must(refused_ != refused || !cache_.pool().shortage(leave, lacks));
  }

  /// Whether every group has, and can write behind, what a token after the first `n` looks at.
  [[nodiscard]] bool can_cut(const held_sequence& sequence, std::uint64_t n) {
    const std::uint64_t length = sequence.expected.size();
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      const llmmem::layer_group& group = groups_[g];
      const auto table = cache_.table(sequence.id, g);
      if (group.kind == llmmem::layer_kind::state_snapshots && n != length && n != 0) {
        if (group.skips_blocks() && !sequence.steps.contains(n)) return false;
        // The state is there where a block ended, if it was kept.
        if (n % group.block_tokens != 0 || table[n / group.block_tokens - 1] == llmmem::null_block)
          return false;
        continue;
      }
      for (std::uint64_t other = 0; other < n; ++other) {
        const bool goes_on =
            n % group.block_tokens != 0 && other / group.block_tokens == n / group.block_tokens;
        if ((looks_at(group, n, other) || goes_on) && table[other / group.block_tokens] == llmmem::null_block)
          return false;
      }
    }
    return true;
  }

  void truncate(held_sequence& sequence) {
    const std::uint64_t length = sequence.expected.size();
    const std::uint64_t keep = choices_.once_in(2)
                                   ? choices_.below(length + 1)
                                   : length - std::min(length, choices_.below(std::uint64_t{4}));
    must(cache_.nearest_cuts(sequence.id, length + 1).code() == llmmem::errc::past_the_end);
    const llmmem::paging::cut_points nearest = cache_.nearest_cuts(sequence.id, keep).value();
    std::uint64_t below = keep;
    std::uint64_t above = keep;
    while (!can_cut(sequence, below))
      --below;
    while (!can_cut(sequence, above))
      ++above;
    if (options_.max_deferred == llmmem::unlimited && !sequence.was_limited) {
      must(nearest == llmmem::paging::cut_points{.below = below, .above = above});
    } else {
      // States that could not be given back in time, or were to be kept, are not all cut to.
      must(nearest.below <= below && nearest.above >= above);
      below = nearest.below;
      above = nearest.above;
    }

    const llmmem::hybrid_stats before = cache_.stats();
    const bool behind = choices_.once_in(3);
    if (behind) read(sequence);
    const auto cut = behind ? cache_.truncate_after(sequence.id, keep, readers_.back().until)
                            : cache_.truncate(sequence.id, keep);
    if (!cut) {
      must(cache_.tokens(sequence.id) == length && cache_.stats().tokens == before.tokens);
      must(cache_.stats().pages.evictions == before.pages.evictions);
      if (cut.code() == llmmem::errc::deferred_full) return must(waits(sequence));
      ++refused_cuts_;
      return must(cut.code() == llmmem::errc::not_kept && below != keep && cut.error().found == above);
    }
    must(below == keep);
    sequence.expected.resize(keep);
    sequence.tokens.resize(keep);
    sequence.steps.erase(sequence.steps.upper_bound(keep), sequence.steps.end());
    if (keep <= sequence.named) sequence.named = ~std::uint64_t{0};
    if (keep == 0) sequence.weights = cache_.epoch();
    if (keep <= sequence.sound) sequence.sound = ~std::uint64_t{0};
    cuts_ += keep != length ? 1 : 0;
    // What the sequence writes behind the cut is its own to order.
    for (reader& each : readers_) {
      if (each.sequence == sequence.id)
        std::erase_if(each.reads, [&](const auto& read) { return read.position >= keep; });
    }
  }

  void carry_out(const llmmem::group_copy& each) {
    const bool whole = groups_[each.group].kind == llmmem::layer_kind::state_snapshots;
    for (std::uint64_t i = 0; i < (whole ? 1 : each.copy.tokens); ++i)
      cell(each.group, each.copy.destination, i) = cell(each.group, each.copy.source, i);
  }

  void commit(held_sequence& sequence) {
    const std::uint64_t written =
        choices_.once_in(4) ? choices_.below(sequence.tokens.size() + 1) : sequence.tokens.size();
    std::vector<std::vector<llmmem::block_id>> before;
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      const auto table = cache_.table(sequence.id, g);
      before.emplace_back(table.begin(), table.end());
    }
    must(cache_.commit(sequence.id, written).has_value());
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      // More than was written now: what equal blocks stood for may be cached again.
      const std::uint64_t known = std::min(cache_.prefix_tokens(sequence.id), sequence.named);
      for (std::uint64_t i = 0; (i + 1) * groups_[g].block_tokens <= known; ++i) {
        const std::span tokens = std::span(sequence.tokens).first((i + 1) * groups_[g].block_tokens);
        const llmmem::block_id block = before[g][i];
        if (block == llmmem::null_block || !cache_.pool().record(block).is_cached()) continue;
        if (is_cached(g, tokens, sequence.context)) continue;
        cached_[cache_key{g, sequence.context.salt[0], {tokens.begin(), tokens.end()}}] = {
            block, contents_.blocks.at(block).stamp};
      }
    }
    if (written == sequence.tokens.size()) check_dead(sequence, written);
  }

  /// Other weights: what was computed with those before is found no more, now or later.
  void reset() {
    const std::uint64_t cached = contents_.blocks.size();
    must(cache_.reset(cache_.epoch()).code() == llmmem::errc::old_epoch);
    must(cache_.reset() == cached && contents_.blocks.empty());
    for (held_sequence& each : living_) {
      if (each.tokens.empty()) each.weights = cache_.epoch();
      must(cache_.epoch(each.id) == each.weights);
    }
  }

  /// A block's contents turn out to be wrong, or a sequence's from a token on, and what was computed from
  /// them.
  void invalidate(const held_sequence& sequence) {
    const std::size_t cached = contents_.blocks.size();
    const std::size_t g = choices_.below(std::uint64_t{groups_.size()});
    const auto table = cache_.table(sequence.id, g);
    const llmmem::block_id block = choices_.once_in(2) && !table.empty()
                                       ? table[choices_.below(std::uint64_t{table.size()})]
                                       : llmmem::null_block;
    const std::uint64_t from = choices_.below(sequence.tokens.size() + 1);
    const std::uint64_t gone = block != llmmem::null_block ? cache_.invalidate(block).value()
                                                           : cache_.invalidate(sequence.id, from).value();
    must(cached - contents_.blocks.size() == gone);
    must(block != llmmem::null_block || cache_.prefix_tokens(sequence.id) <= from);
    invalidated_ += gone;
    for (held_sequence& each : living_) {
      const std::uint64_t sound = cache_.prefix_tokens(each.id);
      if (sound < each.tokens.size()) each.sound = std::min(each.sound, sound);
      for (std::uint64_t i = sound; i < each.expected.size(); ++i)
        each.expected[i] = choices_.below(~std::uint64_t{0});
      for (std::size_t group = 0; group < groups_.size(); ++group) {
        for (const llmmem::block_id held : cache_.table(each.id, group)) {
          if (held == llmmem::null_block || !cache_.pool().record(held).is_invalid()) continue;
          for (std::uint64_t i = 0; i < groups_[group].block_bytes; ++i)
            memory_[cache_.pool().offset(held) + i] = choices_.below(~std::uint64_t{0});
        }
      }
      // Their kernels may read anything now.
      if (each.sound != ~std::uint64_t{0}) {
        for (reader& kernel : readers_) {
          if (kernel.sequence == each.id) kernel.reads.clear();
        }
      }
    }
    std::erase_if(readers_, [&](const reader& each) { return !cache_.check(each.sequence); });
  }

  /// Whole blocks go from the middle; what lies behind keeps its values.
  void remove(held_sequence& sequence) {
    std::uint64_t common = 1;
    for (const llmmem::layer_group& each : groups_)
      common = std::lcm(common, each.block_tokens);
    const std::uint64_t held = sequence.tokens.size();
    const std::uint64_t first = choices_.below(held / common + 1) * common;
    const std::uint64_t end = first + (1 + choices_.below(std::uint64_t{3})) * common;
    const llmmem::hybrid_stats before = cache_.stats();
    const auto done = cache_.remove(sequence.id, {first, end});
    if (!done) {
      must(cache_.tokens(sequence.id) == held && cache_.stats().tokens == before.tokens);
      if (done.code() == llmmem::errc::deferred_full) return must(waits(sequence));
      return must(done.code() == llmmem::errc::cannot_remove || done.code() == llmmem::errc::not_kept);
    }
    const std::uint64_t to = std::min(end, held);
    sequence.tokens.erase(sequence.tokens.begin() + static_cast<std::ptrdiff_t>(first),
                          sequence.tokens.begin() + static_cast<std::ptrdiff_t>(to));
    sequence.expected.erase(sequence.expected.begin() + static_cast<std::ptrdiff_t>(first),
                            sequence.expected.begin() + static_cast<std::ptrdiff_t>(to));
    if (to == held) {
      if (first <= sequence.named) sequence.named = ~std::uint64_t{0};
    } else if (sequence.named > first && sequence.named != ~std::uint64_t{0}) {
      sequence.named = sequence.named < to ? first : sequence.named - (to - first);
    }
    if (to < held) {
      must(cache_.prefix_tokens(sequence.id) <= first);
      ++removals_;
    } else if (first <= sequence.sound) {
      sequence.sound = ~std::uint64_t{0};
    }
    if (sequence.sound != ~std::uint64_t{0} && sequence.sound > first) sequence.sound = first;
    if (sequence.tokens.empty()) sequence.weights = cache_.epoch();
    for (reader& each : readers_) {
      if (each.sequence != sequence.id) continue;
      if (to == held) std::erase_if(each.reads, [&](const auto& read) { return read.position >= first; });
      for (auto& read : each.reads)
        read.position -= read.position >= to ? to - first : 0;
    }
  }

  /// Gives values to the tokens that lack them, or to the first of these.
  void name(held_sequence& sequence) {
    const std::uint64_t held = sequence.tokens.size();
    const std::uint64_t first = std::min(sequence.named, held);
    const std::vector<llmmem::token_id> many(held - first + 1, 1);
    must(cache_.name_tokens(sequence.id, many).code() == llmmem::errc::past_the_end);
    const std::uint64_t count = choices_.once_in(3) ? choices_.below(held - first + 1) : held - first;
    must(cache_.name_tokens(sequence.id, std::span(sequence.tokens).subspan(first, count)).has_value());
    if (first + count == held) sequence.named = ~std::uint64_t{0};
    if (sequence.named != ~std::uint64_t{0}) sequence.named = first + count;
    named_ += count;
  }

  /// Equal contents are read through other blocks; nothing that is read changes.
  void deduplicate(held_sequence& sequence) {
    const llmmem::hybrid_stats before = cache_.stats();
    const auto done = cache_.deduplicate(sequence.id);
    if (!done) return must(done.code() == llmmem::errc::deferred_full && waits(sequence));
    must(cache_.stats().deduplicated - before.deduplicated == *done);
    must(*done == 0 || cache_.stats().pages.active_bytes < before.pages.active_bytes || waits(sequence) ||
         cache_.stats().pages.idle_bytes <= before.pages.idle_bytes);
    must(cache_.deduplicate(sequence.id).value() == 0);
    deduplicated_ += *done;
  }

  /// Hints change nothing but what is evicted.
  void hint(held_sequence& sequence) {
    const std::uint64_t first = choices_.below(std::uint64_t{20});
    must(cache_.retain(sequence.id, {first, first}, {}).code() == llmmem::errc::empty_range);
    must(cache_.retain(sequence.id, {first, first + 9}, {.priority = 80, .until = now_ + 5}).has_value());
    cache_.advance(++now_);
    const std::vector<llmmem::token_id> tokens = prompt();
    must(cache_.expect(tokens, sequence.context, now_) == cache_.cached_tokens(tokens, sequence.context));
  }

  /// What tokens from some position on read is kept, until the limit is raised.
  void limit_releases(held_sequence& sequence) {
    const bool raises = choices_.once_in(2);
    sequence.hold = raises ? ~std::uint64_t{0} : choices_.below(sequence.tokens.size() + 1);
    must(cache_.limit_releases(sequence.id, sequence.hold).has_value());
    sequence.was_limited = true;
  }

  void fork(const held_sequence& sequence) {
    const auto twin = cache_.fork(sequence.id);
    must(twin.has_value() == (living_.size() < most_sequences));
    if (!twin) return;
    held_sequence copy = sequence;
    copy.id = *twin;
    copy.hold = ~std::uint64_t{0};
    living_.push_back(copy);
  }

  /// What a sequence held before it ended, and is cached only since then: equal blocks stood for it before.
  void note_late(const held_sequence& ended, const std::vector<std::vector<llmmem::block_id>>& held,
                 std::uint64_t stamps) {
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      const std::uint64_t known = std::min<std::uint64_t>({ended.tokens.size(), ended.sound, ended.named});
      for (std::uint64_t i = 0; (i + 1) * groups_[g].block_tokens <= known && i < held[g].size(); ++i) {
        const auto at = contents_.blocks.find(held[g][i]);
        if (at == contents_.blocks.end() || at->second.group != g || at->second.stamp <= stamps) continue;
        const std::span tokens = std::span(ended.tokens).first((i + 1) * groups_[g].block_tokens);
        cached_[cache_key{g, ended.context.salt[0], {tokens.begin(), tokens.end()}}] = {held[g][i],
                                                                                        at->second.stamp};
      }
    }
  }

  void release(std::size_t i) {
    const held_sequence ended = living_[i];
    const std::uint64_t stamps = contents_.stamps;
    std::vector<std::vector<llmmem::block_id>> held;
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      const auto table = cache_.table(ended.id, g);
      held.emplace_back(table.begin(), table.end());
    }
    end_one(i);
    note_late(ended, held, stamps);
  }

  void end_one(std::size_t i) {
    bool done = false;
    if (choices_.once_in(3)) {
      read(living_[i], true);
      const auto deferred = cache_.release_after(living_[i].id, readers_.back().until);
      done = deferred.has_value();
      if (!done) {
        must(deferred.code() == llmmem::errc::deferred_full);
        return readers_.pop_back();  // it lives on
      }
    }
    if (!done) {
      const auto released = cache_.release(living_[i].id);
      if (!released) return must(released.code() == llmmem::errc::deferred_full && waits(living_[i]));
    }
    must(cache_.release(living_[i].id).code() == llmmem::errc::stale_handle);
    living_.erase(living_.begin() + static_cast<std::ptrdiff_t>(i));
  }

  void act() {
    if (choices_.once_in(6)) must(stream_.pass(stream_.issue()).has_value());
    if (living_.size() == most_sequences && choices_.once_in(2))
      release(choices_.below(std::uint64_t{living_.size()}));
    if (living_.empty() || choices_.once_in(4)) return begin();
    const std::size_t i = choices_.below(std::uint64_t{living_.size()});
    held_sequence& sequence = living_[i];
    switch (choices_.below(std::uint32_t{20})) {
      case 16:
      case 17:
        return name(sequence);
      case 18:
        return deduplicate(sequence);
      case 19:
        if (choices_.once_in(2)) return hint(sequence);
        return limit_releases(sequence);
      case 0:
      case 1:
        return append(sequence, prompt());
      case 2: {
        const std::vector<llmmem::token_id> one{choices_.once_in(2) ? 1 : 2};
        return append(sequence, one);
      }
      case 3:
      case 4:
      case 5:
        return commit(sequence);
      case 6:
        return fork(sequence);
      case 7:
        if (choices_.once_in(8)) cache_.drop_idle();
        if (choices_.once_in(10)) resize();
        return;
      case 8:
      case 9:
        return truncate(sequence);
      case 10:
        return append_batch();
      case 11:
        return read(sequence);
      case 12:
        return static_cast<void>(cache_.collect());
      case 13:
        // Rare, since they leave little to find.
        if (choices_.once_in(2)) return remove(sequence);
        if (choices_.once_in(24)) return reset();
        if (choices_.once_in(6)) invalidate(sequence);
        return;
      default:
        return release(i);
    }
  }

  Choices choices_;
  std::vector<llmmem::layer_group> groups_;
  llmmem::hybrid_options options_;
  std::string_view policy_;
  cached_group_contents contents_;
  cache_type cache_;
  std::vector<std::uint64_t> memory_;
  std::vector<held_sequence> living_;
  std::map<cache_key, cached_block> cached_;
  llmmem::host_timeline stream_;
  std::vector<reader> readers_;
  std::uint64_t refused_ = 0;
  std::uint64_t retired_ = 0;
  std::uint64_t evacuated_ = 0;
  std::uint64_t cuts_ = 0;
  std::uint64_t refused_cuts_ = 0;
  std::uint64_t batches_ = 0;
  std::uint64_t waited_ = 0;
  std::uint64_t invalidated_ = 0;
  std::uint64_t removals_ = 0;
  std::uint64_t named_ = 0;
  std::uint64_t deduplicated_ = 0;
  std::uint64_t now_ = 0;
};

}  // namespace llmmem_tests
