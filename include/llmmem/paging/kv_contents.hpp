/// @file
/// Compares the contents of two layouts, and names the field that differs.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/errors.hpp>
#include <llmmem/paging/kv_layout.hpp>
#include <llmmem/result.hpp>

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// Refuses contents whose records differ in the field at `at`.
[[nodiscard]] LLMMEM_COLD inline failure field_differs(std::size_t at, const kv_layout_record& theirs,
                                                       const kv_layout_record& ours,
                                                       std::string_view who) noexcept {
  // A failure keeps the beginning and the end of a name that is too long: the field name survives.
  constexpr std::string_view colon = ": ";
  char text[3 * failure_name::max_size];
  std::size_t length = who.substr(0, failure_name::max_size).copy(text, failure_name::max_size);
  const auto append = [&](std::string_view part) { length += part.copy(text + length, part.size()); };
  if (length != 0) append(colon);
  append(kv_layout_fields[at]);
  return failure{errc::layout_mismatch, 1, theirs[at], ours[at], std::string_view(text, length)};
}

}  // namespace detail

/// Checks whether blocks may be copied from one layout to the other. An engine calls it before it connects
/// caches, pools or ranks whose layouts it knows. Equal contents have equal `content_fingerprint`s.
///
///     check_contents(peer.layout, own.layout, "decode").value();
///     // throws "decode: the layouts' part.cp_interleave: 1536 there, 1 here; ..."
///
/// @return `errc::layout_mismatch` with the first field that differs, starting with the parts of ranks: index
///   = 1, wanted = its number there, found = its number here; `part.tp_size` and `part.tp_rank` count ranks
///   that hold the same heads as one.
/// @par Complexity   O(1); never allocates.
[[nodiscard]] inline result<void> check_contents(const kv_layout& theirs, const kv_layout& ours,
                                                 std::string_view who) noexcept {
  const detail::kv_layout_record there = theirs.packed().record();
  const detail::kv_layout_record here = ours.packed().record();
  const std::size_t at = detail::first_difference(there, here);
  if (at == detail::kv_layout_words) return {};
  return detail::field_differs(at, there, here, who);
}

}  // namespace v0
}  // namespace llmmem
