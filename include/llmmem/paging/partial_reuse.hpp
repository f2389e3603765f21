/// @file
/// Policies for reusing the beginning of a cached block.
#pragma once

#include <llmmem/config.hpp>

#include <concepts>
#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// How a match uses a cached block if only its first tokens are equal.
enum class partial_source : std::uint8_t {
  none,   ///< nothing: full blocks only
  copy,   ///< copies its first tokens into a block of the sequence
  steal,  ///< the sequence takes the block over if it is idle, otherwise copies it
};

/// A policy that states how a match reuses the beginning of a block, and how many cached blocks it compares
/// at most.
template <class P>
concept partial_reuse_policy = requires {
  { P::source } -> std::convertible_to<partial_source>;
  { P::max_compared } -> std::convertible_to<std::uint32_t>;
};

/// The default: full blocks only.
struct full_blocks_only {
  static constexpr partial_source source = partial_source::none;
  static constexpr std::uint32_t max_compared = 0;
  [[deprecated("its name is max_compared")]] static constexpr std::uint32_t most_compared = max_compared;
};

static_assert(partial_reuse_policy<full_blocks_only>);

/// Shares the beginning of a block too. Among the cached blocks that follow the last matched one, it uses the
/// one with the most equal leading tokens. It compares at most 64 followers, newest first, so a prompt with
/// thousands of continuations costs as much as one with few.
///
/// @par Source   TensorRT-LLM's `enable_partial_reuse` and `copy_on_partial_reuse`.
template <partial_source Source>
struct partial_blocks {
  static constexpr partial_source source = Source;
  static constexpr std::uint32_t max_compared = 64;
  [[deprecated("its name is max_compared")]] static constexpr std::uint32_t most_compared = max_compared;
};

/// Copies the shared beginning.
using copy_partial_blocks = partial_blocks<partial_source::copy>;
/// Takes over idle blocks.
using steal_partial_blocks = partial_blocks<partial_source::steal>;

static_assert(partial_reuse_policy<copy_partial_blocks>);
static_assert(partial_reuse_policy<steal_partial_blocks>);

}  // namespace v0
}  // namespace llmmem
