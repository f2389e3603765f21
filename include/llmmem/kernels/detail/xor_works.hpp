/// @file
/// Parity, deltas and dirty bits as items and groups of lanes.
#pragma once

#include <llmmem/config.hpp>
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

  /// @name The 16 bytes of a thread in a whole stretch
  /// By accesses of N: on a device the first accesses of all threads are neighbours, then their second ones,
  /// so that a warp's access asks for whole sectors. Any bytes may be summed together, as long as all ends
  /// take the same ones. A host takes its 16 bytes in one piece.
  /// @{
  template <unsigned N>
  [[nodiscard]] static LLMMEM_HD constexpr std::uint64_t place(std::uint64_t thread) noexcept {
#if defined(__CUDA_ARCH__)
    return thread * N;
#else
    return thread * 16;
#endif
  }
  template <unsigned N>
  [[nodiscard]] static LLMMEM_HD constexpr std::uint32_t apart() noexcept {
#if defined(__CUDA_ARCH__)
    return threads * N;
#else
    return N;
#endif
  }
  /// @}

  [[nodiscard]] static LLMMEM_HD constexpr std::uint64_t count(std::uint64_t all) noexcept {
    return all / bytes + (all % bytes == 0 ? 0 : 1);
  }
};
static_assert(1U << xor_unit::stretch_bits == xor_unit::stretch_bytes);

/// Returns the bytes left at a packet that may be absent, or partial: 0 to 16.
[[nodiscard]] LLMMEM_HD inline std::uint32_t bytes_at(std::uint64_t at, std::uint64_t bytes) noexcept {
  if (at >= bytes) return 0;
  return bytes - at < 16 ? static_cast<std::uint32_t>(bytes - at) : 16U;
}

template <unsigned N>
[[nodiscard]] LLMMEM_HD inline packet<16> read_up_to(const std::byte* from, std::uint32_t bytes) noexcept {
  return bytes == 16 ? read_wide<N, cache_hint::streaming>(from) : read_start(from, bytes);
}
template <unsigned N>
LLMMEM_HD inline void write_up_to(std::byte* to, const packet<16>& in, std::uint32_t bytes) noexcept {
  if (bytes == 16) {
    write_wide<N, cache_hint::streaming>(to, in);
  } else {
    write_start(to, in, bytes);
  }
}

/// Parity: an item is a thread's four packets of a unit.
template <unsigned N>
struct xor_parity_work {
  const std::byte* shard[most_parity_shards];
  std::byte* parity;
  std::uint64_t bytes;
  std::uint32_t shards;

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept {
    return xor_unit::count(bytes) * xor_unit::threads;
  }
  LLMMEM_HD void run(std::uint64_t item) const noexcept {
    const std::uint64_t unit = item / xor_unit::threads * xor_unit::bytes;
    const std::uint64_t thread = item % xor_unit::threads;
    if (bytes - unit >= xor_unit::bytes) {
      whole(unit + xor_unit::place<N>(thread));
    } else {
      for (std::uint32_t i = 0; i < xor_unit::packets; ++i)
        part(unit + thread * 16 + xor_unit::stretch(i));
    }
  }

 private:
  LLMMEM_HD void whole(std::uint64_t at) const noexcept {
    constexpr std::uint32_t apart = xor_unit::apart<N>();
    packet<16> sum[xor_unit::packets]{};
    // More than two shards at once cost registers, and therefore threads.
#if defined(__CUDA_ARCH__)
#pragma unroll 2
#endif
    for (std::uint32_t s = 0; s < shards; ++s) {
      packet<16> in[xor_unit::packets];
      LLMMEM_UNROLL
      for (std::uint32_t i = 0; i < xor_unit::packets; ++i)
        in[i] = read_wide<N, cache_hint::streaming>(shard[s] + at + xor_unit::stretch(i), apart);
      LLMMEM_UNROLL
      for (std::uint32_t i = 0; i < xor_unit::packets; ++i)
        add_packet(sum[i], in[i]);
    }
    LLMMEM_UNROLL
    for (std::uint32_t i = 0; i < xor_unit::packets; ++i)
      write_wide<N, cache_hint::streaming>(parity + at + xor_unit::stretch(i), sum[i], apart);
  }
  LLMMEM_HD void part(std::uint64_t at) const noexcept {
    const std::uint32_t here = bytes_at(at, bytes);
    if (here == 0) return;
    packet<16> sum{};
    for (std::uint32_t s = 0; s < shards; ++s)
      add_packet(sum, read_up_to<N>(shard[s] + at, here));
    write_up_to<N>(parity + at, sum, here);
  }
};
static_assert(item_work<xor_parity_work<16>>);

/// Whether the delta is written, or only compared.
enum class delta_use : std::uint8_t { written, looked_at };

/// Delta and dirty bits: an item is a unit. Each lane writes its packets of the delta, and together they
/// determine in which stretches any bit differs: a page is one or several, and a unit's pages are in one
/// word.
template <unsigned N, delta_use Use>
struct xor_delta_work {
  const std::byte* old_bytes;
  const std::byte* new_bytes;
  std::byte* delta;
  std::uint32_t* dirty;
  std::uint64_t bytes;
  std::uint32_t stretch_shift;  ///< 2^stretch_shift stretches are a page

  struct held {
    std::uint32_t stretches = 0;  ///< bit i: stretch i differs
  };
  using partial = std::uint32_t;

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return xor_unit::count(bytes); }
  [[nodiscard]] LLMMEM_HD std::uint32_t lanes() const noexcept { return xor_unit::threads; }
  [[nodiscard]] LLMMEM_HD held take(std::uint64_t item, group_lane lane) const noexcept {
    held mine;
    const std::uint64_t unit = item * xor_unit::bytes;
    for (std::uint32_t i = lane.lane; i < xor_unit::threads; i += lane.lanes) {
      if (bytes - unit >= xor_unit::bytes) {
        mine.stretches |= whole(unit + xor_unit::place<N>(i));
      } else {
        for (std::uint32_t k = 0; k < xor_unit::packets; ++k)
          mine.stretches |= part(unit + i * std::uint64_t{16} + xor_unit::stretch(k)) << k;
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
    std::uint32_t bits = 0;
    for (std::uint32_t k = 0; k < xor_unit::packets; ++k)
      bits |= (stretches >> k & 1U) << ((first + k) >> stretch_shift & 31U);
    join_bits(dirty[first >> stretch_shift >> 5], bits);
  }

 private:
  [[nodiscard]] LLMMEM_HD std::uint32_t whole(std::uint64_t at) const noexcept {
    constexpr std::uint32_t apart = xor_unit::apart<N>();
    packet<16> before[xor_unit::packets];
    packet<16> after[xor_unit::packets];
    LLMMEM_UNROLL
    for (std::uint32_t k = 0; k < xor_unit::packets; ++k) {
      before[k] = read_wide<N, cache_hint::streaming>(old_bytes + at + xor_unit::stretch(k), apart);
      after[k] = read_wide<N, cache_hint::streaming>(new_bytes + at + xor_unit::stretch(k), apart);
    }
    std::uint32_t differ = 0;
    LLMMEM_UNROLL
    for (std::uint32_t k = 0; k < xor_unit::packets; ++k) {
      add_packet(after[k], before[k]);
      if constexpr (Use == delta_use::written)
        write_wide<N, cache_hint::streaming>(delta + at + xor_unit::stretch(k), after[k], apart);
      differ |= (is_zero(after[k]) ? 0U : 1U) << k;
    }
    return differ;
  }
  [[nodiscard]] LLMMEM_HD std::uint32_t part(std::uint64_t at) const noexcept {
    const std::uint32_t here = bytes_at(at, bytes);
    if (here == 0) return 0;
    packet<16> differ = read_up_to<N>(new_bytes + at, here);
    add_packet(differ, read_up_to<N>(old_bytes + at, here));
    if constexpr (Use == delta_use::written) write_up_to<N>(delta + at, differ, here);
    return is_zero(differ) ? 0 : 1;
  }
};
static_assert(group_work<xor_delta_work<16, delta_use::written>>);

/// Applies a delta: an item is a thread's four packets of a unit, of which only dirty packets move.
template <unsigned N>
struct apply_delta_work {
  std::byte* target;
  const std::byte* delta;
  const std::uint32_t* dirty;
  std::uint64_t bytes;
  std::uint32_t stretch_shift;  ///< 2^stretch_shift stretches are a page

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept {
    return xor_unit::count(bytes) * xor_unit::threads;
  }
  LLMMEM_HD void run(std::uint64_t item) const noexcept {
    const std::uint64_t unit = item / xor_unit::threads;
    const std::uint64_t thread = item % xor_unit::threads;
    const bool is_whole = N < 16 && bytes - unit * xor_unit::bytes >= xor_unit::bytes;
    const std::uint64_t at = unit * xor_unit::bytes + (is_whole ? xor_unit::place<N>(thread) : thread * 16);
    const std::uint32_t apart = is_whole ? xor_unit::apart<N>() : N;
    const std::uint64_t first = unit * xor_unit::packets;
    const auto* const word = reinterpret_cast<const std::byte*>(dirty + (first >> stretch_shift >> 5));
    const std::uint32_t bits = load_packet<4>(word).words[0];
    if (bits == 0) return;
    std::uint32_t here[xor_unit::packets];
    packet<16> before[xor_unit::packets];
    packet<16> change[xor_unit::packets];
    LLMMEM_UNROLL
    for (std::uint32_t k = 0; k < xor_unit::packets; ++k) {
      const std::uint64_t from = at + xor_unit::stretch(k);
      const bool is_dirty = (bits >> ((first + k) >> stretch_shift & 31U) & 1U) != 0;
      here[k] = !is_dirty ? 0 : is_whole ? 16U : bytes_at(from, bytes);
      if (here[k] == 16) {
        before[k] = read_wide<N, cache_hint::streaming>(target + from, apart);
        change[k] = read_wide<N, cache_hint::streaming>(delta + from, apart);
      }
    }
    LLMMEM_UNROLL
    for (std::uint32_t k = 0; k < xor_unit::packets; ++k) {
      const std::uint64_t from = at + xor_unit::stretch(k);
      if (here[k] == 16) {
        add_packet(before[k], change[k]);
        write_wide<N, cache_hint::streaming>(target + from, before[k], apart);
      } else if (here[k] != 0) {
        last(from, here[k]);
      }
    }
  }

 private:
  LLMMEM_HD void last(std::uint64_t at, std::uint32_t here) const noexcept {
    packet<16> sum = read_start(target + at, here);
    add_packet(sum, read_start(delta + at, here));
    write_start(target + at, sum, here);
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
