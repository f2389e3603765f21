/// @file
/// Random tensors, sets of their elements and partitions, and the naive models they are compared with.
#pragma once

#include <llmmem/sharding/concepts.hpp>
#include <llmmem/sharding/element_runs.hpp>
#include <llmmem/sharding/flat_uneven.hpp>
#include <llmmem/sharding/replicated.hpp>
#include <llmmem/sharding/split_2d.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "support/random.hpp"

namespace llmmem_tests {

/// By the definition of element_runs.
inline std::set<std::uint64_t> elements_of(const llmmem::element_runs& runs) {
  std::set<std::uint64_t> all;
  for (std::uint64_t i = 0; i < runs.count; ++i) {
    for (std::uint64_t j = 0; j < runs.run; ++j)
      all.insert(runs.begin + i * runs.stride + j);
  }
  return all;
}

/// 0 to 4 dimensions of 0 to `limit`.
inline llmmem::tensor_shape random_shape(random_numbers& random, std::uint64_t limit) {
  std::vector<std::uint64_t> dimensions(random.below(std::uint64_t{4}));
  for (auto& each : dimensions)
    each = random.once_in(8) ? 0 : 1 + random.below(limit);
  return llmmem::tensor_shape::of(dimensions);
}

inline llmmem::index_range random_range(random_numbers& random, std::uint64_t limit) {
  const std::uint64_t first = random.below(limit + 1);
  return {first, random.below(limit - first + 1)};
}

/// A set of elements of a tensor of `elements`: any canonical one may come.
inline llmmem::element_runs random_runs(random_numbers& random, std::uint64_t elements) {
  if (elements == 0 || random.once_in(10)) return {};
  if (random.once_in(3)) {
    const llmmem::index_range range = random_range(random, elements);
    return llmmem::element_runs::flat_range(range.first, range.count);
  }
  const std::uint64_t stride = 1 + random.below(elements);
  const std::uint64_t run = 1 + random.below(stride);
  const std::uint64_t begin = random.below(elements - run + 1);
  const std::uint64_t count = 1 + random.below((elements - begin - run) / stride + 1);
  if (count == 1 || run == stride) return llmmem::element_runs::flat_range(begin, run * count);
  return {begin, run, stride, count};
}

inline std::vector<llmmem::tensor_facts> random_tensors(random_numbers& random, std::uint64_t limit) {
  std::vector<llmmem::tensor_facts> tensors(1 + random.below(std::uint64_t{5}));
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    tensors[i].name.push_back('t');
    tensors[i].name += std::to_string(i);  // of "t" + ... g++ 12 warns at -O3
    tensors[i].shape = random_shape(random, limit);
    tensors[i].element_bytes = 1U << random.below(4U);
  }
  return tensors;
}

using any_partition = std::variant<llmmem::sharding::replicated, llmmem::flat_uneven, llmmem::split_2d>;
inline constexpr std::uint32_t partition_kinds = 5;

/// Kind 0: replicated; 1: flat, even; 2: flat, anywhere; 3: split, as a layer of column_parallel and
/// row_parallel alternates; 4: split, axes at random.
inline any_partition random_partition(random_numbers& random,
                                      const std::vector<llmmem::tensor_facts>& tensors, std::uint32_t kind,
                                      llmmem::rank_count world) {
  if (kind == 0) return llmmem::sharding::replicated(tensors, world);
  if (kind == 1) return llmmem::flat_uneven::even(tensors, world);
  if (kind == 2) {
    std::uint64_t elements = 0;
    for (const auto& each : tensors)
      elements += each.shape.elements();
    std::vector<std::uint64_t> boundaries{0, elements};
    while (boundaries.size() <= to_number(world))
      boundaries.push_back(random.below(elements + 1));
    std::sort(boundaries.begin(), boundaries.end());
    return llmmem::flat_uneven(tensors, boundaries);
  }
  std::vector<llmmem::split_axis> axes;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto layer =
        i % 2 == 0 ? llmmem::parallel_linear::column_parallel : llmmem::parallel_linear::row_parallel;
    axes.push_back(axis_of(layer, tensors[i].shape));
    if (kind == 4) {
      axes.back() =
          static_cast<llmmem::split_axis>(random.below(tensors[i].shape.dimensions() < 2 ? 2U : 3U));
    }
  }
  return llmmem::split_2d(tensors, axes, world);
}

}  // namespace llmmem_tests
