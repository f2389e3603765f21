/// @file
/// Digests of blocks of a paged cache, independent of its memory layout.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/paging/kv_layout.hpp>
#include <llmmem/result.hpp>

#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

/// Computes the digest of each of some blocks: the `block_digest` of its bytes as `layout.packed()` orders
/// them. So it is the same for every layout, with layers, blocks, tokens or heads outermost, in one
/// allocation or several. It equals the digest that `digest_blocks` computes of the packed block, on the way
/// to a disk or a network. A CRC-32C depends on the order of bytes: to compute one, copy the block into
/// packed memory and call `crc32c_blocks` there.
///
/// A number that is negative, or beyond the memory's blocks, is a block of no bytes; the latter raises the
/// flag. Sums are overwritten; nothing allocates or waits, so a graph may contain it.
///
/// @param run     `host_executor` or `device_executor`; all pointers are of its memory.
/// @param blocks  numbers, as block tables hold them; read when it runs.
/// @param sums    at least as many; further ones are not touched.
/// @param out_of_range  set to 1 if a number names no block; not cleared. May be null.
/// @return `errc::too_short`: wanted = blocks, found = sums given; the same for null `blocks`, `sums` or
///      memory; `errc::bad_alignment` for a `plane_alignment` that is not a power of two;
///      `errc::bad_granularity` for vectors that are not a multiple of 8 bytes: wanted = those, found = 8;
///      `errc::unsupported_layout` for a layout of more than keys and values; `errc::past_the_bytes` for a
///      layer's plane of a block of 2^31 bytes or more, and for planes of 2^31 tiles of 8 KiB together. Then
///      nothing has begun. Otherwise the result of `run`.
/// @par Complexity   each byte read once; three multiplications for 8 bytes, and three divisions, which are
///      multiplications, for 16 if heads are outermost. One atomic operation for 8 KiB.
template <class Run>
result<void> digest_kv_blocks(const Run& run, const kv_memory& memory, std::span<const std::int32_t> blocks,
                              std::span<std::uint64_t> sums, std::uint32_t* out_of_range = nullptr);

}  // namespace v0
}  // namespace llmmem

#include <llmmem/kernels/detail/kv_digest_body.hpp>
