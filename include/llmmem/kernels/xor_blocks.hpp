/// @file
/// Exclusive or of memory that a kernel can access: parity of shards, and the changes between two states.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/xor_works.hpp>
#include <llmmem/result.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

/// What happens to the bits in a bitmap of dirty pages.
enum class dirty_mark : std::uint8_t {
  overwrite,  ///< overwritten: after the call the bitmap shows this comparison alone
  added,      ///< kept, and those of this comparison added: all changes since the caller cleared it
  anew [[deprecated("its name is overwrite")]] = overwrite
};

/// The page size of dirty bits.
struct dirty_page_options {
  std::uint32_t page_bytes = 4096;  ///< bytes per dirty bit: a power of two, 512 or more
  dirty_mark mark = dirty_mark::overwrite;
};

/// Returns the 32-bit words that the dirty bits of `bytes` bytes take: page p has bit p % 32 of word p / 32.
///
/// @pre options.page_bytes is a power of two
/// @par Complexity      O(1).
/// @par Thread safety   any number at once.
/// @par Errors          none.
[[nodiscard]] constexpr std::uint64_t dirty_words(std::uint64_t bytes,
                                                  const dirty_page_options& options = {}) noexcept {
  const std::uint64_t pages = bytes / options.page_bytes + (bytes % options.page_bytes == 0 ? 0 : 1);
  return pages / 32 + (pages % 32 == 0 ? 0 : 1);
}

// All of these take addresses of any alignment; an access is 16 bytes but at the ends. What is read at
// another offset from a multiple of 16 than what is written costs two accesses of 16. Nothing allocates or
// waits, and a graph may contain them. Any number may run at once, on different bytes. A written range may be
// a range that is read, from the same byte on; it must not overlap one in any other way.

/// Sets `parity` to the exclusive or of all shards: a parity of data, or a lost shard from the parity and the
/// remaining shards. Without shards it is zeros.
///
/// @param run     `host_executor` or `device_executor`; the pointers are of its memory.
/// @param shards  up to `most_parity_shards`, each of `bytes` bytes. The list itself is read before this
///                returns.
/// @return `errc::out_of_range` for more shards: wanted = how many, found = the most; `errc::null_handle` for
///                a null pointer to bytes, index = the shard, or the number of shards for the parity;
///                `errc::overlapping_ranges`, index = the shard. Then nothing has begun. Otherwise the result
///                of `run`.
/// @par Complexity   each shard read once, the parity written once; eight 16-byte reads of a thread, of two
///                shards, are in flight together.
/// @par Source   RAID-4: Patterson, Gibson and Katz, SIGMOD 1988.
template <class Run>
result<void> xor_parity(const Run& run, std::span<const std::byte* const> shards, std::byte* parity,
                        std::uint64_t bytes);

/// Sets `delta` to `new_bytes ^ old_bytes`, for clean pages too (zeros), and a bit for each page that is
/// dirty: in which any byte differs.
///
/// @param dirty_bits  `dirty_words(bytes, options)` words or more; further ones are not touched. With
///      `dirty_mark::overwrite` the caller need not clear them: a separate launch does, in a graph too.
/// @return `errc::bad_granularity` for pages below 512 bytes, `errc::bad_alignment` for a size that is not a
///      power of two; `errc::too_short`: wanted = words needed, found = words given; `errc::null_handle` and
///      `errc::overlapping_ranges`, index 0 the old bytes, 1 the new ones, 2 the delta, 3 the bitmap. Then
///      nothing has begun. Otherwise the result of `run`.
/// @par Complexity   both read once, the delta written once; at most one atomic operation on the bitmap for 2
///      KiB that differ. Eight 16-byte reads of a thread are in flight together.
template <class Run>
result<void> xor_delta(const Run& run, const std::byte* old_bytes, const std::byte* new_bytes,
                       std::byte* delta, std::uint64_t bytes, std::span<std::uint32_t> dirty_bits,
                       const dirty_page_options& options = {});

/// As `xor_delta`, but writes only the bitmap.
template <class Run>
result<void> compare_dirty(const Run& run, const std::byte* old_bytes, const std::byte* new_bytes,
                           std::uint64_t bytes, std::span<std::uint32_t> dirty_bits,
                           const dirty_page_options& options = {});

/// `target ^= delta`, in pages whose bit is set; other pages are neither read nor written, at either end.
/// Turns the old bytes into the new ones, and the new into the old.
///
/// @param dirty_bits  as `xor_delta` made them, read when the kernel runs.
/// @return as `xor_delta`; index 0 is the target.
/// @par Complexity   dirty pages: both read once, the target written once. A word of the bitmap for 2 KiB.
template <class Run>
result<void> apply_delta(const Run& run, std::byte* target, const std::byte* delta, std::uint64_t bytes,
                         std::span<const std::uint32_t> dirty_bits, const dirty_page_options& options = {});

}  // namespace v0
}  // namespace llmmem

#include <llmmem/kernels/detail/xor_blocks_body.hpp>
