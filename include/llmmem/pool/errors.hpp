/// @file
/// Errors of pools: the codes, the meaning of their three numbers, and their texts.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/failure.hpp>

#include <array>

namespace llmmem {
inline namespace v0 {

namespace detail {

inline constexpr std::array pool_errors{
    error_info{.number = 107,
               .name = "directory_unreachable",
               .raises = error_kind::comm,
               .index = "errno; 0 if there was no answer in time",
               .sentence =
                   "the server cannot be reached (errno {index}; 0: no answer in time), so only blocks of "
                   "this node's own tiers are found; start it, or correct its address in redis_options: "
                   "the directory connects again by itself"},
    error_info{
        .number = 108,
        .name = "directory_refused",
        .raises = error_kind::comm,
        .sentence =
            "the server refused a command or answered nonsense; it must be Redis 6.2 or newer, writable, and "
            "redis_options must give its password, user and database"},
    error_info{.number = 109,
               .name = "directory_name_taken",
               .raises = error_kind::comm,
               .index = "the seat",
               .sentence =
                   "another process has taken the name of seat {index}, so this node announces no blocks "
                   "until that process ends; give each pool its own redis_options::prefix"},
    error_info{.number = 111,
               .name = "mover_refused",
               .raises = error_kind::comm,
               .index = "errno; 0 for a library's error",
               .wanted = "bytes of the memory",
               .sentence =
                   "the system refused {wanted} bytes of memory that other nodes can read (errno {index}); "
                   "give the mover fewer bytes, or the process a higher limit"},
    error_info{.number = 112,
               .name = "mover_unreached",
               .raises = error_kind::comm,
               .index = "the seat",
               .wanted = "bytes that the node named",
               .found = "errno",
               .sentence =
                   "the memory of seat {index} cannot be read (errno {found}; 71: its introduction is wrong, "
                   "or of another mover), so its blocks come by message; for one-sided reads its process "
                   "must have the same mover, user and PID namespace"},
    error_info{
        .number = 113,
        .name = "mover_lane_differs",
        .raises = error_kind::comm,
        .index = "the seat",
        .wanted = "bytes that the node named",
        .sentence =
            "this is not the lane to seat {index} that the mover claims, so its blocks come by message; "
            "set ucx_options::lane to what UCX can use between the two"},
};

}  // namespace detail

namespace errc {

/// The server of a directory cannot be reached: index = errno, or 0 if there was no answer in time.
inline constexpr error_code directory_unreachable = detail::code_of<107>(detail::pool_errors);
/// The server of a directory refused a command; `where` has its words.
inline constexpr error_code directory_refused = detail::code_of<108>(detail::pool_errors);
/// Another process has this node's name in the directory: index = the seat.
inline constexpr error_code directory_name_taken = detail::code_of<109>(detail::pool_errors);
/// The system, or a library, refused memory that other nodes can read: index = errno, wanted = its bytes.
inline constexpr error_code mover_refused = detail::code_of<111>(detail::pool_errors);
/// Another node's memory cannot be read: index = its seat, wanted = the bytes it named, found = errno.
inline constexpr error_code mover_unreached = detail::code_of<112>(detail::pool_errors);
/// UCX reaches another node by other transports than its mover claims: index = its seat; `where` names them.
inline constexpr error_code mover_lane_differs = detail::code_of<113>(detail::pool_errors);

}  // namespace errc

}  // namespace v0
}  // namespace llmmem
