/// @file
/// What a layout of keys and values is told by: orders, forms of scales, and parts that ranks hold.
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
  nhd,  ///< [token][head][element]: a token's heads side by side
  hnd,  ///< [head][token][element]: a head's tokens side by side
};

}  // namespace paging

using head_order [[deprecated("its name is paging::head_order")]] = paging::head_order;

/// What varies slowest over all. Inside a block of a layer, `head_order` tells which of token and head is the
/// outer one and which the inner.
///
/// Where a layout has more than K and V, "K or V" is the section: K with what belongs to it (its scales, the
/// rotary part), then V with its scales, then the index keys with theirs, then each plane of scales that is
/// to lie apart (`scale_place::apart`).
enum class block_order : std::uint8_t {
  layer_first,         ///< [layer][K or V][block]: a tensor a layer and plane (FlashInfer's K and V apart)
  layer_first_paired,  ///< [layer][block][K or V]: a tensor a layer, a block's K and V together
  block_first,         ///< [block][layer][K or V]: a block whole (vLLM's cross-layer blocks)
  block_first_planes,  ///< [block][K or V][layer]: a block whole, its V behind all its K (LMCache's chunks)
  block_first_apart,   ///< [K or V][block][layer] (SGLang's page_first_direct)
  layer_between,       ///< [K or V][block][outer][layer][inner] (with nhd SGLang's page_first)
  layer_last,          ///< [K or V][block][outer][inner][layer] (with hnd SGLang's page_head)
  layer_first_joined,  ///< [layer][block][outer][inner][K or V]: a vector of K and its V as one (vLLM 0.26)
  block_first_joined,  ///< [block][layer][outer][inner][K or V]: the same, a block whole
};

/// How many orders there are.
inline constexpr std::uint32_t block_order_count = 9;
static_assert(static_cast<std::uint32_t>(block_order::block_first_joined) + 1 == block_order_count);

namespace paging {

/// A `dtype`, or none told: `std::optional` would cost each header that knows layouts 1,500 lines.
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
  none,     ///< there are no scales in the block
  vector,   ///< the values of one head of one token
  run,      ///< `scale_form::run` values of such a vector, one after the other
  channel,  ///< one element of a head, over all tokens of the block
};

/// Where scales lie.
enum class scale_place : std::uint8_t {
  in_block,       ///< behind the vectors of their plane in the same block of the layer: [vectors][scales]
  behind_vector,  ///< each right behind the values that it scales: [values][scales] for each token and head
  behind_rotary,  ///< the same, but behind the rotary part too: [values][rotary part][scales]
  apart,          ///< in a section of their own, as if beside K and V (TensorRT-LLM's pools of scales)
};

/// The scales of one plane: what a block holds beside the quantised values, so that it travels with them.
///
/// vLLM has one for each token and head, beside its values; NVFP4 one for 16 values and a global one; KIVI's
/// keys one, and a zero point, for each channel of a block:
///
///     scale_form{.group = scale_group::vector, .place = scale_place::behind_vector};
///     scale_form{.group = scale_group::run, .element = dtype::fp8_e4m3, .has_global = true};
///     scale_form{.group = scale_group::channel, .element = dtype::f16, .numbers = 2};
///
/// What else is needed to read the values (the order of nibbles, swizzled scales, a rotation, a scale for all
/// blocks) belongs in `kv_layout::model`.
struct scale_form {
  scale_group group = scale_group::none;
  dtype element = dtype::f32;  ///< of a scale
  std::uint32_t run = 16;      ///< values that share a scale, where `group` is `run`
  std::uint32_t numbers = 1;   ///< of a group: 1, or 2 for a scale and a zero point
  scale_place place = scale_place::in_block;
  bool has_global = false;  ///< one f32 more for each block of a layer, which scales the scales (NVFP4)

  friend constexpr bool operator==(const scale_form&, const scale_form&) noexcept = default;
};

/// What the planes of a layout hold, in the order in which they are numbered. Planes that a layout does not
/// have are left out, so that K is plane 0 and V, where there is one, plane 1.
enum class plane_role : std::uint8_t {
  key,
  value,
  rotary,  ///< a key's rotary part, where it is stored in another type than the rest
  key_scale,
  key_global,
  value_scale,
  value_global,
  index_key,  ///< what an indexer scores tokens by (DeepSeek sparse attention)
  index_scale,
  index_global,
};

/// How many roles there are.
inline constexpr std::uint32_t plane_role_count = 10;
static_assert(static_cast<std::uint32_t>(plane_role::index_global) + 1 == plane_role_count);

/// Which part of a model's keys and values a rank holds: which heads under tensor parallelism, which tokens
/// under context parallelism. By default all of them.
///
/// Tensor parallelism: the model's KV heads are dealt in runs of `kv_layout::heads`, rank by rank. Where the
/// model has fewer heads than there are ranks, a head has several holders, whose contents are the same: say
/// `heads_of_model` then, and of MLA always (1), or each rank is taken to hold heads of its own.
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
  std::uint32_t cp_interleave = 1;  ///< tokens that follow each other on one rank

  friend constexpr bool operator==(const kv_part&, const kv_part&) noexcept = default;

  /// The context-parallel rank that holds a token.
  /// @pre `cp_size` and `cp_interleave` are not 0, as of all that follow
  [[nodiscard]] constexpr std::uint64_t cp_rank_of(std::uint64_t token) const noexcept {
    return token / cp_interleave % cp_size;
  }
  /// How many of a sequence's first `tokens` tokens this rank holds.
  [[nodiscard]] constexpr std::uint64_t local_tokens(std::uint64_t tokens) const noexcept {
    const std::uint64_t round = std::uint64_t{cp_size} * cp_interleave;
    const std::uint64_t before = std::uint64_t{cp_rank} * cp_interleave;
    const std::uint64_t rest = tokens % round;
    const std::uint64_t mine = rest <= before ? 0 : rest - before;
    return tokens / round * cp_interleave + (mine < cp_interleave ? mine : cp_interleave);
  }
  /// The place of a token among those of this rank. @pre the rank holds it
  [[nodiscard]] constexpr std::uint64_t local_of(std::uint64_t token) const noexcept {
    const std::uint64_t round = std::uint64_t{cp_size} * cp_interleave;
    return token / round * cp_interleave + token % cp_interleave;
  }
  /// The token at place `local` of this rank.
  [[nodiscard]] constexpr std::uint64_t token_of(std::uint64_t local) const noexcept {
    const std::uint64_t round = local / cp_interleave;
    return (round * cp_size + cp_rank) * cp_interleave + local % cp_interleave;
  }
};

}  // namespace paging

}  // namespace v0
}  // namespace llmmem
