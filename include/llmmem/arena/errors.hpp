/// @file
/// Errors of arenas: the codes, the meaning of their three numbers, and their texts.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/failure.hpp>

#include <array>
#include <string>
#include <string_view>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// Returns the text for a name in braces other than the three numbers: the last byte.
[[nodiscard]] LLMMEM_COLD inline std::string arena_term(const failure& why, std::string_view) {
  return std::to_string(why.found - 1);
}

inline constexpr std::array arena_errors{
    error_info{.number = 72,
               .name = "place_taken",
               .wanted = "the first requested byte that another piece has",
               .found = "end of such bytes",
               .sentence = "bytes {wanted} to {last} of its range belong to another piece; name free bytes, "
                           "or free the pieces there first (pieces take whole multiples of the granularity)",
               .term = arena_term},
};

}  // namespace detail

namespace errc {

/// Another piece overlaps the requested bytes: wanted = the first requested byte of that piece, found = the
/// end of such bytes.
inline constexpr error_code place_taken = detail::code_of<72>(detail::arena_errors);

}  // namespace errc

}  // namespace v0
}  // namespace llmmem
