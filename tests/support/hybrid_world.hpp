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
      return position - other < group.reach;
    case llmmem::layer_kind::chunked_local:
      return position / group.reach == other / group.reach;
    case llmmem::layer_kind::state_snapshots:
      return position - other <= 1;
    case llmmem::layer_kind::full_attention:
      break;
  }
  return true;
}

struct hybrid_world_traits : llmmem::hybrid_traits {
  using eviction = llmmem::any_eviction;
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
/// that it does not, and find by `match` exactly what a search over all lengths finds.
template <class Traits, class Choices>
class hybrid_world {
 public:
  using cache_type = llmmem::hybrid_allocator<Traits>;

  explicit hybrid_world(Choices choices)
      : choices_(choices),
        groups_(choose_groups(choices_)),
        options_(choose_options()),
        policy_(llmmem::eviction_names[choices_.below(std::uint64_t{llmmem::eviction_names.size()})]),
        cache_(options_,
               [this](llmmem::slot_count slots, const llmmem::metadata_source& source) {
                 return llmmem::make_eviction(policy_, slots, source);
               }),
        memory_(cache_.pool().physical_bytes()) {}
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
    must(cache_.stats().pages.active_bytes == bytes);
  }

  void end() {
    while (!living_.empty())
      release(living_.size() - 1);
    must(cache_.stats().pages.active_bytes == 0 && cache_.stats().tokens == 0);
    cache_.drop_idle();
    must(cache_.stats().pages.free_pages == cache_.stats().pages.pages && cache_.stats().chunks == 0);
    must(cache_.audit().empty());
  }

  [[nodiscard]] llmmem::hybrid_stats stats() const { return cache_.stats(); }
  /// Appends that were refused, and hits shorter than the longest prefix that any one group could have
  /// served.
  [[nodiscard]] std::uint64_t refused() const { return refused_; }

 private:
  static constexpr std::uint32_t most_sequences = 5;

  struct held_sequence {
    llmmem::sequence_id id;
    llmmem::prefix_context context;
    std::vector<llmmem::token_id> tokens;
    std::vector<std::uint64_t> expected;  // value of each token
  };
  struct cached_block {
    llmmem::block_id block;
    std::uint32_t generation;
  };

  static std::vector<llmmem::layer_group> choose_groups(Choices& choices) {
    std::vector<llmmem::layer_group> groups;
    const std::uint64_t count = 1 + choices.below(std::uint64_t{4});
    const std::uint32_t base = 1 + choices.below(std::uint32_t{4});
    for (std::uint64_t i = 0; i < count; ++i) {
      llmmem::layer_group each;
      each.kind = llmmem::layer_kind(choices.below(std::uint32_t{4}));
      each.reach = 1 + choices.below(std::uint64_t{12});
      each.block_tokens = choices.once_in(3) ? base * (1 + choices.below(std::uint32_t{3})) : base;
      // At least a cell a token.
      each.block_bytes = each.block_tokens * (1 + choices.below(std::uint64_t{5})) +
                         (choices.once_in(3) ? choices.below(std::uint64_t{7}) : 0);
      groups.push_back(each);
    }
    return groups;
  }

  [[nodiscard]] llmmem::hybrid_options choose_options() {
    std::uint64_t largest = 0;
    for (const llmmem::layer_group& each : groups_)
      largest = std::max(largest, each.block_bytes);
    const std::uint64_t page = largest + choices_.below(3 * largest);
    return {.groups = groups_,
            .budget_bytes = page * (2 + choices_.below(std::uint64_t{30})),
            .page_bytes = page,
            .max_sequences = most_sequences,
            .max_sequence_tokens = choices_.once_in(4) ? 9U : 50U,
            .max_chunks = choices_.once_in(4) ? 1 + choices_.below(std::uint64_t{12}) : 0,
            .name = "kv"};
  }

  static std::uint64_t last_value(const held_sequence& sequence) {
    return sequence.expected.empty() ? random_numbers(sequence.context.salt[0]).next()
                                     : sequence.expected.back();
  }

  std::vector<llmmem::token_id> prompt() { return choose_prompt(choices_, 24); }

  /// The cell of `position` in a group's block; states have one.
  std::uint64_t& cell(std::size_t g, llmmem::block_id block, std::uint64_t position) {
    const llmmem::layer_group& group = groups_[g];
    must(block != llmmem::null_block);
    std::uint64_t at = cache_.pool().offset(block);
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
        if (!looks_at(groups_[g], position, other)) continue;
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
        must((table[i] != llmmem::null_block) == seen || i * groups_[g].block_tokens > position);
      }
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
    const llmmem::block_record& record = cache_.pool().record(at->second.block);
    if (record.is_cached() && record.generation() == at->second.generation) return true;
    cached_.erase(at);
    return false;
  }

  void begin() {
    held_sequence fresh;
    if (choices_.once_in(3)) fresh.context.salt[0] = 1;
    const auto id = cache_.create(fresh.context);
    must(id.has_value() == (living_.size() < most_sequences));
    if (!id) return must(id.code() == llmmem::errc::out_of_sequences);
    fresh.id = *id;
    living_.push_back(fresh);
    held_sequence& sequence = living_.back();
    const std::vector<llmmem::token_id> tokens = prompt();
    const std::uint64_t longest = longest_hit(tokens, fresh.context);
    must(cache_.cached_tokens(tokens, fresh.context) == longest);
    const auto hit = cache_.match(sequence.id, tokens).value();
    must(hit.tokens == longest);
    for (std::uint64_t i = 0; i < hit.tokens; ++i) {
      sequence.tokens.push_back(tokens[i]);
      sequence.expected.push_back(next_value(last_value(sequence), tokens[i]));
    }
    check_contents(sequence, hit.tokens);
    check_dead(sequence, hit.tokens);
    append(sequence, std::span(tokens).subspan(hit.tokens));
  }

  void append(held_sequence& sequence, std::span<const llmmem::token_id> tokens) {
    const llmmem::hybrid_stats before = cache_.stats();
    const std::uint64_t first = sequence.expected.size();
    std::vector<llmmem::group_shortage> lacks(groups_.size());
    const auto lacking = cache_.shortage(sequence.id, tokens.size(), lacks);
    const auto done = cache_.append(sequence.id, tokens);
    if (!done) {
      ++refused_;
      must(cache_.stats().tokens == before.tokens && cache_.tokens(sequence.id) == first);
      must(cache_.stats().pages.evictions == before.pages.evictions);
      if (done.code() == llmmem::errc::sequence_full) {
        return must(!lacking && first + tokens.size() > options_.max_sequence_tokens);
      }
      must(done.code() == llmmem::errc::out_of_group_blocks && *lacking);
      return must(lacks[done.error().index].lacking() == done.error().wanted - done.error().found);
    }
    must(!*lacking && done->first == first);
    std::uint64_t wanted = 0;
    for (const llmmem::group_shortage& each : lacks)
      wanted += each.wanted;
    must(wanted == done->new_blocks);
    for (const llmmem::group_copy& each : done->copies)
      carry_out(each);
    for (const llmmem::token_id token : tokens) {
      const std::uint64_t position = sequence.expected.size();
      sequence.tokens.push_back(token);
      sequence.expected.push_back(next_value(last_value(sequence), token));
      for (std::size_t g = 0; g < groups_.size(); ++g) {
        std::uint64_t& at = cell_of(sequence, g, position);
        // The state goes on in the block it is written to.
        if (groups_[g].kind == llmmem::layer_kind::state_snapshots && position == first && first != 0)
          must(at == sequence.expected[position - 1] + g);
        at = sequence.expected[position] + g;
      }
    }
    // All positions of the step can look at what they need, not only the last one's successor.
    for (std::uint64_t position = first; position < sequence.expected.size(); ++position) {
      for (std::size_t g = 0; g < groups_.size(); ++g) {
        if (groups_[g].kind == llmmem::layer_kind::state_snapshots) continue;
        for (std::uint64_t other = 0; other <= position; ++other) {
          if (looks_at(groups_[g], position, other))
            must(cell_of(sequence, g, other) == sequence.expected[other] + g);
        }
      }
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
      for (std::uint64_t i = 0; (i + 1) * groups_[g].block_tokens <= written; ++i) {
        const std::span tokens = std::span(sequence.tokens).first((i + 1) * groups_[g].block_tokens);
        const llmmem::block_id block = before[g][i];
        if (block == llmmem::null_block || !cache_.pool().record(block).is_cached()) continue;
        if (is_cached(g, tokens, sequence.context)) continue;
        cached_[cache_key{g, sequence.context.salt[0], {tokens.begin(), tokens.end()}}] = {
            block, cache_.pool().record(block).generation()};
      }
    }
    if (written == sequence.tokens.size()) check_dead(sequence, written);
  }

  void fork(const held_sequence& sequence) {
    const auto twin = cache_.fork(sequence.id);
    must(twin.has_value() == (living_.size() < most_sequences));
    if (!twin) return;
    held_sequence copy = sequence;
    copy.id = *twin;
    living_.push_back(copy);
  }

  void release(std::size_t i) {
    must(cache_.release(living_[i].id).has_value());
    must(cache_.release(living_[i].id).code() == llmmem::errc::stale_handle);
    living_.erase(living_.begin() + static_cast<std::ptrdiff_t>(i));
  }

  void act() {
    if (living_.size() == most_sequences && choices_.once_in(2))
      release(choices_.below(std::uint64_t{living_.size()}));
    if (living_.empty() || choices_.once_in(4)) return begin();
    const std::size_t i = choices_.below(std::uint64_t{living_.size()});
    held_sequence& sequence = living_[i];
    switch (choices_.below(std::uint32_t{10})) {
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
        return;
      default:
        return release(i);
    }
  }

  Choices choices_;
  std::vector<llmmem::layer_group> groups_;
  llmmem::hybrid_options options_;
  std::string_view policy_;
  cache_type cache_;
  std::vector<std::uint64_t> memory_;
  std::vector<held_sequence> living_;
  std::map<cache_key, cached_block> cached_;
  std::uint64_t refused_ = 0;
};

}  // namespace llmmem_tests
