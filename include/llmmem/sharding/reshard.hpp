/// @file
/// Resharding: from the stored pieces to the wanted pieces, as a plan that is plain data.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/sharding/concepts.hpp>
#include <llmmem/sharding/element_runs.hpp>
#include <llmmem/sharding/ids.hpp>
#include <llmmem/sharding/reshard_plan.hpp>
#include <llmmem/sharding/tensor_shape.hpp>

#include <cstdint>
#include <span>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The maximum number of runs in a plan for one tensor whose pieces do not share one row length.
inline constexpr std::uint64_t max_reshard_runs = std::uint64_t{1} << 24;

/// Returns the plan that fills each wanted piece and reads each of its elements once, in as few copies as
/// follow from these rules:
///
/// - If several pieces hold an element, the plan reads that of the destination's preferred holder. Otherwise
///   it reads the one that reaches furthest, so that a row takes the fewest copies. If all these are replicas
///   of one another, it reads that of the holder with the fewest bytes to read so far.
/// - Ranges that are adjacent in both pieces are one copy; so are runs at equal distances. (If the preferred
///   holder has the middle of each row, reads around it may be cut where rows end.)
///
/// A stored layout and a wanted one are plain lists, independent of each other, because a checkpoint's layout
/// should not bind the layout it is loaded into, as in ByteCheckpoint (arXiv 2407.20143) and Universal
/// Checkpointing (arXiv 2406.18820).
///
/// @param tensors  the catalogue that both lists number their tensors by.
/// @param stored   in any order; pieces may be empty, overlap, and repeat one another.
/// @param wanted   in any order; pieces may be empty or overlap. Each is filled independently.
///
/// @par Complexity   O(p log p + c log c) for p pieces and c copies, plus O(1) for each replica that a copy
///                   may come from. If the strided pieces of a tensor are bands of one matrix (equal strides,
///                   no run across the end of a row), the rows in which no piece begins or ends are planned
///                   as one, and each other row costs the pieces in it. For any other strided pieces, each
///                   run counts as a piece of p.
/// @throws argument_error  when a piece names no tensor of the catalogue or is not a canonical set, or when
///                         no piece has a wanted element: with the tensor and the first such element.
/// @throws length_error    when a piece passes its tensor, pieces 2^32, bytes 2^63 - 1, or the runs of other
///                         strided pieces `max_reshard_runs`.
[[nodiscard]] reshard_plan make_reshard(std::span<const tensor_facts> tensors,
                                        std::span<const stored_piece> stored,
                                        std::span<const wanted_piece> wanted);

namespace sharding {

/// Returns the pieces that a checkpoint of `from` holds: each element once, with its owner, holder = rank. By
/// tensor, then rank; pieces without elements are left out.
/// @par Complexity   O(tensors x world).
template <partition From>
[[nodiscard]] std::vector<stored_piece> owned_pieces(const From& from) {
  std::vector<stored_piece> pieces;
  for (std::uint32_t t = 0; t < from.tensors(); ++t) {
    for (std::uint32_t r = 0; r < to_number(from.world()); ++r) {
      const element_runs elements = from.owned(tensor_id{t}, rank_id{r});
      if (!elements.empty()) pieces.push_back({tensor_id{t}, holder_id{r}, elements});
    }
  }
  return pieces;
}

/// Returns the pieces that the ranks of `from` hold while they live, replicas included, holder = rank.
/// Otherwise as `owned_pieces`.
template <partition From>
[[nodiscard]] std::vector<stored_piece> held_pieces(const From& from) {
  std::vector<stored_piece> pieces;
  for (std::uint32_t t = 0; t < from.tensors(); ++t) {
    for (std::uint32_t r = 0; r < to_number(from.world()); ++r) {
      const element_runs elements = from.local(tensor_id{t}, rank_id{r});
      if (!elements.empty()) pieces.push_back({tensor_id{t}, holder_id{r}, elements});
    }
  }
  return pieces;
}

/// The first choice of source for a wanted piece.
enum class read_first : std::uint8_t {
  anywhere,
  own_number,  ///< from the holder that has the rank's own number: a rank that stays
};

}  // namespace sharding

using read_first [[deprecated("its name is sharding::read_first")]] = sharding::read_first;

/// Returns the pieces that the ranks of `to` will hold. Otherwise as `owned_pieces`.
template <partition To>
[[nodiscard]] std::vector<wanted_piece> wanted_pieces(
    const To& to, sharding::read_first first = sharding::read_first::anywhere) {
  std::vector<wanted_piece> pieces;
  for (std::uint32_t t = 0; t < to.tensors(); ++t) {
    for (std::uint32_t r = 0; r < to_number(to.world()); ++r) {
      const element_runs elements = to.local(tensor_id{t}, rank_id{r});
      if (elements.empty()) continue;
      const holder_id prefers = first == sharding::read_first::own_number ? holder_id{r} : no_holder;
      pieces.push_back({tensor_id{t}, rank_id{r}, elements, prefers});
    }
  }
  return pieces;
}

}  // namespace v0
}  // namespace llmmem

#include <llmmem/sharding/detail/reshard_body.hpp>
