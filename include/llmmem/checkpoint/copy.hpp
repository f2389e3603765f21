/// @file
/// `copy_checkpoint` and `compact_checkpoint`: copy a checkpoint to another folder, or fold it within its
/// own, and verify it on the way.
#pragma once

#include <llmmem/checkpoint/detail/bodies.hpp>
#include <llmmem/checkpoint/folder.hpp>
#include <llmmem/checkpoint/manifest.hpp>
#include <llmmem/checkpoint/search.hpp>
#include <llmmem/checkpoint/storage.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <concepts>
#include <cstdint>
#include <memory>
#include <type_traits>

namespace llmmem {
inline namespace v0 {

/// The generation of a copy.
enum class copy_generation : std::uint8_t {
  same,  ///< that of the original: the same checkpoint in another tier
  next,  ///< the next one of the destination: a separate checkpoint, the newest there
};

/// The options of a copy.
struct copy_options {
  copy_generation generation = copy_generation::same;
  /// The memory that a copy takes in addition to the manifest: two halves, one read into while the other is
  /// written. At least 2.
  std::uint64_t buffer_bytes = std::uint64_t{8} << 20;
};

/// The progress of a copy.
struct copy_progress {
  checkpoint_id id{};        ///< the id of the copy
  std::uint64_t bytes = 0;   ///< of all files
  std::uint64_t copied = 0;  ///< bytes read so far; they are written or being written
};

/// Whether a copy continues.
enum class copy_verdict : std::uint8_t {
  proceed,
  stop,
  go_on [[deprecated("its name is proceed")]] = proceed
};

/// A function asked before every half buffer, and before the commit.
template <class W>
concept copy_watch = requires(W& watch, const copy_progress& progress) {
  { watch(progress) } -> std::same_as<copy_verdict>;
};

/// A watch that always continues.
struct unwatched_copy {
  [[nodiscard]] copy_verdict operator()(const copy_progress& /*progress*/) const noexcept {
    return copy_verdict::proceed;
  }
};

static_assert(copy_watch<unwatched_copy>);

/// A reference to a watch of any type, for the duration of a call; without one a copy always continues.
class copy_watch_ref {
 public:
  copy_watch_ref() noexcept = default;
  template <class W>
    requires(!std::same_as<std::remove_cvref_t<W>, copy_watch_ref> && copy_watch<std::remove_reference_t<W>>)
  copy_watch_ref(W&& watch) noexcept  // NOLINT(google-explicit-constructor): as a reference
      : watch_(const_cast<void*>(static_cast<const volatile void*>(std::addressof(watch)))),
        ask_([](void* of, const copy_progress& progress) -> copy_verdict {
          return (*static_cast<std::remove_reference_t<W>*>(of))(progress);
        }) {}

  [[nodiscard]] copy_verdict operator()(const copy_progress& progress) const {
    return ask_ == nullptr ? copy_verdict::proceed : ask_(watch_, progress);
  }

 private:
  void* watch_ = nullptr;
  copy_verdict (*ask_)(void* watch, const copy_progress& progress) = nullptr;
};

/// The caller's watch stopped a copy, which leaves nothing behind.
class copy_stopped : public error {
 public:
  using error::error;
};

/// The result of a copy.
struct copy_report {
  found_checkpoint copy{};  ///< as returned by `open_checkpoint`
  std::uint64_t bytes = 0;  ///< of all files
};

/// Returns the manifest that the checkpoint would have as a full one, without chunks in earlier ones. It is
/// equal for a checkpoint and its copies of the same generation.
[[nodiscard]] checkpoint_manifest folded_manifest(const checkpoint_manifest& what);

/// Copies a checkpoint into a folder with that folder's commit protocol: when this returns, the copy survives
/// any crash; if it throws, there is no copy.
///
///     const checkpoint_search search = find_checkpoint(local, verification::sizes);
///     checkpoint_folder folder(durable);
///     if (search.found) copy_checkpoint(local, *search.found, folder);
///
/// Every byte is checked against its chunk's checksum on the way, so a damaged checkpoint is never copied.
/// The copy has all its bytes in plain files of its own, even if the original is incremental and takes chunks
/// from earlier ones.
///
/// @param what   must stay while it is copied (`checkpoint_folder::hold`).
/// @param watch  `copy_verdict(const copy_progress&)`: asked before every half buffer, and before the commit.
/// @par Complexity      reads and writes the bytes of the checkpoint once; `buffer_bytes` of memory.
/// @par Thread safety   `to` as every folder: one thread at a time. `from` is only read.
/// @throws format_error    for a damaged chunk: the file, the bytes in it, and both checksums.
/// @throws copy_stopped    if `watch` stops it.
/// @throws argument_error  if the generation should be the same and already exists.
/// @throws length_error    for a buffer of fewer than 2 bytes.
/// @throws durability_uncertain  as `checkpoint_folder::commit`: the copy is visible, but a crash may remove
///   it. Other errors as there, and `storage_error`.
copy_report copy_checkpoint(storage_ref from, const found_checkpoint& what, checkpoint_folder_base& to,
                            const copy_options& options = {}, copy_watch_ref watch = {});

/// Folds the newest checkpoint of a folder, which takes chunks from earlier ones, into a full one, which
/// becomes the newest of the folder. Once a retention drops the original, those earlier ones can go with it
/// (`checkpoint_folder::tidy`, which this does not call).
/// @pre no draft of the folder is open, because it would be committed as an older checkpoint.
/// @par Complexity      as `copy_checkpoint`, even if the original is already full.
/// @par Thread safety   as every folder: one thread at a time.
/// @throws argument_error  if it is not the newest: its copy would appear newer than its successors. Other
///   errors as `copy_checkpoint`.
copy_report compact_checkpoint(checkpoint_folder_base& folder, const found_checkpoint& what,
                               copy_options options = {}, copy_watch_ref watch = {});

}  // namespace v0
}  // namespace llmmem

#if LLMMEM_CHECKPOINT_BODIES
#include <llmmem/checkpoint/detail/copy_body.hpp>
#endif
