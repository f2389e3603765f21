/// @file
/// The errors of memory, ranges and files: their codes, the meaning of their three numbers, and their texts.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/failure.hpp>

#include <array>
#include <string>
#include <string_view>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// The system may or may not report the reason.
[[nodiscard]] LLMMEM_COLD constexpr const char* system_refused_sentence(const failure& why) noexcept {
  return why.index == 0
             ? "the underlying memory refused {wanted} bytes, although the budget has {found} left; "
               "free memory elsewhere, or lower the budget"
             : "the underlying memory refused {wanted} bytes (error {index}), although the budget "
               "has {found} left; free memory elsewhere, or lower the budget";
}

/// Returns the text for a name in braces, in addition to the three numbers.
[[nodiscard]] LLMMEM_COLD inline std::string file_term(const failure& why, std::string_view name) {
  return name == "place" ? place_text(why) : failed_because(why.index);
}

inline constexpr std::array space_errors{
    error_info{.number = 28,
               .name = "zero_bytes",
               .raises = error_kind::length,
               .sentence = "an allocation of 0 bytes; request at least 1"},
    error_info{.number = 30,
               .name = "system_refused",
               .raises = error_kind::out_of_memory,
               .index = "the system's error number, 0 if unknown",
               .wanted = "bytes requested of the underlying memory",
               .found = "bytes left in the budget",
               .sentence_for = system_refused_sentence},
    error_info{.number = 31,
               .name = "dead_range",
               .raises = error_kind::handle,
               .wanted = "bytes of the range",
               .sentence = "the range of {wanted} bytes is not inside a live one; it was already "
                           "deallocated, or belongs to another "
                           "space"},
    error_info{.number = 35,
               .name = "already_mapped",
               .wanted = "offset in the range",
               .found = "offset of the existing mapping",
               .sentence = "offset {wanted} of the range overlaps the mapping at offset {found}; unmap that "
                           "first"},
    error_info{.number = 36,
               .name = "not_mapped",
               .wanted = "offset in the range",
               .sentence =
                   "no mapping begins or ends at offset {wanted} of the range; unmap whole mappings that are "
                   "there"},
    error_info{.number = 37,
               .name = "still_mapped",
               .found = "mappings that still exist",
               .sentence = "{found} mappings prevent its release; unmap them first"},
    error_info{
        .number = 38,
        .name = "reserve_refused",
        .raises = error_kind::out_of_memory,
        .index = "the system's error number",
        .wanted = "bytes of address space",
        .sentence =
            "the system refused {wanted} bytes of address space (error {index}); reserve less, or raise "
            "the limit (ulimit -v)"},
    error_info{.number = 39,
               .name = "map_refused",
               .raises = error_kind::out_of_memory,
               .index = "the system's error number",
               .wanted = "bytes",
               .found = "mappings held",
               .sentence =
                   "the system refused to change the mapping of {wanted} bytes (error {index}) with {found} "
                   "mappings held; hold fewer, map larger pieces, or raise vm.max_map_count"},
    error_info{.number = 49,
               .name = "read_failed",
               .raises = error_kind::io,
               .index = "the system's error number",
               .wanted = "bytes",
               .found = "offset",
               .sentence = "read of {place}{cause}",
               .term = file_term},
    error_info{.number = 50,
               .name = "write_failed",
               .raises = error_kind::io,
               .index = "the system's error number",
               .wanted = "bytes",
               .found = "offset",
               .sentence = "write of {place}{cause}",
               .term = file_term},
    error_info{.number = 51,
               .name = "sync_failed",
               .raises = error_kind::io,
               .index = "the system's error number",
               .wanted = "bytes",
               .found = "offset",
               .sentence = "sync{cause}; earlier writes may be lost: write them again to another file",
               .term = file_term},
    error_info{.number = 52,
               .name = "grow_failed",
               .raises = error_kind::io,
               .index = "the system's error number",
               .wanted = "bytes",
               .found = "offset",
               .sentence = "allocation of {place}{cause}",
               .term = file_term},
    error_info{
        .number = 53,
        .name = "file_ends",
        .raises = error_kind::io,
        .wanted = "end of the bytes requested",
        .found = "the end of the file",
        .sentence =
            "bytes up to {wanted} requested, but the file ends at {found}; it was truncated, or has not been "
            "written so far"},
    error_info{.number = 54,
               .name = "file_locked",
               .raises = error_kind::io,
               .index = "the system's error number",
               .sentence = "another process, or another object in this one, holds the file; end that, or use "
                           "another path: each rank and each tier needs its own"},
    error_info{.number = 55,
               .name = "not_opened",
               .wanted = "bytes",
               .sentence =
                   "it was opened only for reading; open it with open_mode::update or open_mode::create (a "
                   "model_file_space is never written: adopt its contents, and keep changes in "
                   "another buffer)"},
    error_info{.number = 100,
               .name = "lease_lost",
               .raises = error_kind::io,
               .sentence =
                   "the lease of the file ran out while this process was stopped, or is its parent's, and "
                   "another process may have the file now; open it again, with a longer lease_ns"},
};

}  // namespace detail

namespace errc {

/// An allocation of 0 bytes.
inline constexpr error_code zero_bytes = detail::code_of<28>(detail::space_errors);
/// The underlying memory of a space refused: index = the system's error number, 0 if unknown, wanted = bytes
/// requested of the underlying memory, found = bytes left in the budget.
inline constexpr error_code system_refused = detail::code_of<30>(detail::space_errors);
/// A range that is not inside a live one: wanted = bytes of the range.
inline constexpr error_code dead_range = detail::code_of<31>(detail::space_errors);
/// Another mapping exists there: wanted = offset in the range, found = offset of the existing mapping.
inline constexpr error_code already_mapped = detail::code_of<35>(detail::space_errors);
/// No mapping begins there, or one continues: wanted = offset in the range.
inline constexpr error_code not_mapped = detail::code_of<36>(detail::space_errors);
/// Mappings prevent the release of a range: found = mappings that still exist.
inline constexpr error_code still_mapped = detail::code_of<37>(detail::space_errors);
/// The system refused address space: index = the system's error number, wanted = bytes of address space.
inline constexpr error_code reserve_refused = detail::code_of<38>(detail::space_errors);
/// The system refused to change a mapping: index = the system's error number, wanted = bytes, found =
/// mappings held.
inline constexpr error_code map_refused = detail::code_of<39>(detail::space_errors);
/// A read of the file `where` failed: index = the system's error number, wanted = bytes, found = offset.
inline constexpr error_code read_failed = detail::code_of<49>(detail::space_errors);
/// A write of the file `where` failed: index = the system's error number, wanted = bytes, found = offset.
inline constexpr error_code write_failed = detail::code_of<50>(detail::space_errors);
/// Bytes written to the file `where` may not have reached the device: index = the system's error number,
/// wanted = bytes, found = offset.
inline constexpr error_code sync_failed = detail::code_of<51>(detail::space_errors);
/// The file `where` could not be enlarged: index = the system's error number, wanted = bytes, found = offset.
inline constexpr error_code grow_failed = detail::code_of<52>(detail::space_errors);
/// The file `where` ends earlier: wanted = end of the bytes requested, found = the end of the file.
inline constexpr error_code file_ends = detail::code_of<53>(detail::space_errors);
/// Another process holds the file `where`: index = the system's error number.
inline constexpr error_code file_locked = detail::code_of<54>(detail::space_errors);
/// The lease of the file `where` was not renewed in time.
inline constexpr error_code lease_lost = detail::code_of<100>(detail::space_errors);
/// The file was opened only for reading: wanted = bytes.
inline constexpr error_code not_opened = detail::code_of<55>(detail::space_errors);

}  // namespace errc

}  // namespace v0
}  // namespace llmmem
