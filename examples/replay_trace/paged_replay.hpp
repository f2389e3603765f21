/// @file
/// The replay: a trace driven through the library's `paged_allocator`, request by request.
#pragma once

#include <llmmem/error.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "replay_trace/cache_tiers.hpp"
#include "replay_trace/pool_replay.hpp"
#include "replay_trace/replay.hpp"
#include "replay_trace/replay_cache.hpp"
#include "replay_trace/trace.hpp"

namespace replay_trace {

namespace detail {

/// Loads the part of a prompt that the tiers have after the cache's own `hit`. Returns how many tokens the
/// sequence then has.
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

/// One request: shares the cached part of its prompt, writes the rest, grows by the answer's tokens, and
/// releases all of it.
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
/// With `options.tiers`, blocks that the cache evicts go down to `kv_tiers`, and a prompt's blocks that the
/// cache lacks are loaded from there, up to the first missing one.
///
/// With several `nodes`, each node has a cache and tiers of that size, and gets every n-th request; the
/// replay runs once with separate nodes and once with a `kv_pool` over them.
///
/// Requests run one at a time in the trace's order, are not pinned after their end, and are freed tail first;
/// timestamps are not simulated. Each block id is one cacheable block, including the short last one of a
/// prompt. A hit is a block found at its place in an unbroken cached prefix. Ids are any 64-bit numbers, and
/// a prompt may repeat one. A short last block without an id is not a reference, and never shared. A trace
/// without block ids shares nothing: every block is a miss, and `block_refs` counts ceil(prompt /
/// block_tokens).
///
/// @par Errors   `llmmem::argument_error` for an unknown policy; `llmmem::length_error` for a capacity of 0
///      blocks or one that cannot be indexed, and for blocks of 0 tokens.
/// @par Determinism   the same arguments give the same counts; only `elapsed_ns` differs.
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

  const std::vector<llmmem::block_key> keys = detail::keys_of(from);
  if (options.tiers && options.tiers->nodes > 1) {
    detail::replay_nodes(from, keys, options, sums, progress);
    return sums;
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
