/// @file
/// Which part of a transfer can bypass the page cache: the arithmetic of unaligned heads and tails.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/space/file.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// The bytes of one request to the system, and its path.
struct io_span {
  std::uint64_t bytes = 0;
  bool direct = false;

  friend constexpr bool operator==(const io_span&, const io_span&) noexcept = default;
};

namespace transfer {

/// Returns the first request of a transfer of `bytes` between `offset` of a file and `address` in memory: the
/// head up to the first aligned offset, then whole aligned blocks, at most `most` bytes at a time, then the
/// tail. Heads and tails go through the page cache; so does everything if memory and file have different
/// alignment, because no splitting helps then.
///
/// Called again for the rest after a short transfer, it returns to aligned blocks.
///
/// @pre `bytes` and `most` are not 0, `most` is at least `limits.offset_alignment`, alignments are powers of
///      two.
/// @par Complexity   O(1).
/// @par Source       KvikIO's opportunistic direct I/O, for the idea.
[[nodiscard]] constexpr io_span first_span(std::uint64_t offset, std::uint64_t bytes, std::uintptr_t address,
                                           const direct_limits& limits, std::uint64_t most) noexcept {
  const std::uint64_t block = limits.offset_alignment;
  const std::uint64_t once = bytes < most ? bytes : most;
  const std::uint64_t head = (block - offset % block) % block;
  const bool alike = (address + head) % limits.memory_alignment == 0;
  if (!alike || bytes < head || bytes - head < block) return {once, false};
  if (head != 0) return {head, false};
  return {once / block * block, true};
}
}  // namespace transfer

}  // namespace v0
}  // namespace llmmem
