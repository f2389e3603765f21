/// @file
/// `search_patience`: how long a search for checkpoints retries after errors that may pass.
#pragma once

#include <llmmem/config.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// What a search does with a checkpoint that cannot be read now, and that nothing proves to be damaged.
enum class unread_checkpoint : std::uint8_t {
  refuse,    ///< `unreadable_checkpoint` is thrown: no older one is taken in its place
  pass_over  ///< it is noted like a damaged one. The caller's word that an older one will do
};

/// How often a search retries after errors that say nothing about contents: EIO, EMFILE, ENOSPC, ESTALE, a
/// lack of memory. A checkpoint that is missing, cut or fails its checksum is not retried.
struct search_patience {
  std::uint32_t tries = 4;              ///< of each list and each checkpoint; 0 is 1
  std::uint64_t pause_ns = 20'000'000;  ///< before the second try, and twice as long before each other
  unread_checkpoint unread = unread_checkpoint::refuse;
};

}  // namespace v0
}  // namespace llmmem
