/// @file
/// The bodies of the functions in <llmmem/kernels/block_checksum.hpp>.
#pragma once

#include <llmmem/kernels/block_checksum.hpp>
#include <llmmem/kernels/detail/checksum_give.hpp>
#include <llmmem/kernels/detail/checksum_tiles.hpp>
#include <llmmem/kernels/detail/crc32c_rows.hpp>
#include <llmmem/kernels/detail/digest_rows.hpp>
#include <llmmem/kernels/detail/wide_access.hpp>
#include <llmmem/kernels/divider.hpp>
#include <llmmem/kernels/items.hpp>
#include <llmmem/kernels/packet.hpp>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// A host can check its own lists for missing memory, but not lists on a device.
template <class L>
concept knows_its_memory = requires(const L& list) {
  { list.lacks_source() } noexcept -> std::same_as<bool>;
  { list.lacks_target() } noexcept -> std::same_as<bool>;
};
template <block_list Blocks>
[[nodiscard]] bool lacks_memory(const Blocks& blocks, checksum_use use) noexcept {
  if constexpr (knows_its_memory<Blocks>) {
    return blocks.lacks_source() || (use == checksum_use::copied && blocks.lacks_target());
  } else {
    static_cast<void>(use);
    return false;
  }
}
[[nodiscard]] inline bool lacks_memory(const few_copies& tasks, checksum_use use) noexcept {
  for (std::uint64_t i = 0; i < tasks.size(); ++i) {
    const copy_task& each = tasks[i];
    if (each.bytes == 0) continue;
    if (each.from == nullptr || (use == checksum_use::copied && each.to == nullptr)) return true;
  }
  return false;
}

/// The initial sums of blocks of several tiles: an item is a block.
template <class Sum, block_list Blocks>
struct checksum_start_work {
  Blocks blocks;
  Sum sum;
  std::uint64_t longest = 0;
  typename Sum::value* out = nullptr;

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return blocks.size(); }
  LLMMEM_HD void run(std::uint64_t item) const noexcept {
    write_sum(out + item, sum.start(block_of(blocks, item, longest).bytes));
  }
};

/// The sums' parts: an item is a tile.
template <class Sum, unsigned N, checksum_use Use, block_list Blocks>
struct checksum_work {
  Blocks blocks;
  Sum sum;
  tile_shape shape;
  std::uint64_t longest = 0;
  divider tiles{};  ///< of a block
  typename Sum::value* out = nullptr;

  struct held {
    typename Sum::value part = 0;
    std::uint64_t begin = 0;  ///< of the tile
    std::uint64_t bytes = 0;  ///< of the block
  };
  using partial = typename Sum::value;

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return blocks.size() * tiles.by(); }
  [[nodiscard]] LLMMEM_HD std::uint32_t lanes() const noexcept { return shape.lanes; }
  [[nodiscard]] LLMMEM_HD held take(std::uint64_t item, group_lane lane) const noexcept {
    const std::uint64_t number = tiles.quotient(item);
    const copy_task block = block_of(blocks, number, longest);
    held mine;
    mine.begin = (item - number * tiles.by()) * shape.bytes();
    mine.bytes = block.bytes;
    if (mine.begin >= mine.bytes) return mine;
    const std::uint64_t left = mine.bytes - mine.begin;
    const std::uint64_t end = mine.begin + (left < shape.bytes() ? left : shape.bytes());
    mine.part = sum.template take<N, Use>({block, mine.begin, end}, shape, lane);
    return mine;
  }
  [[nodiscard]] LLMMEM_HD static partial measure(const held& mine) noexcept { return mine.part; }
  [[nodiscard]] LLMMEM_HD static partial combine(partial a, partial b) noexcept { return Sum::join(a, b); }
  LLMMEM_HD void give(std::uint64_t item, group_lane lane, const held& mine, partial total) const noexcept {
    if (lane.lane != 0) return;
    give_sum(sum, tiles.by() == 1, mine.begin < mine.bytes, mine.bytes, total, out[tiles.quotient(item)]);
  }
};
static_assert(group_work<checksum_work<crc32c_sum, 16, checksum_use::looked_at, few_copies>>);
static_assert(group_work<checksum_work<digest_sum, 16, checksum_use::copied, strided_blocks>>);
static_assert(sizeof(checksum_work<crc32c_sum, 16, checksum_use::copied, few_copies>) <= 4096 - 64,
              "an argument of a kernel");

template <class Sum, checksum_use Use, class Run, block_list Blocks>
result<void> run_checksums(const Run& run, const Blocks& blocks, std::span<typename Sum::value> sums,
                           const char* where) {
  if (sums.size() < blocks.size()) return failure{errc::too_short, 0, blocks.size(), sums.size(), where};
  if (blocks.size() == 0) return {};
  if (sums.data() == nullptr || lacks_memory(blocks, Use)) return failure{errc::null_handle, 0, 0, 0, where};
  const std::uint64_t longest = blocks.longest();
  constexpr std::uint64_t most = (std::uint64_t{1} << 45) - 1;
  if (longest > most) return failure{errc::past_the_bytes, 0, longest, most, where};
  const Sum sum{};
  const row_alignment aligned = blocks.alignment();
  const std::uint32_t narrower =
      Use == checksum_use::copied ? std::min(aligned.from, aligned.to) : aligned.from;
  const bool is_wide = narrower >= 16;
  tile_shape shape = Sum::shape(blocks.size(), longest);
  // A lane that takes its own stretch byte by byte touches a sector for each. Of many blocks, too, a warp has
  // a tile then, although a lane's share is as long as a block.
  if (narrower < 4 && longest > 2048) shape.lanes = 32;
  const std::uint64_t tiles = std::max<std::uint64_t>((longest + shape.bytes() - 1) / shape.bytes(), 1);
  if (tiles > 1) {
    const checksum_start_work<Sum, Blocks> start{blocks, sum, longest, sums.data()};
    if (auto done = run.each(start); !done) return done;
  }
  const divider by(static_cast<std::uint32_t>(tiles));
  // A warp for each tile, as far as a tile has bytes for all its lanes.
  if (shape.lanes == 32 && (Sum::rows_when_wide || !is_wide)) {
    if constexpr (std::same_as<Sum, crc32c_sum>) {
      return run.each(crc32c_rows_work<Use, Blocks>{blocks, sum, shape.bytes(), longest, by, sums.data()});
    } else {
      return run.each(digest_rows_work<Use, Blocks>{blocks, sum, shape.bytes(), longest, by, sums.data()});
    }
  }
  if (is_wide)
    return run.each(checksum_work<Sum, 16, Use, Blocks>{blocks, sum, shape, longest, by, sums.data()});
  if (narrower >= 4)
    return run.each(checksum_work<Sum, 4, Use, Blocks>{blocks, sum, shape, longest, by, sums.data()});
  return run.each(checksum_work<Sum, 1, Use, Blocks>{blocks, sum, shape, longest, by, sums.data()});
}

}  // namespace detail

template <class Run, block_list Blocks>
result<void> crc32c_blocks(const Run& run, const Blocks& blocks, std::span<std::uint32_t> sums) {
  return detail::run_checksums<detail::crc32c_sum, detail::checksum_use::looked_at>(run, blocks, sums,
                                                                                    "crc32c_blocks");
}

template <class Run, block_list Blocks>
result<void> digest_blocks(const Run& run, const Blocks& blocks, std::span<std::uint64_t> sums) {
  return detail::run_checksums<detail::digest_sum, detail::checksum_use::looked_at>(run, blocks, sums,
                                                                                    "digest_blocks");
}

template <class Run, block_list Blocks>
result<void> copy_and_crc32c(const Run& run, const Blocks& blocks, std::span<std::uint32_t> sums) {
  return detail::run_checksums<detail::crc32c_sum, detail::checksum_use::copied>(run, blocks, sums,
                                                                                 "copy_and_crc32c");
}

template <class Run, block_list Blocks>
result<void> copy_and_digest(const Run& run, const Blocks& blocks, std::span<std::uint64_t> sums) {
  return detail::run_checksums<detail::digest_sum, detail::checksum_use::copied>(run, blocks, sums,
                                                                                 "copy_and_digest");
}

}  // namespace v0
}  // namespace llmmem
