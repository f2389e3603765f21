/// @file
/// Parity, deltas and dirty bits as items and groups of lanes.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/packet_frame.hpp>
#include <llmmem/kernels/detail/wide_access.hpp>
#include <llmmem/kernels/items.hpp>
#include <llmmem/kernels/packet.hpp>

#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// The most shards of one `xor_parity`: the launch carries their addresses.
inline constexpr std::uint32_t most_parity_shards = 16;

namespace detail {

/// A unit is the bytes that 32 threads take at once, four packets each: four consecutive stretches of 32
/// packets, so that neighbouring threads read neighbouring bytes.
struct xor_unit {
  static constexpr std::uint32_t threads = 32;
  static constexpr std::uint32_t packets = 4;
  static constexpr std::uint32_t stretch_bytes = threads * 16;
  static constexpr std::uint32_t bytes = packets * stretch_bytes;
  static constexpr std::uint32_t stretch_bits = 9;  ///< 2^9 bytes are a stretch

  /// Returns the bytes from a packet to the packet at the same place i stretches later.
  [[nodiscard]] static LLMMEM_HD constexpr std::uint64_t stretch(std::uint32_t i) noexcept {
    return std::uint64_t{i} * stretch_bytes;
  }

  [[nodiscard]] static LLMMEM_HD constexpr std::uint64_t count(std::uint64_t all) noexcept {
    return all / bytes + (all % bytes == 0 ? 0 : 1);
  }
};
static_assert(1U << xor_unit::stretch_bits == xor_unit::stretch_bytes);

/// Parity: an item is a thread's four packets of a unit.
template <unsigned N>
struct xor_parity_work {
  const std::byte* shard[most_parity_shards];
  std::byte* parity;
  packet_frame<N> frame;
  std::uint32_t shards;

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept {
    return xor_unit::count(frame.extent()) * xor_unit::threads;
  }
  LLMMEM_HD void run(std::uint64_t item) const noexcept {
    const std::uint64_t unit = item / xor_unit::threads * xor_unit::bytes;
    const std::uint64_t thread = item % xor_unit::threads;
    if (frame.holds(unit, xor_unit::bytes)) {
      whole(unit - frame.skew() + thread * 16);
    } else {
      for (std::uint32_t i = 0; i < xor_unit::packets; ++i)
        part(unit + thread * 16 + xor_unit::stretch(i));
    }
  }

 private:
  LLMMEM_HD void whole(std::uint64_t at) const noexcept {
    packet<16> sum[xor_unit::packets]{};
    // More than two shards at once cost registers, and therefore threads.
#if defined(__CUDA_ARCH__)
#pragma unroll 2
#endif
    for (std::uint32_t s = 0; s < shards; ++s) {
      packet<16> in[xor_unit::packets];
      LLMMEM_UNROLL
      for (std::uint32_t i = 0; i < xor_unit::packets; ++i)
        in[i] = read_across<N, cache_hint::streaming>(shard[s], at + xor_unit::stretch(i), frame.bytes());
      LLMMEM_UNROLL
      for (std::uint32_t i = 0; i < xor_unit::packets; ++i)
        add_packet(sum[i], in[i]);
    }
    LLMMEM_UNROLL
    for (std::uint32_t i = 0; i < xor_unit::packets; ++i)
      store_packet<16, cache_hint::streaming>(parity + at + xor_unit::stretch(i), sum[i]);
  }
  LLMMEM_HD void part(std::uint64_t place) const noexcept {
    const auto here = frame.at(place);
    if (here.is_empty()) return;
    packet<16> sum{};
    for (std::uint32_t s = 0; s < shards; ++s)
      add_packet(sum, read_piece<N, cache_hint::streaming>(shard[s], here, frame.bytes()));
    write_piece<cache_hint::streaming>(parity, sum, here);
  }
};
static_assert(item_work<xor_parity_work<16>>);

/// Whether the delta is written, or only compared.
enum class delta_use : std::uint8_t { written, looked_at };

/// Delta and dirty bits: an item is a unit. Each lane writes its packets of the delta, and together they
/// determine in which stretches any bit differs: a page is one or several, and a unit's pages are in one
/// word.
///
/// With N = 1 the first packet of a stretch of the frame has bytes of the stretch before.
template <unsigned N, delta_use Use>
struct xor_delta_work {
  const std::byte* old_bytes;
  const std::byte* new_bytes;
  std::byte* delta;
  std::uint32_t* dirty;
  packet_frame<N> frame;
  std::uint32_t stretch_shift;  ///< 2^stretch_shift stretches are a page

  struct held {
    std::uint32_t stretches = 0;  ///< bit 0: the stretch before the unit differs; bit i + 1: stretch i
  };
  using partial = std::uint32_t;

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return xor_unit::count(frame.extent()); }
  [[nodiscard]] LLMMEM_HD std::uint32_t lanes() const noexcept { return xor_unit::threads; }
  [[nodiscard]] LLMMEM_HD held take(std::uint64_t item, group_lane lane) const noexcept {
    held mine;
    const std::uint64_t unit = item * xor_unit::bytes;
    for (std::uint32_t i = lane.lane; i < xor_unit::threads; i += lane.lanes) {
      if (frame.holds(unit, xor_unit::bytes)) {
        mine.stretches |= whole(unit - frame.skew() + i * std::uint64_t{16}, i);
      } else {
        for (std::uint32_t k = 0; k < xor_unit::packets; ++k)
          mine.stretches |= part(unit + i * std::uint64_t{16} + xor_unit::stretch(k), i) << k;
      }
    }
    return mine;
  }
  [[nodiscard]] LLMMEM_HD static partial measure(const held& mine) noexcept { return mine.stretches; }
  [[nodiscard]] LLMMEM_HD static partial combine(partial a, partial b) noexcept { return a | b; }
  LLMMEM_HD void give(std::uint64_t item, group_lane lane, const held& /*mine*/,
                      partial stretches) const noexcept {
    if (lane.lane != 0 || stretches == 0) return;
    const std::uint64_t first = item * xor_unit::packets;
    if (N != 16 && (stretches & 1U) != 0) {
      const std::uint64_t page = (first - 1) >> stretch_shift;
      join_bits(dirty[page >> 5], 1U << (page & 31U));
    }
    std::uint32_t bits = 0;
    for (std::uint32_t k = 0; k < xor_unit::packets; ++k)
      bits |= (stretches >> (k + 1) & 1U) << ((first + k) >> stretch_shift & 31U);
    if (N == 16 || bits != 0) join_bits(dirty[first >> stretch_shift >> 5], bits);
  }

 private:
  /// Returns bit 0 if the first packet of a stretch differs in bytes of the stretch before, bit 1 if any
  /// packet differs in its own.
  [[nodiscard]] LLMMEM_HD std::uint32_t stretches_of(const packet<16>& differ,
                                                     std::uint32_t thread) const noexcept {
    if constexpr (N != 16) {
      if (thread == 0 && frame.skew() != 0) {
        std::uint32_t before = 0;
        std::uint32_t own = 0;
        LLMMEM_UNROLL
        for (std::uint32_t i = 0; i < 4; ++i) {
          const std::uint32_t bytes_before = frame.skew() > 4 * i ? frame.skew() - 4 * i : 0;
          const std::uint32_t mask = bytes_before >= 4 ? ~0U : (1U << 8 * bytes_before) - 1U;
          before |= differ.words[i] & mask;
          own |= differ.words[i] & ~mask;
        }
        return (before != 0 ? 1U : 0U) | (own != 0 ? 2U : 0U);
      }
    }
    return is_zero(differ) ? 0U : 2U;
  }
  [[nodiscard]] LLMMEM_HD std::uint32_t whole(std::uint64_t at, std::uint32_t thread) const noexcept {
    packet<16> before[xor_unit::packets];
    packet<16> after[xor_unit::packets];
    LLMMEM_UNROLL
    for (std::uint32_t k = 0; k < xor_unit::packets; ++k) {
      before[k] = read_across<N, cache_hint::streaming>(old_bytes, at + xor_unit::stretch(k), frame.bytes());
      after[k] = read_across<N, cache_hint::streaming>(new_bytes, at + xor_unit::stretch(k), frame.bytes());
    }
    std::uint32_t differ = 0;
    LLMMEM_UNROLL
    for (std::uint32_t k = 0; k < xor_unit::packets; ++k) {
      add_packet(after[k], before[k]);
      if constexpr (Use == delta_use::written)
        store_packet<16, cache_hint::streaming>(delta + at + xor_unit::stretch(k), after[k]);
      differ |= stretches_of(after[k], thread) << k;
    }
    return differ;
  }
  [[nodiscard]] LLMMEM_HD std::uint32_t part(std::uint64_t place, std::uint32_t thread) const noexcept {
    const auto here = frame.at(place);
    if (here.is_empty()) return 0;
    packet<16> differ = read_piece<N, cache_hint::streaming>(new_bytes, here, frame.bytes());
    add_packet(differ, read_piece<N, cache_hint::streaming>(old_bytes, here, frame.bytes()));
    if constexpr (Use == delta_use::written) write_piece<cache_hint::streaming>(delta, differ, here);
    return stretches_of(differ, thread);
  }
};
static_assert(group_work<xor_delta_work<16, delta_use::written>>);

/// Applies a delta: an item is a thread's four packets of a unit, of which only dirty bytes move.
template <unsigned N>
struct apply_delta_work {
  std::byte* target;
  const std::byte* delta;
  const std::uint32_t* dirty;
  packet_frame<N> frame;
  std::uint32_t stretch_shift;  ///< 2^stretch_shift stretches are a page

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept {
    return xor_unit::count(frame.extent()) * xor_unit::threads;
  }
  LLMMEM_HD void run(std::uint64_t item) const noexcept {
    const std::uint64_t unit = item / xor_unit::threads;
    const std::uint64_t thread = item % xor_unit::threads;
    const std::uint64_t first = unit * xor_unit::packets;
    const bool has_before = N != 16 && thread == 0 && frame.skew() != 0;  // bytes of the stretch before
    // A word has the bits of a unit, but what ends in the unit's last stretch may have none.
    const std::uint32_t bits = first * xor_unit::stretch_bytes < frame.bytes() ? word_of(first) : 0;
    bool is_before_dirty = has_before && unit != 0 && is_dirty(word_of(first - 1), first - 1);
    if (bits == 0 && !is_before_dirty) return;
    piece here[xor_unit::packets];
    packet<16> sum[xor_unit::packets];
    LLMMEM_UNROLL
    for (std::uint32_t k = 0; k < xor_unit::packets; ++k) {
      here[k] = frame.at(unit * xor_unit::bytes + thread * 16 + xor_unit::stretch(k));
      const bool is_own_dirty = is_dirty(bits, first + k);
      if (!is_own_dirty)
        here[k].end = has_before && here[k].end > frame.skew() ? frame.skew() : has_before ? here[k].end : 0;
      if (has_before && !is_before_dirty) here[k].first = frame.skew();
      is_before_dirty = is_own_dirty;
      if (here[k].is_whole()) sum[k] = changed(static_cast<std::uint64_t>(here[k].at));
    }
    LLMMEM_UNROLL
    for (std::uint32_t k = 0; k < xor_unit::packets; ++k) {
      if (here[k].is_whole()) {
        store_packet<16, cache_hint::streaming>(target + here[k].at, sum[k]);
      } else if (!here[k].is_empty()) {
        part(here[k]);
      }
    }
  }

 private:
  using piece = typename packet_frame<N>::piece;

  [[nodiscard]] LLMMEM_HD std::uint32_t word_of(std::uint64_t stretch) const noexcept {
    return load_packet<4>(reinterpret_cast<const std::byte*>(dirty + (stretch >> stretch_shift >> 5)))
        .words[0];
  }
  [[nodiscard]] LLMMEM_HD bool is_dirty(std::uint32_t word, std::uint64_t stretch) const noexcept {
    return (word >> (stretch >> stretch_shift & 31U) & 1U) != 0;
  }
  /// Returns 16 bytes of the target as they become. Of the delta it reads bytes of dirty pages alone.
  [[nodiscard]] LLMMEM_HD packet<16> changed(std::uint64_t at) const noexcept {
    packet<16> sum = load_packet<16, cache_hint::streaming>(target + at);
    if constexpr (N == 16) {
      add_packet(sum, load_packet<16, cache_hint::streaming>(delta + at));
    } else {
      const std::uint32_t shift = stretch_shift + xor_unit::stretch_bits;
      const std::uint64_t begin = at >> shift << shift;
      const std::uint64_t end = (((at + 15) >> shift) + 1U) << shift;
      const std::uint64_t readable = (end < frame.bytes() ? end : frame.bytes()) - begin;
      add_packet(sum, read_across<N, cache_hint::streaming>(delta + begin, at - begin, readable));
    }
    return sum;
  }
  LLMMEM_HD void part(const piece& here) const noexcept {
    packet<16> sum = read_part(target, here.at, here.first, here.end);
    add_packet(sum, read_part(delta, here.at, here.first, here.end));
    write_part(target, here.at, sum, here.first, here.end);
  }
};
static_assert(item_work<apply_delta_work<16>>);

/// Clears words.
struct clear_words_work {
  std::uint32_t* word;
  std::uint64_t words;

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return words; }
  LLMMEM_HD void run(std::uint64_t item) const noexcept {
    store_packet<4>(reinterpret_cast<std::byte*>(word + item), {{0}});
  }
};
static_assert(item_work<clear_words_work>);

}  // namespace detail

}  // namespace v0
}  // namespace llmmem
