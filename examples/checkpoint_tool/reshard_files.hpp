/// @file
/// The files of a checkpoint for other ranks.
#pragma once

#include <llmmem/checkpoint/file_plan.hpp>
#include <llmmem/checkpoint/manifest.hpp>
#include <llmmem/error.hpp>
#include <llmmem/model/safetensors.hpp>
#include <llmmem/sharding/flat_uneven.hpp>
#include <llmmem/sharding/ids.hpp>
#include <llmmem/sharding/replicated.hpp>
#include <llmmem/sharding/split_2d.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "checkpoint_tool/command_line.hpp"
#include "checkpoint_tool/describe.hpp"
#include "common/text.hpp"

namespace checkpoint_tool {

/// The ranks that a checkpoint is made for.
struct reshard_options {
  std::uint32_t world = 1;
  partition_kind partition = partition_kind::flat;
  std::uint64_t max_shard_bytes = 5'000'000'000;
  std::optional<std::string> tensor_prefix{};
};

/// The source of the bytes of a file's span.
struct span_source {
  const llmmem::checkpoint_tensor* tensor = nullptr;
  llmmem::element_runs part{};
};

/// The files that one rank writes. Spans of files name sources by their index.
struct rank_files {
  llmmem::file_plan plan{};
  std::vector<span_source> sources{};
};

namespace detail {

/// Takes ` "<before>00001-of-00002"` off the end of `text`, if it is there.
inline void take_numbers(std::string_view& text, std::string_view before) {
  constexpr std::string_view of = "-of-";
  const auto is_number = [](std::string_view digits) {
    return digits.size() >= 5 && example::parse_count(digits).has_value();
  };
  const std::size_t second = text.rfind(of);
  if (second == std::string_view::npos || !is_number(text.substr(second + of.size()))) return;
  const std::size_t first = text.rfind(before, second - 1);
  if (first == std::string_view::npos) return;
  const std::size_t digits = first + before.size();
  if (digits > second || !is_number(text.substr(digits, second - digits))) return;
  text = text.substr(0, first);
}

/// A partition of any kind: the elements that rank `rank` writes of tensor `tensor`.
class rank_parts {
 public:
  rank_parts(const std::vector<const llmmem::checkpoint_tensor*>& tensors, const reshard_options& options)
      : world_(options.world), parts_(make(tensors, options)) {
    for (const llmmem::checkpoint_tensor* const each : tensors)
      is_packed_.push_back(bits_of(each->type) < 8);
  }

  [[nodiscard]] llmmem::element_runs of(std::uint32_t tensor, std::uint64_t elements,
                                        std::uint32_t rank) const {
    // No byte is cut: the ranks alternately take tensors whose elements share bytes.
    if (is_packed_[tensor]) {
      return tensor % world_ == rank ? llmmem::element_runs::all_of(elements) : llmmem::element_runs{};
    }
    return std::visit(
        [&](const auto& parts) { return parts.owned(llmmem::tensor_id{tensor}, llmmem::rank_id{rank}); },
        parts_);
  }

 private:
  using any_partition = std::variant<llmmem::flat_uneven, llmmem::split_2d, llmmem::sharding::replicated>;

  [[nodiscard]] static any_partition make(const std::vector<const llmmem::checkpoint_tensor*>& tensors,
                                          const reshard_options& options) {
    std::vector<llmmem::tensor_facts> facts;
    std::vector<llmmem::split_axis> axes;
    for (const llmmem::checkpoint_tensor* const each : tensors) {
      const std::uint64_t bits = bits_of(each->type);
      llmmem::tensor_facts fact{each->name, llmmem::tensor_shape::of(each->shape),
                                static_cast<std::uint32_t>(std::max<std::uint64_t>(bits / 8, 1))};
      if (bits < 8) fact.shape = llmmem::tensor_shape::vector(0);
      using enum llmmem::split_axis;
      const std::uint64_t least = options.partition == partition_kind::rows ? 1 : 2;
      axes.push_back(fact.shape.dimensions() < least             ? none
                     : options.partition == partition_kind::rows ? rows
                                                                 : columns);
      facts.push_back(std::move(fact));
    }
    const llmmem::rank_count world{options.world};
    if (options.partition == partition_kind::flat) return llmmem::flat_uneven::even(facts, world);
    if (options.partition == partition_kind::replicated) return llmmem::sharding::replicated(facts, world);
    return llmmem::split_2d(facts, axes, world);
  }

  std::uint32_t world_;
  any_partition parts_;
  std::vector<bool> is_packed_{};
};

/// The first rank takes all extras under their names, even if there is no rank 2 for `rank.2/...`.
inline void add_extras(rank_files& to, const llmmem::checkpoint_manifest& from, std::uint32_t world) {
  std::vector<llmmem::safetensors_tensor> stored;
  std::vector<const llmmem::checkpoint_tensor*> extras;
  for (const llmmem::checkpoint_tensor& each : from.tensors) {
    if (!is_extra(each)) continue;
    extras.push_back(&each);
    stored.push_back({each.name, each.type, each.shape});
  }
  if (extras.empty()) return;
  const auto name_of_extra = [](const llmmem::checkpoint_tensor* each) -> const std::string& {
    return each->name;
  };
  std::ranges::sort(extras, {}, name_of_extra);
  const auto file = static_cast<std::uint32_t>(to.plan.files.size());
  llmmem::safetensors_layout layout = lay_out_safetensors(std::move(stored));
  const std::uint64_t bytes = layout.file_bytes();
  llmmem::planned_file planned{
      world == 1 ? "extra.safetensors" : fmt::format("extra-rank-00001-of-{:05}.safetensors", world),
      std::move(layout.head),
      bytes,
      {}};
  for (const llmmem::safetensors_entry& entry : layout.header.entries) {
    const auto found = std::ranges::lower_bound(extras, entry.name, {}, name_of_extra);
    const auto all = llmmem::element_runs::all_of(elements_of(**found));
    if (entry.bytes() != 0) {
      planned.spans.push_back({layout.header.data_begin + entry.begin, entry.bytes(),
                               static_cast<std::uint32_t>(to.sources.size()), 0});
    }
    to.sources.push_back({*found, all});
    to.plan.tensors.push_back({entry.name, entry.type, entry.shape, {{file, entry.name, all}}});
  }
  to.plan.files.push_back(std::move(planned));
}

}  // namespace detail

/// The group of tensors that a file is named after: `optimizer` of
/// `optimizer-rank-00001-of-00004-00002-of-00003.safetensors`. Manifests do not have it.
[[nodiscard]] inline std::string group_of(std::string_view file) {
  constexpr std::string_view end = ".safetensors";
  if (!file.ends_with(end)) return "model";
  file.remove_suffix(end.size());
  std::string_view shorter = file;
  detail::take_numbers(shorter, "-rank-");
  if (shorter.size() == file.size()) {
    detail::take_numbers(shorter, "-");
    detail::take_numbers(shorter, "-rank-");
  }
  const bool is_good =
      !shorter.empty() && shorter.size() <= 64 && shorter.front() != '.' && shorter != "extra";
  return is_good ? std::string(shorter) : "model";
}

/// The files of each rank. @throws llmmem::argument_error if no tensor's name begins with the prefix.
[[nodiscard]] inline std::vector<rank_files> plan_reshard(const llmmem::checkpoint_manifest& from,
                                                          const reshard_options& options) {
  std::vector<const llmmem::checkpoint_tensor*> tensors;
  for (const llmmem::checkpoint_tensor& each : from.tensors) {
    if (is_extra(each)) continue;
    if (options.tensor_prefix && !each.name.starts_with(*options.tensor_prefix)) continue;
    tensors.push_back(&each);
  }
  if (options.tensor_prefix && tensors.empty()) {
    throw llmmem::argument_error(fmt::format("no tensor's name begins with \"{}\"; show names them",
                                             example::printable(*options.tensor_prefix)));
  }
  const detail::rank_parts parts(tensors, options);
  std::vector<rank_files> ranks;
  for (std::uint32_t rank = 0; rank < options.world; ++rank) {
    rank_files made;
    std::vector<llmmem::state_tensor> state;
    for (std::uint32_t i = 0; i < tensors.size(); ++i) {
      const llmmem::checkpoint_tensor& each = *tensors[i];
      const std::uint64_t elements = elements_of(each);
      const llmmem::element_runs all = llmmem::element_runs::all_of(elements);
      const bool is_complete = options.world == 1;
      const llmmem::element_runs part = is_complete ? all : parts.of(i, elements, rank);
      state.push_back({each.name, each.type, each.shape,
                       each.pieces.empty() ? "model" : group_of(from.files[each.pieces.front().file].name),
                       is_complete ? std::nullopt : std::optional(part)});
      made.sources.push_back({&each, part});
    }
    made.plan =
        plan_files(state, {.max_shard_bytes = options.max_shard_bytes, .rank = rank, .world = options.world});
    if (rank == 0 && !options.tensor_prefix) detail::add_extras(made, from, options.world);
    ranks.push_back(std::move(made));
  }
  return ranks;
}

}  // namespace checkpoint_tool
