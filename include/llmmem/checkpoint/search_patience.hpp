/// @file
/// `search_patience`: how long a search for checkpoints retries after errors that may pass.
#pragma once

#include <llmmem/config.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// How a search treats a checkpoint that cannot be read now and is not proved damaged.
enum class unread_checkpoint : std::uint8_t {
  refuse,    ///< throws `unreadable_checkpoint`, and takes no older one instead
  pass_over  ///< records it like a damaged one, because the caller accepts an older one
};

/// How often a search retries after errors that say nothing about contents: EIO, EMFILE, ENOSPC, ESTALE, lack
/// of memory. A checkpoint that is missing, truncated or fails its checksum is not retried.
struct search_patience {
  std::uint32_t tries = 4;              ///< attempts for each list and each checkpoint; 0 means 1
  std::uint64_t pause_ns = 20'000'000;  ///< before the second try; doubles with each further one
  unread_checkpoint unread = unread_checkpoint::refuse;
};

}  // namespace v0
}  // namespace llmmem
