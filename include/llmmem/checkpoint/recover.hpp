/// @file
/// `recover`: finds the newest complete checkpoint in several folders of one run.
#pragma once

#include <llmmem/checkpoint/detail/bodies.hpp>
#include <llmmem/checkpoint/search.hpp>
#include <llmmem/checkpoint/storage.hpp>
#include <llmmem/checkpoint/storage_ref.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// A folder that may hold checkpoints of a run.
template <checkpoint_storage Storage>
struct checkpoint_source {
  using storage_type = Storage;

  std::string name;  ///< in texts: "local"
  Storage* storage;  ///< outlives this

  checkpoint_source(std::string called, Storage& of) : name(std::move(called)), storage(&of) {}
};

/// Why part of a source was passed over.
enum class skip_reason : std::uint8_t {
  source,          ///< the source could not be listed: its contents are unknown
  damaged,         ///< the checkpoint is incomplete or damaged
  conflict,        ///< another checkpoint has its generation, in a source named earlier
  not_everywhere,  ///< another rank that recovers together with this one (`replica_source`) cannot load it
  unread,          ///< the checkpoint may be complete, but could not be read
};

using passed_over [[deprecated("its name is skip_reason")]] = skip_reason;

/// Returns the reason in words.
[[nodiscard]] constexpr std::string_view to_string(skip_reason what) noexcept {
  switch (what) {
    case skip_reason::source:
      return "the source could not be listed";
    case skip_reason::damaged:
      return "it is not whole";
    case skip_reason::conflict:
      return "another checkpoint of the same generation";
    case skip_reason::not_everywhere:
      return "not on all ranks";
    case skip_reason::unread:
      return "could not be read";
  }
  return "unknown";
}

/// A part of a source that was passed over.
struct skipped_in_source {
  std::size_t source = 0;  ///< its number
  std::string name{};      ///< its name
  skip_reason what = skip_reason::damaged;
  std::string folder{};  ///< of the checkpoint; empty: the whole source
  std::string why{};
};

/// The result of a recovery, independent of the types of the sources.
struct recovery_result {
  std::optional<found_checkpoint> found{};
  std::size_t source = 0;                    ///< index of the source that has it, in the order of the call
  std::string name{};                        ///< the name of that source
  std::vector<skipped_in_source> skipped{};  ///< sources first, then newest first

  /// Returns whether the sources belong to different runs: see `recover`.
  [[nodiscard]] bool has_conflict() const noexcept {
    for (const skipped_in_source& each : skipped) {
      if (each.what == skip_reason::conflict) return true;
    }
    return false;
  }

  /// Returns in one line what was found where, and what was passed over.
  [[nodiscard]] std::string message() const {
    std::string text = found ? name + ": " + found->folder : std::string("no checkpoint");
    for (const skipped_in_source& each : skipped) {
      text +=
          "; passed over " + each.name + (each.folder.empty() ? "" : ": ") + each.folder + ": " + each.why;
    }
    return text;
  }
};

/// The result of a recovery. The caller owns the storages, which must outlive it.
template <checkpoint_storage... Storages>
class checkpoint_recovery : public recovery_result {
 public:
  explicit checkpoint_recovery(Storages&... of) noexcept : storages_(&of...) {}

  /// Takes the result of a search over these storages.
  void take(recovery_result came_to) noexcept { static_cast<recovery_result&>(*this) = std::move(came_to); }

  /// Calls `work(storage)` with the storage that has the checkpoint, and returns the result.
  /// @throws argument_error  if nothing was found.
  template <class Work>
  decltype(auto) visit(Work&& work) const {
    if (!found) throw argument_error("checkpoint_recovery: no checkpoint was found; check `found` first");
    return visit_at<0>(work);
  }

 private:
  template <std::size_t At, class Work>
  decltype(auto) visit_at(Work& work) const {
    if constexpr (At + 1 < sizeof...(Storages)) {
      if (source != At) return visit_at<At + 1>(work);
    }
    return work(*std::get<At>(storages_));
  }

  std::tuple<Storages*...> storages_;
};

namespace detail {

/// The sources by number.
class source_set {
 public:
  template <class... Storages>
  explicit source_set(const checkpoint_source<Storages>&... sources)
      : storages_{storage_ref(*sources.storage)...}, names_{sources.name...} {}

  [[nodiscard]] std::size_t size() const noexcept { return names_.size(); }
  [[nodiscard]] const std::string& name(std::size_t i) const noexcept { return names_[i]; }
  [[nodiscard]] storage_ref storage(std::size_t i) const noexcept { return storages_[i]; }
  [[nodiscard]] std::vector<checkpoint_id> list(std::size_t i) const {
    return list_checkpoints(storages_[i]);
  }
  [[nodiscard]] checkpoint_manifest manifest(std::size_t i, const checkpoint_id& id) const;

 private:
  std::vector<storage_ref> storages_;
  std::vector<std::string> names_;
};

[[nodiscard]] recovery_result recover_from(const source_set& all, verification how,
                                           const search_patience& waits);

}  // namespace detail

/// Looks for the newest complete checkpoint in all sources.
///
///     const auto recovered = recover(verification::checksums, checkpoint_source("local", local),
///                                    checkpoint_source("durable", durable));
///     if (recovered.found)
///       recovered.visit([&](auto& storage) { load_checkpoint(storage, *recovered.found, wanted, sink); });
///
/// The highest generation wins; for equal ones, the source named earlier: name the fastest first. If a
/// checkpoint is damaged in one source, it is taken from another that has it, before any older one.
/// Everything passed over is recorded with the reason, including a source that cannot be listed at all; the
/// found checkpoint may then be older than the newest one. Like `find_checkpoint`, it retries errors that may
/// pass, and takes no older checkpoint in place of one that could not be read but is not proved damaged.
///
/// Generations are numbers of one run: `mirrored_coordinator` keeps them so. A run that restarted on an empty
/// disk, without its existing copies, uses some of them twice, and the right checkpoint cannot be determined.
/// `recover` detects this if two checkpoints have the same generation but different steps or, for the
/// generation taken, different bytes by their manifests' checksums. The checkpoint of the source named first
/// counts, and each other is recorded as `skip_reason::conflict` (`has_conflict`): ask a person, and move one
/// of the runs to another folder.
///
/// Needs no lock: runs may commit and tidy concurrently. Ranks that must reach the same result, from separate
/// folders or together with peers' memory, pass a `replica_source` first.
///
/// @par Complexity   one list of each source, and `open_checkpoint` for each checkpoint examined.
/// @par Thread safety   any thread.
/// @throws io_error  if no source could be listed. Problems of a checkpoint are recorded, not thrown.
/// @throws unreadable_checkpoint  for a checkpoint that may be complete and is readable in no source, if an
///   older one would be taken instead (`unread_checkpoint::refuse`).
template <checkpoint_storage... Storages>
[[nodiscard]] checkpoint_recovery<Storages...> recover(verification how, const search_patience& waits,
                                                       checkpoint_source<Storages>... sources)
  requires(sizeof...(Storages) > 0)
{
  checkpoint_recovery<Storages...> recovered(*sources.storage...);
  recovered.take(detail::recover_from(detail::source_set(sources...), how, waits));
  return recovered;
}

/// As above, with the default patience.
template <checkpoint_storage... Storages>
[[nodiscard]] checkpoint_recovery<Storages...> recover(verification how,
                                                       checkpoint_source<Storages>... sources)
  requires(sizeof...(Storages) > 0)
{
  return recover(how, search_patience{}, std::move(sources)...);
}

}  // namespace v0
}  // namespace llmmem

#if LLMMEM_CHECKPOINT_BODIES
#include <llmmem/checkpoint/detail/recover_body.hpp>
#endif
