/// @file
/// Loads a checkpoint: tensors or parts of them, regardless of the parts in which they were saved.
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

/// A requested tensor, or part of one.
struct wanted_tensor {
  std::string name{};
  std::optional<element_runs> part{};  ///< none: the whole tensor
  /// The required type and shape. Empty: any.
  std::optional<safetensors_type> type{};
  std::optional<std::vector<std::uint64_t>> shape{};
};

/// The thread that calls the sink.
enum class sink_calls : std::uint8_t {
  by_caller,  ///< only the loading thread: the sink may do anything that this thread may
  by_readers  ///< each reader thread, concurrently: for sinks that allow it, such as plain memory
};

/// The options for loading a checkpoint.
struct load_options {
  /// `checksums` reads whole chunks and verifies their checksums; `sizes` reads only wanted bytes, and trusts
  /// them.
  verification verify = verification::checksums;
  /// Threads that read and check; with 1 it is the caller's.
  std::uint32_t readers = 4;
  sink_calls sink = sink_calls::by_caller;
};

/// The cost of a load.
struct load_report {
  std::uint64_t bytes = 0;       ///< wanted bytes, each passed to the sink once
  std::uint64_t read_bytes = 0;  ///< bytes read from files, including headers and the rest of chunks
  std::uint64_t files = 0;       ///< files from which anything was read
  /// Lookups in the list of copies, over all chunks read: about one per copy and chunk.
  std::uint64_t lookups = 0;
};

/// Loads from one checkpoint any number of times. It keeps the index of tensors by name, and the header of
/// each file that it used.
///
///     checkpoint_loader loader(storage, *search.found);
///     loader.load(first_half, sink);
///     loader.load(second_half, sink);
///
/// @par Complexity      construction O(n log n) for n tensors; a load O(k log n) for k wanted parts, and the
///                      first from a file O(its header). Memory: one chunk per reader, and the headers.
/// @par Thread safety   one thread at a time. The storage and the found checkpoint must outlive it.
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

/// Passes all wanted bytes to the sink, in any order.
///
///     const auto sink = [&](std::uint32_t i, std::uint64_t offset, auto bytes) {
///       std::memcpy(tensors[i] + offset, bytes.data(), bytes.size());
///     };
///     load_checkpoint(storage, *search.found, wanted, sink);
///
/// A `reshard_plan` from the checkpoint's parts to the wanted ones determines which bytes to read, for any
/// two splits. Extra memory is one chunk per reader.
///
/// @param wanted  any parts, which may overlap.
/// @param sink    `void(std::uint32_t wanted, std::uint64_t offset, std::span<const
///   std::byte>)`: receives bytes of the part from byte `offset` on, never the same bytes twice. Called by
///   the caller's thread while other threads continue to read; with `sink_calls::by_readers` all readers call
///   it concurrently.
/// @throws argument_error  for a tensor that does not exist, has another type or shape than required, or
///   whose elements the checkpoint lacks.
/// @throws format_error    for damage; `storage_error`. Some bytes may have been passed to the sink by then.
template <class Sink>
load_report load_checkpoint(storage_ref storage, const found_checkpoint& from,
                            std::span<const wanted_tensor> wanted, Sink&& sink,
                            const load_options& options = {}) {
  return checkpoint_loader(storage, from, options).load(wanted, sink);
}

/// Returns the bytes of a rank's extra, verified; nothing if there is none of that name.
[[nodiscard]] std::optional<std::vector<std::byte>> load_extra(storage_ref storage,
                                                               const found_checkpoint& from,
                                                               std::uint32_t rank, std::string_view name);

}  // namespace v0
}  // namespace llmmem

#if LLMMEM_CHECKPOINT_BODIES
#include <llmmem/checkpoint/detail/load_body.hpp>
#endif
