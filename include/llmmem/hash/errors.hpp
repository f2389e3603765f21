/// @file
/// Errors of checksums: the codes, the meaning of their three numbers, and their texts.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/failure.hpp>

#include <array>

namespace llmmem {
inline namespace v0 {

namespace detail {

inline constexpr std::array hash_errors{
    error_info{.number = 62,
               .name = "checksum_differs",
               .raises = error_kind::io,
               .index = "the chunk's slot, or the part",
               .wanted = "the checksum when it was written",
               .found = "the checksum of the restored bytes",
               .sentence = "chunk {index} was read with checksum {found}, but was written with {wanted}; its "
                           "bytes are damaged and not returned: restore them from another copy"},
};

}  // namespace detail

namespace errc {

/// Restored bytes are damaged: index = the chunk's slot, or the part, wanted = the checksum when it was
/// written, found = the checksum of the restored bytes.
inline constexpr error_code checksum_differs = detail::code_of<62>(detail::hash_errors);

}  // namespace errc

}  // namespace v0
}  // namespace llmmem
