/// @file
/// `whole_matrices`: each tensor on one rank, so that all ranks have about the same work. The split of Muon.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/sharding/balance.hpp>
#include <llmmem/sharding/concepts.hpp>
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

/// Returns the multiplications of Muon's `steps` Newton-Schulz steps on a matrix, with m its shorter and n
/// its longer side: 2 m^2 n + m^3 a step. A tensor of one row or one column is updated element by element,
/// and counts its elements.
/// @throws length_error  past 2^63 - 1.
[[nodiscard]] constexpr std::uint64_t newton_schulz_cost(const tensor_shape& shape, std::uint64_t steps = 5) {
  const std::uint64_t m = shape.rows() < shape.columns() ? shape.rows() : shape.columns();
  const std::uint64_t n = shape.rows() < shape.columns() ? shape.columns() : shape.rows();
  if (m <= 1) return shape.elements();
  constexpr const char* what = "newton_schulz_cost: multiplications";
  const std::uint64_t square = checked_multiply(m, m, what);
  const std::uint64_t sides = checked_add(checked_multiply(2, n, what), m, what);
  return checked_multiply(steps, checked_multiply(square, sides, what), what);
}

/// Whole tensors on ranks: a rank holds and owns all of a tensor, or nothing. Optimizers that need a whole
/// matrix (Muon) then run on its owner as they do alone, so that their results depend neither on the number
/// of ranks nor on the split.
///
/// Tensors are assigned by cost and not by bytes, the costliest first, each to the rank with the least cost
/// so far (`assign_writers`). Without earlier costs, the busiest rank has at most 4/3 - 1/(3 world) times the
/// cost that the best assignment would give it. A model with fewer matrices than ranks leaves ranks idle, and
/// a matrix that costs more than a rank's even share is never cut: use `flat_uneven` for updates that work
/// element by element.
///
/// @par Complexity      construction O(tensors x (log tensors + log world)); all other calls O(1).
/// @par Thread safety   as a plain value.
/// @par Source   Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17, 1969; by cost:
///      Megatron-LM's layer-wise optimizer (megatron/core/optimizer/layer_wise_optimizer.py).
class whole_matrices {
 public:
  /// @param costs    of the tensors, in any unit.
  /// @param already  the cost that each rank has of other tensors; its size is the world. Pass the loads of
  ///                 an earlier assignment to balance several together.
  /// @throws argument_error  when `already` is empty, or costs and tensors differ in number; length_error
  ///                         when the costs together pass 2^63 - 1.
  whole_matrices(std::span<const tensor_facts> tensors, std::span<const std::uint64_t> costs,
                 std::span<const std::uint64_t> already)
      : loads_(already.begin(), already.end()) {
    if (costs.size() != tensors.size()) {
      throw argument_error("whole_matrices: " + std::to_string(costs.size()) + " costs of " +
                           std::to_string(tensors.size()) + " tensors; give one for each");
    }
    owners_ = assign_writers(costs, already);
    detail::check_world(world(), tensors.size(), "whole_matrices");
    shapes_.reserve(tensors.size());
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      shapes_.push_back(tensors[i].shape);
      loads_[to_index(owners_[i])] += costs[i];
    }
  }
  /// By `newton_schulz_cost`.
  whole_matrices(std::span<const tensor_facts> tensors, rank_count world)
      : whole_matrices(tensors, costs_of(tensors), std::vector<std::uint64_t>(to_number(world), 0)) {}

  [[nodiscard]] rank_count world() const noexcept {
    return rank_count{static_cast<std::uint32_t>(loads_.size())};
  }
  [[nodiscard]] std::uint32_t tensors() const noexcept { return static_cast<std::uint32_t>(shapes_.size()); }
  [[nodiscard]] tensor_shape shape(tensor_id tensor) const noexcept { return shapes_[to_index(tensor)]; }
  [[nodiscard]] element_runs local(tensor_id tensor, rank_id rank) const noexcept {
    return owner(tensor) == rank ? element_runs::all_of(shape(tensor).elements()) : element_runs{};
  }
  [[nodiscard]] element_runs owned(tensor_id tensor, rank_id rank) const noexcept {
    return local(tensor, rank);
  }
  [[nodiscard]] rank_id owner(tensor_id tensor, std::uint64_t /*element*/) const noexcept {
    return owner(tensor);
  }
  [[nodiscard]] bool is_replicated(tensor_id /*tensor*/) const noexcept { return loads_.size() == 1; }

  [[nodiscard]] rank_id owner(tensor_id tensor) const noexcept { return owners_[to_index(tensor)]; }
  /// Returns the cost of each rank, with what it had before.
  [[nodiscard]] std::span<const std::uint64_t> loads() const noexcept LLMMEM_LIFETIMEBOUND { return loads_; }

 private:
  [[nodiscard]] static std::vector<std::uint64_t> costs_of(std::span<const tensor_facts> tensors) {
    std::vector<std::uint64_t> all;
    all.reserve(tensors.size());
    for (const tensor_facts& each : tensors)
      all.push_back(newton_schulz_cost(each.shape));
    return all;
  }

  std::vector<tensor_shape> shapes_{};
  std::vector<rank_id> owners_{};
  std::vector<std::uint64_t> loads_;
};

static_assert(partition<whole_matrices>);

}  // namespace v0
}  // namespace llmmem
