/// @file
/// Errors of refits: the codes, the meaning of their three numbers, and their texts.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/failure.hpp>

#include <array>

namespace llmmem {
inline namespace v0 {

namespace detail {

inline constexpr std::array refit_errors{
    error_info{.number = 103,
               .name = "old_weights",
               .wanted = "the number of the new weights",
               .found = "the number of the weights that are served",
               .sentence = "weights with number {wanted} cannot follow those with number {found}; numbers "
                           "ascend: give each refit the trainer's step"},
    error_info{.number = 104,
               .name = "refit_abandoned",
               .raises = error_kind::comm,
               .wanted = "the number of the new weights",
               .found = "ranks that are out",
               .sentence =
                   "a rank could not take the weights with number {wanted}, so no rank publishes them "
                   "({found} ranks are out): all serve what they had; see the failure of that rank, "
                   "shrink() if the epoch was revoked, and call again"},
    error_info{.number = 105,
               .name = "other_base",
               .raises = error_kind::comm,
               .index = "the rank that receives",
               .wanted = "the number of the weights that were sent last",
               .found = "the number of the weights there; equal if their bytes differ",
               .sentence =
                   "rank {index} does not have the weights with number {wanted} that changes refer to, "
                   "it has {found} or other bytes; send all with refit_sends::changes or all"},
    error_info{.number = 106,
               .name = "other_refit",
               .raises = error_kind::comm,
               .index = "the rank that sent it",
               .wanted = "the value here",
               .found = "the value in its message",
               .sentence =
                   "rank {index} sent a message of another refit ({found} there, {wanted} here); make "
                   "the plan from the same input on all ranks, and call with the same number"},
};

}  // namespace detail

namespace errc {

/// Weights are not newer than those served: wanted = their number, found = that of those served.
inline constexpr error_code old_weights = detail::code_of<103>(detail::refit_errors);
/// A rank could not: wanted = the number of the new weights, found = ranks that are out.
inline constexpr error_code refit_abandoned = detail::code_of<104>(detail::refit_errors);
/// A receiver lacks the base of the changes: index = its rank, wanted = the number sent last, found = its
/// own.
inline constexpr error_code other_base = detail::code_of<105>(detail::refit_errors);
/// A message of another plan or call: index = its rank, wanted = the value here, found = the value there.
inline constexpr error_code other_refit = detail::code_of<106>(detail::refit_errors);

}  // namespace errc

}  // namespace v0
}  // namespace llmmem
