/// @file
/// A group of lanes' part of a tile: of a CRC-32C, or of a digest.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/batched_copy.hpp>
#include <llmmem/kernels/block_digest.hpp>
#include <llmmem/kernels/detail/crc32c_words.hpp>
#include <llmmem/kernels/detail/wide_access.hpp>
#include <llmmem/kernels/items.hpp>
#include <llmmem/kernels/packet.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Whether the bytes read are also copied.
enum class checksum_use : std::uint8_t { looked_at, copied };

/// Bytes [begin, end) of a block, from which a group of lanes makes a part of its sum. They begin at a
/// multiple of 16.
struct block_tile {
  copy_task block;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

/// How many bytes a lane has, and how many lanes share a tile. With much data a lane has many bytes, so that
/// its fixed cost is small; with little data it has few, so that the whole device has lanes.
struct tile_shape {
  std::uint32_t lane_bytes = 0;
  std::uint32_t lanes = 1;

  [[nodiscard]] LLMMEM_HD constexpr std::uint64_t bytes() const noexcept {
    return std::uint64_t{lane_bytes} * lanes;
  }
  friend constexpr bool operator==(const tile_shape&, const tile_shape&) noexcept = default;
};

/// @param lane_least  bytes of a lane, at least and at most: powers of two.
/// @param to_share    bytes of a block for which one more lane is worth its cost.
[[nodiscard]] constexpr tile_shape shape_tiles(std::uint64_t blocks, std::uint64_t longest,
                                               std::uint32_t lane_least, std::uint32_t lane_most,
                                               std::uint32_t to_share) noexcept {
  // A large device holds about as many threads of these kernels at once.
  constexpr std::uint64_t lanes_at_once = std::uint64_t{1} << 16;
  const std::uint64_t each = std::min(blocks, 4 * lanes_at_once) * longest / lanes_at_once;
  const std::uint64_t lane_bytes = std::clamp<std::uint64_t>(std::bit_floor(each), lane_least, lane_most);
  const std::uint64_t unit = to_share == 0 ? lane_bytes : to_share;
  const std::uint64_t wanted = std::clamp<std::uint64_t>((longest + unit - 1) / unit, 1, 32);
  return {static_cast<std::uint32_t>(lane_bytes), static_cast<std::uint32_t>(std::bit_ceil(wanted))};
}

/// CRC-32C: a lane has one stretch of a tile.
struct crc32c_sum {
  using value = std::uint32_t;
  /// Whether long blocks take crc32c_rows.hpp, or digest_rows.hpp, although 16 bytes are aligned: a stretch
  /// for each lane touches sectors of which it takes a half.
  static constexpr bool rows_when_wide = true;
  crc32c_powers powers{};

  [[nodiscard]] static constexpr tile_shape shape(std::uint64_t blocks, std::uint64_t longest) noexcept {
    return shape_tiles(blocks, longest, 128, 2048, 0);
  }
  [[nodiscard]] LLMMEM_HD static value join(value a, value b) noexcept { return a ^ b; }
  LLMMEM_HD static void join_to(value& sum, value part) noexcept { join_xor(sum, part); }

  /// Returns the part of a block's sum that its bytes do not add: that of the register's initial bits and of
  /// its final ones.
  [[nodiscard]] LLMMEM_HD value start(std::uint64_t bytes) const noexcept {
    return ~powers.past(0xFFFF'FFFFU, bytes);
  }
  template <unsigned N, checksum_use Use>
  [[nodiscard]] LLMMEM_HD value take(const block_tile& tile, const tile_shape& shape,
                                     group_lane lane) const noexcept {
    value sum = 0;
    for (std::uint32_t i = lane.lane; i < shape.lanes; i += lane.lanes) {
      const std::uint64_t begin = tile.begin + std::uint64_t{i} * shape.lane_bytes;
      if (begin >= tile.end) break;
      const std::uint64_t left = tile.end - begin;
      const auto bytes = static_cast<std::uint32_t>(left < shape.lane_bytes ? left : shape.lane_bytes);
      std::byte* const to = Use == checksum_use::copied ? tile.block.to + begin : nullptr;
      const value mine = stretch<N, Use>(tile.block.from + begin, to, bytes);
      sum ^= powers.past(mine, tile.block.bytes - begin - bytes);
    }
    return sum;
  }

 private:
  /// Returns the register after a stretch, with zeros before it. Leading zeros make no difference, so packets
  /// are filled up there to a multiple of 32 words.
  template <unsigned N, checksum_use Use>
  [[nodiscard]] static LLMMEM_HD value stretch(const std::byte* from, std::byte* to,
                                               std::uint32_t bytes) noexcept {
    const std::uint32_t packets = bytes / 16;
    const std::uint32_t rounds = (packets + 7) / 8;
    std::uint32_t at = packets - rounds * 8;  // wraps around: a packet is there once it is below `packets`
    crc32c_state state{};
    for (std::uint32_t round = 0; round < rounds; ++round) {
      packet<16> in[8];
      LLMMEM_UNROLL
      for (std::uint32_t i = 0; i < 8; ++i)
        in[i] = at + i < packets ? read_wide<N, cache_hint::kept>(from + std::uint64_t{at + i} * 16)
                                 : packet<16>{};
      crc32c_state next{};
      LLMMEM_UNROLL
      for (std::uint32_t i = 0; i < 32; ++i)
        next.word[i] = in[i / 4].words[i % 4];
      if constexpr (Use == checksum_use::copied) {
        LLMMEM_UNROLL
        for (std::uint32_t i = 0; i < 8; ++i) {
          if (at + i < packets) write_wide<N, cache_hint::streaming>(to + std::uint64_t{at + i} * 16, in[i]);
        }
      }
      crc32c_take(state, next);
      at += 8;
    }
    value sum = crc32c_register(state);
    for (std::uint32_t i = packets * 16; i < bytes; ++i) {
      const packet<1> byte = load_packet<1>(from + i);
      sum = crc32c_next(sum, byte.words[0]);
      if constexpr (Use == checksum_use::copied) store_packet<1>(to + i, byte);
    }
    return sum;
  }
};

/// `block_digest`: lanes take a tile's packets alternately.
struct digest_sum {
  using value = std::uint64_t;
  static constexpr bool rows_when_wide = false;

  [[nodiscard]] static constexpr tile_shape shape(std::uint64_t blocks, std::uint64_t longest) noexcept {
    return shape_tiles(blocks, longest, 64, 512, 64);
  }
  [[nodiscard]] LLMMEM_HD static value join(value a, value b) noexcept { return a + b; }
  LLMMEM_HD static void join_to(value& sum, value part) noexcept { add_to(sum, part); }
  [[nodiscard]] LLMMEM_HD value start(std::uint64_t bytes) const noexcept { return digest_start(bytes); }

  template <unsigned N, checksum_use Use>
  [[nodiscard]] LLMMEM_HD value take(const block_tile& tile, const tile_shape& /*shape*/,
                                     group_lane lane) const noexcept {
    constexpr std::uint32_t at_once = 4;
    constexpr cache_hint how = cache_hint::streaming;
    const std::byte* const from = tile.block.from + tile.begin;
    std::byte* const to = Use == checksum_use::copied ? tile.block.to + tile.begin : nullptr;
    const auto bytes = static_cast<std::uint32_t>(tile.end - tile.begin);
    const std::uint32_t packets = bytes / 16;
    const std::uint64_t words = tile.begin / 8;
    value sum = 0;
    std::uint32_t p = lane.lane;
    for (; p + (at_once - 1) * lane.lanes < packets; p += at_once * lane.lanes) {
      packet<16> in[at_once];
      LLMMEM_UNROLL
      for (std::uint32_t i = 0; i < at_once; ++i)
        in[i] = read_wide<N, how>(from + std::uint64_t{p + i * lane.lanes} * 16);
      LLMMEM_UNROLL
      for (std::uint32_t i = 0; i < at_once; ++i) {
        const std::uint32_t number = p + i * lane.lanes;
        if constexpr (Use == checksum_use::copied) write_wide<N, how>(to + std::uint64_t{number} * 16, in[i]);
        sum += of_packet(in[i], words + 2 * std::uint64_t{number});
      }
    }
    for (; p < packets; p += lane.lanes) {
      const packet<16> in = read_wide<N, how>(from + std::uint64_t{p} * 16);
      if constexpr (Use == checksum_use::copied) write_wide<N, how>(to + std::uint64_t{p} * 16, in);
      sum += of_packet(in, words + 2 * std::uint64_t{p});
    }
    // After the last packet, by the lane whose turn it is.
    const std::uint32_t rest = bytes % 16;
    if (rest != 0 && p == packets) {
      const packet<16> in = read_start(from + std::uint64_t{p} * 16, rest);
      if constexpr (Use == checksum_use::copied) write_start(to + std::uint64_t{p} * 16, in, rest);
      sum += of_packet(in, words + 2 * std::uint64_t{p});
    }
    return sum;
  }

  /// Returns what 16 bytes add, whose first word has the number `word`.
  [[nodiscard]] static LLMMEM_HD value of_packet(const packet<16>& in, std::uint64_t word) noexcept {
    const std::uint64_t key = digest_key(word);
    return digest_word(in.words[0], in.words[1], key) +
           digest_word(in.words[2], in.words[3], key + digest_position);
  }
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
