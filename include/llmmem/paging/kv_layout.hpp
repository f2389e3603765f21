/// @file
/// Describes how keys and values are laid out in memory, for host, device and disk alike.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/paging/kv_forms.hpp>

#include <array>
#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// The distances in bytes within one plane: trivially copyable, for kernels. If tokens or heads share a
/// vector, the distance between them is 0, so `offset` works for each of them.
struct plane_strides {
  std::uint64_t base = 0;
  std::uint64_t layer = 0;
  std::uint64_t block = 0;
  std::uint64_t token = 0;
  std::uint64_t head = 0;
  std::uint64_t vector_bytes = 0;  ///< one head of one token: contiguous in any order

  /// Returns where the vector of a head of a token is.
  [[nodiscard]] LLMMEM_HD constexpr std::uint64_t offset(std::uint64_t in_layer, std::uint64_t in_block,
                                                         std::uint64_t at_token,
                                                         std::uint64_t of_head) const noexcept {
    return base + in_layer * layer + in_block * block + at_token * token + of_head * head;
  }
};

namespace detail {

/// The fields of a layout as numbers: the input of its fingerprints and the contents of a stream's record.
inline constexpr std::size_t kv_layout_words = 39;
using kv_layout_record = std::array<std::uint64_t, kv_layout_words>;

/// A run of planes whose vectors of the same head and token are adjacent: its bytes, and the bytes before one
/// plane.
struct kv_vector_run {
  std::uint64_t bytes = 0;
  std::uint64_t before = 0;
};

}  // namespace detail

/// The layout of a model's keys and values in blocks, and the identity of those contents.
///
/// `content_fingerprint` is equal for layouts that hold the same values in any order: `copy_kv_block` may
/// copy blocks between them. `fingerprint` is equal only if the order is equal too: then bytes may be copied
/// unchanged. Nothing else distinguishes two layouts with the same shape and different orders, two models
/// with the same shape, or two ranks with different heads or tokens. Caches connected despite
/// this difference have silently served wrong KV.
///
///     constexpr kv_layout layout{.layers = 32, .heads = 8, .head_dim = 128, .block_tokens = 16};
///     static_assert(layout.block_bytes() == 2 * 32 * 8 * 128 * 16 * 2);
///
/// A layout is a list of planes: K, then V if there are values, then the others that `plane_role` names. All
/// of them are in the block and move with it. Functions that take a plane number require one below
/// `planes()`.
///
/// @par Errors   `checked` throws; all else requires a layout that `checked` accepted.
struct kv_layout {
  std::uint32_t layers = 0;
  std::uint32_t heads = 0;      ///< KV heads in a block (of one rank: `part`); 1 for MLA
  std::uint32_t head_dim = 0;   ///< elements of a key; for MLA the latent, with or without the rotary part
  std::uint32_t value_dim = 0;  ///< elements of a value; 0: as many as a key
  std::uint32_t block_tokens = 16;
  bool has_values = true;  ///< false if there are only keys (MLA)
  dtype element = dtype::bf16;
  paging::head_order heads_in_block = paging::head_order::nhd;
  block_order order = block_order::layer_first;
  /// Identifies the model in addition to the shape: a digest of model, revision and rotary embedding that the
  /// engine computes. 0: unknown.
  std::uint64_t model = 0;
  paging::optional_dtype value_element{};  ///< of a value, if values are stored differently from keys
  paging::scale_form key_scales{};
  paging::scale_form value_scales{};
  /// Elements of a key's rotary part, if it is stored separately in its own type (MLA: `fp8_ds_mla`,
  /// `nvfp4_ds_mla`); it is adjacent to the key. 0: there is none, or `head_dim` includes it.
  std::uint32_t rotary_dim = 0;
  dtype rotary_element = dtype::bf16;
  std::uint32_t index_dim = 0;  ///< elements of an indexer's key, one per token; 0: there is none
  dtype index_element = dtype::fp8_e4m3;
  paging::scale_form index_scales{};
  paging::kv_part part{};  ///< which heads and tokens of the model these are

  friend constexpr bool operator==(const kv_layout&, const kv_layout&) noexcept = default;

  /// The number of planes of all roles.
  [[nodiscard]] constexpr std::uint32_t planes() const noexcept;
  /// The number of planes of keys and values alone: 0 is K and, if there are values, 1 is V.
  [[nodiscard]] constexpr std::uint32_t kv_planes() const noexcept { return has_values ? 2 : 1; }
  [[nodiscard]] constexpr bool has(paging::plane_role role) const noexcept;
  /// Returns what plane `p` holds: 0 is K, and 1 is V if there are values.
  [[nodiscard]] constexpr paging::plane_role role_of(std::uint32_t p) const noexcept;

  /// Returns how an element of plane `p` is stored.
  [[nodiscard]] constexpr dtype element_of(std::uint32_t p) const noexcept { return element_of(role_of(p)); }
  /// Returns the elements of a vector of plane `p`.
  [[nodiscard]] constexpr std::uint64_t vector_elements(std::uint32_t p) const noexcept {
    return elements_of(role_of(p));
  }
  [[nodiscard]] constexpr std::uint64_t vector_bytes(std::uint32_t p) const noexcept {
    return vector_bytes_of(role_of(p));
  }
  /// Tokens with their own vectors in plane `p`: `block_tokens`, or 1 if all tokens of a block share one.
  [[nodiscard]] constexpr std::uint32_t tokens_of(std::uint32_t p) const noexcept {
    return tokens_of(role_of(p));
  }
  /// Heads with their own vectors in plane `p`.
  [[nodiscard]] constexpr std::uint32_t heads_of(std::uint32_t p) const noexcept {
    return heads_of(role_of(p));
  }
  /// Bytes of one layer's plane of one block.
  [[nodiscard]] constexpr std::uint64_t unit_bytes(std::uint32_t p) const noexcept {
    return unit_bytes_of(role_of(p));
  }
  /// Bytes of one layer of one block, all planes.
  [[nodiscard]] constexpr std::uint64_t layer_bytes() const noexcept;
  /// Bytes of one block, all layers.
  [[nodiscard]] constexpr std::uint64_t block_bytes() const noexcept { return layer_bytes() * layers; }
  /// Bytes of `blocks` blocks, including the null block.
  [[nodiscard]] constexpr std::uint64_t total_bytes(std::uint64_t blocks) const {
    return checked_multiply(block_bytes(), blocks, "kv_layout: block bytes x blocks");
  }
  /// Tokens of a sequence that a block covers: `block_tokens` of each context-parallel rank.
  [[nodiscard]] constexpr std::uint64_t virtual_block_tokens() const noexcept {
    return std::uint64_t{block_tokens} * part.cp_size;
  }

  /// The number of contiguous pieces of memory of one block: the cost of copying it. The same pieces of
  /// neighbouring blocks are adjacent.
  [[nodiscard]] constexpr std::uint64_t fragments() const noexcept;

  /// Whether a vector of K and its V are adjacent.
  [[nodiscard]] constexpr bool is_joined() const noexcept {
    return has_values &&
           (order == block_order::layer_first_joined || order == block_order::block_first_joined);
  }

  /// Returns the distances in a memory of `blocks` blocks.
  [[nodiscard]] constexpr plane_strides strides(std::uint32_t p, std::uint64_t blocks) const noexcept;

  /// Returns the layout of the same values for disks and networks: block by block, tokens outermost, scales
  /// after the values of their plane.
  [[nodiscard]] constexpr kv_layout packed() const noexcept;

  /// Equal for layouts that hold the same values in any order. Never 0.
  ///
  /// Ranks that hold the same heads hold the same values: a model may have fewer heads than there are ranks.
  [[nodiscard]] constexpr std::uint64_t content_fingerprint() const noexcept;

  /// Equal for equal layouts. Never 0.
  [[nodiscard]] constexpr std::uint64_t fingerprint() const noexcept;

  /// Returns the layout itself if it is valid.
  /// @throws length_error for a dimension of 0, vectors that are not a whole number of bytes, runs that do
  ///   not divide a vector, and blocks past 2^63 - 1 bytes; argument_error for an undefined element type,
  ///   order or form (from a damaged file or another version), for scales that cannot be at the given place,
  ///   and for a part that no rank holds.
  [[nodiscard]] constexpr const kv_layout& checked() const;

  /// Returns the run of planes adjacent to the vectors of plane `p`.
  [[nodiscard]] constexpr detail::kv_vector_run vector_run_of(std::uint32_t p) const noexcept;

  /// Returns the input of the fingerprints. A field without meaning here (a run's length if scales are per
  /// vector) counts as 0.
  [[nodiscard]] constexpr detail::kv_layout_record record() const noexcept;

 private:
  struct placement;
  struct plane_list;

  [[nodiscard]] constexpr const paging::scale_form& scales_of(paging::plane_role role) const noexcept;
  [[nodiscard]] constexpr dtype element_of(paging::plane_role role) const noexcept;
  [[nodiscard]] constexpr std::uint64_t elements_of(paging::plane_role role) const noexcept;
  [[nodiscard]] constexpr std::uint32_t tokens_of(paging::plane_role role) const noexcept;
  [[nodiscard]] constexpr std::uint32_t heads_of(paging::plane_role role) const noexcept;
  [[nodiscard]] constexpr std::uint64_t vector_bytes_of(paging::plane_role role) const noexcept {
    return elements_of(role) * bits_of(element_of(role)) / 8;
  }
  [[nodiscard]] constexpr std::uint64_t unit_bytes_of(paging::plane_role role) const noexcept {
    return vector_bytes_of(role) * heads_of(role) * tokens_of(role);
  }
  [[nodiscard]] constexpr plane_list planes_in_memory() const noexcept;
  [[nodiscard]] constexpr placement place_of(paging::plane_role role) const noexcept;
  [[nodiscard]] constexpr plane_strides inside_unit(plane_strides out, paging::plane_role role,
                                                    std::uint64_t record) const noexcept;
  [[nodiscard]] constexpr plane_strides among_vectors(plane_strides out, paging::plane_role role,
                                                      std::uint64_t record) const noexcept;
  [[nodiscard]] static constexpr std::uint64_t digest(const kv_layout& of) noexcept;
};

}  // namespace v0
}  // namespace llmmem

#include <llmmem/paging/detail/kv_layout_body.hpp>
#include <llmmem/paging/detail/kv_layout_check.hpp>
#include <llmmem/paging/kv_memory.hpp>
