/// @file
/// Random operations through a journaled cache with groups of layers, fences included: what its journal must
/// replay.
#pragma once

#include <llmmem/eviction/any.hpp>
#include <llmmem/paging/hybrid_allocator.hpp>
#include <llmmem/paging/hybrid_what_if.hpp>
#include <llmmem/paging/journal.hpp>
#include <llmmem/paging/journal_replay.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "support/hybrid_world.hpp"
#include "support/random.hpp"

namespace llmmem_tests {

using traced_hybrid_traits = llmmem::paging::hybrid_what_if_traits;
using traced_hybrid = llmmem::hybrid_allocator<traced_hybrid_traits>;
using hybrid_journal = llmmem::paging::journaled<traced_hybrid, llmmem::memory_journal>;

/// Makes every group's policy by name.
struct named_evictions {
  std::string name;
  llmmem::any_eviction operator()(llmmem::slot_count slots, const llmmem::metadata_source& source) const {
    return llmmem::make_eviction(name, slots, source);
  }
};

/// A cache as the header says, under the policy that its configuration names.
inline traced_hybrid hybrid_of(const llmmem::paging::hybrid_journal_header& header) {
  return traced_hybrid(header.options, named_evictions{header.configuration});
}

class journal_hybrid_world {
 public:
  explicit journal_hybrid_world(std::uint64_t seed, std::uint64_t journal_bytes = 1 << 20)
      : random_(seed),
        groups_(choose_groups(random_)),
        options_(choose()),
        policy_(llmmem::eviction_names[random_.below(std::uint64_t{llmmem::eviction_names.size()})]),
        cache_(options_, llmmem::memory_journal(journal_bytes), policy_, named_evictions{policy_}) {}
  journal_hybrid_world(const journal_hybrid_world&) = delete;
  journal_hybrid_world& operator=(const journal_hybrid_world&) = delete;

  void step() {
    if (random_.once_in(12)) static_cast<void>(stream_.pass(stream_.issue()));
    if (random_.once_in(25)) cache_.checkpoint();
    if (living_.empty() || random_.once_in(4)) return begin();
    act(random_.once_in(20) ? odd_handle() : any());
  }

  [[nodiscard]] hybrid_journal& cache() { return cache_; }
  [[nodiscard]] std::span<const std::byte> bytes() const { return cache_.sink().bytes(); }
  /// The world's own handles of what a replay holds.
  [[nodiscard]] std::vector<llmmem::sequence_id> own(std::vector<llmmem::sequence_id> handles) const {
    for (llmmem::sequence_id& each : handles)
      each.owner = owner_;
    return handles;
  }
  /// Operations that were refused, by shortage or otherwise, and copies that appends reported.
  [[nodiscard]] std::uint64_t refused() const { return refused_; }
  [[nodiscard]] std::uint64_t copies() const { return copies_; }

 private:
  static constexpr std::uint32_t most_sequences = 6;

  [[nodiscard]] llmmem::hybrid_options choose() {
    std::uint64_t largest = 0;
    for (const llmmem::layer_group& each : groups_)
      largest = std::max(largest, each.block_bytes);
    const std::uint64_t page = largest + random_.below(3 * largest);
    const std::uint64_t budget = page * (2 + random_.below(std::uint64_t{30}));
    return {.groups = groups_,
            .budget_bytes = budget,
            .budget_capacity_bytes = budget + page * random_.below(std::uint64_t{4}),
            .page_bytes = page,
            .max_sequences = most_sequences,
            .max_sequence_tokens = 40,
            .max_chunks = random_.once_in(4) ? 40 + random_.below(std::uint64_t{12}) : 0,
            .max_deferred = random_.once_in(3) ? random_.below(std::uint64_t{12}) : llmmem::unlimited,
            .name = "kv"};
  }

  template <class T>
  void kept(const llmmem::result<T>& done) {
    refused_ += done.has_value() ? 0U : 1U;
  }
  void grown(const llmmem::result<llmmem::hybrid_append>& done) {
    kept(done);
    copies_ += done ? done->copies.size() : 0U;
  }

  llmmem::sequence_id any() { return living_[random_.below(std::uint64_t{living_.size()})]; }
  llmmem::sequence_id odd_handle() {
    if (random_.once_in(2)) return {};
    return {random_.below(std::uint32_t{9}), random_.below(std::uint32_t{4}),
            random_.once_in(2) ? 12345U : living_.front().owner};
  }
  llmmem::host_fence fence() { return random_.once_in(2) ? stream_.issue() : llmmem::host_fence{}; }
  std::vector<llmmem::token_id> prompt() {
    std::vector<llmmem::token_id> tokens(random_.below(std::uint64_t{18}));
    for (auto& token : tokens)
      token = random_.once_in(12) ? -2 : 1;
    return tokens;
  }
  llmmem::block_id some_block(llmmem::sequence_id id) {
    const auto table = cache_.table(id, random_.below(std::uint64_t{groups_.size()}));
    return table.empty() ? llmmem::block_id{random_.below(std::uint32_t{40})}
                         : table[random_.below(std::uint64_t{table.size()})];
  }
  llmmem::token_range some_blocks() {
    std::uint64_t common = 1;
    for (const llmmem::layer_group& each : groups_)
      common = std::lcm(common, each.block_tokens);
    const std::uint64_t first = random_.below(std::uint64_t{3}) * common;
    return {first, first + random_.below(std::uint64_t{3}) * common};
  }

  void begin() {
    llmmem::prefix_context context;
    if (random_.once_in(3)) context.salt[0] = 1;
    llmmem::request_hints hints{.session = random_.below(std::uint64_t{3})};
    if (random_.once_in(9))
      hints.keep = {.priority = static_cast<std::uint8_t>(random_.below(std::uint32_t{103}))};
    const auto tokens = prompt();
    if (random_.once_in(4)) cache_.expect(tokens, context, random_.below(std::uint64_t{90}));
    const auto id = cache_.create(context, hints);
    if (!id) return;
    owner_ = id->owner;
    living_.push_back(*id);
    const auto hit = cache_.match(*id, tokens);
    if (hit) grown(cache_.append(*id, std::span(tokens).subspan(hit->tokens)));
  }

  std::vector<llmmem::paging::growth> batch(std::vector<std::vector<llmmem::token_id>>& tokens) {
    tokens.resize(living_.size());
    std::vector<llmmem::paging::growth> all;
    for (std::size_t i = 0; i < living_.size(); ++i) {
      tokens[i] = random_.once_in(3) ? prompt() : std::vector<llmmem::token_id>{1};
      all.push_back(
          {.sequence = living_[i], .tokens = tokens[i], .unknown_tokens = random_.once_in(4) ? 2U : 0U});
    }
    if (random_.once_in(9)) all.push_back(all.front());
    return all;
  }
  void append_batch() {
    std::vector<std::vector<llmmem::token_id>> tokens;
    const auto all = batch(tokens);
    std::vector<llmmem::hybrid_append> out(all.size() + (random_.once_in(20) ? 1 : 0));
    std::vector<std::uint64_t> leave(random_.once_in(2) ? groups_.size() : 0, 1);
    if (random_.once_in(20)) leave.resize(groups_.size() + 1);
    kept(cache_.append_batch(all, out, leave));
  }
  void ask_shortage(llmmem::sequence_id id) {
    std::vector<llmmem::group_shortage> lacks(groups_.size() + (random_.once_in(9) ? 1 : 0));
    if (random_.once_in(2)) return kept(cache_.shortage(id, random_.below(std::uint64_t{20}), lacks));
    std::vector<std::vector<llmmem::token_id>> tokens;
    const auto all = batch(tokens);
    kept(cache_.shortage(all, lacks));
  }
  void pin(llmmem::sequence_id id) {
    if (!pinned_.empty() && (random_.once_in(2) || pinned_.size() == 2)) {
      kept(cache_.unpin(pinned_.back()));
      return pinned_.pop_back();
    }
    const llmmem::block_id block = some_block(id);
    if (cache_.pin(block)) pinned_.push_back(block);
  }

  void act(llmmem::sequence_id id) {
    switch (random_.below(std::uint32_t{21})) {
      case 0:
        return grown(cache_.append(id, prompt()));
      case 1:
        return grown(cache_.extend(id, random_.below(std::uint64_t{5})));
      case 2:
        return append_batch();
      case 3:
      case 4:
      case 5:
        return kept(cache_.commit(id));
      case 6:
        return kept(cache_.commit(id, random_.below(std::uint64_t{20})));
      case 7:
        if (const auto twin = cache_.fork(id)) living_.push_back(*twin);
        return;
      case 8:
        return kept(cache_.truncate(id, random_.below(std::uint64_t{16})));
      case 9:
        return kept(cache_.truncate_after(id, random_.below(std::uint64_t{16}), fence()));
      case 10:
        return kept(random_.once_in(2) ? cache_.deduplicate(id) : cache_.deduplicate_after(id, fence()));
      case 11:
      case 12:
        return rare(id);
      case 13:
        return kept(cache_.release_after(id, fence()));
      case 14:
        return kept(cache_.name_tokens(id, prompt()));
      case 15:
        return pin(id);
      case 16:
        return kept(cache_.limit_commits(
            id, random_.once_in(2) ? llmmem::unlimited : random_.below(std::uint64_t{20})));
      case 17:
        return kept(cache_.read_until(id, fence()));
      case 18:
        return ask_shortage(id);
      default:
        return kept(cache_.release(id));
    }
  }

  void rare(llmmem::sequence_id id) {
    switch (random_.below(std::uint32_t{12})) {
      case 10:
        return kept(cache_.resize(random_.once_in(2) ? options_.budget_capacity_bytes
                                                     : random_.below(options_.budget_capacity_bytes + 2)));
      case 11: {
        std::vector<llmmem::group_copy> moves(1 + random_.below(std::uint64_t{9}));
        cache_.evacuate(moves);
        return;
      }
      case 0:
        cache_.drop_idle();
        return;
      case 1:
        return kept(cache_.limit_releases(
            id, random_.once_in(2) ? llmmem::unlimited : random_.below(std::uint64_t{20})));
      case 2:
        return kept(cache_.reset(cache_.epoch() + random_.below(std::uint64_t{3})));
      case 3:
        return kept(cache_.invalidate(id, random_.below(std::uint64_t{12})));
      case 4:
        return kept(cache_.invalidate(some_block(id)));
      case 5:
        return kept(cache_.remove(id, some_blocks()));
      case 6:
        return kept(cache_.remove_after(id, some_blocks(), fence()));
      case 7:
        cache_.advance(now_ += random_.below(std::uint64_t{5}));
        return;
      case 8: {
        const std::uint64_t first = random_.below(std::uint64_t{9});
        return kept(cache_.retain(id, {first, first + random_.below(std::uint64_t{9})},
                                  {.priority = 90, .until = now_ + 3}));
      }
      default:
        cache_.collect();
    }
  }

  random_numbers random_;
  std::vector<llmmem::layer_group> groups_;
  llmmem::hybrid_options options_;
  std::string policy_;
  hybrid_journal cache_;
  std::vector<llmmem::block_id> pinned_;
  llmmem::host_timeline stream_;
  std::vector<llmmem::sequence_id> living_;  // and some that are not any more
  std::uint32_t owner_ = 0;
  std::uint64_t refused_ = 0;
  std::uint64_t copies_ = 0;
  std::uint64_t now_ = 0;
};

/// All that two caches can be asked: equal texts, equal states.
inline std::string state_of(const traced_hybrid& cache, std::span<const llmmem::sequence_id> sequences) {
  const auto n = [](std::uint64_t value) { return " " + std::to_string(value); };
  std::string text = n(llmmem::detail::state_digest(cache));
  for (const llmmem::sequence_id each : sequences) {
    text += "\n" + n(each.slot) + n(each.generation) + n(cache.tokens(each)) + n(cache.prefix_tokens(each));
    for (std::size_t g = 0; g < cache.groups().size(); ++g) {
      text += ":";
      for (const llmmem::block_id block : cache.table(each, g))
        text += n(llmmem::to_index(block));
    }
  }
  text += "\ndeferred:";
  for (const std::uint64_t each : cache.deferred_by_group())
    text += n(each);
  cache.pool().visit_order([&](std::uint64_t word) { text += n(word); });
  for (const std::string& found : cache.audit())
    text += "\n" + found;
  return text;
}

}  // namespace llmmem_tests
