/// @file
/// Elements split into planes of their bytes, and put together again.
#pragma once

#include <llmmem/config.hpp>

#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace llmmem::inline v0::detail {

/// Where the planes of `Bytes` bytes an element lie, the one of the exponents last.
template <std::size_t Bytes>
using plane_pointers = std::array<std::byte*, Bytes>;
template <std::size_t Bytes>
using const_plane_pointers = std::array<const std::byte*, Bytes>;

// Both go through small arrays of their own, which compilers vectorise without asking what overlaps.
inline constexpr std::size_t plane_tile = 64;

/// Byte k of every element, rotated left by one bit, into plane k: the sign leaves the exponent's byte and
/// becomes the lowest bit of all.
template <std::unsigned_integral Element>
void split_planes(const std::byte* in, std::size_t count,
                  const plane_pointers<sizeof(Element)>& planes) noexcept {
  const auto some = [&]<std::size_t Count>(std::size_t at) {
    std::array<Element, Count> elements;
    std::memcpy(elements.data(), in + at * sizeof(Element), sizeof(elements));
    for (Element& each : elements)
      each = std::rotl(each, 1);
    for (std::size_t plane = 0; plane < sizeof(Element); ++plane) {
      std::array<std::uint8_t, Count> bytes;
      for (std::size_t k = 0; k < Count; ++k)
        bytes[k] = static_cast<std::uint8_t>(elements[k] >> (8 * plane));
      std::memcpy(planes[plane] + at, bytes.data(), Count);
    }
  };
  std::size_t i = 0;
  for (; count - i >= plane_tile; i += plane_tile)
    some.template operator()<plane_tile>(i);
  for (; i < count; ++i)
    some.template operator()<1>(i);
}

/// What `split_planes` was given.
template <std::unsigned_integral Element>
void merge_planes(const const_plane_pointers<sizeof(Element)>& planes, std::size_t count,
                  std::byte* out) noexcept {
  const auto some = [&]<std::size_t Count>(std::size_t at) {
    std::array<Element, Count> elements{};
    for (std::size_t plane = 0; plane < sizeof(Element); ++plane) {
      std::array<std::uint8_t, Count> bytes;
      std::memcpy(bytes.data(), planes[plane] + at, Count);
      for (std::size_t k = 0; k < Count; ++k)
        elements[k] =
            static_cast<Element>(elements[k] | static_cast<Element>(Element{bytes[k]} << (8 * plane)));
    }
    for (Element& each : elements)
      each = std::rotr(each, 1);
    std::memcpy(out + at * sizeof(Element), elements.data(), sizeof(elements));
  };
  std::size_t i = 0;
  for (; count - i >= plane_tile; i += plane_tile)
    some.template operator()<plane_tile>(i);
  for (; i < count; ++i)
    some.template operator()<1>(i);
}

/// Whether a coder of single bytes could make `plane` smaller by a hundredth or more, by a sample of it: how
/// often two bytes of the sample are equal, against 1 in 256 where all values are equally likely.
[[nodiscard]] inline bool has_uneven_bytes(std::span<const std::byte> plane) noexcept {
  constexpr std::size_t pieces = 16;
  constexpr std::size_t piece = 256;
  std::array<std::uint32_t, 256> counts{};
  std::uint64_t sampled = 0;
  const auto count = [&](std::span<const std::byte> bytes) {
    for (const std::byte byte : bytes)
      ++counts[static_cast<std::size_t>(byte)];
    sampled += bytes.size();
  };
  if (plane.size() <= pieces * piece) {
    count(plane);
  } else {
    for (std::size_t i = 0; i < pieces; ++i)
      count(plane.subspan((plane.size() - piece) / (pieces - 1) * i, piece));
  }
  std::uint64_t equal_pairs = 0;
  for (const std::uint64_t n : counts)
    equal_pairs += n * (n - 1) / 2;
  const std::uint64_t pairs = sampled * (sampled - 1) / 2;
  // 1.1 / 256: of a sample of 4096 even bytes eighteen standard deviations above.
  return equal_pairs * 2560 > pairs * 11;
}

}  // namespace llmmem::inline v0::detail
