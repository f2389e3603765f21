/// @file
/// From one partition to another while the ranks live: which elements move, and which stay.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/sharding/concepts.hpp>
#include <llmmem/sharding/ids.hpp>
#include <llmmem/sharding/partition_bytes.hpp>
#include <llmmem/sharding/reshard.hpp>
#include <llmmem/sharding/reshard_plan.hpp>
#include <llmmem/sharding/tensor_shape.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// A plan between live ranks. Rank r of the old partition is rank r of the new one; with a larger world the
/// last ranks join, with a smaller one they leave after they have sent their elements.
///
/// @par Thread safety   a plain value.
struct live_reshard {
  std::vector<stored_piece> stored{};  ///< indexed by `source` of a copy: all that the ranks hold
  std::vector<wanted_piece> wanted{};  ///< indexed by `destination` of a copy: all that they will hold
  reshard_plan moves{};                ///< from one rank to another: the bytes that a transport carries
  std::vector<reshard_copy> kept{};    ///< within a rank: a copy from its old storage to its new
  std::uint64_t kept_elements = 0;
  std::uint64_t kept_bytes = 0;
};

/// Returns the plan from `from` to `to` that moves the fewest bytes: each element that a rank needs and does
/// not hold is sent to it once, and nothing else is sent. Replicas are read alternately, as `make_reshard`
/// documents.
///
///     const live_reshard plan = reshard(tensors, sharding::replicated(tensors, four),
///     flat_uneven::even(tensors, two));
///     // plan.moves.bytes == 0: a rank that shrinks a replica to a shard has it already
///
/// For a checkpoint, or after the loss of ranks, make the lists yourself and call `make_reshard`.
///
/// @par Complexity   as `make_reshard`, for all that the ranks hold, replicas included.
/// @throws argument_error  when `tensors` is not the catalogue of both; what `make_reshard` throws.
template <partition From, partition To>
[[nodiscard]] live_reshard reshard(std::span<const tensor_facts> tensors, const From& from, const To& to) {
  detail::check_catalogue(from, tensors, "reshard: from");
  detail::check_catalogue(to, tensors, "reshard: to");
  live_reshard result;
  result.stored = sharding::held_pieces(from);
  result.wanted = wanted_pieces(to, sharding::read_first::own_number);
  const reshard_plan all = make_reshard(tensors, result.stored, result.wanted);

  std::vector<reshard_share<holder_id>> holders;  // both lists by number, holes closed below
  std::vector<reshard_share<rank_id>> ranks;
  const auto add = [](auto& shares, auto id, std::uint64_t elements, std::uint64_t bytes) {
    if (shares.size() <= to_index(id)) shares.resize(std::size_t{to_index(id)} + 1);
    auto& share = shares[to_index(id)];
    share.id = id;
    ++share.copies;
    share.elements += elements;
    share.bytes += bytes;
  };
  for (const reshard_copy& copy : all.copies) {
    const holder_id holder = result.stored[to_index(copy.source)].holder;
    const rank_id rank = result.wanted[to_index(copy.destination)].rank;
    const std::uint64_t elements = copy.elements();
    const std::uint64_t bytes = elements * tensors[to_index(copy.tensor)].element_bytes;
    if (to_index(holder) == to_index(rank)) {
      result.kept.push_back(copy);
      result.kept_elements += elements;
      result.kept_bytes += bytes;
      continue;
    }
    result.moves.copies.push_back(copy);
    result.moves.elements += elements;
    result.moves.bytes += bytes;
    add(holders, holder, elements, bytes);
    add(ranks, rank, elements, bytes);
  }
  for (const auto& each : holders) {
    if (each.copies != 0) result.moves.holders.push_back(each);
  }
  for (const auto& each : ranks) {
    if (each.copies != 0) result.moves.ranks.push_back(each);
  }
  return result;
}

}  // namespace v0
}  // namespace llmmem
