/// @file
/// `expert_parallel`: each expert of a mixture on one rank, the rest of the model on all.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/sharding/concepts.hpp>
#include <llmmem/sharding/detail/owner_table.hpp>
#include <llmmem/sharding/element_runs.hpp>
#include <llmmem/sharding/ids.hpp>
#include <llmmem/sharding/tensor_shape.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// One of the experts of a layer, from 0.
enum class expert_id : std::uint32_t {};

/// No expert: for a tensor that all ranks hold, or a choice that a router did not make.
inline constexpr expert_id no_expert{0xFFFF'FFFF};

/// The number in it, to index with.
[[nodiscard]] constexpr std::uint32_t to_index(expert_id expert) noexcept {
  return static_cast<std::uint32_t>(expert);
}

/// Returns the experts of a rank: as even as possible, in their order. With more ranks than experts the last
/// ranks have none.
/// @pre `rank` is less than `world`
[[nodiscard]] constexpr index_range experts_of(std::uint32_t experts, rank_count world,
                                               rank_id rank) noexcept {
  return even_share(experts, to_index(rank), to_number(world));
}
/// Returns the rank of an expert. @pre `expert` is less than `experts`
[[nodiscard]] constexpr rank_id rank_of(expert_id expert, std::uint32_t experts, rank_count world) noexcept {
  return rank_id{static_cast<std::uint32_t>(even_share_of(experts, to_index(expert), to_number(world)))};
}

/// Each expert's tensors are on the rank that has it, all others on every rank (GShard: Lepikhin et al. 2020,
/// arXiv 2006.16668; Switch: Fedus et al. 2021, arXiv 2101.03961; FastMoE: He et al. 2021, arXiv 2103.13262).
/// The ranks share the writes of tensors that all hold, so that these bytes even out those of the experts.
///
/// Expert e of every layer is on the same rank. `token_dispatch` decides which tokens go there.
///
/// @par Complexity      `local` O(1), `owned` and `owner` O(log world) for tensors that all hold, else O(1).
/// @par Thread safety   as a plain value.
class expert_parallel {
 public:
  /// @param expert_of  of each tensor; `no_expert` for tensors that all hold: attention, norms, the router.
  /// @param experts    the number of experts.
  /// @throws argument_error  when `world` is 0, the two lists differ in length, or a tensor names an expert
  ///                         that does not exist; length_error when the bytes together pass 2^63 - 1.
  expert_parallel(std::span<const tensor_facts> tensors, std::span<const expert_id> expert_of,
                  std::uint32_t experts, rank_count world)
      : world_(world), experts_(experts), expert_of_(expert_of.begin(), expert_of.end()) {
    detail::check_world(world, tensors.size(), "expert_parallel");
    if (expert_of.size() != tensors.size()) {
      throw argument_error("expert_parallel: " + std::to_string(tensors.size()) + " tensors and " +
                           std::to_string(expert_of.size()) +
                           " experts of tensors; each tensor has one, or `no_expert`");
    }
    shapes_.reserve(tensors.size());
    std::vector<sharding::cuttable_item> whole(tensors.size());  // empty for experts: their owner is known
    std::vector<std::uint64_t> written(to_number(world), 0);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const tensor_facts& each = tensors[i];
      shapes_.push_back(each.shape);
      const std::uint64_t bytes = each.bytes();
      if (expert_of_[i] == no_expert) {
        whole[i] = {each.shape.elements(), each.element_bytes};
        continue;
      }
      if (to_index(expert_of_[i]) >= experts) {
        throw argument_error("expert_parallel: tensor '" + each.name + "' is of expert " +
                             std::to_string(to_index(expert_of_[i])) + ", and there are " +
                             std::to_string(experts));
      }
      std::uint64_t& sum = written[to_index(rank_of_expert(expert_of_[i]))];
      sum = checked_add(sum, bytes, "expert_parallel: bytes of one rank");
    }
    owners_ = detail::owner_table(whole, written);
  }

  [[nodiscard]] rank_count world() const noexcept { return world_; }
  [[nodiscard]] std::uint32_t tensors() const noexcept { return static_cast<std::uint32_t>(shapes_.size()); }
  [[nodiscard]] tensor_shape shape(tensor_id tensor) const noexcept { return shapes_[to_index(tensor)]; }

  /// Returns all of the tensor, or nothing.
  [[nodiscard]] element_runs local(tensor_id tensor, rank_id rank) const noexcept {
    const expert_id expert = expert_of_[to_index(tensor)];
    if (expert != no_expert && rank_of_expert(expert) != rank) return {};
    return element_runs::all_of(shapes_[to_index(tensor)].elements());
  }
  [[nodiscard]] element_runs owned(tensor_id tensor, rank_id rank) const noexcept {
    return expert_of_[to_index(tensor)] == no_expert ? owners_.owned(tensor, rank) : local(tensor, rank);
  }
  [[nodiscard]] rank_id owner(tensor_id tensor, std::uint64_t element) const noexcept {
    const expert_id expert = expert_of_[to_index(tensor)];
    return expert == no_expert ? owners_.owner(tensor, element) : rank_of_expert(expert);
  }
  [[nodiscard]] bool is_replicated(tensor_id tensor) const noexcept {
    return expert_of_[to_index(tensor)] == no_expert || to_number(world_) == 1;
  }

  /// Returns the number of experts.
  [[nodiscard]] std::uint32_t experts() const noexcept { return experts_; }
  /// The expert of a tensor, or `no_expert`.
  [[nodiscard]] expert_id expert_of(tensor_id tensor) const noexcept { return expert_of_[to_index(tensor)]; }
  /// The rank of an expert.
  [[nodiscard]] rank_id rank_of_expert(expert_id expert) const noexcept {
    return rank_of(expert, experts_, world_);
  }

 private:
  rank_count world_;
  std::uint32_t experts_;
  std::vector<tensor_shape> shapes_;
  std::vector<expert_id> expert_of_;
  detail::owner_table owners_;
};

static_assert(partition<expert_parallel>);

}  // namespace v0
}  // namespace llmmem
