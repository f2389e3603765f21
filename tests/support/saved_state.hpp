/// @file
/// A small state with every kind of tensor that is saved differently, and checkpoints of it on a disk.
#pragma once

#include <llmmem/checkpoint/file_plan.hpp>
#include <llmmem/checkpoint/folder.hpp>
#include <llmmem/checkpoint/manifest.hpp>
#include <llmmem/checkpoint/posix_storage.hpp>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/sharding/flat_uneven.hpp>
#include <llmmem/sharding/replicated.hpp>
#include <llmmem/sharding/split_2d.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "support/checkpoint_world.hpp"

namespace llmmem_tests {

/// A tensor with all its bytes.
struct saved_tensor {
  std::string name;
  llmmem::safetensors_type type = llmmem::safetensors_type::f32;
  std::vector<std::uint64_t> shape;
  std::vector<std::byte> bytes{};
  std::string group = "model";

  [[nodiscard]] std::uint64_t elements() const { return llmmem::tensor_shape::of(shape).elements(); }
  void set(std::uint64_t element, float value) { std::memcpy(bytes.data() + 4 * element, &value, 4); }
};

/// The same for the same step; floats are small whole numbers.
inline std::vector<saved_tensor> some_state(std::uint64_t step = 0) {
  using enum llmmem::safetensors_type;
  std::vector<saved_tensor> all{
      {"embed.weight", f32, {6, 4}},
      {"layer.bias", bf16, {5}},
      {"layer.weight", f16, {3, 4, 2}},
      {"adam.m", f32, {6, 4}, {}, "adam"},
      {"step", i64, {}},
      {"nothing", f32, {0, 4}},
      {"packed", f4, {4, 3}},
  };
  for (saved_tensor& each : all) {
    each.bytes.resize(static_cast<std::size_t>(llmmem::bytes_of(each.type, each.elements(), each.name)));
    if (each.type == f32) {
      for (std::uint64_t i = 0; i < each.elements(); ++i)
        each.set(i, static_cast<float>(step * 10 + i));
    } else {
      for (std::size_t i = 0; i < each.bytes.size(); ++i)
        each.bytes[i] = static_cast<std::byte>((step + 3 * i + each.name.size()) % 113);
    }
  }
  return all;
}

/// Who has what in a checkpoint of several ranks.
enum class saved_as : std::uint8_t { flat, rows, columns, replicated };

/// What a rank of several has of each tensor. What is packed the first rank has.
inline std::vector<llmmem::element_runs> parts_of(const std::vector<saved_tensor>& state, saved_as how,
                                                  std::uint32_t rank, std::uint32_t world) {
  std::vector<llmmem::tensor_facts> facts;
  std::vector<llmmem::split_axis> axes;
  for (const saved_tensor& each : state) {
    facts.push_back({each.name, llmmem::tensor_shape::of(each.shape), 1});
    const bool splits = how == saved_as::rows ? !each.shape.empty() : each.shape.size() >= 2;
    axes.push_back(!splits                 ? llmmem::split_axis::none
                   : how == saved_as::rows ? llmmem::split_axis::rows
                                           : llmmem::split_axis::columns);
  }
  std::vector<llmmem::element_runs> parts;
  const auto take = [&](const auto& partition) {
    for (std::uint32_t i = 0; i < state.size(); ++i) {
      if (llmmem::bits_of(state[i].type) < 8) {
        parts.push_back(rank == 0 ? llmmem::element_runs::all_of(state[i].elements())
                                  : llmmem::element_runs{});
      } else {
        parts.push_back(partition.owned(llmmem::tensor_id{i}, llmmem::rank_id{rank}));
      }
    }
  };
  const llmmem::rank_count ranks{world};
  if (how == saved_as::flat) {
    take(llmmem::flat_uneven::even(facts, ranks));
  } else if (how == saved_as::replicated) {
    take(llmmem::sharding::replicated(facts, ranks));
  } else {
    take(llmmem::split_2d(facts, axes, ranks));
  }
  return parts;
}

/// How a checkpoint is saved.
struct save_options {
  std::uint32_t world = 1;
  saved_as how = saved_as::flat;
  std::uint64_t chunk_bytes = 4096;
  std::uint64_t max_shard_bytes = 5'000'000'000;
  bool has_extras = true;
};

/// Commits a checkpoint of `state` to the folder at `path`, which is made if need be.
inline llmmem::checkpoint_id save_state(const std::string& path, std::uint64_t step,
                                        const std::vector<saved_tensor>& state,
                                        const save_options& how = {}) {
  llmmem::posix_storage<> storage(path);
  llmmem::checkpoint_folder folder(storage);
  const llmmem::checkpoint_draft draft = folder.begin(step);
  llmmem::checkpoint_manifest all{
      .generation = draft.id.generation, .step = step, .world = how.world, .chunk_bytes = how.chunk_bytes};
  for (std::uint32_t rank = 0; rank < how.world; ++rank) {
    const llmmem::file_plan_options options{
        .max_shard_bytes = how.max_shard_bytes, .rank = rank, .world = how.world};
    std::vector<llmmem::element_runs> parts;
    if (how.world > 1) parts = parts_of(state, how.how, rank, how.world);
    std::vector<llmmem::state_tensor> tensors;
    for (std::size_t i = 0; i < state.size(); ++i) {
      tensors.push_back({state[i].name, state[i].type, state[i].shape, state[i].group, std::nullopt});
      if (how.world > 1) tensors.back().part = parts[i];
    }
    llmmem::file_plan plan = plan_files(tensors, options);
    if (how.has_extras) {
      const std::string text = "rng of rank " + std::to_string(rank);
      const auto bytes = std::as_bytes(std::span(text.data(), text.size()));
      const llmmem::checkpoint_extra extra[] = {{"rng", {bytes.begin(), bytes.end()}}};
      llmmem::file_plan extras = plan_extras(extra, options);
      for (llmmem::checkpoint_tensor& each : extras.tensors) {
        each.pieces[0].file = static_cast<std::uint32_t>(plan.files.size());
        plan.tensors.push_back(each);
      }
      plan.files.push_back(extras.files[0]);
    }
    llmmem::checkpoint_manifest part = all;
    part.files.clear();
    part.tensors = plan.tensors;
    for (const llmmem::planned_file& file : plan.files) {
      std::vector<std::byte> bytes(static_cast<std::size_t>(file.bytes));
      std::memcpy(bytes.data(), file.head.data(), file.head.size());
      for (const llmmem::planned_span& span : file.spans) {
        const saved_tensor& tensor = state[span.tensor];
        const std::uint64_t bits = llmmem::bits_of(tensor.type);
        if (how.world == 1 || bits < 8) {
          std::memcpy(bytes.data() + span.begin, tensor.bytes.data() + span.offset,
                      static_cast<std::size_t>(span.bytes));
          continue;
        }
        for (std::uint64_t i = 0; i < parts[span.tensor].elements(); ++i) {
          std::memcpy(bytes.data() + span.begin + i * bits / 8,
                      tensor.bytes.data() + parts[span.tensor].element_at(i) * bits / 8,
                      static_cast<std::size_t>(bits / 8));
        }
      }
      auto output = storage.create(draft.path(file.name), bytes.size());
      output.finish_write(output.begin_write(0, bytes));
      output.sync();
      part.files.push_back(described(file.name, bytes, how.chunk_bytes, rank));
    }
    merge_manifest(all, part, "rank");
  }
  folder.commit(draft, all);
  return draft.id;
}

}  // namespace llmmem_tests
