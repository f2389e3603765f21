/// @file
/// The errors of transfers and their queues: their codes, the meaning of their three numbers, and their
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

/// Returns the text for a name in braces, in addition to the three numbers.
[[nodiscard]] LLMMEM_COLD inline std::string transfer_term(const failure& why, std::string_view name) {
  return name == "place" ? place_text(why) : failed_because(why.index);
}

inline constexpr std::array transfer_errors{
    error_info{.number = 56,
               .name = "cancelled",
               .raises = error_kind::io,
               .wanted = "bytes to move",
               .found = "bytes moved before",
               .sentence = "cancelled after {found} of {wanted} bytes"},
    error_info{
        .number = 57,
        .name = "completion_lost",
        .raises = error_kind::io,
        .wanted = "bytes",
        .found = "offset",
        .sentence =
            "the device did not answer for {place}; keep that memory unchanged until the queue is destroyed",
        .term = transfer_term},
    error_info{.number = 58,
               .name = "dependency_failed",
               .raises = error_kind::io,
               .sentence = "it did not begin, because an operation before it failed"},
    error_info{.number = 59,
               .name = "not_finished",
               .sentence = "it is not finished; wait for it before you ask for its outcome"},
    error_info{.number = 65,
               .name = "engine_failed",
               .raises = error_kind::io,
               .index = "the system's error number",
               .sentence = "the I/O engine{cause}; construct the queue again, or on posix_io",
               .term = transfer_term},
    error_info{.number = 66,
               .name = "failures_kept",
               .raises = error_kind::out_of_memory,
               .found = "failures kept, all that the options allow",
               .sentence = "{found} failures are kept, the most that the options allow; read them, then call "
                           "clear_failures()"},
};

}  // namespace detail

namespace errc {

/// A transfer was cancelled: wanted = bytes to move, found = bytes moved before.
inline constexpr error_code cancelled = detail::code_of<56>(detail::transfer_errors);
/// The device never answered: wanted = bytes, found = offset.
inline constexpr error_code completion_lost = detail::code_of<57>(detail::transfer_errors);
/// An operation that it depends on failed; it did not begin.
inline constexpr error_code dependency_failed = detail::code_of<58>(detail::transfer_errors);
/// Its outcome was requested before it was known.
inline constexpr error_code not_finished = detail::code_of<59>(detail::transfer_errors);
/// The system refused a request of the I/O engine itself: index = the system's error number.
inline constexpr error_code engine_failed = detail::code_of<65>(detail::transfer_errors);
/// Failures that were not cleared fill their table: found = failures kept, all that the options allow.
inline constexpr error_code failures_kept = detail::code_of<66>(detail::transfer_errors);

}  // namespace errc

}  // namespace v0
}  // namespace llmmem
