/// @file
/// Which tensors of a state go to which files of a checkpoint, and where in them each byte lies.
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
  /// Which elements this rank has, one behind the other; none: all of them.
  std::optional<element_runs> part{};
};

/// Bytes of a file that are those of a tensor's part.
struct planned_span {
  std::uint64_t begin = 0;  ///< in the file
  std::uint64_t bytes = 0;
  std::uint32_t tensor = 0;  ///< by its place among those planned for
  std::uint64_t offset = 0;  ///< of the first of these bytes, in the part
};

/// A file that will be written: its beginning, and from there on tensors without gaps.
struct planned_file {
  std::string name{};
  std::string head{};
  std::uint64_t bytes = 0;  ///< all of it
  std::vector<planned_span> spans{};
};

/// What a rank writes for its tensors, whatever their values.
struct file_plan {
  std::vector<planned_file> files{};
  std::vector<checkpoint_tensor> tensors{};  ///< pieces name files by their place here
  std::uint64_t bytes = 0;                   ///< of all files
};

/// How tensors are put into files.
struct file_plan_options {
  std::uint64_t max_shard_bytes = 5'000'000'000;  ///< of tensors in a file, but for one that is larger alone
  std::uint64_t data_alignment = 4096;            ///< of the data in a file: see `lay_out_safetensors`
  /// Of a file's header, but for one tensor whose own is longer. Readers take no more than the default.
  std::uint64_t max_header_bytes = max_safetensors_header;
  std::uint32_t rank = 0;
  std::uint32_t world = 1;
};

/// Puts tensors into safetensors files, in their order, a new file when one is full: of bytes, or of names.
/// One rank's are called as Hugging Face's tools call them: `model.safetensors`, or
/// `model-00001-of-00003.safetensors` and an index `model.safetensors.index.json`; of several,
/// `model-rank-00001-of-00004.safetensors`.
///
/// A part of a tensor has the tensor's name in its file, and a shape of its own: rows keep the columns,
/// columns the rows, anything else is one row. The file's metadata says which part it is, as
/// `llmmem.part:<name>` -> `shape 4096 4096 begin 0 run 1024 stride 4096 count 4096`, in elements.
///
/// @par Complexity   O(n log n) for n tensors.
/// @throws argument_error  for names that occur twice or begin as those of extras do, groups that cannot name
///      a file or name the same one, parts that are not of their tensor. @throws length_error  for sizes past
///      2^63 - 1.
/// @par Source   names and limit of shards: huggingface_hub, `serialization/_base.py`.
[[nodiscard]] file_plan plan_files(std::span<const state_tensor> tensors, const file_plan_options& options);

/// Bytes that travel with a snapshot beside its tensors: state of random numbers, a position in the data,
/// losses so far. Each rank has its own.
struct checkpoint_extra {
  std::string name{};
  std::vector<std::byte> bytes{};
};

/// What a rank's extra is called among the tensors: `rank.0/name`.
[[nodiscard]] std::string extra_name(std::uint32_t rank, std::string_view name);

/// The file that extras go to, `extra.safetensors`, as one-dimensional U8 tensors; whole in `head`. None for
/// no extras.
/// @throws argument_error  for names that occur twice or are not UTF-8.
[[nodiscard]] file_plan plan_extras(std::span<const checkpoint_extra> extras,
                                    const file_plan_options& options);

}  // namespace v0
}  // namespace llmmem

#if LLMMEM_CHECKPOINT_BODIES
#include <llmmem/checkpoint/detail/file_plan_body.hpp>
#endif
