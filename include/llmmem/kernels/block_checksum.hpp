/// @file
/// Checksums of blocks that a kernel reaches, by themselves or on the way of a copy: what leaves a device can
/// be told from what comes back.
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
// chunks of any lengths, or a `block_list` of your own. Blocks may have any alignment; an access is 16 bytes
// where all addresses are multiples of that, 4 or 1 elsewhere: slower, not wrong.
//
// Sums are overwritten, one for each block of the list, one of no bytes too. Nothing is allocated or waited
// for: a graph may hold these, and its replay reads the blocks and lists of then. Any number may run at once,
// on other sums. What the order of threads is makes no difference: all executors come to the same bits.
//
// Long blocks are taken in tiles by many threads; each tile's part is added to the block's sum by one atomic
// operation, and a launch before that one writes what the sums begin with. Blocks of a list get as many
// threads as the longest: sort lengths that are far apart into lists of their own.

/// The CRC-32C of each block, which `crc32c(0, bytes)` of <llmmem/hash/crc32c.hpp> makes on a host.
///
/// @param run   `host_executor` or `device_executor`; all pointers are of its memory.
/// @param sums  as many as blocks, or more: those beyond are not touched.
/// @return `errc::too_short`: wanted = blocks, found = sums given; `errc::null_handle` for no sums at all, or
///      bytes at a null pointer as far as the host can see; `errc::past_the_bytes` for a longest block of
///      2^45 bytes or more. Then nothing has begun. Else what `run` returns.
/// @par Complexity   each byte read once; by derivation three to four operations of 32 bits for it, more
///      where all blocks together have less than some 16 MiB.
/// @par Source   that squaring leaves the coefficients of a polynomial over two elements makes P(x^32) a
///      multiple of P(x): words are added to words, without tables. The idea of carrying a CRC forward by
///      such multiples is in Kadatch and Jenkins, "Everything we know about CRC but afraid to forget", 2010.
template <class Run, block_list Blocks>
result<void> crc32c_blocks(const Run& run, const Blocks& blocks, std::span<std::uint32_t> sums);

/// The `block_digest` of each block. Else as `crc32c_blocks`.
///
/// @par Complexity   each byte read once; three multiplications for 8 bytes.
template <class Run, block_list Blocks>
result<void> digest_blocks(const Run& run, const Blocks& blocks, std::span<std::uint64_t> sums);

/// Copies each block to where its list says, and makes the CRC-32C of what is copied: the bytes are read
/// once. Else as `crc32c_blocks`.
///
/// @pre no byte is written twice, or both read and written
/// @par Complexity   each byte read and written once.
template <class Run, block_list Blocks>
result<void> copy_and_crc32c(const Run& run, const Blocks& blocks, std::span<std::uint32_t> sums);

/// Copies each block, and makes its `block_digest`. Else as `copy_and_crc32c`.
template <class Run, block_list Blocks>
result<void> copy_and_digest(const Run& run, const Blocks& blocks, std::span<std::uint64_t> sums);

}  // namespace v0
}  // namespace llmmem

#include <llmmem/kernels/detail/block_checksum_body.hpp>
