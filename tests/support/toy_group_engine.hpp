/// @file
/// The toy engine over a cache with groups of layers: each group keeps what its kind reads, and the engine
/// checks all of it before it computes a token.
#pragma once

#include <llmmem/paging/batch_scheduler.hpp>
#include <llmmem/paging/hybrid_allocator.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "support/toy_engine.hpp"

namespace llmmem_tests {

/// The construction options of a cache.
template <class Cache>
using cache_options =
    std::conditional_t<llmmem::detail::grouped_cache<Cache>, llmmem::hybrid_options, llmmem::paged_options>;

/// The first cell of a block and its cells, as a client saved or brings them back.
struct saved_block {
  std::size_t group = 0;
  std::uint64_t index = 0;
  std::vector<std::uint64_t> cells{};
};

/// Every token leaves its value plus the number of the group in each group; a state is the value of the last
/// token.
template <class Cache, bool Swaps>
  requires llmmem::detail::grouped_cache<Cache>
class toy_engine<Cache, Swaps> {
 public:
  explicit toy_engine(const Cache& cache) : cache_(&cache), memory_(cache.pool().physical_bytes()) {}

  std::map<std::uint64_t, toy_request> requests;
  std::uint64_t lose_every = 0;  // one in so many swaps is lost on the way back
  std::uint64_t wrong = 0;       // cells that did not hold what they should
  std::map<std::uint64_t, std::vector<saved_block>> saved;
  std::map<std::uint64_t, std::uint64_t> saved_tokens;

  void ask(std::uint64_t user, std::vector<llmmem::token_id> prompt) {
    const std::size_t size = prompt.size();
    requests[user] = {.tokens = std::move(prompt), .prompt = size};
  }

  [[nodiscard]] std::span<const llmmem::token_id> tokens(std::uint64_t user) noexcept {
    return requests.find(user)->second.tokens;
  }
  void copy(const llmmem::group_copy& what) noexcept {
    const bool is_state = group(what.group).kind == llmmem::layer_kind::state_snapshots;
    for (std::uint32_t i = 0; i < (is_state ? 1 : what.copy.tokens); ++i)
      cell(what.group, what.copy.destination, i) = cell(what.group, what.copy.source, i);
  }
  void exhausted(std::uint64_t user, const llmmem::failure&) noexcept {
    requests.find(user)->second.is_exhausted = true;
  }
  [[nodiscard]] bool swap_out(std::uint64_t user, llmmem::sequence_id sequence,
                              std::uint64_t written) noexcept
    requires Swaps
  {
    if (written == 0) return false;
    requests.find(user)->second.is_saved = true;
    saved_tokens[user] = written;
    std::vector<saved_block>& to = saved[user];
    to.clear();
    for (std::size_t g = 0; g < cache_->groups().size(); ++g) {
      const auto table = cache_->table(sequence, g);
      for (std::uint64_t i = 0; i < table.size(); ++i) {
        if (table[i] == llmmem::null_block) continue;
        saved_block each{.group = g, .index = i};
        for (std::uint64_t k = 0; k < cells(g); ++k)
          each.cells.push_back(cell(g, table[i], k));
        to.push_back(std::move(each));
      }
    }
    return true;
  }
  [[nodiscard]] bool swap_in(std::uint64_t user, llmmem::sequence_id sequence, std::uint64_t first,
                             std::uint64_t end) noexcept
    requires Swaps
  {
    if (!has_saved(user) || first == end) return false;
    for (const auto& [group, block, cells] : coming_back(user, sequence, first, end))
      write(group, block, cells);
    return true;
  }
  [[nodiscard]] bool has_saved(std::uint64_t user) noexcept {
    toy_request& back = requests.find(user)->second;
    if (!back.is_saved) std::abort();
    back.is_saved = false;
    ++swaps_;
    return lose_every == 0 || swaps_ % lose_every != 0;
  }
  struct brought {
    std::size_t group;
    llmmem::block_id block;
    std::vector<std::uint64_t> cells;
  };
  /// What is written for tokens `first` to `end`: every block that the tables name there.
  [[nodiscard]] std::vector<brought> coming_back(std::uint64_t user, llmmem::sequence_id sequence,
                                                 std::uint64_t first, std::uint64_t end) noexcept {
    std::vector<brought> all;
    wrong += saved_tokens[user] != end ? 1U : 0U;
    for (std::size_t g = 0; g < cache_->groups().size(); ++g) {
      const auto table = cache_->table(sequence, g);
      for (std::uint64_t i = first / group(g).block_tokens; i < group(g).blocks_for(end); ++i) {
        if (table[i] == llmmem::null_block) continue;
        std::uint64_t found = 0;
        for (const saved_block& each : saved[user]) {
          if (each.group != g || each.index != i) continue;
          all.push_back({g, table[i], each.cells});
          ++found;
        }
        wrong += found != 1 ? 1U : 0U;
      }
    }
    return all;
  }
  void write(std::size_t g, llmmem::block_id block, const std::vector<std::uint64_t>& cells) noexcept {
    for (std::uint64_t k = 0; k < cells.size(); ++k)
      cell(g, block, k) = cells[k];
  }

  /// Computes a step; says who got a new token, and who did not because their prompt goes on.
  void compute(std::span<const llmmem::scheduled_work> work) {
    for (const llmmem::scheduled_work& each : work) {
      toy_request& now = requests.at(each.user);
      const std::uint64_t end = each.first + each.count;
      std::vector<std::uint64_t> expected;
      std::uint64_t kv = 0;
      for (std::uint64_t i = 0; i < end; ++i)
        expected.push_back(kv = toy_kv(kv, now.tokens[i]));
      for (std::size_t g = 0; g < cache_->groups().size(); ++g)
        compute(each, g, expected);
      if (end == now.tokens.size()) now.tokens.push_back(toy_next(kv));
    }
  }

 private:
  [[nodiscard]] const llmmem::layer_group& group(std::size_t g) const noexcept { return cache_->groups()[g]; }
  [[nodiscard]] std::uint64_t cells(std::size_t g) const noexcept {
    return group(g).kind == llmmem::layer_kind::state_snapshots ? 1 : group(g).block_tokens;
  }
  std::uint64_t& cell(std::size_t g, llmmem::block_id block, std::uint64_t position) noexcept {
    wrong += block == llmmem::null_block ? 1U : 0U;
    return memory_[cache_->pool().offset(block) + position % cells(g)];
  }
  std::uint64_t& at(llmmem::sequence_id sequence, std::size_t g, std::uint64_t position) noexcept {
    return cell(g, cache_->table(sequence, g)[position / group(g).block_tokens], position);
  }
  void compute(const llmmem::scheduled_work& each, std::size_t g,
               const std::vector<std::uint64_t>& expected) {
    const llmmem::layer_group& of = group(g);
    const std::uint64_t end = each.first + each.count;
    if (of.kind == llmmem::layer_kind::state_snapshots) {
      for (std::uint64_t i = of.skips_blocks() ? end - 1 : each.first; i < end; ++i) {
        std::uint64_t& state = at(each.sequence, g, i);
        const bool is_first = i == each.first || of.skips_blocks();
        if (is_first && each.first != 0) wrong += state != expected[each.first - 1] + g ? 1U : 0U;
        state = expected[i] + g;
      }
      return;
    }
    for (std::uint64_t i = each.first; i < end; ++i) {
      at(each.sequence, g, i) = expected[i] + g;
      for (std::uint64_t other = of.skipped_tokens(i); other < i; ++other)
        wrong += at(each.sequence, g, other) != expected[other] + g ? 1U : 0U;
      for (std::uint64_t other = 0; other < of.sinks && other < i; ++other)
        wrong += at(each.sequence, g, other) != expected[other] + g ? 1U : 0U;
    }
  }

  const Cache* cache_;
  std::vector<std::uint64_t> memory_;
  std::uint64_t swaps_ = 0;
};

}  // namespace llmmem_tests
