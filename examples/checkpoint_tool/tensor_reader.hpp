/// @file
/// Reads elements of many tensors of a checkpoint at once, verified, into memory that the caller has.
#pragma once

#include <llmmem/checkpoint/load.hpp>
#include <llmmem/checkpoint/manifest.hpp>
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

/// The least elements of a type that fill whole bytes: one, but of types of less than a byte.
struct element_unit {
  std::uint64_t elements = 1;
  std::uint64_t bytes = 1;
};

[[nodiscard]] inline element_unit unit_of(llmmem::safetensors_type type) {
  const std::uint64_t bits = bits_of(type);
  if (bits % 8 == 0) return {1, bits / 8};
  return bits == 4 ? element_unit{2, 1} : element_unit{4, bits / 2};
}

/// The elements `first` to `last - 1` of a set, in its own order: three sets at most.
[[nodiscard]] inline std::vector<llmmem::element_runs> slice(const llmmem::element_runs& of,
                                                             std::uint64_t first, std::uint64_t last) {
  using llmmem::element_runs;
  std::vector<element_runs> sets;
  const auto add = [&](std::uint64_t begin, std::uint64_t run, std::uint64_t count) {
    if (run == 0 || count == 0) return;
    sets.push_back({begin, run, count == 1 ? run : of.stride, count});
  };
  if (first >= last) return sets;
  std::uint64_t run = first / of.run;
  const std::uint64_t into = first % of.run;
  const std::uint64_t last_run = last / of.run;
  const std::uint64_t rest = last % of.run;
  if (run == last_run) {
    add(of.begin + run * of.stride + into, last - first, 1);
    return sets;
  }
  if (into != 0) {
    add(of.begin + run * of.stride + into, of.run - into, 1);
    ++run;
  }
  add(of.begin + run * of.stride, of.run, last_run - run);
  add(of.begin + last_run * of.stride, rest, 1);
  return sets;
}

/// Collects what is wanted, then reads all of it in one go.
class tensor_reader {
 public:
  tensor_reader(storage_type& storage, const llmmem::found_checkpoint& from)
      : loader_(storage, from, {.sink = llmmem::sink_calls::by_readers}) {}

  /// Asks for bytes of a part of a tensor, from byte `offset` of the part on, as many as `into` has.
  void want(const llmmem::checkpoint_tensor& tensor, const llmmem::element_runs& part, std::uint64_t offset,
            std::span<std::byte> into) {
    const element_unit unit = unit_of(tensor.type);
    const std::uint64_t first_unit = offset / unit.bytes;
    const std::uint64_t end_unit = (offset + into.size() + unit.bytes - 1) / unit.bytes;
    const std::uint64_t first = first_unit * unit.elements;
    const std::uint64_t last = std::min(end_unit * unit.elements, part.elements());
    std::uint64_t skip = offset - first_unit * unit.bytes;  // of an element that begins before
    std::size_t done = 0;
    for (const llmmem::element_runs& set : slice(part, first, last)) {
      const std::uint64_t bytes = llmmem::bytes_of(tensor.type, set.elements(), tensor.name);
      const auto kept = static_cast<std::size_t>(std::min<std::uint64_t>(bytes - skip, into.size() - done));
      wanted_.push_back({tensor.name, set, std::nullopt, std::nullopt});
      places_.push_back({skip, into.subspan(done, kept)});
      done += kept;
      skip = 0;
    }
  }

  /// Reads all that was asked for, and forgets it. @throws as `llmmem::load_checkpoint`.
  /// @return bytes that were read of files.
  std::uint64_t read() {
    const auto sink = [&](std::uint32_t i, std::uint64_t offset, std::span<const std::byte> bytes) {
      const place& to = places_[i];
      const std::uint64_t first = std::max(offset, to.skip);
      const std::uint64_t last = std::min<std::uint64_t>(offset + bytes.size(), to.skip + to.into.size());
      if (first >= last) return;
      std::memcpy(to.into.data() + (first - to.skip), bytes.data() + (first - offset),
                  static_cast<std::size_t>(last - first));
    };
    std::uint64_t read_bytes = 0;
    if (!wanted_.empty()) read_bytes = loader_.load(wanted_, sink).read_bytes;
    wanted_.clear();
    places_.clear();
    return read_bytes;
  }

 private:
  struct place {
    std::uint64_t skip = 0;  // bytes before the first that is kept
    std::span<std::byte> into{};
  };

  llmmem::checkpoint_loader loader_;
  std::vector<llmmem::wanted_tensor> wanted_{};
  std::vector<place> places_{};
};

}  // namespace checkpoint_tool
