/// @file
/// The cache that a trace is replayed through: its policies, its size, and when each block is used next.
#pragma once

#include <llmmem/error.hpp>
#include <llmmem/eviction/any.hpp>
#include <llmmem/eviction/queue_lookahead.hpp>
#include <llmmem/offload/tier_link.hpp>
#include <llmmem/paged_allocator.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "replay_trace/replay.hpp"
#include "replay_trace/trace.hpp"

namespace replay_trace {

namespace detail {

/// The policy by name, and no tokens to verify, because a trace has keys instead of tokens.
struct replay_traits : llmmem::paged_traits {
  using eviction = llmmem::any_eviction;
  using verification = llmmem::trust_hash;
  using observer = llmmem::offload::tier_link;
};

using replay_cache = llmmem::paged_allocator<replay_traits>;

/// A policy that sees `n` requests of the waiting queue.
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

/// For each block reference, the number of the next request that refers to the same id. MIN uses all of it,
/// and the policies that see the queue use the queued part. O(ids).
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

/// The keys of a trace's block references, in order.
[[nodiscard]] inline std::vector<llmmem::block_key> keys_of(const trace& from) {
  std::vector<llmmem::block_key> keys;
  keys.reserve(from.block_ids().size());
  for (const std::uint64_t id : from.block_ids())
    keys.push_back(llmmem::key_from_id(id));
  return keys;
}

/// The allocator for `options`.
///
/// The capacity is that of the cache: unused blocks that keep their contents. The present request uses
/// further blocks, as a server's running requests do.
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

}  // namespace detail

}  // namespace replay_trace
