/// @file
/// Finding the newest checkpoint that is whole, and proving that it is.
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

/// How much of a checkpoint is looked at before it is believed.
enum class verification : std::uint8_t {
  sizes,      ///< the manifest, by its checksum, and that each file is there and as long as it says
  checksums,  ///< each byte of each file, too
};

/// A checkpoint that is there.
struct found_checkpoint {
  checkpoint_id id{};
  std::string folder{};  ///< in the folder of checkpoints
  checkpoint_manifest manifest{};
};

/// One that was passed over.
struct skipped_checkpoint {
  std::string folder{};
  std::string why{};
};

/// What a search came to.
struct checkpoint_search {
  std::optional<found_checkpoint> found{};
  std::vector<skipped_checkpoint> skipped{};  ///< that should have been newer, the newest first

  /// What was found and what was not, in one line.
  [[nodiscard]] std::string message() const;
};

/// A checkpoint that may be whole could not be read, however often it was tried. The text says why, and what
/// can be done.
class unreadable_checkpoint : public io_error {
 public:
  using io_error::io_error;
};

/// Checkpoints by their names, the newest first: the highest generation. They need not be whole.
/// @throws storage_error
[[nodiscard]] std::vector<checkpoint_id> list_checkpoints(storage_ref storage);

/// Reads a checkpoint's manifest, and looks as closely as told.
/// @throws storage_error  for what is not there or cannot be read.
/// @throws format_error   for what is damaged: the file, the first bad chunk's bytes in it, and both
///                        checksums.
[[nodiscard]] found_checkpoint open_checkpoint(storage_ref storage, const checkpoint_id& id,
                                               verification how);

/// The newest checkpoint that proves whole.
///
/// An older one is taken only where each newer one is proved damaged: its manifest or a file is missing, cut,
/// malformed or fails its checksum. Those are noted in `skipped`. Any other trouble says nothing of contents:
/// it is tried again, and then is an error. A checkpoint whose folder is a symbolic link is one like others;
/// a link that leads nowhere proves nothing (the disk may not be mounted), and is an error.
///
/// Needs no lock: one that goes while it is looked at is no error, its successors are there.
///
/// @throws storage_error          when the folder cannot be listed.
/// @throws unreadable_checkpoint  for one that may be whole and cannot be read (`unread_checkpoint::refuse`).
[[nodiscard]] checkpoint_search find_checkpoint(storage_ref storage,
                                                verification how = verification::checksums,
                                                const search_patience& waits = {});

}  // namespace v0
}  // namespace llmmem

#if LLMMEM_CHECKPOINT_BODIES
#include <llmmem/checkpoint/detail/search_body.hpp>
#endif
