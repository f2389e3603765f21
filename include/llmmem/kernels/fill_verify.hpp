/// @file
/// Memory filled with a pattern that distinguishes every byte from others, poisoned, and verified: for tests
/// and for the search for a stray write.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/items.hpp>
#include <llmmem/kernels/packet.hpp>
#include <llmmem/result.hpp>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <type_traits>

namespace llmmem {
inline namespace v0 {

/// The contents of each byte of some memory, by its position. `at(position)` are the 16 bytes from there on,
/// the first lowest; any position is valid.
template <class P>
concept memory_pattern =
    std::is_trivially_copyable_v<P> && requires(const P& pattern, std::uint64_t position) {
      { pattern.at(position) } noexcept -> std::same_as<packet<16>>;
    };

/// Random bytes that depend on a position and a seed: they reveal moved, swapped and missing bytes.
///
/// @par Source   the output function of SplitMix64, of a counter: Steele, Lea and Flood, "Fast Splittable
///      Pseudorandom Number Generators", OOPSLA 2014.
struct seeded_pattern {
  std::uint64_t seed = 0;
  /// The position of the memory's first byte, if the memory is a piece of something: for a copied block, the
  /// position of its source.
  std::uint64_t first_position = 0;

  /// Returns bytes 8 x `number` and following.
  [[nodiscard]] LLMMEM_HD constexpr std::uint64_t word(std::uint64_t number) const noexcept {
    std::uint64_t bits = seed + (number + 1) * 0x9E37'79B9'7F4A'7C15U;
    bits = (bits ^ bits >> 30U) * 0xBF58'476D'1CE4'E5B9U;
    bits = (bits ^ bits >> 27U) * 0x94D0'49BB'1331'11EBU;
    return bits ^ bits >> 31U;
  }
  [[nodiscard]] LLMMEM_HD constexpr packet<16> at(std::uint64_t position) const noexcept {
    const std::uint64_t from = first_position + position;
    const std::uint64_t number = from / 8;
    const std::uint64_t skipped = from % 8 * 8;  // bits of the first word
    std::uint64_t low = word(number);
    std::uint64_t high = word(number + 1);
    if (skipped != 0) {
      low = low >> skipped | high << (64 - skipped);
      high = high >> skipped | word(number + 2) << (64 - skipped);
    }
    return {{static_cast<std::uint32_t>(low), static_cast<std::uint32_t>(low >> 32U),
             static_cast<std::uint32_t>(high), static_cast<std::uint32_t>(high >> 32U)}};
  }
};
static_assert(memory_pattern<seeded_pattern>);

/// The same byte everywhere. The default is a NaN in every floating-point format and -1 in every integer, so
/// a read of unwritten memory shows at once.
struct poison_pattern {
  std::byte value{0xFF};

  [[nodiscard]] LLMMEM_HD constexpr packet<16> at(std::uint64_t /*position*/) const noexcept {
    const std::uint32_t four = static_cast<std::uint32_t>(value) * 0x0101'0101U;
    return {{four, four, four, four}};
  }
};
static_assert(memory_pattern<poison_pattern>);

/// The differences from a pattern, in memory of `verify_memory`'s executor. Initialise it with these values
/// first; several verifications may share one.
struct mismatch_report {
  std::uint64_t first =
      std::numeric_limits<std::uint64_t>::max();  ///< position of the first byte that differs
  std::uint64_t count = 0;                        ///< bytes that differ

  friend constexpr bool operator==(const mismatch_report&, const mismatch_report&) noexcept = default;
};

namespace detail {

/// Memory as items: packets of 16 aligned bytes, then the bytes before the first and those after the last.
class memory_pieces {
 public:
  memory_pieces(const std::byte* data, std::uint64_t bytes) noexcept
      : head_(std::min<std::uint64_t>(-reinterpret_cast<std::uintptr_t>(data) % 16, bytes)),
        packets_((bytes - head_) / 16),
        bytes_(bytes) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return bytes_ - 15 * packets_; }
  [[nodiscard]] LLMMEM_HD std::uint64_t packets() const noexcept { return packets_; }
  [[nodiscard]] LLMMEM_HD bool is_packet(std::uint64_t item) const noexcept { return item < packets_; }
  /// Returns where an item begins.
  [[nodiscard]] LLMMEM_HD std::uint64_t position(std::uint64_t item) const noexcept {
    if (item < packets_) return head_ + 16 * item;
    const std::uint64_t single = item - packets_;
    return single < head_ ? single : single + 16 * packets_;
  }

 private:
  std::uint64_t head_;
  std::uint64_t packets_;
  std::uint64_t bytes_;
};

template <memory_pattern Pattern>
class fill_work {
 public:
  fill_work(std::span<std::byte> memory, const Pattern& pattern) noexcept
      : data_(memory.data()), pieces_(memory.data(), memory.size()), pattern_(pattern) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return pieces_.items(); }
  LLMMEM_HD void run(std::uint64_t item) const noexcept {
    const std::uint64_t position = pieces_.position(item);
    const packet<16> bytes = pattern_.at(position);
    if (pieces_.is_packet(item)) {
      store_packet<16, cache_hint::streaming>(data_ + position, bytes);
    } else {
      store_packet<1>(data_ + position, {{element_of<std::uint8_t>(bytes, 0)}});
    }
  }

 private:
  std::byte* data_;
  memory_pieces pieces_;
  Pattern pattern_;
};

/// Compares memory with a pattern: an item is for a warp, four packets for each of its lanes, or all single
/// bytes at both ends. The lanes first add up the differences, so memory with all bytes wrong costs two
/// atomic operations for each item, not for each packet: they all use one address, one after another.
template <memory_pattern Pattern>
class verify_work {
 public:
  static constexpr std::uint32_t item_packets = 128;

  /// The differences that a lane found.
  struct held {
    std::uint64_t first = std::numeric_limits<std::uint64_t>::max();
    std::uint64_t count = 0;
  };
  using partial = held;

  verify_work(std::span<const std::byte> memory, const Pattern& pattern, mismatch_report* report) noexcept
      : data_(memory.data()), pieces_(memory.data(), memory.size()), pattern_(pattern), report_(report) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept {
    return whole_items() + (pieces_.items() == pieces_.packets() ? 0 : 1);
  }
  [[nodiscard]] LLMMEM_HD std::uint32_t lanes() const noexcept { return 32; }
  [[nodiscard]] LLMMEM_HD held take(std::uint64_t item, group_lane lane) const noexcept {
    held mine;
    if (item == whole_items()) {
      for (std::uint64_t i = pieces_.packets() + lane.lane; i < pieces_.items(); i += lane.lanes)
        compare_byte(mine, pieces_.position(i));
      return mine;
    }
    const std::uint64_t begin = item * item_packets;
    const std::uint64_t left = pieces_.packets() - begin;
    const std::uint64_t end = begin + (left < item_packets ? left : item_packets);
    for (std::uint64_t i = begin + lane.lane; i < end; i += lane.lanes)
      compare_packet(mine, pieces_.position(i));
    return mine;
  }
  [[nodiscard]] static LLMMEM_HD partial measure(const held& mine) noexcept { return mine; }
  [[nodiscard]] static LLMMEM_HD partial combine(const partial& a, const partial& b) noexcept {
    return {a.first < b.first ? a.first : b.first, a.count + b.count};
  }
  LLMMEM_HD void give(std::uint64_t /*item*/, group_lane lane, const held& /*mine*/,
                      const partial& total) const noexcept {
    if (lane.lane != 0 || total.count == 0) return;
    lower_to(report_->first, total.first);
    add_to(report_->count, total.count);
  }

 private:
  [[nodiscard]] LLMMEM_HD std::uint64_t whole_items() const noexcept {
    return (pieces_.packets() + item_packets - 1) / item_packets;
  }
  LLMMEM_HD void compare_byte(held& mine, std::uint64_t position) const noexcept {
    const packet<16> expected = pattern_.at(position);
    if (element_of<std::uint8_t>(expected, 0) != load_packet<1>(data_ + position).words[0])
      mine = combine(mine, {position, 1});
  }
  LLMMEM_HD void compare_packet(held& mine, std::uint64_t position) const noexcept {
    const packet<16> expected = pattern_.at(position);
    const auto found = load_packet<16, cache_hint::streaming>(data_ + position);
    std::uint32_t differs[4];
    LLMMEM_UNROLL
    for (unsigned i = 0; i < 4; ++i)
      differs[i] = expected.words[i] ^ found.words[i];
    if ((differs[0] | differs[1] | differs[2] | differs[3]) == 0) return;
    for (unsigned i = 0; i < 16; ++i) {
      if ((differs[i / 4] >> (i % 4 * 8) & 0xFFU) != 0) mine = combine(mine, {position + i, 1});
    }
  }

  const std::byte* data_;
  memory_pieces pieces_;
  Pattern pattern_;
  mismatch_report* report_;
};
static_assert(group_work<verify_work<poison_pattern>>);

}  // namespace detail

/// Writes a pattern to memory: `seeded_pattern`, or `poison_pattern`.
///
/// @param run     `host_executor` or `device_executor`; the memory is its own.
/// @param memory  of any alignment and length.
/// @return `errc::too_short` if `memory` is null and not empty. Then nothing has begun. Otherwise the result
///         of `run`.
/// @par Complexity   the bytes written once, 16 at a time except for fewer than 16 at either end.
/// @par Thread safety   any number at once, on different bytes.
template <class Run, memory_pattern Pattern>
result<void> fill_memory(const Run& run, std::span<std::byte> memory, const Pattern& pattern) {
  if (memory.empty()) return {};
  if (memory.data() == nullptr) return failure{errc::too_short, 0, memory.size(), 0, "fill_memory: memory"};
  return run.each(detail::fill_work<Pattern>(memory, pattern));
}

/// Compares memory with the bytes that `fill_memory` would have written, and adds the differences to
/// `report`. Order has no effect, so a device and a host report the same.
///
/// @param report  in the executor's memory, aligned to 8 bytes; read it when `run` is done.
/// @return as `fill_memory`; `errc::too_short` for a null `report` too.
/// @par Complexity   the bytes read once; at most two atomic operations for each 2 KiB.
template <class Run, memory_pattern Pattern>
result<void> verify_memory(const Run& run, std::span<const std::byte> memory, const Pattern& pattern,
                           mismatch_report* report) {
  if (report == nullptr) return failure{errc::too_short, 0, 1, 0, "verify_memory: report"};
  if (memory.empty()) return {};
  if (memory.data() == nullptr) return failure{errc::too_short, 0, memory.size(), 0, "verify_memory: memory"};
  return run.each(detail::verify_work<Pattern>(memory, pattern, report));
}

}  // namespace v0
}  // namespace llmmem
