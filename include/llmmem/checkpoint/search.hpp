/// @file
/// Finding the newest checkpoint that is whole, and proving that it is.
#pragma once

#include <llmmem/checkpoint/detail/bodies.hpp>
#include <llmmem/checkpoint/manifest.hpp>
#include <llmmem/checkpoint/names.hpp>
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

/// Checkpoints by their names, the newest first: the highest generation. They need not be whole.
/// @throws storage_error
[[nodiscard]] std::vector<checkpoint_id> list_checkpoints(storage_ref storage);

/// Reads a checkpoint's manifest, and looks as closely as told.
/// @throws storage_error  for what is not there or cannot be read.
/// @throws format_error   for what is damaged: the file, the first bad chunk's bytes in it, and both
///                        checksums.
[[nodiscard]] found_checkpoint open_checkpoint(storage_ref storage, const checkpoint_id& id,
                                               verification how);

/// The newest checkpoint that proves whole. Whatever is in the way of one is noted and passed over: nothing
/// but the folder itself being unreadable is thrown. Needs no lock: one that goes while it is looked at is no
/// error, its successors are there.
/// @throws storage_error  when the folder cannot be listed.
[[nodiscard]] checkpoint_search find_checkpoint(storage_ref storage,
                                                verification how = verification::checksums);

}  // namespace v0
}  // namespace llmmem

#if LLMMEM_CHECKPOINT_BODIES
#include <llmmem/checkpoint/detail/search_body.hpp>
#endif
