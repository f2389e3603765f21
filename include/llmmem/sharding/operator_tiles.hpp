/// @file
/// One large linear operator in tiles of output rows, each a tensor of a `sharded_state`: memory-centric
/// tiling.
#pragma once

#include <llmmem/comm/ranks.hpp>
#include <llmmem/comm/reduce_op.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>
#include <llmmem/sharding/concepts.hpp>
#include <llmmem/sharding/element_runs.hpp>
#include <llmmem/sharding/ids.hpp>
#include <llmmem/sharding/tensor_shape.hpp>
#include <llmmem/tiering/errors.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// A matrix of [outputs, inputs] as tiles of consecutive rows, as even as possible.
///
///     const operator_tiles tiles(tensor_shape::matrix(outputs, inputs), 16, 4);
///     const auto catalogue = tiles.tensors("head");                     // of weights and of gradients
///     forward_tiles(weights, tiles, first, [&](index_range rows, std::span<const std::byte> w) {
///       multiply(y, rows, x, w);                                        // y[rows] = w x
///     }).value();
///
/// **The bits are those of the operator without tiles**, if the caller computes each output by itself, and
/// adds to the gradients of inputs in the order of outputs. Tiles of inputs, as of a matrix of [inputs,
/// outputs], have the same bits only if the caller's product adds one input after the other.
///
/// @par Thread safety   immutable.
/// @par Source          Rajbhandari et al., "ZeRO-Infinity", SC 2021 (arXiv 2104.07857), section 5.1.3.
class operator_tiles {
 public:
  /// @param tiles          1 to the rows of `whole`.
  /// @param element_bytes  at least 1.
  /// @throws argument_error  otherwise; length_error past 2^63 - 1 bytes.
  operator_tiles(const tensor_shape& whole, std::uint32_t tiles, std::uint32_t element_bytes)
      : whole_(whole), tiles_(tiles), element_bytes_(element_bytes) {
    if (tiles == 0 || tiles > whole.rows()) {
      throw argument_error("operator_tiles: " + std::to_string(tiles) + " tiles of " +
                           std::to_string(whole.rows()) + " rows; each has at least one");
    }
    if (element_bytes == 0) throw argument_error("operator_tiles: elements of 0 bytes; give their width");
    static_cast<void>(checked_multiply(whole.elements(), element_bytes, "operator_tiles: bytes"));
  }

  [[nodiscard]] std::uint32_t count() const noexcept { return tiles_; }
  /// Returns the outputs of a tile. @pre tile < count()
  [[nodiscard]] index_range rows(std::uint32_t tile) const noexcept {
    return even_share(whole_.rows(), tile, tiles_);
  }
  /// Returns the bytes of a tile, of which the first is the largest. @pre tile < count()
  [[nodiscard]] std::uint64_t bytes(std::uint32_t tile) const noexcept {
    return rows(tile).count * whole_.columns() * element_bytes_;
  }
  /// Returns the tiles for a catalogue, where they have consecutive ids.
  [[nodiscard]] std::vector<tensor_facts> tensors(const std::string& name) const {
    std::vector<tensor_facts> all;
    all.reserve(tiles_);
    for (std::uint32_t tile = 0; tile < tiles_; ++tile) {
      all.push_back({name + " tile " + std::to_string(tile),
                     tensor_shape::matrix(rows(tile).count, whole_.columns()), element_bytes_});
    }
    return all;
  }

  /// Returns the most bytes of its space that a rank takes at once, in addition to its pieces, with plain
  /// messages: in `forward_tiles` a tile's weights, unless it has them. O(tiles).
  /// @param split  the state's partition, with the tiles from `first` on.
  template <partition P>
  [[nodiscard]] std::uint64_t forward_bytes(const P& split, tensor_id first, rank_id rank) const {
    std::uint64_t most = 0;
    for (std::uint32_t tile = 0; tile < tiles_; ++tile)
      most = std::max(most, gathered_bytes(split, tensor_id{to_index(first) + tile}, rank));
    return most;
  }
  /// In `backward_tiles`: a tile's weights and gradients, and a message of each rank. Both states have the
  /// partition `split`, and take from one space.
  /// @param segment_bytes  as in `sharded_options`.
  template <partition P>
  [[nodiscard]] std::uint64_t backward_bytes(const P& split, tensor_id first, rank_id rank,
                                             std::uint32_t segment_bytes) const {
    const std::uint64_t segment = std::max<std::uint64_t>(segment_bytes / element_bytes_, 1) * element_bytes_;
    const std::uint64_t world = to_number(split.world());
    std::uint64_t most = 0;
    for (std::uint32_t tile = 0; tile < tiles_; ++tile) {
      const tensor_id id{to_index(first) + tile};
      const std::uint64_t own = split.owned(id, rank).elements() * element_bytes_;
      const std::uint64_t messages = world == 1 ? 0 : world * std::min(own, segment);
      most = std::max(most, 2 * gathered_bytes(split, id, rank) + messages);
    }
    return most;
  }

 private:
  template <partition P>
  [[nodiscard]] std::uint64_t gathered_bytes(const P& split, tensor_id tile, rank_id rank) const {
    const std::uint64_t elements = split.shape(tile).elements();
    return split.local(tile, rank).elements() == elements ? 0 : elements * element_bytes_;
  }

  tensor_shape whole_;
  std::uint32_t tiles_;
  std::uint32_t element_bytes_;
};

/// Gathers the tiles in order, one at a time, and calls `use(rows, weights)` for each. All ranks call it.
///
/// For two tiles at once, of which one is gathered during the use of the other, make each tile a scope of a
/// `gather_schedule`. Pieces may be in memory or in tiers, and gathers over any wire: the state's matter.
///
/// @param weights  a `sharded_state`, with the tiles from `first` on in its catalogue.
/// @par Complexity      the operator's gather, in `tiles.count()` parts.
/// @par Thread safety   as the state.
/// @par Errors          those of `sharded_state::gather`. `errc::size_mismatch` if a tensor of the catalogue
///                      has another length than its tile: wanted = the tile's bytes, found = the tensor's;
///                      the tiles before it were used. What `use` throws: the other ranks then wait for this
///                      one, so revoke the transport.
template <class State, class Use>
result<void> forward_tiles(State& weights, const operator_tiles& tiles, tensor_id first, Use&& use) {
  for (std::uint32_t tile = 0; tile < tiles.count(); ++tile) {
    const tensor_id id{to_index(first) + tile};
    const auto whole = weights.gather({&id, 1});
    if (!whole) return whole.error();
    const std::uint64_t expected = tiles.bytes(tile);
    if (whole->tensor(0).size() != expected)
      return failure{errc::size_mismatch, tile, expected, whole->tensor(0).size(), "forward_tiles"};
    use(tiles.rows(tile), std::span<const std::byte>(whole->tensor(0)));
  }
  return {};
}

/// Gathers the tiles in order, calls `use(rows, weights, gradients)` for each, and sums each one's gradients
/// into the pieces of their owners before the next. `use` writes all of `gradients`, and may add to the
/// gradients of the operator's inputs. Otherwise as `forward_tiles`.
/// @param gradients  a `sharded_state` with the same catalogue.
/// @par Errors   also those of `sharded_state::reduce_scatter`. A rank without memory for a tile's gradients
///               revokes the transport, as one without memory for its weights does.
template <class State, class Gradients, class Use>
result<void> backward_tiles(State& weights, Gradients& gradients, const operator_tiles& tiles,
                            tensor_id first, const reduce_op& op, Use&& use) {
  for (std::uint32_t tile = 0; tile < tiles.count(); ++tile) {
    const tensor_id id{to_index(first) + tile};
    const auto whole = weights.gather({&id, 1});
    if (!whole) return whole.error();
    const auto sums = gradients.allocate_whole({&id, 1});
    if (!sums) {
      // Other ranks are about to wait for this one; but an unknown tensor is found by all of them.
      if (sums.code() != errc::no_such_tensor) gradients.ranks().revoke();
      return sums.error();
    }
    const std::uint64_t expected = tiles.bytes(tile);
    for (const std::uint64_t found : {whole->tensor(0).size(), sums->tensor(0).size()}) {
      if (found != expected) return failure{errc::size_mismatch, tile, expected, found, "backward_tiles"};
    }
    use(tiles.rows(tile), std::span<const std::byte>(whole->tensor(0)), sums->tensor(0));
    if (const auto done = gradients.reduce_scatter(*sums, op); !done) return done;
  }
  return {};
}

}  // namespace v0
}  // namespace llmmem
