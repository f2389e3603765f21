/// @file
/// The errors of replicas: their codes, the meaning of their three numbers, and their texts.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/failure.hpp>

#include <array>

namespace llmmem {
inline namespace v0 {

namespace detail {

inline constexpr std::array redundancy_errors{
    error_info{
        .number = 85,
        .name = "setup_differs",
        .index = "the first rank whose setup differs from rank 0's",
        .wanted = "the digest of rank 0's setup",
        .found = "the digest of that rank's setup",
        .sentence =
            "the setup of rank {index} differs from rank 0's (digests {found} and {wanted}); give all ranks "
            "the same scheme, sizes, homes and placement"},
    error_info{
        .number = 86,
        .name = "not_recovered",
        .wanted = "the epoch",
        .found = "the epoch in which it last recovered, 0 for none",
        .sentence =
            "it has not recovered in epoch {wanted}, only in epoch {found} (0: never); call recover() on "
            "all ranks when an epoch begins, and check its result"},
};

}  // namespace detail

namespace errc {

/// Ranks are set up differently: index = the first rank whose setup differs from rank 0's, wanted = the
/// digest of rank 0's setup, found = the digest of that rank's setup.
inline constexpr error_code setup_differs = detail::code_of<85>(detail::redundancy_errors);
/// A replica was asked to keep a version before it recovered: wanted = the epoch, found = the epoch in which
/// it last recovered, 0 for none.
inline constexpr error_code not_recovered = detail::code_of<86>(detail::redundancy_errors);

}  // namespace errc

}  // namespace v0
}  // namespace llmmem
