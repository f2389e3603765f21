/// @file
/// The concept of a partition: the map from ranks to the elements they hold, and nothing else.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/sharding/element_runs.hpp>
#include <llmmem/sharding/ids.hpp>
#include <llmmem/sharding/tensor_shape.hpp>

#include <concepts>
#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// Defines which rank holds which part of each tensor of a catalogue. A partition returns index maps only: no
/// bytes, no transport, no I/O, so that a plan made of two partitions can be checked without either.
///
///     world(), tensors()   how many ranks and tensors; ids count up from 0
///     shape(t)             as it was given
///     local(t, r)          what `r` holds of `t`; often nothing, and a world may exceed the elements
///     owned(t, r)          what `r` owns and writes: a part of `local(t, r)`
///     owner(t, e)          the one rank whose `owned(t, ...)` contains element `e`
///     is_replicated(t)     true only if every rank holds all of `t`
///
/// Every element of `t` is in the `local` of at least one rank and in the `owned` of exactly one. A rank
/// holds one regular set of a tensor: an irregular set is several tensors in the catalogue. Stages, experts
/// and grids fit: most ranks' `local` is then empty, or a box that several hold and one owns.
///
/// Ids are a precondition: `t` is less than `tensors()`, `r` than `world()`, `e` than the tensor's elements.
template <class P>
concept partition = requires(const P& p, tensor_id t, rank_id r, std::uint64_t e) {
  { p.world() } noexcept -> std::same_as<rank_count>;
  { p.tensors() } noexcept -> std::same_as<std::uint32_t>;
  { p.shape(t) } noexcept -> std::same_as<tensor_shape>;
  { p.local(t, r) } noexcept -> std::same_as<element_runs>;
  { p.owned(t, r) } noexcept -> std::same_as<element_runs>;
  { p.owner(t, e) } noexcept -> std::same_as<rank_id>;
  { p.is_replicated(t) } noexcept -> std::same_as<bool>;
};

/// Returns the `part`-th of `parts` shares of `total`, as even as possible: the first `total % parts` have
/// one extra element. @pre part < parts
[[nodiscard]] constexpr index_range even_share(std::uint64_t total, std::uint64_t part,
                                               std::uint64_t parts) noexcept {
  const std::uint64_t share = total / parts;
  const std::uint64_t longer = total % parts;
  return {part * share + (part < longer ? part : longer), share + (part < longer ? 1U : 0U)};
}

/// Returns the part whose `even_share` contains `index`. @pre index < total
[[nodiscard]] constexpr std::uint64_t even_share_of(std::uint64_t total, std::uint64_t index,
                                                    std::uint64_t parts) noexcept {
  const std::uint64_t share = total / parts;
  const std::uint64_t longer = total % parts;
  const std::uint64_t in_longer = longer * (share + 1);
  return index < in_longer ? index / (share + 1) : longer + (index - in_longer) / share;
}

namespace detail {

/// @throws argument_error  when there are no ranks; length_error when there are more tensors than ids.
constexpr void check_world(rank_count world, std::uint64_t tensors, const char* name) {
  if (to_number(world) == 0) throw argument_error(std::string(name) + ": 0 ranks; a world has at least one");
  if (tensors > 0xFFFF'FFFFU) {
    throw length_error(std::string(name) + ": " + std::to_string(tensors) + " tensors; ids are 32 bits wide");
  }
}

}  // namespace detail

}  // namespace v0
}  // namespace llmmem
