/// @file
/// Runs a `hybrid_allocator`'s journal under other configurations: eviction policies, budgets, page sizes.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/eviction/any.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/paging/detail/what_if_run.hpp>
#include <llmmem/paging/hybrid_allocator.hpp>
#include <llmmem/paging/journal_reader.hpp>
#include <llmmem/paging/journal_types.hpp>
#include <llmmem/paging/what_if_result.hpp>

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
namespace paging {

/// The policies of the caches that `hybrid_what_if` runs; inherit from it to change all but eviction and
/// fence.
struct hybrid_what_if_traits : hybrid_traits {
  using eviction = any_eviction;
  using fence = recorded_fence;
};

/// What to change in addition to the policy; empty: as in the journal's cache.
struct hybrid_what_if_options {
  /// If set, the journal's `resize` calls are skipped, and the chain's capacity follows from it, see
  /// `hybrid_options::max_chunks`.
  std::optional<std::uint64_t> budget_bytes{};
  std::optional<std::uint64_t> page_bytes{};
};

/// Runs the operations of a `hybrid_allocator`'s journal under each of `policies`, and returns the hits of
/// each, see `what_if`.
///
/// The tokens that a match finds here but did not find originally are subtracted from the next append; those
/// that it does not find are appended with it. So every sequence holds its original tokens, and a step that
/// follows a match is as long as the engine's would have been. A sequence is dropped and counted (`skipped`)
/// when this cache has no space for it, and when it cannot be cut to a length to which the original was cut,
/// because a group no longer has what the next token reads.
///
///     const auto table = llmmem::paging::hybrid_what_if(bytes, llmmem::eviction_names,
///                                                       {.page_bytes = 4 << 20});
///
/// Prompts are matched by tokens, so MIN, the policy "min", cannot foresee them.
///
/// @tparam Traits  `Traits::eviction` is `any_eviction`, `Traits::fence` `recorded_fence`.
/// @return one result per policy, in their order; `requested_blocks` and `hit_blocks` are 0, because a prefix
///   has different blocks in each group.
/// @par Complexity   that of the operations for each policy; allocates.
/// @par Errors   `journal_error` for a header that cannot be read and for the journal of a `paged_allocator`,
///   `argument_error` for an unknown policy, and what the allocator's constructor throws. A bad tail ends the
///   journal where `basic_journal_reader` reports it.
template <class Traits = hybrid_what_if_traits>
[[nodiscard]] std::vector<what_if_result> hybrid_what_if(std::span<const std::byte> bytes,
                                                         std::span<const std::string_view> policies,
                                                         const hybrid_what_if_options& other = {}) {
  static_assert(std::is_same_v<typename Traits::eviction, any_eviction>);
  static_assert(std::is_same_v<typename Traits::fence, recorded_fence>);
  const hybrid_journal_reader reader(bytes);
  hybrid_options options = reader.header().options;
  if (other.budget_bytes) {
    options.budget_bytes = *other.budget_bytes;
    options.budget_capacity_bytes = 0;
    options.max_chunks = 0;
  }
  if (other.page_bytes) options.page_bytes = *other.page_bytes;

  std::vector<what_if_result> out;
  for (const std::string_view policy : policies) {
    std::uint64_t passed = 0;
    hybrid_allocator<Traits> cache(options, [&](slot_count slots, const metadata_source& source) {
      return make_eviction(policy, slots, source);
    });
    detail::what_if_run run(cache, passed, options.max_sequences, !other.budget_bytes, nullptr);
    run.run(bytes);
    const hybrid_stats stats = cache.stats();
    out.push_back({.policy = std::string(policy),
                   .requested_tokens = run.requested_tokens(),
                   .hit_tokens = stats.hit_tokens,
                   .evictions = stats.pages.evictions,
                   .sequences = run.sequences(),
                   .skipped = run.skipped()});
  }
  return out;
}

}  // namespace paging
}  // namespace v0
}  // namespace llmmem
