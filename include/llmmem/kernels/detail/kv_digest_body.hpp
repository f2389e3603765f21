/// @file
/// The body of `digest_kv_blocks`.
#pragma once

#include <llmmem/kernels/block_digest.hpp>
#include <llmmem/kernels/detail/kv_checks.hpp>
#include <llmmem/kernels/divider.hpp>
#include <llmmem/kernels/errors.hpp>
#include <llmmem/kernels/items.hpp>
#include <llmmem/kernels/kv_digest.hpp>
#include <llmmem/kernels/launch.hpp>
#include <llmmem/kernels/packet.hpp>
#include <llmmem/kernels/rows.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// Bytes of a tile of a layer's plane of a block: of one group of lanes.
inline constexpr std::uint32_t kv_digest_tile = 8 * 1024;

/// The numbers of some blocks, and how many there are.
struct digested_blocks {
  const std::int32_t* number = nullptr;
  std::uint64_t count = 0;
  std::uint64_t most = 0;  ///< blocks of the memory

  [[nodiscard]] LLMMEM_HD bool is_there(std::uint64_t i) const noexcept {
    return number[i] >= 0 && static_cast<std::uint64_t>(number[i]) < most;
  }
};

LLMMEM_HD inline void write_digest(std::uint64_t& to, std::uint64_t digest) noexcept {
  store_packet<8>(reinterpret_cast<std::byte*>(&to),
                  {{static_cast<std::uint32_t>(digest), static_cast<std::uint32_t>(digest >> 32)}});
}

/// The initial digests: an item is a block.
struct kv_digest_start {
  digested_blocks blocks{};
  std::uint64_t whole = 0;  ///< of a block that is there
  std::uint64_t none = 0;   ///< of one that is not
  std::uint64_t* sums = nullptr;
  std::uint32_t* out_of_range = nullptr;

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return blocks.count; }
  LLMMEM_HD void run(std::uint64_t item) const noexcept {
    const bool is_there = blocks.is_there(item);
    if (!is_there && blocks.number[item] >= 0 && out_of_range != nullptr) raise_flag(*out_of_range);
    write_digest(sums[item], is_there ? whole : none);
  }
};

/// The bytes of a layer's plane of a block as one run of vectors: the place of each in the memory, and in the
/// packed block. Tokens or heads are outermost, as in the memory.
struct digested_plane {
  plane_strides packed{};
  plane_strides memory{};
  divider vector_bytes{};
  divider inner{};
  bool is_by_head = false;     ///< heads are outermost
  bool is_run = false;         ///< it is one run in the memory
  bool is_packed_run = false;  ///< and when packed the same

  struct place {
    std::uint64_t here = 0;    ///< from the block's begin in a layer's plane
    std::uint64_t packed = 0;  ///< from the packed block's begin
  };

  /// Returns the place of the byte at `at` of the run. @pre it begins a word of a vector
  [[nodiscard]] LLMMEM_HD place of(std::uint64_t layer, std::uint64_t at) const noexcept {
    if (is_packed_run) return {at, packed.offset(layer, 0, 0, 0) + at};
    const std::uint64_t vector = vector_bytes.quotient(at);
    const std::uint64_t in_vector = at - vector * vector_bytes.by();
    const std::uint64_t outer = inner.quotient(vector);
    const std::uint64_t rest = vector - outer * inner.by();
    const std::uint64_t token = is_by_head ? rest : outer;
    const std::uint64_t head = is_by_head ? outer : rest;
    return {is_run ? at : memory.offset(0, 0, token, head) + in_vector,
            packed.offset(layer, 0, token, head) + in_vector};
  }
};

/// The digests' parts: an item is a tile. An access reads `N` bytes; those below 8 make words of 8.
template <unsigned N>
struct kv_digest_work {
  digested_blocks blocks{};
  kv_plane plane[2]{};
  digested_plane shape[2]{};
  std::uint64_t bytes[2]{};  ///< of a layer of each plane
  std::uint32_t layers = 0;
  divider tiles{};  ///< of a layer's plane
  divider tiles_of_block{};
  std::uint64_t* sums = nullptr;

  static constexpr unsigned step = N == 16 ? 16 : 8;
  struct held {
    std::uint64_t part = 0;
  };
  using partial = std::uint64_t;

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return blocks.count * tiles_of_block.by(); }
  [[nodiscard]] LLMMEM_HD static std::uint32_t lanes() noexcept { return 32; }
  [[nodiscard]] LLMMEM_HD held take(std::uint64_t item, group_lane lane) const noexcept {
    const std::uint64_t which = tiles_of_block.quotient(item);
    if (!blocks.is_there(which)) return {};
    const std::uint64_t in_block = item - which * tiles_of_block.by();
    const std::uint64_t unit = tiles.quotient(in_block);
    const bool is_second = unit >= layers;
    const std::uint64_t layer = is_second ? unit - layers : unit;
    const kv_plane& of = plane[is_second ? 1 : 0];
    const std::uint64_t first = (in_block - unit * tiles.by()) * kv_digest_tile;
    const std::uint64_t all = bytes[is_second ? 1 : 0];
    if (first >= all) return {};
    const std::uint64_t end = all - first < kv_digest_tile ? all : first + kv_digest_tile;
    const std::byte* const from =
        plane_base(of, layer) + static_cast<std::uint64_t>(blocks.number[which]) * of.strides.block;
    return {sum(from, first, end, layer, shape[is_second ? 1 : 0], lane)};
  }
  [[nodiscard]] LLMMEM_HD static partial measure(const held& mine) noexcept { return mine.part; }
  [[nodiscard]] LLMMEM_HD static partial combine(partial a, partial b) noexcept { return a + b; }
  LLMMEM_HD void give(std::uint64_t item, group_lane lane, const held& /*mine*/,
                      partial total) const noexcept {
    const std::uint64_t which = tiles_of_block.quotient(item);
    if (lane.lane == 0 && blocks.is_there(which)) add_to(sums[which], total);
  }

 private:
  /// A lane's share of bytes [first, end) of a run: every `lanes`-th step, four at a time.
  [[nodiscard]] LLMMEM_HD static std::uint64_t sum(const std::byte* from, std::uint64_t first,
                                                   std::uint64_t end, std::uint64_t layer,
                                                   const digested_plane& shape, group_lane lane) noexcept {
    constexpr std::uint32_t at_once = 4;
    const std::uint64_t stride = std::uint64_t{lane.lanes} * step;
    std::uint64_t out = 0;
    std::uint64_t at = first + std::uint64_t{lane.lane} * step;
    for (; at + (at_once - 1) * stride < end; at += at_once * stride) {
      packet<step> in[at_once];
      std::uint64_t word[at_once];
      LLMMEM_UNROLL
      for (std::uint32_t i = 0; i < at_once; ++i) {
        const digested_plane::place place = shape.of(layer, at + i * stride);
        in[i] = read(from + place.here);
        word[i] = place.packed / 8;
      }
      LLMMEM_UNROLL
      for (std::uint32_t i = 0; i < at_once; ++i)
        out += of_packet(in[i], word[i]);
    }
    for (; at < end; at += stride) {
      const digested_plane::place place = shape.of(layer, at);
      out += of_packet(read(from + place.here), place.packed / 8);
    }
    return out;
  }
  [[nodiscard]] LLMMEM_HD static packet<step> read(const std::byte* from) noexcept {
    constexpr cache_hint how = cache_hint::streaming;
    if constexpr (N >= 8) {
      return load_packet<N, how>(from);
    } else {
      packet<8> out{};
      LLMMEM_UNROLL
      for (unsigned i = 0; i < 8 / N; ++i)
        out.words[i * N / 4] |=
            static_cast<std::uint32_t>(load_packet<N, how>(from + std::size_t{i} * N).words[0])
            << (i * N % 4 * 8);
      return out;
    }
  }
  [[nodiscard]] LLMMEM_HD static std::uint64_t of_packet(const packet<step>& in,
                                                         std::uint64_t word) noexcept {
    const std::uint64_t key = digest_key(word);
    std::uint64_t out = digest_word(in.words[0], in.words[1], key);
    if constexpr (step == 16) out += digest_word(in.words[2], in.words[3], key + digest_position);
    return out;
  }
};
static_assert(group_work<kv_digest_work<16>> && group_work<kv_digest_work<1>>);

/// Returns the alignment, up to 16, of the beginning and end of all of a memory's vectors.
[[nodiscard]] inline std::uint32_t vector_alignment(const kv_memory& memory) noexcept {
  std::uint32_t all = 16;
  for (std::uint32_t p = 0; p < memory.layout.planes(); ++p) {
    const kv_plane plane = kv_plane_of(memory, p);
    const std::uint64_t base =
        plane.layer_table != nullptr ? plane.alignment : reinterpret_cast<std::uintptr_t>(plane.data);
    all = std::min(all,
                   alignment_of(base, plane.strides.layer, plane.strides.block, plane.strides.vector_bytes));
  }
  return all;
}

/// Returns the initial digest of a block: its length, and the word of zeros after an odd number of words.
[[nodiscard]] constexpr std::uint64_t packed_digest_start(std::uint64_t bytes) noexcept {
  const std::uint64_t start = digest_start(bytes);
  return bytes % 16 == 0 ? start : start + digest_word(0, 0, digest_key(bytes / 8));
}

/// @return tiles of a layer's plane of a block, the longest.
[[nodiscard]] inline result<std::uint32_t> check_digest(const kv_memory& memory,
                                                        std::span<const std::int32_t> blocks,
                                                        std::span<const std::uint64_t> sums) noexcept {
  constexpr const char* who = "digest_kv_blocks";
  const kv_layout& layout = memory.layout;
  if (layout.layers == 0) return failure{errc::too_short, 0, 1, 0, "digest_kv_blocks: layout.layers"};
  if (layout.heads == 0) return failure{errc::too_short, 0, 1, 0, "digest_kv_blocks: layout.heads"};
  if (layout.block_tokens == 0)
    return failure{errc::too_short, 0, 1, 0, "digest_kv_blocks: layout.block_tokens"};
  if (layout.planes() != layout.kv_planes())
    return failure{errc::unsupported_layout, 0, layout.kv_planes(), layout.planes(), who};
  std::uint64_t longest = 0;
  for (std::uint32_t p = 0; p < layout.planes(); ++p) {
    const std::uint64_t bytes = layout.vector_bytes(p);
    if (bytes % 8 != 0 || bytes == 0) return failure{errc::bad_granularity, 0, bytes, 8, who};
    longest = std::max(longest, layout.unit_bytes(p));
  }
  constexpr std::uint64_t most = std::numeric_limits<std::int32_t>::max();
  if (longest > most) return failure{errc::past_the_bytes, 0, longest, most, who};
  const std::uint64_t tiles = std::max<std::uint64_t>((longest + kv_digest_tile - 1) / kv_digest_tile, 1);
  const std::uint64_t all = std::uint64_t{layout.layers} * layout.planes();
  if (all > most / tiles)
    return failure{errc::past_the_bytes, 0, layout.block_bytes(), most / tiles * tiles * kv_digest_tile, who};
  if (sums.size() < blocks.size())
    return failure{errc::too_short, 0, blocks.size(), sums.size(), "digest_kv_blocks: sums"};
  if (blocks.empty()) return static_cast<std::uint32_t>(tiles);
  if (blocks.data() == nullptr)
    return failure{errc::too_short, 0, blocks.size(), 0, "digest_kv_blocks: blocks"};
  if (sums.data() == nullptr) return failure{errc::too_short, 0, blocks.size(), 0, "digest_kv_blocks: sums"};
  const memory_names names{"digest_kv_blocks: memory", "digest_kv_blocks: memory.plane_alignment"};
  if (auto there = check_memory(memory, names); !there) return there.error();
  return static_cast<std::uint32_t>(tiles);
}

/// Whether a layer's plane of a block is one run of bytes at both ends.
[[nodiscard]] constexpr bool is_one_run(const plane_strides& a, const plane_strides& b,
                                        const kv_layout& layout) noexcept {
  const vector_runs runs = common_runs(a, b, layout.block_tokens, layout.heads);
  return runs.tokens * runs.heads == 1;
}

template <unsigned N, class Run>
result<void> run_kv_digest(const Run& run, const kv_memory& memory, const digested_blocks& blocks,
                           std::uint32_t tiles, std::uint64_t* sums) {
  const kv_layout& layout = memory.layout;
  const kv_layout packed = layout.packed();
  kv_digest_work<N> work{.blocks = blocks, .layers = layout.layers, .tiles = divider(tiles), .sums = sums};
  work.tiles_of_block = divider(tiles * layout.layers * layout.planes());
  for (std::uint32_t p = 0; p < layout.planes(); ++p) {
    work.plane[p] = kv_plane_of(memory, p);
    work.bytes[p] = layout.unit_bytes(p);
    digested_plane& shape = work.shape[p];
    shape.packed = packed.strides(p, 1);
    shape.memory = work.plane[p].strides;
    shape.vector_bytes = divider(static_cast<std::uint32_t>(layout.vector_bytes(p)));
    shape.is_by_head = layout.heads_in_block == paging::head_order::hnd;
    shape.inner = divider(shape.is_by_head ? layout.block_tokens : layout.heads);
    shape.is_run = is_one_run(shape.memory, shape.memory, layout);
    shape.is_packed_run = is_one_run(shape.memory, shape.packed, layout);
  }
  return run.each(work);
}

}  // namespace detail

template <class Run>
result<void> digest_kv_blocks(const Run& run, const kv_memory& memory, std::span<const std::int32_t> blocks,
                              std::span<std::uint64_t> sums, std::uint32_t* out_of_range) {
  const auto tiles = detail::check_digest(memory, blocks, sums);
  if (!tiles) return tiles.error();
  if (blocks.empty()) return {};
  const detail::digested_blocks numbers{blocks.data(), blocks.size(), memory.blocks};
  const detail::kv_digest_start start{numbers, detail::packed_digest_start(memory.layout.block_bytes()),
                                      detail::digest_start(0), sums.data(), out_of_range};
  if (auto done = run.each(start); !done) return done;
  const std::uint32_t aligned = detail::vector_alignment(memory);
  if (aligned == 16) return detail::run_kv_digest<16>(run, memory, numbers, *tiles, sums.data());
  if (aligned == 8) return detail::run_kv_digest<8>(run, memory, numbers, *tiles, sums.data());
  if (aligned == 4) return detail::run_kv_digest<4>(run, memory, numbers, *tiles, sums.data());
  return detail::run_kv_digest<1>(run, memory, numbers, *tiles, sums.data());
}

}  // namespace v0
}  // namespace llmmem
