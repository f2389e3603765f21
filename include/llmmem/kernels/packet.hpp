/// @file
/// Packets: the bytes that one access to memory moves. The same on host and device.
#pragma once

#include <llmmem/config.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#include <llmmem/kernels/detail/cached_access.hpp>
#endif

namespace llmmem {
inline namespace v0 {

namespace detail {

/// The type of a packet's words, and their number.
template <unsigned Bytes>
struct packet_words {
  using word = std::uint32_t;
  static constexpr unsigned count = Bytes / 4;
};
template <>
struct packet_words<2> {
  using word = std::uint16_t;
  static constexpr unsigned count = 1;
};
template <>
struct packet_words<1> {
  using word = std::uint8_t;
  static constexpr unsigned count = 1;
};

}  // namespace detail

/// Bytes that are read or written at once, aligned to their number: one instruction of a device's thread
/// moves at most 16, and full bandwidth requires that many.
template <unsigned Bytes>
  requires(Bytes == 16 || Bytes == 8 || Bytes == 4 || Bytes == 2 || Bytes == 1)
struct alignas(Bytes) packet {
  using word = typename detail::packet_words<Bytes>::word;
  word words[detail::packet_words<Bytes>::count];
};

/// What happens to the lines that an access leaves in the caches. Either way it accesses device memory, or
/// host memory that the device sees: the device need not check whether an address is shared or local.
enum class cache_hint : std::uint8_t {
  kept,       ///< they are read soon: tokens that attention is about to read
  streaming,  ///< they are not read soon: `ld.cs`, `st.cs` on a device, so that they leave first
  passing [[deprecated("its name is streaming")]] = streaming
};

/// Reads a packet. @pre `from` is aligned to it
template <unsigned Bytes, cache_hint How = cache_hint::kept>
[[nodiscard]] LLMMEM_HD inline packet<Bytes> load_packet(const std::byte* from) noexcept {
#if defined(__CUDA_ARCH__)
  using word = typename packet<Bytes>::word;
  packet<Bytes> out;
  if constexpr (Bytes == 16) {
    const auto* const at = reinterpret_cast<const uint4*>(from);
    const uint4 in = detail::cached_read < How == cache_hint::streaming > (at);
    out.words[0] = in.x;
    out.words[1] = in.y;
    out.words[2] = in.z;
    out.words[3] = in.w;
  } else if constexpr (Bytes == 8) {
    const auto* const at = reinterpret_cast<const uint2*>(from);
    const uint2 in = detail::cached_read < How == cache_hint::streaming > (at);
    out.words[0] = in.x;
    out.words[1] = in.y;
  } else {
    const auto* const at = reinterpret_cast<const word*>(from);
    out.words[0] = detail::cached_read < How == cache_hint::streaming > (at);
  }
  return out;
#else
  packet<Bytes> out{};
  std::memcpy(&out, from, Bytes);
  return out;
#endif
}

/// Writes a packet. @pre `to` is aligned to it
template <unsigned Bytes, cache_hint How = cache_hint::kept>
LLMMEM_HD inline void store_packet(std::byte* to, const packet<Bytes>& in) noexcept {
#if defined(__CUDA_ARCH__)
  using word = typename packet<Bytes>::word;
  if constexpr (Bytes == 16) {
    const uint4 all = make_uint4(in.words[0], in.words[1], in.words[2], in.words[3]);
    auto* const at = reinterpret_cast<uint4*>(to);
    detail::cached_write<How == cache_hint::streaming>(at, all);
  } else if constexpr (Bytes == 8) {
    const uint2 all = make_uint2(in.words[0], in.words[1]);
    auto* const at = reinterpret_cast<uint2*>(to);
    detail::cached_write<How == cache_hint::streaming>(at, all);
  } else {
    auto* const at = reinterpret_cast<word*>(to);
    detail::cached_write<How == cache_hint::streaming>(at, in.words[0]);
  }
#else
  std::memcpy(to, &in, Bytes);
#endif
}

/// Returns how many `Element`s a word of a packet holds.
template <std::unsigned_integral Element, unsigned Bytes>
  requires(sizeof(Element) <= Bytes / detail::packet_words<Bytes>::count)
inline constexpr unsigned elements_a_word = Bytes / detail::packet_words<Bytes>::count / sizeof(Element);

/// Returns the value of element `i` of a packet of `Element`s.
template <std::unsigned_integral Element, unsigned Bytes>
[[nodiscard]] LLMMEM_HD constexpr Element element_of(const packet<Bytes>& in, unsigned i) noexcept {
  constexpr unsigned per_word = elements_a_word<Element, Bytes>;
  return static_cast<Element>(in.words[i / per_word] >> (i % per_word * std::size_t{8} * sizeof(Element)));
}

/// Sets element `i` of a packet whose bits there are still zero.
template <std::unsigned_integral Element, unsigned Bytes>
LLMMEM_HD constexpr void set_element(packet<Bytes>& out, unsigned i, Element value) noexcept {
  using word = typename packet<Bytes>::word;
  constexpr unsigned per_word = elements_a_word<Element, Bytes>;
  out.words[i / per_word] =
      static_cast<word>(out.words[i / per_word] |
                        static_cast<word>(word{value} << (i % per_word * std::size_t{8} * sizeof(Element))));
}

}  // namespace v0
}  // namespace llmmem
