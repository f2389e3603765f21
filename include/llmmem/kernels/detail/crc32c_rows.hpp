/// @file
/// CRC-32C of long blocks at any alignment: neighbouring lanes take neighbouring words.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/block_lists.hpp>
#include <llmmem/kernels/detail/checksum_give.hpp>
#include <llmmem/kernels/detail/checksum_tiles.hpp>
#include <llmmem/kernels/detail/crc32c_words.hpp>
#include <llmmem/kernels/divider.hpp>
#include <llmmem/kernels/items.hpp>
#include <llmmem/kernels/lanes.hpp>
#include <llmmem/kernels/packet.hpp>

#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

// A row is 128 bytes, a word for each of 32 lanes. A lane's words of consecutive rows are the coefficients of
// a polynomial in z = x^1024, and 1024 is a power of two: P(z) is a multiple of P(x), as P(x^32) is, so a
// lane takes its words as crc32c_words.hpp describes. 32 rows remain; transposed, each lane has one of them.
//
// Zeros before a message do not change its remainder. So the rows end at the last address of a tile that a
// sector of memory begins at, and the first rows are filled up by zeros. Few bytes before and behind them are
// taken one by one.

/// The rows of a tile. Offsets count from the block's first byte.
struct crc32c_rows {
  static constexpr std::uint32_t row_bytes = 128;
  static constexpr std::uint32_t round_bytes = 32 * row_bytes;
  static constexpr std::uint32_t sector = 32;

  std::uint64_t begin = 0;  ///< of the tile
  std::uint64_t first = 0;  ///< of the words: `first` - `begin` bytes before them
  std::uint64_t last = 0;   ///< behind the words
  std::uint64_t end = 0;    ///< of the tile

  /// Whether a block has a tile of this number.
  [[nodiscard]] static LLMMEM_HD constexpr bool is_there(std::uint64_t bytes, std::uint64_t index,
                                                         std::uint64_t tile_bytes) noexcept {
    return index * tile_bytes < bytes;
  }
  /// @pre tile number `index` exists
  [[nodiscard]] static LLMMEM_HD crc32c_rows of(const copy_task& block, std::uint64_t index,
                                                std::uint64_t tile_bytes) noexcept {
    const auto address = reinterpret_cast<std::uintptr_t>(block.from);
    const std::uint64_t skew = address % sector;
    crc32c_rows out;
    out.begin = index == 0 ? 0 : index * tile_bytes - skew;
    const std::uint64_t next = (index + 1) * tile_bytes - skew;
    out.end = is_there(block.bytes, index + 1, tile_bytes) ? next : block.bytes;
    const std::uint64_t behind = (address + out.end) % sector;
    const std::uint64_t before = (0 - address - out.begin) % 4;
    if (out.end - out.begin < behind + before) {
      out.first = out.last = out.begin;
    } else {
      out.first = out.begin + before;
      out.last = out.end - behind;
    }
    return out;
  }
};

/// An item is a tile, for all lanes of a warp.
template <checksum_use Use, block_list Blocks>
struct crc32c_rows_work {
  using value = std::uint32_t;
  static constexpr std::uint32_t threads = 128;
  static constexpr std::uint32_t blocks = Use == checksum_use::copied ? 2 : 3;

  Blocks list;
  crc32c_sum sum;
  std::uint64_t tile_bytes = 0;
  std::uint64_t longest = 0;
  divider tiles{};  ///< of a block
  value* out = nullptr;

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return list.size() * tiles.by(); }
  [[nodiscard]] LLMMEM_HD std::uint32_t lanes() const noexcept { return 32; }

  template <class Group>
  LLMMEM_HD void run(std::uint64_t item, const Group& group) const noexcept {
    if (item >= items()) return;
    const std::uint64_t number = tiles.quotient(item);
    const std::uint64_t index = item - number * tiles.by();
    const copy_task block = block_of(list, number, longest);
    typename Group::template held<value> part{};
    const bool is_there = crc32c_rows::is_there(block.bytes, index, tile_bytes);
    if (is_there) {
      const crc32c_rows rows = crc32c_rows::of(block, index, tile_bytes);
      if (rows.first != rows.last) take_words(block, rows, part, group);
      take_bytes(block, rows.begin, rows.first, part, group);
      take_bytes(block, rows.last, rows.end, part, group);
      for (std::uint32_t step = 16; step != 0; step /= 2) {
        typename Group::template held<value> other{};
        group.each([&](std::uint32_t lane) { other[lane] = part[lane]; });
        group.swap(other, step);
        group.each([&](std::uint32_t lane) { part[lane] ^= other[lane]; });
      }
    }
    group.each([&](std::uint32_t lane) {
      if (lane == 0) give_sum(sum, tiles.by() == 1, is_there, block.bytes, part[0], out[number]);
    });
  }

 private:
  /// Takes up to 32 bytes, a lane each.
  template <class Group, class Part>
  LLMMEM_HD void take_bytes(const copy_task& block, std::uint64_t begin, std::uint64_t end, Part& part,
                            const Group& group) const noexcept {
    if (begin == end) return;
    group.each([&](std::uint32_t lane) {
      const std::uint64_t at = begin + lane;
      if (at >= end) return;
      const packet<1> byte = load_packet<1>(block.from + at);
      part[lane] ^= sum.powers.past(crc32c_next(0, byte.words[0]), block.bytes - 1 - at);
      if constexpr (Use == checksum_use::copied) store_packet<1>(block.to + at, byte);
    });
  }

  template <class Group, class Part>
  LLMMEM_HD void take_words(const copy_task& block, const crc32c_rows& rows, Part& part,
                            const Group& group) const noexcept {
    typename Group::template held<crc32c_state> state{};
    [[maybe_unused]] typename Group::template held<std::uint32_t> before{};
    const auto bytes = static_cast<std::uint32_t>(rows.last - rows.first);
    const std::uint32_t rounds = (bytes + crc32c_rows::round_bytes - 1) / crc32c_rows::round_bytes;
    std::uint32_t at = bytes - rounds * crc32c_rows::round_bytes;  // wraps around below the first word
    const std::byte* const from = block.from + rows.first;
    std::byte* const to = Use == checksum_use::copied ? block.to + rows.first : nullptr;
    if constexpr (Use == checksum_use::copied) copy_ends(from, to, bytes, group);
    for (std::uint32_t round = 0; round < rounds; ++round) {
      typename Group::template held<crc32c_state> next{};
      group.each([&](std::uint32_t lane) {
        LLMMEM_UNROLL
        for (std::uint32_t i = 0; i < 32; ++i) {
          const std::uint32_t word = at + i * crc32c_rows::row_bytes + lane * 4;
          next[lane].word[i] = word < bytes ? load_packet<4, cache_hint::streaming>(from + word).words[0] : 0;
        }
      });
      if constexpr (Use == checksum_use::copied) copy_round(to, at, bytes, next, before, group);
      group.each([&](std::uint32_t lane) { crc32c_take(state[lane], next[lane]); });
      at += crc32c_rows::round_bytes;
    }
    transpose_rows(state, group);
    group.each([&](std::uint32_t lane) {
      part[lane] =
          sum.powers.past(crc32c_register(state[lane]),
                          block.bytes - rows.last + std::uint64_t{31 - lane} * crc32c_rows::row_bytes);
    });
  }

  /// Copies what a destination's words do not hold: the first and the last bytes.
  template <class Group>
  static LLMMEM_HD void copy_ends(const std::byte* from, std::byte* to, std::uint32_t bytes,
                                  const Group& group) noexcept {
    const auto behind = static_cast<std::uint32_t>((reinterpret_cast<std::uintptr_t>(to) + bytes) % 4);
    if (behind == 0) return;
    group.each([&](std::uint32_t lane) {
      if (lane >= 4) return;
      const std::uint32_t at = lane < 4 - behind ? lane : bytes - 4 + lane;
      store_packet<1>(to + at, load_packet<1>(from + at));
    });
  }

  /// Writes the destination's words that end in 32 rows, and after the last round those that end after its
  /// rows.
  template <class Group, class State, class Word>
  static LLMMEM_HD void copy_round(std::byte* to, std::uint32_t at, std::uint32_t bytes, const State& next,
                                   Word& before, const Group& group) noexcept {
    const auto skew =
        static_cast<std::uint32_t>((reinterpret_cast<std::uintptr_t>(to) + bytes) % crc32c_rows::sector);
    if (skew == 0) {
      group.each([&](std::uint32_t lane) {
        LLMMEM_UNROLL
        for (std::uint32_t i = 0; i < 32; ++i) {
          const std::uint32_t word = at + i * crc32c_rows::row_bytes + lane * 4;
          if (word < bytes) store_packet<4, cache_hint::streaming>(to + word, {{next[lane].word[i]}});
        }
      });
      return;
    }
    Word now{};
    LLMMEM_UNROLL
    for (std::uint32_t i = 0; i < 32; ++i) {
      group.each([&](std::uint32_t lane) { now[lane] = next[lane].word[i]; });
      copy_row(to, at + i * crc32c_rows::row_bytes, bytes, skew, before, now, group);
      before = now;
    }
    if (at + crc32c_rows::round_bytes != bytes) return;
    now = {};
    copy_row(to, bytes, bytes, skew, before, now, group);
  }

  /// Writes words that begin `skew` bytes before a row: its bytes, and the last of the row before.
  template <class Group, class Word>
  static LLMMEM_HD void copy_row(std::byte* to, std::uint32_t row, std::uint32_t bytes, std::uint32_t skew,
                                 const Word& before, const Word& now, const Group& group) noexcept {
    const std::uint32_t by = skew / 4;
    Word high{};
    Word low{};
    Word sent{};
    group.each([&](std::uint32_t lane) { sent[lane] = lane + by < 32 ? now[lane] : before[lane]; });
    group.take_from(high, sent, [&](std::uint32_t lane) { return (lane - by) & 31U; });
    group.each([&](std::uint32_t lane) { sent[lane] = lane + by + 1 < 32 ? now[lane] : before[lane]; });
    group.take_from(low, sent, [&](std::uint32_t lane) { return (lane - by - 1) & 31U; });
    group.each([&](std::uint32_t lane) {
      const std::uint32_t word = row + lane * 4 - skew;
      if (word >= bytes || bytes - word < 4) return;
      const std::uint64_t both = std::uint64_t{high[lane]} << 32 | low[lane];
      store_packet<4, cache_hint::streaming>(to + word,
                                             {{static_cast<std::uint32_t>(both >> ((4 - skew % 4) * 8))}});
    });
  }

  /// Lane l gets word number l of each lane.
  template <class Group, class State>
  static LLMMEM_HD void transpose_rows(State& state, const Group& group) noexcept {
    exchange_words<16>(state, group);
    exchange_words<8>(state, group);
    exchange_words<4>(state, group);
    exchange_words<2>(state, group);
    exchange_words<1>(state, group);
  }
  /// Lanes whose numbers differ by the bit `Step` exchange the words where each has the other's bit.
  template <std::uint32_t Step, class Group, class State>
  static LLMMEM_HD void exchange_words(State& state, const Group& group) noexcept {
    LLMMEM_UNROLL
    for (std::uint32_t n = 0; n < 16; ++n) {
      const std::uint32_t i = (n & ~(Step - 1)) * 2 + (n & (Step - 1));
      typename Group::template held<std::uint32_t> sent{};
      group.each([&](std::uint32_t lane) {
        sent[lane] = (lane & Step) == 0 ? state[lane].word[i + Step] : state[lane].word[i];
      });
      group.swap(sent, Step);
      group.each([&](std::uint32_t lane) {
        const bool is_upper = (lane & Step) != 0;
        std::uint32_t* const word = state[lane].word;
        word[i + Step] = is_upper ? word[i + Step] : sent[lane];
        word[i] = is_upper ? sent[lane] : word[i];
      });
    }
  }
};
static_assert(lane_work<crc32c_rows_work<checksum_use::copied, strided_blocks>>);
static_assert(sizeof(crc32c_rows_work<checksum_use::copied, few_copies>) <= 4096 - 64,
              "an argument of a kernel");

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
