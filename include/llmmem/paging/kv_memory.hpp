/// @file
/// Keys and values in memory: where a layout's planes begin, and copies of blocks between layouts.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/paging/kv_layout.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace llmmem {
inline namespace v0 {

/// The keys and values of a paged cache, in host memory or a device's. Owns nothing.
///
/// One allocation, or, as vLLM and SGLang have them, one for each layer, or for each layer's K and V apart:
/// then a table says where each layer's plane begins, and the layout's order the distances inside a plane.
/// What begins there is the plane's part of block 0: with `layer_first_paired` and `block_first` an entry of
/// V lies `unit_bytes(0)` behind that of K, and with `layer_first_joined` `vector_bytes(0)` behind it.
struct kv_memory {
  std::byte* data = nullptr;  ///< of all planes; not looked at where there is a table
  std::uint64_t blocks = 0;   ///< physical ones, the null block among them
  kv_layout layout{};
  /// [planes][layers]: all layers' K, then all layers' V, then the other planes. It lies where the
  /// code that looks planes up can read it: on the device, for a kernel. Null: one allocation.
  std::byte* const* plane_table = nullptr;
  /// What every entry of the table is a multiple of, a power of two, at least an element: the caller's word,
  /// since a host cannot read a device's table. Kernels' accesses are no wider.
  std::uint32_t plane_alignment = 16;
};

/// One plane of a memory, ready for a kernel: trivially copyable. `kv_plane_of` makes it.
struct kv_plane {
  std::byte* data = nullptr;                ///< of layer 0, where there is no table
  std::byte* const* layer_table = nullptr;  ///< [layers], this plane's; null: `strides.layer` apart
  plane_strides strides{};                  ///< from `plane_base` on: `base` is 0
  std::uint32_t alignment = 16;             ///< what a table's entries are multiples of
};

/// Plane `p` of a memory, 0 for K, 1 for V (`kv_layout::role_of`). The table is not read. O(1).
[[nodiscard]] constexpr kv_plane kv_plane_of(const kv_memory& memory, std::uint32_t p) noexcept {
  kv_plane out{.strides = memory.layout.strides(p, memory.blocks), .alignment = memory.plane_alignment};
  if (memory.plane_table != nullptr) {
    out.layer_table = memory.plane_table + std::size_t{p} * memory.layout.layers;
    out.strides.layer = 0;
  } else if (memory.data != nullptr) {
    out.data = memory.data + out.strides.base;
  }
  out.strides.base = 0;
  return out;
}

/// Where a layer of a plane begins; block b, token t, head h of it lie `plane.strides.offset(0, b, t, h)`
/// bytes behind. Reads a table where there is one: once for a row or a part, not for each access.
[[nodiscard]] LLMMEM_HD inline std::byte* plane_base(const kv_plane& plane, std::uint64_t layer) noexcept {
  if (plane.layer_table != nullptr) return plane.layer_table[layer];
  return plane.data + layer * plane.strides.layer;
}

namespace detail {

/// Vectors of a block of a layer, in runs of bytes that are contiguous at both ends.
struct vector_runs {
  std::uint64_t tokens = 0;  ///< whose runs begin each at its own place
  std::uint64_t heads = 0;   ///< the same, of each of these tokens
  std::uint64_t bytes = 0;   ///< of a run
};

/// The longest runs of `tokens` tokens and `heads` heads that two planes of equal vectors have in common.
[[nodiscard]] constexpr vector_runs common_runs(const plane_strides& a, const plane_strides& b,
                                                std::uint64_t tokens, std::uint64_t heads) noexcept {
  vector_runs out{.tokens = tokens, .heads = heads, .bytes = a.vector_bytes};
  const auto join_heads = [&] {
    if (out.heads != 1 && (a.head != out.bytes || b.head != out.bytes)) return;
    out.bytes *= out.heads;
    out.heads = 1;
  };
  const auto join_tokens = [&] {
    if (out.tokens != 1 && (a.token != out.bytes || b.token != out.bytes)) return;
    out.bytes *= out.tokens;
    out.tokens = 1;
  };
  join_heads();
  join_tokens();
  join_heads();
  return out;
}

}  // namespace detail

namespace detail {

/// What a copy between two layouts moves vector by vector: a plane, or planes that lie side by side at both
/// ends as one.
struct kv_copy_part {
  std::uint32_t plane = 0;  ///< the first one
  std::uint64_t vector_bytes = 0;
  std::uint32_t tokens = 0;  ///< that have vectors of their own
  std::uint32_t heads = 0;
};
struct kv_copy_parts {
  std::array<kv_copy_part, paging::plane_role_count> part{};
  std::uint32_t count = 0;

  [[nodiscard]] constexpr std::span<const kv_copy_part> all() const noexcept LLMMEM_LIFETIMEBOUND {
    return {part.data(), count};
  }
};

/// Whether the planes of two layouts that hold the same values lie side by side in the same way.
[[nodiscard]] constexpr bool have_same_records(const kv_layout& a, const kv_layout& b) noexcept {
  return a.is_joined() == b.is_joined() && a.key_scales.place == b.key_scales.place &&
         a.value_scales.place == b.value_scales.place && a.index_scales.place == b.index_scales.place;
}

/// @pre equal content fingerprints
[[nodiscard]] constexpr kv_copy_parts copy_parts_of(const kv_layout& to, const kv_layout& from) noexcept {
  kv_copy_parts out;
  const bool are_alike = have_same_records(to, from);
  for (std::uint32_t p = 0; p < from.planes(); ++p) {
    const kv_vector_run run = from.vector_run_of(p);
    if (are_alike && run.before != 0) continue;  // goes with the plane that the run begins with
    out.part[out.count] = {p, are_alike ? run.bytes : from.vector_bytes(p), from.tokens_of(p),
                           from.heads_of(p)};
    ++out.count;
  }
  return out;
}

/// A plane's part of a memory, for a copy.
[[nodiscard]] constexpr kv_plane copied_plane(const kv_memory& memory, const kv_copy_part& part) noexcept {
  kv_plane out = kv_plane_of(memory, part.plane);
  out.strides.vector_bytes = part.vector_bytes;
  return out;
}

}  // namespace detail

/// Copies the first `tokens` tokens of a block between memories whose layouts hold the same values, in
/// whatever order, and what all tokens of the block share (scales by channel, global scales). The map from
/// vectors to vectors is what a kernel would run; here it runs on the host, by the longest pieces of a
/// layer's plane that are contiguous in both.
///
/// @pre equal content fingerprints, plane tables that the host can read, both blocks are inside, `tokens` at
/// most `block_tokens`, no overlap.
/// @par Complexity   O(bytes copied).
inline void copy_kv_block(const kv_memory& to, std::uint64_t to_block, const kv_memory& from,
                          std::uint64_t from_block, std::uint64_t tokens) noexcept {
  const kv_layout& shape = from.layout;
  const detail::kv_copy_parts parts = detail::copy_parts_of(to.layout, shape);
  for (std::uint32_t i = 0; i < parts.count; ++i) {
    const detail::kv_copy_part& part = parts.part[i];
    const kv_plane source = detail::copied_plane(from, part);
    const kv_plane target = detail::copied_plane(to, part);
    const std::uint64_t own_tokens = tokens < part.tokens ? tokens : part.tokens;
    const detail::vector_runs runs =
        detail::common_runs(source.strides, target.strides, own_tokens, part.heads);
    for (std::uint64_t layer = 0; layer < shape.layers; ++layer) {
      const std::byte* const read = plane_base(source, layer);
      std::byte* const written = plane_base(target, layer);
      for (std::uint64_t token = 0; token < runs.tokens; ++token) {
        for (std::uint64_t head = 0; head < runs.heads; ++head) {
          std::memcpy(written + target.strides.offset(0, to_block, token, head),
                      read + source.strides.offset(0, from_block, token, head),
                      static_cast<std::size_t>(runs.bytes));
        }
      }
    }
  }
}

}  // namespace v0
}  // namespace llmmem
