/// @file
/// A trace served by several nodes: each alone with its cache and tiers, and all as one pool.
#pragma once

#include <llmmem/comm/thread_network.hpp>
#include <llmmem/offload/kv_chain.hpp>
#include <llmmem/paging/paged_types.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "replay_trace/cache_tiers.hpp"
#include "replay_trace/replay.hpp"
#include "replay_trace/replay_cache.hpp"
#include "replay_trace/trace.hpp"

namespace replay_trace {
namespace detail {

using replay_tiers = cache_tiers<replay_cache>;

/// One node: a cache and its tiers, which store all computed blocks for others.
struct replay_node {
  replay_node(const trace& from, const replay_options& options, std::uint64_t capacity,
              std::uint32_t block_tokens, std::uint32_t number)
      : cache(make_cache(from, options, capacity, block_tokens)),
        tiers(cache, *options.tiers, number, llmmem::write_through{}) {}

  replay_cache cache;
  replay_tiers tiers;
};

/// All nodes, driven by one thread, which makes runs repeatable.
class replay_cluster {
 public:
  replay_cluster(const trace& from, const replay_options& options, std::uint64_t capacity,
                 std::uint32_t block_tokens, bool is_pool)
      : net_(options.tiers->nodes, {.copied_bytes = static_cast<std::uint32_t>(options.tiers->block_bytes),
                                    .lane_bytes = std::uint64_t{1} << 30}),
        is_pool_(is_pool) {
    for (std::uint32_t i = 0; i < options.tiers->nodes; ++i)
      nodes_.push_back(std::make_unique<replay_node>(from, options, capacity, block_tokens, i));
    if (!is_pool) return;
    for (std::uint32_t i = 0; i < options.tiers->nodes; ++i)
      ends_.push_back(std::make_unique<llmmem::thread_endpoint>(net_, llmmem::seat_id{i}));
    for (std::uint32_t i = 0; i < options.tiers->nodes; ++i)
      nodes_[i]->tiers.join(*ends_[i]);
    for (int i = 0; i < 4; ++i)
      drive();
  }

  /// Serves one request on one node, and adds its hits to `sums`.
  void serve(std::size_t number, const request& asked, const llmmem::keyed_blocks& prompt,
             replay_result& sums) {
    replay_node& node = *nodes_[number % nodes_.size()];
    const llmmem::sequence_id sequence = node.cache.create().value();
    const llmmem::kv_chain chain(node.cache, prompt);
    const llmmem::match_result hit = node.cache.match(sequence, prompt).value();
    tier_hits found;
    std::uint64_t fetched = 0;
    const auto load = [&] { found = node.tiers.load(sequence, prompt, chain); };
    if (is_pool_ && hit.tokens < chain.tokens()) {
      fetched = node.tiers.with_fetched(chain, sequence, [this] { drive(); }, load);
    } else {
      load();
    }
    const std::uint64_t have = node.cache.tokens(sequence);
    const std::size_t computed = node.cache.blocks(sequence).size();
    node.cache.extend(sequence, asked.input_tokens - have).value();
    node.tiers.compute(sequence, prompt.keys, computed);
    node.cache.commit(sequence, prompt).value();
    node.tiers.store(sequence, chain);
    if (is_pool_) drive();  // so that the directory knows before the next request asks
    node.cache.extend(sequence, asked.output_tokens).value();

    // Blocks from others were loaded from this node's host tier.
    const std::uint64_t peers = std::min(fetched, found.host_blocks);
    sums.hits += hit.blocks;
    sums.matched_tokens += hit.tokens;
    sums.host_hits += found.host_blocks - peers;
    sums.nvme_hits += found.nvme_blocks;
    sums.pool->peer_hits += peers;
    sums.tiers->hbm += hit.tokens;
    const std::uint64_t peer_tokens = std::min(found.host_tokens, peers * node.cache.block_tokens());
    sums.pool->peer_tokens += peer_tokens;
    sums.tiers->host += found.host_tokens - peer_tokens;
    sums.tiers->nvme += found.nvme_tokens;
    sums.tiers->computed += asked.input_tokens - have;
    sums.useful_tokens += node.cache.tokens(sequence);
    sums.reserved_tokens += node.cache.blocks(sequence).size() * node.cache.block_tokens();
    node.cache.release(sequence).value();
    node.tiers.settle();
  }
  void count(replay_result& sums) {
    for (auto& each : nodes_) {
      const llmmem::paged_stats stats = each->cache.stats();
      sums.evictions += stats.evictions;
      sums.peak_metadata_bytes += stats.metadata_bytes + stats.verification_bytes;
      sums.verified_blocks += each->tiers.verified_blocks();
      const llmmem::pool::stats pool = each->tiers.pool_stats();
      sums.pool->posted_messages += pool.posted_messages;
      sums.pool->asked_spans += pool.asked_spans;
      sums.pool->directory_spans += pool.directory_spans;
    }
  }

 private:
  void drive() {
    for (auto& each : nodes_)
      each->tiers.progress();
  }

  llmmem::thread_network net_;
  bool is_pool_;
  std::vector<std::unique_ptr<llmmem::thread_endpoint>> ends_;
  std::vector<std::unique_ptr<replay_node>> nodes_;
};

/// Replays the trace over the nodes alternately, first with separate nodes, then as a pool.
inline void replay_nodes(const trace& from, std::span<const llmmem::block_key> keys,
                         const replay_options& options, replay_result& sums,
                         const replay_progress& progress) {
  const auto run = [&](bool is_pool, replay_result& into) {
    replay_cluster cluster(from, options, into.capacity_blocks, into.block_tokens, is_pool);
    std::size_t first = 0;
    for (std::size_t r = 0; r < from.size(); ++r) {
      const request asked = from[r];
      const std::size_t count = asked.block_ids.size();
      llmmem::keyed_blocks prompt{.keys = keys.subspan(first, count)};
      prompt.tokens = asked.hashed_tokens;
      first += count;
      into.block_refs += count;
      cluster.serve(r, asked, prompt, into);
      if (r % 256 == 255) progress((r + 1 + (is_pool ? from.size() : 0)) / 2);
    }
    cluster.count(into);
  };
  sums.tiers.emplace();
  sums.pool = pool_hits{.nodes = options.tiers->nodes};
  sums.block_bytes = options.tiers->block_bytes;
  replay_result alone = sums;
  run(false, alone);
  const auto start = std::chrono::steady_clock::now();
  run(true, sums);
  sums.elapsed_ns = static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start).count());
  sums.pool->local_hits = alone.hits + alone.host_hits + alone.nvme_hits;
  progress(from.size());
}

}  // namespace detail
}  // namespace replay_trace
