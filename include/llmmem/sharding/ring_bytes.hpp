/// @file
/// The bytes that each rank sends in the ring algorithms of the common collectives.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/sharding/concepts.hpp>
#include <llmmem/sharding/element_runs.hpp>
#include <llmmem/sharding/ids.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// Collectives that a ring does in world - 1 steps, the last one in twice as many.
enum class ring_collective : std::uint8_t {
  reduce_scatter,  ///< share r of the sum ends at rank r
  all_gather,      ///< share r begins at rank r and ends everywhere
  all_reduce,      ///< one, then the other
};

/// Returns the bytes that `rank` sends to its successor on a ring, for a tensor of `units` (rows or elements,
/// which are never cut) of `unit_bytes` each, in even shares.
///
/// In a reduce-scatter, a rank does not send the share that it ends with, because the sum of share c starts
/// at rank c + 1 and moves around to c. In an all-gather, share c starts at c and stops before it, so that a
/// rank does not send the share of its successor. If shares are equal, each of the two is (N - 1)/N of the
/// tensor, and the all-reduce 2 (N - 1)/N (Patarasuk and Yuan, J. Parallel Distrib. Comput. 69, 2009). So the
/// two send as many bytes as the all-reduce that they replace.
///
/// @pre `rank` is less than `world`
/// @par Complexity   O(1).
/// @throws argument_error  when `world` is 0; length_error when twice the tensor passes 2^63 - 1 bytes.
[[nodiscard]] constexpr std::uint64_t ring_sent_bytes(ring_collective what, std::uint64_t units,
                                                      std::uint64_t unit_bytes, rank_count world,
                                                      rank_id rank) {
  detail::check_world(world, 0, "ring_sent_bytes");
  const std::uint64_t ranks = to_number(world);
  const std::uint64_t all = checked_multiply(units, unit_bytes, "ring_sent_bytes: units x bytes per unit");
  static_cast<void>(checked_multiply(all, 2, "ring_sent_bytes: bytes of both halves"));
  const auto share = [&](std::uint64_t of) { return even_share(units, of, ranks).count * unit_bytes; };
  const std::uint64_t scattered = all - share(to_index(rank));
  const std::uint64_t gathered = all - share((std::uint64_t{to_index(rank)} + 1) % ranks);
  switch (what) {
    case ring_collective::reduce_scatter:
      return scattered;
    case ring_collective::all_gather:
      return gathered;
    case ring_collective::all_reduce:
      break;
  }
  return scattered + gathered;
}

}  // namespace v0
}  // namespace llmmem
