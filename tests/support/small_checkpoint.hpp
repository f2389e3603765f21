/// @file
/// A checkpoint with tensors, written without the checkpointer: what is in it is known, and any part of it
/// can be made wrong.
#pragma once

#include <llmmem/checkpoint/file_plan.hpp>
#include <llmmem/checkpoint/folder.hpp>
#include <llmmem/checkpoint/manifest.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/checkpoint_world.hpp"
#include "support/random.hpp"

namespace llmmem_tests {

/// Values of tensors, by the order in which they were described.
using tensor_values = std::vector<std::vector<std::byte>>;

/// Random bytes for all of each tensor.
inline tensor_values random_values(random_numbers& random, std::span<const llmmem::state_tensor> tensors) {
  tensor_values values;
  for (const llmmem::state_tensor& each : tensors) {
    values.emplace_back(static_cast<std::size_t>(
        llmmem::bytes_of(each.type, llmmem::tensor_shape::of(each.shape).elements(), each.name)));
    for (std::byte& byte : values.back())
      byte = static_cast<std::byte>(random.below(256U));
  }
  return values;
}

/// The part of a value, element by element.
inline std::vector<std::byte> part_of(const std::vector<std::byte>& whole, const llmmem::element_runs& part,
                                      std::uint64_t bits) {
  std::vector<std::byte> bytes;
  // The narrow types only in runs of whole bytes.
  for (std::uint64_t i = 0; i < part.count; ++i) {
    const auto begin = static_cast<std::size_t>((part.begin + i * part.stride) * bits / 8);
    const auto count = static_cast<std::size_t>(part.run * bits / 8);
    bytes.insert(bytes.end(), whole.begin() + static_cast<std::ptrdiff_t>(begin),
                 whole.begin() + static_cast<std::ptrdiff_t>(begin + count));
  }
  return bytes;
}

/// All bytes of a planned file.
inline std::vector<std::byte> file_bytes(const llmmem::planned_file& file,
                                         std::span<const llmmem::state_tensor> tensors,
                                         const tensor_values& values) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(file.bytes));
  std::memcpy(bytes.data(), file.head.data(), file.head.size());
  for (const llmmem::planned_span& each : file.spans) {
    const llmmem::state_tensor& tensor = tensors[each.tensor];
    const auto all = llmmem::element_runs::all_of(llmmem::tensor_shape::of(tensor.shape).elements());
    const std::vector<std::byte> part =
        part_of(values[each.tensor], tensor.part.value_or(all), llmmem::bits_of(tensor.type));
    std::memcpy(bytes.data() + each.begin, part.data() + each.offset, static_cast<std::size_t>(each.bytes));
  }
  return bytes;
}

/// Writes the files of a plan into a draft, and adds them and its tensors to a manifest.
template <class Storage>
void write_plan(Storage& storage, const llmmem::checkpoint_draft& draft, const llmmem::file_plan& plan,
                std::span<const llmmem::state_tensor> tensors, const tensor_values& values,
                std::uint32_t rank, llmmem::checkpoint_manifest& manifest) {
  const auto first = static_cast<std::uint32_t>(manifest.files.size());
  for (const llmmem::planned_file& each : plan.files) {
    const std::vector<std::byte> bytes = file_bytes(each, tensors, values);
    auto output = storage.create(draft.path(each.name), bytes.size());
    static_cast<void>(output.begin_write(0, bytes));
    output.sync();
    manifest.files.push_back(described(each.name, bytes, manifest.chunk_bytes, rank));
  }
  for (llmmem::checkpoint_tensor each : plan.tensors) {
    for (llmmem::checkpoint_piece& piece : each.pieces)
      piece.file += first;
    manifest.tensors.push_back(std::move(each));
  }
}

/// How ranks share a tensor.
enum class shared_by { one, flat, rows, columns };

/// Saves a state of several ranks as one checkpoint.
template <class Storage>
void save_state(llmmem::checkpoint_folder<Storage>& folder, std::uint64_t step, std::uint64_t chunk_bytes,
                std::span<const std::vector<llmmem::state_tensor>> ranks, const tensor_values& values,
                std::span<const llmmem::checkpoint_extra> extras, llmmem::file_plan_options options) {
  const llmmem::checkpoint_draft draft = folder.begin(step);
  llmmem::checkpoint_manifest all{.generation = draft.id.generation,
                                  .step = step,
                                  .world = static_cast<std::uint32_t>(ranks.size()),
                                  .chunk_bytes = chunk_bytes,
                                  .files = {},
                                  .tensors = {}};
  options.world = all.world;
  for (std::uint32_t rank = 0; rank < ranks.size(); ++rank) {
    options.rank = rank;
    llmmem::checkpoint_manifest part = all;
    part.files.clear();
    part.tensors.clear();
    write_plan(folder.storage(), draft, plan_files(ranks[rank], options), ranks[rank], values, rank, part);
    write_plan(folder.storage(), draft, plan_extras(extras, options), {}, {}, rank, part);
    merge_manifest(all, part, "rank " + std::to_string(rank));
  }
  folder.commit(draft, all);
}

}  // namespace llmmem_tests
