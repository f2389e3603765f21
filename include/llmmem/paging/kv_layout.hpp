/// @file
/// One description of how keys and values lie in memory, for host, device and disk alike.
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

/// Distances in bytes of one plane: trivially copyable, for kernels. Of what a block has once for all tokens
/// or heads, the distance between tokens or heads is 0, so that `offset` finds it for each of them.
struct plane_strides {
  std::uint64_t base = 0;
  std::uint64_t layer = 0;
  std::uint64_t block = 0;
  std::uint64_t token = 0;
  std::uint64_t head = 0;
  std::uint64_t vector_bytes = 0;  ///< of one head of one token: contiguous in any order

  /// Where the vector of a head of a token lies.
  [[nodiscard]] LLMMEM_HD constexpr std::uint64_t offset(std::uint64_t in_layer, std::uint64_t in_block,
                                                         std::uint64_t at_token,
                                                         std::uint64_t of_head) const noexcept {
    return base + in_layer * layer + in_block * block + at_token * token + of_head * head;
  }
};

namespace detail {

/// What a layout says, one number a field: what its fingerprints are made of, and what a stream carries.
inline constexpr std::size_t kv_layout_words = 39;
using kv_layout_record = std::array<std::uint64_t, kv_layout_words>;

/// The planes whose vectors of a head of a token lie side by side: their bytes, and those before one of them.
struct kv_vector_run {
  std::uint64_t bytes = 0;
  std::uint64_t before = 0;
};

}  // namespace detail

/// How the keys and values of a model lie in blocks, and what they are.
///
/// `content_fingerprint` tells whether two layouts hold the same values, however they lie: blocks may be
/// copied between them by `copy_kv_block`. `fingerprint` tells whether they lie alike as well: then bytes may
/// be copied as they are. Two layouts with the same shape and another order, two models with the same shape,
/// or two ranks with other heads or tokens look alike to everything else; caches that met under such a
/// mistake have served wrong KV in silence.
///
///     constexpr kv_layout layout{.layers = 32, .heads = 8, .head_dim = 128, .block_tokens = 16};
///     static_assert(layout.block_bytes() == 2 * 32 * 8 * 128 * 16 * 2);
///
/// A layout is a list of planes: K, V where there are values, and what `plane_role` names besides. All of
/// them lie in the block and travel with it. Functions that take a plane's number require one below
/// `planes()`.
///
/// @par Errors   `checked` throws; the rest requires a layout that it let pass.
struct kv_layout {
  std::uint32_t layers = 0;
  std::uint32_t heads = 0;      ///< KV heads that a block holds (of one rank: `part`); 1 for MLA
  std::uint32_t head_dim = 0;   ///< elements of a key; for MLA the latent, with the rotary part or without
  std::uint32_t value_dim = 0;  ///< elements of a value; 0: as many as a key
  std::uint32_t block_tokens = 16;
  bool has_values = true;  ///< false where the keys are all there is (MLA)
  dtype element = dtype::bf16;
  paging::head_order heads_in_block = paging::head_order::nhd;
  block_order order = block_order::layer_first;
  /// What the values belong to beside the shape: a digest of model, revision and rotary embedding, of the
  /// engine's making. 0: not told.
  std::uint64_t model = 0;
  paging::optional_dtype value_element{};  ///< of a value, where it is stored otherwise than a key
  paging::scale_form key_scales{};
  paging::scale_form value_scales{};
  /// Elements of a key's rotary part, where it is stored beside the rest in a type of its own (MLA:
  /// `fp8_ds_mla`, `nvfp4_ds_mla`); it lies in one run with the key. 0: there is none, or `head_dim` has it.
  std::uint32_t rotary_dim = 0;
  dtype rotary_element = dtype::bf16;
  std::uint32_t index_dim = 0;  ///< elements of an indexer's key, one for each token; 0: there is none
  dtype index_element = dtype::fp8_e4m3;
  paging::scale_form index_scales{};
  paging::kv_part part{};  ///< which heads and tokens of the model these are

  friend constexpr bool operator==(const kv_layout&, const kv_layout&) noexcept = default;

  /// Planes of all roles.
  [[nodiscard]] constexpr std::uint32_t planes() const noexcept;
  /// Planes of keys and values alone: 0 and, where there are values, 1.
  [[nodiscard]] constexpr std::uint32_t kv_planes() const noexcept { return has_values ? 2 : 1; }
  [[nodiscard]] constexpr bool has(paging::plane_role role) const noexcept;
  /// What plane `p` holds: 0 is K, and 1 is V where there are values.
  [[nodiscard]] constexpr paging::plane_role role_of(std::uint32_t p) const noexcept;

  /// How an element of plane `p` is stored.
  [[nodiscard]] constexpr dtype element_of(std::uint32_t p) const noexcept { return element_of(role_of(p)); }
  /// Elements of a vector of plane `p`.
  [[nodiscard]] constexpr std::uint64_t vector_elements(std::uint32_t p) const noexcept {
    return elements_of(role_of(p));
  }
  [[nodiscard]] constexpr std::uint64_t vector_bytes(std::uint32_t p) const noexcept {
    return vector_bytes_of(role_of(p));
  }
  /// Tokens that have vectors of their own in plane `p`: `block_tokens`, or 1 for what all tokens of a block
  /// share.
  [[nodiscard]] constexpr std::uint32_t tokens_of(std::uint32_t p) const noexcept {
    return tokens_of(role_of(p));
  }
  /// The same of heads.
  [[nodiscard]] constexpr std::uint32_t heads_of(std::uint32_t p) const noexcept {
    return heads_of(role_of(p));
  }
  /// One layer's plane of one block.
  [[nodiscard]] constexpr std::uint64_t unit_bytes(std::uint32_t p) const noexcept {
    return unit_bytes_of(role_of(p));
  }
  /// One layer of one block, all planes.
  [[nodiscard]] constexpr std::uint64_t layer_bytes() const noexcept;
  /// One block, all layers.
  [[nodiscard]] constexpr std::uint64_t block_bytes() const noexcept { return layer_bytes() * layers; }
  /// `blocks` blocks, the null block among them.
  [[nodiscard]] constexpr std::uint64_t total_bytes(std::uint64_t blocks) const {
    return checked_multiply(block_bytes(), blocks, "kv_layout: block bytes x blocks");
  }
  /// Tokens of a sequence that a block stands for: `block_tokens` of each context-parallel rank.
  [[nodiscard]] constexpr std::uint64_t virtual_block_tokens() const noexcept {
    return std::uint64_t{block_tokens} * part.cp_size;
  }

  /// Pieces of contiguous memory that one block is made of: what a copy of it costs. Neighbouring blocks lie
  /// side by side in each.
  [[nodiscard]] constexpr std::uint64_t fragments() const noexcept;

  /// Whether a vector of K and its V are one run of bytes.
  [[nodiscard]] constexpr bool is_joined() const noexcept {
    return has_values &&
           (order == block_order::layer_first_joined || order == block_order::block_first_joined);
  }

  /// Distances in a memory of `blocks` blocks.
  [[nodiscard]] constexpr plane_strides strides(std::uint32_t p, std::uint64_t blocks) const noexcept;

  /// The same values as disks and networks carry them: block by block, tokens outermost, scales behind the
  /// values of their plane.
  [[nodiscard]] constexpr kv_layout packed() const noexcept;

  /// Equal for layouts that hold the same values, whatever their order. Never 0.
  ///
  /// Ranks that hold the same heads of a model with fewer heads than ranks hold the same values.
  [[nodiscard]] constexpr std::uint64_t content_fingerprint() const noexcept;

  /// Equal for equal layouts. Never 0.
  [[nodiscard]] constexpr std::uint64_t fingerprint() const noexcept;

  /// The layout itself.
  /// @throws length_error for a dimension of 0, for vectors that are no whole number of bytes, for runs that
  ///         are no whole part of a vector and for blocks past 2^63 - 1 bytes; argument_error for an element,
  ///         an order or a form of a number that none has, as a damaged file or another version may bring it,
  ///         for scales that cannot lie where they are said to, and for a part that no rank holds.
  [[nodiscard]] constexpr const kv_layout& checked() const;

  /// What lies side by side with the vectors of plane `p`.
  [[nodiscard]] constexpr detail::kv_vector_run vector_run_of(std::uint32_t p) const noexcept;

  /// What fingerprints are made of. Fields that say nothing here (a run's length where scales are by vector)
  /// count as 0.
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
