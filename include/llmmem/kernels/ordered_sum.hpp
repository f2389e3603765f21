/// @file
/// `sum_in_order`: the sum of several ranks' parts, element by element, with the bits of the host's sum.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/ordered_sum_work.hpp>
#include <llmmem/kernels/detail/packet_frame.hpp>
#include <llmmem/kernels/detail/xor_blocks_body.hpp>
#include <llmmem/kernels/errors.hpp>
#include <llmmem/kernels/launch.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/result.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// Starts the sum of at most `most_summed_parts` parts.
template <dtype E, class Run>
[[nodiscard]] result<void> sum_some(const Run& run, std::span<const std::byte* const> parts, std::byte* into,
                                    std::uint64_t bytes) {
  std::uint32_t aligned = alignment_of(place_of(into));
  for (const std::byte* const each : parts)
    aligned = std::min(aligned, alignment_of(place_of(each)));
  return at_width(aligned, [&](auto width) {
    using work_type = ordered_sum_work<width(), E>;
    work_type work{.part = {},
                   .into = into,
                   .frame = work_type::frame_of(into, bytes),
                   .parts = static_cast<std::uint32_t>(parts.size())};
    std::copy(parts.begin(), parts.end(), work.part);
    return run.each(work);
  });
}

template <dtype E, class Run>
[[nodiscard]] result<void> sum_all(const Run& run, std::span<const std::byte* const> parts, std::byte* into,
                                   std::uint64_t bytes) {
  std::size_t done = std::min<std::size_t>(parts.size(), most_summed_parts);
  if (auto begun = sum_some<E>(run, parts.first(done), into, bytes); !begun) return begun;
  while (done < parts.size()) {
    const std::byte* more[most_summed_parts] = {into};
    const std::size_t count = std::min<std::size_t>(parts.size() - done, most_summed_parts - 1);
    std::copy_n(parts.data() + done, count, more + 1);
    if (auto begun = sum_some<E>(run, std::span(more, count + 1), into, bytes); !begun) return begun;
    done += count;
  }
  return {};
}

}  // namespace detail

/// Sets `into` to the sum of all parts, added in their order: ((part 0 + part 1) + part 2) and so on, each
/// sum rounded to the element's type, to nearest even. These are the bits of `sum_f32`, `sum_bf16` and
/// `sum_f16` (comm/reduce_op.hpp), applied part by part on a host; a sum that is a NaN has the bits that
/// devices produce, and a device whose code is compiled with `-use_fast_math` treats the least floats as
/// zeros.
///
/// Takes addresses of any alignment; an access is 16 bytes but at the ends, and where `into` is not aligned
/// to its elements. Nothing allocates or waits, and a graph may contain it. Any number may run at once, on
/// different bytes. `into` may be part 0; it must not overlap a part in any other way.
///
/// @param run    `host_executor` or `device_executor`; the pointers are of its memory.
/// @param parts  at least one, each of `bytes` bytes. The list itself is read before this returns.
/// @return `errc::no_conversion` for another element type than f32, bf16 and f16: wanted = f32, found = the
///         type; `errc::size_mismatch` for bytes that are not whole elements; `errc::too_short` without
///         parts; `errc::null_handle` for a null pointer to bytes, index = the part, or the number of parts
///         for `into`; `errc::overlapping_ranges`, index = the part. Then nothing has begun. Otherwise the
///         result of `run`.
/// @par Complexity   each part read once, the sum written once. 16 parts a launch; each further launch takes
///      15 and reads the sum again.
template <class Run>
result<void> sum_in_order(const Run& run, dtype elements, std::span<const std::byte* const> parts,
                          std::byte* into, std::uint64_t bytes) {
  const bool is_float = elements == dtype::f32 || elements == dtype::bf16 || elements == dtype::f16;
  if (!is_float)
    return failure{errc::no_conversion, 0, static_cast<std::uint64_t>(dtype::f32),
                   static_cast<std::uint64_t>(elements), "sum_in_order: elements"};
  const std::uint64_t width = bits_of(elements) / 8;
  if (bytes % width != 0) return failure{errc::size_mismatch, 0, width, bytes, "sum_in_order: bytes"};
  if (parts.empty()) return failure{errc::too_short, 0, 1, 0, "sum_in_order: parts"};
  if (bytes == 0) return {};
  const auto count = static_cast<std::uint32_t>(parts.size());
  if (into == nullptr) return failure{errc::null_handle, count, 0, 0, "sum_in_order: into"};
  for (std::uint32_t i = 0; i < count; ++i) {
    if (parts[i] == nullptr) return failure{errc::null_handle, i, 0, 0, "sum_in_order: parts"};
    const std::uint64_t both = parts[i] == into ? bytes : detail::shared_bytes(parts[i], bytes, into, bytes);
    if (both != 0 && (i != 0 || parts[i] != into))
      return failure{errc::overlapping_ranges, i, bytes, both, "sum_in_order"};
  }
  if (elements == dtype::f32) return detail::sum_all<dtype::f32>(run, parts, into, bytes);
  if (elements == dtype::bf16) return detail::sum_all<dtype::bf16>(run, parts, into, bytes);
  return detail::sum_all<dtype::f16>(run, parts, into, bytes);
}

}  // namespace v0
}  // namespace llmmem
