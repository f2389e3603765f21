/// @file
/// What every partition promises, element by element, and random partitions of every kind.
#pragma once

#include <llmmem/sharding/concepts.hpp>
#include <llmmem/sharding/experts.hpp>
#include <llmmem/sharding/flat_uneven.hpp>
#include <llmmem/sharding/grid.hpp>
#include <llmmem/sharding/hierarchical_zero.hpp>
#include <llmmem/sharding/partition_bytes.hpp>
#include <llmmem/sharding/replicated.hpp>
#include <llmmem/sharding/sequence.hpp>
#include <llmmem/sharding/split_2d.hpp>
#include <llmmem/sharding/stages.hpp>
#include <llmmem/sharding/whole_matrices.hpp>
#include <llmmem/sharding/zero.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <variant>
#include <vector>

#include "support/random.hpp"
#include "support/sharding_world.hpp"

namespace llmmem_tests {

/// `count` tensors of the given shapes, all of one width.
inline std::vector<llmmem::tensor_facts> tensors_of(const std::vector<llmmem::tensor_shape>& shapes,
                                                    std::uint32_t element_bytes = 4) {
  std::vector<llmmem::tensor_facts> all;
  for (const llmmem::tensor_shape& each : shapes)
    all.push_back({.name = "w", .shape = each, .element_bytes = element_bytes});
  return all;
}

/// Every element is held by one rank at least and owned by exactly one, which holds it; `owner` says which;
/// what is replicated is held by all; and the bytes of ranks are those of their elements.
template <llmmem::partition P>
void check_partition(const P& p, const std::vector<llmmem::tensor_facts>& tensors, llmmem::rank_count world) {
  using namespace llmmem;
  REQUIRE(p.world() == world);
  REQUIRE(p.tensors() == tensors.size());
  std::vector<std::uint64_t> held(to_number(world), 0);
  std::vector<std::uint64_t> written(to_number(world), 0);
  for (std::uint32_t t = 0; t < tensors.size(); ++t) {
    const tensor_id tensor{t};
    const std::uint64_t elements = tensors[t].shape.elements();
    REQUIRE(p.shape(tensor) == tensors[t].shape);
    for (std::uint32_t r = 0; r < to_number(world); ++r) {
      REQUIRE(p.local(tensor, rank_id{r}).is_valid(elements));
      REQUIRE(p.owned(tensor, rank_id{r}).is_valid(elements));
      held[r] += p.local(tensor, rank_id{r}).elements() * tensors[t].element_bytes;
      written[r] += p.owned(tensor, rank_id{r}).elements() * tensors[t].element_bytes;
      if (p.is_replicated(tensor)) REQUIRE(p.local(tensor, rank_id{r}) == element_runs::all_of(elements));
    }
    for (std::uint64_t e = 0; e < elements; ++e) {
      const rank_id owner = p.owner(tensor, e);
      std::uint32_t owners = 0;
      for (std::uint32_t r = 0; r < to_number(world); ++r) {
        if (!p.owned(tensor, rank_id{r}).contains(e)) continue;
        ++owners;
        REQUIRE(owner == rank_id{r});
        REQUIRE(p.local(tensor, rank_id{r}).contains(e));
      }
      REQUIRE(owners == 1);
    }
  }
  for (std::uint32_t r = 0; r < to_number(world); ++r) {
    REQUIRE(local_bytes(p, tensors, rank_id{r}) == held[r]);
    REQUIRE(owned_bytes(p, tensors, rank_id{r}) == written[r]);
  }
}

/// A partition of any kind over a catalogue of one's own.
using any_layout =
    std::variant<llmmem::sharding::replicated, llmmem::flat_uneven, llmmem::split_2d, llmmem::zero_partition,
                 llmmem::hierarchical_zero, llmmem::sequence_split, llmmem::grid_partition,
                 llmmem::pipeline_stages, llmmem::expert_parallel, llmmem::whole_matrices>;
inline constexpr std::uint32_t layout_kinds = partition_kinds + 7;

/// Three sides whose product is `world`, each of them anything it can be.
inline llmmem::process_grid random_grid(random_numbers& random, std::uint32_t world) {
  const auto divisor = [&](std::uint32_t of) {
    std::uint32_t found = 1 + random.below(of);
    while (of % found != 0)
      --found;
    return found;
  };
  const std::uint32_t depth = divisor(world);
  const std::uint32_t rows = divisor(world / depth);
  return llmmem::process_grid(rows, world / depth / rows, depth);
}

/// Kinds below `partition_kinds` are those of `random_partition`; then zero, hierarchical zero, sequence,
/// grid, stages, experts, whole matrices.
inline any_layout random_layout(random_numbers& random, const std::vector<llmmem::tensor_facts>& tensors,
                                std::uint32_t kind, llmmem::rank_count world) {
  using namespace llmmem;
  if (kind < partition_kinds) {
    return std::visit([](auto p) -> any_layout { return p; }, random_partition(random, tensors, kind, world));
  }
  switch (kind - partition_kinds) {
    case 0:
      return zero_partition(tensors, world, static_cast<zero_stage>(random.below(4U)),
                            static_cast<state_kind>(random.below(3U)));
    case 1:
      return hierarchical_zero(tensors, world, rank_count{1 + random.below(to_number(world) + 2)});
    case 2: {
      std::vector<sequence_role> roles;
      for (const tensor_facts& each : tensors) {
        const bool cut = each.shape.dimensions() != 0 && random.once_in(2);
        roles.push_back(cut ? sequence_role::along_sequence : sequence_role::whole);
      }
      return sequence_split(tensors, roles, world);
    }
    case 3: {
      std::vector<grid_role> roles;
      for (const tensor_facts& each : tensors) {
        grid_role role = grid_role::whole;
        if (each.shape.dimensions() == 1 && !random.once_in(4)) role = grid_role::bias;
        if (each.shape.dimensions() > 1 && !random.once_in(4)) {
          role = random.once_in(2) ? grid_role::weight : grid_role::activation;
        }
        roles.push_back(role);
      }
      return grid_partition(tensors, roles, random_grid(random, to_number(world)));
    }
    case 4: {
      const std::uint32_t layers = 1 + random.below(9U);
      std::vector<layer_place> places;
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        const std::uint32_t layer = random.below(layers);
        places.push_back(random.once_in(3) ? layer_place::in_both(layer, random.below(layers))
                                           : layer_place::in(layer));
      }
      return pipeline_stages(tensors, places, layers, world, 1 + random.below(3U));
    }
    case 5: {
      const std::uint32_t experts = 1 + random.below(7U);
      std::vector<expert_id> of;
      for (std::size_t i = 0; i < tensors.size(); ++i)
        of.push_back(random.once_in(3) ? no_expert : expert_id{random.below(experts)});
      return expert_parallel(tensors, of, experts, world);
    }
    default:
      return whole_matrices(tensors, world);
  }
}

}  // namespace llmmem_tests
