/// @file
/// The bytes of `block_int` on hosts and devices: floats as integers of few bits in groups with a scale,
/// rounded without bias by a counter.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/result.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

/// The parameters of `block_int<bits, group, scale>`.
struct int_group_form {
  std::uint32_t bits = 8;     ///< 8, 4 or 2
  std::uint32_t group = 256;  ///< elements that share a scale: a multiple of 8, at most 65536
  dtype scale = dtype::f32;   ///< or `dtype::bf16`

  /// Bytes of a group of so many elements: its scale, then its codes.
  [[nodiscard]] LLMMEM_HD constexpr std::uint64_t group_bytes(std::uint64_t elements) const noexcept {
    return (scale == dtype::f32 ? 4U : 2U) + (elements * bits + 7) / 8;
  }
  /// Bytes of so many elements.
  [[nodiscard]] constexpr std::uint64_t bytes(std::uint64_t elements) const noexcept {
    return elements / group * group_bytes(group) +
           (elements % group != 0 ? group_bytes(elements % group) : 0);
  }
};

/// What is encoded: equal positions get equal random bits, as those of `block_int`'s `encode_position`.
struct int_group_position {
  std::uint64_t chunk = 0;
  std::uint64_t version = 0;
  std::uint64_t group = 0;  ///< of the chunk, with which the elements begin
};

/// Encodes floats as `block_int<bits, group, scale>::encode` does, byte by byte, on any executor: a device
/// makes the form of activations or gradients before they cross a link, and a host reads it, or the reverse.
///
/// @param run     `host_executor` or `device_executor`; all pointers are of its memory.
/// @param values  [elements] of f32, at any address.
/// @param out     `form.bytes(elements)` bytes.
/// @return `errc::bad_granularity` for a group that is not a multiple of 8 elements, and for bytes that are
///      not a whole number of floats; `errc::out_of_range` for other numbers of bits (index 0), groups of 0
///      or of more than 65536 (1) and other scales (2); `errc::too_short` for a shorter `out`. Then nothing
///      has begun. Otherwise the result of `run`.
/// @par Complexity   each value is read once, in groups of up to 256 elements, else twice; codes and scales
///                   are written once. Neighbouring lanes access neighbouring packets. A product and a
///                   conversion of doubles for each value, a quotient for each group.
/// @par Thread safety   any number at once, on different bytes.
template <class Run>
result<void> encode_int_groups(const Run& run, const int_group_form& form, std::span<const std::byte> values,
                               std::span<std::byte> out, const int_group_position& at = {});

/// Decodes them, as `block_int::decode`. Where that refuses a group, because no encoder writes it, this one
/// lowers `*damaged` to the group's number, if it is lower, and restores NaNs for four elements or more of
/// it.
///
/// @param damaged  in the executor's memory, of the caller's largest number before; may be null.
/// @return as `encode_int_groups`, with `errc::too_short` where `in` has another length than the elements
/// need.
template <class Run>
result<void> decode_int_groups(const Run& run, const int_group_form& form, std::span<const std::byte> in,
                               std::span<std::byte> values, std::uint64_t* damaged = nullptr);

}  // namespace v0
}  // namespace llmmem

#include <llmmem/kernels/detail/int_groups_body.hpp>
