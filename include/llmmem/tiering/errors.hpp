/// @file
/// The codes for refused calls on chunks and tensors in tiers, the meaning of their three numbers, and their
/// texts.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/failure.hpp>

#include <array>
#include <string>
#include <string_view>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// Returns the text for a name in braces, for names other than the three numbers.
[[nodiscard]] LLMMEM_COLD inline std::string tiering_term(const failure& why, std::string_view) {
  return (why.wanted == 1 ? "tensor " : "chunk ") + std::to_string(why.index);
}

inline constexpr std::array tiering_errors{
    error_info{.number = 61,
               .name = "no_contents",
               .index = "the chunk's slot, or the tensor's number",
               .wanted = "1 for a tensor",
               .sentence = "{chunk} has no contents; write all of it first",
               .term = tiering_term},
    error_info{
        .number = 63,
        .name = "timed_out",
        .raises = error_kind::io,
        .index = "the chunk's slot",
        .wanted = "bytes that had to be brought in",
        .found = "nanoseconds waited",
        .sentence =
            "chunk {index} of {wanted} bytes did not arrive within {found} ns; its transfer continues: "
            "ask again"},
    error_info{.number = 64,
               .name = "chunk_leased",
               .index = "the chunk's slot, or the tensor's number",
               .wanted = "1 for a tensor",
               .found = "leases in the way",
               .sentence = "{chunk} is leased {found} times; end these leases first",
               .term = tiering_term},
    error_info{.number = 67,
               .name = "no_such_key",
               .sentence = "no chunk has that key; create a chunk with it, and write that"},
    error_info{.number = 68,
               .name = "key_taken",
               .index = "slot of the chunk that has it",
               .sentence = "chunk {index} has that key; find() it, or remove it first"},
    error_info{.number = 69,
               .name = "no_such_tensor",
               .index = "the tensor's number",
               .found = "number of tensors",
               .sentence = "there is no tensor {index}; the number of tensors is {found}"},
    error_info{.number = 70,
               .name = "no_such_part",
               .index = "the tensor's number",
               .wanted = "part asked for",
               .found = "parts it has",
               .sentence = "tensor {index} has no part {wanted}; its number of parts is {found}"},
    error_info{.number = 71,
               .name = "tensor_in_parts",
               .index = "the tensor's number",
               .found = "parts it has",
               .sentence = "tensor {index} has {found} parts; take them one by one, or by for_each_part"},
};

}  // namespace detail

namespace errc {

/// The chunk or tensor was never written, or was discarded: index = the chunk's slot, or the tensor's number,
/// wanted = 1 for a tensor.
inline constexpr error_code no_contents = detail::code_of<61>(detail::tiering_errors);
/// A chunk did not arrive in time: index = the chunk's slot, wanted = bytes that had to be brought in, found
/// = nanoseconds waited.
inline constexpr error_code timed_out = detail::code_of<63>(detail::tiering_errors);
/// Leases are in the way: index = the chunk's slot, or the tensor's number, wanted = 1 for a tensor, found
/// = leases in the way.
inline constexpr error_code chunk_leased = detail::code_of<64>(detail::tiering_errors);
/// No chunk has that key.
inline constexpr error_code no_such_key = detail::code_of<67>(detail::tiering_errors);
/// Another chunk has that key: index = slot of the chunk that has it.
inline constexpr error_code key_taken = detail::code_of<68>(detail::tiering_errors);
/// No such tensor: index = the tensor's number, found = number of tensors.
inline constexpr error_code no_such_tensor = detail::code_of<69>(detail::tiering_errors);
/// A part that the tensor does not have: index = the tensor's number, wanted = part asked for, found = parts
/// it has.
inline constexpr error_code no_such_part = detail::code_of<70>(detail::tiering_errors);
/// A tensor that can only be leased part by part: index = the tensor's number, found = parts it has.
inline constexpr error_code tensor_in_parts = detail::code_of<71>(detail::tiering_errors);

}  // namespace errc

}  // namespace v0
}  // namespace llmmem
