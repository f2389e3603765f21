/// @file
/// Assigns the tensors of a state to the files of a checkpoint, and each byte to its place in them.
#pragma once

#include <llmmem/checkpoint/detail/bodies.hpp>
#include <llmmem/checkpoint/manifest.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/model/safetensors.hpp>
#include <llmmem/sharding/element_runs.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// A tensor of a state, or the part of it that a rank saves.
struct state_tensor {
  std::string name{};
  safetensors_type type = safetensors_type::f32;
  std::vector<std::uint64_t> shape{};  ///< of the whole tensor, row-major
  std::string group = "model";         ///< tensors of a group share files, which are named after it
  /// The elements that this rank has, in order; none: all of them.
  std::optional<element_runs> part{};
};

/// Bytes of a file that belong to a tensor's part.
struct planned_span {
  std::uint64_t begin = 0;  ///< first byte in the file
  std::uint64_t bytes = 0;
  std::uint32_t tensor = 0;  ///< its index among the planned tensors
  std::uint64_t offset = 0;  ///< position of the first of these bytes in the part
};

/// A planned file: its head, followed by the tensors without gaps.
struct planned_file {
  std::string name{};
  std::string head{};
  std::uint64_t bytes = 0;  ///< of the whole file
  std::vector<planned_span> spans{};
};

/// The files that a rank writes for its tensors, independent of their values.
struct file_plan {
  std::vector<planned_file> files{};
  std::vector<checkpoint_tensor> tensors{};  ///< pieces name files by their index here
  std::uint64_t bytes = 0;                   ///< of all files
};

/// How tensors are assigned to files.
struct file_plan_options {
  /// Most bytes of tensors in a file, unless one tensor alone is larger.
  std::uint64_t max_shard_bytes = 5'000'000'000;
  std::uint64_t data_alignment = 4096;  ///< alignment of the data in a file: see `lay_out_safetensors`
  /// Most bytes of a file's header, unless one tensor's own header is longer. Readers accept at most the
  /// default.
  std::uint64_t max_header_bytes = max_safetensors_header;
  std::uint32_t rank = 0;
  std::uint32_t world = 1;
};

/// Assigns tensors to safetensors files, in order, and starts a new file when one is full of bytes or of
/// names. A single rank's files have the names of Hugging Face's tools: `model.safetensors`, or
/// `model-00001-of-00003.safetensors` and an index `model.safetensors.index.json`; with several ranks,
/// `model-rank-00001-of-00004.safetensors`.
///
/// A part of a tensor has the tensor's name in its file, and its own shape: a part of whole rows keeps the
/// columns, a part of whole columns keeps the rows, and any other part is one row. The file's metadata
/// describes the part as `llmmem.part:<name>` -> `shape 4096 4096 begin 0 run 1024 stride 4096 count 4096`,
/// in elements.
///
/// @par Complexity   O(n log n) for n tensors.
/// @throws argument_error  for duplicate names, names that begin like those of extras, groups that cannot
///   name a file, two groups with the same file name, and parts that do not fit their tensor. @throws
///   length_error for sizes past 2^63 - 1.
/// @par Source   names and limit of shards: huggingface_hub, `serialization/_base.py`.
[[nodiscard]] file_plan plan_files(std::span<const state_tensor> tensors, const file_plan_options& options);

/// Bytes saved with a snapshot in addition to its tensors: random number state, a position in the data,
/// losses so far. Each rank has its own.
struct checkpoint_extra {
  std::string name{};
  std::vector<std::byte> bytes{};
};

/// Returns the name of a rank's extra among the tensors: `rank.0/name`.
[[nodiscard]] std::string extra_name(std::uint32_t rank, std::string_view name);

/// Plans the file of extras, `extra.safetensors`, with one-dimensional U8 tensors, whose bytes are all in
/// `head`. Plans no file if there are no extras.
/// @throws argument_error  for duplicate names and names that are not UTF-8.
[[nodiscard]] file_plan plan_extras(std::span<const checkpoint_extra> extras,
                                    const file_plan_options& options);

}  // namespace v0
}  // namespace llmmem

#if LLMMEM_CHECKPOINT_BODIES
#include <llmmem/checkpoint/detail/file_plan_body.hpp>
#endif
