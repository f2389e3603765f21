/// @file
/// The operations that tiers need from a cache, the same for a `paged_allocator` and a `hybrid_allocator`.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/offload/kv_chain.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/paging/layer_group.hpp>
#include <llmmem/paging/paged_types.hpp>
#include <llmmem/paging/super_page_types.hpp>
#include <llmmem/result.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// A view of a cache as groups of layers with block tables. A `paged_allocator` is one group that attends to
/// all tokens.
template <class Cache>
class cache_view {
 public:
  static constexpr bool is_hybrid = requires(const Cache& cache) { cache.groups(); };

  explicit cache_view(Cache& cache) noexcept : cache_(&cache) {
    if constexpr (!is_hybrid) {
      one_[0] = {.name = "kv", .block_tokens = cache.block_tokens(), .block_bytes = 1};
    }
  }

  [[nodiscard]] Cache& cache() const noexcept { return *cache_; }
  [[nodiscard]] std::span<const layer_group> groups() const noexcept LLMMEM_LIFETIMEBOUND {
    if constexpr (is_hybrid) {
      return cache_->groups();
    } else {
      return one_;
    }
  }
  [[nodiscard]] std::uint32_t chunk_tokens() const noexcept {
    if constexpr (is_hybrid) {
      return cache_->chunk_tokens();
    } else {
      return cache_->block_tokens();
    }
  }
  [[nodiscard]] std::span<const block_id> table(sequence_id sequence, std::size_t group) const noexcept {
    if constexpr (is_hybrid) {
      return cache_->table(sequence, group);
    } else {
      return cache_->blocks(sequence);
    }
  }
  [[nodiscard]] std::uint64_t block_capacity() const noexcept {
    if constexpr (is_hybrid) {
      return cache_->pool().block_ids();
    } else {
      return cache_->max_physical_blocks();
    }
  }

  /// Appends to a sequence the tokens of a chain up to `end`, with the blocks that they need.
  result<void> grow(sequence_id sequence, const kv_chain& chain, std::uint64_t end) const noexcept {
    const std::uint64_t have = cache_->tokens(sequence);
    if constexpr (is_hybrid) {
      // Grows piece by piece, so that blocks that leave the windows become free before the next piece.
      for (std::uint64_t first = have; first < end;) {
        const std::uint64_t piece = piece_tokens();
        const std::uint64_t next = end - first < piece ? end : first + piece;
        const auto part = chain.token_ids().subspan(static_cast<std::size_t>(first),
                                                    static_cast<std::size_t>(next - first));
        if (const auto grown = cache_->append(sequence, part); !grown) return grown.error();
        std::array<group_shortage, max_layer_groups> none{};
        static_cast<void>(cache_->shortage(sequence, 0, std::span(none).first(groups().size())));
        first = next;
      }
      return {};
    } else {
      const auto grown =
          chain.is_keyed()
              ? cache_->extend(sequence, end - have)
              : cache_->append(sequence, chain.token_ids().subspan(static_cast<std::size_t>(have),
                                                                   static_cast<std::size_t>(end - have)));
      if (!grown) return grown.error();
      return {};
    }
  }

  /// Lets `match` find the first `tokens` tokens, whose contents are right.
  result<void> publish(sequence_id sequence, const kv_chain& chain, std::uint64_t tokens) const noexcept {
    if constexpr (!is_hybrid) {
      if (chain.is_keyed()) {
        const std::uint64_t chunks = (tokens + chain.chunk_tokens() - 1) / chain.chunk_tokens();
        const auto done = cache_->commit(sequence, chain.blocks(chunks));
        return done ? result<void>() : result<void>(done.error());
      }
    }
    const auto done = cache_->commit(sequence, tokens);
    return done ? result<void>() : result<void>(done.error());
  }

 private:
  [[nodiscard]] std::uint64_t piece_tokens() const noexcept {
    std::uint64_t piece = chunk_tokens();
    for (const layer_group& each : groups())
      piece = each.block_tokens > piece ? each.block_tokens : piece;
    return piece * 16;
  }

  Cache* cache_;
  std::array<layer_group, 1> one_{};
};

/// Calls `f(index)` for each block of a group that a hit of `length` tokens needs. @pre `may_end_hit(length)`
template <class F>
void for_each_needed(const layer_group& group, std::uint64_t length, F&& f) {
  const block_range live = group.hit_blocks(length);
  const std::uint64_t sinks = group.sink_blocks() < live.first ? group.sink_blocks() : live.first;
  for (std::uint64_t i = 0; i < sinks; ++i)
    f(i);
  for (std::uint64_t i = live.first; i < live.end; ++i)
    f(i);
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
