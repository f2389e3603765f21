/// @file
/// The calls of a journaled cache that change nothing, and so need no record. Private to paging/.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/paging/detail/journal_format.hpp>
#include <llmmem/paging/hybrid_types.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/paging/layer_group.hpp>
#include <llmmem/paging/paged_types.hpp>
#include <llmmem/result.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// A base that passes the reads of `Journaled::cache()` on, so that a journaled cache can be used in place of
/// its cache in `batch_scheduler`, `export_sequence` and `import_sequence`.
/// @tparam Journaled  the derived class.
template <class Journaled, class Cache>
class journal_reads {
 public:
  /// Whether the cache has groups of layers: a `hybrid_allocator`, which lacks some calls and has others.
  static constexpr bool is_hybrid = journaled_hybrid_cache<Cache>;

  [[nodiscard]] result<void> check(sequence_id sequence) const noexcept { return of().check(sequence); }
  [[nodiscard]] std::uint64_t tokens(sequence_id sequence) const noexcept { return of().tokens(sequence); }
  [[nodiscard]] std::uint64_t prefix_tokens(sequence_id sequence) const noexcept {
    return of().prefix_tokens(sequence);
  }
  [[nodiscard]] prefix_context context(sequence_id sequence) const noexcept { return of().context(sequence); }
  [[nodiscard]] std::uint64_t epoch() const noexcept { return of().epoch(); }
  [[nodiscard]] std::uint64_t epoch(sequence_id sequence) const noexcept { return of().epoch(sequence); }
  [[nodiscard]] auto cost(std::span<const token_id> tokens,
                          const prefix_context& context = {}) const noexcept {
    return of().cost(tokens, context);
  }
  [[nodiscard]] std::uint64_t cached_tokens(std::span<const token_id> tokens,
                                            const prefix_context& context = {}) const noexcept {
    return of().cached_tokens(tokens, context);
  }
  [[nodiscard]] std::uint64_t max_sequence_tokens() const noexcept { return of().max_sequence_tokens(); }
  [[nodiscard]] const std::string& name() const noexcept LLMMEM_LIFETIMEBOUND { return of().name(); }
  [[nodiscard]] const auto& pool() const noexcept LLMMEM_LIFETIMEBOUND { return of().pool(); }
  [[nodiscard]] auto stats() const noexcept { return of().stats(); }

  // Only of a `paged_allocator`

  [[nodiscard]] std::span<const block_id> blocks(sequence_id sequence) const noexcept LLMMEM_LIFETIMEBOUND
    requires(!is_hybrid)
  {
    return of().blocks(sequence);
  }
  [[nodiscard]] std::uint32_t block_tokens() const noexcept
    requires(!is_hybrid)
  {
    return of().block_tokens();
  }
  [[nodiscard]] std::uint64_t max_physical_blocks() const noexcept
    requires(!is_hybrid)
  {
    return of().max_physical_blocks();
  }

  // Only of a `hybrid_allocator`

  [[nodiscard]] std::span<const block_id> table(sequence_id sequence,
                                                std::size_t group) const noexcept LLMMEM_LIFETIMEBOUND
    requires is_hybrid
  {
    return of().table(sequence, group);
  }
  [[nodiscard]] std::span<const layer_group> groups() const noexcept LLMMEM_LIFETIMEBOUND
    requires is_hybrid
  {
    return of().groups();
  }
  [[nodiscard]] const auto& layout() const noexcept LLMMEM_LIFETIMEBOUND
    requires is_hybrid
  {
    return of().layout();
  }
  [[nodiscard]] auto blocks_to_append(sequence_id sequence, std::uint64_t count) const noexcept
    requires is_hybrid
  {
    return of().blocks_to_append(sequence, count);
  }
  [[nodiscard]] auto deferred_by_group() const noexcept
    requires is_hybrid
  {
    return of().deferred_by_group();
  }
  [[nodiscard]] auto nearest_cuts(sequence_id sequence, std::uint64_t tokens) const noexcept
    requires is_hybrid
  {
    return of().nearest_cuts(sequence, tokens);
  }

 private:
  [[nodiscard]] const Cache& of() const noexcept { return static_cast<const Journaled*>(this)->cache(); }
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
