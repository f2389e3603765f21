/// @file
/// A trace served by a journaled cache of a model of which half of the layers read a window.
#pragma once

#include <llmmem/error.hpp>
#include <llmmem/eviction/any.hpp>
#include <llmmem/paging/hybrid_allocator.hpp>
#include <llmmem/paging/hybrid_what_if.hpp>
#include <llmmem/paging/journal.hpp>
#include <llmmem/paging/journal_replay.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "cache_journal/record.hpp"
#include "replay_trace/trace.hpp"

namespace cache_journal {

using group_cache = llmmem::hybrid_allocator<llmmem::paging::hybrid_what_if_traits>;

/// Makes the eviction policy of every group by its name.
struct named_policy {
  std::string name;
  llmmem::any_eviction operator()(llmmem::slot_count slots, const llmmem::metadata_source& source) const {
    return llmmem::make_eviction(name, slots, source);
  }
};

/// The cache that a journal was written from: the header's configuration is the policy.
[[nodiscard]] inline group_cache make_group_cache(const llmmem::paging::hybrid_journal_header& header) {
  return group_cache(header.options, named_policy{header.configuration});
}

/// Places of a page: a block of either group is one byte of bookkeeping.
inline constexpr std::uint64_t group_page_bytes = 16;

/// The budget of `capacity` blocks of the trace, in both groups, in addition to the longest request.
[[nodiscard]] inline std::uint64_t group_budget(std::uint64_t capacity, std::uint64_t longest) {
  const std::uint64_t blocks = llmmem::checked_add(capacity, longest, "capacity + request");
  const std::uint64_t pages = blocks / group_page_bytes + 2;  // an unfilled one and the null page
  return llmmem::checked_multiply(llmmem::checked_multiply(pages, 2, "pages"), group_page_bytes, "budget");
}

/// Returns the journal of a cache under `policy` that serves `from`, one request at a time. A token of the
/// cache is a block of the trace: an id names the block, and everything before it.
/// @param window  blocks of the trace that half of the layers read.
[[nodiscard]] inline std::vector<std::byte> record_groups(const replay_trace::trace& from,
                                                          std::uint64_t capacity, std::uint64_t window,
                                                          const std::string& policy = "lru") {
  const auto blocks_of = [&](std::uint64_t tokens) {
    return (tokens + from.block_tokens() - 1) / from.block_tokens();
  };
  std::uint64_t longest = 1;
  for (std::size_t r = 0; r < from.size(); ++r) {
    const std::uint64_t prompt =
        std::max<std::uint64_t>(from[r].block_ids.size(), blocks_of(from[r].input_tokens));
    longest = std::max(longest, prompt + blocks_of(from[r].output_tokens));
  }
  const std::array<llmmem::layer_group, 2> groups{
      llmmem::layer_group{.name = "full", .block_tokens = 1, .block_bytes = 1},
      llmmem::layer_group{.name = "window",
                          .kind = llmmem::layer_kind::sliding_window,
                          .reach = window,
                          .block_tokens = 1,
                          .block_bytes = 1}};
  const llmmem::hybrid_options options{.groups = groups,
                                       .budget_bytes = group_budget(capacity, longest),
                                       .page_bytes = group_page_bytes,
                                       .max_sequences = 1,
                                       .max_sequence_tokens = longest,
                                       .name = "journal"};
  std::vector<std::byte> bytes;
  llmmem::paging::journaled<group_cache, llmmem::callback_journal> cache(options, sink_to(bytes), policy,
                                                                         named_policy{policy});
  std::unordered_map<std::uint64_t, llmmem::token_id> numbers;
  std::vector<llmmem::token_id> prompt;
  for (std::size_t r = 0; r < from.size(); ++r) {
    const replay_trace::request asked = from[r];
    prompt.clear();
    for (const std::uint64_t id : asked.block_ids)
      prompt.push_back(numbers.try_emplace(id, static_cast<llmmem::token_id>(numbers.size())).first->second);
    const llmmem::sequence_id sequence = cache.create().value();
    const llmmem::match_result hit = cache.match(sequence, prompt).value();
    cache.append(sequence, std::span(prompt).subspan(static_cast<std::size_t>(hit.tokens))).value();
    cache.commit(sequence).value();
    cache.extend(sequence, blocks_of(asked.output_tokens)).value();
    cache.release(sequence).value();
  }
  cache.checkpoint();
  if (!cache.recording()) throw llmmem::out_of_memory("journal: no memory for its bytes");
  return bytes;
}

/// Whether these bytes are the journal of a cache with groups of layers.
[[nodiscard]] inline bool is_of_groups(std::span<const std::byte> journal) {
  try {
    static_cast<void>(llmmem::paging::hybrid_journal_reader(journal));
    return true;
  } catch (const llmmem::journal_error&) {
    return false;
  }
}

}  // namespace cache_journal
