/// @file
/// The vocabulary of a layout of keys and values: orders, forms of scales, and the parts that ranks hold.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/model/dtype.hpp>

#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {

namespace paging {

/// What varies slowest inside a block of one layer.
enum class head_order : std::uint8_t {
  nhd,  ///< [token][head][element]: the heads of a token are adjacent
  hnd,  ///< [head][token][element]: the tokens of a head are adjacent
};

}  // namespace paging

using head_order [[deprecated("its name is paging::head_order")]] = paging::head_order;

/// What varies slowest over the whole memory. Inside a block of a layer, `head_order` says whether tokens or
/// heads are the outer dimension.
///
/// If a layout has more than K and V, "K or V" means a section: K with its scales and rotary part, then V
/// with its scales, then the index keys with theirs, then each separate plane of scales
/// (`scale_place::separate`).
enum class block_order : std::uint8_t {
  layer_first,           ///< [layer][K or V][block]: one tensor per layer and plane (FlashInfer's separate K
                         ///< and V)
  layer_first_paired,    ///< [layer][block][K or V]: one tensor per layer, K and V of a block adjacent
  block_first,           ///< [block][layer][K or V]: whole blocks (vLLM's cross-layer blocks)
  block_first_planes,    ///< [block][K or V][layer]: whole blocks, all K of a block before its V (LMCache's
                         ///< chunks)
  block_first_separate,  ///< [K or V][block][layer] (SGLang's page_first_direct)
  layer_between,         ///< [K or V][block][outer][layer][inner] (with nhd SGLang's page_first)
  layer_last,            ///< [K or V][block][outer][inner][layer] (with hnd SGLang's page_head)
  layer_first_joined,    ///< [layer][block][outer][inner][K or V]: each vector of K adjacent to its V (vLLM
                         ///< 0.26)
  block_first_joined,    ///< [block][layer][outer][inner][K or V]: the same, in whole blocks
  block_first_apart [[deprecated("its name is block_first_separate")]] = block_first_separate
};

/// The number of orders.
inline constexpr std::uint32_t block_order_count = 9;
static_assert(static_cast<std::uint32_t>(block_order::block_first_joined) + 1 == block_order_count);

namespace paging {

/// A `dtype` or nothing: `std::optional` would cost each header that includes layouts 1,500 lines.
class optional_dtype {
 public:
  constexpr optional_dtype() noexcept = default;
  constexpr optional_dtype(dtype type) noexcept : type_(type), has_value_(true) {}

  [[nodiscard]] constexpr bool has_value() const noexcept { return has_value_; }
  [[nodiscard]] constexpr dtype value_or(dtype other) const noexcept { return has_value_ ? type_ : other; }

  friend constexpr bool operator==(const optional_dtype&, const optional_dtype&) noexcept = default;

 private:
  dtype type_ = dtype::f32;
  bool has_value_ = false;
};

/// Which values of a plane share a scale.
enum class scale_group : std::uint8_t {
  none,     ///< the block holds no scales
  vector,   ///< the values of one head of one token
  run,      ///< `scale_form::run` consecutive values of a vector
  channel,  ///< one element of a head, across all tokens of the block
};

/// Where scales are.
enum class scale_place : std::uint8_t {
  in_block,      ///< after the vectors of their plane, in the same block of the layer: [vectors][scales]
  after_vector,  ///< directly after the values that they scale: [values][scales] for each token and head
  after_rotary,  ///< after the values and their rotary part: [values][rotary part][scales]
  separate,      ///< in a section of their own, like K and V (TensorRT-LLM's pools of scales)
  behind_vector [[deprecated("its name is after_vector")]] = after_vector,
  behind_rotary [[deprecated("its name is after_rotary")]] = after_rotary,
  apart [[deprecated("its name is separate")]] = separate
};

/// The scales of one plane: what a block holds in addition to the quantised values, so that both move
/// together.
///
/// vLLM has one scale per token and head, stored with its values; NVFP4 one per 16 values and a global one;
/// KIVI's keys one scale and one zero point per channel of a block:
///
///     scale_form{.group = scale_group::vector, .place = scale_place::after_vector};
///     scale_form{.group = scale_group::run, .element = dtype::fp8_e4m3, .has_global = true};
///     scale_form{.group = scale_group::channel, .element = dtype::f16, .numbers = 2};
///
/// Everything else that a reader of the values needs (the order of nibbles, swizzled scales, a scale for all
/// blocks) belongs in `kv_layout::model`.
struct scale_form {
  scale_group group = scale_group::none;
  dtype element = dtype::f32;  ///< of a scale
  std::uint32_t run = 16;      ///< values that share a scale, if `group` is `run`
  /// Per group: 1, or 2 for a scale and what code 0 stands for: value = code x scale + zero. Kernels take it
  /// for int8 and int4 with scales by vector or by run.
  std::uint32_t numbers = 1;
  scale_place place = scale_place::in_block;
  bool has_global = false;  ///< one additional f32 per block of a layer that scales the scales (NVFP4)
  /// Vectors are turned by Hadamard's orthonormal matrix before they become codes, which spreads outliers
  /// over all elements: in blocks of the largest power of two that divides a vector. Of keys with scales by
  /// vector or by run; kernels turn queries alike.
  bool is_rotated = false;

  friend constexpr bool operator==(const scale_form&, const scale_form&) noexcept = default;
};

/// The contents of the planes of a layout, in the order of their numbers. Planes that a layout lacks are
/// skipped, so K is plane 0 and V, if present, is plane 1.
enum class plane_role : std::uint8_t {
  key,
  value,
  rotary,  ///< a key's rotary part, if it is stored in its own type
  key_scale,
  key_global,
  value_scale,
  value_global,
  index_key,  ///< the keys by which an indexer scores tokens (DeepSeek sparse attention)
  index_scale,
  index_global,
};

/// The number of roles.
inline constexpr std::uint32_t plane_role_count = 10;
static_assert(static_cast<std::uint32_t>(plane_role::index_global) + 1 == plane_role_count);

/// The part of a model's keys and values that a rank holds: its heads under tensor parallelism, its tokens
/// under context parallelism. By default a rank holds all of them.
///
/// Tensor parallelism: the model's KV heads are distributed in runs of `kv_layout::heads`, rank by rank. If
/// the model has fewer heads than there are ranks, several ranks hold the same head with the same contents:
/// set `heads_of_model` then, and always for MLA (1); otherwise the layout assumes that each rank holds heads
/// of its own.
///
/// Context parallelism: token t belongs to rank (t / cp_interleave) % cp_size, and a block of a rank holds
/// its `block_tokens` tokens of a virtual block of cp_size x block_tokens tokens (vLLM's decode context
/// parallelism, cp_kv_cache_interleave_size).
///
/// @par Complexity   every operation O(1).
struct kv_part {
  std::uint32_t tp_rank = 0;
  std::uint32_t tp_size = 1;
  std::uint32_t heads_of_model = 0;  ///< KV heads of the model; 0: heads x tp_size
  std::uint32_t cp_rank = 0;
  std::uint32_t cp_size = 1;
  std::uint32_t cp_interleave = 1;  ///< consecutive tokens on one rank

  friend constexpr bool operator==(const kv_part&, const kv_part&) noexcept = default;

  /// Returns the context-parallel rank that holds a token.
  /// @pre `cp_size` and `cp_interleave` are not 0, here and in the functions below
  [[nodiscard]] constexpr std::uint64_t cp_rank_of(std::uint64_t token) const noexcept {
    return token / cp_interleave % cp_size;
  }
  /// Returns how many of a sequence's first `tokens` tokens this rank holds.
  [[nodiscard]] constexpr std::uint64_t local_tokens(std::uint64_t tokens) const noexcept {
    const std::uint64_t round = std::uint64_t{cp_size} * cp_interleave;
    const std::uint64_t before = std::uint64_t{cp_rank} * cp_interleave;
    const std::uint64_t rest = tokens % round;
    const std::uint64_t mine = rest <= before ? 0 : rest - before;
    return tokens / round * cp_interleave + (mine < cp_interleave ? mine : cp_interleave);
  }
  /// Returns the position of a token among those of this rank. @pre the rank holds it
  [[nodiscard]] constexpr std::uint64_t local_of(std::uint64_t token) const noexcept {
    const std::uint64_t round = std::uint64_t{cp_size} * cp_interleave;
    return token / round * cp_interleave + token % cp_interleave;
  }
  /// Returns the token at position `local` of this rank.
  [[nodiscard]] constexpr std::uint64_t token_of(std::uint64_t local) const noexcept {
    const std::uint64_t round = local / cp_interleave;
    return (round * cp_size + cp_rank) * cp_interleave + local % cp_interleave;
  }
};

}  // namespace paging

}  // namespace v0
}  // namespace llmmem
