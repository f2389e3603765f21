/// @file
/// The interface between the code that reads and reports a trace and the code that drives the allocator.
#pragma once

#include <llmmem/eviction/any.hpp>

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "replay_trace/tier_blocks.hpp"
#include "replay_trace/trace.hpp"

namespace replay_trace {

/// One replay: a trace against one eviction policy at one capacity.
struct replay_options {
  std::string policy = "lru";                      ///< one of `policy_names` or `lookahead_names`
  std::optional<std::uint64_t> capacity_blocks{};  ///< empty: as many as needed, without evictions
  std::uint32_t block_tokens = 16;                 ///< the trace's own for a trace with block ids
  std::uint64_t seed = 1;                          ///< seed of all random numbers
  std::optional<tier_blocks> tiers{};              ///< tiers below the cache, for evicted blocks
};

/// The policies, in the order of reports.
inline constexpr auto policy_names = llmmem::eviction_names;

/// LRU with knowledge of the next requests, which shows the value of seeing the waiting queue. Not among
/// "all".
inline constexpr std::array<std::string_view, 5> lookahead_names{
    "lookahead_4", "lookahead_16", "lookahead_64", "lookahead_256", "lookahead_1024"};

/// Prompt tokens by where their keys and values came from.
struct tokens_by_tier {
  std::uint64_t hbm = 0;
  std::uint64_t host = 0;
  std::uint64_t nvme = 0;
  std::uint64_t computed = 0;
};

/// The hits of nodes that pass blocks to each other, and those of the same nodes alone.
struct pool_hits {
  std::uint32_t nodes = 0;
  std::uint64_t peer_hits = 0;  ///< blocks that came from other nodes
  std::uint64_t peer_tokens = 0;
  std::uint64_t local_hits = 0;       ///< blocks that nodes without a pool find in cache and tiers together
  std::uint64_t posted_messages = 0;  ///< small messages between nodes
  std::uint64_t asked_spans = 0;      ///< questions to the directory
  std::uint64_t directory_spans = 0;  ///< spans that the directory remembers at the end
};

/// The counts of one replay. Every field is a plain sum, so that results can be compared and printed
/// anywhere.
struct replay_result {
  std::string policy;
  std::optional<std::uint64_t> capacity_limit;  ///< the requested capacity; empty for unlimited
  std::uint64_t capacity_blocks = 0;            ///< the limit, or for unlimited the trace's distinct blocks
  std::uint32_t block_tokens = 0;

  std::uint64_t requests = 0;
  std::uint64_t block_refs = 0;      ///< requested prompt blocks; a short last one counts as one
  std::uint64_t hits = 0;            ///< of these, blocks found at their place in an unbroken cached prefix
  std::uint64_t input_tokens = 0;    ///< prompt tokens
  std::uint64_t output_tokens = 0;   ///< answer tokens
  std::uint64_t matched_tokens = 0;  ///< prompt tokens in hit blocks, which need not be computed again
  std::uint64_t evictions = 0;       ///< cached blocks evicted for space

  std::uint64_t useful_tokens = 0;    ///< sum over requests, at their end, of tokens held
  std::uint64_t reserved_tokens = 0;  ///< sum over requests, at their end, of token slots reserved for them

  std::optional<tokens_by_tier> tiers{};  ///< if there are tiers below the cache
  std::uint64_t host_hits = 0;            ///< blocks found in the tiers, after those of the cache
  std::uint64_t nvme_hits = 0;
  std::optional<pool_hits> pool{};    ///< if several nodes serve the trace
  std::uint64_t block_bytes = 0;      ///< bytes of a block in the tiers
  std::uint64_t verified_blocks = 0;  ///< blocks that came back, each byte of which was checked

  std::uint64_t elapsed_ns = 0;           ///< of the replay loop alone
  std::uint64_t peak_metadata_bytes = 0;  ///< pool, index and policy at their largest

  /// Empty if the trace requested no block.
  [[nodiscard]] std::optional<double> hit_ratio() const noexcept { return ratio(hits, block_refs); }
  /// 1 minus the internal fragmentation; empty if nothing was reserved.
  [[nodiscard]] std::optional<double> useful_over_reserved() const noexcept {
    return ratio(useful_tokens, reserved_tokens);
  }
  [[nodiscard]] std::optional<double> ns_per_block_ref() const noexcept {
    return ratio(elapsed_ns, block_refs);
  }

 private:
  static std::optional<double> ratio(std::uint64_t part, std::uint64_t whole) noexcept {
    if (whole == 0) return std::nullopt;
    return static_cast<double>(part) / static_cast<double>(whole);
  }
};

/// Called from time to time with the number of finished requests; at least once, at the end.
using replay_progress = std::function<void(std::uint64_t requests_done)>;

}  // namespace replay_trace
