/// @file
/// SUMMA as a plan: which rank broadcasts which block to which ranks, step by step.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/sharding/concepts.hpp>
#include <llmmem/sharding/element_runs.hpp>
#include <llmmem/sharding/grid.hpp>
#include <llmmem/sharding/ids.hpp>
#include <llmmem/sharding/process_grid.hpp>
#include <llmmem/sharding/tensor_shape.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The matrices of C = A B: A is m x k, B is k x n.
struct product_shape {
  std::uint64_t m = 0;
  std::uint64_t n = 0;
  std::uint64_t k = 0;

  friend constexpr bool operator==(const product_shape&, const product_shape&) noexcept = default;
};

/// One of the two factors.
enum class summa_factor : std::uint8_t {
  a,  ///< activations: broadcast along a row of the grid
  b,  ///< weights: broadcast along a column of the grid
};

/// A block that one rank sends to its group.
struct summa_broadcast {
  summa_factor factor = summa_factor::a;
  rank_id root{};
  std::vector<rank_id> to{};  ///< the others of its row or column group
  grid_block block{};         ///< rows and columns in the whole matrix; within the root's own block

  [[nodiscard]] constexpr std::uint64_t elements() const noexcept {
    return block.rows.count * block.columns.count;
  }
  friend bool operator==(const summa_broadcast&, const summa_broadcast&) = default;
};

/// One step: every rank receives a panel of A and one of B, and adds their product to its block of C.
struct summa_step {
  index_range inner{};                        ///< the columns of A and rows of B of this step
  std::vector<summa_broadcast> broadcasts{};  ///< those of A, then of B, by root; none depends on another

  friend bool operator==(const summa_step&, const summa_step&) = default;
};

/// A product on a grid, as data.
///
/// @par Thread safety   a plain value.
struct summa_plan {
  process_grid grid{};
  product_shape shape{};
  std::vector<summa_step> steps{};

  /// Returns the block of C that the rank at `place` computes.
  [[nodiscard]] constexpr grid_block result_block(const grid_place& place) const noexcept {
    const std::uint64_t bands = std::uint64_t{grid.rows()} * grid.depth();
    return {even_share(shape.m, std::uint64_t{place.layer} * grid.rows() + place.row, bands),
            even_share(shape.n, place.column, grid.columns())};
  }
  friend bool operator==(const summa_plan&, const summa_plan&) = default;
};

/// C = A B by SUMMA (van de Geijn and Watts 1997), with A and C as activations of `grid_partition`, and B as
/// its weight. This is Optimus' forward pass (arXiv 2104.05343) and, with depth, Tesseract's (arXiv
/// 2105.14500), in which every layer of depth does the same for its own rows of A.
///
/// Steps go through k. On a square grid there are q, one for each column of blocks of A; on other grids, k is
/// cut wherever a block of A or of B ends, which is q1 + q2 - gcd(q1, q2) steps if both divide k. A step
/// without elements is left out, and so is a broadcast of no elements, to no rank, or to a rank without a
/// block of C.
///
/// The two products of the backward pass, A' = C B^T and B' = A^T C, broadcast one factor and *reduce* along
/// the other axis the blocks that this plan broadcasts, in as many bytes.
///
/// @par Complexity   O(steps x world) in time and memory.
/// @throws length_error  when m k, k n or m n pass 2^63 - 1.
[[nodiscard]] inline summa_plan plan_summa(const process_grid& grid, const product_shape& shape) {
  static_cast<void>(checked_multiply(shape.m, shape.k, "plan_summa: m x k"));
  static_cast<void>(checked_multiply(shape.k, shape.n, "plan_summa: k x n"));
  static_cast<void>(checked_multiply(shape.m, shape.n, "plan_summa: m x n"));
  std::vector<std::uint64_t> cuts(1, 0);
  for (const std::uint32_t parts : {grid.columns(), grid.rows()}) {
    for (std::uint32_t part = 0; part < parts; ++part) {
      const index_range share = even_share(shape.k, part, parts);
      cuts.push_back(share.first + share.count);
    }
  }
  std::ranges::sort(cuts);

  summa_plan plan{.grid = grid, .shape = shape, .steps = {}};
  const auto send = [&](summa_step& step, summa_factor factor, rank_id root, const grid_block& block) {
    const bool is_a = factor == summa_factor::a;
    summa_broadcast each{.factor = factor, .root = root, .to = {}, .block = block};
    if (each.elements() == 0) return;
    each.to = is_a ? grid.row_group(root) : grid.column_group(root);
    std::erase_if(each.to, [&](rank_id to) {
      const grid_block result = plan.result_block(grid.coordinates_of(to));
      return to == root || result.rows.count == 0 || result.columns.count == 0;
    });
    if (!each.to.empty()) step.broadcasts.push_back(std::move(each));
  };
  for (std::size_t i = 1; i < cuts.size(); ++i) {
    if (cuts[i] == cuts[i - 1]) continue;
    summa_step step{.inner = {cuts[i - 1], cuts[i] - cuts[i - 1]}, .broadcasts = {}};
    const auto column = static_cast<std::uint32_t>(even_share_of(shape.k, cuts[i - 1], grid.columns()));
    const auto row = static_cast<std::uint32_t>(even_share_of(shape.k, cuts[i - 1], grid.rows()));
    for (std::uint32_t layer = 0; layer < grid.depth(); ++layer) {
      for (std::uint32_t r = 0; r < grid.rows(); ++r) {
        const grid_place root{.row = r, .column = column, .layer = layer};
        send(step, summa_factor::a, grid.rank_at(root), {plan.result_block(root).rows, step.inner});
      }
    }
    for (std::uint32_t layer = 0; layer < grid.depth(); ++layer) {
      for (std::uint32_t c = 0; c < grid.columns(); ++c) {
        const grid_place root{.row = row, .column = c, .layer = layer};
        send(step, summa_factor::b, grid.rank_at(root), {step.inner, plan.result_block(root).columns});
      }
    }
    plan.steps.push_back(std::move(step));
  }
  return plan;
}

/// The number of elements of A and B that a plan moves.
struct summa_traffic {
  std::vector<std::uint64_t> received{};  ///< elements received by each rank, for any broadcast algorithm
  std::uint64_t total = 0;                ///< elements received by all
  std::uint64_t broadcasts = 0;
  /// The time of binomial trees if the steps follow each other. A step takes ceil(log2 g) rounds in a group
  /// of g, for its largest block of A and then of B. On q x q ranks log2(p) / (2 sqrt p) x (|A| + |B|),
  /// Optimus' cost, if q divides all sides and is a power of two.
  std::uint64_t tree_elements = 0;

  friend bool operator==(const summa_traffic&, const summa_traffic&) = default;
};

/// Counts the elements that a plan carries; multiply by the bytes of an element.
/// @par Complexity   O(steps x world).
[[nodiscard]] inline summa_traffic traffic_of(const summa_plan& plan) {
  summa_traffic traffic;
  traffic.received.resize(to_number(plan.grid.world()));
  const auto rounds = [](std::uint64_t group) {
    std::uint64_t count = 0;
    while ((std::uint64_t{1} << count) < group)
      ++count;
    return count;
  };
  for (const summa_step& step : plan.steps) {
    std::uint64_t a = 0;
    std::uint64_t b = 0;
    for (const summa_broadcast& each : step.broadcasts) {
      ++traffic.broadcasts;
      for (const rank_id to : each.to)
        traffic.received[to_index(to)] += each.elements();
      traffic.total += each.elements() * each.to.size();
      std::uint64_t& largest = each.factor == summa_factor::a ? a : b;
      largest = std::max(largest, each.elements());
    }
    traffic.tree_elements += a * rounds(plan.grid.columns()) + b * rounds(plan.grid.rows());
  }
  return traffic;
}

}  // namespace v0
}  // namespace llmmem
