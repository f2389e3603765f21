/// @file
/// Trainers and engines of random tensors, rules and partitions, and what every element of an engine must be.
#pragma once

#include <llmmem/model/bf16.hpp>
#include <llmmem/refit/refit.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/random.hpp"
#include "support/state_world.hpp"

namespace llmmem_tests {

/// Where an element of a target tensor comes from.
struct origin {
  std::uint32_t tensor = 0;
  std::uint64_t element = 0;
};

/// Two catalogues, the rules between them, and the origin of each element, found by lists of rows and
/// columns.
struct refit_model {
  std::vector<llmmem::refit_tensor> source;
  std::vector<llmmem::refit_tensor> target;
  std::vector<llmmem::refit_rule> rules;
  std::vector<std::vector<origin>> origins;  // by target tensor and element
};

inline std::vector<std::uint64_t> indices_of(const llmmem::refit_bands& bands, std::uint64_t all) {
  std::vector<std::uint64_t> list;
  if (bands.axis == llmmem::split_axis::none) {
    for (std::uint64_t i = 0; i < all; ++i)
      list.push_back(i);
    return list;
  }
  for (std::uint64_t i = 0; i < bands.count; ++i) {
    for (std::uint64_t j = 0; j < bands.run; ++j)
      list.push_back(bands.first + i * bands.stride + j);
  }
  return list;
}

/// Applies a rule between two tensors by the definition.
inline void trace_rule(refit_model& model, std::uint32_t s, std::uint32_t t, const llmmem::refit_rule& rule) {
  using llmmem::split_axis;
  const llmmem::tensor_shape& from = model.source[s].shape;
  const llmmem::tensor_shape& to = model.target[t].shape;
  auto& origins = model.origins[t];
  const bool by_columns = rule.from.axis == split_axis::columns || rule.to.axis == split_axis::columns;
  if (by_columns) {
    const auto a = indices_of(rule.from, from.columns());
    const auto b = indices_of(rule.to, to.columns());
    for (std::uint64_t r = 0; r < to.rows(); ++r) {
      for (std::size_t i = 0; i < a.size(); ++i)
        origins[r * to.columns() + b[i]] = {s, r * from.columns() + a[i]};
    }
    return;
  }
  std::vector<std::uint64_t> a;
  std::vector<std::uint64_t> b;
  for (const std::uint64_t row : indices_of(rule.from, from.rows())) {
    for (std::uint64_t c = 0; c < from.columns(); ++c)
      a.push_back(row * from.columns() + c);
  }
  for (const std::uint64_t row : indices_of(rule.to, to.rows())) {
    for (std::uint64_t c = 0; c < to.columns(); ++c)
      b.push_back(row * to.columns() + c);
  }
  for (std::size_t i = 0; i < a.size(); ++i)
    origins[b[i]] = {s, a[i]};
}

/// One to four groups of tensors: renamed, of one name, fused and split, or split and joined, by rows or
/// columns, one after the other or interleaved, experts stacked and apart.
inline refit_model random_refit(random_numbers& random, bool quantises) {
  using namespace llmmem;
  refit_model made;
  const std::uint64_t groups = 1 + random.below(std::uint64_t{4});
  const auto type = [&] {
    constexpr dtype all[] = {dtype::f32, dtype::bf16, dtype::f16};
    return all[random.below(std::uint64_t{3})];
  };
  for (std::uint64_t g = 0; g < groups; ++g) {
    const dtype source_type = type();
    const auto target_of = [&](std::string name, tensor_shape shape) {
      refit_tensor tensor{.name = std::move(name), .shape = shape, .element = source_type};
      if (source_type == dtype::f32)
        tensor.element = type();
      else if (random.once_in(3))
        tensor.element = dtype::f32;
      if (quantises && shape.columns() % 32 == 0 && shape.columns() != 0) {
        tensor.element = random.once_in(2) ? dtype::int8 : dtype::fp8_e4m3;
        tensor.group = shape.columns() % 64 == 0 && random.once_in(2) ? 64 : 32;
      }
      made.target.push_back(tensor);
      made.origins.emplace_back(shape.elements());
    };
    const auto source_of = [&](std::string name, tensor_shape shape) {
      made.source.push_back({.name = std::move(name), .shape = shape, .element = source_type});
    };
    const std::string id = std::to_string(g);
    const std::uint64_t columns =
        quantises ? 32 * (1 + random.below(std::uint64_t{3})) : 1 + random.below(std::uint64_t{7});
    const std::uint64_t rows = 1 + random.below(std::uint64_t{7});
    const auto kind = random.below(std::uint64_t{4});
    const auto trace = [&](std::span<const refit_rule> rules, bool is_stated) {
      for (const refit_rule& rule : rules) {
        for (std::uint32_t s = 0; s < made.source.size(); ++s) {
          for (std::uint32_t t = 0; t < made.target.size(); ++t) {
            if (made.source[s].name == rule.source && made.target[t].name == rule.target)
              trace_rule(made, s, t, rule);
          }
        }
        if (is_stated) made.rules.push_back(rule);
      }
    };
    if (kind == 0) {  // renamed, or not
      const bool is_named = random.once_in(2);
      source_of("same" + id, tensor_shape::matrix(rows, columns));
      target_of((is_named ? "other" : "same") + id, tensor_shape::matrix(rows, columns));
      const refit_rule rule{"same" + id, (is_named ? "other" : "same") + id};
      trace({&rule, 1}, is_named);
      continue;
    }
    if (kind == 1) {  // stacked experts
      const std::uint64_t experts = 1 + random.below(std::uint64_t{3});
      source_of("experts" + id, tensor_shape::matrix(experts, rows * columns));
      std::vector<refit_rule> rules;
      for (std::uint64_t e = 0; e < experts; ++e) {
        const std::string name = "expert" + id + "." + std::to_string(e);
        target_of(name, tensor_shape::matrix(rows, columns));
        rules.push_back({"experts" + id, name, refit_bands::rows(e, 1), {}});
      }
      trace(rules, true);
      continue;
    }
    const bool by_columns = !quantises && random.once_in(3);
    const split_axis axis = by_columns ? split_axis::columns : split_axis::rows;
    const std::uint64_t parts = 2 + random.below(std::uint64_t{2});
    const std::uint64_t repeats = random.once_in(2) ? 1 : 1 + random.below(std::uint64_t{3});
    const auto shape = [&](std::uint64_t size) {
      return by_columns ? tensor_shape::matrix(rows, size) : tensor_shape::matrix(size, columns);
    };
    std::vector<fused_part> fused;
    std::uint64_t total = 0;
    for (std::uint64_t p = 0; p < parts; ++p) {
      fused.push_back({"part" + id + "." + std::to_string(p), 1 + random.below(std::uint64_t{4})});
      total += fused.back().size;
    }
    const auto split = repeats == 1 && random.once_in(2)
                           ? split_fused("fused" + id, axis, fused)
                           : split_interleaved("fused" + id, axis, repeats, fused);
    const bool is_split = random.once_in(2);
    const auto add_whole = [&](auto&& to) { to("fused" + id, shape(total * repeats)); };
    const auto add_parts = [&](auto&& to) {
      for (const fused_part& each : fused)
        to(each.name, shape(each.size * repeats));
    };
    if (is_split) {
      add_whole(source_of);
      add_parts(target_of);
      trace(split, true);
    } else {
      add_parts(source_of);
      add_whole(target_of);
      trace(reversed(split), true);
    }
  }
  return made;
}

/// A world of ranks with both sides in random partitions; some ranks may be on both, some on none.
struct refit_sides {
  table_partition from;
  table_partition to;
  std::vector<llmmem::rank_id> senders;
  std::vector<llmmem::rank_id> receivers;
  std::uint32_t world = 0;

  [[nodiscard]] llmmem::refit_plan plan(const refit_model& model,
                                        const llmmem::refit_plan_options& options = {}) const {
    return llmmem::make_refit(llmmem::refit_side<table_partition>{model.source, from, senders},
                              llmmem::refit_side<table_partition>{model.target, to, receivers}, model.rules,
                              options);
  }
};

inline std::vector<llmmem::rank_id> random_ranks(random_numbers& random, std::uint32_t count,
                                                 std::uint32_t world) {
  std::vector<llmmem::rank_id> all;
  for (std::uint32_t i = 0; i < world; ++i)
    all.push_back(llmmem::rank_id{i});
  for (std::uint32_t i = 0; i < count; ++i)
    std::swap(all[i], all[i + random.below(world - i)]);
  all.resize(count);
  return all;
}

inline refit_sides random_sides(random_numbers& random, const refit_model& model, bool quantises) {
  using namespace llmmem;
  refit_sides made;
  const std::uint32_t senders = 1 + random.below(3U);
  const std::uint32_t receivers = 1 + random.below(3U);
  made.world = std::max(senders, receivers) + random.below(3U);
  made.senders = random_ranks(random, senders, made.world);
  made.receivers = random_ranks(random, receivers, made.world);
  made.from = partition_of_kind(random, facts_of(model.source), random.below(state_kinds), senders);
  if (quantises) {
    made.to = table_partition(split_2d(facts_of(model.target),
                                       std::vector<split_axis>(model.target.size(), split_axis::rows),
                                       rank_count{receivers}));
  } else {
    made.to = partition_of_kind(random, facts_of(model.target), random.below(state_kinds), receivers);
  }
  return made;
}

/// The contents of all source tensors of a version: finite numbers that differ by tensor, element and
/// version.
inline std::vector<std::vector<std::byte>> source_contents(const refit_model& model, std::uint64_t seed) {
  std::vector<std::vector<std::byte>> all;
  for (const llmmem::refit_tensor& each : model.source) {
    auto bytes = bytes_of_seed(llmmem::bytes_of(each.shape.elements(), each.element), seed + 31 * all.size());
    const std::size_t width = llmmem::bits_of(each.element) / 8;
    for (std::size_t i = width - 1; i < bytes.size(); i += width)
      bytes[i] = (bytes[i] & std::byte{0x87}) | std::byte{0x30};  // exponents in the middle: no NaN
    all.push_back(std::move(bytes));
  }
  return all;
}

/// The element of a source, in the form of the target, by the definition.
inline std::vector<std::byte> converted(const std::vector<std::vector<std::byte>>& contents,
                                        const refit_model& model, const origin& from, llmmem::dtype to) {
  using llmmem::dtype;
  const dtype has = model.source[from.tensor].element;
  std::vector<std::byte> out(llmmem::bits_of(to) / 8);
  llmmem::detail::convert_elements(
      has, contents[from.tensor].data() + from.element * (llmmem::bits_of(has) / 8), to, out.data(), 1);
  return out;
}

}  // namespace llmmem_tests
