/// @file
/// The tensors of a run's checkpoints, and the place of each in a store.
#pragma once

#include <llmmem/checkpoint/file_plan.hpp>
#include <llmmem/checkpoint/load.hpp>
#include <llmmem/sharding/element_runs.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "train_gpt/any_stores.hpp"
#include "train_gpt/layer_parts.hpp"
#include "train_gpt/shape.hpp"
#include "train_gpt/stores.hpp"

namespace train_gpt {

/// Weights with the names of GPT-2's checkpoints, in `model.safetensors`; the optimizer's moments or factors
/// in `optimizer.safetensors`. Of workers that train apart, all but the first have their number before their
/// names; base weights and their momentum are in `outer.safetensors`, once. Where each rank corrects the
/// momentum, all have theirs and what they have not sent, with their number before its name. For a sharded
/// store, the parts that this process saves, and those that it holds; a checkpoint does not depend on which
/// process saved which part.
struct saved_tensors {
  struct place {
    layer_id piece{};
    state_kind kind = state_kind::weights;
    std::size_t first = 0;  ///< element within the held part of the piece
    std::size_t elements = 0;
  };
  using places_of = std::vector<place>;  ///< the consecutive elements of a part, in pieces of the store
  std::vector<llmmem::state_tensor> tensors{};  ///< with the part to save
  std::vector<places_of> places{};              ///< of each
  std::vector<llmmem::wanted_tensor> wanted{};  ///< the parts to load
  std::vector<places_of> wanted_places{};       ///< of each

  /// @param worker  of several, that this process is of.
  /// @param joins   with outer steps, whose state the store then has.
  /// @param rank    of all workers' ranks, by which each has its own momentum if `shape.corrects_momentum`.
  saved_tensors(const gpt_shape& shape, const any_state<float>& store, std::uint32_t worker = 0,
                bool joins = false, std::uint32_t rank = 0)
      : worker_(worker), rank_(rank), corrects_momentum_(shape.corrects_momentum) {
    std::vector<state_kind> kinds = optimizer_kinds(shape);
    kinds.insert(kinds.begin(), state_kind::weights);
    if (joins) kinds.insert(kinds.end(), {state_kind::base, state_kind::base_momentum});
    const std::vector<layer_part> parts = state_parts(shape);
    for (const state_kind kind : kinds) {
      std::vector<piece> pieces;  // of a layer
      for (std::size_t i = 0; i < parts.size(); ++i) {
        const layer_id id = shape.layer(i);
        pieces.push_back({id, parts[i].first, store.saved(id, kind), store.held(id, kind)});
        if (!ends_layer(parts, i)) continue;
        const layer_layout layout =
            shape.tiles == 0 ? state_layout(shape, id, kind) : parameter_layout(shape, parts[i].layer);
        for (const tensor_place& each : layout.tensors) {
          if (worker == 0 || !is_outer(kind)) add(each, kind, pieces);
          want(each, kind, pieces);
        }
        pieces.clear();
      }
    }
  }

  /// Bytes of the parts to save.
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }

 private:
  /// A piece of the store, of which this process saves and holds ranges.
  struct piece {
    layer_id id{};
    std::size_t first = 0;  // in its layer
    element_range saved{};
    element_range held{};
  };
  /// The elements of a tensor that are in a range of the pieces of its layer, and their places.
  /// @pre they are consecutive: a rank's share is a range of all pieces in their order
  [[nodiscard]] static element_range find(const tensor_place& tensor, state_kind kind,
                                          std::span<const piece> pieces, element_range piece::* which,
                                          places_of& found) {
    element_range all;
    for (const piece& each : pieces) {
      const element_range range = common(tensor, {each.first + (each.*which).first, (each.*which).count});
      if (range.count == 0) continue;
      if (all.count == 0) all.first = range.first;
      all.count += range.count;
      found.push_back({each.id, kind, range.first - each.first - each.held.first, range.count});
    }
    return all;
  }
  /// The elements of a tensor that are in a range of its layer.
  [[nodiscard]] static element_range common(const tensor_place& tensor, const element_range& range) {
    const std::size_t first = std::max(tensor.offset, range.first);
    const std::size_t end = std::min(tensor.offset + tensor.rows * tensor.columns, range.first + range.count);
    return {std::min(first, end), end > first ? end - first : 0};
  }
  [[nodiscard]] static llmmem::element_runs part_of(const tensor_place& tensor, const element_range& range) {
    return range.count == 0 ? llmmem::element_runs{}
                            : llmmem::element_runs::flat_range(range.first - tensor.offset, range.count);
  }
  [[nodiscard]] static std::vector<std::uint64_t> sizes_of(const tensor_place& tensor) {
    std::vector<std::uint64_t> sizes{tensor.columns};
    if (tensor.rows != 1) sizes.insert(sizes.begin(), tensor.rows);
    return sizes;
  }
  [[nodiscard]] static bool is_outer(state_kind kind) noexcept {
    return kind == state_kind::base || kind == state_kind::base_momentum;
  }
  [[nodiscard]] static const char* group_of(state_kind kind) noexcept {
    return kind == state_kind::weights ? "model" : is_outer(kind) ? "outer" : "optimizer";
  }
  [[nodiscard]] std::string name_of(const tensor_place& tensor, state_kind kind) const {
    const bool is_own = kind == state_kind::mean || kind == state_kind::variance;
    if (corrects_momentum_ && is_own) {
      return "rank" + std::to_string(rank_) + (kind == state_kind::mean ? ".momentum." : ".unsent.") +
             tensor.name;
    }
    const std::string whose = worker_ == 0 || is_outer(kind) ? "" : "worker" + std::to_string(worker_) + ".";
    return whose +
           (kind == state_kind::weights         ? ""
            : kind == state_kind::mean          ? "mean."
            : kind == state_kind::variance      ? "variance."
            : kind == state_kind::base          ? "base."
            : kind == state_kind::base_momentum ? "momentum."
                                                : "factors.") +
           tensor.name;
  }
  void add(const tensor_place& tensor, state_kind kind, std::span<const piece> pieces) {
    const element_range range = find(tensor, kind, pieces, &piece::saved, places.emplace_back());
    bytes_ += range.count * sizeof(float);
    llmmem::state_tensor described{.name = name_of(tensor, kind),
                                   .type = llmmem::safetensors_type::f32,
                                   .shape = sizes_of(tensor),
                                   .group = group_of(kind),
                                   .part = {}};
    if (range.count != tensor.rows * tensor.columns) described.part = part_of(tensor, range);
    tensors.push_back(std::move(described));
  }
  void want(const tensor_place& tensor, state_kind kind, std::span<const piece> pieces) {
    places_of found;
    const element_range range = find(tensor, kind, pieces, &piece::held, found);
    if (range.count == 0) return;
    wanted.push_back({.name = name_of(tensor, kind),
                      .part = part_of(tensor, range),
                      .type = llmmem::safetensors_type::f32,
                      .shape = sizes_of(tensor)});
    wanted_places.push_back(std::move(found));
  }

  std::uint32_t worker_;
  std::uint32_t rank_;
  bool corrects_momentum_;
  std::uint64_t bytes_ = 0;
};

/// A store's tensors, copied piece by piece. It leases one piece at a time, between two steps; a store whose
/// leases are always the same memory is also read during the next step's passes.
template <bool IsConcurrent>
class store_view {
 public:
  static constexpr bool is_concurrent = IsConcurrent;

  store_view(any_state<float>& store, const saved_tensors& saved) noexcept : store_(&store), saved_(&saved) {}

  void copy_out(std::uint32_t tensor, std::uint64_t offset, std::span<std::byte> into) const {
    each_piece(*store_, saved_->places[tensor], offset, into.size(), lease_mode::read,
               [&](std::span<std::byte> piece, std::size_t at) {
                 std::memcpy(into.data() + at, piece.data(), piece.size());
               });
  }

  /// Calls `use(bytes, at)` for the bytes of a part from `offset` on, piece by piece: `at` is where they are
  /// in the `size` bytes. Each is leased during the call.
  template <class Use>
  static void each_piece(any_state<float>& store, const saved_tensors::places_of& places,
                         std::uint64_t offset, std::size_t size, lease_mode mode, Use&& use) {
    std::size_t at = 0;
    for (const saved_tensors::place& place : places) {
      const std::size_t all = place.elements * sizeof(float);
      if (offset >= all) {
        offset -= all;
        continue;
      }
      if (at == size) break;
      const held_piece held(store, place, mode);
      const std::size_t count = std::min<std::size_t>(size - at, all - offset);
      use(held.bytes.subspan(static_cast<std::size_t>(offset), count), at);
      at += count;
      offset = 0;
    }
  }

 private:
  /// Bytes of a piece from a place on, leased as long as this lives.
  struct held_piece {
    held_piece(any_state<float>& of, const saved_tensors::place& at, lease_mode mode)
        : store(&of), place(at), how(mode) {
      bytes = std::as_writable_bytes(of.acquire_held(at.piece, at.kind, mode).subspan(at.first));
    }
    held_piece(const held_piece&) = delete;
    held_piece& operator=(const held_piece&) = delete;
    ~held_piece() { store->release_held(place.piece, place.kind, how); }

    any_state<float>* store;
    saved_tensors::place place;
    lease_mode how;
    std::span<std::byte> bytes{};
  };

  any_state<float>* store_;
  const saved_tensors* saved_;
};

}  // namespace train_gpt
