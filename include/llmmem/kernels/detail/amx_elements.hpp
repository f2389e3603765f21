/// @file
/// Elements of caches as bf16, in the order that unpacking leaves, for tiles of AMX.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/integer_lanes.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/model/fp8.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Whether attention by AMX reads elements of the type: bf16 holds their numbers exactly.
template <dtype Element>
inline constexpr bool is_amx_element = Element == dtype::bf16 || Element == dtype::fp8_e4m3;

/// Elements in 64 bytes of a cache, and vectors of 32 bf16 that they become.
template <dtype Element>
inline constexpr std::size_t amx_group = Element == dtype::bf16 ? 32 : 64;
template <dtype Element>
inline constexpr std::size_t amx_vectors = amx_group<Element> / 32;

/// Returns where an element comes to in its vector of bf16: the bytes of a code meet within 16 bytes.
template <dtype Element>
[[nodiscard]] constexpr std::size_t amx_place(std::size_t element) noexcept {
  if constexpr (Element == dtype::bf16) {
    return element;
  } else {
    const std::size_t in_group = element % 64;
    return element - in_group + in_group % 16 / 8 * 32 + in_group / 16 * 8 + in_group % 8;
  }
}
/// Returns where an element of a row comes to in the sums, where the elements of two rows alternate.
[[nodiscard]] constexpr std::size_t amx_pair_place(std::size_t at) noexcept {
  const std::size_t in_group = at % 32;
  return at - in_group + in_group % 8 / 4 * 16 + in_group / 8 * 4 + in_group % 4;
}

/// The bytes of the bf16 of all codes of e4m3 without their sign.
struct amx_e4m3_bytes {
  alignas(64) std::uint8_t lower[128]{};
  alignas(64) std::uint8_t upper[128]{};
  constexpr amx_e4m3_bytes() noexcept {
    for (std::uint32_t code = 0; code < 128; ++code) {
      const std::uint32_t bits = f32_from_e4m3_bits(static_cast<std::uint8_t>(code));
      lower[code] = static_cast<std::uint8_t>(bits >> 16);
      upper[code] = static_cast<std::uint8_t>(bits >> 24);
    }
  }
};
inline constexpr amx_e4m3_bytes amx_e4m3{};

#if defined(__x86_64__)

/// The target of all functions that are inlined into attention by products of bf16: clang++ wants an
/// instruction's target in each of them.
#define LLMMEM_AMX_FLOATS \
  [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,amx-tile,amx-bf16")]]

/// Looks up the lower seven bits of each byte.
LLMMEM_AMX_FLOATS LLMMEM_ALWAYS_INLINE void look_up_bytes(const std::uint8_t (&table)[128],
                                                          const byte_lanes<16>& at,
                                                          byte_lanes<16>& to) noexcept {
  byte_lanes<16> first;
  byte_lanes<16> second;
  std::memcpy(&first, table, sizeof(first));
  std::memcpy(&second, table + 64, sizeof(second));
  byte_lanes<16> found = at;
  // NOLINTNEXTLINE(hicpp-no-assembler): a built-in function needs its target in each caller
  asm("vpermi2b %2, %1, %0" : "+v"(found) : "v"(first), "v"(second));
  to = found;
}

/// Converts 64 bytes of a cache, in the order of `amx_place`.
template <dtype Element>
LLMMEM_AMX_FLOATS LLMMEM_ALWAYS_INLINE void load_bf16(const std::byte* from,
                                                      byte_lanes<16> (&to)[amx_vectors<Element>]) noexcept {
  byte_lanes<16> raw;
  std::memcpy(&raw, from, sizeof(raw));
  if constexpr (Element == dtype::bf16) {
    to[0] = raw;
  } else {
    byte_lanes<16> lower;
    byte_lanes<16> upper;
    look_up_bytes(amx_e4m3.lower, raw, lower);
    look_up_bytes(amx_e4m3.upper, raw, upper);
    upper = upper | (raw & 0x80);
    constexpr auto all = std::make_integer_sequence<int, 64>();
    alternate_bytes<16, 1, false>(lower, upper, to[0], all);
    alternate_bytes<16, 1, true>(lower, upper, to[1], all);
  }
}
/// Converts group `i` of a vector of so many elements. Nothing is read behind the last one.
template <dtype Element>
LLMMEM_AMX_FLOATS LLMMEM_ALWAYS_INLINE void load_bf16(const std::byte* from, std::size_t i,
                                                      std::size_t elements,
                                                      byte_lanes<16> (&to)[amx_vectors<Element>]) noexcept {
  constexpr std::size_t group = amx_group<Element>;
  if ((i + 1) * group <= elements) return load_bf16<Element>(from + i * 64, to);
  std::byte rest[64]{};
  std::memcpy(rest, from + i * 64, (elements - i * group) * 64 / group);
  load_bf16<Element>(rest, to);
}

#endif

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
