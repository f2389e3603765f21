/// @file
/// `pipeline_stages`: whole layers on each device of a pipeline, in one contiguous range or in several
/// chunks.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/schedule/pipeline.hpp>
#include <llmmem/sharding/concepts.hpp>
#include <llmmem/sharding/element_runs.hpp>
#include <llmmem/sharding/ids.hpp>
#include <llmmem/sharding/tensor_shape.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The layer that a tensor belongs to, or the two layers that share it.
struct layer_place {
  std::uint32_t layer = 0;  ///< its device owns the tensor
  std::uint32_t tied = 0;   ///< its device holds the tensor as well; equal to `layer` for one layer

  /// A tensor of one layer.
  [[nodiscard]] static constexpr layer_place in(std::uint32_t layer) noexcept { return {layer, layer}; }
  /// A tensor of two layers, such as an embedding that is also the output projection.
  [[nodiscard]] static constexpr layer_place in_both(std::uint32_t owner, std::uint32_t other) noexcept {
    return {owner, other};
  }

  friend constexpr bool operator==(const layer_place&, const layer_place&) noexcept = default;
};

/// Consecutive layers, cut into `devices * chunks` stages; stage s is chunk s / devices of device s %
/// devices, as in `pipeline_shape`. One chunk: each device has contiguous layers (GPipe, PipeDream). Several:
/// the interleaved virtual stages of Megatron-LM (Narayanan et al., SC21, arXiv 2104.04473, section 2.2), of
/// which device p has stages p, p + devices, ... Rank r is device r of the pipeline.
///
/// A tensor is undivided, with its layer. A tensor that is tied between two layers is held by the devices of
/// both and owned by the first's; their gradients are summed over the two.
///
/// @par Complexity      construction O(tensors + stages), look-ups O(1), those of a layer O(log stages).
/// @par Thread safety   as a plain value.
class pipeline_stages {
 public:
  /// Even stages: they differ by at most one layer; the first stages are the longer ones.
  /// @param places  one for each tensor.
  /// @param layers  the number of layers.
  /// @throws argument_error  when devices or chunks are 0, the two lists differ in length, or a tensor is in
  ///                         a layer that does not exist; length_error when there are 2^32 stages.
  pipeline_stages(std::span<const tensor_facts> tensors, std::span<const layer_place> places,
                  std::uint32_t layers, rank_count devices, std::uint32_t chunks = 1)
      : pipeline_stages(tensors, places, even_boundaries(layers, devices, chunks), devices) {}

  /// Any stages.
  /// @param boundaries  in layers, one more than stages: 0, then the end of each stage; the last is the
  ///                    number of layers. Each is at least the one before; two equal ones make an empty
  ///                    stage.
  /// @throws argument_error  as above, for any other boundaries, or for stages that are not a multiple of
  ///                         devices.
  pipeline_stages(std::span<const tensor_facts> tensors, std::span<const layer_place> places,
                  std::span<const std::uint32_t> boundaries, rank_count devices)
      : world_(devices), boundaries_(boundaries.begin(), boundaries.end()) {
    detail::check_world(devices, tensors.size(), "pipeline_stages");
    check_boundaries();
    if (places.size() != tensors.size()) {
      throw argument_error("pipeline_stages: " + std::to_string(tensors.size()) + " tensors and " +
                           std::to_string(places.size()) + " places; each tensor has one");
    }
    held_.reserve(tensors.size());
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      for (const std::uint32_t layer : {places[i].layer, places[i].tied}) {
        if (layer < layers()) continue;
        throw argument_error("pipeline_stages: tensor '" + tensors[i].name + "' is in layer " +
                             std::to_string(layer) + ", and there are " + std::to_string(layers()));
      }
      held_.push_back({tensors[i].shape, rank_of(places[i].layer), rank_of(places[i].tied)});
    }
  }

  [[nodiscard]] rank_count world() const noexcept { return world_; }
  [[nodiscard]] std::uint32_t tensors() const noexcept { return static_cast<std::uint32_t>(held_.size()); }
  [[nodiscard]] tensor_shape shape(tensor_id tensor) const noexcept { return held_[to_index(tensor)].shape; }

  /// Returns all of the tensor, or nothing.
  [[nodiscard]] element_runs local(tensor_id tensor, rank_id rank) const noexcept {
    const held_tensor& each = held_[to_index(tensor)];
    if (rank != each.owner && rank != each.tied) return {};
    return element_runs::all_of(each.shape.elements());
  }
  [[nodiscard]] element_runs owned(tensor_id tensor, rank_id rank) const noexcept {
    const held_tensor& each = held_[to_index(tensor)];
    return rank == each.owner ? element_runs::all_of(each.shape.elements()) : element_runs{};
  }
  [[nodiscard]] rank_id owner(tensor_id tensor, std::uint64_t /*element*/) const noexcept {
    return held_[to_index(tensor)].owner;
  }
  /// True in a pipeline of one device, or of two that share the tensor.
  [[nodiscard]] bool is_replicated(tensor_id tensor) const noexcept {
    const held_tensor& each = held_[to_index(tensor)];
    return to_number(world_) == (each.owner == each.tied ? 1U : 2U);
  }

  /// Returns the number of layers.
  [[nodiscard]] std::uint32_t layers() const noexcept { return boundaries_.back(); }
  /// Returns the number of stages: devices x chunks.
  [[nodiscard]] std::uint32_t stages() const noexcept {
    return static_cast<std::uint32_t>(boundaries_.size() - 1);
  }
  /// Returns the number of stages of a device.
  [[nodiscard]] std::uint32_t chunks() const noexcept { return stages() / to_number(world_); }
  /// Returns the pipeline of these stages, for `one_f_one_b` and the other orders.
  [[nodiscard]] pipeline_shape shape_of(std::uint32_t micro_batches) const noexcept {
    return {.devices = to_number(world_), .micro_batches = micro_batches, .chunks = chunks()};
  }

  /// Returns the layers of a stage. @pre stage < stages()
  [[nodiscard]] index_range layers_of_stage(std::uint32_t stage) const noexcept {
    return {boundaries_[stage], boundaries_[std::size_t{stage} + 1] - boundaries_[stage]};
  }
  /// Returns the layers of chunk `chunk` of `rank`. @pre chunk < chunks()
  [[nodiscard]] index_range layers_of(rank_id rank, std::uint32_t chunk = 0) const noexcept {
    return layers_of_stage(chunk * to_number(world_) + to_index(rank));
  }
  /// Returns the stage of a layer. @pre layer < layers()
  [[nodiscard]] std::uint32_t stage_of(std::uint32_t layer) const noexcept {
    // After all boundaries that are equal: an empty stage has no layer.
    const auto behind = std::ranges::upper_bound(boundaries_, layer);
    return static_cast<std::uint32_t>(behind - boundaries_.begin() - 1);
  }
  /// Returns the device of a layer.
  [[nodiscard]] rank_id rank_of(std::uint32_t layer) const noexcept {
    return rank_id{stage_of(layer) % to_number(world_)};
  }
  /// Returns the chunk of its device that contains a layer.
  [[nodiscard]] std::uint32_t chunk_of(std::uint32_t layer) const noexcept {
    return stage_of(layer) / to_number(world_);
  }
  /// Returns the device with the first layer: it reads the input. @pre there are layers
  [[nodiscard]] rank_id first() const noexcept { return rank_of(0); }
  /// Returns the device with the last layer: it computes the loss. @pre there are layers
  [[nodiscard]] rank_id last() const noexcept { return rank_of(layers() - 1); }

 private:
  struct held_tensor {
    tensor_shape shape;
    rank_id owner;
    rank_id tied;
  };

  static std::vector<std::uint32_t> even_boundaries(std::uint32_t layers, rank_count devices,
                                                    std::uint32_t chunks) {
    detail::check_world(devices, 0, "pipeline_stages");
    if (chunks == 0) throw argument_error("pipeline_stages: 0 chunks; a device has at least one");
    const std::uint64_t stages = std::uint64_t{to_number(devices)} * chunks;
    if (stages > 0xFFFF'FFFEU) {
      throw length_error("pipeline_stages: " + std::to_string(to_number(devices)) + " devices x " +
                         std::to_string(chunks) + " chunks; stages are 32 bits wide");
    }
    std::vector<std::uint32_t> boundaries(static_cast<std::size_t>(stages) + 1, 0);
    for (std::uint64_t stage = 0; stage < stages; ++stage) {
      const index_range share = even_share(layers, stage, stages);
      boundaries[static_cast<std::size_t>(stage) + 1] = static_cast<std::uint32_t>(share.first + share.count);
    }
    return boundaries;
  }

  void check_boundaries() const {
    const std::size_t stages = boundaries_.empty() ? 0 : boundaries_.size() - 1;
    if (stages > 0xFFFF'FFFEU) {
      throw length_error("pipeline_stages: " + std::to_string(stages) + " stages; they are 32 bits wide");
    }
    if (stages == 0 || stages % to_number(world_) != 0) {
      throw argument_error("pipeline_stages: " + std::to_string(stages) + " stages on " +
                           std::to_string(to_number(world_)) +
                           " devices; every device has as many, at least one");
    }
    if (boundaries_.front() != 0) {
      throw argument_error("pipeline_stages: the first boundary is " + std::to_string(boundaries_.front()) +
                           "; stages begin at layer 0");
    }
    for (std::size_t i = 1; i < boundaries_.size(); ++i) {
      if (boundaries_[i] >= boundaries_[i - 1]) continue;
      throw argument_error("pipeline_stages: boundary " + std::to_string(i) + " is " +
                           std::to_string(boundaries_[i]) + ", less than the one before it, " +
                           std::to_string(boundaries_[i - 1]));
    }
  }

  rank_count world_;
  std::vector<std::uint32_t> boundaries_;  // of stages, in layers
  std::vector<held_tensor> held_;
};

static_assert(partition<pipeline_stages>);

}  // namespace v0
}  // namespace llmmem
