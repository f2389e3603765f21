/// @file
/// A service that runs requests through a `hybrid_allocator`, and an account of its memory.
#pragma once

#include <llmmem/paging/hybrid_allocator.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <span>
#include <unordered_map>
#include <vector>

#include "allocation_trace/programs.hpp"
#include "layer_groups/models.hpp"
#include "replay_trace/random.hpp"

namespace layer_groups {

struct request {
  std::vector<llmmem::token_id> tokens;  ///< prompt, then answer
  std::uint64_t prompt = 0;
};

/// Makes tokens for requests of known lengths. About half of them continue one of the last 256 requests that
/// is short enough, prompt and answer; the others begin with one of eight system prompts of 512 tokens.
/// Requests too long for `context` are left out.
[[nodiscard]] inline std::vector<request> make_requests(std::span<const allocation_trace::lengths> from,
                                                        std::size_t count, std::uint64_t context,
                                                        std::uint64_t seed) {
  replay_trace::splitmix64 random(seed);
  std::vector<request> all;
  const auto fresh = [&] { return static_cast<llmmem::token_id>(random.below(100'000)); };
  std::array<std::vector<llmmem::token_id>, 8> system_prompts;
  for (auto& each : system_prompts) {
    for (int i = 0; i < 512; ++i)
      each.push_back(fresh());
  }
  for (std::size_t i = 0; i < from.size() && all.size() < count; ++i) {
    const allocation_trace::lengths& of = from[i];
    if (of.prompt + of.answer > context) continue;
    request made{{}, of.prompt};
    const std::vector<llmmem::token_id>* before = &system_prompts[random.below(system_prompts.size())];
    if (!all.empty() && random.below(2) == 0) {
      const std::size_t back = 1 + random.below(std::min<std::size_t>(all.size(), 256));
      const auto& other = all[all.size() - back].tokens;
      if (other.size() < of.prompt) before = &other;
    }
    made.tokens.assign(before->begin(), before->begin() + static_cast<std::ptrdiff_t>(std::min<std::uint64_t>(
                                                              before->size(), of.prompt)));
    while (made.tokens.size() < of.prompt + of.answer)
      made.tokens.push_back(fresh());
    all.push_back(std::move(made));
  }
  return all;
}

/// Bytes of the budget by use, summed over samples. The sum of all is budget x samples, exactly.
struct byte_causes {
  std::uint64_t needed = 0;         ///< tokens and states that some next token attends to
  std::uint64_t cached = 0;         ///< idle blocks, kept for later prompts
  std::uint64_t unlooked = 0;       ///< tokens and states in used blocks that no next token attends to
  std::uint64_t unfilled = 0;       ///< places after the last token of a used block
  std::uint64_t padding = 0;        ///< bytes after the last block of a page, or after a block's contents
  std::uint64_t partial_pages = 0;  ///< free blocks of pages of one group
  std::uint64_t null_block = 0;     ///< the null page, and the budget's remainder
  std::uint64_t free = 0;           ///< whole pages

  [[nodiscard]] std::uint64_t wasted() const {
    return unlooked + unfilled + padding + partial_pages + null_block;
  }
  [[nodiscard]] std::uint64_t all() const { return needed + cached + wasted() + free; }
};

struct service_result {
  std::uint64_t requests = 0;
  std::uint64_t refused = 0;     ///< requests that do not fit even alone
  std::uint64_t steps = 0;       ///< of the whole run
  std::uint64_t full_steps = 0;  ///< steps with waiting requests, over which the next two are counted
  std::uint64_t running_sum = 0;
  std::uint64_t running_most = 0;
  std::uint64_t samples = 0;
  byte_causes bytes;
  std::uint64_t prompt_tokens = 0;
  std::uint64_t hit_tokens = 0;  ///< hits at a request's first admission
  std::uint64_t preemptions = 0;
  llmmem::hybrid_stats stats;

  [[nodiscard]] double mean_running() const {
    return full_steps == 0 ? 0 : static_cast<double>(running_sum) / static_cast<double>(full_steps);
  }
  [[nodiscard]] double share(std::uint64_t part) const {
    return bytes.all() == 0 ? 0 : static_cast<double>(part) / static_cast<double>(bytes.all());
  }
  [[nodiscard]] double hit_ratio() const {
    return prompt_tokens == 0 ? 0 : static_cast<double>(hit_tokens) / static_cast<double>(prompt_tokens);
  }
};

/// Continuous batching in whole steps: each step admits waiting requests in order while their prompts fit,
/// prefilled 2048 tokens at a time, and generates a token for each running one. If that does not fit, the
/// last admitted request waits again, from its beginning.
class service {
 public:
  service(const scheme& how, std::uint64_t budget, std::uint64_t longest)
      : scheme_(&how),
        cache_({.groups = how.groups,
                .budget_bytes = budget,
                .page_bytes = how.page_bytes,
                .max_sequences = most_running,
                .max_sequence_tokens = longest}) {}

  [[nodiscard]] service_result run(std::span<const request> requests) {
    result_.requests = requests.size();
    for (const request& each : requests)
      waiting_.push_back({&each, {}, 0, true});
    while (!waiting_.empty() || !running_.empty()) {
      admit();
      if (running_.empty() && !waiting_.empty()) {
        ++result_.refused;
        waiting_.pop_front();
        continue;
      }
      if (!waiting_.empty()) {
        ++result_.full_steps;
        result_.running_sum += running_.size();
        result_.running_most = std::max<std::uint64_t>(result_.running_most, running_.size());
        if (result_.full_steps % sample_every == 1) sample();
      }
      decode();
      ++result_.steps;
    }
    result_.stats = cache_.stats();
    return result_;
  }

 private:
  static constexpr std::uint32_t most_running = 2048;
  static constexpr std::uint64_t prefill_tokens = 2048;
  static constexpr std::uint64_t sample_every = 16;

  struct job {
    const request* what;
    llmmem::sequence_id id;
    std::uint64_t done;  // tokens in the cache
    bool is_new;
  };

  void admit() {
    while (!waiting_.empty() && running_.size() < most_running) {
      job next = waiting_.front();
      const std::span prompt = std::span(next.what->tokens).first(next.what->prompt);
      next.id = cache_.create().value();
      const std::uint64_t hit = cache_.match(next.id, prompt.first(prompt.size() - 1)).value().tokens;
      for (next.done = hit; next.done < prompt.size();) {
        const auto part = prompt.subspan(
            next.done,
            std::min<std::size_t>(prefill_tokens, prompt.size() - static_cast<std::size_t>(next.done)));
        if (!cache_.append(next.id, part)) break;
        cache_.commit(next.id).value();
        next.done += part.size();
      }
      if (next.done < prompt.size()) {
        cache_.release(next.id).value();
        return;
      }
      if (next.is_new) {
        result_.prompt_tokens += prompt.size();
        result_.hit_tokens += hit;
        next.is_new = false;
      }
      waiting_.pop_front();
      running_.push_back(next);
    }
  }

  void decode() {
    for (std::size_t i = 0; i < running_.size();) {
      job& each = running_[i];
      if (each.done == each.what->tokens.size()) {
        cache_.release(each.id).value();
        running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(i));
        continue;
      }
      if (cache_.append(each.id, std::span(each.what->tokens).subspan(each.done, 1))) {
        cache_.commit(each.id).value();
        ++each.done;
        ++i;
        continue;
      }
      job last = running_.back();
      running_.pop_back();
      cache_.release(last.id).value();
      if (running_.empty()) {
        ++result_.refused;  // although it had all memory
      } else {
        ++result_.preemptions;
        waiting_.push_front(last);
      }
    }
  }

  /// The attended part of a block, over all its holders.
  struct hull {
    std::uint64_t first = std::numeric_limits<std::uint64_t>::max();
    std::uint64_t end = 0;
    std::uint64_t filled = 0;
  };

  /// Every byte once, by the tables of all running requests.
  void sample() {
    ++result_.samples;
    const llmmem::super_page_stats pages = cache_.stats().pages;
    byte_causes& to = result_.bytes;
    to.cached += pages.idle_bytes;
    to.padding += pages.padding_bytes;
    to.partial_pages += pages.free_bytes;
    to.null_block += pages.null_bytes + pages.remainder_bytes;
    to.free += pages.free_pages * scheme_->page_bytes;
    for (std::size_t g = 0; g < scheme_->groups.size(); ++g) {
      std::uint64_t held = 0;
      for (const part& of : scheme_->parts[g]) {
        sample_part(g, of.needs);
        held += of.needs.block_bytes;
      }
      // The bytes of a block in addition to its contents.
      const std::uint64_t pad = scheme_->groups[g].block_bytes - held;
      const llmmem::super_page_group_stats group = cache_.pool().stats(g);
      to.padding += pad * (group.active_blocks + group.idle_blocks);
      to.cached -= pad * group.idle_blocks;
    }
  }

  void sample_part(std::size_t g, const llmmem::layer_group& part) {
    std::unordered_map<std::uint32_t, hull> blocks;
    for (const job& each : running_) {
      const auto table = cache_.table(each.id, g);
      const std::uint64_t length = each.done;
      const std::uint64_t skipped = part.skipped_tokens(length);
      for (std::size_t i = 0; i < table.size(); ++i) {
        if (table[i] == llmmem::null_block) continue;
        const std::uint64_t first = i * part.block_tokens;
        hull& at = blocks[llmmem::to_index(table[i])];
        at.filled = std::max(at.filled, std::min<std::uint64_t>(length - first, part.block_tokens));
        const std::uint64_t from = skipped > first ? skipped - first : 0;
        if (from >= at.filled) continue;
        at.first = std::min(at.first, from);
        at.end = std::max(at.end, at.filled);
      }
    }
    byte_causes& to = result_.bytes;
    for (const auto& [block, at] : blocks) {
      const std::uint64_t looked_at = at.end > at.first ? at.end - at.first : 0;
      if (part.kind == llmmem::layer_kind::state_snapshots) {
        (looked_at != 0 ? to.needed : to.unlooked) += part.block_bytes;
        continue;
      }
      const std::uint64_t token_bytes = part.block_bytes / part.block_tokens;
      to.needed += looked_at * token_bytes;
      to.unlooked += (at.filled - looked_at) * token_bytes;
      to.unfilled += (part.block_tokens - at.filled) * token_bytes;
    }
  }

  const scheme* scheme_;
  llmmem::hybrid_allocator<> cache_;
  std::deque<job> waiting_;
  std::vector<job> running_;
  service_result result_;
};

}  // namespace layer_groups
