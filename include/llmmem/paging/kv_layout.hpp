/// @file
/// One description of how keys and values lie in memory, for host, device and disk alike.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/hash/siphash.hpp>
#include <llmmem/model/dtype.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

namespace llmmem {
inline namespace v0 {

namespace paging {

/// What varies slowest inside a block of one layer.
enum class head_order : std::uint8_t {
  nhd,  ///< [token][head][element]: a token's heads side by side
  hnd,  ///< [head][token][element]: a head's tokens side by side
};

}  // namespace paging

using head_order [[deprecated("its name is paging::head_order")]] = paging::head_order;

/// What varies slowest over all. Inside a block of a layer, `head_order` tells which of token and head is the
/// outer one and which the inner.
enum class block_order : std::uint8_t {
  layer_first,         ///< [layer][K or V][block]: a tensor a layer and plane (FlashInfer's K and V apart)
  layer_first_paired,  ///< [layer][block][K or V]: a tensor a layer, a block's K and V together
  block_first,         ///< [block][layer][K or V]: a block whole (vLLM's cross-layer blocks)
  block_first_planes,  ///< [block][K or V][layer]: a block whole, its V behind all its K (LMCache's chunks)
  block_first_apart,   ///< [K or V][block][layer] (SGLang's page_first_direct)
  layer_between,       ///< [K or V][block][outer][layer][inner] (with nhd SGLang's page_first)
  layer_last,          ///< [K or V][block][outer][inner][layer] (with hnd SGLang's page_head)
};

/// How many orders there are.
inline constexpr std::uint32_t block_order_count = 7;
static_assert(static_cast<std::uint32_t>(block_order::layer_last) + 1 == block_order_count);

/// Distances in bytes of one plane, K or V: trivially copyable, for kernels.
struct plane_strides {
  std::uint64_t base = 0;
  std::uint64_t layer = 0;
  std::uint64_t block = 0;
  std::uint64_t token = 0;
  std::uint64_t head = 0;
  std::uint64_t vector_bytes = 0;  ///< of one head of one token: what is contiguous in any case

  /// Where the vector of a head of a token lies.
  [[nodiscard]] LLMMEM_HD constexpr std::uint64_t offset(std::uint64_t in_layer, std::uint64_t in_block,
                                                         std::uint64_t at_token,
                                                         std::uint64_t of_head) const noexcept {
    return base + in_layer * layer + in_block * block + at_token * token + of_head * head;
  }
};

/// How the keys and values of a model lie in blocks, and what they are.
///
/// `content_fingerprint` tells whether two layouts hold the same values, however they lie: blocks may be
/// copied between them by `copy_kv_block`. `fingerprint` tells whether they lie alike as well: then bytes may
/// be copied as they are. Two layouts with the same shape and another order, or two models with the same
/// shape, look alike to everything else; caches that met under such a mistake have served wrong KV in
/// silence.
///
///     constexpr kv_layout layout{.layers = 32, .heads = 8, .head_dim = 128, .block_tokens = 16};
///     static_assert(layout.block_bytes() == 2 * 32 * 8 * 128 * 16 * 2);
///
/// @par Errors   `checked` throws; the rest requires a layout that it let pass.
struct kv_layout {
  std::uint32_t layers = 0;
  std::uint32_t heads = 0;      ///< KV heads; 1 for MLA
  std::uint32_t head_dim = 0;   ///< elements of a key; for MLA the latent and the rotary part together
  std::uint32_t value_dim = 0;  ///< elements of a value; 0: as many as a key
  std::uint32_t block_tokens = 16;
  bool has_values = true;  ///< false where one plane holds all there is (MLA)
  dtype element = dtype::bf16;
  paging::head_order heads_in_block = paging::head_order::nhd;
  block_order order = block_order::layer_first;
  /// What the values belong to beside the shape: a digest of model, revision and rotary embedding, of the
  /// engine's making. 0: not told.
  std::uint64_t model = 0;

  friend constexpr bool operator==(const kv_layout&, const kv_layout&) noexcept = default;

  [[nodiscard]] constexpr std::uint32_t planes() const noexcept { return has_values ? 2 : 1; }

  /// Elements of a vector of plane `p`: 0 for K, 1 for V.
  [[nodiscard]] constexpr std::uint64_t vector_elements(std::uint32_t p) const noexcept {
    return p == 0 || value_dim == 0 ? head_dim : value_dim;
  }
  [[nodiscard]] constexpr std::uint64_t vector_bytes(std::uint32_t p) const noexcept {
    return vector_elements(p) * bits_of(element) / 8;
  }
  /// One layer's plane of one block.
  [[nodiscard]] constexpr std::uint64_t unit_bytes(std::uint32_t p) const noexcept {
    return vector_bytes(p) * heads * block_tokens;
  }
  /// One layer of one block.
  [[nodiscard]] constexpr std::uint64_t layer_bytes() const noexcept {
    return unit_bytes(0) + (has_values ? unit_bytes(1) : 0);
  }
  /// One block, all layers.
  [[nodiscard]] constexpr std::uint64_t block_bytes() const noexcept { return layer_bytes() * layers; }
  /// `blocks` blocks, the null block among them.
  [[nodiscard]] constexpr std::uint64_t total_bytes(std::uint64_t blocks) const {
    return checked_multiply(block_bytes(), blocks, "kv_layout: block bytes x blocks");
  }

  /// Pieces of contiguous memory that one block is made of: what a copy of it costs. Neighbouring blocks lie
  /// side by side in each.
  [[nodiscard]] constexpr std::uint64_t fragments() const noexcept {
    switch (order) {
      case block_order::layer_first:
        return std::uint64_t{layers} * planes();
      case block_order::layer_first_paired:
        return layers;
      case block_order::block_first:
      case block_order::block_first_planes:
        return 1;
      case block_order::block_first_apart:
      case block_order::layer_between:
      case block_order::layer_last:
        return planes();
    }
    return 0;
  }

  /// Distances in a memory of `blocks` blocks.
  [[nodiscard]] constexpr plane_strides strides(std::uint32_t p, std::uint64_t blocks) const noexcept {
    const std::uint64_t unit = unit_bytes(p);
    const std::uint64_t before = p == 0 ? 0 : unit_bytes(0);  // V behind K
    switch (order) {
      case block_order::layer_first:
        return inside_unit({before * blocks, layer_bytes() * blocks, unit}, p);
      case block_order::layer_first_paired:
        return inside_unit({before, layer_bytes() * blocks, layer_bytes()}, p);
      case block_order::block_first:
        return inside_unit({before, layer_bytes(), block_bytes()}, p);
      case block_order::block_first_planes:
        return inside_unit({before * layers, unit, block_bytes()}, p);
      case block_order::block_first_apart:
        return inside_unit({before * layers * blocks, unit, unit * layers}, p);
      case block_order::layer_between:
      case block_order::layer_last:
        return among_vectors({before * layers * blocks, 0, unit * layers}, p);
    }
    return {};
  }

  /// The same values as disks and networks carry them: block by block, tokens outermost.
  [[nodiscard]] constexpr kv_layout packed() const noexcept {
    kv_layout out = *this;
    out.order = block_order::block_first;
    out.heads_in_block = paging::head_order::nhd;
    return out;
  }

  /// Equal for layouts that hold the same values, whatever their order. Never 0.
  [[nodiscard]] constexpr std::uint64_t content_fingerprint() const noexcept { return digest(packed()) | 1U; }

  /// Equal for equal layouts. Never 0.
  [[nodiscard]] constexpr std::uint64_t fingerprint() const noexcept { return digest(*this) | 1U; }

  /// The layout itself.
  /// @throws length_error for a dimension of 0, for vectors that are no whole number of bytes and for blocks
  ///         past 2^63 - 1 bytes; argument_error for an element or an order of a number that none has, as a
  ///         damaged file or another version may bring it.
  [[nodiscard]] constexpr const kv_layout& checked() const {
    const auto known = [](bool is_known, const char* name, unsigned number) {
      if (is_known) return;
      throw argument_error(std::string("kv_layout: there is no ") + name + " of number " +
                           std::to_string(number) + "; was it written by a newer version?");
    };
    known(bits_of(element) != 0, "element", static_cast<unsigned>(element));
    known(heads_in_block <= paging::head_order::hnd, "head_order", static_cast<unsigned>(heads_in_block));
    known(static_cast<std::uint32_t>(order) < block_order_count, "block_order", static_cast<unsigned>(order));
    const auto positive = [](std::uint64_t number, const char* name) {
      if (number == 0) throw length_error(std::string("kv_layout: ") + name + " is 0; at least 1 is needed");
    };
    positive(layers, "layers");
    positive(heads, "heads");
    positive(head_dim, "head_dim");
    positive(block_tokens, "block_tokens");
    for (std::uint32_t p = 0; p < planes(); ++p) {
      const std::uint64_t bits = vector_elements(p) * bits_of(element);
      if (bits % 8 != 0) {
        throw length_error("kv_layout: " + std::to_string(vector_elements(p)) + " elements of " +
                           std::to_string(bits_of(element)) + " bits are no whole number of bytes");
      }
    }
    std::uint64_t bytes = 0;
    for (std::uint32_t p = 0; p < planes(); ++p) {
      std::uint64_t plane = checked_multiply(vector_bytes(p), heads, "kv_layout: bytes of a token");
      plane = checked_multiply(plane, block_tokens, "kv_layout: bytes of a block of a layer");
      bytes = checked_add(bytes, checked_multiply(plane, layers, "kv_layout: bytes of a block"),
                          "kv_layout: bytes of a block");
    }
    return *this;
  }

 private:
  /// Adds what lies inside a block of a layer that is one run: its vectors.
  [[nodiscard]] constexpr plane_strides inside_unit(plane_strides out, std::uint32_t p) const noexcept {
    const bool is_nhd = heads_in_block == paging::head_order::nhd;
    out.vector_bytes = vector_bytes(p);
    out.head = is_nhd ? out.vector_bytes : out.vector_bytes * block_tokens;
    out.token = is_nhd ? out.vector_bytes * heads : out.vector_bytes;
    return out;
  }
  /// The same where layers lie between a block's vectors.
  [[nodiscard]] constexpr plane_strides among_vectors(plane_strides out, std::uint32_t p) const noexcept {
    out = inside_unit(out, p);
    const bool is_last = order == block_order::layer_last;
    const bool is_nhd = heads_in_block == paging::head_order::nhd;
    std::uint64_t& inner = is_nhd ? out.head : out.token;
    std::uint64_t& outer = is_nhd ? out.token : out.head;
    out.layer = is_last ? out.vector_bytes : outer;
    outer *= layers;
    if (is_last) inner *= layers;
    return out;
  }
  /// SipHash over the fields, one a word, under a key of its own: stored with data, so never to change. The
  /// first word is the version of this list. Without values there is no length of theirs to differ by.
  [[nodiscard]] static constexpr std::uint64_t digest(const kv_layout& of) noexcept {
    detail::siphash_state<2, 4> state({.low = 0x6B76'206C'6179'6F75ULL, .high = 0x7420'7631});
    const std::array<std::uint64_t, 11> words{1,
                                              of.layers,
                                              of.heads,
                                              of.head_dim,
                                              of.has_values ? of.vector_elements(1) : of.head_dim,
                                              of.block_tokens,
                                              of.has_values ? 1U : 0U,
                                              static_cast<std::uint64_t>(of.element),
                                              static_cast<std::uint64_t>(of.heads_in_block),
                                              static_cast<std::uint64_t>(of.order),
                                              of.model};
    for (const std::uint64_t word : words)
      state.absorb(word);
    return state.finish(0, words.size() * sizeof(std::uint64_t)).low;
  }
};

/// The keys and values of a paged cache, in host memory or a device's. Owns nothing.
///
/// One allocation, or, as vLLM and SGLang have them, one for each layer, or for each layer's K and V apart:
/// then a table says where each layer's plane begins, and the layout's order the distances inside a plane.
/// What begins there is the plane's part of block 0: with `layer_first_paired` and `block_first` an entry of
/// V lies `unit_bytes(0)` behind that of K.
struct kv_memory {
  std::byte* data = nullptr;  ///< of all planes; not looked at where there is a table
  std::uint64_t blocks = 0;   ///< physical ones, the null block among them
  kv_layout layout{};
  /// [planes][layers]: all layers' K, then all layers' V. In the memory of whoever looks planes up: of a
  /// device, where a device's kernel does. Null: one allocation.
  std::byte* const* plane_table = nullptr;
  /// What every entry of the table is a multiple of, a power of two, at least an element: the caller's word,
  /// since a host cannot read a device's table. Kernels' accesses are no wider.
  std::uint32_t plane_alignment = 16;
};

/// One plane of a memory, K or V, ready for a kernel: trivially copyable. `kv_plane_of` makes it.
struct kv_plane {
  std::byte* data = nullptr;                ///< of layer 0, where there is no table
  std::byte* const* layer_table = nullptr;  ///< [layers], this plane's; null: `strides.layer` apart
  plane_strides strides{};                  ///< from `plane_base` on: `base` is 0
  std::uint32_t alignment = 16;             ///< what a table's entries are multiples of
};

/// Plane `p` of a memory, 0 for K, 1 for V. The table is not read. O(1).
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

/// Copies the first `tokens` tokens of a block between memories whose layouts hold the same values, in
/// whatever order. The map from vectors to vectors is what a kernel would run; here it runs on the host, by
/// the longest pieces of a layer's plane that are contiguous in both.
///
/// @pre equal content fingerprints, plane tables that the host can read, both blocks are inside, `tokens` at
/// most `block_tokens`, no overlap.
/// @par Complexity   O(bytes copied).
inline void copy_kv_block(const kv_memory& to, std::uint64_t to_block, const kv_memory& from,
                          std::uint64_t from_block, std::uint64_t tokens) noexcept {
  const kv_layout& shape = from.layout;
  for (std::uint32_t p = 0; p < shape.planes(); ++p) {
    const kv_plane source = kv_plane_of(from, p);
    const kv_plane target = kv_plane_of(to, p);
    const detail::vector_runs runs = detail::common_runs(source.strides, target.strides, tokens, shape.heads);
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
