/// @file
/// Errors of devices: the codes, the meaning of their three numbers, and their texts.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/failure.hpp>

#include <array>

namespace llmmem {
inline namespace v0 {

namespace detail {

inline constexpr std::array device_errors{
    error_info{
        .number = 90,
        .name = "device_failed",
        .raises = error_kind::io,
        .index = "the runtime's status",
        .sentence =
            "the device's runtime refused with status {index} (of CUDA 35 and 100: there is no driver or "
            "no device; 209: nothing was compiled for that device, see CMAKE_CUDA_ARCHITECTURES; others: "
            "cudaGetErrorName); an earlier operation on that device may be the cause: run under "
            "compute-sanitizer, or with CUDA_LAUNCH_BLOCKING=1, to see where"},
};

}  // namespace detail

namespace errc {

/// A call of the device's runtime or driver failed; `where` names the call: index = the runtime's status.
inline constexpr error_code device_failed = detail::code_of<90>(detail::device_errors);

}  // namespace errc

}  // namespace v0
}  // namespace llmmem
