/// @file
/// Bodies of `plan_files` and `plan_extras`.
#pragma once

#include <llmmem/checkpoint/detail/bodies.hpp>
#include <llmmem/checkpoint/detail/manifest_body.hpp>
#include <llmmem/checkpoint/file_plan.hpp>
#include <llmmem/checkpoint/names.hpp>
#include <llmmem/detail/json_reader.hpp>
#include <llmmem/model/safetensors.hpp>

#include <algorithm>
#include <utility>

namespace llmmem {
inline namespace v0 {

LLMMEM_CHECKPOINT_BODY std::string extra_name(std::uint32_t rank, std::string_view name) {
  return "rank." + std::to_string(rank) + "/" + std::string(name);
}

namespace detail {

[[nodiscard]] inline std::string numbered(const char* before, std::uint64_t number, std::uint64_t of) {
  std::string text = before;
  append_padded(text, number, 5);
  text += "-of-";
  append_padded(text, of, 5);
  return text;
}

/// Returns `group`, with the rank if there are several, and the shard if there are several.
[[nodiscard]] inline std::string shard_name(const std::string& group, const file_plan_options& options,
                                            std::size_t shard, std::size_t shards) {
  std::string name = group;
  if (options.world > 1) name += numbered("-rank-", options.rank + 1, options.world);
  if (shards > 1) name += numbered("-", shard + 1, shards);
  return name + ".safetensors";
}

/// Returns a part's shape in its file.
[[nodiscard]] inline std::vector<std::uint64_t> shape_of_part(const state_tensor& tensor) {
  if (!tensor.part) return tensor.shape;
  const element_runs& part = *tensor.part;
  const tensor_shape whole = tensor_shape::of(tensor.shape);
  if (part == element_runs::all_of(whole.elements())) return tensor.shape;
  const std::uint64_t columns = whole.columns();
  if (columns != 0 && part.count == 1 && part.begin % columns == 0 && part.run % columns == 0) {
    std::vector<std::uint64_t> shape = tensor.shape;
    shape[0] = part.run / columns;
    return shape;
  }
  if (columns != 0 && part.stride == columns && part.begin % columns + part.run <= columns)
    return {part.count, part.run};
  return {part.elements()};
}

[[nodiscard]] inline std::string part_text(const state_tensor& tensor) {
  std::string text = "shape";
  for (const std::uint64_t each : tensor.shape)
    text.append(" ").append(std::to_string(each));
  const element_runs& part = *tensor.part;
  return text + " begin " + std::to_string(part.begin) + " run " + std::to_string(part.run) + " stride " +
         std::to_string(part.stride) + " count " + std::to_string(part.count);
}

inline void check_state_tensors(std::span<const state_tensor> tensors, const file_plan_options& options) {
  if (options.rank >= options.world) {
    throw argument_error("file plan: rank " + std::to_string(options.rank) + " of a world of " +
                         std::to_string(options.world));
  }
  std::vector<std::string_view> names;
  for (const state_tensor& each : tensors) {
    const std::string named = "file plan: tensor " + json_quoted(each.name);
    if (!is_utf8(each.name)) throw argument_error(named + ": the name must be UTF-8");
    if (each.name.starts_with("rank."))
      throw argument_error(named + ": names that begin with \"rank.\" are reserved for extras");
    if (!is_plain_name(each.group) || each.group.size() > 64 || each.group == "extra")
      throw argument_error(named + ": group " + json_quoted(each.group) +
                           " cannot name a file: use a plain name of at most 64 bytes, other than \"extra\"");
    const std::uint64_t elements = tensor_shape::of(each.shape).elements();
    if (each.part) each.part->validate(elements, named);
    names.push_back(each.name);
  }
  if (const auto twice = first_repeated(std::move(names)))
    throw argument_error("file plan: tensor " + json_quoted(*twice) + " occurs twice");
}

/// The tensors that share a file.
struct planned_shard {
  std::vector<std::uint32_t> tensors{};
  std::uint64_t bytes = 0;
  std::uint64_t header_bytes = 0;  // at most
};

/// Returns the most bytes that a tensor takes in a header: its name and numbers, and its part.
[[nodiscard]] inline std::uint64_t most_header_bytes(const state_tensor& tensor) {
  constexpr std::uint64_t number = 21;  // with its separator
  constexpr std::uint64_t words = 64;   // of an entry, or of a part
  const std::uint64_t name = json_quoted(tensor.name).size();
  const std::uint64_t shape = (tensor.shape.size() + 1) * number;
  const std::uint64_t entry = name + words + shape + 2 * number;
  return tensor.part ? entry + name + words + shape + 4 * number : entry;
}

/// Returns the tensors of each group, in order. The groups are in the order of their first tensors.
[[nodiscard]] inline std::vector<std::vector<std::uint32_t>> groups_of(
    std::span<const state_tensor> tensors) {
  std::vector<std::uint32_t> order(tensors.size());
  for (std::uint32_t i = 0; i < order.size(); ++i)
    order[i] = i;
  std::ranges::sort(order, [&](std::uint32_t a, std::uint32_t b) {
    const int by_group = tensors[a].group.compare(tensors[b].group);
    return by_group != 0 ? by_group < 0 : a < b;
  });
  std::vector<std::vector<std::uint32_t>> groups;
  for (const std::uint32_t each : order) {
    if (groups.empty() || tensors[groups.back().front()].group != tensors[each].group) groups.emplace_back();
    groups.back().push_back(each);
  }
  std::ranges::sort(groups, {}, [](const std::vector<std::uint32_t>& group) { return group.front(); });
  return groups;
}

/// Returns the shards of a group, with its tensors in order; a new shard begins when one is full.
[[nodiscard]] inline std::vector<planned_shard> shards_of(std::span<const state_tensor> tensors,
                                                          std::span<const std::uint64_t> bytes,
                                                          std::span<const std::uint32_t> group,
                                                          const file_plan_options& options) {
  const std::uint64_t most = options.max_shard_bytes;
  const std::uint64_t frame = 256 + options.data_alignment;  // of a header, with its padding
  const std::uint64_t most_header = options.max_header_bytes - std::min(options.max_header_bytes, frame);
  std::vector<planned_shard> shards;
  for (const std::uint32_t i : group) {
    if (tensors[i].part && tensors[i].part->empty()) continue;  // this rank has no part of it
    const std::uint64_t header = most_header_bytes(tensors[i]);
    const auto is_full = [&](const planned_shard& last) {
      return (last.bytes != 0 && bytes[i] > most - std::min(most, last.bytes)) ||
             (last.header_bytes != 0 && header > most_header - std::min(most_header, last.header_bytes));
    };
    if (shards.empty() || is_full(shards.back())) shards.emplace_back();
    shards.back().header_bytes += header;
    shards.back().tensors.push_back(i);
    shards.back().bytes = checked_add(shards.back().bytes, bytes[i], "file plan: bytes of a shard");
  }
  return shards;
}

[[nodiscard]] inline planned_file plan_shard(std::span<const state_tensor> tensors,
                                             const planned_shard& shard, std::string name,
                                             const file_plan_options& options) {
  std::vector<safetensors_tensor> stored;
  safetensors_metadata metadata{{"format", "pt"}};
  std::vector<std::pair<std::string_view, std::uint32_t>> by_name;
  for (const std::uint32_t i : shard.tensors) {
    stored.push_back({tensors[i].name, tensors[i].type, shape_of_part(tensors[i])});
    if (tensors[i].part) metadata.emplace_back("llmmem.part:" + tensors[i].name, part_text(tensors[i]));
    by_name.emplace_back(tensors[i].name, i);
  }
  std::ranges::sort(by_name);
  safetensors_layout layout =
      lay_out_safetensors(std::move(stored), std::move(metadata), options.data_alignment);
  planned_file file{std::move(name), std::move(layout.head), layout.header.file_bytes(), {}};
  for (const safetensors_entry& each : layout.header.entries) {
    const auto found =
        std::ranges::lower_bound(by_name, std::pair<std::string_view, std::uint32_t>(each.name, 0));
    if (each.bytes() == 0) continue;
    file.spans.push_back({layout.header.data_begin + each.begin, each.bytes(), found->second, 0});
  }
  return file;
}

/// Plans `{"metadata":{"total_size":...},"weight_map":{...}}`, which maps each tensor to its file.
[[nodiscard]] inline planned_file plan_index(std::span<const state_tensor> tensors, const std::string& group,
                                             std::span<const planned_shard> shards,
                                             std::span<const planned_file> files) {
  std::vector<std::pair<std::string_view, std::size_t>> by_name;
  std::uint64_t total = 0;
  for (std::size_t shard = 0; shard < shards.size(); ++shard) {
    total = checked_add(total, shards[shard].bytes, "file plan: bytes of all shards");
    for (const std::uint32_t i : shards[shard].tensors)
      by_name.emplace_back(tensors[i].name, shard);
  }
  std::ranges::sort(by_name);
  std::string text =
      "{\n  \"metadata\": {\n    \"total_size\": " + std::to_string(total) + "\n  },\n  \"weight_map\": {";
  for (std::size_t i = 0; i < by_name.size(); ++i) {
    text += i == 0 ? "\n    " : ",\n    ";
    append_json_string(text, by_name[i].first);
    text += ": ";
    append_json_string(text, files[by_name[i].second].name);
  }
  text += "\n  }\n}\n";
  const std::uint64_t bytes = text.size();
  return {group + ".safetensors.index.json", std::move(text), bytes, {}};
}

}  // namespace detail

LLMMEM_CHECKPOINT_BODY file_plan plan_files(std::span<const state_tensor> tensors,
                                            const file_plan_options& options) {
  detail::check_state_tensors(tensors, options);
  file_plan plan;
  std::vector<std::uint64_t> bytes;
  for (const state_tensor& each : tensors) {
    const std::uint64_t elements = tensor_shape::of(each.shape).elements();
    bytes.push_back(bytes_of(each.type, each.part ? each.part->elements() : elements,
                             "file plan: tensor " + detail::json_quoted(each.name)));
    plan.tensors.push_back({each.name, each.type, each.shape, {}});
  }
  for (const std::vector<std::uint32_t>& members : detail::groups_of(tensors)) {
    const std::string& group = tensors[members.front()].group;
    const std::vector<detail::planned_shard> shards = detail::shards_of(tensors, bytes, members, options);
    const std::size_t first = plan.files.size();
    for (std::size_t i = 0; i < shards.size(); ++i) {
      plan.files.push_back(detail::plan_shard(tensors, shards[i],
                                              detail::shard_name(group, options, i, shards.size()), options));
      for (const std::uint32_t each : shards[i].tensors) {
        const auto all = element_runs::all_of(tensor_shape::of(tensors[each].shape).elements());
        plan.tensors[each].pieces.push_back({static_cast<std::uint32_t>(plan.files.size() - 1),
                                             tensors[each].name, tensors[each].part.value_or(all)});
      }
    }
    if (shards.size() > 1 && options.world == 1) {
      plan.files.push_back(
          detail::plan_index(tensors, group, shards, std::span(plan.files).subspan(first, shards.size())));
    }
  }
  std::vector<std::string_view> names;
  for (const planned_file& each : plan.files) {
    plan.bytes = checked_add(plan.bytes, each.bytes, "file plan: bytes of all files");
    names.push_back(each.name);
  }
  if (const auto twice = detail::first_repeated(std::move(names))) {
    throw argument_error("file plan: two groups have a file " + detail::json_quoted(*twice) +
                         "; rename one of them");
  }
  return plan;
}

LLMMEM_CHECKPOINT_BODY file_plan plan_extras(std::span<const checkpoint_extra> extras,
                                             const file_plan_options& options) {
  file_plan plan;
  if (extras.empty()) return plan;
  std::vector<safetensors_tensor> stored;
  for (const checkpoint_extra& each : extras)
    stored.push_back({extra_name(options.rank, each.name), safetensors_type::u8, {each.bytes.size()}});
  const safetensors_layout layout = lay_out_safetensors(std::move(stored), {}, options.data_alignment);
  planned_file file{detail::shard_name("extra", options, 0, 1), layout.head, layout.header.file_bytes(), {}};
  file.head.resize(static_cast<std::size_t>(file.bytes));
  std::vector<std::pair<std::string_view, std::uint64_t>> begins;  // by the name of the entry
  begins.reserve(layout.header.entries.size());
  for (const safetensors_entry& each : layout.header.entries)
    begins.emplace_back(each.name, layout.header.data_begin + each.begin);
  std::ranges::sort(begins);
  for (const checkpoint_extra& each : extras) {
    const std::string name = extra_name(options.rank, each.name);
    const auto entry =
        std::ranges::lower_bound(begins, std::pair<std::string_view, std::uint64_t>(name, std::uint64_t{0}));
    for (std::size_t i = 0; i < each.bytes.size(); ++i)
      file.head[static_cast<std::size_t>(entry->second) + i] = static_cast<char>(each.bytes[i]);
    plan.tensors.push_back({name,
                            safetensors_type::u8,
                            {each.bytes.size()},
                            {{0, name, element_runs::all_of(each.bytes.size())}}});
  }
  plan.bytes = file.bytes;
  plan.files.push_back(std::move(file));
  return plan;
}

}  // namespace v0
}  // namespace llmmem
