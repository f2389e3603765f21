/// @file
/// Bodies of hybrid_allocator.hpp: construction, creation and release of sequences, queries. Only
/// hybrid_allocator.hpp includes it.
#pragma once

#include <llmmem/paging/errors.hpp>
#include <llmmem/paging/hybrid_allocator.hpp>

#include <cstring>
#include <numeric>
#include <optional>
#include <utility>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// Returns the groups of `options` after checking every number in them.
[[nodiscard]] inline std::array<layer_group, max_layer_groups> checked_groups(const hybrid_options& options) {
  if (options.groups.empty() || options.groups.size() > max_layer_groups) {
    throw length_error(options.name + ": " + std::to_string(options.groups.size()) + " groups; use 1 to " +
                       std::to_string(max_layer_groups));
  }
  std::array<layer_group, max_layer_groups> all{};
  for (std::size_t g = 0; g < options.groups.size(); ++g) {
    options.groups[g].validate();
    all[g] = options.groups[g];
    if (all[g].block_tokens > max_block_tokens) {
      throw length_error(options.name + ": blocks of " + std::to_string(all[g].block_tokens) +
                         " tokens in group " + std::string(all[g].name) + "; use 1 to " +
                         std::to_string(max_block_tokens));
    }
  }
  if (options.max_sequences == 0)
    throw length_error(options.name + ": max_sequences is 0; at least 1 is needed");
  if (options.max_sequence_tokens == 0) {
    throw length_error(options.name + ": max_sequence_tokens is 0; at least 1 is needed");
  }
  return all;
}

/// The options of the pool, with storage for the sizes that they refer to.
struct pool_plan {
  explicit pool_plan(const hybrid_options& options) {
    for (std::size_t g = 0; g < options.groups.size(); ++g)
      sizes[g] = options.groups[g].block_bytes;
    pool = {.budget_bytes = options.budget_bytes,
            .budget_capacity_bytes = options.budget_capacity_bytes,
            .page_bytes = options.page_bytes,
            .block_bytes = std::span(sizes).first(options.groups.size()),
            .name = options.name,
            .metadata = options.metadata};
  }
  pool_plan(const pool_plan&) = delete;
  pool_plan& operator=(const pool_plan&) = delete;

  std::array<std::uint64_t, max_layer_groups> sizes{};
  super_page_options pool{};
};

[[nodiscard]] inline std::uint32_t common_tokens(std::span<const layer_group> groups) noexcept {
  std::uint32_t common = 0;
  for (const layer_group& each : groups)
    common = std::gcd(common, each.block_tokens);
  return common;
}

/// The number of chunks that the prefix chain has space for: as many as the group with the fewest bytes per
/// chunk could cache with the whole budget, and, if living sequences may have more tokens than blocks, the
/// chunks of those sequences.
[[nodiscard]] inline std::uint64_t most_chunks(const hybrid_options& options) noexcept {
  const std::uint32_t chunk = common_tokens(options.groups);
  const std::uint64_t longest = options.max_sequence_tokens / chunk;
  if (options.max_chunks != 0) return options.max_chunks > longest ? options.max_chunks : longest;
  std::uint64_t most = 1;
  bool looks_at_all = false;
  for (const layer_group& each : options.groups) {
    const std::uint64_t blocks =
        (budget_capacity(options) / options.page_bytes - 1) * (options.page_bytes / each.block_bytes);
    const std::uint64_t nodes = blocks * (each.block_tokens / chunk);
    if (nodes > most) most = nodes;
    looks_at_all = looks_at_all || each.kind == layer_kind::full_attention;
  }
  if (!looks_at_all) most += longest < max_blocks ? longest * options.max_sequences : max_blocks;
  if (most < longest) most = longest;
  return most < max_blocks ? most : max_blocks;
}

}  // namespace detail

/// Returns the upper limit of block ids in a `hybrid_allocator` built from `options` (all ids are below it):
/// the size of a table by block, for example in an observer.
/// @throws length_error  as its constructor does.
[[nodiscard]] inline std::uint64_t block_ids(const hybrid_options& options) {
  static_cast<void>(detail::checked_groups(options));
  const detail::pool_plan plan(options);
  return detail::budget_capacity(options) / options.page_bytes << detail::checked_layout(plan.pool).shift;
}

template <class Traits>
hybrid_allocator<Traits>::hybrid_allocator(const hybrid_options& options, observer_type observer)
    : hybrid_allocator(
          options,
          [](slot_count slots, const metadata_source& source) { return eviction_type(slots, source); },
          std::move(observer)) {}

template <class Traits>
template <class Make>
hybrid_allocator<Traits>::hybrid_allocator(const hybrid_options& options, Make&& make, observer_type observer)
    : groups_(detail::checked_groups(options)),
      group_count_(options.groups.size()),
      pool_(detail::pool_plan(options).pool, make),
      chunk_tokens_(detail::common_tokens(options.groups)),
      chain_(detail::most_chunks(options), chunk_tokens_, group_count_, options.seed, options.metadata),
      node_of_(pool_.block_ids(), options.metadata, "hybrid_allocator: nodes of blocks"),
      max_sequence_tokens_(options.max_sequence_tokens),
      epoch_(options.epoch),
      records_(options.max_sequences, options.metadata, "hybrid_allocator: sequences"),
      path_(options.max_sequence_tokens / chunk_tokens_, options.metadata,
            "hybrid_allocator: nodes of a sequence"),
      copies_(std::uint64_t{options.max_sequences} * group_count_, options.metadata,
              "hybrid_allocator: copies"),
      deferred_(options.max_deferred == unlimited ? pool_.block_ids() : options.max_deferred,
                std::uint64_t{options.max_sequences} * 4, options.metadata),
      pins_(pool_.block_ids(), options.metadata),
      observer_(std::move(observer)) {
  static_assert(eviction_factory<Make, eviction_type>, "make(slots, source) must return a Traits::eviction");
  for (std::size_t g = 0; g < group_count_; ++g) {
    per_block_[g] = divider(groups_[g].block_tokens);
    sink_blocks_[g] = groups_[g].sink_blocks();
    row_first_[g] = row_entries_;
    row_entries_ += groups_[g].blocks_for(max_sequence_tokens_) + 1;
  }
  if constexpr (retains<eviction_type>) {
    retained_ = detail::fixed_array<detail::retained_ranges>(options.max_sequences, options.metadata,
                                                             "hybrid_allocator: retained ranges");
  }
  rows_ = detail::fixed_array<block_id>(
      checked_multiply(row_entries_, options.max_sequences, "hybrid_allocator: block tables"),
      options.metadata, "hybrid_allocator: block tables");
  tokens_ = detail::fixed_array<token_id>(
      checked_multiply(max_sequence_tokens_, options.max_sequences, "hybrid_allocator: tokens"),
      options.metadata, "hybrid_allocator: tokens");
}

// Creation and release of sequences

template <class Traits>
result<sequence_id> hybrid_allocator<Traits>::create(const prefix_context& context,
                                                     const request_hints& hints) noexcept {
  if (hints.keep.priority > retention::max_priority)
    return refusal(errc::bad_priority, 0, hints.keep.priority, retention::max_priority);
  const std::uint32_t slot = records_.acquire(
      record{.epoch = epoch_, .at = chain_.root(context, epoch_), .context = context, .hints = hints});
  if (slot == detail::no_index) return refusal(errc::out_of_sequences, 0, 1, records_.live());
  if constexpr (retains<eviction_type>) retained_[slot].count = 0;
  return records_.handle(slot);
}

template <class Traits>
result<sequence_id> hybrid_allocator<Traits>::fork(sequence_id parent) noexcept {
  if (const auto alive = check(parent); !alive) return alive.error();
  const record& original = records_[parent.slot];
  for (std::size_t g = 0; g < group_count_; ++g) {
    for (const block_id block : table(parent, g)) {
      const std::uint32_t references = pool_.record(block).references();
      if (block != null_block && references == block_record::max_references) {
        return refusal(errc::too_many_shares, to_index(block), 1, references);
      }
    }
  }
  const std::uint32_t slot = records_.acquire(original);
  if (slot == detail::no_index) return refusal(errc::out_of_sequences, 0, 1, records_.live());
  for (std::size_t g = 0; g < group_count_; ++g) {
    const auto held = table(parent, g);
    std::memcpy(row(slot, g), held.data(), held.size_bytes());
    for (const block_id block : held) {
      if (block != null_block) static_cast<void>(pool_.share(block));  // cannot fail: checked above
    }
  }
  std::memcpy(tokens_.data() + slot * max_sequence_tokens_,
              tokens_.data() + parent.slot * max_sequence_tokens_, original.tokens * sizeof(token_id));
  records_[slot].hold = ~std::uint64_t{0};
  if constexpr (retains<eviction_type>) retained_[slot] = retained_[parent.slot];
  chain_.share(original.at.node);
  counters_.tokens += original.tokens;
  return records_.handle(slot);
}

template <class Traits>
result<void> hybrid_allocator<Traits>::release(sequence_id sequence) noexcept {
  if (const auto alive = check(sequence); !alive) return alive.error();
  commit_again(sequence.slot);
  if (const auto gone = give_back(sequence.slot, 0); !gone) return gone;
  counters_.tokens -= records_[sequence.slot].tokens;
  chain_.release(records_[sequence.slot].at.node);
  records_.release(sequence.slot);
  return {};
}

// What a sequence holds

template <class Traits>
std::span<const block_id> hybrid_allocator<Traits>::table(sequence_id sequence,
                                                          std::size_t group) const noexcept {
  if (!check(sequence)) return {};
  return {row(sequence.slot, group), blocks_for(group, records_[sequence.slot].tokens)};
}

template <class Traits>
result<std::uint64_t> hybrid_allocator<Traits>::write_table(sequence_id sequence, std::size_t group,
                                                            std::span<std::int32_t> out) const noexcept {
  if (const auto alive = check(sequence); !alive) return alive.error();
  const auto held = table(sequence, group);
  if (out.size() < held.size()) return refusal(errc::size_mismatch, 0, out.size(), held.size());
  for (std::size_t i = 0; i < held.size(); ++i)
    out[i] = pool_.unit_index(held[i]);
  for (auto& padding : out.subspan(held.size()))
    padding = 0;
  return held.size();
}

template <class Traits>
hybrid_stats hybrid_allocator<Traits>::stats() const noexcept {
  const super_page_stats pages = pool_.stats();
  return {.sequences = records_.live(),
          .tokens = counters_.tokens,
          .chunks = chain_.size(),
          .matches = counters_.matches,
          .hit_tokens = counters_.hit_tokens,
          .registrations = counters_.registrations,
          .duplicates = counters_.duplicates,
          .released_early = counters_.released_early,
          .invalidated = counters_.invalidated,
          .deferred = deferred_.held(),
          .copies = counters_.copies,
          .deduplicated = counters_.deduplicated,
          .pages = pages,
          .metadata_bytes = pages.metadata_bytes + chain_.metadata_bytes() + node_of_.bytes() +
                            records_.bytes() + rows_.bytes() + tokens_.bytes() + path_.bytes() +
                            copies_.bytes() + deferred_.metadata_bytes() + pins_.bytes() + retained_.bytes(),
          .verification_bytes = chain_.verification_bytes()};
}

}  // namespace v0
}  // namespace llmmem

#include <llmmem/paging/detail/hybrid_allocator_audit.hpp>
#include <llmmem/paging/detail/hybrid_allocator_cache.hpp>
#include <llmmem/paging/detail/hybrid_allocator_cut.hpp>
#include <llmmem/paging/detail/hybrid_allocator_fences.hpp>
#include <llmmem/paging/detail/hybrid_allocator_growth.hpp>
#include <llmmem/paging/detail/hybrid_allocator_resize.hpp>
#include <llmmem/paging/detail/hybrid_allocator_reuse.hpp>
#include <llmmem/paging/detail/hybrid_allocator_withdrawal.hpp>
