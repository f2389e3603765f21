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

/// A tensor, or part of one, that somebody wants.
struct wanted_tensor {
  std::string name{};
  std::optional<element_runs> part{};  ///< none: all of it
  /// What it must be. Without a type or shape any will do.
  std::optional<safetensors_type> type{};
  std::optional<std::vector<std::uint64_t>> shape{};
};

/// How a checkpoint is loaded.
struct load_options {
  /// `checksums` reads whole chunks and holds each to its checksum; `sizes` reads no byte that is not wanted,
  /// and believes it.
  verification how = verification::checksums;
  /// Threads that read and check, the caller's among them. The sink is called by all of them.
  std::uint32_t readers = 4;
};

/// What loading took.
struct load_report {
  std::uint64_t bytes = 0;       ///< wanted, and given to the sink, each once
  std::uint64_t read_bytes = 0;  ///< from files, headers and the rest of chunks among them
  std::uint64_t files = 0;       ///< that anything was read of
};

namespace detail {

[[nodiscard]] load_report load_into(storage_ref storage, const found_checkpoint& from,
                                    std::span<const wanted_tensor> wanted, load_sink sink,
                                    const load_options& options);

}  // namespace detail

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
///                the part, from byte `offset` of it on. With several readers called by all of them at once,
///                never twice for the same bytes.
/// @throws argument_error  for a tensor that is not there, of another type or shape than it must be, or whose
///      elements the checkpoint does not have.
/// @throws format_error    for what is damaged; `storage_error`. Some bytes may have been given by then.
template <class Sink>
load_report load_checkpoint(storage_ref storage, const found_checkpoint& from,
                            std::span<const wanted_tensor> wanted, Sink&& sink,
                            const load_options& options = {}) {
  return detail::load_into(storage, from, wanted, detail::load_sink::of(sink), options);
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
