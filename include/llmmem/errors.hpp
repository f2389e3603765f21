/// @file
/// The errors that any room may return: their codes, the meaning of their three numbers, and their texts.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/failure.hpp>

#include <array>
#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// The table that is full, which determines the option that enlarges it: the index of `errc::table_full`.
enum class full_table : std::uint32_t {
  only_table,    ///< the only table of the object that the text names
  chunks,        ///< of a tiered buffer, including clones: `tiered_options::max_chunks`
  pieces,        ///< of a tier, including its gaps: `tier_place::max_pieces`
  keyed_chunks,  ///< of a persistent tier: `persistent_file_options::max_chunks`
  some [[deprecated("its name is only_table")]] = only_table
};

namespace detail {

/// The bytes may be lacking for now, or permanently.
[[nodiscard]] LLMMEM_COLD constexpr const char* out_of_bytes_sentence(const failure& why) noexcept {
  return why.index == 1
             ? "{wanted} bytes needed in one piece, but it never has more than {found}; raise its "
               "budget, or request smaller pieces"
             : "{wanted} bytes needed, but {found} left in its budget; release ranges, or raise the budget";
}

/// Says what differs: possibly only the fingerprints are known.
[[nodiscard]] LLMMEM_COLD constexpr const char* layout_mismatch_sentence(const failure& why) noexcept {
  return why.index == 1
             ? "{wanted} there, {found} here; both sides must hold the same values; nothing was copied"
             : "the contents' fingerprints differ, {wanted} there, {found} here: different shape, element "
               "type, "
               "block size or model; nothing was copied";
}

/// Names the full table and the option that enlarges it.
[[nodiscard]] LLMMEM_COLD constexpr const char* table_sentence(full_table which) noexcept {
  switch (which) {
    case full_table::only_table:
      break;
    case full_table::chunks:
      return "the table of chunks is full: {wanted} entries needed, {found} free; raise "
             "tiered_options::max_chunks";
    case full_table::pieces:
      return "the table of pieces is full: {wanted} entries needed, {found} free; raise "
             "tier_place::max_pieces";
    case full_table::keyed_chunks:
      return "the index of chunks with keys is full: {wanted} entries needed, {found} free; raise "
             "persistent_file_options::max_chunks";
  }
  return "a table of fixed size is full: {wanted} entries needed, {found} free; raise its max_ option";
}

[[nodiscard]] LLMMEM_COLD constexpr const char* full_table_sentence(const failure& why) noexcept {
  return table_sentence(static_cast<full_table>(why.index));
}

inline constexpr std::array ground_errors{
    error_info{.number = 5,
               .name = "out_of_bytes",
               .raises = error_kind::out_of_memory,
               .index = "1 if they can never be available, else 0",
               .wanted = "bytes needed",
               .found = "bytes left; for index 1 the most it can have",
               .sentence_for = out_of_bytes_sentence},
    error_info{.number = 8,
               .name = "null_handle",
               .raises = error_kind::handle,
               .sentence = "null handle; it was never assigned, or was moved from"},
    error_info{
        .number = 9,
        .name = "foreign_handle",
        .raises = error_kind::handle,
        .index = "slot",
        .sentence =
            "the handle (slot {index}) belongs to another object; use it with the object that made it"},
    error_info{
        .number = 10,
        .name = "stale_handle",
        .raises = error_kind::handle,
        .index = "slot",
        .wanted = "the handle's generation",
        .found = "the slot's generation now",
        .sentence =
            "stale handle to slot {index} (generation {wanted}, now {found}): it was already released; "
            "keep one owner for each handle"},
    error_info{.number = 14,
               .name = "size_mismatch",
               .wanted = "one length",
               .found = "the other length",
               .sentence = "two lengths must be equal, but are {wanted} and {found}"},
    error_info{.number = 15,
               .name = "out_of_range",
               .wanted = "number requested",
               .found = "the highest allowed",
               .sentence = "{wanted} requested, but the highest allowed is {found}"},
    error_info{.number = 21,
               .name = "layout_mismatch",
               .index = "0: fingerprints, 1: a field of the layouts, which `where` names",
               .wanted = "their fingerprint or field",
               .found = "our fingerprint or field",
               .sentence_for = layout_mismatch_sentence},
    error_info{.number = 25,
               .name = "stopped",
               .sentence = "the other side of the stream stopped; start the transfer again"},
    error_info{.number = 29,
               .name = "bad_alignment",
               .wanted = "the alignment",
               .sentence = "alignment {wanted} is not a power of two"},
    error_info{.number = 32,
               .name = "overlapping_ranges",
               .wanted = "bytes to copy",
               .found = "bytes that source and destination share",
               .sentence = "source and destination of {wanted} bytes share {found}; copy in parts"},
    error_info{.number = 33,
               .name = "bad_granularity",
               .raises = error_kind::length,
               .wanted = "the size or offset",
               .found = "what it must be a multiple of",
               .sentence = "{wanted} bytes is not a multiple of the granularity, {found} bytes"},
    error_info{.number = 34,
               .name = "table_full",
               .raises = error_kind::out_of_memory,
               .index = "which table (`full_table`)",
               .wanted = "entries needed",
               .found = "entries free",
               .sentence_for = full_table_sentence},
    error_info{.number = 42,
               .name = "reentered",
               .sentence = "called from within one of its own calls; defer the work until that call returns"},
    error_info{.number = 46,
               .name = "too_short",
               .wanted = "entries needed",
               .found = "entries given",
               .sentence = "{wanted} entries needed, but {found} given; make it longer"},
    error_info{
        .number = 48,
        .name = "past_the_bytes",
        .wanted = "end of the bytes requested",
        .found = "bytes available",
        .sentence = "bytes up to {wanted} requested, but it has {found}; request fewer, or make it larger"},
};

}  // namespace detail

namespace errc {

/// A budget has too few bytes left: index = 1 if they can never be available, else 0, wanted = bytes needed,
/// found = bytes left; for index 1 the most it can have.
inline constexpr error_code out_of_bytes = detail::code_of<5>(detail::ground_errors);
/// A default-constructed handle.
inline constexpr error_code null_handle = detail::code_of<8>(detail::ground_errors);
/// A handle that belongs to another object: index = slot.
inline constexpr error_code foreign_handle = detail::code_of<9>(detail::ground_errors);
/// A handle whose object was already released: index = slot, wanted = the handle's generation, found = the
/// slot's generation now.
inline constexpr error_code stale_handle = detail::code_of<10>(detail::ground_errors);
/// Two lengths must be equal but differ: wanted = one length, found = the other length.
inline constexpr error_code size_mismatch = detail::code_of<14>(detail::ground_errors);
/// A number is too high: wanted = number requested, found = the highest allowed.
inline constexpr error_code out_of_range = detail::code_of<15>(detail::ground_errors);
/// The fingerprints of contents differ: wanted = their fingerprint, found = our fingerprint.
inline constexpr error_code layout_mismatch = detail::code_of<21>(detail::ground_errors);
/// The caller's function that supplies or consumes bytes stopped.
inline constexpr error_code stopped = detail::code_of<25>(detail::ground_errors);
/// An alignment that is not a power of two: wanted = the alignment.
inline constexpr error_code bad_alignment = detail::code_of<29>(detail::ground_errors);
/// Source and destination overlap: wanted = bytes to copy, found = bytes that source and destination share.
inline constexpr error_code overlapping_ranges = detail::code_of<32>(detail::ground_errors);
/// A size or offset that is not a multiple: wanted = the size or offset, found = what it must be a multiple
/// of.
inline constexpr error_code bad_granularity = detail::code_of<33>(detail::ground_errors);
/// A table of fixed size is full: index = which table (`full_table`), wanted = entries needed, found =
/// entries free.
inline constexpr error_code table_full = detail::code_of<34>(detail::ground_errors);
/// Called by a callback of the call in progress.
inline constexpr error_code reentered = detail::code_of<42>(detail::ground_errors);
/// A buffer, named in `where`, is too short: wanted = entries needed, found = entries given.
inline constexpr error_code too_short = detail::code_of<46>(detail::ground_errors);
/// Bytes after the end were requested: wanted = end of the bytes requested, found = bytes available.
inline constexpr error_code past_the_bytes = detail::code_of<48>(detail::ground_errors);

}  // namespace errc

}  // namespace v0
}  // namespace llmmem
