/// @file
/// `copy_checkpoint`: a checkpoint brought to another folder, or folded within its own, proven on the way.
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

/// Which generation a copy is.
enum class copy_generation : std::uint8_t {
  same,  ///< that of the original: the same checkpoint, in another tier
  next,  ///< the next of the folder it goes to: a checkpoint of its own, the newest there
};

/// How a checkpoint is copied.
struct copy_options {
  copy_generation generation = copy_generation::same;
  /// Read and written at once, half and half; all the memory that this takes, beside the manifest. At
  /// least 2.
  std::uint64_t buffer_bytes = std::uint64_t{8} << 20;
};

/// How far a copy has come.
struct copy_progress {
  checkpoint_id id{};        ///< of the copy
  std::uint64_t bytes = 0;   ///< of all files
  std::uint64_t copied = 0;  ///< read, and being written
};

/// Whether a copy goes on.
enum class copy_verdict : std::uint8_t { go_on, stop };

/// Is asked before every half buffer, and before the commit.
template <class W>
concept copy_watch = requires(W& watch, const copy_progress& progress) {
  { watch(progress) } -> std::same_as<copy_verdict>;
};

/// Lets it go on.
struct unwatched_copy {
  [[nodiscard]] copy_verdict operator()(const copy_progress& /*progress*/) const noexcept {
    return copy_verdict::go_on;
  }
};

static_assert(copy_watch<unwatched_copy>);

/// A watch of any type, by reference, for the length of a call; without one a copy goes on.
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
    return ask_ == nullptr ? copy_verdict::go_on : ask_(watch_, progress);
  }

 private:
  void* watch_ = nullptr;
  copy_verdict (*ask_)(void* watch, const copy_progress& progress) = nullptr;
};

/// A copy was told to stop. Nothing is left of it.
class copy_stopped : public error {
 public:
  using error::error;
};

/// What a copy came to.
struct copy_report {
  found_checkpoint copy{};  ///< as `open_checkpoint` would give it
  std::uint64_t bytes = 0;  ///< of all files
};

/// The manifest that a checkpoint would have if it were whole, with no chunks in earlier ones. Equal for a
/// checkpoint and its copies of the same generation.
[[nodiscard]] checkpoint_manifest folded_manifest(const checkpoint_manifest& what);

/// Copies a checkpoint into a folder, by that folder's commit protocol: when this returns, the copy outlasts
/// any crash; when it throws, there is none.
///
///     const checkpoint_search search = find_checkpoint(local, verification::sizes);
///     checkpoint_folder folder(durable);
///     if (search.found) copy_checkpoint(local, *search.found, folder);
///
/// Every byte is held to its chunk's checksum on the way: of a damaged checkpoint there is never a copy. The
/// copy has all its bytes in plain files of its own, also where the original is incremental and takes chunks
/// from earlier ones.
///
/// @param what   must stay while it is copied (`checkpoint_folder::hold`).
/// @param watch  `copy_verdict(const copy_progress&)`: asked before every half buffer, and before the commit.
/// @par Complexity      the bytes of the checkpoint, once read and once written; `buffer_bytes` of memory.
/// @par Thread safety   `to` as every folder's: one thread at a time. `from` is only read.
/// @throws format_error    for a chunk that is damaged: the file, the bytes in it, and both checksums.
/// @throws copy_stopped    when `watch` says so.
/// @throws argument_error  when the generation is to be the same, and is there already.
/// @throws length_error    for a buffer of fewer than 2 bytes.
/// @throws durability_uncertain  as `checkpoint_folder::commit`: the copy can be seen, and may be gone after
///      a crash. Other errors as there, and `storage_error`.
copy_report copy_checkpoint(storage_ref from, const found_checkpoint& what, checkpoint_folder_base& to,
                            const copy_options& options = {}, copy_watch_ref watch = {});

/// Folds the newest checkpoint of a folder, which takes chunks from earlier ones, into one that has all of
/// its own, as the newest of the folder. Once a retention lets the original go, those earlier ones can go
/// with it (`checkpoint_folder::tidy`, which this does not call).
/// @pre no draft of the folder is open: it would be committed as an older one.
/// @par Complexity      as `copy_checkpoint`, also where the original is whole already.
/// @par Thread safety   as every folder's: one thread at a time.
/// @throws argument_error  when it is not the newest: its copy would be taken for newer than what follows it.
///      Other errors as `copy_checkpoint`.
copy_report compact_checkpoint(checkpoint_folder_base& folder, const found_checkpoint& what,
                               copy_options options = {}, copy_watch_ref watch = {});

}  // namespace v0
}  // namespace llmmem

#if LLMMEM_CHECKPOINT_BODIES
#include <llmmem/checkpoint/detail/copy_body.hpp>
#endif
