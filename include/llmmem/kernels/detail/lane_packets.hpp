/// @file
/// Packets at any address for the lanes of a warp: neighbouring lanes read, and write, neighbouring packets
/// that are aligned, and make from two of them the bytes between.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/lanes.hpp>
#include <llmmem/kernels/packet.hpp>

#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Returns the bytes that begin `by` bytes into two packets. @pre by <= Bytes
template <unsigned Bytes>
[[nodiscard]] LLMMEM_HD inline packet<Bytes> between_packets(const packet<Bytes>& first,
                                                             const packet<Bytes>& second,
                                                             std::uint32_t by) noexcept {
  if (by == Bytes) return second;
  packet<Bytes> out{};
  if constexpr (Bytes <= 4) {
    const std::uint64_t both = std::uint64_t{second.words[0]} << (8 * Bytes) | first.words[0];
    out.words[0] = static_cast<typename packet<Bytes>::word>(both >> (8 * by));
  } else {
    constexpr unsigned words = Bytes / 4;
    std::uint32_t word[2 * words];
    LLMMEM_UNROLL
    for (unsigned i = 0; i < words; ++i) {
      word[i] = first.words[i];
      word[i + words] = second.words[i];
    }
    // As many words as `by` has, a bit of it at a time.
    LLMMEM_UNROLL
    for (unsigned step = words / 2; step != 0; step /= 2) {
      LLMMEM_UNROLL
      for (unsigned i = 0; i < words + step; ++i)
        word[i] = (by / 4 & step) != 0 ? word[i + step] : word[i];
    }
    LLMMEM_UNROLL
    for (unsigned i = 0; i < words; ++i) {
#if defined(__CUDA_ARCH__)
      out.words[i] = __funnelshift_r(word[i], word[i + 1], by % 4 * 8);
#else
      const std::uint64_t both = std::uint64_t{word[i + 1]} << 32 | word[i];
      out.words[i] = static_cast<std::uint32_t>(both >> (by % 4 * 8));
#endif
    }
  }
  return out;
}

/// Bytes around a place, of which those from `before` ahead of it to `behind` it may be accessed.
struct packet_limits {
  std::int32_t before = 0;
  std::int32_t behind = 0;

  [[nodiscard]] LLMMEM_HD bool holds(std::int32_t offset, std::int32_t bytes) const noexcept {
    return offset >= -before && offset + bytes <= behind;
  }
  /// Reads a packet; bytes beyond the limits are zeros. @pre `from + offset` is aligned to it
  template <unsigned Bytes>
  [[nodiscard]] LLMMEM_HD packet<Bytes> read(const std::byte* from, std::int32_t offset) const noexcept {
    if (holds(offset, Bytes)) return load_packet<Bytes, cache_hint::streaming>(from + offset);
    packet<Bytes> out{};
    constexpr unsigned unit = Bytes < 4 ? Bytes : 4;
    // The words move down while the next one comes: a word by a number that varies would be in memory.
    LLMMEM_ROLLED
    for (unsigned i = 0; i < Bytes / unit; ++i) {
      LLMMEM_UNROLL
      for (unsigned k = 0; k + 1 < Bytes / unit; ++k)
        out.words[k] = out.words[k + 1];
      out.words[Bytes / unit - 1] = static_cast<typename packet<Bytes>::word>(
          read_word<unit>(from, offset + static_cast<int>(i * unit)));
    }
    return out;
  }
  /// Writes those bytes of a packet that are within the limits. @pre `to + offset` is aligned to it
  template <unsigned Bytes>
  LLMMEM_HD void write(std::byte* to, std::int32_t offset, packet<Bytes> in) const noexcept {
    if (holds(offset, Bytes)) {
      store_packet<Bytes, cache_hint::streaming>(to + offset, in);
      return;
    }
    constexpr unsigned unit = Bytes < 4 ? Bytes : 4;
    LLMMEM_ROLLED
    for (unsigned i = 0; i < Bytes / unit; ++i) {
      write_word<unit>(to, offset + static_cast<int>(i * unit), in.words[0]);
      LLMMEM_UNROLL
      for (unsigned k = 0; k + 1 < Bytes / unit; ++k)
        in.words[k] = in.words[k + 1];
    }
  }

 private:
  template <unsigned Bytes>
  [[nodiscard]] LLMMEM_HD std::uint32_t read_word(const std::byte* from, std::int32_t at) const noexcept {
    if (holds(at, Bytes)) return load_packet<Bytes>(from + at).words[0];
    if constexpr (Bytes == 1) {
      return 0;
    } else {
      constexpr unsigned half = Bytes / 2;
      return read_word<half>(from, at) | read_word<half>(from, at + static_cast<int>(half)) << (8 * half);
    }
  }
  template <unsigned Bytes>
  LLMMEM_HD void write_word(std::byte* to, std::int32_t at, std::uint32_t word) const noexcept {
    if (holds(at, Bytes)) {
      store_packet<Bytes>(to + at, {{static_cast<typename packet<Bytes>::word>(word)}});
    } else if constexpr (Bytes > 1) {
      constexpr unsigned half = Bytes / 2;
      write_word<half>(to, at, word);
      write_word<half>(to, at + static_cast<int>(half), word >> (8 * half));
    }
  }
};

/// Whose packet a lane gets.
enum class lane_neighbour : std::uint8_t { next, previous };

/// Each lane gets the packet of its neighbour, and the lane at the end that of `wrapped`.
template <lane_neighbour Which, unsigned Bytes, class Group>
[[nodiscard]] LLMMEM_HD inline typename Group::template held<packet<Bytes>> packets_of_neighbours(
    const typename Group::template held<packet<Bytes>>& own,
    const typename Group::template held<packet<Bytes>>& wrapped, const Group& group) noexcept {
  constexpr bool is_next = Which == lane_neighbour::next;
  typename Group::template held<packet<Bytes>> out{};
  LLMMEM_UNROLL
  for (unsigned w = 0; w < packet_words<Bytes>::count; ++w) {
    typename Group::template held<std::uint32_t> sent{};
    typename Group::template held<std::uint32_t> got{};
    group.each([&](std::uint32_t lane) {
      sent[lane] = lane == (is_next ? 0U : 31U) ? wrapped[lane].words[w] : own[lane].words[w];
    });
    group.take_from(got, sent, [&](std::uint32_t lane) { return (lane + (is_next ? 1U : 31U)) & 31U; });
    group.each([&](std::uint32_t lane) {
      out[lane].words[w] = static_cast<typename packet<Bytes>::word>(got[lane]);
    });
  }
  return out;
}

/// Consecutive packets, 32 a turn, from any address.
template <unsigned Bytes, class Group>
class packet_reader {
 public:
  using packets = typename Group::template held<packet<Bytes>>;

  /// @param before, behind  bytes around `from` that may be read
  LLMMEM_HD packet_reader(const std::byte* from, std::uint32_t count, std::int32_t before,
                          std::int32_t behind, const Group& group) noexcept
      : from_(from),
        skew_(static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(from) % Bytes)),
        words_(count + (skew_ != 0 ? 1U : 0U)),
        limits_{before, behind} {
    read(0, word_, group);
  }
  /// Returns the packets from `first` on. @pre the first ones, or those after the last call's
  [[nodiscard]] LLMMEM_HD packets take(std::uint32_t first, const Group& group) noexcept {
    packets next{};
    read(first + 32, next, group);
    packets own = word_;
    if (skew_ != 0) {
      const packets other = packets_of_neighbours<lane_neighbour::next, Bytes>(word_, next, group);
      group.each(
          [&](std::uint32_t lane) { own[lane] = between_packets<Bytes>(own[lane], other[lane], skew_); });
    }
    word_ = next;
    return own;
  }

 private:
  LLMMEM_HD void read(std::uint32_t first, packets& to, const Group& group) const noexcept {
    group.each([&](std::uint32_t lane) {
      const std::uint32_t k = first + lane;
      if (k < words_)
        to[lane] = limits_.template read<Bytes>(
            from_, static_cast<std::int32_t>(k * Bytes) - static_cast<std::int32_t>(skew_));
    });
  }

  const std::byte* from_;
  std::uint32_t skew_;
  std::uint32_t words_;
  packet_limits limits_;
  packets word_{};
};

/// Consecutive packets, 32 a turn, to any address.
template <unsigned Bytes, class Group>
class packet_writer {
 public:
  using packets = typename Group::template held<packet<Bytes>>;

  LLMMEM_HD packet_writer(std::byte* to, std::uint32_t count) noexcept
      : to_(to),
        skew_(static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(to) % Bytes)),
        count_(count),
        limits_{0, static_cast<std::int32_t>(count * Bytes)} {}

  /// Returns how many packets the caller gives: after the last one some of its bytes may be left.
  [[nodiscard]] LLMMEM_HD std::uint32_t turns() const noexcept { return count_ + (skew_ != 0 ? 1U : 0U); }
  /// Writes the packets from `first` on. @pre the first ones, or those after the last call's
  LLMMEM_HD void give(std::uint32_t first, const packets& own, const Group& group) noexcept {
    packets sent = own;
    if (skew_ != 0) {
      const packets other = packets_of_neighbours<lane_neighbour::previous, Bytes>(own, before_, group);
      group.each([&](std::uint32_t lane) {
        sent[lane] = between_packets<Bytes>(other[lane], own[lane], Bytes - skew_);
      });
      before_ = own;
    }
    group.each([&](std::uint32_t lane) {
      const std::uint32_t k = first + lane;
      if (k < turns())
        limits_.template write<Bytes>(
            to_, static_cast<std::int32_t>(k * Bytes) - static_cast<std::int32_t>(skew_), sent[lane]);
    });
  }

 private:
  std::byte* to_;
  std::uint32_t skew_;
  std::uint32_t count_;
  packet_limits limits_;
  packets before_{};
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
