/// @file
/// Loading a checkpoint: whole tensors or parts of them, whatever parts they were saved in.
#pragma once

#include <llmmem/checkpoint/detail/bodies.hpp>
#include <llmmem/checkpoint/detail/load_copy.hpp>
#include <llmmem/checkpoint/manifest.hpp>
#include <llmmem/checkpoint/search.hpp>
#include <llmmem/checkpoint/storage_ref.hpp>
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

namespace detail {

class file_chunks;

}  // namespace detail

/// A tensor, or part of one, that somebody wants.
struct wanted_tensor {
  std::string name{};
  std::optional<element_runs> part{};  ///< none: all of it
  /// What it must be. Without a type or shape any will do.
  std::optional<safetensors_type> type{};
  std::optional<std::vector<std::uint64_t>> shape{};
};

/// Whose thread calls the sink.
enum class sink_calls : std::uint8_t {
  by_caller,  ///< the thread that loads, and no other: the sink may do whatever that thread may
  by_readers  ///< each thread that reads, at once: for sinks that are safe for that, such as plain memory
};

/// How a checkpoint is loaded.
struct load_options {
  /// `checksums` reads whole chunks and holds each to its checksum; `sizes` reads no byte that is not wanted,
  /// and believes it.
  verification how = verification::checksums;
  /// Threads that read and check; with 1 the caller's does.
  std::uint32_t readers = 4;
  sink_calls sink = sink_calls::by_caller;
};

/// What loading took.
struct load_report {
  std::uint64_t bytes = 0;       ///< wanted, and given to the sink, each once
  std::uint64_t read_bytes = 0;  ///< from files, headers and the rest of chunks among them
  std::uint64_t files = 0;       ///< that anything was read of
  std::uint64_t looks = 0;  ///< at copies, for each chunk that was read: about one for each copy and chunk
};

/// Loads from one checkpoint as often as asked. What it learns it keeps: tensors by name, and the header of
/// each file that anything was read of.
///
///     checkpoint_loader loader(storage, *search.found);
///     loader.load(first_half, sink);
///     loader.load(second_half, sink);
///
/// @par Complexity      made in O(n log n) for n tensors; a load in O(k log n) for k wanted parts, and the
///                      first of a file O(its header). Extra memory is a chunk a reader, and the headers.
/// @par Thread safety   one thread at a time. The storage and what was found outlive it.
/// @par Errors          as `load_checkpoint`.
class checkpoint_loader {
 public:
  checkpoint_loader(storage_ref storage, const found_checkpoint& from, const load_options& options = {});
  checkpoint_loader(const checkpoint_loader&) = delete;
  checkpoint_loader& operator=(const checkpoint_loader&) = delete;

  /// As `load_checkpoint`.
  template <class Sink>
  load_report load(std::span<const wanted_tensor> wanted, Sink&& sink) {
    return load_into(wanted, detail::load_sink::of(sink));
  }

 private:
  struct known_file {
    bool is_read = false;
    safetensors_header header{};
    std::vector<std::uint32_t> by_name{};  // entries
  };
  struct wishes;

  load_report load_into(std::span<const wanted_tensor> wanted, detail::load_sink sink);
  [[nodiscard]] const checkpoint_tensor& tensor_of(const wanted_tensor& wanted) const;
  [[nodiscard]] wishes make_wishes(std::span<const wanted_tensor> wanted) const;
  [[nodiscard]] const known_file& know(std::uint32_t file, const detail::file_chunks& input,
                                       std::uint64_t& read_bytes);

  storage_ref storage_;
  const found_checkpoint* from_;
  load_options options_;
  std::vector<std::uint32_t> by_name_{};  // tensors
  std::vector<known_file> files_{};
};

/// Gives the sink all bytes that are wanted, in any order.
///
///     const auto sink = [&](std::uint32_t i, std::uint64_t offset, auto bytes) {
///       std::memcpy(tensors[i] + offset, bytes.data(), bytes.size());
///     };
///     load_checkpoint(storage, *search.found, wanted, sink);
///
/// Which bytes are read from where is a `reshard_plan` of what the checkpoint has and what is wanted: any
/// split into any other. Extra memory is a chunk a reader.
///
/// @param wanted  any parts, which may overlap.
/// @param sink    `void(std::uint32_t wanted, std::uint64_t offset, std::span<const std::byte>)`: bytes of
///                the part, from byte `offset` of it on, never twice the same. Called by the caller's thread
///                while others read on; `sink_calls::by_readers` has all readers call it at once.
/// @throws argument_error  for a tensor that is not there, of another type or shape than it must be, or whose
///      elements the checkpoint does not have.
/// @throws format_error    for what is damaged; `storage_error`. Some bytes may have been given by then.
template <class Sink>
load_report load_checkpoint(storage_ref storage, const found_checkpoint& from,
                            std::span<const wanted_tensor> wanted, Sink&& sink,
                            const load_options& options = {}) {
  return checkpoint_loader(storage, from, options).load(wanted, sink);
}

/// The bytes of a rank's extra, verified; nothing when there is none of that name.
[[nodiscard]] std::optional<std::vector<std::byte>> load_extra(storage_ref storage,
                                                               const found_checkpoint& from,
                                                               std::uint32_t rank, std::string_view name);

}  // namespace v0
}  // namespace llmmem

#if LLMMEM_CHECKPOINT_BODIES
#include <llmmem/checkpoint/detail/load_body.hpp>
#endif
