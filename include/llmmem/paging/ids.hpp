/// @file
/// Ids of a paged cache: blocks, sequences and tokens, with handles that detect stale ones.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/owner_tag.hpp>
#include <llmmem/hash/block_key.hpp>  // token_id

#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// Index of a block: which `block_bytes` of the backing memory it occupies. Same width as the int32 that
/// kernels read.
enum class block_id : std::uint32_t {};

/// Block 0 is never allocated: it pads block tables, so a kernel may always read it.
inline constexpr block_id null_block{0};

/// The most blocks a pool may have: ids fit a non-negative int32, the index of FlashInfer's and vLLM's
/// kernels.
inline constexpr std::uint64_t max_blocks = 0x7FFF'FFFE;

/// Returns the id as an index.
[[nodiscard]] constexpr std::uint32_t to_index(block_id block) noexcept {
  return static_cast<std::uint32_t>(block);
}

/// A block together with the generation in which it was allocated.
///
/// The pool raises a block's generation each time the block becomes free, so a handle kept too long differs
/// from the handle of the block's next owner (until 2^32 reuses of one block wrap around). `owner` identifies
/// the pool: it is derived from the address of the pool's metadata, so two live pools have the same one with
/// probability 2^-31. A handle that outlives its pool may match a later pool at the same address.
struct block_handle {
  block_id block = null_block;
  std::uint32_t generation = 0;
  std::uint32_t owner = 0;

  friend constexpr bool operator==(const block_handle&, const block_handle&) noexcept = default;
};

/// A sequence of a `paged_allocator`; a default-constructed one names none.
struct sequence_id {
  std::uint32_t slot = 0;
  std::uint32_t generation = 0;
  std::uint32_t owner = 0;

  friend constexpr bool operator==(const sequence_id&, const sequence_id&) noexcept = default;
};

/// Copy the first `tokens` slots of `source` to `destination` before anything is written to either. The next
/// allocating call may allocate the source again, so copies carried out later must keep the order of the
/// calls and of the writes between them, for example on one stream.
struct block_copy {
  block_id source = null_block;
  block_id destination = null_block;
  std::uint32_t tokens = 0;  ///< 0: nothing to copy

  [[nodiscard]] constexpr explicit operator bool() const noexcept { return tokens != 0; }
  friend constexpr bool operator==(const block_copy&, const block_copy&) noexcept = default;
};

}  // namespace v0
}  // namespace llmmem
