/// @file
/// What a checkpoint says of itself: its files and their checksums, its tensors and where their parts lie.
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

/// Chunks of a checkpoint's file, one behind the other in a stored one.
struct chunk_run {
  std::uint64_t first = 0;   ///< chunk of the checkpoint's file
  std::uint64_t count = 0;   ///< of chunks
  std::uint32_t stored = 0;  ///< number among the manifest's stored files
  std::uint64_t place = 0;   ///< chunk of the stored file that the first one is

  friend bool operator==(const chunk_run&, const chunk_run&) = default;
};

/// A file that an incremental checkpoint takes chunks from: its own, which has those that are new, or one of
/// an earlier checkpoint.
struct stored_chunks {
  std::uint64_t generation = 0;  ///< of the checkpoint whose folder has it
  std::uint64_t step = 0;        ///< likewise
  std::string name{};            ///< there
  std::uint64_t bytes = 0;       ///< of all of it

  friend bool operator==(const stored_chunks&, const stored_chunks&) = default;
};

/// A file of a checkpoint.
struct checkpoint_file {
  std::string name{};  ///< in the checkpoint's folder, where it is whole
  std::uint64_t bytes = 0;
  std::uint32_t rank = 0;               ///< who wrote it
  std::uint32_t crc32c = 0;             ///< of all of it
  std::vector<std::uint32_t> chunks{};  ///< CRC-32C of each `chunk_bytes` of it, the last may be shorter
  /// Where its chunks are, all of them in order, of an incremental checkpoint; none: it is whole.
  std::vector<chunk_run> runs{};

  friend bool operator==(const checkpoint_file&, const checkpoint_file&) = default;
};

/// Part of a tensor, or all of it, as one tensor of a file.
struct checkpoint_piece {
  std::uint32_t file = 0;  ///< number among the files
  std::string entry{};     ///< the tensor's name in that file
  element_runs runs{};     ///< which of the tensor's elements, in the order in which the file has them

  friend bool operator==(const checkpoint_piece&, const checkpoint_piece&) = default;
};

/// A tensor of the state that was saved.
struct checkpoint_tensor {
  std::string name{};
  safetensors_type type = safetensors_type::f32;
  std::vector<std::uint64_t> shape{};
  std::vector<checkpoint_piece> pieces{};  ///< one, unless ranks hold parts; elements may be in several

  friend bool operator==(const checkpoint_tensor&, const checkpoint_tensor&) = default;
};

/// What is in a checkpoint. The same, of one rank's files only, is how that rank says that they are durable.
struct checkpoint_manifest {
  std::uint64_t generation = 0;  ///< counts commits to one folder: the highest that is whole is the newest
  std::uint64_t step = 0;        ///< of training, as the caller counts
  std::uint32_t world = 1;       ///< ranks that wrote it
  std::uint64_t chunk_bytes = std::uint64_t{1} << 20;
  std::vector<checkpoint_file> files{};
  std::vector<checkpoint_tensor> tensors{};
  std::vector<stored_chunks> stored{};  ///< what `runs` of the files are in; none: all files are whole

  friend bool operator==(const checkpoint_manifest&, const checkpoint_manifest&) = default;
};

/// Most bytes of a chunk: whoever checks one reads it whole.
inline constexpr std::uint64_t max_checkpoint_chunk = std::uint64_t{1} << 30;

/// Most pieces of a tensor, and most dimensions: what a reader makes room for before it knows better.
inline constexpr std::uint64_t max_checkpoint_pieces = 65'536;
inline constexpr std::uint64_t max_checkpoint_dimensions = 64;

/// Most bytes of a manifest that is read: some ten million chunks.
inline constexpr std::uint64_t max_manifest_bytes = std::uint64_t{256} << 20;

/// As a file has it: JSON, a line for every file and tensor, and behind it all a CRC-32C of what comes
/// before.
/// @throws argument_error  as `check_manifest`.
[[nodiscard]] std::string to_json(const checkpoint_manifest& manifest);

/// Reads one, believing nothing: the checksum first; then what `check_manifest` asks.
/// @param what  names the file, for error texts.
/// @throws format_error  which says where and what is wrong.
[[nodiscard]] checkpoint_manifest read_manifest(std::string_view text, const std::string& what);

/// That it fits together: names of files are plain, and they and the tensors' occur once; sizes, chunks and
/// ranks agree; every piece is of a file that is there, inside its tensor, and no longer than the file; runs
/// are of all chunks of their file, each inside a stored file, which is of this generation or an earlier one.
/// @throws argument_error  which names the file or tensor, and what is wrong with it.
void check_manifest(const checkpoint_manifest& manifest, const std::string& what);

/// Adds another rank's part: its files behind those that are there, its pieces to the tensors of their names.
/// After an exception `into` is as it was.
/// @throws argument_error  as `check_manifest` for the part and the whole; when step, generation, world or
/// chunks differ, when a tensor's type or shape does,
///      or a file's name is taken.
void merge_manifest(checkpoint_manifest& into, const checkpoint_manifest& part, const std::string& what);

/// The parts of many ranks as one.
///
/// @par Complexity   `finish` O(n log n) for n files and tensors of all parts together. To merge them by
///                   `merge_manifest`, one by one, looks at all that is there each time.
class manifest_merger {
 public:
  /// Adds a rank's part. @throws argument_error  as `check_manifest` for the part, and when step, generation,
  /// world or chunks differ; what was added before is as it was.
  void add(checkpoint_manifest part, const std::string& what);

  /// The whole, or an empty manifest when nothing was added. @throws argument_error  when a tensor's type or
  /// shape differs between parts, or a file's name is taken; as `check_manifest` for the whole.
  [[nodiscard]] checkpoint_manifest finish(const std::string& what) &&;

 private:
  struct added_part {
    std::string what{};
    std::size_t end_of_files = 0;
    std::size_t end_of_tensors = 0;
  };

  void check_files() const;
  void fold_tensors();

  checkpoint_manifest merged_{};  // with a tensor for each part that has it, until the end
  std::vector<added_part> parts_{};
};

/// Elements of a tensor. @throws length_error  past 2^63 - 1, those of a row likewise.
[[nodiscard]] std::uint64_t elements_of(const checkpoint_tensor& tensor);

/// Bytes of a value of a type, by the number of elements.
/// @throws argument_error  when they fill no whole bytes. @throws length_error  past 2^63 - 1.
[[nodiscard]] std::uint64_t bytes_of(safetensors_type type, std::uint64_t elements, const std::string& what);

}  // namespace v0
}  // namespace llmmem

#if LLMMEM_CHECKPOINT_BODIES
#include <llmmem/checkpoint/detail/manifest_body.hpp>
#endif
