/// @file
/// The checks of `kv_layout::checked`.
#pragma once

#include <llmmem/paging/detail/kv_layout_body.hpp>
#include <llmmem/paging/kv_layout.hpp>

#include <string>

namespace llmmem {
inline namespace v0 {

namespace detail {

constexpr void check_known(bool is_known, const char* name, unsigned number) {
  if (is_known) return;
  throw argument_error(std::string("kv_layout: there is no ") + name + " of number " +
                       std::to_string(number) + "; was it written by a newer version?");
}

constexpr void check_positive(std::uint64_t number, const char* name) {
  if (number == 0) throw length_error(std::string("kv_layout: ") + name + " is 0; at least 1 is needed");
}

constexpr void check_whole_bytes(std::uint64_t elements, dtype type) {
  if (elements * bits_of(type) % 8 == 0) return;
  throw length_error("kv_layout: " + std::to_string(elements) + " elements of " +
                     std::to_string(bits_of(type)) + " bits are not a whole number of bytes");
}

/// @param elements  of a vector that the scales apply to
constexpr void check_scales(const paging::scale_form& of, std::uint64_t elements, const char* name) {
  using paging::scale_group;
  using paging::scale_place;
  const auto text = [&](const char* rest) { return std::string("kv_layout: ") + name + rest; };
  check_known(of.group <= scale_group::channel, "scale_group", static_cast<unsigned>(of.group));
  check_known(of.place <= scale_place::separate, "scale_place", static_cast<unsigned>(of.place));
  check_known(bits_of(of.element) != 0, "element", static_cast<unsigned>(of.element));
  if (of.is_rotated && (of.group == scale_group::none || of.group == scale_group::channel))
    throw argument_error(text(
        ".is_rotated: a rotation mixes the channels of a vector, so it needs scales by vector or by run; "
        "leave it out, or take another group"));
  if (of.group == scale_group::none) {
    if (of.has_global)
      throw argument_error(
          text(".has_global is set without a group; a global scale scales the scales of a group, so set the "
               "group too"));
    return;
  }
  if (of.numbers == 0) throw length_error(text(".numbers is 0; at least 1 is needed"));
  if (of.group == scale_group::run && (of.run == 0 || elements % of.run != 0))
    throw length_error(text(".run: vectors of ") + std::to_string(elements) +
                       " elements are not a whole number of runs of " + std::to_string(of.run));
  const bool is_with_vectors = of.place == scale_place::after_vector || of.place == scale_place::after_rotary;
  if (of.group == scale_group::channel && is_with_vectors)
    throw argument_error(
        text(".place: scales by channel apply to all tokens of a block, so they cannot be after a vector; "
             "use in_block or separate"));
}

constexpr void check_part(const kv_layout& of) {
  const paging::kv_part& part = of.part;
  const auto check_rank = [](std::uint32_t rank, std::uint32_t size, const char* name) {
    if (rank < size) return;
    throw argument_error(std::string("kv_layout: part.") + name + "_rank is " + std::to_string(rank) +
                         " of " + std::to_string(size) + " ranks; use 0 to " + std::to_string(size - 1));
  };
  check_positive(part.tp_size, "part.tp_size");
  check_positive(part.cp_size, "part.cp_size");
  check_positive(part.cp_interleave, "part.cp_interleave");
  check_rank(part.tp_rank, part.tp_size, "tp");
  check_rank(part.cp_rank, part.cp_size, "cp");
  if (part.heads_of_model != 0) {
    // With fewer heads than ranks, several ranks hold each head.
    const bool is_dealt = part.heads_of_model >= part.tp_size;
    const bool fits = is_dealt ? std::uint64_t{of.heads} * part.tp_size == part.heads_of_model
                               : of.heads == 1 && part.tp_size % part.heads_of_model == 0;
    if (!fits)
      throw argument_error("kv_layout: part.heads_of_model: " + std::to_string(part.heads_of_model) +
                           " heads cannot be distributed over " + std::to_string(part.tp_size) +
                           " ranks as " + std::to_string(of.heads) + " heads each");
  }
  if (part.cp_size != 1 && of.block_tokens % part.cp_interleave != 0)
    throw argument_error("kv_layout: part.cp_interleave: a block of " + std::to_string(of.block_tokens) +
                         " tokens is not a whole number of runs of " + std::to_string(part.cp_interleave));
}

}  // namespace detail

constexpr const kv_layout& kv_layout::checked() const {
  for (const dtype each : {element, value_element.value_or(element), rotary_element, index_element})
    detail::check_known(bits_of(each) != 0, "element", static_cast<unsigned>(each));
  detail::check_known(heads_in_block <= paging::head_order::hnd, "head_order",
                      static_cast<unsigned>(heads_in_block));
  detail::check_known(static_cast<std::uint32_t>(order) < block_order_count, "block_order",
                      static_cast<unsigned>(order));
  detail::check_positive(layers, "layers");
  detail::check_positive(heads, "heads");
  detail::check_positive(head_dim, "head_dim");
  detail::check_positive(block_tokens, "block_tokens");
  detail::check_scales(key_scales, elements_of(paging::plane_role::key), "key_scales");
  detail::check_scales(value_scales, elements_of(paging::plane_role::value), "value_scales");
  detail::check_scales(index_scales, elements_of(paging::plane_role::index_key), "index_scales");
  const auto check_owner = [](bool is_there, bool is_said, const char* text) {
    if (!is_there && is_said) throw argument_error(text);
  };
  check_owner(has_values, value_scales.group != paging::scale_group::none,
              "kv_layout: value_scales without values; set has_values, or leave out the scales");
  check_owner(has_values, value_element.has_value(),
              "kv_layout: value_element without values; set has_values, or leave out value_element");
  check_owner(index_dim != 0, index_scales.group != paging::scale_group::none,
              "kv_layout: index_scales without index keys; set index_dim, or leave out the scales");
  check_owner(
      false, value_scales.is_rotated,
      "kv_layout: value_scales.is_rotated: kernels turn keys and queries alone; leave it out of values");
  check_owner(
      false, index_scales.is_rotated,
      "kv_layout: index_scales.is_rotated: kernels turn keys and queries alone; leave it out of index keys");
  detail::check_part(*this);
  std::uint64_t bytes = 0;
  for (std::uint32_t p = 0; p < planes(); ++p) {
    static_cast<void>(
        checked_multiply(vector_elements(p), bits_of(element_of(p)), "kv_layout: bits of a vector"));
    detail::check_whole_bytes(vector_elements(p), element_of(p));
    std::uint64_t plane = checked_multiply(vector_bytes(p), heads_of(p), "kv_layout: bytes of a token");
    plane = checked_multiply(plane, tokens_of(p), "kv_layout: bytes of a block of a layer");
    bytes = checked_add(bytes, checked_multiply(plane, layers, "kv_layout: bytes of a block"),
                        "kv_layout: bytes of a block");
  }
  return *this;
}

}  // namespace v0
}  // namespace llmmem
