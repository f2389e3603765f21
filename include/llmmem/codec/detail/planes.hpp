/// @file
/// Splits elements into planes of their bytes, and joins them again.
#pragma once

#include <llmmem/config.hpp>

#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <tuple>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The places of the planes of elements of `Bytes` bytes, with the exponents' plane last.
template <std::size_t Bytes>
using plane_pointers = std::array<std::byte*, Bytes>;
template <std::size_t Bytes>
using const_plane_pointers = std::array<const std::byte*, Bytes>;

template <std::unsigned_integral Element>
[[nodiscard]] inline Element rotated_element(const std::byte* in, std::size_t i) noexcept {
  Element element;
  std::memcpy(&element, in + i * sizeof(element), sizeof(element));
  return std::rotl(element, 1);
}

template <std::unsigned_integral Element>
inline void put_rotated_back(std::byte* out, std::size_t i, std::uint32_t rotated) noexcept {
  const Element element = std::rotr(static_cast<Element>(rotated), 1);
  std::memcpy(out + i * sizeof(element), &element, sizeof(element));
}

// Loops over elements have two parts: tiles of a fixed length over pointers marked `__restrict`, which
// compilers vectorise even if they must not make code longer (g++ -O2), and the rest.
inline constexpr std::size_t plane_tile = 32;

inline void split_rotated(const std::byte* __restrict in, std::size_t count, std::byte* __restrict low,
                          std::byte* __restrict high) noexcept {
  const auto one = [](const std::byte* from, std::size_t i, std::byte* first, std::byte* second) {
    const auto element = rotated_element<std::uint16_t>(from, i);
    first[i] = static_cast<std::byte>(element);
    second[i] = static_cast<std::byte>(element >> 8);
  };
  for (std::size_t tiles = count / plane_tile; tiles != 0; --tiles) {
    for (std::size_t i = 0; i < plane_tile; ++i)
      one(in, i, low, high);
    in += plane_tile * 2;
    low += plane_tile;
    high += plane_tile;
  }
  for (std::size_t i = 0; i < count % plane_tile; ++i)
    one(in, i, low, high);
}

inline void split_rotated(const std::byte* __restrict in, std::size_t count, std::byte* __restrict lowest,
                          std::byte* __restrict low, std::byte* __restrict high,
                          std::byte* __restrict highest) noexcept {
  const auto one = [](const std::byte* from, std::size_t i, std::byte* first, std::byte* second,
                      std::byte* third, std::byte* fourth) {
    const auto element = rotated_element<std::uint32_t>(from, i);
    first[i] = static_cast<std::byte>(element);
    second[i] = static_cast<std::byte>(element >> 8);
    third[i] = static_cast<std::byte>(element >> 16);
    fourth[i] = static_cast<std::byte>(element >> 24);
  };
  for (std::size_t tiles = count / plane_tile; tiles != 0; --tiles) {
    for (std::size_t i = 0; i < plane_tile; ++i)
      one(in, i, lowest, low, high, highest);
    in += plane_tile * 4;
    lowest += plane_tile;
    low += plane_tile;
    high += plane_tile;
    highest += plane_tile;
  }
  for (std::size_t i = 0; i < count % plane_tile; ++i)
    one(in, i, lowest, low, high, highest);
}

inline void merge_rotated(std::byte* __restrict out, std::size_t count, const std::byte* __restrict low,
                          const std::byte* __restrict high) noexcept {
  const auto one = [](std::byte* to, std::size_t i, const std::byte* first, const std::byte* second) {
    put_rotated_back<std::uint16_t>(
        to, i, static_cast<std::uint32_t>(second[i]) << 8 | static_cast<std::uint32_t>(first[i]));
  };
  for (std::size_t tiles = count / plane_tile; tiles != 0; --tiles) {
    for (std::size_t i = 0; i < plane_tile; ++i)
      one(out, i, low, high);
    out += plane_tile * 2;
    low += plane_tile;
    high += plane_tile;
  }
  for (std::size_t i = 0; i < count % plane_tile; ++i)
    one(out, i, low, high);
}

inline void merge_rotated(std::byte* __restrict out, std::size_t count, const std::byte* __restrict lowest,
                          const std::byte* __restrict low, const std::byte* __restrict high,
                          const std::byte* __restrict highest) noexcept {
  const auto one = [](std::byte* to, std::size_t i, const std::byte* first, const std::byte* second,
                      const std::byte* third, const std::byte* fourth) {
    put_rotated_back<std::uint32_t>(
        to, i,
        static_cast<std::uint32_t>(fourth[i]) << 24 | static_cast<std::uint32_t>(third[i]) << 16 |
            static_cast<std::uint32_t>(second[i]) << 8 | static_cast<std::uint32_t>(first[i]));
  };
  for (std::size_t tiles = count / plane_tile; tiles != 0; --tiles) {
    for (std::size_t i = 0; i < plane_tile; ++i)
      one(out, i, lowest, low, high, highest);
    out += plane_tile * 4;
    lowest += plane_tile;
    low += plane_tile;
    high += plane_tile;
    highest += plane_tile;
  }
  for (std::size_t i = 0; i < count % plane_tile; ++i)
    one(out, i, lowest, low, high, highest);
}

/// Moves byte k of every element, rotated left by one bit, into plane k: the sign leaves the exponent's byte
/// and becomes the lowest bit of the element.
template <std::size_t Bytes>
void split_planes(const std::byte* in, std::size_t count, const plane_pointers<Bytes>& planes) noexcept {
  std::apply([&](auto*... plane) { split_rotated(in, count, plane...); }, planes);
}

/// Restores the input of `split_planes`.
template <std::size_t Bytes>
void merge_planes(const const_plane_pointers<Bytes>& planes, std::size_t count, std::byte* out) noexcept {
  std::apply([&](auto*... plane) { merge_rotated(out, count, plane...); }, planes);
}

/// Whether a coder of single bytes could shrink `plane` by about a sixth. Judges by how often two bytes of a
/// sample are equal, which is 1 in 256 if all values are equally likely.
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
  // The limit is 2.5 in 256, because codes of nearly eight bits take more time to decode than their bytes
  // save. A constant sign, for example of an optimizer's variance, gives 2 in 256.
  return equal_pairs * 512 > pairs * 5;
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
