/// @file
/// Runs a journal under other configurations, to find the eviction policy and the size with more hits.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/eviction/any.hpp>
#include <llmmem/paging/detail/what_if_run.hpp>
#include <llmmem/paging/journal_replay.hpp>
#include <llmmem/paging/journal_types.hpp>
#include <llmmem/paging/paged_allocator.hpp>
#include <llmmem/paging/what_if_result.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The policies of the caches that `what_if` runs; inherit from it to change all but eviction and fence.
struct what_if_traits : paged_traits {
  using eviction = any_eviction;
  using fence = recorded_fence;
};

/// What to change in addition to the policy; empty: as in the journal's cache.
struct what_if_options {
  std::optional<std::uint64_t> blocks{};  ///< if set, the journal's `resize` calls are skipped
  std::optional<std::uint64_t> max_idle_blocks{};
};

/// Runs a journal's operations under each of `policies`, and returns the hits of each.
///
/// The requests are the recorded ones, but the cache differs, so a `match` may find more or fewer tokens than
/// it did. The run appends missing tokens and subtracts surplus tokens from the next append, so every
/// sequence holds its original tokens. It skips compactions, and operations that the original cache refused.
/// It drops and counts a sequence for which this cache has no space (`skipped`); results with many of those
/// are not comparable.
///
/// MIN, the policy "min", receives the time of the next match of each key: a bound for prompts matched by
/// keys. It cannot foresee those matched by tokens.
///
///     const auto table = llmmem::what_if(bytes, llmmem::eviction_names, {.max_idle_blocks = 8192});
///
/// @tparam Traits  `Traits::eviction` is `any_eviction`, `Traits::fence` `recorded_fence`.
/// @return one result per policy, in their order.
/// @par Complexity   that of the operations for each policy; allocates.
/// @par Errors   `journal_error` for a header that cannot be read, `argument_error` for an unknown policy,
///   and what the allocator's constructor throws. A bad tail ends the journal where `journal_reader` reports
///   it.
template <class Traits = what_if_traits>
[[nodiscard]] std::vector<what_if_result> what_if(std::span<const std::byte> bytes,
                                                  std::span<const std::string_view> policies,
                                                  const what_if_options& other = {}) {
  static_assert(std::is_same_v<typename Traits::eviction, any_eviction>);
  static_assert(std::is_same_v<typename Traits::fence, recorded_fence>);
  paged_options options = journal_reader(bytes).header().options;
  if (other.blocks) options.blocks = options.block_capacity = *other.blocks;
  if (other.max_idle_blocks) options.max_idle_blocks = *other.max_idle_blocks;
  const slot_count slots{std::max(options.blocks, options.block_capacity) + 1};

  std::optional<detail::key_uses> uses;
  std::vector<what_if_result> out;
  for (const std::string_view policy : policies) {
    if (policy == "min" && !uses) uses.emplace(bytes);
    std::uint64_t passed = 0;
    paged_allocator<Traits> cache(options, make_eviction(policy, slots));
    detail::what_if_run run(cache, passed, options.max_sequences, !other.blocks,
                            policy == "min" ? &*uses : nullptr);
    run.run(bytes);
    const paged_stats stats = cache.stats();
    out.push_back({.policy = std::string(policy),
                   .requested_tokens = run.requested_tokens(),
                   .requested_blocks = stats.requested_blocks,
                   .hit_tokens = stats.hit_tokens,
                   .hit_blocks = stats.hit_blocks,
                   .evictions = stats.evictions,
                   .sequences = run.sequences(),
                   .skipped = run.skipped()});
  }
  return out;
}

}  // namespace v0
}  // namespace llmmem
