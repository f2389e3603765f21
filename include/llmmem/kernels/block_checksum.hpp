/// @file
/// Checksums of blocks that a kernel can access, alone or during a copy: they show whether the bytes that
/// return to a device are those that left it.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/block_digest.hpp>
#include <llmmem/kernels/block_lists.hpp>
#include <llmmem/result.hpp>

#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

// `Blocks` is `strided_blocks` or `numbered_blocks` for blocks of KV, `few_copies` or `listed_copies` for
// chunks of any lengths, or a `block_list` of your own. Blocks may have any alignment. Where the longest has
// more than 2 KiB (1 KiB for digests), a warp takes a tile by neighbouring aligned accesses at any address.
// Shorter blocks are read by 16 or 4 bytes if all addresses are multiples of that, else by one; so are the
// blocks of a CRC-32C, up to 32 KiB, where they are thousands and all addresses are multiples of 4.
//
// Sums are overwritten, one for each block of the list, empty blocks included. Nothing allocates or waits: a
// graph may contain these calls, and its replay reads the blocks and lists of that moment. Any number may run
// at once, on different sums. The order of threads has no effect: all executors produce the same bits.
//
// Many threads share a long block in tiles. One atomic operation adds each tile's part to the block's sum,
// and an earlier launch writes the initial sums. Blocks of a list get as many threads as the longest: put
// very different lengths into separate lists.

/// Computes the CRC-32C of each block, the same that `crc32c(0, bytes)` of <llmmem/hash/crc32c.hpp> computes
/// on a host.
///
/// @param run   `host_executor` or `device_executor`; all pointers are of its memory.
/// @param sums  at least as many as blocks; further ones are not touched.
/// @return `errc::too_short`: wanted = blocks, found = sums given; `errc::null_handle` for no sums at all, or
///      bytes at a null pointer as far as the host can see; `errc::past_the_bytes` for a longest block of
///      2^45 bytes or more. Then nothing has begun. Otherwise the result of `run`.
/// @par Complexity   each byte read once; by derivation three to four operations of 32 bits for it, more if
///      all blocks together have less than some 16 MiB.
/// @par Source   squaring leaves the coefficients of a polynomial over two elements unchanged, so P(x^32) is
///      a multiple of P(x): words are added to words, without tables. The idea of carrying a CRC forward by
///      such multiples is in Kadatch and Jenkins, "Everything we know about CRC but afraid to forget", 2010.
template <class Run, block_list Blocks>
result<void> crc32c_blocks(const Run& run, const Blocks& blocks, std::span<std::uint32_t> sums);

/// Computes the `block_digest` of each block. Otherwise as `crc32c_blocks`.
///
/// @par Complexity   each byte read once; three multiplications for 8 bytes.
template <class Run, block_list Blocks>
result<void> digest_blocks(const Run& run, const Blocks& blocks, std::span<std::uint64_t> sums);

/// Copies each block to the destination in its list, and computes the CRC-32C of the copied bytes: the bytes
/// are read once. Otherwise as `crc32c_blocks`.
///
/// @pre no byte is written twice, or both read and written
/// @par Complexity   each byte read and written once.
template <class Run, block_list Blocks>
result<void> copy_and_crc32c(const Run& run, const Blocks& blocks, std::span<std::uint32_t> sums);

/// Copies each block, and computes its `block_digest`. Otherwise as `copy_and_crc32c`.
template <class Run, block_list Blocks>
result<void> copy_and_digest(const Run& run, const Blocks& blocks, std::span<std::uint64_t> sums);

}  // namespace v0
}  // namespace llmmem

#include <llmmem/kernels/detail/block_checksum_body.hpp>
