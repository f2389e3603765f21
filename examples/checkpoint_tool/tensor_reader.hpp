/// @file
/// Reads elements of many tensors of a checkpoint at once, verified, into the caller's memory.
#pragma once

#include <llmmem/checkpoint/load.hpp>
#include <llmmem/checkpoint/manifest.hpp>
#include <llmmem/checkpoint/part_slices.hpp>
#include <llmmem/checkpoint/search.hpp>
#include <llmmem/model/safetensors.hpp>
#include <llmmem/sharding/element_runs.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint_tool/select.hpp"

namespace checkpoint_tool {

using llmmem::element_unit;
using llmmem::runs_between;
using llmmem::whole_byte_unit;

/// Collects requests, then reads all of them at once.
class tensor_reader {
 public:
  tensor_reader(storage_type& storage, const llmmem::found_checkpoint& from)
      : loader_(storage, from, {.verify = how_to_read(from), .sink = llmmem::sink_calls::by_readers}) {}

  /// Requests the bytes of a tensor's part from byte `offset` on, as many as `into` has.
  void want(const llmmem::checkpoint_tensor& tensor, const llmmem::element_runs& part, std::uint64_t offset,
            std::span<std::byte> into) {
    for (const llmmem::part_slice& each : llmmem::slices_of(tensor.type, part, offset, into, tensor.name)) {
      wanted_.push_back({tensor.name, each.elements, std::nullopt, std::nullopt});
      places_.push_back(each);
    }
  }

  /// Reads all requested bytes, and drops the requests. @throws as `llmmem::load_checkpoint`.
  /// @return bytes read from files.
  std::uint64_t read() {
    const auto sink = [&](std::uint32_t i, std::uint64_t offset, std::span<const std::byte> bytes) {
      places_[i].take(offset, bytes);
    };
    std::uint64_t read_bytes = 0;
    if (!wanted_.empty()) read_bytes = loader_.load(wanted_, sink).read_bytes;
    wanted_.clear();
    places_.clear();
    return read_bytes;
  }

 private:
  /// A published model has no checksums.
  [[nodiscard]] static llmmem::verification how_to_read(const llmmem::found_checkpoint& from) {
    for (const llmmem::checkpoint_file& each : from.manifest.files) {
      if (each.chunks.empty() && each.bytes != 0) return llmmem::verification::sizes;
    }
    return llmmem::verification::checksums;
  }

  llmmem::checkpoint_loader loader_;
  std::vector<llmmem::wanted_tensor> wanted_{};
  std::vector<llmmem::part_slice> places_{};
};

}  // namespace checkpoint_tool
