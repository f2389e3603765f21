/// @file
/// Packets of 16 bytes in buffers of any alignment: the packets of the buffer that is written are aligned,
/// and those of another are made from the aligned packets that contain them.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/lane_packets.hpp>
#include <llmmem/kernels/packet.hpp>
#include <llmmem/result.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// How far an address is past one that packets of 16 may have.
[[nodiscard]] LLMMEM_HD inline std::uint32_t skew_of(const std::byte* at) noexcept {
  return static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(at) % 16);
}

/// Reads the bytes from `first` to `end` of the 16 from `at` on, one at a time; the others are zero. Not for
/// inner loops. @param at  relative to `from`; before it where `first` is past it
[[nodiscard]] LLMMEM_HD inline packet<16> read_part(const std::byte* from, std::int64_t at,
                                                    std::uint32_t first, std::uint32_t end) noexcept {
  packet<16> out{};
  // The bytes move down while the next one comes: a word by a number that varies would be in memory.
  LLMMEM_ROLLED
  for (std::uint32_t i = 0; i < 16; ++i) {
    LLMMEM_UNROLL
    for (unsigned w = 0; w < 3; ++w)
      out.words[w] = out.words[w] >> 8U | out.words[w + 1] << 24U;
    out.words[3] >>= 8U;
    if (i >= first && i < end)
      out.words[3] |= static_cast<std::uint32_t>(load_packet<1>(from + (at + i)).words[0]) << 24U;
  }
  return out;
}

/// Writes the bytes from `first` to `end` of a packet. @param at  as `read_part`
LLMMEM_HD inline void write_part(std::byte* to, std::int64_t at, packet<16> in, std::uint32_t first,
                                 std::uint32_t end) noexcept {
  LLMMEM_ROLLED
  for (std::uint32_t i = 0; i < 16; ++i) {
    if (i >= first && i < end)
      store_packet<1>(to + (at + i), {{static_cast<std::uint8_t>(in.words[0] & 0xFFU)}});
    LLMMEM_UNROLL
    for (unsigned w = 0; w < 3; ++w)
      in.words[w] = in.words[w] >> 8U | in.words[w + 1] << 24U;
    in.words[3] >>= 8U;
  }
}

/// Reads the 16 bytes at `from + at`. With N = 16 they are aligned; with N = 1 their address is any, and they
/// come from the two aligned packets that contain them, or one at a time where such a packet has bytes
/// outside the buffer. Neighbouring lanes share these packets, so that all bytes of the sectors are used.
/// @param bytes  those of the buffer `from`. @pre at + 16 <= bytes
template <unsigned N, cache_hint How>
[[nodiscard]] LLMMEM_HD inline packet<16> read_across(const std::byte* from, std::uint64_t at,
                                                      std::uint64_t bytes) noexcept {
  static_assert(N == 16 || N == 1);
  if constexpr (N == 16) {
    return load_packet<16, How>(from + at);
  } else {
    const std::byte* const here = from + at;
    const std::uint32_t skew = skew_of(here);
    if (skew == 0) return load_packet<16, How>(here);
    if (at < skew || bytes - at < 32 - skew) return read_part(here, 0, 0, 16);
    const std::byte* const first = here - skew;
    return between_packets<16>(load_packet<16, How>(first), load_packet<16, How>(first + 16), skew);
  }
}

/// A buffer in packets of 16 that are aligned at the buffer that a kernel writes. With N = 1 it may begin
/// within the first one.
template <unsigned N>
class packet_frame {
 public:
  /// @param aligned_as  the buffer whose packets are aligned.
  packet_frame(const std::byte* aligned_as, std::uint64_t bytes) noexcept
      : bytes_(bytes), skew_(skew_of(aligned_as)) {}
  /// Packets from the buffer's first byte on, aligned or not.
  explicit packet_frame(std::uint64_t bytes) noexcept : bytes_(bytes), skew_(0) {}

  /// Returns the bytes of the first packet that come before the buffer.
  [[nodiscard]] LLMMEM_HD std::uint32_t skew() const noexcept {
    if constexpr (N == 16) {
      return 0;
    } else {
      return skew_;
    }
  }
  /// Returns the bytes of the buffer, and of the frame: from the first packet's beginning on.
  [[nodiscard]] LLMMEM_HD std::uint64_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] LLMMEM_HD std::uint64_t extent() const noexcept { return bytes_ + skew(); }
  /// Whether so many bytes of the frame from `place` on are all in the buffer.
  [[nodiscard]] LLMMEM_HD bool holds(std::uint64_t place, std::uint32_t count) const noexcept {
    return extent() - place >= count && place >= skew();
  }

  /// The bytes of a packet that are in the buffer.
  struct piece {
    std::int64_t at;  ///< of the packet, in the buffer
    std::uint32_t first;
    std::uint32_t end;

    [[nodiscard]] LLMMEM_HD bool is_empty() const noexcept { return first >= end; }
    [[nodiscard]] LLMMEM_HD bool is_whole() const noexcept { return first == 0 && end == 16; }
  };
  /// Returns the packet at a place of the frame.
  [[nodiscard]] LLMMEM_HD piece at(std::uint64_t place) const noexcept {
    piece out{};
    out.at = static_cast<std::int64_t>(place) - static_cast<std::int64_t>(skew());
    out.first = place < skew() ? skew() : 0;
    out.end = place >= extent()       ? 0U
              : extent() - place < 16 ? static_cast<std::uint32_t>(extent() - place)
                                      : 16U;
    return out;
  }

 private:
  std::uint64_t bytes_;
  std::uint32_t skew_;
};

/// Reads a packet that may be partial, and writes one.
template <unsigned N, cache_hint How, class Piece>
[[nodiscard]] LLMMEM_HD inline packet<16> read_piece(const std::byte* from, const Piece& of,
                                                     std::uint64_t bytes) noexcept {
  return of.is_whole() ? read_across<N, How>(from, static_cast<std::uint64_t>(of.at), bytes)
                       : read_part(from, of.at, of.first, of.end);
}
template <cache_hint How, class Piece>
LLMMEM_HD inline void write_piece(std::byte* to, const packet<16>& in, const Piece& of) noexcept {
  if (of.is_whole()) {
    store_packet<16, How>(to + of.at, in);
  } else {
    write_part(to, of.at, in, of.first, of.end);
  }
}

/// Calls `start` with a constant: 16 if addresses of this alignment allow accesses of 16 bytes, else 1.
template <class Start>
[[nodiscard]] result<void> at_width(std::uint32_t aligned, const Start& start) {
  if (aligned >= 16) return start(std::integral_constant<unsigned, 16>{});
  return start(std::integral_constant<unsigned, 1>{});
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
