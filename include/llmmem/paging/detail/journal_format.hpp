/// @file
/// The types by which the journals of the two allocators differ. Private to paging/.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/paging/detail/journal_record.hpp>
#include <llmmem/paging/hybrid_types.hpp>
#include <llmmem/paging/journal_types.hpp>
#include <llmmem/paging/paged_types.hpp>

#include <cstdint>
#include <span>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// A cache with groups of layers: a `hybrid_allocator`.
template <class Cache>
concept journaled_hybrid_cache = requires(const Cache& cache) { cache.groups(); };

template <class Cache>
inline constexpr journal_format format_of =
    journaled_hybrid_cache<Cache> ? journal_format::hybrid : journal_format::paged;

template <journal_format Format>
struct journal_types {
  using options = paged_options;
  using header = journal_header;
  using grown = append_result;
  using leave = std::uint64_t;
  /// Calls of a `deferred_frees` that wait at once, per sequence.
  static constexpr std::uint64_t fences = 4;
};

template <>
struct journal_types<journal_format::hybrid> {
  using options = hybrid_options;
  using header = paging::hybrid_journal_header;
  using grown = hybrid_append;
  using leave = std::span<const std::uint64_t>;
  /// Twice as many, because each sequence has a fence, and `read_until` replaces it before it has passed.
  static constexpr std::uint64_t fences = 8;
};

template <class Cache>
using types_of = journal_types<format_of<Cache>>;

/// The results of an operation, to which its outcome refers.
template <class Cache>
struct journal_results {
  std::vector<typename types_of<Cache>::grown> grown;
  std::vector<group_shortage> lacks;
  std::vector<group_copy> moves;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
