/// @file
/// Reuse of the beginning of a cached block: policies.
#pragma once

#include <llmmem/config.hpp>

#include <concepts>
#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// What a match does with a cached block of which only the first tokens are wanted.
enum class partial_source : std::uint8_t {
  none,   ///< nothing: full blocks only
  copy,   ///< its first tokens are copied into a block of the sequence's own
  steal,  ///< the sequence takes the block over if nobody uses it, else it copies
};

/// Says where the beginning of a block comes from, and how many cached blocks are compared for it at most.
template <class P>
concept partial_reuse_policy = requires {
  { P::source } -> std::convertible_to<partial_source>;
  { P::most_compared } -> std::convertible_to<std::uint32_t>;
};

/// The default: full blocks only.
struct full_blocks_only {
  static constexpr partial_source source = partial_source::none;
  static constexpr std::uint32_t most_compared = 0;
};

static_assert(partial_reuse_policy<full_blocks_only>);

/// Shares the beginning of a block too: of the cached blocks that follow the last one matched, the one whose
/// tokens agree longest lends them. At most 64 followers are compared, the newest first, so a prompt that
/// thousands continue costs no more than one that few do.
///
/// @par Source   TensorRT-LLM's `enable_partial_reuse` and `copy_on_partial_reuse`.
template <partial_source Source>
struct partial_blocks {
  static constexpr partial_source source = Source;
  static constexpr std::uint32_t most_compared = 64;
};

/// Copies what it lends.
using copy_partial_blocks = partial_blocks<partial_source::copy>;
/// Hands over blocks that nobody uses.
using steal_partial_blocks = partial_blocks<partial_source::steal>;

static_assert(partial_reuse_policy<copy_partial_blocks>);
static_assert(partial_reuse_policy<steal_partial_blocks>);

}  // namespace v0
}  // namespace llmmem
