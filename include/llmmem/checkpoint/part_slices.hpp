/// @file
/// Converts bytes of a tensor's part to sets of elements: the requests of a reader with a window of memory.
#pragma once

#include <llmmem/checkpoint/manifest.hpp>
#include <llmmem/config.hpp>
#include <llmmem/model/safetensors_type.hpp>
#include <llmmem/sharding/element_runs.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The smallest number of elements of a type that fill whole bytes: one, except for types of less than a
/// byte.
struct element_unit {
  std::uint64_t elements = 1;
  std::uint64_t bytes = 1;
};

/// Returns the unit of a type.
[[nodiscard]] inline element_unit whole_byte_unit(safetensors_type type) {
  const std::uint64_t bits = bits_of(type);
  if (bits % 8 == 0) return {1, bits / 8};
  return bits == 4 ? element_unit{2, 1} : element_unit{4, bits / 2};
}

/// Returns the elements `first` to `last - 1` of a set, in its own order: at most three sets.
[[nodiscard]] inline std::vector<element_runs> runs_between(const element_runs& of, std::uint64_t first,
                                                            std::uint64_t last) {
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

/// The elements that contain the requested bytes, and the destination of these.
struct part_slice {
  element_runs elements{};
  std::uint64_t skip = 0;  ///< bytes of the elements before the first wanted byte
  std::span<std::byte> into{};

  /// Copies the wanted part of `bytes`, which begin at byte `offset` of the elements.
  void take(std::uint64_t offset, std::span<const std::byte> bytes) const {
    const std::uint64_t first = std::max(offset, skip);
    const std::uint64_t last = std::min<std::uint64_t>(offset + bytes.size(), skip + into.size());
    if (first >= last) return;
    std::ranges::copy(
        bytes.subspan(static_cast<std::size_t>(first - offset), static_cast<std::size_t>(last - first)),
        into.begin() + static_cast<std::ptrdiff_t>(first - skip));
  }
};

/// Returns the slices for the bytes of a tensor's part from byte `offset` on, as many as `into` has.
/// @throws argument_error, length_error  as `bytes_of`.
[[nodiscard]] inline std::vector<part_slice> slices_of(safetensors_type type, const element_runs& part,
                                                       std::uint64_t offset, std::span<std::byte> into,
                                                       const std::string& name) {
  const element_unit unit = whole_byte_unit(type);
  const std::uint64_t first_unit = offset / unit.bytes;
  const std::uint64_t end_unit = (offset + into.size() + unit.bytes - 1) / unit.bytes;
  const std::uint64_t last = std::min(end_unit * unit.elements, part.elements());
  std::uint64_t skip = offset - first_unit * unit.bytes;  // bytes of an element that begins before `offset`
  std::vector<part_slice> slices;
  std::size_t done = 0;
  for (const element_runs& set : runs_between(part, first_unit * unit.elements, last)) {
    const std::uint64_t bytes = bytes_of(type, set.elements(), name);
    const auto kept = static_cast<std::size_t>(std::min<std::uint64_t>(bytes - skip, into.size() - done));
    slices.push_back({set, skip, into.subspan(done, kept)});
    done += kept;
    skip = 0;
  }
  return slices;
}

}  // namespace v0
}  // namespace llmmem
