/// @file
/// Errors of codecs: the codes, the meaning of their three numbers, and their texts.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/failure.hpp>

#include <array>

namespace llmmem {
inline namespace v0 {

namespace detail {

inline constexpr std::array codec_errors{
    error_info{.number = 60,
               .name = "damaged_encoding",
               .index = "block of the chunk",
               .wanted = "the number expected",
               .found = "the number read",
               .sentence = "the encoded bytes are damaged at block {index}: {found} found, {wanted} "
                           "expected; discard the decoded bytes, and fetch the encoded ones again"},
    error_info{.number = 110,
               .name = "base_differs",
               .wanted = "the checksum of the base that was encoded with",
               .found = "the checksum of the given base",
               .sentence = "the bytes are differences to another base, with checksum {wanted} and not "
                           "{found}; give the version that they were encoded with"},
};

}  // namespace detail

namespace errc {

/// Bytes that no codec writes: index = block of the chunk, wanted = the number expected, found = the number
/// read.
inline constexpr error_code damaged_encoding = detail::code_of<60>(detail::codec_errors);

/// Differences to another base: wanted = the checksum of the base encoded with, found = that of the given
/// one.
inline constexpr error_code base_differs = detail::code_of<110>(detail::codec_errors);

}  // namespace errc

}  // namespace v0
}  // namespace llmmem
