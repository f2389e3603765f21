/// @file
/// The replay itself: a trace driven through the library's `paged_allocator`, request by request.
#pragma once

#include <llmmem/error.hpp>
#include <llmmem/eviction/any.hpp>
#include <llmmem/eviction/queue_lookahead.hpp>
#include <llmmem/paged_allocator.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "replay_trace/cache_tiers.hpp"
#include "replay_trace/replay.hpp"
#include "replay_trace/trace.hpp"

namespace replay_trace {

namespace detail {

/// The policy by name; and no tokens to verify, for a trace brings keys instead of tokens.
struct replay_traits : llmmem::paged_traits {
  using eviction = llmmem::any_eviction;
  using verification = llmmem::trust_hash;
  using observer = llmmem::offload::tier_link;
};

using replay_cache = llmmem::paged_allocator<replay_traits>;

/// A policy that sees the waiting queue, `n` requests of it.
struct queue_policy {
  std::string_view name;
  llmmem::any_eviction (*make)(llmmem::slot_count);
};

template <std::uint64_t n>
[[nodiscard]] llmmem::any_eviction make_lookahead(llmmem::slot_count slots) {
  return llmmem::any_eviction(std::in_place_type<llmmem::queue_lookahead<n>>, slots);
}

inline constexpr std::array queue_policies{
    queue_policy{"lookahead_4", make_lookahead<4>}, queue_policy{"lookahead_16", make_lookahead<16>},
    queue_policy{"lookahead_64", make_lookahead<64>}, queue_policy{"lookahead_256", make_lookahead<256>},
    queue_policy{"lookahead_1024", make_lookahead<1024>}};
static_assert(queue_policies.size() == lookahead_names.size());

[[nodiscard]] inline const queue_policy* find_queue_policy(std::string_view name) {
  const auto* const found = std::find_if(queue_policies.begin(), queue_policies.end(),
                                         [&](const queue_policy& each) { return each.name == name; });
  return found == queue_policies.end() ? nullptr : found;
}

[[nodiscard]] inline llmmem::any_eviction make_policy(std::string_view name, llmmem::slot_count slots) {
  const queue_policy* const looks_ahead = find_queue_policy(name);
  return looks_ahead != nullptr ? looks_ahead->make(slots) : llmmem::make_eviction(name, slots);
}

/// For each block reference, the number of the next request that refers to the same id. MIN uses
/// all of it, the policies that see the queue as much as stands in it.
/// O(ids).
[[nodiscard]] inline std::vector<llmmem::access_hint> next_uses(const trace& from) {
  std::vector<llmmem::access_hint> hints(from.block_ids().size());
  std::unordered_map<std::uint64_t, std::uint64_t> next;
  std::size_t end = hints.size();
  for (std::size_t r = from.size(); r-- > 0;) {
    const auto ids = from[r].block_ids;
    const std::size_t first = end - ids.size();
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const auto known = next.find(ids[i]);
      if (known != next.end()) hints[first + i].next_use = known->second;
    }
    for (const std::uint64_t id : ids) {
      next[id] = r;
    }
    end = first;
  }
  return hints;
}

/// The allocator for `options`.
///
/// The capacity is that of the cache: blocks that keep their contents when nobody uses them. The request at
/// hand works in blocks of its own beside it, as a server's running requests do.
[[nodiscard]] inline replay_cache make_cache(const trace& from, const replay_options& options,
                                             std::uint64_t capacity, std::uint32_t block_tokens) {
  std::uint64_t longest = 1;
  for (std::size_t r = 0; r < from.size(); ++r) {
    longest = std::max(longest, from[r].input_tokens + from[r].output_tokens);
  }
  const std::uint64_t at_work = (longest + block_tokens - 1) / block_tokens;
  llmmem::paged_options cache{.blocks = llmmem::checked_add(capacity, at_work, "replay: capacity + request"),
                              .block_tokens = block_tokens,
                              .max_sequences = 1,
                              .max_sequence_tokens = longest,
                              .max_idle_blocks = capacity,
                              .max_deferred = 0,
                              .name = "replay"};
  if (cache.blocks > llmmem::max_blocks) {
    throw llmmem::length_error("replay: a capacity of " + std::to_string(capacity) + " blocks, the most is " +
                               std::to_string(llmmem::max_blocks - at_work));
  }
  return {cache, make_policy(options.policy, llmmem::slot_count{cache.blocks + 1})};
}

using replay_tiers = cache_tiers<replay_cache>;

/// What of a prompt the tiers beneath the cache have, behind the `hit` that the cache has itself. Says how
/// many tokens the sequence has then.
inline std::uint64_t onboard(replay_tiers& tiers, llmmem::sequence_id sequence, const request& asked,
                             const llmmem::keyed_blocks& prompt, const llmmem::match_result& hit,
                             replay_result& sums) {
  const tier_hits found = tiers.load(sequence, prompt);
  const std::uint64_t have = hit.tokens + found.host_tokens + found.nvme_tokens;
  sums.tiers->hbm += hit.tokens;
  sums.tiers->host += found.host_tokens;
  sums.tiers->nvme += found.nvme_tokens;
  sums.tiers->computed += asked.input_tokens - have;
  sums.host_hits += found.host_blocks;
  sums.nvme_hits += found.nvme_blocks;
  return have;
}

/// One request: what is cached of its prompt is shared, the rest written, the answer grown token by token's
/// room, and all of it let go.
inline void serve(replay_cache& cache, const request& asked, const llmmem::keyed_blocks& prompt,
                  replay_tiers* tiers, replay_result& sums) {
  const llmmem::sequence_id sequence = cache.create().value();
  const llmmem::match_result hit = cache.match(sequence, prompt).value();
  std::uint64_t have = hit.tokens;
  if (tiers != nullptr) have = onboard(*tiers, sequence, asked, prompt, hit, sums);
  const std::size_t computed = cache.blocks(sequence).size();
  cache.extend(sequence, asked.input_tokens - have).value();
  if (tiers != nullptr) tiers->compute(sequence, prompt.keys, computed);
  cache.commit(sequence, prompt).value();
  cache.extend(sequence, asked.output_tokens).value();

  sums.hits += hit.blocks;
  sums.matched_tokens += hit.tokens;
  sums.useful_tokens += cache.tokens(sequence);
  sums.reserved_tokens += cache.blocks(sequence).size() * cache.block_tokens();
  cache.release(sequence).value();
}

}  // namespace detail

/// Replays `from` through a `paged_allocator`.
///
/// With `options.tiers`, blocks that the cache evicts go down into `kv_tiers`, and what a prompt does not
/// find in the cache is loaded from there, as far as no block is missing.
///
/// Requests run one at a time in the order of the trace, are not pinned after their end, and are freed tail
/// first; timestamps are not simulated. Each block id is one cacheable block, the short last one of a prompt
/// included. A hit is a block found at its place in an unbroken cached prefix. Ids are any 64-bit numbers,
/// and one may stand more than once in a prompt. A short last block without an id is no reference, and shared
/// by nobody. A trace without block ids shares nothing: every block of it is a miss, and `block_refs` counts
/// ceil(prompt / block_tokens).
///
/// @par Errors   `llmmem::argument_error` for an unknown policy; `llmmem::length_error` for a capacity of 0
///      blocks or one that cannot be indexed, and for blocks of 0 tokens.
/// @par Determinism   same arguments, same counts; `elapsed_ns` alone differs.
[[nodiscard]] inline replay_result replay(const trace& from, const replay_options& options,
                                          const replay_progress& progress) {
  const std::uint32_t block_tokens = from.has_block_ids() ? from.block_tokens() : options.block_tokens;
  if (options.capacity_blocks == 0)
    throw llmmem::length_error("replay: a capacity of 0 blocks; at least 1 is needed");
  if (block_tokens == 0) throw llmmem::length_error("replay: blocks of 0 tokens; at least 1 is needed");

  replay_result sums;
  sums.policy = options.policy;
  sums.capacity_limit = options.capacity_blocks;
  sums.capacity_blocks = options.capacity_blocks.value_or(distinct_blocks(from));
  sums.block_tokens = block_tokens;
  sums.requests = from.size();
  sums.input_tokens = from.input_tokens();
  sums.output_tokens = from.output_tokens();

  std::vector<llmmem::block_key> keys;
  keys.reserve(from.block_ids().size());
  for (const std::uint64_t id : from.block_ids()) {
    keys.push_back(llmmem::key_from_id(id));
  }
  const bool looks_ahead = options.policy == "min" || detail::find_queue_policy(options.policy) != nullptr;
  const auto hints = looks_ahead ? detail::next_uses(from) : std::vector<llmmem::access_hint>{};
  detail::replay_cache cache = detail::make_cache(from, options, sums.capacity_blocks, block_tokens);
  std::optional<detail::replay_tiers> tiers;
  if (options.tiers) {
    tiers.emplace(cache, *options.tiers);
    sums.tiers.emplace();
  }

  constexpr std::size_t report_every = 256;
  std::chrono::steady_clock::duration elapsed{};
  std::size_t first = 0;
  for (std::size_t done = 0; done < from.size();) {
    const auto start = std::chrono::steady_clock::now();
    const std::size_t stop = std::min(from.size(), done + report_every);
    for (; done < stop; ++done) {
      const request asked = from[done];
      const std::size_t count = asked.block_ids.size();
      llmmem::keyed_blocks prompt{.keys = std::span(keys).subspan(first, count)};
      prompt.tokens = asked.hashed_tokens;
      if (!hints.empty()) prompt.hints = std::span(hints).subspan(first, count);
      first += count;
      if (looks_ahead) cache.advance(done);
      sums.block_refs +=
          from.has_block_ids() ? count : (asked.input_tokens + block_tokens - 1) / block_tokens;
      detail::serve(cache, asked, prompt, tiers ? &*tiers : nullptr, sums);
      if (tiers) tiers->settle();
    }
    elapsed += std::chrono::steady_clock::now() - start;
    progress(done);
  }

  if (tiers) {
    sums.block_bytes = options.tiers->block_bytes;
    sums.verified_blocks = tiers->verified_blocks();
  }
  const llmmem::paged_stats stats = cache.stats();
  sums.evictions = stats.evictions;
  sums.peak_metadata_bytes = stats.metadata_bytes + stats.verification_bytes;
  sums.elapsed_ns =
      static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count());
  return sums;
}

}  // namespace replay_trace
