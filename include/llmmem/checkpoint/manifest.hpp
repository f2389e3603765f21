/// @file
/// The manifest of a checkpoint: its files and their checksums, its tensors and where their parts are.
#pragma once

#include <llmmem/checkpoint/detail/bodies.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/model/safetensors_type.hpp>
#include <llmmem/sharding/element_runs.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Consecutive chunks of a checkpoint's file that are also consecutive in a stored file.
struct chunk_run {
  std::uint64_t first = 0;   ///< index of the first chunk in the checkpoint's file
  std::uint64_t count = 0;   ///< number of chunks
  std::uint32_t stored = 0;  ///< number among the manifest's stored files
  std::uint64_t place = 0;   ///< index of the first chunk in the stored file

  friend bool operator==(const chunk_run&, const chunk_run&) = default;
};

/// A file from which an incremental checkpoint takes chunks: its own file of new chunks, or a file of an
/// earlier checkpoint.
struct stored_chunks {
  std::uint64_t generation = 0;  ///< generation of the checkpoint whose folder has the file
  std::uint64_t step = 0;        ///< step of that checkpoint
  std::string name{};            ///< name in that folder
  std::uint64_t bytes = 0;       ///< of the whole file

  friend bool operator==(const stored_chunks&, const stored_chunks&) = default;
};

/// A file of a checkpoint.
struct checkpoint_file {
  std::string name{};  ///< name in the checkpoint's folder, if the file is full
  std::uint64_t bytes = 0;
  std::uint32_t rank = 0;               ///< the rank that wrote it
  std::uint32_t crc32c = 0;             ///< of the whole file
  std::vector<std::uint32_t> chunks{};  ///< CRC-32C of each `chunk_bytes`; the last chunk may be shorter
  /// The places of all its chunks, in order, for an incremental checkpoint; none: the file is full.
  std::vector<chunk_run> runs{};

  friend bool operator==(const checkpoint_file&, const checkpoint_file&) = default;
};

/// A part of a tensor, or all of it, which is one tensor of a file.
struct checkpoint_piece {
  std::uint32_t file = 0;  ///< index among the files
  std::string entry{};     ///< the tensor's name in that file
  element_runs runs{};     ///< the tensor's elements, in the order of the file

  friend bool operator==(const checkpoint_piece&, const checkpoint_piece&) = default;
};

/// A tensor of the state that was saved.
struct checkpoint_tensor {
  std::string name{};
  safetensors_type type = safetensors_type::f32;
  std::vector<std::uint64_t> shape{};
  std::vector<checkpoint_piece> pieces{};  ///< one, unless ranks hold parts; several may contain the same
                                           ///< elements

  friend bool operator==(const checkpoint_tensor&, const checkpoint_tensor&) = default;
};

/// The contents of a checkpoint. A manifest of one rank's files alone is that rank's declaration that they
/// are durable.
struct checkpoint_manifest {
  /// Counts commits to one folder: the complete checkpoint with the highest one is the newest.
  std::uint64_t generation = 0;
  std::uint64_t step = 0;   ///< training step, as counted by the caller
  std::uint32_t world = 1;  ///< ranks that wrote it
  std::uint64_t chunk_bytes = std::uint64_t{1} << 20;
  std::vector<checkpoint_file> files{};
  std::vector<checkpoint_tensor> tensors{};
  std::vector<stored_chunks> stored{};  ///< the targets of the files' `runs`; none: all files are full

  friend bool operator==(const checkpoint_manifest&, const checkpoint_manifest&) = default;
};

/// The most bytes in a chunk, because a checker reads a whole chunk at once.
inline constexpr std::uint64_t max_checkpoint_chunk = std::uint64_t{1} << 30;

/// The most pieces of a tensor, and the most dimensions. They limit the memory that a reader allocates before
/// it can check.
inline constexpr std::uint64_t max_checkpoint_pieces = 65'536;
inline constexpr std::uint64_t max_checkpoint_dimensions = 64;

/// The most bytes of a manifest that is read: about ten million chunks.
inline constexpr std::uint64_t max_manifest_bytes = std::uint64_t{256} << 20;

/// Returns the file's text: JSON, one line per file and tensor, followed by a CRC-32C of all of it.
/// @throws argument_error  as `check_manifest`.
[[nodiscard]] std::string to_json(const checkpoint_manifest& manifest);

/// Reads a manifest as untrusted input: checks the checksum first, and then as `check_manifest`.
/// @param what  names the file, for error texts.
/// @throws format_error  the text says what is wrong, and where.
[[nodiscard]] checkpoint_manifest read_manifest(std::string_view text, const std::string& what);

/// Checks that a manifest is consistent: names of files are plain; names of files and of tensors are unique;
/// sizes, chunks and ranks agree; every piece refers to an existing file, is inside its tensor, and is no
/// longer than the file; runs cover all chunks of their file, each inside a stored file, which is of this
/// generation or an earlier one.
/// @throws argument_error  the text names the file or tensor, and what is wrong with it.
void check_manifest(const checkpoint_manifest& manifest, const std::string& what);

/// Adds another rank's part: its files after the existing ones, its pieces to the tensors of the same names.
/// After an exception `into` is unchanged.
/// @throws argument_error  as `check_manifest` for the part and the whole; when step, generation, world or
///   chunks differ, when a tensor's type or shape differs, or a file's name is taken.
void merge_manifest(checkpoint_manifest& into, const checkpoint_manifest& part, const std::string& what);

/// Merges the parts of many ranks.
///
/// @par Complexity   `finish` O(n log n) for n files and tensors of all parts together. `merge_manifest` for
///                   one part after another checks everything each time.
class manifest_merger {
 public:
  /// Adds a rank's part. @throws argument_error  as `check_manifest` for the part, and when step, generation,
  /// world or chunks differ; parts added before are unchanged.
  void add(checkpoint_manifest part, const std::string& what);

  /// Returns the merged manifest, or an empty one if nothing was added. @throws argument_error if a tensor's
  /// type or shape differs between parts, or a file's name is taken; as `check_manifest` for the merged
  /// manifest.
  [[nodiscard]] checkpoint_manifest finish(const std::string& what) &&;

 private:
  struct added_part {
    std::string what{};
    std::size_t end_of_files = 0;
    std::size_t end_of_tensors = 0;
  };

  void check_files() const;
  void fold_tensors();

  checkpoint_manifest merged_{};  // until `finish`, a tensor has one entry for each part that contains it
  std::vector<added_part> parts_{};
};

/// Returns the number of elements of a tensor. @throws length_error  past 2^63 - 1, also for those of a row.
[[nodiscard]] std::uint64_t elements_of(const checkpoint_tensor& tensor);

/// Returns the bytes of a number of elements of a type.
/// @throws argument_error  when they do not fill whole bytes. @throws length_error  past 2^63 - 1.
[[nodiscard]] std::uint64_t bytes_of(safetensors_type type, std::uint64_t elements, const std::string& what);

}  // namespace v0
}  // namespace llmmem

#if LLMMEM_CHECKPOINT_BODIES
#include <llmmem/checkpoint/detail/manifest_body.hpp>
#endif
