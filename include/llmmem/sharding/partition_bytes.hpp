/// @file
/// The bytes that a rank of a partition holds and owns.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/sharding/concepts.hpp>
#include <llmmem/sharding/element_runs.hpp>
#include <llmmem/sharding/ids.hpp>
#include <llmmem/sharding/tensor_shape.hpp>

#include <cstdint>
#include <span>
#include <string>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// @throws argument_error  when `tensors` is not the catalogue that the partition was made from.
template <partition P>
constexpr void check_catalogue(const P& p, std::span<const tensor_facts> tensors, const char* name) {
  if (tensors.size() != p.tensors()) {
    throw argument_error(std::string(name) + ": a catalogue of " + std::to_string(tensors.size()) +
                         " tensors for a partition of " + std::to_string(p.tensors()) +
                         "; give the one that it was made from");
  }
  for (std::uint32_t t = 0; t < p.tensors(); ++t) {
    const tensor_shape& given = tensors[t].shape;
    const tensor_shape has = p.shape(tensor_id{t});
    if (given == has) continue;
    throw argument_error(std::string(name) + ": tensor '" + tensors[t].name + "' is " +
                         std::to_string(given.rows()) + " x " + std::to_string(given.columns()) +
                         " in the catalogue and " + std::to_string(has.rows()) + " x " +
                         std::to_string(has.columns()) + " in the partition");
  }
}

template <partition P, class ElementsOf>
[[nodiscard]] constexpr std::uint64_t bytes_of(const P& p, std::span<const tensor_facts> tensors,
                                               const char* name, const ElementsOf& elements_of) {
  check_catalogue(p, tensors, name);
  std::uint64_t bytes = 0;
  for (std::uint32_t t = 0; t < p.tensors(); ++t) {
    const element_runs elements = elements_of(tensor_id{t});
    bytes = checked_add(bytes, checked_multiply(elements.elements(), tensors[t].element_bytes, name), name);
  }
  return bytes;
}

}  // namespace detail

/// Returns the bytes of all that `rank` holds: the space that it needs. @pre `rank` is less than `p.world()`
///
/// @par Complexity   O(tensors) calls of `local`.
/// @throws argument_error  when `tensors` is not the catalogue of `p`; length_error past 2^63 - 1 bytes.
template <partition P>
[[nodiscard]] constexpr std::uint64_t local_bytes(const P& p, std::span<const tensor_facts> tensors,
                                                  rank_id rank) {
  return detail::bytes_of(p, tensors, "local_bytes", [&](tensor_id tensor) { return p.local(tensor, rank); });
}

/// Returns the bytes of all that `rank` owns: those that it writes to a checkpoint. Otherwise as
/// `local_bytes`; the sum over all ranks is the bytes of the tensors.
template <partition P>
[[nodiscard]] constexpr std::uint64_t owned_bytes(const P& p, std::span<const tensor_facts> tensors,
                                                  rank_id rank) {
  return detail::bytes_of(p, tensors, "owned_bytes", [&](tensor_id tensor) { return p.owned(tensor, rank); });
}

}  // namespace v0
}  // namespace llmmem
