/// @file
/// A trace served by a journaled cache, request by request.
#pragma once

#include <llmmem/error.hpp>
#include <llmmem/eviction/any.hpp>
#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/journal.hpp>
#include <llmmem/paging/journal_replay.hpp>
#include <llmmem/paging/journal_what_if.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "replay_trace/trace.hpp"

namespace cache_journal {

/// Keys instead of tokens, as traces have them.
struct cache_traits : llmmem::what_if_traits {
  using verification = llmmem::trust_hash;
};
using cache_type = llmmem::paged_allocator<cache_traits>;

/// The cache that a journal was written from: the header's configuration is the policy.
[[nodiscard]] inline cache_type make_cache(const llmmem::journal_header& header) {
  const llmmem::slot_count slots{std::max(header.options.blocks, header.options.block_capacity) + 1};
  return {header.options, llmmem::make_eviction(header.configuration, slots)};
}

/// A sink that appends to `bytes`.
[[nodiscard]] inline llmmem::callback_journal sink_to(std::vector<std::byte>& bytes) {
  return {.call =
              [](void* context, std::span<const std::byte> more) noexcept {
                auto& to = *static_cast<std::vector<std::byte>*>(context);
                try {
                  to.insert(to.end(), more.begin(), more.end());
                } catch (...) {
                  return false;  // the journal ends here, the cache continues
                }
                return true;
              },
          .context = &bytes};
}

/// Returns the journal of an LRU cache that serves `from`, one request at a time. The capacity counts the
/// unused blocks that keep their contents, as in `replay_trace`.
[[nodiscard]] inline std::vector<std::byte> record(const replay_trace::trace& from, std::uint64_t capacity) {
  std::uint64_t longest = 1;
  for (std::size_t r = 0; r < from.size(); ++r)
    longest = std::max(longest, from[r].input_tokens + from[r].output_tokens);
  const std::uint64_t at_work = longest / from.block_tokens() + 1;
  const llmmem::paged_options options{.blocks = llmmem::checked_add(capacity, at_work, "capacity + request"),
                                      .block_tokens = from.block_tokens(),
                                      .max_sequences = 1,
                                      .max_sequence_tokens = longest,
                                      .max_idle_blocks = capacity,
                                      .name = "journal"};
  std::vector<std::byte> bytes;
  llmmem::paging::journaled<cache_type, llmmem::callback_journal> cache(
      options, sink_to(bytes), "lru", llmmem::make_eviction("lru", llmmem::slot_count{options.blocks + 1}));

  std::vector<llmmem::block_key> keys;
  for (std::size_t r = 0; r < from.size(); ++r) {
    const replay_trace::request asked = from[r];
    keys.clear();
    for (const std::uint64_t id : asked.block_ids)
      keys.push_back(llmmem::key_from_id(id));
    const llmmem::keyed_blocks prompt{.keys = keys, .tokens = asked.hashed_tokens};
    const llmmem::sequence_id sequence = cache.create().value();
    const llmmem::match_result hit = cache.match(sequence, prompt).value();
    cache.extend(sequence, asked.input_tokens - hit.tokens).value();
    cache.commit(sequence, prompt).value();
    cache.extend(sequence, asked.output_tokens).value();
    cache.release(sequence).value();
  }
  cache.checkpoint();
  if (!cache.recording()) throw llmmem::out_of_memory("journal: no memory for its bytes");
  return bytes;
}

}  // namespace cache_journal
