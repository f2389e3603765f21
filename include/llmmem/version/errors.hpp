/// @file
/// Errors of versions: the codes, the meaning of their three numbers, and their texts.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/failure.hpp>

#include <array>

namespace llmmem {
inline namespace v0 {

namespace detail {

inline constexpr std::array version_errors{
    error_info{
        .number = 73,
        .name = "no_such_version",
        .wanted = "version asked for",
        .found = "the newest, 0 when there is none",
        .sentence = "version {wanted} was never published, the newest is {found} (0: none); publish first"},
    error_info{.number = 74,
               .name = "version_expired",
               .wanted = "version asked for",
               .found = "the oldest kept",
               .sentence = "version {wanted} was dropped, the oldest that is kept is {found} (0: none); pin "
                           "it earlier, or keep more versions"},
    error_info{.number = 75,
               .name = "version_pinned",
               .raises = error_kind::out_of_memory,
               .index = "its pins",
               .wanted = "the version whose slot is needed",
               .found = "number of slots",
               .sentence = "version {wanted} is pinned {index} times, and none of the {found} slots is free; "
                           "release it first, or give it more slots"},
};

}  // namespace detail

namespace errc {

/// A version that was never published: wanted = the version requested, found = the newest, 0 if there is
/// none.
inline constexpr error_code no_such_version = detail::code_of<73>(detail::version_errors);
/// A version that is no longer kept: wanted = the version requested, found = the oldest kept.
inline constexpr error_code version_expired = detail::code_of<74>(detail::version_errors);
[[deprecated("its name is version_expired")]] inline constexpr error_code version_gone = version_expired;
/// Readers hold the version whose slot is needed: index = its pins, wanted = that version, found = the number
/// of slots.
inline constexpr error_code version_pinned = detail::code_of<75>(detail::version_errors);

}  // namespace errc

}  // namespace v0
}  // namespace llmmem
