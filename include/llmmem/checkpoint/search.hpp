/// @file
/// Finds the newest complete checkpoint, and verifies it.
#pragma once

#include <llmmem/checkpoint/detail/bodies.hpp>
#include <llmmem/checkpoint/manifest.hpp>
#include <llmmem/checkpoint/names.hpp>
#include <llmmem/checkpoint/search_patience.hpp>
#include <llmmem/checkpoint/storage.hpp>
#include <llmmem/checkpoint/storage_ref.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// How closely a checkpoint is checked before it is trusted.
enum class verification : std::uint8_t {
  sizes,      ///< the manifest's checksum, and that each file exists with the recorded size
  checksums,  ///< also each byte of each file
};

/// An existing checkpoint.
struct found_checkpoint {
  checkpoint_id id{};
  std::string folder{};  ///< its name in the folder of checkpoints
  checkpoint_manifest manifest{};
};

/// A checkpoint that was passed over.
struct skipped_checkpoint {
  std::string folder{};
  std::string why{};
};

/// The result of a search.
struct checkpoint_search {
  std::optional<found_checkpoint> found{};
  std::vector<skipped_checkpoint> skipped{};  ///< newer checkpoints that were passed over, newest first

  /// Returns in one line what was found and what was passed over.
  [[nodiscard]] std::string message() const;
};

/// A checkpoint that may be complete could not be read, after all retries. The text gives the reason and the
/// remedy.
class unreadable_checkpoint : public io_error {
 public:
  using io_error::io_error;
};

/// Returns the checkpoints by their names, newest first, which means the highest generation first. They need
/// not be complete.
/// @throws storage_error
[[nodiscard]] std::vector<checkpoint_id> list_checkpoints(storage_ref storage);

/// Reads a checkpoint's manifest, and verifies the checkpoint as closely as requested.
/// @throws storage_error  for files that are missing or unreadable.
/// @throws format_error   for damage: the file, the bytes of the first bad chunk, and both checksums.
[[nodiscard]] found_checkpoint open_checkpoint(storage_ref storage, const checkpoint_id& id,
                                               verification how);

/// Returns the newest complete checkpoint.
///
/// An older checkpoint is taken only if each newer one is proved damaged: its manifest or a file is missing,
/// truncated, malformed or fails its checksum. Those are recorded in `skipped`. Any other problem says
/// nothing about contents: the search retries it, and then throws. A checkpoint whose folder is a symbolic
/// link counts like others; a dangling link proves nothing (the disk may not be mounted), and is an error.
///
/// Needs no lock: if a checkpoint is removed during the search, its successors exist.
/// @throws storage_error          if the folder cannot be listed.
/// @throws unreadable_checkpoint  for a checkpoint that may be complete but cannot be read
///   (`unread_checkpoint::refuse`).
[[nodiscard]] checkpoint_search find_checkpoint(storage_ref storage,
                                                verification how = verification::checksums,
                                                const search_patience& waits = {});

}  // namespace v0
}  // namespace llmmem

#if LLMMEM_CHECKPOINT_BODIES
#include <llmmem/checkpoint/detail/search_body.hpp>
#endif
