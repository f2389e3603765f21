/// @file
/// Sums of several ranks that each rank has made of its own pieces.
#pragma once

#include <llmmem/comm/collectives.hpp>
#include <llmmem/comm/ranks.hpp>
#include <llmmem/comm/reduce_op.hpp>
#include <llmmem/comm/transport.hpp>
#include <llmmem/config.hpp>
#include <llmmem/kernels/unordered_sum.hpp>
#include <llmmem/result.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// `unordered_sum::merge`, for collectives.
inline constexpr reduce_op merge_unordered_sums{
    .combine =
        [](std::byte* into, const std::byte* from, std::size_t bytes) noexcept {
          detail::combine_elements<unordered_sum>(into, from, bytes,
                                                  [](unordered_sum a, const unordered_sum& b) {
                                                    a.merge(b);
                                                    return a;
                                                  });
        },
    .element_bytes = sizeof(unordered_sum)};

/// Adds the sums of all ranks, place by place. All ranks call it with the same number of sums, and then hold
/// the same bits. Each number must be added on one rank only; where all ranks have the same numbers, there is
/// nothing to merge.
/// @par Errors   as `all_reduce`.
template <transport Ranks>
result<void> merge_all(Ranks& ranks, std::span<unordered_sum> sums, collective_call& call) {
  return all_reduce(ranks, std::as_writable_bytes(sums), merge_unordered_sums, call);
}

/// Returns the bytes that a rank sends in `merge_all` of `count` sums with the default `collective_call`.
[[nodiscard]] inline std::uint64_t merge_bytes(std::uint64_t count, rank_count world, rank_id rank) {
  const std::uint64_t others = to_number(world) - 1;
  const std::uint64_t bytes = count * sizeof(unordered_sum);
  if (bytes * others <= collective_call{}.small_bytes) return bytes * others;
  const std::vector<std::uint64_t> blocks = even_blocks(bytes, world, sizeof(unordered_sum));
  const std::uint64_t own = blocks[std::size_t{to_index(rank)} + 1] - blocks[to_index(rank)];
  return bytes - own + own * others;
}

}  // namespace v0
}  // namespace llmmem
