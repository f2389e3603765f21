/// @file
/// Keys and values in memory: where a layout's planes begin, and block copies between layouts.
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

/// The keys and values of a paged cache, in host or device memory. A non-owning view.
///
/// The memory is one allocation or, as in vLLM and SGLang, one per layer, or one per layer for each of K and
/// V. With several allocations, a table says where each layer's plane begins; the layout's order gives the
/// distances inside a plane. Each entry points to the plane's part of block 0: with `layer_first_paired` and
/// `block_first`, an entry of V is `unit_bytes(0)` after that of K, and with `layer_first_joined`
/// `vector_bytes(0)` after it.
struct kv_memory {
  std::byte* data = nullptr;  ///< of all planes; ignored if there is a table
  std::uint64_t blocks = 0;   ///< physical blocks, including the null block
  kv_layout layout{};
  /// [planes][layers]: all layers' K, then all layers' V, then the other planes. The table must be readable
  /// by the code that looks up planes: on the device, for a kernel. Null: one allocation.
  std::byte* const* plane_table = nullptr;
  /// Every table entry is a multiple of this power of two, which is at least the size of an element. The
  /// caller guarantees it, because a host cannot read a device's table. Kernels use no wider accesses.
  std::uint32_t plane_alignment = 16;
};

/// One plane of a memory, ready for a kernel: trivially copyable. Made by `kv_plane_of`.
struct kv_plane {
  std::byte* data = nullptr;                ///< of layer 0, if there is no table
  std::byte* const* layer_table = nullptr;  ///< [layers], for this plane; null: layers are `strides.layer`
                                            ///< apart
  plane_strides strides{};                  ///< relative to `plane_base`: `base` is 0
  std::uint32_t alignment = 16;             ///< table entries are multiples of it
};

/// Returns plane `p` of a memory: 0 for K, 1 for V (`kv_layout::role_of`). Does not read the table. O(1).
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

/// Returns where a layer of a plane begins; its block b, token t, head h are
/// `plane.strides.offset(0, b, t, h)` bytes further on. Reads the table if there is one: call it once per row
/// or part, not per access.
[[nodiscard]] LLMMEM_HD inline std::byte* plane_base(const kv_plane& plane, std::uint64_t layer) noexcept {
  if (plane.layer_table != nullptr) return plane.layer_table[layer];
  return plane.data + layer * plane.strides.layer;
}

namespace detail {

/// Vectors of a block of a layer, in runs of bytes that are contiguous in both layouts.
struct vector_runs {
  std::uint64_t tokens = 0;  ///< tokens whose runs begin at separate places
  std::uint64_t heads = 0;   ///< heads with separate runs in each of these tokens
  std::uint64_t bytes = 0;   ///< of a run
};

/// Returns the longest runs of `tokens` tokens and `heads` heads that two planes with equal vectors share.
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

/// The unit that a copy between two layouts moves vector by vector: a plane, or a run of planes that are
/// adjacent in both.
struct kv_copy_part {
  std::uint32_t plane = 0;  ///< the first plane
  std::uint64_t vector_bytes = 0;
  std::uint32_t tokens = 0;  ///< tokens with their own vectors
  std::uint32_t heads = 0;
};
struct kv_copy_parts {
  std::array<kv_copy_part, paging::plane_role_count> part{};
  std::uint32_t count = 0;

  [[nodiscard]] constexpr std::span<const kv_copy_part> all() const noexcept LLMMEM_LIFETIMEBOUND {
    return {part.data(), count};
  }
};

/// Whether the planes of two layouts with the same values are adjacent in the same way.
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
    if (are_alike && run.before != 0) continue;  // copied with the first plane of the run
    out.part[out.count] = {p, are_alike ? run.bytes : from.vector_bytes(p), from.tokens_of(p),
                           from.heads_of(p)};
    ++out.count;
  }
  return out;
}

/// Returns a plane's part of a memory, for a copy.
[[nodiscard]] constexpr kv_plane copied_plane(const kv_memory& memory, const kv_copy_part& part) noexcept {
  kv_plane out = kv_plane_of(memory, part.plane);
  out.strides.vector_bytes = part.vector_bytes;
  return out;
}

}  // namespace detail

/// Copies the first `tokens` tokens of a block between memories whose layouts hold the same values in any
/// order, with what all tokens of the block share (scales by channel, global scales). It uses the same map
/// from vectors to vectors as a kernel, but runs on the host, in the longest pieces of a layer's plane that
/// are contiguous in both.
///
/// @pre equal content fingerprints, plane tables that the host can read, both blocks inside their memory,
///   `tokens` at most `block_tokens`, no overlap.
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
