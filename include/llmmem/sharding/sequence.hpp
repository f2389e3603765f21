/// @file
/// `sequence_split`: activations cut along the sequence, whole weights. The split of sequence parallelism.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/sharding/concepts.hpp>
#include <llmmem/sharding/element_runs.hpp>
#include <llmmem/sharding/ids.hpp>
#include <llmmem/sharding/split_2d.hpp>
#include <llmmem/sharding/tensor_shape.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The role of a tensor in sequence parallelism.
enum class sequence_role : std::uint8_t {
  along_sequence,  ///< its first dimension is the sequence: an activation [sequence, batch, hidden]
  whole,           ///< every rank holds all of it: the weights of a norm
};

/// The regions between the tensor-parallel ones (norms, dropout, residual sums) split along the sequence over
/// the ranks that share a layer (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2): each token passes
/// through them on one rank. The split is uneven if sides do not divide: the first ranks have one extra
/// token.
///
/// The 10 s b h bytes of activations that tensor parallelism leaves on every rank become 10 s b h / t. The
/// all-reduce before such a region becomes a reduce-scatter, and an all-gather after it feeds the next one:
/// as many bytes (`ring_sent_bytes`), by this count. All ranks hold the weights, and because each rank has
/// seen only some tokens, their gradients are all-reduced.
///
/// @par Complexity      `local` O(1), `owned` and `owner` O(log world).
/// @par Thread safety   as a plain value.
class sequence_split {
 public:
  /// @param roles  one for each tensor.
  /// @throws argument_error  when `world` is 0, the two lists differ in length, or a tensor without
  ///                         dimensions would be cut; length_error when the bytes together pass 2^63 - 1.
  sequence_split(std::span<const tensor_facts> tensors, std::span<const sequence_role> roles,
                 rank_count world)
      : split_(tensors, axes_of(tensors, roles, world), world) {}

  [[nodiscard]] rank_count world() const noexcept { return split_.world(); }
  [[nodiscard]] std::uint32_t tensors() const noexcept { return split_.tensors(); }
  [[nodiscard]] tensor_shape shape(tensor_id tensor) const noexcept { return split_.shape(tensor); }
  [[nodiscard]] element_runs local(tensor_id tensor, rank_id rank) const noexcept {
    return split_.local(tensor, rank);
  }
  [[nodiscard]] element_runs owned(tensor_id tensor, rank_id rank) const noexcept {
    return split_.owned(tensor, rank);
  }
  [[nodiscard]] rank_id owner(tensor_id tensor, std::uint64_t element) const noexcept {
    return split_.owner(tensor, element);
  }
  [[nodiscard]] bool is_replicated(tensor_id tensor) const noexcept { return split_.is_replicated(tensor); }

  [[nodiscard]] sequence_role role(tensor_id tensor) const noexcept {
    return split_.axis(tensor) == split_axis::rows ? sequence_role::along_sequence : sequence_role::whole;
  }
  /// Returns the tokens that `rank` holds of `tensor`.
  [[nodiscard]] index_range tokens(tensor_id tensor, rank_id rank) const noexcept {
    const std::uint64_t sequence = split_.shape(tensor).rows();
    if (role(tensor) == sequence_role::whole) return {0, sequence};
    return even_share(sequence, to_index(rank), to_number(world()));
  }

 private:
  static std::vector<split_axis> axes_of(std::span<const tensor_facts> tensors,
                                         std::span<const sequence_role> roles, rank_count world) {
    detail::check_world(world, tensors.size(), "sequence_split");
    if (roles.size() != tensors.size()) {
      throw argument_error("sequence_split: " + std::to_string(tensors.size()) + " tensors and " +
                           std::to_string(roles.size()) + " roles; each tensor has one");
    }
    std::vector<split_axis> axes(roles.size(), split_axis::none);
    for (std::size_t i = 0; i < roles.size(); ++i) {
      if (roles[i] == sequence_role::whole) continue;
      if (tensors[i].shape.dimensions() == 0) {
        throw argument_error("sequence_split: tensor '" + tensors[i].name +
                             "' has no dimensions and so no sequence; its role is `whole`");
      }
      axes[i] = split_axis::rows;
    }
    return axes;
  }

  split_2d split_;
};

static_assert(partition<sequence_split>);

}  // namespace v0
}  // namespace llmmem
