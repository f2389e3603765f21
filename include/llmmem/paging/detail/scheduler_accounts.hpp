/// @file
/// What a `batch_scheduler` counts: the blocks of a cache with one size of blocks, or of each group of
/// layers.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/failure.hpp>
#include <llmmem/paging/hybrid_types.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/paging/layer_group.hpp>
#include <llmmem/paging/paged_types.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// A cache whose layers form groups with blocks of their own: a `hybrid_allocator`.
template <class Cache>
concept grouped_cache = requires(Cache& cache, sequence_id sequence, std::span<group_shortage> lacks) {
  cache.groups();
  cache.shortage(std::span<const hybrid_growth>{}, lacks);
  cache.limit_releases(sequence, 0);
};

/// A cache with blocks of one size: a `paged_allocator`.
template <class Cache>
concept uniform_cache = requires(const Cache& cache, sequence_id sequence) {
  cache.block_tokens();
  cache.blocks(sequence);
  cache.pool().available();
};

/// What a count of blocks lacks, in the first group that lacks some.
struct block_lack {
  bool any = false;
  std::uint32_t group = 0;
  std::uint64_t needed = 0;
  std::uint64_t available = 0;
};

template <std::size_t Groups>
using block_counts = std::array<std::uint64_t, Groups>;

template <std::size_t Groups>
constexpr void add_counts(block_counts<Groups>& to, const block_counts<Groups>& more) noexcept {
  for (std::size_t g = 0; g < Groups; ++g)
    to[g] += more[g];
}

template <std::size_t Groups>
[[nodiscard]] constexpr std::uint64_t sum_of(const block_counts<Groups>& counts) noexcept {
  std::uint64_t sum = 0;
  for (const std::uint64_t each : counts)
    sum += each;
  return sum;
}

/// Whether `coming` has what `missing` lacks in every group.
template <std::size_t Groups>
[[nodiscard]] constexpr bool covers(const block_counts<Groups>& coming,
                                    const block_counts<Groups>& missing) noexcept {
  for (std::size_t g = 0; g < Groups; ++g) {
    if (missing[g] > coming[g]) return false;
  }
  return true;
}

/// Whether blocks of a group that lacks some are among `own`.
template <std::size_t Groups>
[[nodiscard]] constexpr bool helps(const block_counts<Groups>& own,
                                   const block_counts<Groups>& missing) noexcept {
  for (std::size_t g = 0; g < Groups; ++g) {
    if (missing[g] != 0 && own[g] != 0) return true;
  }
  return false;
}

/// Accounts of a cache with blocks of one size.
template <class Cache>
class scheduler_accounts {
 public:
  using counts = block_counts<1>;
  using growth = paging::growth;
  using grown = append_result;
  static constexpr bool is_grouped = false;

  explicit scheduler_accounts(Cache& cache) noexcept : cache_(&cache) {}

  [[nodiscard]] static bool is_short(error_code code) noexcept { return code == errc::out_of_blocks; }

  /// Whether the whole cache cannot hold a sequence of `tokens` tokens, computed `step` at a time.
  [[nodiscard]] block_lack lack_alone(std::uint64_t tokens, std::uint64_t = 1) const noexcept {
    const std::uint64_t needed = blocks_for(tokens);
    const std::uint64_t held = cache_->pool().blocks();
    return {.any = needed > held, .needed = needed, .available = held};
  }
  /// Whether `wanted` blocks, and `leave` more, are not available.
  [[nodiscard]] block_lack lack(const counts& wanted, std::uint64_t leave) const noexcept {
    const std::uint64_t available = cache_->pool().available();
    return {.any = leave > available || wanted[0] > available - leave,
            .needed = leave < max_blocks ? wanted[0] + leave : max_blocks,
            .available = available};
  }
  /// What a refused batch lacks.
  [[nodiscard]] counts missing(std::span<const growth>, const failure& why) const noexcept {
    return {why.wanted - why.found};
  }
  /// Blocks that no other sequence holds: what releasing the sequence brings.
  [[nodiscard]] counts own(sequence_id sequence) const noexcept {
    std::uint64_t blocks = 0;
    for (const block_id block : cache_->blocks(sequence))
      blocks += cache_->pool().record(block).references() == 1 ? 1U : 0U;
    return {blocks};
  }
  [[nodiscard]] counts deferred() const noexcept { return {cache_->stats().deferred}; }
  /// Blocks that a growth takes, including the block for a copy on write.
  [[nodiscard]] counts to_grow(const growth& each) const noexcept {
    const std::uint64_t tokens = cache_->tokens(each.sequence);
    const auto blocks = cache_->blocks(each.sequence);
    const bool copies =
        tokens % cache_->block_tokens() != 0 && cache_->pool().record(blocks.back()).references() > 1;
    return {blocks_for(tokens + each.tokens.size() + each.unknown_tokens) - blocks.size() + (copies ? 1 : 0)};
  }
  /// Blocks for all tokens of a request. The last token is always computed, because the next one needs it.
  [[nodiscard]] counts to_start(std::span<const token_id> tokens, const prefix_context& context,
                                std::uint64_t) const noexcept {
    const auto cacheable = tokens.first(tokens.size() - 1);
    const std::uint64_t last = cacheable.size() % cache_->block_tokens() == 0 ? 1 : 0;
    return {cache_->cost(cacheable, context).needed() + last};
  }
  /// Of the first `written` tokens, those that are computed again if the sequence is released. Blocks that
  /// other sequences hold stay cached.
  [[nodiscard]] std::uint64_t lost_tokens(sequence_id sequence, std::uint64_t written) const noexcept {
    const std::uint64_t tokens = own(sequence)[0] * cache_->block_tokens();
    return tokens < written ? tokens : written;
  }
  template <class Visit>
  static void each_copy(const grown& from, Visit&& visit) noexcept {
    if (from.copy) visit(from.copy);
  }

 private:
  [[nodiscard]] std::uint64_t blocks_for(std::uint64_t tokens) const noexcept {
    return tokens / cache_->block_tokens() + (tokens % cache_->block_tokens() != 0 ? 1 : 0);
  }

  Cache* cache_;
};

/// Returns the most blocks of `group` that a sequence holds at once while it grows to `tokens` tokens, by
/// steps of at most `step` tokens that are committed before the next.
[[nodiscard]] constexpr std::uint64_t peak_blocks(const layer_group& group, std::uint64_t tokens,
                                                  std::uint64_t step) noexcept {
  const std::uint64_t all = group.blocks_for(tokens);
  if (step > tokens) step = tokens;
  std::uint64_t most = all;
  switch (group.kind) {
    case layer_kind::sliding_window:
    case layer_kind::chunked_local: {
      if (group.reach > tokens) break;
      // The first token of a step reads from `reach` - 1 tokens before it on. Consecutive tokens touch more
      // blocks than they fill by one, unless they begin where a block does.
      const std::uint64_t row = group.reach - 1 + step;
      const bool is_aligned =
          group.kind == layer_kind::chunked_local && group.reach % group.block_tokens == 0;
      most = group.sink_blocks() + group.blocks_for(is_aligned ? row : row - 1) + (is_aligned ? 0 : 1);
      break;
    }
    case layer_kind::state_snapshots:
      most = 1 + (group.skips_blocks() ? 1 : group.blocks_for(step));
      break;
    case layer_kind::full_attention:
      break;
  }
  return most < all ? most : all;
}

/// Accounts of a cache with groups.
template <grouped_cache Cache>
class scheduler_accounts<Cache> {
 public:
  using counts = block_counts<max_layer_groups>;
  using growth = hybrid_growth;
  using grown = hybrid_append;
  static constexpr bool is_grouped = true;

  explicit scheduler_accounts(Cache& cache) noexcept : cache_(&cache) {}

  [[nodiscard]] static bool is_short(error_code code) noexcept { return code == errc::out_of_group_blocks; }

  [[nodiscard]] block_lack lack_alone(std::uint64_t tokens, std::uint64_t step = 1) const noexcept {
    std::uint64_t pages = cache_->pool().stats().pages;
    for (std::size_t g = 0; g < groups().size(); ++g) {
      const std::uint64_t in_page = cache_->layout().page_bytes / groups()[g].block_bytes;
      const std::uint64_t blocks = peak_blocks(groups()[g], tokens, step);
      if (blocks > pages * in_page)
        return {.any = true,
                .group = static_cast<std::uint32_t>(g),
                .needed = blocks,
                .available = pages * in_page};
      pages -= (blocks + in_page - 1) / in_page;
    }
    return {};
  }
  /// The first group that lacks blocks; if none does, the first that needs some.
  [[nodiscard]] block_lack lack(const counts& wanted, std::uint64_t leave) const noexcept {
    counts all = wanted;
    for (std::uint64_t& each : all)
      each += leave < max_blocks ? leave : max_blocks;
    std::array<group_shortage, max_layer_groups> lacks{};
    const std::size_t count = groups().size();
    const bool any = !cache_->pool().shortage(std::span(all).first(count), lacks);
    std::size_t g = 0;
    while (g + 1 < count && (any ? lacks[g].missing() : lacks[g].wanted) == 0)
      ++g;
    return {.any = any,
            .group = static_cast<std::uint32_t>(g),
            .needed = lacks[g].wanted,
            .available = lacks[g].available};
  }
  [[nodiscard]] counts missing(std::span<const growth> batch, const failure&) noexcept {
    std::array<group_shortage, max_layer_groups> lacks{};
    static_cast<void>(cache_->shortage(batch, std::span(lacks).first(groups().size())));
    counts out{};
    for (std::size_t g = 0; g < groups().size(); ++g)
      out[g] = lacks[g].missing();
    return out;
  }
  [[nodiscard]] counts own(sequence_id sequence) const noexcept {
    counts out{};
    for (std::size_t g = 0; g < groups().size(); ++g) {
      for (const block_id block : cache_->table(sequence, g))
        out[g] += block != null_block && cache_->pool().record(block).references() == 1 ? 1U : 0U;
    }
    return out;
  }
  [[nodiscard]] counts deferred() const noexcept { return cache_->deferred_by_group(); }
  [[nodiscard]] counts to_grow(const growth& each) const noexcept {
    return cache_->blocks_to_append(each.sequence, each.tokens.size() + each.unknown_tokens);
  }
  /// Blocks for all tokens of a request that takes at most `most` tokens from the cache.
  [[nodiscard]] counts to_start(std::span<const token_id> tokens, const prefix_context& context,
                                std::uint64_t step, std::uint64_t most = unlimited) const noexcept {
    const std::uint64_t cacheable = tokens.size() - 1 < most ? tokens.size() - 1 : most;
    const hybrid_cost cost = cache_->cost(tokens.first(static_cast<std::size_t>(cacheable)), context);
    counts out{};
    for (std::size_t g = 0; g < groups().size(); ++g) {
      const group_cost& of = cost.groups[g];
      const std::uint64_t peak = peak_blocks(groups()[g], tokens.size(), step);
      const std::uint64_t more =
          groups()[g].places_to_append(cost.cached_tokens, tokens.size() - cost.cached_tokens);
      const std::uint64_t fresh = peak > of.cached_blocks ? peak - of.cached_blocks : 0;
      out[g] = of.revived_blocks + (fresh < more ? fresh : more);
    }
    return out;
  }
  [[nodiscard]] std::uint64_t lost_tokens(sequence_id sequence, std::uint64_t written) const noexcept {
    const counts held = own(sequence);
    std::uint64_t lost = 0;
    for (std::size_t g = 0; g < groups().size(); ++g) {
      if (held[g] == 0) continue;
      // The blocks from which a window or a state was computed were released, so all of it is computed again.
      const bool is_full = groups()[g].kind == layer_kind::full_attention;
      const std::uint64_t tokens = is_full ? held[g] * groups()[g].block_tokens : written;
      if (tokens > lost) lost = tokens;
    }
    return lost < written ? lost : written;
  }
  template <class Visit>
  static void each_copy(const grown& from, Visit&& visit) noexcept {
    for (const group_copy& each : from.copies)
      visit(each);
  }
  /// Whether no other sequence, fence or pin holds a block, not even one that `sequence` holds too: such a
  /// block is copied before it is written, and is not released with the sequence. `sequence` may be null.
  [[nodiscard]] bool is_alone(sequence_id sequence) const noexcept {
    std::uint64_t bytes = 0;
    for (std::size_t g = 0; g < groups().size(); ++g) {
      for (const block_id block : cache_->table(sequence, g)) {
        if (block == null_block) continue;
        if (cache_->pool().record(block).references() != 1) return false;
        bytes += groups()[g].block_bytes;
      }
    }
    return cache_->pool().stats().active_bytes == bytes;
  }

 private:
  [[nodiscard]] std::span<const layer_group> groups() const noexcept { return cache_->groups(); }

  Cache* cache_;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
