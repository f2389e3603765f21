/// @file
/// The encoded form of an exclusive or in which few units are not 0: gaps, and the units between them.
#pragma once

#include <llmmem/config.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Units are of two bytes, the size of a bf16 or f16 weight and half of a float, or of one byte if the number
/// of bytes is odd. The form: unchanged units, changed units, both as a number in 7 bits a byte, then the
/// changed units, exclusive or with their old value; again to the last changed one. It is short where bf16
/// hides most of a small step: a published step of an 8 B model changes 0.9% of the bytes (verl's
/// delta_sharded).
[[nodiscard]] constexpr std::size_t changed_unit_bytes(std::size_t bytes) noexcept {
  return bytes % 2 == 0 ? 2 : 1;
}

/// Writes the form of `changes` to `out`.
/// @return its bytes; nothing if they are more than `out` has.
[[nodiscard]] inline std::optional<std::size_t> encode_changes(std::span<const std::byte> changes,
                                                               std::span<std::byte> out) noexcept {
  const std::size_t width = changed_unit_bytes(changes.size());
  const std::size_t units = changes.size() / width;
  const auto is_zero = [&](std::size_t unit) {
    const std::byte* const at = changes.data() + unit * width;
    return at[0] == std::byte{} && (width == 1 || at[1] == std::byte{});
  };
  std::size_t used = 0;
  const auto number = [&](std::size_t value) {
    do {
      if (used == out.size()) return false;
      const auto low = static_cast<std::byte>(value & 0x7FU);
      value >>= 7;
      out[used++] = value == 0 ? low : low | std::byte{0x80};
    } while (value != 0);
    return true;
  };
  for (std::size_t at = 0;;) {
    std::size_t first = at;
    while (first < units && is_zero(first))
      ++first;
    if (first == units) return used;
    std::size_t end = first + 1;
    while (end < units && !is_zero(end))
      ++end;
    if (!number(first - at) || !number(end - first)) return {};
    const std::size_t bytes = (end - first) * width;
    if (bytes > out.size() - used) return {};
    for (std::size_t i = 0; i < bytes; ++i)
      out[used + i] = changes[first * width + i];
    used += bytes;
    at = end;
  }
}

/// Applies an encoded form, which is untrusted, to the old bytes.
/// @return whether it was the form of changes of as many bytes; otherwise some may have been changed.
[[nodiscard]] inline bool apply_changes(std::span<const std::byte> in, std::span<std::byte> bytes) noexcept {
  const std::size_t width = changed_unit_bytes(bytes.size());
  const std::size_t units = bytes.size() / width;
  const auto number = [&](std::size_t& value) {
    value = 0;
    for (std::size_t shift = 0; shift < 63; shift += 7) {
      if (in.empty()) return false;
      const std::byte next = in.front();
      in = in.subspan(1);
      value |= std::size_t(next & std::byte{0x7F}) << shift;
      if ((next & std::byte{0x80}) == std::byte{}) return true;
    }
    return false;
  };
  std::size_t at = 0;
  while (!in.empty()) {
    std::size_t gap = 0;
    std::size_t count = 0;
    if (!number(gap) || !number(count)) return false;
    if (gap > units - at || count > units - at - gap || count == 0) return false;
    at += gap;
    if (count * width > in.size()) return false;
    for (std::size_t i = 0; i < count * width; ++i)
      bytes[at * width + i] ^= in[i];
    in = in.subspan(count * width);
    at += count;
  }
  return true;
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
